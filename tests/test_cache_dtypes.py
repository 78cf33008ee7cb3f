"""Queries and tokens of other dtypes than the cache's: they are converted, never the cache."""

from __future__ import annotations

import numpy as np
import pytest
from cache_helpers import BATCH, Q_HEADS, VALUE_WIDTH, WIDTH, assert_same, pair_of, ragged
from helpers import dtype_of, most_allocated, normal
from numpy.testing import assert_array_equal

from attentile import KVCache, MultiHeadAttention


@pytest.mark.parametrize("options", [{}, {"window": (30, 0), "sink_tokens": 2}, {"rotary": {}}])
@pytest.mark.parametrize("q_dtype", ["float16", "float32", "float64", ">f8", "int32", "bool", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_queries_of_another_dtype_are_converted(impl, dtype, q_dtype, options):
    """The result has the dtype that NumPy promotes to; its numbers are those of the cache's own dtype."""
    q_dtype = dtype_of(q_dtype)
    cache, model = ragged(dtype, **options)
    q = (3 * normal(BATCH, Q_HEADS, 2, WIDTH)).astype(q_dtype)
    promoted = np.result_type(q.dtype, np.dtype(dtype)).newbyteorder("=")
    wanted = cache.attend(q.astype(dtype), return_lse=True, return_weights=True, softcap=5.0)
    found = cache.attend(q, return_lse=True, return_weights=True, softcap=5.0)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == promoted
        assert_array_equal(one, other)
    out = np.full((*q.shape[:3], VALUE_WIDTH + 1), np.nan, promoted)[..., :-1]
    assert cache.attend(q, out=out, softcap=5.0) is out
    assert_array_equal(out, wanted.out)
    if cache.held.rotary is None:
        assert_same(impl, cache.attend(q), model.attend(q))


def test_out_for_queries_of_another_dtype_is_that_of_the_result():
    cache, _ = ragged()
    q, out = normal(BATCH, Q_HEADS, 2, WIDTH, dtype=np.float64), np.zeros((BATCH, Q_HEADS, 2, VALUE_WIDTH), np.float32)
    with pytest.raises(ValueError, match=r"^KVCache.attend: out has shape .* and dtype float32; they must be"):
        cache.attend(q, out=out)
    with pytest.raises(ValueError, match=r"^KVCache.attend: mask has shape"):
        cache.attend(q, out=out.astype(q.dtype), mask=np.ones((5, 5), bool))


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_no_cache_is_converted_for_a_query_or_a_token(compiled, dtype):
    """However long the cache and large the weights: less memory than they would take."""
    cache, x = KVCache(1, 8, 64), normal(1, 8, 2048, 64)
    cache.append(x, x)
    q = x[:, :, :1].astype(dtype)
    cache.attend(q)  # threads and scratch are there from here on
    assert most_allocated(lambda: cache.attend(q)) < 100_000
    layer = MultiHeadAttention(*normal(4, 512, 512), num_heads=8)
    token = (3 * normal(1, 1, 512)).astype(dtype)
    layer(token, cache=cache)
    assert most_allocated(lambda: layer(token, cache=cache)) < 500_000
    found = layer(token, cache=cache.fork())
    assert found.dtype == np.result_type(token, np.float32)
    assert_array_equal(found, layer(token.astype(np.float32), cache=cache.fork()))


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4", "int8", "bool", "bfloat16", "longdouble"])
def test_dtypes_of_tokens(dtype):
    dtype = dtype_of(dtype)
    k, v = (3 * x for x in pair_of(1, 2, 20, 4))
    cache = KVCache(1, 2, 4)
    cache.append(k.astype(dtype), v.astype(dtype))
    assert cache.keys().dtype == np.float32
    assert_array_equal(cache.keys(), k.astype(dtype).astype(np.float32))
    assert_array_equal(cache.values(), v.astype(dtype).astype(np.float32))
