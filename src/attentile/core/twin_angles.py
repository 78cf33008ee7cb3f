"""Positional encoding and rotary embedding in plain NumPy: the fallback without the compiled core, and its oracle.

A float64 product position * frequency moves the angle at position 10**6 by 6e-11. So frequencies and angles are
unevaluated sums (high, low) of two float64 arrays, about 106 bits, and they count quarter turns: whole ones drop out by
an exact subtraction, and only what is left of the angle, |d| <= 1/2 quarter turns, becomes radians. Unlike
kernels/angles.inc, which rotates one table by another, every sine here is computed from its own angle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..storage import rounded

Array = NDArray[Any]
Sum = tuple[Any, Any]  # (high, low): floats or arrays, |low| at most half a unit in the last place of high

_TWO_OVER_PI: Sum = (float.fromhex("0x1.45f306dc9c883p-1"), float.fromhex("-0x1.6b01ec5417056p-55"))
_HALF_PI: Sum = (float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54"))
_BLOCK = 1 << 14  # pairs computed together: some 15 arrays of this size, 128 KiB each, stay in the L2 and L3 cache


class Rotation(NamedTuple):
    """How the pairs of a row are rotated: by high and low, or by cosines and sines; the others are None."""

    pairs: int
    interleaved: bool  # pairs are elements 2i and 2i + 1, else i and i + pairs
    high: Array | None  # quarter turns per position: high + low
    low: Array | None
    cosines: Array | None  # tables, row = position
    sines: Array | None
    cosine_factor: float
    sine_factor: float  # a negative one rotates backwards


def _product_error(a: Any, b: Any, product: Any) -> Any:
    """a * b - product, exact: the halves of each factor (Veltkamp) have exact products (Dekker)."""
    wide_a, wide_b = a * 134217729.0, b * 134217729.0  # 2**27 + 1
    a1, b1 = wide_a - (wide_a - a), wide_b - (wide_b - b)
    a2, b2 = a - a1, b - b1
    return a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)


def _renormalised(high: Any, low: Any) -> Sum:
    """high + low for |high| >= |low| or high = 0, exact."""
    total = high + low
    return total, low - (total - high)


def _product(a: Sum, b: Sum) -> Sum:
    """a * b, to about 2**-104 of it."""
    high = a[0] * b[0]
    return _renormalised(high, _product_error(a[0], b[0], high) + a[0] * b[1] + a[1] * b[0])


def _frequencies(pairs: int, ratio: Sum) -> Sum:
    """2 / pi * ratio**i for i < pairs: quarter turns per position. Each round doubles how many powers are known."""
    powers = np.array(_TWO_OVER_PI)[:, None]
    while powers.shape[1] < pairs:
        powers = np.hstack([powers, _product((powers[0], powers[1]), ratio)])
        ratio = _product(ratio, ratio)
    return powers[0, :pairs], powers[1, :pairs]


def _sincos(positions: Array, frequencies: Sum) -> tuple[Array, Array]:
    """Sines and cosines, (rows, pairs), of positions (rows, 1) times frequencies (pairs,) in quarter turns."""
    high, low = frequencies
    turns = positions * high
    whole = np.rint(turns)
    d = _renormalised(turns - whole, _product_error(positions, high, turns) + positions * low)
    radians = d[0] * _HALF_PI[0]
    rest = _product_error(d[0], _HALF_PI[0], radians) + d[0] * _HALF_PI[1] + d[1] * _HALF_PI[0]
    sine, cosine = np.sin(radians), np.cos(radians)
    sine, cosine = sine + rest * cosine, cosine - rest * sine
    quarter = whole.astype(np.int64) & 3
    odd = (quarter & 1) == 1
    sine, cosine = np.where(odd, cosine, sine), np.where(odd, sine, cosine)
    return np.where(quarter >= 2, -sine, sine), np.where((quarter == 1) | (quarter == 2), -cosine, cosine)


def encode(out: Array, first_position: float, ratio_high: float, ratio_low: float) -> None:
    """The core's function of this name: sinusoids of positions first_position, first_position + 1, ... into out."""
    width = out.shape[1]
    pairs = (width + 1) // 2
    step = max(1, _BLOCK // pairs)
    with np.errstate(under="ignore"):  # of frequencies next to 0, whatever np.seterr says
        frequencies = _frequencies(pairs, (ratio_high, ratio_low))
        for start in range(0, len(out), step):
            block = out[start : start + step]
            positions = first_position + np.arange(start, start + len(block), dtype=np.float64)[:, None]
            sine, cosine = _sincos(positions, frequencies)
            block[:, 0::2] = sine
            block[:, 1::2] = cosine[:, : width // 2]


def rotate(x: Array, y: Array, rotation: Rotation, positions: Array | None, first: int, threads: int) -> None:
    """The core's function of this name (see _rotary.pxi): x (B, H, L, D) rotated into y, which may be x."""
    items, heads, length, width = x.shape
    n = 2 * rotation.pairs
    one, two = (slice(0, n, 2), slice(1, n, 2)) if rotation.interleaved else (slice(0, n // 2), slice(n // 2, n))
    if positions is None:
        positions = first + np.arange(length)[None]
    step = max(1, _BLOCK // (heads * width))
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):  # as in the core, which never warns
        for item, start in np.ndindex(items, -(-length // step)):
            rows = slice(start * step, (start + 1) * step)
            at = positions[item % len(positions), rows]
            if rotation.high is not None and rotation.low is not None:
                sine, cosine = _sincos(at.astype(np.float64)[:, None], (rotation.high, rotation.low))
            elif rotation.cosines is not None and rotation.sines is not None:
                sine, cosine = rotation.sines[at].astype(np.float64), rotation.cosines[at].astype(np.float64)
            sine, cosine = sine * rotation.sine_factor, cosine * rotation.cosine_factor
            block, out = x[item, :, rows], y[item, :, rows]
            a, b = block[..., one].astype(np.float64), block[..., two].astype(np.float64)  # copies: y may be x
            out[..., one] = rounded(a * cosine - b * sine, y.dtype)
            out[..., two] = rounded(b * cosine + a * sine, y.dtype)
            out[..., n:] = block[..., n:]
