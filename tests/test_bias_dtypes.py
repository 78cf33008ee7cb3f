"""A bias of any floating dtype: read as it is, converted by the block, and a finite number never becomes infinite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import normal, same_bits

from attentile import KVCache, attention, explain
from attentile.storage import kept_finite, native, ready

ml_dtypes = pytest.importorskip("ml_dtypes")

HEADS, ROWS, KEYS, WIDTH = 3, 60, 290, 8
COMPUTED_IN = [np.float32, np.float64]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def qkv(dtype: Any) -> tuple[Any, ...]:
    return tuple(normal(HEADS, n, WIDTH, dtype=dtype, seed=n) for n in (ROWS, KEYS, KEYS))


def biases(dtype: Any) -> dict[str, Any]:
    """Layouts of a bias whose numbers are of every size that the dtype has."""
    full = normal(HEADS, ROWS, KEYS, dtype=np.float64)
    full[:, :, ::7] = -np.inf
    largest = float(ml_dtypes.finfo(dtype).max)
    full[:, ::5, 1:20] = np.tile([largest, -largest, 0, 1e-5, -1e-300, largest / 3], 4)[:19]
    full = full.astype(dtype)
    return {
        "full": full,
        "for all heads": full[:1],
        "one row": full[:, :1],
        "one column": full[:, :, 1:2],
        "strided": np.ascontiguousarray(full.swapaxes(1, 2)).swapaxes(1, 2),
        "backwards": full[:, ::-1, ::-1],
        "every second": np.repeat(full, 2, axis=2)[:, :, ::2],
        "repeated": np.broadcast_to(full[0, 0], full.shape),
        "swapped": full if dtype is ml_dtypes.bfloat16 else full.astype(np.dtype(dtype).newbyteorder()),
    }


@pytest.mark.parametrize("layout", biases(np.float32))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", COMPUTED_IN)
def test_the_bits_are_those_of_the_converted_bias(impl, compute, dtype, layout):
    q, k, v = qkv(compute)
    bias = biases(dtype)[layout]
    converted = np.ascontiguousarray(kept_finite(bias, np.dtype(compute)))
    v[:, ::7] = np.nan  # of the keys that it excludes, in most layouts
    for rows in (slice(0, ROWS), slice(5, 6), slice(10, 13)):
        cut = slice(None) if bias.shape[1] == 1 else rows
        same_bits(attention(q[:, rows], k, v, bias=bias[:, cut]), attention(q[:, rows], k, v, bias=converted[:, cut]))
    options = {"causal": True, "q_start": 200, "return_lse": True, "return_weights": True}
    for found, wanted in zip(
        attention(q, k, v, bias=bias, **options), attention(q, k, v, bias=converted, **options), strict=True
    ):
        same_bits(found, wanted)


@pytest.mark.parametrize("compute", COMPUTED_IN)
def test_every_number_of_16_bits(isa, compute):
    """Of each alone in a row of one key, the logsumexp is the bias itself."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        one = np.zeros((numbers.size, 1, 1), compute)
        found = attention(one, one, one, bias=numbers[:, None, None], return_lse=True).lse
        with np.errstate(invalid="ignore"):  # of signalling NaN
            converted = numbers.astype(compute)[:, None, None]
        wanted = attention(one, one, one, bias=converted, return_lse=True).lse
        same_bits(found, wanted)


def test_a_finite_bias_beyond_the_range_excludes_nothing(impl):
    q, k, v = qkv(np.float32)
    for dtype in (np.float64, np.longdouble):
        found = attention(q, k, v, bias=np.full((ROWS, KEYS), -1e300, dtype), return_lse=True)
        assert np.isfinite(found.out).all()
        assert np.isfinite(found.lse).all()
    assert not attention(q, k, v, bias=np.full((ROWS, KEYS), -np.inf)).any()
    assert np.isnan(attention(q, k, v, bias=np.full((ROWS, KEYS), np.nan))).all()
    assert np.isnan(attention(q, k, v, bias=np.full((ROWS, KEYS), np.inf))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_converted_as_a_whole(compiled, dtype):
    q, k, v = qkv(np.float32)
    for layout in ("full", "strided", "repeated", "one column"):
        report = explain(q, k, v, bias=biases(dtype)[layout])
        assert (report.path, report.copies) == ("compiled", {})


def test_a_cache_and_16_bit_arrays_take_it_too(impl):
    q, k, v = (x[None] for x in qkv(np.float32))
    bias = biases(np.float64)["full"][:, -2:]
    converted = kept_finite(bias, np.dtype(np.float32))
    cache = KVCache(1, HEADS, WIDTH)
    cache.append(k, v)
    same_bits(cache.attend(q[:, :, -2:], bias=bias), cache.attend(q[:, :, -2:], bias=converted))
    half = [x.astype(np.float16) for x in (q[:, :, -2:], k, v)]
    same_bits(attention(*half, bias=bias).view(np.uint16), attention(*half, bias=converted).view(np.uint16))


def test_what_repeats_is_converted_once():
    """The whole of a broadcast array was converted, which takes its full size."""
    row = normal(1, 4, 6, dtype=np.float16)
    many = np.broadcast_to(row, (1 << 40, 4, 6))
    assert native(many, np.dtype(np.float32)).strides == (0, 24, 4)
    assert ready(many[:, :, ::2], np.dtype(np.float16)).strides == (0, 6, 2)
    assert ready(np.broadcast_to(row[..., :1], (1 << 40, 4, 6)), np.dtype(np.float64)).strides == (0, 48, 8)
    empty = np.broadcast_to(row[:0], (0, 4, 6))
    assert native(empty, np.dtype(np.float32)).shape == (0, 4, 6)
