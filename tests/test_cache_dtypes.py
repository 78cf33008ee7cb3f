"""Queries and tokens of other dtypes than the cache's: they are converted, never the cache. Caches of 16 bits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cache_helpers import (
    BATCH,
    Q_HEADS,
    VALUE_WIDTH,
    WIDTH,
    as_stored,
    assert_same,
    compute_of,
    pair_of,
    ragged,
    result_dtype,
)
from helpers import dtype_of, most_allocated, normal, same_bits
from numpy.testing import assert_array_equal

from attentile import KVCache, MultiHeadAttention


@pytest.mark.parametrize("options", [{}, {"window": (30, 0), "sink_tokens": 2}, {"rotary": {}}])
@pytest.mark.parametrize("q_dtype", ["float16", "float32", "float64", ">f8", "int32", "bool", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_queries_of_another_dtype_are_converted(impl, dtype, q_dtype, options):
    """The result has the dtype that NumPy promotes to; its numbers are those of the arithmetic, rounded once."""
    q_dtype = dtype_of(q_dtype)
    cache, model = ragged(dtype, **options)
    q = (3 * normal(BATCH, Q_HEADS, 2, WIDTH)).astype(q_dtype)
    if (q_dtype.name, dtype) == ("bfloat16", "float16"):
        with pytest.raises(TypeError, match=r"^KVCache\.attend: NumPy has no common dtype of bfloat16, float16"):
            cache.attend(q)
        return
    promoted = result_dtype(q.dtype, cache.dtype)
    wide = np.result_type(promoted, np.float32)
    wanted = cache.attend(q.astype(compute_of(cache)), return_lse=True, return_weights=True, softcap=5.0)
    found = cache.attend(q, return_lse=True, return_weights=True, softcap=5.0)
    for one, other, own in zip(found, wanted, (promoted, wide, promoted), strict=True):
        assert one.dtype == own
        assert_array_equal(one, other.astype(own))
    out = np.full((*q.shape[:3], VALUE_WIDTH + 1), np.nan, promoted)[..., :-1]
    assert cache.attend(q, out=out, softcap=5.0) is out
    assert_array_equal(out, found.out)
    if cache.held.rotary is None:
        assert_same(impl, cache.attend(q), model.attend(q))


def test_out_for_queries_of_another_dtype_is_that_of_the_result():
    cache, _ = ragged()
    q, out = normal(BATCH, Q_HEADS, 2, WIDTH, dtype=np.float64), np.zeros((BATCH, Q_HEADS, 2, VALUE_WIDTH), np.float32)
    with pytest.raises(ValueError, match=r"^KVCache.attend: out has shape .* and dtype float32; they must be"):
        cache.attend(q, out=out)
    with pytest.raises(ValueError, match=r"^KVCache.attend: mask has shape"):
        cache.attend(q, out=out.astype(q.dtype), mask=np.ones((5, 5), bool))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_no_cache_is_converted_for_a_query_or_a_token(compiled, dtype, stored):
    """However long the cache and large the weights: less memory than they would take."""
    cache, x = KVCache(1, 8, 64, dtype=stored), normal(1, 8, 2048, 64)
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


TOKENS = ["float16", ">f2", "float64", ">f8", ">f4", "int8", "uint16", "int64", "bool", "bfloat16", "longdouble"]


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", TOKENS)
def test_dtypes_of_tokens(impl, dtype, stored):
    """Whole panels and single tokens, of few and of many columns, in rows that are contiguous or not."""
    dtype = dtype_of(dtype)
    for width, value_width in ((4, 4), (70, 130)):
        cache = KVCache(1, 2, width, value_dim=value_width, dtype=stored)
        k, v = ((3 * x).astype(dtype) for x in pair_of(1, 2, 38, width, value_width))
        heads_inside = (np.ascontiguousarray(x[:, :, 33:].swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
        cache.append(k[:, :, :33], v[:, :, :33])
        for one in zip(*(x.transpose(2, 0, 1, 3)[..., None, :] for x in heads_inside), strict=True):
            cache.append(*one)
        cache.append(np.repeat(k, 2, axis=-1)[..., ::2], v[:, :, ::-1])
        for found, x, again in ((cache.keys(), k, k), (cache.values(), v, v[:, :, ::-1])):
            assert found.dtype == (np.float16 if stored == "float16" else np.float32)
            assert_array_equal(found, as_stored(np.concatenate([x, again], axis=2), stored))


# ---- caches of 16 bits ----


def edges(dtype: str) -> Any:
    """Halfway cases and their neighbours in float64, subnormal numbers, both ends of the range, Inf, NaN, zeros."""
    bits, smallest, largest = (11, 2.0**-24, 65504.0) if dtype == "float16" else (8, 2.0**-133, 2.0**128 - 2.0**120)
    half = 1 + np.arange(1, 8, 2) * 2.0**-bits  # halfway between two numbers
    steps = smallest * np.array([0.25, 0.5, 0.75, 1, 1.5, 2.5, 3])
    ends = largest * np.array([1, 1 + 2.0 ** -(bits + 1), 1 + 2.0 ** -(bits - 1), 1e4]) + [0, 0, 0, 1]
    found = np.concatenate([half, steps, ends])
    found = np.concatenate([found, np.nextafter(found, 0), np.nextafter(found, np.inf), [0, np.inf, np.nan]])
    return np.concatenate([found, -found])


@pytest.mark.parametrize("given", ["float32", "float64", "longdouble"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tokens_are_rounded_once(impl, dtype, given):
    """1 + 2^-8 + 2^-40, say, is above the middle of two numbers of bfloat16; in float32 it would be the middle."""
    with np.errstate(all="ignore"):
        x = edges(dtype).astype(given)
    for n in (1, 33):  # alone, and in whole panels
        k = np.broadcast_to(x, (1, 1, n, x.size))
        cache = KVCache(1, 1, x.size, dtype=dtype)
        cache.append(k, k)
        cache.append(k[:, :, :1], k[:, :, :1])
        for found in (cache.keys(), cache.values()):
            same_bits(found, np.broadcast_to(as_stored(x, dtype), found.shape))


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 65520.0), ("bfloat16", 2.0**128 - 2.0**119)])
def test_what_is_too_large_becomes_infinite(either, dtype, limit):
    k = np.array([limit, np.nextafter(limit, 0), -limit, 3e-8 if dtype == "float16" else 1e-40]).reshape(1, 1, 1, 4)
    cache = KVCache(1, 1, 4, dtype=dtype)
    cache.append(k, k)
    with np.errstate(all="raise"):
        found = cache.keys()[0, 0, 0].astype(np.float64)
    assert_array_equal(found[[0, 2]], [np.inf, -np.inf])
    assert_array_equal(found[1], 65504 if dtype == "float16" else 2.0**128 - 2.0**120)
    assert 0 < found[3] < 1e-7  # subnormal


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"rotary": {}}, {"window": (3, 0), "sink_tokens": 2}])
def test_bits_of_bfloat16_in_and_out(impl, stored, options):
    """dtype="bfloat16" for arrays of uint16, as torch gives them: the same as ml_dtypes' arrays, to the bit."""
    kind = dtype_of("bfloat16")
    k, v = ((3 * x).astype(kind) for x in pair_of(1, 2, 40, 8))
    q, bias = normal(1, 4, 2, 8).astype(kind), normal(2, 40).astype(kind)
    one, other = KVCache(1, 2, 8, dtype=stored, **options), KVCache(1, 2, 8, dtype=stored, **options)
    for rows in (slice(0, 37), slice(37, 38), slice(38, 40)):
        one.append(k[:, :, rows], v[:, :, rows])
        other.append(k[:, :, rows].view(np.uint16), v[:, :, rows].view(np.uint16), dtype="bfloat16")
    assert_array_equal(other.keys(), one.keys())
    assert_array_equal(other.values(), one.values())
    for more in ({}, {"bias": bias, "return_weights": True, "return_lse": True}):
        given = {name: x.view(np.uint16) if name == "bias" else x for name, x in more.items()}
        found = other.attend(q.view(np.uint16), dtype="bfloat16", **given)
        if stored == "float16":  # of which NumPy knows no common dtype with ml_dtypes' bfloat16
            assert_same(impl, found, other.attend(q.astype(np.float32), dtype="bfloat16", **given))
            continue
        expected = one.attend(q, **more)
        for a, b in zip(found, expected, strict=True) if more else [(found, expected)]:
            same_bits(a.view(b.dtype), b)
    with pytest.raises(ValueError, match=r"^KVCache\.append: dtype is 'float16'; it says what arrays of uint16 hold"):
        other.append(k, v, dtype="float16")
    with pytest.raises(ValueError, match=r"^KVCache\.attend: dtype is 'float16'; it says what arrays of uint16 hold"):
        other.attend(q, dtype="float16")


def test_integers_of_16_bits_are_no_bits(either):
    """The core takes the bits of bfloat16 as uint16; what callers give in it are numbers."""
    x, cache = np.full((1, 1, 1, 4), 3, np.uint16), KVCache(1, 1, 4, dtype="bfloat16")
    for _ in range(3):
        cache.append(x, x)
    assert (cache.keys() == 3).all()
    assert (cache.values() == 3).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_take_half_the_memory(compiled, dtype):
    """4,096 tokens, 8 heads of 128; beside the pages a cache holds some hundred bytes for each of them."""
    k = normal(1, 8, 4096, 128)

    def filled(dtype: str) -> int:
        caches = []

        def fill() -> None:
            caches.append(KVCache(1, 8, 128, dtype=dtype))
            caches[0].append(k, k)

        return most_allocated(fill)

    assert filled(dtype) <= 0.51 * filled("float32")


def test_bfloat16_needs_no_other_package(either):
    """The dtype is a string, which the one of ml_dtypes equals, and keys are float32, which holds them exactly."""
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import io, pickle, numpy as np, attentile\n"
        f"attentile.use_backend({'numpy' if either == 'reference' else 'compiled'!r})\n"
        "cache = attentile.KVCache(1, 2, 4, dtype='bfloat16', rotary={})\n"
        "x = np.ones((1, 2, 300, 4), np.float32)\n"
        "cache.append(x, x * 257 / 256)\n"
        "cache.save(file := io.BytesIO()); file.seek(0)\n"
        "for each in (cache, attentile.KVCache.load(file), pickle.loads(pickle.dumps(cache))):\n"
        "    assert each.dtype == 'bfloat16' and 'dtype=bfloat16' in repr(each)\n"
        "    assert each.attend(x).dtype == each.keys().dtype == np.float32\n"
        "    assert (each.values() == 1).all() and each.attend(x.astype(np.float16)).dtype == np.float32\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_bfloat16_by_the_dtype_of_ml_dtypes():
    dtype = dtype_of("bfloat16")
    for given in (dtype, dtype.type, "bfloat16"):
        assert KVCache(1, 1, 4, dtype=given).dtype == dtype
    assert KVCache(1, 1, 4, dtype=KVCache(1, 1, 4, dtype="f2").dtype).dtype is np.dtype(np.float16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_layer_over_a_cache_of_16_bits(either, dtype):
    """Its queries stay float32. Projections of one row and of many differ in last bits, which may cross a middle."""
    layer, x = MultiHeadAttention(*normal(4, 16, 16), num_heads=2), normal(1, 40, 16)
    whole, step = KVCache(1, 2, 8, dtype=dtype), KVCache(1, 2, 8, dtype=dtype)
    expected = layer(x, cache=whole)
    assert expected.dtype == np.float32
    found = np.concatenate([layer(x[:, i : i + 1], cache=step) for i in range(40)], axis=1)
    close = 2.0**-6 if dtype == "bfloat16" else 2.0**-9
    np.testing.assert_allclose(step.keys(), whole.keys(), rtol=close, atol=close / 100)
    np.testing.assert_allclose(found, expected, rtol=0, atol=10 * close)
