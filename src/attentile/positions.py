"""Positional encodings."""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import config, reference_angles
from .masks import positive_index

Array = NDArray[Any]

_DTYPES = (np.float16, np.float32, np.float64)
_LARGEST_ANGLE = 2**50  # radians: the kernels take the quarter turns modulo 4 from float64 numbers below 2**51


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"positional_encoding: {name} is {value!r}; it must be an integer (int() converts it)"
        ) from None


def _base(base: Any) -> float:
    if not isinstance(base, Real):
        raise TypeError(f"positional_encoding: base is {base!r}; it must be a real number (float() converts it)")
    try:
        number = float(base)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"positional_encoding: base is {base!r}; it must be finite and positive, as 10000.0 is")
    return number


def _check_angles(base: float, first: int, end: int) -> None:
    """Refuses positions whose angles would be too large to keep their digits."""
    reach = max(abs(first), abs(end))
    if reach > _LARGEST_ANGLE:
        raise ValueError(
            f"positional_encoding: the positions from offset={first} to offset + seq_len = {end} must stay within "
            "-2**50 and 2**50; use a smaller offset"
        )
    if max(reach, 1) > base * _LARGEST_ANGLE:
        raise ValueError(
            f"positional_encoding: base is {base!r}, with which positions up to {reach} turn by {reach / base:.3g} "
            "radians; no angle may exceed 2**50, so use a larger base"
        )


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in _DTYPES:
        shown = found if found is not None else repr(dtype)
        raise TypeError(
            f"positional_encoding: dtype is {shown}; it must be float64, float32 or float16 (.astype() makes others)"
        )
    return np.dtype(found)


def _check_out(out: Any, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"positional_encoding: out is a {type(out).__name__}; it must be a NumPy array, or None")
    if out.shape != shape:
        raise ValueError(
            f"positional_encoding: out has shape {out.shape}; it must be (seq_len, d_model) = {shape}, or out=None"
        )
    if out.dtype != dtype:
        raise TypeError(
            f"positional_encoding: out has dtype {out.dtype} and dtype is {dtype}; they must be equal "
            "(give dtype= the native dtype of out)"
        )
    if not out.flags.writeable:
        raise ValueError("positional_encoding: out is read-only; it must be writable (out.copy() is)")


@lru_cache(maxsize=64)
def _ratio(base: float, d_model: int) -> tuple[float, float]:
    """base**(-2 / d_model) as a sum of two floats, exact to 2**-106 of it; a float power would lose half the digits."""
    import decimal  # here, because most programs that import attentile never come by

    context = decimal.Context(prec=60)
    ratio = context.power(decimal.Decimal(base), context.divide(decimal.Decimal(-2), decimal.Decimal(d_model)))
    high = float(ratio)
    return high, float(context.subtract(ratio, decimal.Decimal(high)))


def _in_place(out: Array) -> bool:
    """Whether the compiled core can write here: float32 or float64, aligned, last axis contiguous."""
    return out.dtype != np.float16 and out.flags.aligned and out.strides[1] == out.itemsize


def positional_encoding(
    seq_len: int,
    d_model: int,
    *,
    base: float = 10000.0,
    offset: int = 0,
    dtype: DTypeLike = np.float64,
    out: Array | None = None,
) -> Array:
    """Sinusoidal positional encoding.

    With pos = offset + row, column 2i is ``sin(pos * base**(-2i / d_model))`` and column 2i+1 the cosine of the same
    angle. An odd d_model ends with a sine. Angles have twice the digits of float64: a value is within 4.5e-16 (2 ULP of
    1.0) of the formula's up to position 2**40, where ``np.sin(pos * frequency)`` is off by 1e-10 at position 10**6
    already. A row depends on its position alone, bit for bit, however a sequence is cut into calls.

    Parameters
    ----------
    seq_len : int
        Number of rows; may be 0.
    d_model : int
        Number of columns, at least 1, odd or even.
    base : float, optional
        The wavelengths run from 2 pi to base * 2 pi positions. Finite and positive.
    offset : int, optional
        Position of the first row; may be negative. Positions lie within -2**50 and 2**50.
    dtype : dtype, optional
        float64 (default), float32 or float16; the latter two are the float64 result rounded once.
    out : ndarray (seq_len, d_model), optional
        Array of this dtype with any strides to write into. Fresh memory can cost more than the computation.

    Returns
    -------
    ndarray (seq_len, d_model)
        The encoding, each value in [-1, 1]; `out` if it was given.

    Raises
    ------
    TypeError
        If seq_len, d_model or offset is not an integer, base not a number, dtype not one of the three, or out not an
        array of that dtype.
    ValueError
        If a number is out of its range, or out has another shape or is read-only. Nothing has been written then.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.5.

    Examples
    --------
    >>> from attentile import positional_encoding
    >>> positional_encoding(3, 5).round(3)
    array([[ 0.   ,  1.   ,  0.   ,  1.   ,  0.   ],
           [ 0.841,  0.54 ,  0.025,  1.   ,  0.001],
           [ 0.909, -0.416,  0.05 ,  0.999,  0.001]])
    """
    rows, width, first = _integer("seq_len", seq_len), _integer("d_model", d_model), _integer("offset", offset)
    if rows < 0:
        raise ValueError(f"positional_encoding: seq_len is {rows}; it must be 0 or a positive integer")
    if width < 1:
        raise ValueError(f"positional_encoding: d_model is {width}; it must be a positive integer")
    number = _base(base)
    _check_angles(number, first, first + rows)
    kind = _dtype(dtype)
    if out is None:
        out = np.empty((rows, width), kind)
    else:
        _check_out(out, (rows, width), kind)
    if rows == 0:
        return out

    ratio, core = _ratio(number, width), config.core()
    if core is None:
        out[...] = reference_angles.positional_encoding(rows, width, first, ratio, kind)
    elif _in_place(out):
        core.encode(out, float(first), *ratio)
    else:
        whole = np.empty((rows, width), np.float32 if kind == np.float32 else np.float64)
        core.encode(whole, float(first), *ratio)
        out[...] = whole
    return out


def alibi_slopes(n_heads: int) -> Array:
    """Slopes of ALiBi for `attention(alibi_slopes=...)`.

    For n a power of two, 2^(-8 / n), 2^(-16 / n), ..., 2^-8. For other head counts the slopes of the largest power of
    two below, followed by every second one of the next power of two.

    Parameters
    ----------
    n_heads : int
        Number of query heads, at least 1.

    Returns
    -------
    ndarray of float64, shape (n_heads,)

    Raises
    ------
    TypeError, ValueError
        If n_heads is not a positive integer.

    Notes
    -----
    Rule: Press, Smith, Lewis, "Train Short, Test Long", 2022, and the authors' code for other head counts.

    Examples
    --------
    >>> from attentile import alibi_slopes
    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    heads = positive_index("alibi_slopes", "n_heads", n_heads)
    power = 1 << (heads.bit_length() - 1)
    whole = np.exp2(-8.0 / power * np.arange(1, power + 1))
    between = np.exp2(-4.0 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([whole, between])
