"""Settings of NumPy around a call change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_array_equal

import attentile
from attentile import KVCache, attention, causal_attention, multi_head_attention, self_attention


def rounding_calls(dtype):
    """Calls in which numbers become subnormal, 0 or Inf when results are rounded."""
    q, k, v = (1e-6 * x for x in normal(3, 1, 2, 5, 8))
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    bias = np.full((5, 5), 1e-300)
    out = np.empty(q.shape, dtype)
    large, steep = (
        np.full(v.shape, 6e4, dtype),
        np.full(k.shape, 3e4, dtype) * np.linspace(-1, 1, 5, dtype=dtype)[:, None],
    )
    x, w = q[:, 0], np.eye(8, dtype=dtype)
    layer = attentile.MultiHeadAttention(w, w, w, w, num_heads=2)

    def cached():
        cache = KVCache(1, 2, 8)
        cache.append(np.full((1, 2, 3, 8), 1e-300), np.full((1, 2, 3, 8), -1e-42))
        return cache.lengths

    return {
        "attention": lambda: attention(q, k, v),
        "out": lambda: attention(q, k, v, out=out),
        "weights": lambda: attention(q, steep, large, sinks=[90.0, -90.0], return_weights=True).weights,
        "bias": lambda: attention(q, k, v, bias=bias),
        "score_mod": lambda: attention(q, k, v, score_mod=lambda s, b, h, i, j: np.full(s.shape, 1e-300)),
        "self_attention": lambda: self_attention(q, k, v, 8)[0],
        "causal_attention": lambda: causal_attention(q, k, v, 8)[0],
        "multi_head_attention": lambda: multi_head_attention(x, 8, 2, w, w, w, w),
        "layer": lambda: layer(x),
        "layer out": lambda: layer(x, out=np.empty_like(x)),
        "cache": cached,
    }


@pytest.mark.parametrize("name", rounding_calls(np.float16))
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_settings_of_numpy_change_nothing(either, name, dtype):
    call = rounding_calls(dtype)[name]
    expected = call()
    with np.errstate(all="raise"):
        assert_array_equal(call(), expected)
