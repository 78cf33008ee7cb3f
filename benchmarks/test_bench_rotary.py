"""Rotary position embedding."""

from collections.abc import Callable
from typing import Any

import formulas
import numpy as np
import pytest
from cases import EPSILON, SEED, largest_error

import attentile

FIRST = 1000  # position of the first row


@pytest.mark.parametrize("reuse", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((1, 32, 1, 128), "float32", id="token-float32"),
        pytest.param((16, 32, 1, 128), "float32", id="batch-of-tokens-float32"),
        pytest.param((1, 8, 512, 128), "float32", id="8x512x128-float32"),
        pytest.param((1, 32, 2048, 128), "float32", id="32x2048x128-float32"),
        pytest.param((1, 12, 512, 64), "float64", id="12x512x64-float64"),
        pytest.param((1, 12, 512, 64), "float16", id="12x512x64-float16"),
    ],
)
def test_rotary_embedding(
    shape: tuple[int, ...], dtype: str, interleaved: bool, reuse: bool, timed: Callable[..., Any], candidate: str
) -> None:
    """Queries or keys of a layer, of one token or of many, into a new array or into one that is there already.

    The formula always makes a new array.
    """
    x = np.random.default_rng(SEED).uniform(-1, 1, shape).astype(dtype)
    out = np.empty(shape, dtype) if reuse else None

    def rotate(x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        return attentile.rotary_embedding(x, FIRST, interleaved=interleaved, out=out)

    def rotate_half(x: np.ndarray) -> np.ndarray:
        return formulas.rotary_embedding(x, FIRST, interleaved)

    def formula(x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        return formulas.in_float32(rotate_half)(x) if dtype == "float16" else rotate_half(x)

    group = f"rotary_embedding {' × '.join(map(str, shape))}, {dtype}, {'neighbours' if interleaved else 'halves'}"
    group += ", out=" if reuse else ""
    result = timed(rotate, x, out, formula=formula, group=group, values=x.size)
    assert result.dtype == dtype
    assert out is None or candidate == "formula" or result is out
    with attentile.use_backend("numpy"):
        exact = rotate(x.astype("float64"), None)
    allowed = EPSILON[dtype] + 4 * EPSILON["float64"]
    if candidate == "formula":  # rounds each product, and its angles, which are as large as the last position
        allowed = 4 * EPSILON[dtype] + 4 * EPSILON["float64"] * (FIRST + shape[-2])
    assert largest_error(result, exact) <= allowed
