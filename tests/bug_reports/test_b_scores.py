"""Reports about what changes the scores: soft capping, attention sinks, ALiBi."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_allclose, assert_array_equal
from oracle import allowed_keys, oracle, tolerance
from report_helpers import Array, assert_same_row, qkv

from attentile import AttentionResult, alibi_slopes, attention


def check_scores(q: Array, k: Array, v: Array, **options: Any) -> AttentionResult:
    """The call with all its outputs, compared with the oracle, which knows softcap, sinks and ALiBi too."""
    allowed = allowed_keys((*q.shape[:-1], k.shape[-2]), **options)
    expected = oracle(q, k, v, allowed, **options)
    bound = tolerance(q, k, v, allowed, expected, **options)
    result = attention(q, k, v, return_lse=True, return_weights=True, **options)
    assert isinstance(result, AttentionResult)
    assert_allclose(result.out, expected.out, rtol=0, atol=bound)
    assert_allclose(result.weights, expected.weights, rtol=0, atol=bound)
    assert_array_equal(result.weights[~allowed], 0)
    assert_allclose(result.lse, expected.lse, rtol=8 * np.finfo(q.dtype).eps, atol=bound)
    return result


# ---- B09: the cap comes before bias and exclusion ----

FIRST_KEY = np.array([True, False, False, False])
ONE_KEY: dict[str, dict[str, Any]] = {
    "mask": {"mask": FIRST_KEY},
    "bias": {"bias": np.where(FIRST_KEY, 0, -np.inf).astype(np.float32)},
    "causal": {"causal": True},
}


@pytest.mark.parametrize("kind", ONE_KEY)
def test_b09_excluded_keys_stay_excluded_under_a_cap(impl, kind):
    q, k, v = np.zeros((4, 4), np.float32), normal(4, 4), np.eye(4, dtype=np.float32)
    result = attention(q, k, v, softcap=1.0, return_weights=True, **ONE_KEY[kind])
    rows = slice(0, 1) if kind == "causal" else slice(None)  # later causal rows see more than the first key
    for got in (result.out[rows], result.weights[rows]):
        assert_array_equal(got, np.broadcast_to([1, 0, 0, 0], got.shape))
    assert_array_equal(result.weights[~np.tri(4, dtype=bool)], 0)  # no row sees a later key


def test_b09_finite_bias_is_not_capped(impl):
    q, k, v = np.zeros((1, 1, 4), np.float32), normal(1, 4, 4), np.eye(4, dtype=np.float32)[None]
    out = attention(q, k, v, softcap=1.0, bias=np.array([0, -5, -5, -5], np.float32))
    assert_allclose(out[0, 0], np.array([1, *[np.exp(-5)] * 3]) / (1 + 3 * np.exp(-5)), rtol=1e-6)


@pytest.mark.parametrize("softcap", [0.5, 1.0, 30.0])
def test_b09_cap_then_bias_then_exclusion(impl, softcap):
    q, k, v = qkv((2, 3, 20, 8), keys=40)
    bias = 4 * normal(3, 20, 40, seed=9)
    bias[normal(3, 20, 40, seed=10) > 0.5] = -np.inf
    check_scores(5 * q, k, v, softcap=softcap, bias=bias, causal="lower_right")


# ---- B18, B19: sinks ----

SINKS = np.array([1.5, -2.0])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_b18_each_heads_sink_in_every_row(impl, kv_heads):
    q, k, v = np.zeros((2, 3, 4), np.float32), normal(kv_heads, 5, 4), np.ones((kv_heads, 5, 2), np.float32)
    result = attention(q, k, v, sinks=SINKS, return_lse=True, return_weights=True)
    share = 5 / (5 + np.exp(SINKS))
    assert_allclose(share[0], 0.527332, rtol=0, atol=5e-7)
    assert_allclose(result.out, np.broadcast_to(share[:, None, None], (2, 3, 2)), rtol=1e-6)
    assert_allclose(result.weights, np.broadcast_to(share[:, None, None] / 5, (2, 3, 5)), rtol=1e-6)
    assert_allclose(result.lse, np.log(5), rtol=1e-6)  # the sink is not part of it


@pytest.mark.parametrize("options", [{"key_lengths": 0}, {"mask": np.array(False)}, {"bias": np.array(-np.inf)}, {}])
def test_b18_a_sink_and_no_key(impl, options):
    keys = 5 if options else 0
    q, k, v = qkv((1, 2, 3, 4), keys=keys)
    result = attention(q, k, v, sinks=SINKS, return_lse=True, return_weights=True, **options)
    assert_array_equal(result.out, np.zeros((1, 2, 3, 4)))
    assert_array_equal(result.weights, np.zeros((1, 2, 3, keys)))
    assert_array_equal(result.lse, np.full((1, 2, 3), -np.inf))


# (number of keys, position of query 0); the longer ones begin with whole tiles that no row sees.
SLIDING = [(7, 5), (200, 198), (200, 100), (1000, 998)]


@pytest.mark.parametrize(("keys", "start"), SLIDING)
def test_b19_window_and_sink(impl, keys, start):
    q, k, v = qkv((1, 2, 2, 16), keys=keys)
    options: dict[str, Any] = {"causal": True, "q_start": start, "window": (2, 0)}
    result = check_scores(q, k, v, sinks=np.array([2.0, 2.0]), **options)
    # The same as one more key with the logit 2 and the value 0.
    one_more = [np.concatenate([x, np.zeros_like(x[..., :1, :])], axis=-2) for x in (k, v)]
    seen = np.pad(allowed_keys((1, 2, 2, keys), **options), [(0, 0)] * 3 + [(0, 1)], constant_values=True)
    expected = oracle(q, *one_more, seen, bias=np.where(np.arange(keys + 1) < keys, 0.0, 2.0))
    assert_allclose(result.out, expected.out, rtol=0, atol=1e-6)
    assert_allclose(result.weights, expected.weights[..., :keys], rtol=0, atol=1e-6)


# ---- B89, B90: ALiBi ----

SLOPES = np.array([0.5, 0.25, 0.125, 1.5])


def test_b89_the_bias_is_slope_times_distance(impl):
    q, k, v = qkv((2, 4, 10, 8))
    behind = np.subtract.outer(np.arange(10), np.arange(10))
    bias = -SLOPES[:, None, None] * np.abs(behind)
    for options in ({"causal": True}, {}):
        out = check_scores(q, k, v, alibi_slopes=SLOPES, **options).out
        assert_allclose(out, attention(q, k, v, bias=bias, **options), rtol=0, atol=2e-6)
        assert np.abs(out - attention(q, k, v, **options)).max() > 0.1  # not disabled


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("cache", ["growing", "fixed"])
@pytest.mark.parametrize("placed", ["alignment", "q_start"])
def test_b89_decode_equals_prefill(impl, placed, cache, step):
    q, k, v = qkv((2, 4, 10, 8))
    whole = attention(q, k, v, causal=True, alibi_slopes=SLOPES)
    for start in range(0, 10, step):
        stop = min(start + step, 10)
        options: dict[str, Any] = {"causal": "lower_right"}
        if placed == "q_start":
            options = {"causal": True, "q_start": [start, start]}
        keys = slice(0, stop)
        if cache == "fixed":  # all slots are there, `stop` of them are filled
            keys, options["key_lengths"] = slice(None), stop
        part = attention(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], alibi_slopes=SLOPES, **options)
        assert_same_row(impl, part, whole[:, :, start:stop])


def test_b89_positions_per_item_and_without_causal(impl):
    q, k, v = qkv((3, 4, 2, 8), keys=30)
    check_scores(q, k, v, alibi_slopes=SLOPES, q_start=[0, 17, -4])
    with pytest.raises(ValueError, match="alibi_slopes= with 2 queries and 30 keys is ambiguous"):
        attention(q, k, v, alibi_slopes=SLOPES)


EXPONENTS = {  # slope = 2 ** -exponent
    1: [8],
    2: [4, 8],
    3: [4, 8, 2],
    6: [2, 4, 6, 8, 1, 3],
    8: [1, 2, 3, 4, 5, 6, 7, 8],
    12: [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5],
    71: [*(n / 8 for n in range(1, 65)), *(n / 16 for n in (1, 3, 5, 7, 9, 11, 13))],
}


@pytest.mark.parametrize("heads", EXPONENTS)
def test_b90_slopes_of_any_head_count(impl, heads):
    slopes = alibi_slopes(heads)
    assert slopes.dtype == np.float64
    assert_allclose(slopes, [2.0**-x for x in EXPONENTS[heads]], rtol=1e-15)
    check_scores(*qkv((1, heads, 6, 4), kv_heads=1), causal=True, alibi_slopes=slopes)
