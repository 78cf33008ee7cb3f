"""rotary_embedding(): values, positions, bits, tables, the inverse, memory. test_rotary_scaling.py has the rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import FMA_HERE, two_fma_isas
from helpers import dtype_of, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rotary_oracle import exact_error, members, multiplied, plain, rotated

from attentile import num_threads, rotary_embedding, use_backend
from attentile.runtime import backend

pytestmark = pytest.mark.usefixtures("impl")

WIDTHS = [2, 4, 6, 14, 16, 18, 30, 34, 64, 66, 128, 256, 1030]  # 1030: three strips of pairs
# float32: half a unit in the last place of a result between 1 and 2, one rounding. float64: two units of 1.0; measured
# 2.7e-16 (the twin 3.1e-16).
ONCE = {np.float32: 2.0**-24 * 1.0001, np.float64: 4.5e-16}
FAR = [0, 1, 63, 64, 1000, 999_999, 10**6, -1, -64, -65, -(10**6), 2**40 + 1, 2**50 - 1, -(2**50)]


def uniform(*shape: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(dtype)


# ---- values ----


@pytest.mark.parametrize("dtype", ONCE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_error_against_fifty_digits(dtype, interleaved):
    for position in FAR:
        for width in (2, 14, 66):
            x = uniform(1, width, dtype=dtype, seed=abs(position) % 1000)
            found = rotary_embedding(x, position, interleaved=interleaved)
            assert found.dtype == dtype
            assert exact_error(found[0], x[0], position, interleaved=interleaved) <= ONCE[dtype]


@pytest.mark.parametrize("base", [500_000, 1e300, 2.0, 1.0, 0.5, 1e-6])
def test_other_bases(base):
    for position in (1, 100, 99_999):
        x = uniform(1, 34)
        assert exact_error(rotary_embedding(x, position, base=base)[0], x[0], position, base) <= ONCE[np.float64]


def test_the_oracle_tells_plain_float64_from_right():
    x = uniform(1, 64)
    assert exact_error(rotated(x, [10**6])[0], x[0], 10**6) > 1e-12


@pytest.mark.parametrize("dtype", ONCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_agrees_with_complex_multiplication(width, interleaved, dtype):
    x = uniform(2, 3, 70, width, dtype=dtype)
    found = rotary_embedding(x, interleaved=interleaved)
    np.testing.assert_allclose(found, rotated(x, interleaved=interleaved), rtol=0, atol=ONCE[dtype] + 4e-14)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "dim"), [(8, 2), (9, 4), (65, 64), (67, 30), (128, 64), (1100, 1040)])
def test_partial_rotary_copies_the_rest(width, dim, interleaved):
    x = uniform(2, 2, 20, width, dtype=np.float32)
    x[..., dim:].view(np.uint32)[...] |= 0x7FC00000  # NaN of many payloads: copied, not computed with
    found = rotary_embedding(x, 3, rotary_dim=dim, interleaved=interleaved)
    same_bits(found[..., dim:], x[..., dim:])
    wanted = rotated(x[..., :dim], np.arange(3, 23), interleaved=interleaved)
    np.testing.assert_allclose(found[..., :dim], wanted, rtol=0, atol=ONCE[np.float32] + 1e-14)


def test_layouts_give_the_same_bits():
    x = uniform(1, 2, 9, 40, dtype=np.float32)
    beside = np.empty_like(x)
    for to, part in zip(members(beside, 40, True), members(x, 40, False), strict=True):
        to[...] = part
    found = rotary_embedding(beside, -4, interleaved=True)
    wanted = rotary_embedding(x, -4)
    for a, b in zip(members(found, 40, True), members(wanted, 40, False), strict=True):
        np.testing.assert_array_equal(a, b)


def test_position_zero_changes_nothing():
    x = uniform(2, 5, 12)
    np.testing.assert_array_equal(rotary_embedding(x, np.zeros(5, int)), x)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 4, 3, 5, 8), (1, 2, 1, 3, 5, 8)])
def test_any_number_of_axes(shape):
    x = uniform(*shape)
    np.testing.assert_allclose(rotary_embedding(x), rotated(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (0, 2, 3, 5, 8)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_empty_axes(shape, dtype):
    x = np.empty(shape, dtype)
    for positions in (None, 7, np.arange(shape[-2])):
        found = rotary_embedding(x, positions)
        assert (found.shape, found.dtype) == (shape, dtype)
    out = np.empty(shape, dtype)
    assert rotary_embedding(x, scaling={"type": "dynamic", "factor": 2, "max_position_embeddings": 8}, out=out) is out
    table = np.ones((9, 4))
    assert rotary_embedding(x, cos=table, sin=table, inverse=True).shape == shape


def test_nan_and_inf_stay_in_their_pair():
    x = np.ones((1, 3, 8), np.float32)
    x[0, 1, 2] = np.nan
    x[0, 2, 5] = np.inf
    found = rotary_embedding(x, 1)
    np.testing.assert_array_equal(np.argwhere(~np.isfinite(found)), [[0, 1, 2], [0, 1, 6], [0, 2, 1], [0, 2, 5]])


def test_strict_floating_point_errors_of_the_caller_do_not_matter():
    with np.errstate(all="raise"):
        rotary_embedding(np.full((2, 8), 3e38, np.float32), 1)
        rotary_embedding(np.full((2, 8), 65504, np.float16), 1)
        rotary_embedding(np.full((4, 600), 1e-310), base=1e308)


# ---- positions ----


def test_positions_per_item_in_any_layout():
    x = uniform(3, 2, 6, 10)
    positions = np.random.default_rng(1).integers(-500, 500, (3, 6))
    wanted = rotated(x, positions)
    wide = np.full((6, 9), 99)
    wide[:, ::3] = positions.T
    big_endian = positions.astype(">i4")
    read_only = positions.astype(np.int16)
    read_only.flags.writeable = False
    for given_positions in (positions, positions.tolist(), wide[:, ::3].T, big_endian, read_only):
        np.testing.assert_allclose(rotary_embedding(x, given_positions), wanted, rtol=0, atol=1e-12)


def test_positions_broadcast_over_leading_axes():
    x = uniform(2, 3, 2, 4, 8)
    for shape in [(4,), (1, 4), (3, 4), (2, 1, 4), (1, 1, 4), (2, 3, 4)]:
        positions = np.random.default_rng(2).integers(0, 90, shape)
        wanted = rotated(x, np.broadcast_to(positions, (2, 3, 4)))
        np.testing.assert_allclose(rotary_embedding(x, positions), wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("first", [5, np.int32(5), np.uint8(5), np.array(5)])
def test_an_integer_is_the_first_position(first):
    x = uniform(2, 300, 8)
    same_bits(rotary_embedding(x, first), rotary_embedding(x, np.arange(5, 305)))


def test_unsigned_positions_do_not_wrap():
    x = uniform(1, 2, 8)
    same_bits(rotary_embedding(x, np.array([0, 255], np.uint8)), rotary_embedding(x, [0, 255]))
    same_bits(rotary_embedding(x, np.array([3, 2**40], np.uint64)), rotary_embedding(x, [3, 2**40]))


def test_limits_of_positions_are_inclusive():
    x = uniform(1, 3, 8)
    same_bits(rotary_embedding(x, 2**50 - 2)[:, 2:], rotary_embedding(x[:, 2:], [2**50]))
    same_bits(rotary_embedding(x, -(2**50))[:, :1], rotary_embedding(x[:, :1], [-(2**50)]))


# ---- bits ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}}]
)
def test_a_row_depends_on_its_values_and_position_only(dtype, interleaved, options):
    x = uniform(3, 4, 150, 46, dtype=dtype)
    call = dict(interleaved=interleaved, rotary_dim=42, **options)
    whole = rotary_embedding(x, -70, **call)
    same_bits(rotary_embedding(x[1], -70, **call), whole[1])
    same_bits(rotary_embedding(x[1, 2], -70, **call), whole[1, 2])
    for i in (0, 5, 6, 69, 70, 71, 133, 134, 149):
        same_bits(rotary_embedding(x[:, :, i : i + 1], i - 70, **call), whole[:, :, i : i + 1])
    order = np.random.default_rng(4).permutation(150)
    same_bits(rotary_embedding(x[:, :, order], order - 70, **call), whole[:, :, order])
    per_item = np.stack([order, order[::-1], np.arange(150)]) - 70
    shuffled = np.take_along_axis(x, per_item[:, None, :, None] + 70, axis=2)
    wanted = np.take_along_axis(whole, per_item[:, None, :, None] + 70, axis=2)
    same_bits(rotary_embedding(shuffled, per_item, **call), wanted)
    for threads in (1, 2, 5):
        with num_threads(threads):
            same_bits(rotary_embedding(x, -70, **call), whole)


@pytest.mark.parametrize(
    ("shape", "interleaved"),
    [
        ((1, 33, 250, 64), False),
        ((40, 2, 90, 80), True),
        ((9, 1000, 1, 64), False),
        ((1, 1, 8200, 66), True),
        ((2, 1, 130, 2100), False),
        ((2, 1, 130, 2100), True),
    ],
)
def test_large_calls_on_threads(shape, interleaved):
    """More than 2^19 elements: several tasks, split by rows or by heads, with and without positions per item."""
    x = uniform(*shape, dtype=np.float32)
    positions = np.random.default_rng(5).integers(-99, 99, (shape[0], shape[2]))
    for at in (None, 11, positions[0], positions):
        results = []
        for threads in (1,) if backend.active is None else (1, 2, 7):  # the twin has one thread
            with num_threads(threads):
                results.append(rotary_embedding(x, at, interleaved=interleaved))
        for other in results[1:]:
            same_bits(other, results[0])
        where = np.arange(shape[2]) + (at or 0) if at is None or isinstance(at, int) else at
        wanted = rotated(x, where, interleaved=interleaved)
        np.testing.assert_allclose(results[0], wanted, rtol=0, atol=ONCE[np.float32] + 1e-11)


def test_concurrent_callers():
    xs = [uniform(1, 9, 700, 128, dtype=np.float32, seed=seed) for seed in range(4)]
    wanted = [rotary_embedding(x, 3) for x in xs]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(3):
            for found, right in zip(callers.map(lambda x: rotary_embedding(x, 3), xs), wanted, strict=True):
                same_bits(found, right)


@two_fma_isas
@pytest.mark.parametrize("options", [{}, {"inverse": True}, {"rotary_dim": 18, "interleaved": True}, {"base": 77.0}])
def test_fma_instruction_sets_agree(options):
    for dtype in (np.float32, np.float64, np.float16):
        x, results = uniform(2, 3, 90, 34, dtype=dtype), []
        for isa in FMA_HERE:
            with use_backend("compiled", isa):
                results.append(rotary_embedding(x, 2**30, **options))
        for other in results[1:]:
            same_bits(other, results[0])


# ---- dtypes ----


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(name):
    dtype = dtype_of(name)
    x = (uniform(3, 5, 70, 66) * 3).astype(dtype)
    found = rotary_embedding(x, 1000, rotary_dim=64)
    assert found.dtype == dtype
    exact = rotary_embedding(x.astype(np.float64), 1000, rotary_dim=64)
    near = np.abs(found.astype(np.float64) - exact)
    both_sides = np.abs(np.stack([np.nextafter(found, dtype.type(s)).astype(np.float64) for s in (-9, 9)]) - exact)
    assert (near <= both_sides.min(axis=0)).all()


@pytest.mark.parametrize(("name", "bits"), [("float16", 10), ("bfloat16", 7)])
def test_half_precision_has_no_second_rounding(name, bits):
    """1 + 2^-(bits + 1) + what float32 has no room for: just above a tie, which float32 would round to the tie."""
    dtype = dtype_of(name)
    cos = np.array([[1 + 2.0 ** -(bits + 1) + sign * 2.0**-40] for sign in (1, 0, -1)])
    found = rotary_embedding(np.tile(np.array([1, 0], dtype), (3, 1)), cos=cos, sin=np.zeros((3, 1)))
    assert found[:, 0].astype(float).tolist() == [1 + 2.0**-bits, 1.0, 1.0]
    found = rotary_embedding(np.tile(np.array([-1, 0], dtype), (3, 1)), cos=cos, sin=np.zeros((3, 1)))
    assert found[:, 0].astype(float).tolist() == [-1 - 2.0**-bits, -1.0, -1.0]


def test_half_precision_in_many_chunks():
    for shape in [(2, 5, 700, 64), (900, 3, 1, 64), (70, 1, 33, 64), (1, 300, 3, 256)]:
        x = uniform(*shape, dtype=np.float16)
        positions = np.random.default_rng(6).integers(0, 99, (shape[0], shape[2]))
        for at in (None, 9, positions[0], positions):
            found, wanted = rotary_embedding(x, at), rotary_embedding(x.astype(np.float64), at).astype(np.float16)
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.int16])
def test_integers_give_float64(dtype):
    x = np.random.default_rng(7).integers(0, 2, (2, 5, 8)).astype(dtype)
    found = rotary_embedding(x)
    assert found.dtype == np.float64
    same_bits(found, rotary_embedding(x.astype(np.float64)))
    assert rotary_embedding([[1, 0]], [0]).tolist() == [[1.0, 0.0]]


# ---- the caller's tables ----


def tables(rows: int, pairs: int, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of no rotation: any sign, sizes from 1/2 to 2."""
    rng = np.random.default_rng(8)
    size, sign = rng.uniform(0.5, 2, (2, rows, pairs)), np.sign(rng.standard_normal((2, rows, pairs)))
    cos, sin = (size * sign).astype(dtype)
    return cos, sin


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("width", "dim"), [(8, 8), (67, 34), (700, 600)])
def test_tables(width, dim, dtype, interleaved):
    x, (cos, sin) = uniform(2, 3, 20, width), tables(50, dim // 2, dtype)
    call = dict(cos=cos, sin=sin, rotary_dim=dim, interleaved=interleaved)
    positions = np.random.default_rng(9).integers(0, 50, (2, 20))
    for given_positions, rows in [
        (None, np.arange(20)),
        (30, np.arange(30, 50)),
        (positions[0], positions[0]),
        (positions, positions),
    ]:
        factors = cos.astype(np.float64)[rows] + 1j * sin.astype(np.float64)[rows]
        found = rotary_embedding(x, given_positions, **call)
        np.testing.assert_allclose(found, multiplied(x, factors, interleaved), rtol=0, atol=2e-15)


def test_tables_of_any_layout_and_dtype():
    x, (cos, sin) = uniform(2, 9, 8, dtype=np.float32), tables(20, 4, np.float32)
    wanted = rotary_embedding(x, 5, cos=cos, sin=sin)
    every_second = np.repeat(cos, 2, axis=1)[:, ::2]
    misaligned = np.zeros(cos.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(cos.shape)
    misaligned[...] = cos
    for relaid in (
        np.asfortranarray(cos),
        every_second,
        misaligned,
        cos.astype(">f4"),
        cos.astype(np.float64),
        cos[::-1][::-1],
    ):
        same_bits(rotary_embedding(x, 5, cos=relaid, sin=sin), wanted)
        same_bits(rotary_embedding(x, np.arange(5, 14), cos=relaid, sin=sin), wanted)
    for name in ("float16", "bfloat16"):
        low = cos.astype(dtype_of(name)), sin.astype(dtype_of(name))
        exact = [table.astype(np.float32) for table in low]
        same_bits(rotary_embedding(x, cos=low[0], sin=low[1]), rotary_embedding(x, cos=exact[0], sin=exact[1]))
    many = np.random.default_rng(10).integers(0, 20, (30, 9))  # more positions than rows of the table
    x = uniform(30, 1, 9, 8)
    same_bits(
        rotary_embedding(x, many, cos=cos.astype(np.float16), sin=sin.astype(np.float16)),
        rotary_embedding(x, many, cos=cos.astype(np.float16).astype(float), sin=sin.astype(np.float16).astype(float)),
    )


# ---- the inverse ----


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_undoes_and_is_the_transpose(interleaved):
    x, dy = uniform(2, 3, 70, 42), uniform(2, 3, 70, 42, seed=1)
    call = dict(rotary_dim=36, interleaved=interleaved)
    y, dx = rotary_embedding(x, 999_000, **call), rotary_embedding(dy, 999_000, inverse=True, **call)
    np.testing.assert_allclose(rotary_embedding(y, 999_000, inverse=True, **call), x, rtol=0, atol=1e-15)
    assert abs((dy * y).sum() - (dx * x).sum()) < 1e-11


def test_inverse_with_tables_divides():
    x, (cos, sin) = uniform(2, 3, 20, 14), tables(40, 7)
    cos[3, 2], sin[3, 2] = 0, -3.0
    cos[4, 2], sin[4, 2] = 1e-200, 2e-200  # its squares are 0 in float64
    positions = np.random.default_rng(11).integers(0, 40, (2, 20))
    for at in (0, 20, positions[0], positions):
        y = rotary_embedding(x, at, cos=cos, sin=sin)
        np.testing.assert_allclose(rotary_embedding(y, at, cos=cos, sin=sin, inverse=True), x, rtol=0, atol=4e-15)


# ---- memory ----

OUTS = {
    "contiguous": lambda room: room[:2, :3, :9, :12],
    "heads inside": lambda room: room[:2, :9, :3, :12].swapaxes(1, 2),
    "rows reversed": lambda room: room[:2, :3, 8::-1, :12],
    "every second row": lambda room: room[:2, :3, :18:2, 5:17],
    "every second column": lambda room: room[:2, :3, :9, :24:2],
    "columns reversed": lambda room: room[:2, :3, :9, 11::-1],
    "transposed": lambda room: room[:2, :3, :12, :9].swapaxes(2, 3),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("layout", OUTS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides_of_x_and_out(layout, dtype, interleaved):
    x = uniform(2, 3, 9, 12, dtype=dtype)
    wanted = rotary_embedding(x, 5, rotary_dim=10, interleaved=interleaved)
    call = dict(rotary_dim=10, interleaved=interleaved)
    room = np.full((3, 20, 20, 30), 7, dtype)
    out = OUTS[layout](room)
    assert rotary_embedding(x, 5, out=out, **call) is out
    same_bits(out, wanted)
    out[...] = 7
    assert (room == 7).all(), "written beside out"
    out[...] = x
    out.flags.writeable = False
    same_bits(rotary_embedding(out, 5, **call), wanted)
    same_bits(out, x)
    out = OUTS[layout](room)
    assert rotary_embedding(out, 5, out=out, **call) is out  # in place
    same_bits(out, wanted)
    out[...] = 7
    assert (room == 7).all(), "written beside out"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_misaligned_and_byte_swapped(dtype):
    x = uniform(2, 9, 12, dtype=dtype)
    wanted, size = rotary_embedding(x), x.nbytes
    misaligned = np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(x.shape)
    misaligned[...] = x
    assert not misaligned.flags.aligned
    same_bits(rotary_embedding(misaligned), wanted)
    assert rotary_embedding(misaligned, out=misaligned) is misaligned
    same_bits(misaligned, wanted)
    same_bits(rotary_embedding(x.astype(x.dtype.newbyteorder())), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 2, 3, 4, 6), (4, 6)])
@pytest.mark.parametrize("shift", [-8, -6, -1, 1, 3, 6, 24])
def test_partial_overlap_of_x_and_out(shift, shape, dtype):
    size = int(np.prod(shape))
    room = uniform(size + 60, dtype=dtype)
    x, out = room[30 : 30 + size].reshape(shape), room[30 + shift : 30 + shift + size].reshape(shape)
    wanted = rotary_embedding(x.copy())
    assert rotary_embedding(x, out=out) is out
    same_bits(out, wanted)


def test_out_reversed_over_x():
    x = uniform(1, 2, 7, 6)
    wanted = rotary_embedding(x.copy())
    out = x[:, :, ::-1]
    rotary_embedding(x, out=out)
    same_bits(out, wanted)


def test_axes_that_do_not_fold():
    room = np.full((3, 5, 4, 2, 5, 8), 7.0, np.float32)
    out = room[:2, ::2, ::3]
    x = uniform(*out.shape, dtype=np.float32)
    wanted = rotary_embedding(x)
    assert rotary_embedding(x, out=out) is out
    same_bits(out, wanted)
    out[...] = x
    same_bits(rotary_embedding(out), wanted)
    rotary_embedding(out, out=out)
    same_bits(out, wanted)
    out[...] = 7
    assert (room == 7).all()


def test_out_that_shares_memory_with_tables_or_positions():
    """200 rows: the first ones are written before the tables and positions of the last ones are read."""
    x, (cos, sin) = uniform(1, 200, 8), tables(200, 4)
    wanted = rotary_embedding(x, cos=cos, sin=sin)
    room = np.concatenate([cos.ravel(), sin.ravel()])
    inside = room[:800].reshape(200, 4), room[800:].reshape(200, 4)
    same_bits(rotary_embedding(x, cos=inside[0], sin=inside[1], out=room.reshape(1, 200, 8)), wanted)
    numbers = np.arange(1600)
    wanted = rotary_embedding(x, numbers[1400:].copy())
    same_bits(rotary_embedding(x, numbers[200:400] + 1200), wanted)
    numbers[:200] = numbers[1400:]
    same_bits(rotary_embedding(x, numbers[:200], out=numbers.view(np.float64).reshape(1, 200, 8)), wanted)


# ---- mixtures ----


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mixtures(data):
    lead = data.draw(st.lists(st.integers(1, 3), max_size=2))
    heads, rows, width = (data.draw(st.integers(low, high)) for low, high in ((1, 4), (1, 40), (2, 70)))
    dim = 2 * data.draw(st.integers(1, width // 2))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    interleaved, inverse = data.draw(st.booleans()), data.draw(st.booleans())
    base = data.draw(st.floats(1.0, 1e6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = rng.uniform(-1, 1, (*lead, heads, rows, width)).astype(dtype)
    positions = rng.integers(-300, 300, (*lead, rows))
    wanted = rotated(x, -positions if inverse else positions, plain(dim, base), interleaved)
    if data.draw(st.booleans()):  # stored with heads inside
        x = np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
    out = x if data.draw(st.booleans()) else None
    found = rotary_embedding(x, positions, base=base, rotary_dim=dim, interleaved=interleaved, inverse=inverse, out=out)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=ONCE[dtype] + 2e-13)


def test_rotary_without_rows(impl):
    assert rotary_embedding(np.ones((2, 0, 8), np.float32)).shape == (2, 0, 8)
