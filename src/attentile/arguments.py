"""Checks of arguments: one rule and one text for all functions. Text and booleans are not numbers."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .storage import is_floating

Array = NDArray[Any]


@contextmanager
def named_in_errors(function: str) -> Iterator[None]:
    """Checks that speak of attention() speak of `function` instead."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        if type(error) not in (TypeError, ValueError) or not text.startswith("attention: "):
            raise
        raise type(error)(function + text.removeprefix("attention")) from None


def unknown_option(function: str, options: Mapping[str, Any], known: Set[str]) -> None:
    """Refuses keyword arguments that a function does not have."""
    if not options.keys() <= known:
        raise TypeError(f"{function}: unexpected keyword argument {min(options.keys() - known)!r}")


# ---- numbers ----

_INTEGER = "an integer (int() converts it)"


def index(value: Any) -> int:
    """operator.index(value), with booleans refused; its TypeError is for callers, who know the argument's name."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{value!r} is no integer")
    return operator.index(value)


def integer(
    function: str, name: str, value: Any, least: float = -math.inf, *, wanted: str = _INTEGER, otherwise: str = ""
) -> int:
    """value as an int of at least `least`. What it must be: `wanted`, and `otherwise` for one that is too small."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} is {value!r}; it must be {wanted}") from None
    if number < least:
        raise ValueError(f"{function}: {name} is {number}; it must be {otherwise or wanted}")
    return number


def between(function: str, name: str, value: Any, highest: Array, what: str) -> Array:
    """An integer, or one per item, from 0 to `highest` of each item: as one per item."""
    array = as_array(function, name, value).copy()  # so that what is used is what was checked, whatever threads do
    if array.dtype.kind not in "iu" and not (array.size == 0 and highest.size == 0):
        raise TypeError(f"{function}: {name} has dtype {array.dtype}; it must be an integer, or one per item")
    if array.shape not in ((), highest.shape):
        wanted = f"one integer, or {len(highest)}, one per item"
        raise ValueError(f"{function}: {name} has shape {array.shape}; give {wanted}")
    items = np.broadcast_to(array, highest.shape)
    wrong = (items < 0) | (items > highest)
    if wrong.any():
        item = int(wrong.argmax())
        bounds = f"between 0 and {highest[item]} ({what})"
        raise ValueError(f"{function}: {name} is {items[item]} for item {item}; it must lie {bounds}")
    return items.astype(np.intp)


def positive_index(function: str, name: str, value: Any) -> int:
    """value as a positive int."""
    if type(value) is int and value > 0:  # in most calls
        return value
    return integer(function, name, value, 1, wanted="a positive integer")


def as_real(function: str, name: str, value: Any, wanted: str = "a number") -> float:
    """float(value) of a real number, Python's or NumPy's; float() alone would accept text and booleans."""
    refused = isinstance(value, (str, bytes, bytearray, bool, np.bool_)) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "USV"
    )
    try:
        if refused or getattr(value, "dtype", None) in (bool, object):
            raise TypeError
        return float(value)
    except OverflowError:  # a Python integer
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {name} is {value!r}; it must be {wanted}") from None


def check_scale(function: str, scale: Any) -> float | None:
    """scale as a finite number; None stays None."""
    if scale is None:
        return None
    number = as_real(function, "scale", scale)
    if not math.isfinite(number):
        raise ValueError(f"{function}: scale is {number}; it must be finite")
    return number


def finite(function: str, name: str, value: Any, least: float | None = None, hint: str = "") -> float:
    """value, a Python or NumPy scalar, as a finite float of at least `least`, or above 0 without it."""
    if type(value) is float and 1.0 <= value < math.inf and least is None:  # the base, at every token
        return value
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {name} is {value!r}; it must be a real number (float() converts it)")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and (number > 0 if least is None else number >= least)):
        wanted = "positive" if least is None else f"at least {least:g}"
        raise ValueError(f"{function}: {name} is {value!r}; it must be finite and {wanted}{hint}")
    return number


def flag(function: str, name: str, value: Any) -> bool:
    """value as a bool, Python's or NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {name} is {value!r}; it must be True or False")
    return bool(value)


# ---- arrays ----


def as_array(function: str, name: str, value: Any) -> Array:
    """np.asarray of what a caller gives, but not of a masked array, whose mask would be lost silently."""
    if type(value) is np.ndarray:
        return value
    ma = sys.modules.get("numpy.ma.core")  # where it is not loaded there is no masked array, and to load it takes time
    if ma is not None and isinstance(value, ma.MaskedArray):
        raise TypeError(
            f"{function}: {name} is a masked array, whose mask would be lost; pass {name}.filled(...), and keys to "
            "leave out as mask= of attention"
        )
    return np.asarray(value)


def as_floating(function: str, name: str, value: Any, wanted: str) -> Array:
    """The same of floating numbers, bfloat16 too."""
    array = as_array(function, name, value)
    if not is_floating(array.dtype):
        raise TypeError(f"{function}: {name} has dtype {array.dtype}; {wanted}")
    return array


def check_out(function: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "out") -> None:
    """Refuses an out that is not a writable array of this shape and dtype with every element in a place of its own.

    name: that of the argument.
    """
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{function}: {name} is a {type(out).__name__}; it must be a NumPy array, or None")
    as_array(function, name, out)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"{function}: {name} has shape {out.shape} and dtype {out.dtype}; they must be {shape} and {dtype}, "
            "those of the result"
        )
    if not out.flags.writeable:
        raise ValueError(f"{function}: {name} is read-only; pass a writable array ({name}.copy() is)")
    if out.flags.c_contiguous or out.size == 0:
        return
    reach = out.itemsize  # bytes that the axes so far cover, those with the smallest steps first
    for step, n in sorted((abs(step), n) for step, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if step < reach:
            raise ValueError(
                f"{function}: {name} has shape {out.shape} and strides {out.strides}, so that elements share memory; "
                "pass an array that does not overlap itself"
            )
        reach += (n - 1) * step
