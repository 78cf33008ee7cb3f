"""What the operators check alike: choices, heads side by side or on an axis of their own, integers per batch item."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def choice(function: str, name: str, value: Any, known: tuple[Any, ...], wanted: str) -> None:
    """Refuses an attribute that has none of the known values."""
    if value not in known:
        raise ValueError(f"{function}: {name} is {value!r}; it must be {wanted}")


def split_heads(function: str, name: str, array: Array, count: str, heads: int | None, given: str) -> Array:
    """A 3-D input (batch, length, heads * width) as a view (batch, heads, length, width); a 4-D input as it is.

    count: name of the attribute that holds `heads`. given: how a message calls an input of three axes.
    """
    has = f"{name} has shape {array.shape}"
    if array.ndim == 4:
        if heads is not None and heads != array.shape[1]:
            raise ValueError(f"{function}: {count} is {heads} and {has}, {array.shape[1]} heads")
        return array
    if heads is None or heads < 1:
        raise ValueError(f"{function}: {count} is {heads}; with {given} it must be a positive integer")
    if array.shape[2] % heads:
        raise ValueError(f"{function}: {has}; its last axis must be a multiple of {count}, {heads}")
    return array.reshape(*array.shape[:2], heads, array.shape[2] // heads).swapaxes(1, 2)


def integers(function: str, name: str, value: Any, shape: tuple[int, ...], each: str) -> Array:
    """An array of integers of exactly this shape, one per `each`."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.shape != shape:
        raise ValueError(
            f"{function}: {name} has shape {array.shape} and dtype {array.dtype}; it must be integers of shape "
            f"{shape}, one per {each}"
        )
    return array
