"""How a cache stores its numbers, apart from how it computes with them.

    dtype       elements of a page    keys(), values()    computed in
    float64     float64               float64             float64
    float32     float32               float32             float32
    float16     float16               float16             float32
    bfloat16    uint16, its bits      float32             float32

NumPy has no bfloat16, and what a cache gives shall not depend on which other packages are installed: so the dtype of
the last one is a string, and its numbers are given in float32, which holds them exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..storage import bfloat16_numbers, halfway, promoted, ready

Array = NDArray[Any]

_SINGLE = np.dtype(np.float32)


class Format(NamedTuple):
    """One row of the table above."""

    dtype: Any  # np.dtype, or "bfloat16"
    items: np.dtype[Any]
    shown: np.dtype[Any]
    compute: np.dtype[Any]

    @property
    def halves(self) -> bool:
        """Whether numbers are rounded to 16 bits on their way into a page."""
        return self.items.itemsize == 2

    def incoming(self, array: Array, rotated: bool, bits: bool) -> Array:
        """Tokens with the last axis contiguous, not yet rounded to 16 bits, or in the dtype of `items` already.

        rotated: they are to be rotated first, which takes float32 or float64. bits: those of uint16 hold bfloat16.
        """
        if bits and array.dtype == np.uint16:
            if self.items == np.uint16 and not rotated:
                return ready(array, self.items)
            array = bfloat16_numbers(array)
        if not self.halves:
            return ready(array, self.compute)
        if not rotated and array.dtype.name == str(self.dtype):
            return ready(array if self.items == np.float16 else array.view(self.items), self.items)
        wide = _SINGLE if np.can_cast(array.dtype, _SINGLE) else np.dtype(np.float64)
        return ready(halfway(array, wide), wide)

    def result(self, q: Array, bits: bool) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """(dtype of lse, dtype of the result) for these queries: what they and the cache promote to."""
        given = q.dtype.name == "bfloat16" or (bits and q.dtype == np.uint16)
        of_cache = q.dtype if given and str(self.dtype) == "bfloat16" else self.shown
        return promoted("attention", q, np.empty(0, of_cache), bits=bits)


def _formats() -> dict[str, Format]:
    double, half = np.dtype(np.float64), np.dtype(np.float16)
    rows = [
        Format(double, double, double, double),
        Format(_SINGLE, _SINGLE, _SINGLE, _SINGLE),
        Format(half, half, half, _SINGLE),
        Format("bfloat16", np.dtype(np.uint16), _SINGLE, _SINGLE),
    ]
    return {str(row.dtype): row for row in rows}


_FORMATS = _formats()


def read_format(dtype: DTypeLike) -> Format:
    """That of KVCache(dtype=...). bfloat16 may be the string or the dtype of ml_dtypes."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return _FORMATS["bfloat16"]
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not found.isnative or found.name not in _FORMATS:
        raise TypeError(f"KVCache: dtype is {dtype!r}; the storage can be float32, float64, float16 or bfloat16")
    return _FORMATS[found.name]
