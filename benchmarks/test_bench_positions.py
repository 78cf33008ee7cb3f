"""Positional encodings."""

from collections.abc import Callable
from typing import Any

import formulas
import numpy as np
import pytest
from cases import EPSILON, largest_error

import attentile


@pytest.mark.parametrize("reuse", [False, True], ids=["new", "out"])
@pytest.mark.parametrize(
    ("positions", "width", "dtype"),
    [
        pytest.param(50, 128, "float64", id="50x128-float64"),
        pytest.param(512, 768, "float32", id="512x768-float32"),
        pytest.param(2048, 512, "float64", id="2048x512-float64"),
    ],
)
def test_positional_encoding(
    positions: int, width: int, dtype: str, reuse: bool, timed: Callable[..., Any], candidate: str
) -> None:
    """The sinusoids of the original transformer, into a new array or into one that is there already.

    The formula always makes a new array.
    """
    out = np.empty((positions, width), dtype) if reuse else None

    def encode(dtype: str, out: np.ndarray | None) -> np.ndarray:
        return attentile.positional_encoding(positions, width, dtype=dtype, out=out)

    def formula(dtype: str, out: np.ndarray | None) -> np.ndarray:
        return formulas.positional_encoding(positions, width, dtype)

    group = f"positional_encoding {positions} × {width}, {dtype}{', out=' if reuse else ''}"
    result = timed(encode, dtype, out, formula=formula, group=group, values=positions * width)
    assert result.dtype == dtype
    assert out is None or candidate == "formula" or result is out
    with attentile.use_backend("numpy"):
        exact = encode("float64", None)
    # One rounding of the result, and a few of the angle, which is as large as the last position.
    assert largest_error(result, exact) <= EPSILON[dtype] + 4 * EPSILON["float64"] * positions
