"""What tests of every kind need: random arrays, dtypes by name, bits compared, memory measured."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Standard normal numbers, the same ones for the same shape and seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same_bits(found: Any, expected: Any) -> None:
    """Equal in dtype, shape, numbers and signs of zeros; NaN where the other has NaN, whatever its bits."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    with np.errstate(invalid="ignore"):  # of signalling NaN in 16 bits
        known = ~np.isnan(expected)
        np.testing.assert_array_equal(~np.isnan(found), known)
    np.testing.assert_array_equal(found[known], expected[known])
    bits = f"u{found.itemsize}"  # signs of zeros too
    np.testing.assert_array_equal(found[known].view(bits), expected[known].view(bits))


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of this name. bfloat16 is that of ml_dtypes; where it is not installed, the test is skipped."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def most_allocated(call: Callable[[], Any]) -> int:
    """Bytes that NumPy holds at most while the call runs, beyond those before it."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
