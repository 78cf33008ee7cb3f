"""Reports about gradients: rows without keys, shared heads, alignments, layouts, empty axes, the bias alone, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import most_allocated, normal
from numpy.testing import assert_allclose, assert_array_equal
from oracle import allowed_keys, gradients
from report_helpers import Array, qkv

from attentile import AttentionGradients, attention, attention_backward, attention_vjp

pytestmark = pytest.mark.usefixtures("impl")


def backward(dout: Array, q: Array, k: Array, v: Array, **options: Any) -> AttentionGradients:
    return attention_vjp(q, k, v, **options)[1](dout)


def check(dout: Array, q: Array, k: Array, v: Array, **options: Any) -> AttentionGradients:
    """Compared with the oracle, number by number, and with central differences of attention() itself."""
    found = backward(dout, q, k, v, **options)
    expected = gradients(dout, None, q, k, v, allowed_keys((*q.shape[:-1], k.shape[-2]), **options), **options)
    arrays = {"q": q, "k": k, "v": v}
    for name, gradient in zip("qkv", found, strict=False):
        assert gradient is not None
        assert_allclose(gradient, expected[name], rtol=0, atol=1e-12)
        direction = normal(*gradient.shape, dtype=np.float64, seed=9)
        up, down = (
            (attention(**{**arrays, name: arrays[name] + e * direction}, **options) * dout).sum() for e in (1e-5, -1e-5)
        )
        assert abs((up - down) / 2e-5 - (gradient * direction).sum()) < 1e-7
    return found


# ---- B91: a row without keys ----


@pytest.mark.parametrize("used", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["band and padding", "mask", "bias"])
def test_b91_a_row_without_keys_gives_no_gradient(kind, used):
    q, k, v = qkv((2, 2, 4, 4), dtype=np.float64)
    dout = normal(2, 2, 4, 4, dtype=np.float64, seed=1)
    dout[:, :, 3] *= used
    seen = np.abs(np.arange(4)[:, None] - np.arange(4)) <= 1
    seen &= np.arange(4) < 2  # row 3 sees the keys 2 and 3, which are padding
    options: dict[str, Any] = {"window": (1, 1), "key_lengths": 2}
    if kind != "band and padding":
        options = {"mask": seen} if kind == "mask" else {"bias": np.where(seen, 0.0, -np.inf)}
    found = check(dout, q, k, v, **options)
    assert found.dq is not None
    assert_array_equal(found.dq[:, :, 3], 0)
    rows = {"mask": seen[:3]}
    shorter = backward(dout[:, :, :3], q[:, :, :3], k, v, **rows)
    for one, other in ((found.dk, shorter.dk), (found.dv, shorter.dv)):
        assert one is not None
        assert_allclose(one, other, rtol=0, atol=1e-14)


# ---- B93: shared heads ----


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_b93_gradients_of_shared_heads_are_sums_over_their_group(kv_heads):
    q, k, v = qkv((2, 4, 5, 3), kv_heads=kv_heads, keys=6, dtype=np.float64)
    dout = normal(2, 4, 5, 3, dtype=np.float64, seed=1)
    found = check(dout, q, k, v)
    group = 4 // kv_heads
    apart = backward(dout, q, *(np.repeat(x, group, axis=1) for x in (k, v)))
    for one, other in ((found.dk, apart.dk), (found.dv, apart.dv)):
        assert one is not None
        assert other is not None
        assert one.shape == k.shape
        assert_allclose(one, other.reshape(2, kv_heads, group, 6, 3).sum(axis=2), rtol=0, atol=1e-14)


# ---- B96: causal order of as many queries as there are not keys ----


@pytest.mark.parametrize("window", [None, (2, 0)], ids=str)
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 8), (8, 3)])
def test_b96_gradients_see_what_the_output_saw(queries, keys, causal, window):
    q, k, v = qkv((1, 2, queries, 4), keys=keys, dtype=np.float64)
    check(normal(1, 2, queries, 4, dtype=np.float64, seed=1), q, k, v, causal=causal, window=window)


# ---- B97: layouts of the incoming gradient ----


def test_b97_an_incoming_gradient_of_any_layout():
    q, k, v = qkv((2, 3, 40, 16))
    dout = normal(2, 3, 40, 16, seed=1)
    plain = backward(dout, q, k, v)
    tokens_first = np.ascontiguousarray(dout.swapaxes(1, 2)).swapaxes(1, 2)
    wide = np.full((2, 3, 50, 40), np.nan, np.float32)
    wide[:, :, 3:43, 5:37:2] = dout
    reverse = np.ascontiguousarray(dout[..., ::-1, ::-1])[..., ::-1, ::-1]
    for other in (tokens_first, wide[:, :, 3:43, 5:37:2], reverse, np.asfortranarray(dout)):
        assert_array_equal(other, dout)
        for one, found in zip(plain, backward(other, q, k, v), strict=True):
            assert_array_equal(found, one)
    ones = np.broadcast_to(np.float32(1), dout.shape)  # the gradient of a sum, as automatic differentiation makes it
    for one, found in zip(backward(np.ones_like(dout), q, k, v), backward(ones, q, k, v), strict=True):
        assert_array_equal(found, one)


# ---- B101: nothing to see ----


@pytest.mark.parametrize(("queries", "keys", "lengths"), [(0, 5, None), (5, 0, None), (5, 5, [5, 0, 3]), (5, 5, 0)])
def test_b101_no_gradient_is_left_unwritten(queries, keys, lengths):
    q, k, v = qkv((3, 2, queries, 4), keys=keys)
    out, lse, _ = attention(q, k, v, key_lengths=lengths, return_lse=True)
    places = {name: np.full_like(x, np.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    found = attention_backward(np.ones_like(out), q, k, v, out, lse, key_lengths=lengths, **places)
    for gradient, array in zip(found, (q, k, v), strict=False):
        assert gradient is not None
        assert gradient.shape == array.shape
        assert np.isfinite(gradient).all()
        assert lengths == [5, 0, 3] or not gradient.any()
    if lengths == [5, 0, 3]:
        assert found.dq is not None
        assert found.dk is not None
        assert not found.dq[1].any()
        assert not found.dk[1].any()
        assert not found.dk[2, :, 3:].any()


# ---- B102: the bias alone ----


@pytest.mark.parametrize("shape", [(1, 1, 6, 6), (1, 2, 1, 6), (3, 1, 6, 1), (6,)])
def test_b102_only_the_gradient_of_the_bias(shape):
    q, k, v = qkv((3, 2, 6, 4), dtype=np.float64)
    bias, dout = normal(*shape, dtype=np.float64, seed=1), normal(3, 2, 6, 4, dtype=np.float64, seed=2)
    if shape[-1] == 6:
        bias[..., 2] = -np.inf
    out, lse, _ = attention(q, k, v, bias=bias, return_lse=True)
    found = attention_backward(dout, q, k, v, out, lse, wrt="bias", bias=bias)
    assert found._replace(dbias=None) == AttentionGradients()
    assert found.dbias is not None
    assert found.dbias.shape == shape
    for at in np.ndindex(shape):
        step = np.zeros(shape)
        step[at] = 1e-5
        up, down = ((attention(q, k, v, bias=bias + sign * step) * dout).sum() for sign in (1, -1))
        assert abs((up - down) / 2e-5 - found.dbias[at]) < 1e-8
    if shape[-1] == 6:
        assert_array_equal(found.dbias[..., 2], 0)


# ---- B125: memory ----


def test_b125_no_matrix_of_weights_is_kept():
    q, k, v = qkv((1, 2, 3000, 16))
    out, vjp = attention_vjp(q, k, v)
    weights = 2 * 3000 * 3000 * 4  # bytes
    assert most_allocated(lambda: vjp(out)) < weights / 2
