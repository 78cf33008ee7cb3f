"""Reports about rotary position embedding: single tokens, positions without a table row, gradients, precision."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_allclose, assert_array_equal
from report_helpers import Array, assert_same_row, output_of
from rotary_oracle import exact_error, multiplied, plain, rotated

from attentile import attention, rotary_embedding

pytestmark = pytest.mark.usefixtures("impl")

# ---- B79: one token per batch item ----


@pytest.mark.parametrize("batch", [2, 3, 17])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_b79_every_batch_item_of_a_single_token(batch, width, interleaved):
    row = normal(1, 4, 1, width)
    x = np.repeat(row, batch, axis=0)
    found = rotary_embedding(x, 5, interleaved=interleaved)
    for item in found:
        assert_array_equal(item, found[0])
    assert_allclose(found, rotated(x, [5], interleaved=interleaved), rtol=0, atol=2e-7 * np.abs(x).max())


@pytest.mark.parametrize("interleaved", [False, True])
def test_b79_a_token_alone_is_the_row_of_a_longer_call(interleaved):
    x = normal(3, 4, 10, 128)
    whole = rotary_embedding(x, 5, interleaved=interleaved)
    for i in range(10):
        alone = rotary_embedding(x[:, :, i : i + 1], 5 + i, interleaved=interleaved)
        assert_array_equal(alone, whole[:, :, i : i + 1])  # equal bits, on the twin too


# ---- B81: positions outside the tables ----


@pytest.mark.parametrize("position", [16, 10**9, -1, -17, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("as_first", [False, True])
def test_b81_position_without_a_table_row(position, as_first):
    cos, sin = normal(16, 4), normal(16, 4)
    x, out = normal(1, 2, 3, 8), np.full((1, 2, 3, 8), 7, np.float32)
    positions = position if as_first else np.array([0, 15, position])
    with pytest.raises((IndexError, ValueError), match="rotary_embedding: positions"):
        rotary_embedding(x, positions, cos=cos, sin=sin, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 3), (2, 1, 3), (3, 1), (1, 1)])
def test_b81_positions_of_wrong_shape(shape):
    tables = normal(16, 4), normal(16, 4)
    for options in ({}, {"cos": tables[0], "sin": tables[1]}):
        with pytest.raises(ValueError, match="rotary_embedding: positions has shape"):
            rotary_embedding(normal(2, 2, 3, 8), np.zeros(shape, int), **options)


def test_b81_the_last_row_is_there():
    cos, sin = normal(16, 4, dtype=np.float64), normal(16, 4, dtype=np.float64, seed=1)
    x = normal(2, 2, 1, 8)
    for positions in (15, [15], [[15], [0]]):
        rows = np.broadcast_to(positions, (2, 1)) if np.ndim(positions) == 2 else np.array([15])
        wanted = multiplied(x, cos[rows] + 1j * sin[rows])
        assert_allclose(rotary_embedding(x, positions, cos=cos, sin=sin), wanted, rtol=0, atol=1e-6)


# ---- B99, B100: the gradient, which is the rotation backwards where cos^2 + sin^2 = 1 ----


@pytest.mark.parametrize("interleaved", [False, True])
def test_b99_the_rotation_backwards_is_the_gradient(interleaved):
    x, dy = normal(2, 3, 5, 8, dtype=np.float64), normal(2, 3, 5, 8, dtype=np.float64, seed=1)
    call: dict[str, Any] = dict(rotary_dim=4, interleaved=interleaved)
    y, dx = rotary_embedding(x, 7, **call), rotary_embedding(dy, 7, inverse=True, **call)
    assert_array_equal(dx[..., 4:], dy[..., 4:])
    assert abs((dy * y).sum() - (dx * x).sum()) < 1e-12
    assert_allclose(rotary_embedding(y, 7, inverse=True, **call), x, rtol=0, atol=1e-15 * 4)
    assert np.abs(y[..., :4] - x[..., :4]).max() > 0.1


def matrix(width: int, **options: Any) -> Array:
    """Column j: what becomes of unit vector j."""
    return rotary_embedding(np.eye(width)[:, None], 3, **options)[:, 0].T


@pytest.mark.parametrize("interleaved", [False, True])
def test_b100_inverse_of_tables_that_are_no_rotation(interleaved):
    """It inverts the matrix of the forward map; the gradient is its transpose."""
    cos, sin = normal(9, 3, dtype=np.float64), normal(9, 3, dtype=np.float64, seed=1)
    call: dict[str, Any] = dict(cos=cos, sin=sin, rotary_dim=6, interleaved=interleaved)
    forward, backward = matrix(8, **call), matrix(8, inverse=True, **call)
    assert_allclose(backward @ forward, np.eye(8), rtol=0, atol=1e-14)
    assert_allclose(backward, np.linalg.inv(forward), rtol=0, atol=1e-13)
    assert np.abs(backward - forward.T).max() > 0.1  # no rotation: the transpose is something else
    for tables in (call, call | {"cos": cos.astype(np.float16), "sin": sin.astype(np.float16)}):
        assert_allclose(matrix(8, inverse="transpose", **tables), matrix(8, **tables).T, rtol=0, atol=1e-15)
    size = np.hypot(cos, sin)
    unit: dict[str, Any] = call | {"cos": cos / size, "sin": sin / size}
    assert_allclose(matrix(8, inverse=True, **unit), matrix(8, **unit).T, rtol=0, atol=1e-15)


def test_b100_gradient_of_a_scaling_with_a_factor():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    call: dict[str, Any] = dict(scaling=yarn, rotary_dim=6)
    forward = matrix(8, **call)
    assert np.linalg.norm(forward[:, 0]) > 1.1
    assert_allclose(matrix(8, inverse="transpose", **call), forward.T, rtol=0, atol=1e-15)


def test_b100_tables_of_full_width_are_refused():
    """Their second half may differ from the first, which no rotation of pairs has a meaning for."""
    full = np.concatenate([normal(9, 4), 0.1 * normal(9, 4)], axis=1)
    with pytest.raises(ValueError, match=r"cos has shape .*\(of a table that repeats its columns"):
        rotary_embedding(normal(1, 2, 3, 8), cos=full, sin=full)


# ---- B103: angles in full precision, whatever the dtype ----


@pytest.mark.parametrize("interleaved", [False, True])
def test_b103_half_precision_input_at_every_position(interleaved):
    x = np.ones((1, 2048, 32), np.float16)
    found = rotary_embedding(x, interleaved=interleaved)
    assert found.dtype == np.float16
    assert_allclose(found, rotated(x, interleaved=interleaved), rtol=0, atol=1e-3)


def test_b103_the_reported_angle():
    frequency = plain(32)[1]
    assert abs(1857 * frequency - 1044.268) < 1e-3
    found = rotary_embedding(np.eye(32, dtype=np.float16)[1:2], 1857)
    assert abs(float(found[0, 1]) - 0.306693) < 2e-4


@pytest.mark.parametrize("position", [10**6, 2**24 + 1, 2**40 + 1])
def test_b103_far_positions(position):
    x = normal(1, 64)
    bound = 2.0**-23 * float(np.abs(x).max())
    assert exact_error(rotary_embedding(x, position)[0], x[0], position) <= bound


# ---- B106: odd widths ----


def test_b106_odd_rotary_width_is_refused_at_once():
    for width, dim in [(65, None), (65, 33), (65, 65), (1, None), (3, 1)]:
        with pytest.raises(ValueError, match=r"rotary_embedding: .* is (65|33|1); "):
            rotary_embedding(normal(1, 2, 3, width), rotary_dim=dim)


@pytest.mark.parametrize("interleaved", [False, True])
def test_b106_even_rotary_width_of_an_odd_head(interleaved):
    x = normal(1, 2, 3, 65)
    found = rotary_embedding(x, 9, rotary_dim=64, interleaved=interleaved)
    assert_array_equal(found[..., 64], x[..., 64])
    wanted = rotated(x[..., :64], np.arange(9, 12), interleaved=interleaved)
    assert_allclose(found[..., :64], wanted, rtol=0, atol=5e-7)


# ---- B108, B109: widths and pairs ----


def test_b108_partial_rotary_uses_its_own_width():
    found = rotary_embedding(np.arange(1.0, 9.0)[None], 3, rotary_dim=4)[0]
    c, s = np.cos([3, 0.03]), np.sin([3, 0.03])
    wanted = [c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + s[0], 4 * c[1] + 2 * s[1], 5, 6, 7, 8]
    assert_allclose(found, wanted, rtol=0, atol=1e-15)


def test_b109_both_layouts_of_pairs():
    x = np.array([[1.0, 2.0, 3.0, 4.0]])
    c, s = np.cos([1, 0.1]), np.sin([1, 0.1])
    halves = [c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + s[0], 4 * c[1] + 2 * s[1]]
    neighbours = [c[0] - 2 * s[0], 2 * c[0] + s[0], 3 * c[1] - 4 * s[1], 4 * c[1] + 3 * s[1]]
    assert_allclose(rotary_embedding(x, 1, base=100.0)[0], halves, rtol=0, atol=1e-15)
    assert_allclose(rotary_embedding(x, 1, base=100.0, interleaved=True)[0], neighbours, rtol=0, atol=1e-15)


@pytest.mark.parametrize("interleaved", [False, True])
def test_b109_norms_are_kept_and_products_depend_on_the_distance(interleaved):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 32))
    products = []
    for shift in rng.integers(-(10**6), 10**6, 20):
        a = rotary_embedding(q, 40 + shift, interleaved=interleaved)
        b = rotary_embedding(k, 11 + shift, interleaved=interleaved)
        products.append(float((a * b).sum()))
        pairs = a.reshape(16, 2) if interleaved else a.reshape(2, 16).T
        before = q.reshape(16, 2) if interleaved else q.reshape(2, 16).T
        assert_allclose(np.hypot(*pairs.T), np.hypot(*before.T), rtol=1e-15)
    assert_allclose(products, products[0], rtol=0, atol=2e-14)
    other = rotary_embedding(q, 41, interleaved=interleaved) * rotary_embedding(k, 11, interleaved=interleaved)
    assert abs(other.sum() - products[0]) > 1e-3


# ---- B110: small heads ----


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_b110_small_heads(width, interleaved, impl):
    q, k, v = (normal(3, 40, width, seed=seed) for seed in range(3))
    turned = [rotary_embedding(x, interleaved=interleaved) for x in (q, k)]
    for found, x in zip(turned, (q, k), strict=True):
        assert_allclose(found, rotated(x, interleaved=interleaved), rtol=0, atol=5e-7)
    out = attention(*turned, v, causal=True)
    shifted = attention(*(rotary_embedding(x, 1000, interleaved=interleaved) for x in (q, k)), v, causal=True)
    assert_allclose(shifted, out, rtol=0, atol=5e-6)  # only distances count
    assert_same_row(impl, attention(turned[0][:, 39:], turned[1], v)[:, 0], out[:, 39])


# ---- B111: dynamic scaling below the trained length ----


def test_b111_dynamic_scaling():
    x = normal(1, 2, 1, 64, dtype=np.float64)
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}
    for length in (1, 512, 2048):
        found = rotary_embedding(x, length - 1, base=1000.0, scaling=scaling)
        assert_array_equal(found, rotary_embedding(x, length - 1, base=1000.0))
    grown = 1000.0 * (2 * 4096 / 2048 - 1) ** (64 / 62)
    found = rotary_embedding(x, 4095, base=1000.0, scaling=scaling)
    assert_allclose(found, rotated(x, [4095], plain(64, grown)), rtol=0, atol=5e-12)


def test_b111_always_finite():
    x = normal(1, 3, 64)
    for factor in (1.0, 2.0, 1e6):
        for trained in (2, 2048):
            scaling = {"type": "dynamic", "factor": factor, "max_position_embeddings": trained}
            for position in (-(2**49), -5, 0, 5, 2**49):
                assert np.isfinite(rotary_embedding(x, position, scaling=scaling)).all()


# ---- B112: slices and views ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_b112_views_equal_their_copies(dtype, interleaved):
    big = normal(1, 16, 10, 192, dtype=dtype)
    before = big.copy()
    views = {
        "slice of the width": big[..., 128:192],
        "heads inside": normal(1, 10, 16, 64, dtype=dtype).swapaxes(1, 2),
        "reversed": big[:, :, ::-1, 128:192],
        "every second head": big[:, ::2, :, 3:67],
    }
    for name, x in views.items():
        wanted = rotary_embedding(x.copy(), 5, interleaved=interleaved)
        assert_array_equal(rotary_embedding(x, 5, interleaved=interleaved), wanted, err_msg=name)
    assert_array_equal(big, before)
    part = big[..., 128:192]
    wanted = rotary_embedding(part.copy(), 5, interleaved=interleaved)
    assert rotary_embedding(part, 5, interleaved=interleaved, out=part) is part
    assert_array_equal(big[..., 128:192], wanted)
    assert_array_equal(big[..., :128], before[..., :128])


def test_b112_nothing_outside_the_arrays_is_touched(impl):
    """Arrays end at the last byte of a page, the next one is closed: an access beyond them kills the process."""
    if os.name != "posix":
        pytest.skip("needs mprotect")
    code = """
        import ctypes, mmap, sys
        import numpy as np
        import attentile
        libc, page, pages = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, []
        def at_end(shape, dtype, values=None):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            room = mmap.mmap(-1, (size // page + 2) * page)
            start = ctypes.addressof(ctypes.c_char.from_buffer(room))
            end = (size // page + 1) * page
            assert libc.mprotect(ctypes.c_void_p(start + end), ctypes.c_size_t(page), 0) == 0
            pages.append(room)
            array = np.frombuffer(room, np.uint8)[end - size : end].view(dtype).reshape(shape)
            array[...] = 1 if values is None else values
            return array
        name = sys.argv[1]
        attentile.use_backend("numpy") if name == "reference" else attentile.use_backend("compiled", name)
        for dtype in (np.float32, np.float64):
            for width in (2, 4, 6, 10, 14, 18, 30, 34, 62, 66):
                for interleaved in (False, True):
                    x, out = at_end((3, 5, width), dtype), at_end((3, 5, width), dtype)
                    call = dict(interleaved=interleaved, out=out)
                    attentile.rotary_embedding(x, 7, **call)
                    attentile.rotary_embedding(x, at_end((5,), np.int64, [1, 2, 3, 4, 5]), **call)
                    cos, sin = at_end((6, width // 2), dtype), at_end((6, width // 2), dtype)
                    attentile.rotary_embedding(x, [1, 5, 3, 5, 5], cos=cos, sin=sin, **call)
        print("alive")
    """
    assert output_of("\n".join(line[8:] for line in code.splitlines()), impl) == "alive"
