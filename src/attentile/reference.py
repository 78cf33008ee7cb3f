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


def _final_scores(
    b: int, h: int, q: Array, k: Array, scale: float, mask: Array | None, bias: Array | None, lo: Array | None,
    hi: Array | None, softcap: float, slopes: Array | None, start: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Scores of one (batch, head) slice after every change, and which of them are allowed."""
    group = q.shape[1] // k.shape[1]
    allowed = _allowed(b, h, (q.shape[2], k.shape[2]), lo, hi, mask)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        scores = (q[b, h] * q.dtype.type(scale)) @ k[b, h // group].T
        if softcap:
            scores = np.tanh(scores / q.dtype.type(softcap)) * q.dtype.type(softcap)
        if bias is not None:
            allowed &= bias[b, h] != -np.inf
            scores = scores + bias[b, h]
        if slopes is not None and start is not None:
            position = start[min(b, len(start) - 1)] + np.arange(q.shape[2])
            distance = np.abs(position[:, None] - np.arange(k.shape[2])).astype(q.dtype)
            scores = scores - q.dtype.type(slopes[h]) * distance
    return scores, allowed


def attend(
    q: Array, k: Array, v: Array, out: Array, *, scale: float, threads: int, mask: Array | None = None,
    bias: Array | None = None, lo: Array | None = None, hi: Array | None = None, lse: Array | None = None,
    weights: Array | None = None, fill: float | None = None, softcap: float = 0, sinks: Array | None = None,
    slopes: Array | None = None, start: Array | None = None,
) -> None:  # fmt: skip
    """The pass over non-empty 4-D arrays, with the arguments of the compiled one (_core.attend); threads is unused."""
    group = q.shape[1] // k.shape[1]
    for b, h in np.ndindex(q.shape[:2]):
        scores, allowed = _final_scores(b, h, q, k, scale, mask, bias, lo, hi, softcap, slopes, start)
        if fill is not None:
            scores, allowed = np.where(allowed, scores, scores.dtype.type(fill)), np.ones_like(allowed)
        p, row_lse = _softmax(scores, allowed)
        if sinks is not None:
            with np.errstate(over="ignore"):  # exp -> inf: the sink takes all
                p = (p / (1 + np.exp(sinks[h] - row_lse.astype(np.float64)))[:, None]).astype(q.dtype)
        out[b, h] = _values(p, v[b, h // group], allowed)
        if lse is not None:
            lse[b, h] = row_lse
        if weights is not None:
            weights[b, h] = p


def stats(
    q: Array, k: Array, lse: Array, *, scale: float, threads: int, mask: Array | None = None,
    bias: Array | None = None, lo: Array | None = None, hi: Array | None = None, softcap: float = 0,
    slopes: Array | None = None, start: Array | None = None, entropy: Array | None = None,
    largest: Array | None = None, received: Array | None = None, top_weights: Array | None = None,
    top_keys: Array | None = None, rows: Array | None = None, chosen: Array | None = None,
) -> None:  # fmt: skip
    """Statistics of the weights, with the arguments of _core.stats."""
    for b, h in np.ndindex(q.shape[:2]):
        scores, allowed = _final_scores(b, h, q, k, scale, mask, bias, lo, hi, softcap, slopes, start)
        with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
            p = np.where(allowed, np.exp(scores - np.where(np.isneginf(lse[b, h]), 0, lse[b, h])[:, None]), 0)
            if entropy is not None:
                entropy[b, h] = -np.where(p > 0, p * np.log(p), p).sum(axis=-1)
        if largest is not None:
            largest[b, h] = p.max(axis=-1)
        if received is not None:
            received[b, h] = p.sum(axis=0)
        if top_weights is not None and top_keys is not None:
            order = np.argsort(-p, axis=-1, kind="stable")[:, : top_keys.shape[-1]]
            best = np.take_along_axis(p, order, axis=-1)
            top_weights[b, h, :, : order.shape[1]], top_keys[b, h, :, : order.shape[1]] = (
                best,
                np.where(best > 0, order, -1),
            )
        if rows is not None and chosen is not None:
            rows[b, h] = p[np.argsort(np.where(chosen < 0, len(chosen), chosen), kind="stable")[: rows.shape[2]]]
