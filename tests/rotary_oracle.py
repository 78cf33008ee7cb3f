"""The oracle of the rotary tests: pairs as complex numbers times exp(i angle), in float64 and to 50 digits."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def plain(dim: int, base: float = 10000.0) -> Array:
    """base^(-2 i / dim), radians per position."""
    return base ** (-2 * np.arange(dim // 2) / dim)


def members(x: Array, dim: int, interleaved: bool) -> tuple[Array, Array]:
    """Views of the first and of the second members of all pairs."""
    if interleaved:
        return x[..., 0:dim:2], x[..., 1:dim:2]
    return x[..., : dim // 2], x[..., dim // 2 : dim]


def multiplied(x: Array, factors: Array, interleaved: bool = False) -> Array:
    """x (..., H, L, D) in float64, its pairs times complex factors (..., L, dim / 2); what lies beyond is copied."""
    y = np.array(x, np.float64)
    dim = 2 * factors.shape[-1]
    a, b = members(x.astype(np.float64), dim, interleaved)
    z = (a + 1j * b) * (factors if x.ndim == 2 else factors[..., None, :, :])
    first, second = members(y, dim, interleaved)
    first[...], second[...] = z.real, z.imag
    return y


def rotated(
    x: Array, positions: Any = None, frequencies: Array | None = None, interleaved: bool = False, scale: float = 1.0
) -> Array:
    """positions (L,) or (..., L), frequencies (dim / 2,); by default 0, 1, ... and base 10000."""
    positions = np.arange(x.shape[-2]) if positions is None else np.asarray(positions)
    frequencies = plain(x.shape[-1]) if frequencies is None else frequencies
    return multiplied(x, scale * np.exp(1j * positions[..., None] * frequencies), interleaved)


def exact_error(found: Array, x: Array, position: int, base: float = 10000.0, interleaved: bool = False) -> float:
    """Largest error of one row (D,) rotated in full, against 50 digits."""
    dim = len(x)
    a, b = (part.tolist() for part in members(x.astype(np.float64), dim, interleaved))
    first, second = (part.tolist() for part in members(found.astype(np.float64), dim, interleaved))
    worst = mpmath.mpf(0)
    with mpmath.workdps(50):
        for i in range(dim // 2):
            angle = position * mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / dim)
            z = mpmath.mpc(a[i], b[i]) * mpmath.expj(angle)
            worst = max(worst, abs(z.real - first[i]), abs(z.imag - second[i]))
    return float(worst)
