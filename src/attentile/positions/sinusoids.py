"""Sinusoidal positional encoding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arguments import check_out, finite, integer
from ..core import twin_angles
from ..runtime import backend
from ..storage import rounded

Array = NDArray[Any]

_NAME = "positional_encoding"  # in errors
_LARGEST_ANGLE = 2**50  # radians: the kernels take the quarter turns modulo 4 from float64 numbers below 2**51


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
        if found in (np.float64, np.float32, np.float16):
            return found
        shown = str(found)
    except TypeError:
        shown = repr(dtype)
    raise TypeError(f"{_NAME}: dtype is {shown}; it must be float64, float32 or float16 (.astype() makes others)")


@lru_cache(maxsize=64)
def _ratio(base: float, d_model: int) -> tuple[float, float]:
    """base**(-2 / d_model) as a sum of two floats, exact to 2**-106 of it; a float power would lose half the digits."""
    import decimal  # here, because most programs that import attentile never come by

    context = decimal.Context(prec=60)
    ratio = context.power(decimal.Decimal(base), context.divide(decimal.Decimal(-2), decimal.Decimal(d_model)))
    high = float(ratio)
    return high, float(context.subtract(ratio, decimal.Decimal(high)))


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
    angle; an odd d_model ends with a sine. With ``base=10000 ** (d_model / (d_model - 2))``, sines (``[:, 0::2]``) and
    then cosines (``[:, 1::2]``) are the positions of Whisper and of fairseq's models. Angles have twice the digits of
    float64: up to position 2**40 a value is within 4.5e-16 (2 ULP of 1.0) of the formula's, from which plain float64
    is off by 1e-10 at position 10**6 already. The bits of a row depend on its position alone. Formula: Vaswani et al.,
    "Attention Is All You Need", 2017, section 3.5.

    Parameters
    ----------
    seq_len, d_model : int
        Numbers of rows, which may be 0, and of columns, at least 1, odd or even.
    base : float, optional
        The wavelengths run from 2 pi to base * 2 pi positions. Finite and positive.
    offset : int, optional
        Position of the first row; may be negative. Positions lie within -2**50 and 2**50.
    dtype : dtype, optional
        float64 (default), float32 or float16; the latter two are the float64 result rounded once.
    out : ndarray, shape (seq_len, d_model), optional
        Array of this dtype with any strides to write into. Fresh memory can cost more than the computation.

    Returns
    -------
    ndarray, shape (seq_len, d_model)
        The encoding, each value in [-1, 1]; `out` if it was given.

    Raises
    ------
    TypeError
        If seq_len, d_model or offset is not an integer, base not a number, dtype another one, or out not an array.
    ValueError
        If a number is out of its range, or out has another shape or dtype, is read-only or overlaps itself. Nothing has
        been written then.

    Examples
    --------
    >>> from attentile import positional_encoding
    >>> positional_encoding(3, 5).round(3)
    array([[ 0.   ,  1.   ,  0.   ,  1.   ,  0.   ],
           [ 0.841,  0.54 ,  0.025,  1.   ,  0.001],
           [ 0.909, -0.416,  0.05 ,  0.999,  0.001]])
    """
    rows = integer(_NAME, "seq_len", seq_len, 0, otherwise="0 or a positive integer")
    width = integer(_NAME, "d_model", d_model, 1, otherwise="a positive integer")
    first = integer(_NAME, "offset", offset)
    number = finite(_NAME, "base", base, hint=", as 10000.0 is")
    end = first + rows
    reach = max(abs(first), abs(end))
    if reach > _LARGEST_ANGLE:
        raise ValueError(
            f"{_NAME}: the positions from offset={first} to offset + seq_len = {end} must stay within "
            "-2**50 and 2**50; use a smaller offset"
        )
    if max(reach, 1) > number * _LARGEST_ANGLE:
        raise ValueError(
            f"{_NAME}: base is {number!r}, with which positions up to {reach} turn by {reach / number:.3g} "
            "radians; no angle may exceed 2**50, so use a larger base"
        )
    kind = _dtype(dtype)
    if out is None:
        out = np.empty((rows, width), kind)
    else:
        check_out(_NAME, out, (rows, width), kind)
    if rows == 0:
        return out
    direct = kind != np.float16 and out.flags.aligned and out.strides[1] == out.itemsize  # the core can write into it
    whole = out if direct else np.empty((rows, width), np.float32 if kind == np.float32 else np.float64)
    (backend.active or twin_angles).encode(whole, float(first), *_ratio(number, width))
    if not direct:
        out[...] = rounded(whole, kind)
    return out
