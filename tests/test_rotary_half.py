"""rotary_embedding of float16 and bfloat16: widened, rotated in float64 and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import normal, same_bits

from attentile import num_threads, rotary_embedding
from attentile.storage import rounded

ml_dtypes = pytest.importorskip("ml_dtypes")

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


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
        same_bits(rotary_embedding(x, interleaved=interleaved, **options), expected)
        if name != "repeated":
            same_bits(rotary_embedding(x, interleaved=interleaved, out=x, **options), expected)
            same_bits(x, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("shape", "options"), [((1, 2, 70, 1100), {}), ((1, 9, 1, 64), {"positions": 12345})], ids=str)
def test_of_wide_rows_and_of_one_token(impl, dtype, shape, options):
    x = normal(*shape).astype(dtype)
    for interleaved in (False, True):
        expected = rounded(rotary_embedding(x.astype(np.float64), interleaved=interleaved, **options), dtype)
        same_bits(rotary_embedding(x, interleaved=interleaved, **options), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_of_every_width_up_to_three_vectors(impl, dtype, interleaved):
    """Whole vectors, what is left of a row, the columns behind it, and nothing beyond."""
    for width in range(2, 50, 2):
        room = normal(5, width + 9).astype(dtype)
        before, x = room.copy(), room[:, 4 : width + 7]
        expected = rounded(rotary_embedding(x.astype(np.float64), rotary_dim=width, interleaved=interleaved), dtype)
        rotary_embedding(x, rotary_dim=width, interleaved=interleaved, out=x)
        before[:, 4 : width + 7] = expected
        same_bits(room, before)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_threads_change_nothing(isa, dtype):
    x = normal(2, 8, 600, 64).astype(dtype)
    with num_threads(1):
        one = rotary_embedding(x)
    for threads in (2, 3):
        with num_threads(threads):
            same_bits(rotary_embedding(x), one)


def by_tables(numbers: Any, cosines: Any, pairs: int) -> Any:
    """numbers * cosines: each number is the first of a pair whose second is 0."""
    rows = -(-numbers.size // pairs)
    x, tables = np.zeros((rows, 2 * pairs), numbers.dtype), np.zeros((rows, pairs))
    x[:, :pairs].flat[: numbers.size], tables.flat[: numbers.size] = numbers, cosines
    found = rotary_embedding(x, cos=tables, sin=np.zeros(tables.shape))
    return np.ascontiguousarray(found[:, :pairs]).ravel()[: numbers.size]


@pytest.mark.parametrize("pairs", [1, 37])  # vectors of a row, and what is left of it
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_is_read_and_written(impl, dtype, pairs):
    codes = np.arange(1 << 16, dtype=np.uint16)
    numbers = codes[codes != 0x8000].view(dtype)  # -0 becomes -0 - 0 * 0 = 0
    same_bits(by_tables(numbers, np.ones(numbers.size), pairs), numbers)


@pytest.mark.parametrize("pairs", [1, 37])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_doubles_are_rounded_once(impl, dtype, pairs):
    """Next to every tie between two numbers, on it, and what lies beyond either end of the range."""
    numbers = np.sort(
        np.arange(0x7C00 if dtype == np.float16 else 0x7F80, dtype=np.uint16).view(dtype).astype(np.float64)
    )
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), numbers])
    near = np.concatenate([near, ties * (1 + 2.0**-30), ties * (1 - 2.0**-30), ties + 1e-46])
    top = float(ml_dtypes.finfo(dtype).max)
    ends = [top * (1 + 2.0**-9), top * (1 + 2.0**-13), top * 1.01, 1e39, 1e300, np.inf, np.nan, 5e-324, 1e-50, 1e-40]
    ends += [2.0**978, 2.0**979, 2.0**1023]
    near = np.concatenate([near[near > 0], ends])
    for x in (near, -near):
        same_bits(by_tables(np.ones(x.size, dtype), x, pairs), rounded(x, dtype))
