"""Numbers at the ends of their range: softcap, scale, slopes and integers that the arithmetic cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from attentile import KVCache, attention

RNG = np.random.default_rng(0)
REALS = [np.float32, np.float64]


def qkv(dtype=np.float32):
    return RNG.standard_normal((3, 1, 2, 5, 8)).astype(dtype)


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("share", [1e-6, 0.2, 0.5, 1.0])
def test_a_softcap_near_the_largest_number_is_none(impl, dtype, share):
    q, k, v = qkv(dtype)
    softcap = share * float(np.finfo(dtype).max)
    assert_allclose(attention(q, k, v, softcap=softcap), attention(q, k, v), rtol=0, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", REALS)
def test_a_softcap_beyond_the_range_of_the_arithmetic_is_clipped(impl, dtype):
    q, k, v = qkv(dtype)
    assert_allclose(attention(q, k, v, softcap=1e300), attention(q, k, v), rtol=0, atol=8 * np.finfo(dtype).eps)
    for softcap in (1e-300, 1e-320, 5e-324):  # every score becomes 0, or next to it
        assert_allclose(
            attention(q, k, v, softcap=softcap), np.broadcast_to(v.mean(axis=2, keepdims=True), v.shape), atol=1e-6
        )


@pytest.mark.parametrize(("dtype", "largest"), [(np.float32, 2.35e38), (np.float64, 1.24e308)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_scale_must_fit_the_arithmetic(either, dtype, largest, sign):
    q, k, v = qkv(dtype)
    for scale in (sign * largest, np.float64(sign * largest)):
        assert_allclose(attention(0 * q, k, v, scale=scale)[0, 0, 0], v[0, 0].mean(axis=0), rtol=1e-5)
    for scale in (sign * 1.02 * largest, np.float64(sign * 1.02 * largest)):
        with pytest.raises(ValueError, match=r"^attention: scale is .*; in float\d\d it must lie between"):
            attention(0 * q, k, v, scale=scale)


def test_slopes_must_fit_the_arithmetic(impl):
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"alibi_slopes has 1e\+39; slopes must be finite in float32"):
        attention(q, k, v, causal=True, alibi_slopes=[1e39, 0])
    assert np.isfinite(attention(q, k, v, causal=True, alibi_slopes=[1e38, 0])).all()
    assert np.isfinite(attention(*qkv(np.float64), causal=True, alibi_slopes=[1e39, 0])).all()


@pytest.mark.parametrize("dtype", REALS)
def test_the_quick_way_of_a_cache_knows_the_range_too(impl, dtype):
    largest = float(np.finfo(dtype).max)
    cache, (q, k, v) = KVCache(1, 2, 8, dtype=dtype), qkv(dtype)
    cache.append(k, v)
    last = q[:, :, -1:]
    for softcap in (largest, largest / 3, largest / 5, 1e300, 1e-300):
        general = cache.attend(last, softcap=softcap, return_lse=True).out
        assert_array_equal(cache.attend(last, softcap=softcap), general)
    for scale in (largest / 1.4427 * 1.02, -largest):
        with pytest.raises(ValueError, match=r"^KVCache.attend: scale is .*; in float\d\d it must lie between"):
            cache.attend(last, scale=scale)
    assert np.isfinite(cache.attend(0 * last, scale=0.99 * largest / 1.4427)).all()


def test_integers_beyond_float64_are_out_of_range(either):
    q, k, v = qkv(np.float64)
    with pytest.raises(ValueError, match=r"^attention: scale is inf; it must be finite"):
        attention(q, k, v, scale=10**400)
    with pytest.raises(ValueError, match=r"^attention: softcap is inf"):
        attention(q, k, v, softcap=10**400)
