"""rotary_embedding of float16 and bfloat16: widened, rotated in float64 and rounded once, a few rows at a time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import normal

from attentile import num_threads, rotary_embedding
from attentile.storage import rounded

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def same(found: Any, expected: Any) -> None:
    """Equal bits; NaN where the other has NaN."""
    assert found.dtype == expected.dtype
    with np.errstate(invalid="ignore"):  # of signalling NaN
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


def layouts(x: Any) -> dict[str, Any]:
    """The same numbers, laid out in other ways."""
    heads_last = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
    wide[..., 1:-2] = x
    return {
        "plain": x,
        "heads inside": heads_last,
        "within wider rows": wide[..., 1:-2],
        "backwards": np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
        "every second column": np.repeat(x, 2, axis=-1)[..., ::2],
        "repeated": np.broadcast_to(x[:1], x.shape),
    }


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("options", [{}, {"rotary_dim": 10}, {"positions": np.arange(150)[::-1] * 77}], ids=str)
def test_the_bits_are_those_of_float64_rounded_once(impl, dtype, interleaved, options):
    for name, x in layouts(normal(2, 3, 150, 22).astype(dtype)).items():
        expected = rounded(rotary_embedding(x.astype(np.float64), interleaved=interleaved, **options), dtype)
        same(rotary_embedding(x, interleaved=interleaved, **options), expected)
        if name != "repeated":
            same(rotary_embedding(x, interleaved=interleaved, out=x, **options), expected)
            same(x, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("shape", "options"), [((1, 2, 70, 1100), {}), ((1, 9, 1, 64), {"positions": 12345})], ids=str)
def test_of_wide_rows_and_of_one_token(impl, dtype, shape, options):
    x = normal(*shape).astype(dtype)
    for interleaved in (False, True):
        expected = rounded(rotary_embedding(x.astype(np.float64), interleaved=interleaved, **options), dtype)
        same(rotary_embedding(x, interleaved=interleaved, **options), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_threads_change_nothing(isa, dtype):
    x = normal(2, 8, 600, 64).astype(dtype)
    with num_threads(1):
        one = rotary_embedding(x)
    for threads in (2, 3):
        with num_threads(threads):
            same(rotary_embedding(x), one)


def by_tables(numbers: Any, cosines: Any) -> Any:
    """numbers * cosines of each row: the first of a pair whose second is 0."""
    x = np.zeros((numbers.size, 2), numbers.dtype)
    x[:, 0] = numbers
    return rotary_embedding(x, cos=cosines[:, None], sin=np.zeros((cosines.size, 1)))[:, 0]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_is_read_and_written(impl, dtype):
    codes = np.arange(1 << 16, dtype=np.uint16)
    numbers = codes[codes != 0x8000].view(dtype)  # -0 becomes -0 - 0 * 0 = 0
    same(by_tables(numbers, np.ones(numbers.size)), numbers)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_doubles_are_rounded_once(impl, dtype):
    """Next to every tie between two numbers, on it, and what lies beyond either end of the range."""
    numbers = np.sort(
        np.arange(0x7C00 if dtype == np.float16 else 0x7F80, dtype=np.uint16).view(dtype).astype(np.float64)
    )
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), numbers])
    near = np.concatenate([near, ties * (1 + 2.0**-30), ties * (1 - 2.0**-30), ties + 1e-46])
    top = float(ml_dtypes.finfo(dtype).max)
    ends = [top * (1 + 2.0**-9), top * (1 + 2.0**-13), top * 1.01, 1e39, 1e300, np.inf, np.nan, 5e-324, 1e-50, 1e-40]
    near = np.concatenate([near[near > 0], ends])
    for x in (near, -near):
        same(by_tables(np.ones(x.size, dtype), x), rounded(x, dtype))
