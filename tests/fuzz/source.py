"""Decisions from bytes: what a fuzzer mutates becomes sizes, options and arrays in layouts of every kind.

A Source that has run out of bytes answers with the first choice every time, so any bytes, even none, are a valid input,
and a fuzzer that shortens its input simplifies the case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Around every edge: a lane, a vector, a mask word, a block of rows, a small chunk, a chunk of keys.
EDGES = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    95,
    97,
    128,
    129,
    255,
    256,
    257,
    300,
    513,
    600,
)
LAYOUTS = ("plain", "reversed", "stepped", "turned", "misaligned", "swapped", "read-only", "within")


def expect_text(error: Exception, text: str) -> None:
    """The error says this; another one is a finding."""
    if text not in str(error):
        raise AssertionError(f"{error!r} should say {text!r}") from error


class Source:
    """Reads its bytes from left to right."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def ended(self) -> bool:
        return self.at >= len(self.data)

    def integer(self, low: int, high: int) -> int:
        span, found = high - low + 1, 0
        while span > 0:
            found, span = found << 8 | self.byte(), span >> 8
        return low + found % (high - low + 1)

    def boolean(self) -> bool:
        return self.byte() % 2 == 1

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def size(self, largest: int, smallest: int = 1) -> int:
        """Half of the time one next to an edge."""
        if self.boolean():
            return self.integer(smallest, largest)
        return self.choice([n for n in (smallest, *EDGES) if smallest <= n <= largest])

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 2**32 - 1))

    def normal(self, shape: tuple[int, ...], dtype: Any, layout: bool = True) -> Any:
        """Numbers of one seed, in a layout of the fuzzer's choice."""
        array = self.rng().standard_normal(shape).astype(dtype)
        return self.laid_out(array) if layout else array

    def laid_out(self, array: Any) -> Any:
        """The same numbers, elsewhere: other strides, alignment, byte order or flags."""
        how = self.choice(LAYOUTS)
        if array.ndim == 0 or how == "plain":
            return array
        if how == "reversed":
            axis = self.integer(0, array.ndim - 1)
            return np.flip(np.ascontiguousarray(np.flip(array, axis)), axis)
        if how == "stepped":
            wide = np.full((*array.shape[:-1], 2 * array.shape[-1] + 1), 7, array.dtype)
            wide[..., 1::2] = array
            return wide[..., 1::2]
        if how == "turned":
            axes = list(range(array.ndim))
            axes = axes[self.integer(0, array.ndim - 1) :] + axes
            axes = list(dict.fromkeys(axes))
            return np.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes))
        if how == "misaligned":
            raw = np.empty(array.nbytes + 1, np.uint8)
            moved = raw[1:].view(array.dtype).reshape(array.shape)
            moved[...] = array
            return moved
        if how == "swapped":
            return array.astype(array.dtype.newbyteorder()) if array.dtype.kind in "fiu" else array
        if how == "read-only":
            fixed = array.copy()
            fixed.setflags(write=False)
            return fixed
        around = np.full([n + 2 for n in array.shape], 3, array.dtype)  # "within" a larger array
        inner = around[(slice(1, -1),) * array.ndim]
        inner[...] = array
        return inner
