"""Dtypes and memory: in what a call computes, what its result is, and arrays brought to either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_NATIVE = {np.dtype(np.float64), np.dtype(np.float32)}


def is_floating(dtype: np.dtype[Any]) -> bool:
    """NumPy's own floating types, and bfloat16, which is of no kind that NumPy knows."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def gradient_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """That of the gradient of an array of this dtype: its own, in native byte order; of integers, float64."""
    return np.dtype(dtype.type) if is_floating(dtype) else np.dtype(np.float64)


def _computed_in(dtype: np.dtype[Any], function: str) -> np.dtype[Any]:
    """The dtype of the arithmetic for this (promoted) input dtype."""
    dtype = dtype.newbyteorder("=")
    if dtype in (np.float32, np.float64):
        return np.dtype(dtype.type)  # NumPy's own object, by which the core knows it
    if dtype == np.float16 or dtype.name == "bfloat16":
        return np.dtype(np.float32)
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    raise TypeError(
        f"{function}: an array has dtype {dtype}; supported are float64, float32, float16, bfloat16, integers and bool"
    )


def _no_common(function: str, *dtypes: Any) -> TypeError:
    names = ", ".join(sorted(set(map(str, dtypes))))
    return TypeError(f"{function}: NumPy has no common dtype of {names}; convert with .astype()")


def promoted(function: str, *arrays: Array, bits: bool = False) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """(dtype of the arithmetic, dtype of the result) for arrays that are used together.

    bits: those of uint16 hold bfloat16, for which NumPy has no dtype, and so does the result if all of them do.
    """
    if bits:
        others = [array for array in arrays if array.dtype != np.uint16]
        if not others:
            return np.dtype(np.float32), np.dtype(np.uint16)
        if len(others) < len(arrays):
            others.append(np.empty(0, np.float32))  # what bfloat16 becomes next to any other dtype
        return promoted(function, *others)
    given = [array.dtype for array in arrays]
    dtype = given[0]
    if given.count(dtype) != len(given):
        for one in given:
            _computed_in(one, function)
        try:
            dtype = np.result_type(*arrays)
        except TypeError:
            raise _no_common(function, *given) from None
        if {"float16", "bfloat16"} <= {one.name for one in given}:  # in some processes NumPy finds one
            raise _no_common(function, *given)
    elif dtype in _NATIVE:  # most calls; the rules below take longer
        dtype = np.dtype(dtype.type)
        return dtype, dtype
    compute = _computed_in(dtype, function)
    return compute, compute if dtype.kind in "iub" else dtype.newbyteorder("=")


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this dtype, rounded once; itself if it has it.

    Small numbers become subnormal or 0 and large ones Inf silently: that is what rounding to a dtype means, whatever
    np.seterr() says about the program around, and what the compiled core does. Floating numbers in uint16 are bfloat16,
    as its bits.
    """
    if array.dtype == dtype:
        return array
    if dtype == np.uint16 and is_floating(array.dtype):
        return bfloat16_bits(array)
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16" or (dtype == np.float16 and array.dtype.itemsize > 8):  # NumPy casts in two steps
            array = halfway(array, np.dtype(np.float32))
        return array.astype(dtype)


def halfway(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in float32 or float64, from where a second rounding, to 16 bits, gives what a single one would.

    Rounded to odd: a last bit that is set wherever something was lost keeps the second rounding from seeing a tie.
    """
    if np.can_cast(array.dtype, dtype) and array.dtype.kind not in "iu":
        return array.astype(dtype, copy=False)
    if array.dtype.kind in "iu":
        array = array.astype(np.longdouble)  # which knows every bit of 64 where it is longer than float64
    with np.errstate(all="ignore"):
        near = array.astype(dtype)
        bits = near.view(f"u{near.itemsize}")
        bits -= np.abs(near) > np.abs(array)  # towards zero
        bits |= near != array
    return near


def _once(array: Array, convert: Callable[[Array], Array], axes: int) -> Array:
    """convert(array), done once for what the first `axes` axes only repeat, as those that np.broadcast_to makes."""
    if 0 not in array.strides[:axes]:
        return convert(array)
    some = tuple(slice(None if step else 1) for step in array.strides[:axes])
    return np.broadcast_to(convert(array[some]), array.shape)


def kept_finite(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in a floating dtype, rounded once; a finite number that is too large becomes the largest."""
    if array.dtype.itemsize > dtype.itemsize:
        largest = np.finfo(dtype).max
        array = np.where(np.isinf(array), array, np.clip(array, -largest, largest))
    return native(array, dtype)


def bfloat16_bits(array: Array) -> Array:
    """Real numbers rounded once to bfloat16, as its bits in uint16: NumPy has no such dtype of its own."""
    single = halfway(array, np.dtype(np.float32))
    bits = np.ascontiguousarray(single).view(np.uint32)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to even; NaN could become Inf
    return np.where(np.isnan(single), bits >> 16 | 0x40, near).astype(np.uint16)


def bfloat16_numbers(bits: Array) -> Array:
    """The numbers with these bits of bfloat16, in float32, exactly."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def _widened_by_core(array: Array, bits: bool) -> np.dtype[Any] | None:
    """The dtype in which the core reads this one, if it widens the numbers as it reads them."""
    own = array.dtype.newbyteorder("=")
    if own in _NATIVE or own == np.float16 or own.name == "bfloat16" or (bits and own == np.uint16):
        return np.dtype(own.type)
    return None


def readable(array: Array, dtype: np.dtype[Any], bits: bool = False) -> Array:
    """A bias as the core reads it: of a dtype that it converts as it reads, else in this dtype."""
    own = _widened_by_core(array, bits)
    if own is not None:
        return native(array, own)
    return _once(array, lambda some: kept_finite(some, dtype), array.ndim)


def stored(array: Array, dtype: np.dtype[Any], bits: bool = False) -> Array:
    """Queries, keys or values as the core reads them: likewise, with the last axis contiguous."""
    return ready(array, _widened_by_core(array, bits) or dtype)


def widened(array: Array, dtype: np.dtype[Any]) -> Array:
    """What stored() or readable() gave, in the dtype of the arithmetic."""
    return bfloat16_numbers(array).astype(dtype, copy=False) if array.dtype == np.uint16 else native(array, dtype)


def native(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this dtype, in the machine's byte order and aligned: itself whenever it already is."""
    if array.dtype != dtype:
        array = _once(array, lambda some: rounded(some, dtype), array.ndim)
    elif not array.flags.aligned:
        array = _once(array, lambda some: some.copy(order="C"), array.ndim)
    return array if array.dtype is dtype else array.view(dtype)


def ready(array: Array, dtype: np.dtype[Any]) -> Array:
    """The same with the last axis contiguous."""
    flags = array.flags
    if array.dtype is dtype and flags.c_contiguous and flags.aligned:  # in most calls
        return array
    array = native(array, dtype)
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        array = _once(array, lambda some: some.copy(order="C"), array.ndim - 1)
    return array
