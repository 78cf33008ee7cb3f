"""Reports about numbers: NaN and Inf, extreme scores, empty rows, rows that change with their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_allclose, assert_array_equal
from oracle import oracle, tolerance
from report_helpers import Array, assert_same_row, check, qkv

from attentile import attention


def additive(allowed: Array) -> Array:
    return np.where(allowed, 0, -np.inf).astype(np.float32)


# ---- B01: leading blocks of keys that are excluded altogether ----


def band(length: int, place: str) -> Array:
    """Ten keys per row: those up to the row itself, or the last ones of all."""
    behind = np.subtract.outer(np.arange(length), np.arange(length))
    return (
        (behind >= 0) & (behind <= 9) if place == "diagonal" else np.tile(np.arange(length) >= length - 10, (length, 1))
    )


@pytest.mark.parametrize("place", ["diagonal", "last"])
@pytest.mark.parametrize("length", [33, 129, 513, 600, 1025])
def test_b01_leading_blocks_excluded(impl, length, place):
    ones, allowed = np.ones((1, 1, length, 2), np.float32), band(length, place)
    for options in ({"bias": additive(allowed)}, {"mask": allowed}):
        assert_allclose(attention(ones, ones, ones, **options), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("place", ["diagonal", "last"])
@pytest.mark.parametrize("length", [33, 600, 1025])
def test_b01_leading_blocks_excluded_with_random_values(impl, length, place):
    q, k, v = qkv((1, 1, length, 2))
    allowed = band(length, place)
    check(q, k, v, allowed=allowed[None, None], bias=additive(allowed))


# ---- B02, B04: scores far below any constant that could stand for minus infinity ----


def test_b02_every_score_below_minus_fifty_thousand(impl):
    q, k, v = (np.array(x, np.float32) for x in ([[-1e6]], [[1], [1]], [[3], [5]]))
    assert attention(q, k, v, scale=1) == 4


def test_b02_constant_shift_changes_nothing(impl):
    q, k, v = qkv((2, 3, 9, 8))
    shift = np.full((9, 9), -3e5, np.float32)
    check(q, k, v, bias=shift)  # the bound comes from the same formula, which rounds scores near -3e5 as coarsely
    # Without scores to round the shift must vanish altogether.
    assert_array_equal(attention(0 * q, k, v, bias=shift), attention(0 * q, k, v))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_b04_row_of_the_most_negative_finite_bias(impl, dtype):
    q, k, v = qkv((1, 1, 3, 4))
    bias = np.full((3, 3), 1, dtype)
    bias[0] = np.finfo(dtype).min
    out = attention(q, k, v, bias=bias)
    assert_allclose(out[0, 0, 0], v[0, 0].mean(axis=0), rtol=0, atol=1e-6)
    assert_allclose(out[..., 1:, :], attention(q, k, v)[..., 1:, :], rtol=0, atol=2e-6)


# ---- B06, B07: NaN and Inf show in the rows that use them, and in no other ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [("q", (0, 1, 3), np.nan), ("k", (1, 2, 5, 4), np.nan), ("v", (1, 3, 6, 2), np.inf), ("v", (0, 0, 2, 1), -np.inf)],
)
def test_b06_nan_and_inf_show_where_they_are_used(impl, name, at, value, causal):
    arrays = dict(zip("qkv", qkv((2, 4, 16, 8)), strict=True))
    allowed = np.broadcast_to(np.tri(16, dtype=bool) if causal else np.True_, (2, 4, 16, 16))
    expected = oracle(**arrays, allowed=allowed)
    bound = tolerance(**arrays, allowed=allowed, expected=expected)
    arrays[name][at] = value
    shown = np.zeros((2, 4, 16, 8), bool)
    if name == "q":
        shown[at] = True
    else:  # key at[2] of head at[:2], in the rows that see it; v[..., e] only in column e
        rows = np.flatnonzero(allowed[0, 0, :, at[2]])
        shown[(*at[:2], rows, at[3] if name == "v" else slice(None))] = True
    out = attention(**arrays, causal=causal)
    assert_array_equal(out[shown], np.float32(value))
    assert_allclose(out[~shown], expected.out[~shown], rtol=0, atol=bound)


FIRST_KEY_ONLY = {
    "mask": {"mask": [True, False]},
    "bias": {"bias": [0.0, -np.inf]},
    "key_lengths": {"key_lengths": 1},
    "causal": {"causal": True, "q_start": [-1]},  # row 0 at position -1 sees nothing, row 1 sees key 0
}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", FIRST_KEY_ONLY)
def test_b07_excluded_keys_may_hold_anything(impl, kind, poison):
    q, k, v = qkv((1, 1, 2, 4))
    k[..., 1, :] = v[..., 1, :] = 0
    clean = attention(q, k, v, **FIRST_KEY_ONLY[kind])
    k[..., 1, :] = v[..., 1, :] = poison
    out = attention(q, k, v, **FIRST_KEY_ONLY[kind])
    assert_array_equal(out, clean)
    rows = slice(1, 2) if kind == "causal" else slice(0, 2)
    assert_array_equal(out[0, 0, rows], np.broadcast_to(v[0, 0, :1], out[0, 0, rows].shape))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_b07_a_poisoned_future_inside_and_beyond_a_chunk(impl, poison):
    """Rows before the poisoned key share their chunk of keys, and their block of rows, with rows that see it."""
    q, k, v = qkv((1, 2, 300, 8))
    k[..., 290, :] = v[..., 290, :] = v[..., 100, 3] = 0
    clean = attention(q, k, v, causal=True)
    k[..., 290, :] = v[..., 290, :] = v[..., 100, 3] = poison
    out = attention(q, k, v, causal=True)
    assert_array_equal(out[..., :100, :], clean[..., :100, :])
    others = np.arange(8) != 3
    assert_array_equal(out[..., 100:290, others], clean[..., 100:290, others])
    assert not np.isfinite(out[..., 100:, 3]).any()
    assert np.isnan(out[..., 290:, :]).any(axis=-1).all()


# ---- B12, B14: one row, one answer ----


def test_b12_short_prompt_in_a_large_cache(impl):
    rng = np.random.default_rng(12)
    q = normal(2, 4, 4, 16, seed=12)
    cache = np.where(rng.random((2, 2, 2, 128, 16)) < 0.5, 1e30, np.nan).astype(np.float32)
    cache[..., :4, :] = normal(2, 2, 2, 4, 16, seed=13)
    before = cache.copy()
    k, v = cache
    options = {"causal": True, "q_start": 0, "key_lengths": [4, 4]}
    outputs = [attention(q, k, v, **options) for _ in range(20)]
    for out in outputs[1:]:
        assert_array_equal(out, outputs[0])
    valid_k, valid_v = k[..., :4, :], v[..., :4, :]
    assert_same_row(impl, outputs[0], check(q, valid_k, valid_v, causal=True).out)
    assert_array_equal(cache.view(np.uint32), before.view(np.uint32))


def test_b14_more_rows_change_no_row(impl):
    """Row 0 stands behind 50 keys; other rows, batch items and later keys come and go beside it."""
    q, k, v = qkv((5, 2, 64, 16), keys=50 + 64)
    alone = attention(q[:1, :, :1], k[:1, :, :51], v[:1, :, :51])
    check(q[:1, :, :1], k[:1, :, :51], v[:1, :, :51])
    for batch, rows in [*((1, n) for n in range(1, 13)), (1, 64), (5, 1), (5, 12), (5, 64)]:
        seen = slice(0, 50 + rows)
        out = attention(q[:batch, :, :rows], k[:batch, :, seen], v[:batch, :, seen], causal=True, q_start=50)
        assert_same_row(impl, out[:1, :, :1], alone)
        again = attention(q[:batch, :, :rows], k[:batch, :, seen], v[:batch, :, seen], causal=True, q_start=50)
        assert_array_equal(again, out)


# ---- B17: logsumexp of rows with few keys or none ----


def test_b17_logsumexp_of_rows_without_keys(impl):
    q, k, v = qkv((2, 2, 6, 8))
    mask = np.random.default_rng(17).random((2, 2, 6, 6)) < 0.5
    mask[0, 1, 2] = mask[1, 0] = False
    result = check(q, k, v, mask=mask)
    empty = ~mask.any(axis=-1)
    assert empty.sum() >= 7
    assert_array_equal(result.lse[empty], -np.inf)
    assert_array_equal(result.out[empty], 0)
    expected = oracle(q, k, v, mask).lse
    assert_allclose(result.lse[~empty], expected[~empty], rtol=1e-6, atol=1e-6)


def test_b17_logsumexp_without_any_key(impl):
    q, k, v = qkv((2, 2, 6, 8), keys=0)
    result = attention(q, k, v, return_lse=True)
    assert_array_equal(result.lse, np.full((2, 2, 6), -np.inf, np.float32))
    assert_array_equal(result.out, np.zeros((2, 2, 6, 8), np.float32))


@pytest.mark.parametrize("threads", [1, 2])
def test_b17_one_valid_key_of_4096(impl, threads):
    q, k, v = qkv((2, 1, 1, 64), keys=4096)
    result = attention(q, k, v, key_lengths=[1, 0], return_lse=True, num_threads=threads)
    score = (q[0, 0, 0].astype(np.float64) @ k[0, 0, 0]) / 8
    assert_array_equal(result.out[0, 0, 0], v[0, 0, 0])
    assert_allclose(result.lse[0, 0, 0], score, rtol=1e-6, atol=1e-6)
    assert_array_equal(result.out[1], 0)
    assert_array_equal(result.lse[1], -np.inf)


# ---- B129: weights at the edge of underflow ----


def test_b129_padding_of_nine_keys_in_ten(impl):
    q, k, v = qkv((8, 12 if impl != "reference" else 2, 512, 64))  # all heads take NumPy five seconds
    valid = np.arange(512) < np.array([512, *[51] * 7])[:, None, None, None]
    by_mask = attention(q, k, v, mask=valid)
    by_bias = attention(q, k, v, bias=np.where(valid, 0, -1e30).astype(np.float32))
    assert_allclose(by_bias, by_mask, rtol=0, atol=2e-6)
    some = np.s_[:, ::5, ::100]  # rows for the (slow) oracle
    allowed = np.broadcast_to(valid, (*q.shape[:3], 512))[some]
    expected = oracle(q[some], k[:, ::5], v[:, ::5], allowed)
    bound = tolerance(q[some], k[:, ::5], v[:, ::5], allowed, expected)
    assert_allclose(by_mask[some], expected.out, rtol=0, atol=bound)


def test_b129_tiny_weights_are_0(impl):
    """Scores down to -115: the last weights would make sums subnormal, or be it, which takes long."""
    scores = np.concatenate(([0], -np.arange(60, 115, 0.5)), dtype=np.float32)
    q, k, v = np.ones((1, 1, 1, 1), np.float32), scores.reshape(1, 1, -1, 1), normal(1, 1, scores.size, 8)
    weights = check(q, k, v, scale=1).weights[0, 0, 0]
    assert_array_equal(weights == 0, scores < -100 * np.log(2))
