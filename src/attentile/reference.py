"""The same attention in plain NumPy: the fallback without the compiled core, and the oracle of its tests.

One (batch, head) slice at a time, so the scores take L x S numbers and no more:

    1. scores   s = scale * q k^T (+ bias)
    2. mask     not allowed -> -inf, or `fill` (the textbook's -1e9)
    3. softmax  p = exp(s - max) / sum
    4. values   out = p v, in which a value that a row may not see is left out, even if it is NaN or Inf
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _allowed(b: int, h: int, shape: tuple[int, int], lo: Array | None, hi: Array | None, mask: Array | None) -> Array:
    """Which keys (columns) each query (row) may see, before the bias is looked at."""
    allowed = np.ones(shape, bool)
    if lo is not None and hi is not None:
        item, j = min(b, len(lo) - 1), np.arange(shape[1])
        allowed &= (j >= lo[item, :, None]) & (j < hi[item, :, None])
    if mask is not None:
        allowed &= mask[b, h] != 0
    return allowed


def _softmax(scores: Array, allowed: Array) -> tuple[Array, Array]:
    """Weights and logsumexp of each row; rows without an allowed key give 0 and -inf."""
    top = scores.max(axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    empty = ~allowed.any(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        weights = np.where(allowed, np.exp(scores - np.where(empty, 0, top)), 0)
        total = weights.sum(axis=-1, keepdims=True)
        return np.where(empty, 0, weights / np.where(empty, 1, total)), (top + np.log(total))[:, 0]


def _values(weights: Array, v: Array, allowed: Array) -> Array:
    """weights @ v without the products of keys that a row may not see (0 * NaN is NaN)."""
    finite = np.isfinite(v)
    if finite.all() or allowed.all():
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            return weights @ v
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        out: Array = weights @ np.where(finite, v, 0)
        for j in np.flatnonzero(~finite.all(axis=-1)):
            out += np.where(allowed[:, j, None] & ~finite[j], weights[:, j, None] * np.where(finite[j], 0, v[j]), 0)
    return out


def attend(
    q: Array, k: Array, v: Array, out: Array, *, scale: float, threads: int, mask: Array | None = None,
    bias: Array | None = None, lo: Array | None = None, hi: Array | None = None, lse: Array | None = None,
    weights: Array | None = None, fill: float | None = None, softcap: float = 0, sinks: Array | None = None,
    slopes: Array | None = None, start: Array | None = None,
) -> None:  # fmt: skip
    """The pass over non-empty 4-D arrays, with the arguments of the compiled one (_core.attend); threads is unused."""
    group = q.shape[1] // k.shape[1]
    for b, h in np.ndindex(q.shape[:2]):
        keys, values = k[b, h // group], v[b, h // group]
        allowed = _allowed(b, h, (q.shape[2], k.shape[2]), lo, hi, mask)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            scores = (q[b, h] * q.dtype.type(scale)) @ keys.T
            if softcap:
                scores = np.tanh(scores / q.dtype.type(softcap)) * q.dtype.type(softcap)
            if bias is not None:
                allowed &= bias[b, h] != -np.inf
                scores = scores + bias[b, h]
            if slopes is not None and start is not None:
                position = start[min(b, len(start) - 1)] + np.arange(q.shape[2])
                distance = np.abs(position[:, None] - np.arange(k.shape[2])).astype(q.dtype)
                scores = scores - q.dtype.type(slopes[h]) * distance
        if fill is not None:
            scores, allowed = np.where(allowed, scores, scores.dtype.type(fill)), np.ones_like(allowed)
        p, row_lse = _softmax(scores, allowed)
        if sinks is not None:
            with np.errstate(over="ignore"):  # exp -> inf: the sink takes all
                p = (p / (1 + np.exp(sinks[h] - row_lse.astype(np.float64)))[:, None]).astype(q.dtype)
        out[b, h] = _values(p, values, allowed)
        if lse is not None:
            lse[b, h] = row_lse
        if weights is not None:
            weights[b, h] = p
