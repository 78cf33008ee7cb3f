"""What tests of every kind need: random arrays, and the comparison of bits."""

from __future__ import annotations

from typing import Any

import numpy as np


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Standard normal numbers, the same ones for the same shape and seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same_bits(found: Any, expected: Any) -> None:
    """Equal in dtype, shape, numbers and signs of zeros; NaN where the other has NaN, whatever its bits."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)
    known = ~np.isnan(found)
    np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(expected[known]))
