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


def promoted(function: str, *arrays: Array) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """(dtype of the arithmetic, dtype of the result) for arrays that are used together."""
    given = [array.dtype for array in arrays]
    dtype = given[0]
    if given.count(dtype) != len(given):
        for one in given:
            _computed_in(one, function)
        try:
            dtype = np.result_type(*arrays)
        except TypeError:
            dtypes = ", ".join(sorted({str(one) for one in given}))
            raise TypeError(f"{function}: NumPy has no common dtype of {dtypes}; convert with .astype()") from None
    elif dtype in _NATIVE:  # most calls; the rules below take longer
        dtype = np.dtype(dtype.type)
        return dtype, dtype
    compute = _computed_in(dtype, function)
    return compute, compute if dtype.kind in "iub" else dtype.newbyteorder("=")


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this dtype, rounded once; itself if it has it.

    Small numbers become subnormal or 0 and large ones Inf silently: that is what rounding to a dtype means, whatever
    np.seterr() says about the program around, and what the compiled core does.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        if array.dtype == np.float64 and dtype.name == "bfloat16":
            # Casts go through float32, so that comes first, rounded to odd: a last bit that is set wherever something
            # was lost keeps the second rounding from seeing a tie.
            single = array.astype(np.float32)
            bits = single.view(np.uint32)
            bits -= np.abs(single) > np.abs(array)  # towards zero
            bits |= single != array
            return single.astype(dtype)
        return array.astype(dtype)


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


def readable(array: Array, dtype: np.dtype[Any]) -> Array:
    """A floating array as the core reads a bias: of a dtype that it converts as it reads, else in this dtype."""
    own = array.dtype.newbyteorder("=")
    if own in _NATIVE or own == np.float16 or own.name == "bfloat16":
        return native(array, np.dtype(own.type))
    return _once(array, lambda some: kept_finite(some, dtype), array.ndim)


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
