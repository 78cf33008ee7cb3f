"""The same attention in plain NumPy: the fallback without the compiled core, and the oracle of its tests.

One (batch, head) slice and TILE_ROWS queries at a time, so the scores take TILE_ROWS x S numbers and no more:

    1. scores   s = scale * q k^T, then softcap, bias, ALiBi, score_mod
    2. mask     not allowed -> -inf, or `fill` (the textbook's -1e9)
    3. softmax  p = exp(s - max) / sum
    4. values   out = p v, in which a value that a row may not see is left out, even if it is NaN or Inf
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# (scores, b, h, i, j) -> scores: i (rows, 1) and j (1, S) are the indices of the tile's queries and keys.
ScoreMod = Callable[[Array, int, int, Array, Array], Array]


TILE_ROWS = 256


@dataclass(eq=False, repr=False)
class _Scores:
    """What decides the scores of one call, by the names of the core's arguments."""

    q: Array
    k: Array
    scale: float
    mask: Array | None
    bias: Array | None
    lo: Array | None
    hi: Array | None
    softcap: float
    slopes: Array | None
    start: Array | None
    score_mod: ScoreMod | None = None

    def allowed(self, b: int, h: int, rows: slice) -> Array:
        """Which keys (columns) the queries (rows) may see, before the bias is looked at."""
        j = np.arange(self.k.shape[2])
        allowed = np.ones((len(range(*rows.indices(self.q.shape[2]))), j.size), bool)
        if self.lo is not None and self.hi is not None:
            item = min(b, len(self.lo) - 1)
            allowed &= (j >= self.lo[item, rows, None]) & (j < self.hi[item, rows, None])
        if self.mask is not None:
            allowed &= self.mask[b, h, rows] != 0
        return allowed

    def tile(self, b: int, h: int, rows: slice) -> tuple[Array, Array]:
        """Final scores of some queries of one head, and which of them are allowed."""
        real, group = self.q.dtype.type, self.q.shape[1] // self.k.shape[1]
        i, j = np.arange(self.q.shape[2])[rows, None], np.arange(self.k.shape[2])[None]
        allowed = self.allowed(b, h, rows)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            scores = (self.q[b, h, rows] * real(self.scale)) @ self.k[b, h // group].T
            if self.softcap:
                scores = np.tanh(scores / real(self.softcap)) * real(self.softcap)
            if self.bias is not None:
                allowed &= self.bias[b, h, rows] != -np.inf
                scores = scores + self.bias[b, h, rows]
            if self.slopes is not None and self.start is not None:
                distance = np.abs(self.start[min(b, len(self.start) - 1)] + i - j).astype(self.q.dtype)
                scores = scores - real(self.slopes[h]) * distance
        if self.score_mod is not None:
            scores = _modified(self.score_mod, scores, b, h, i, j)
            allowed &= scores != -np.inf
        return scores, allowed


def _modified(score_mod: ScoreMod, scores: Array, b: int, h: int, i: Array, j: Array) -> Array:
    changed = np.asarray(score_mod(scores, b, h, i, j))
    if changed.shape != scores.shape or changed.dtype.kind != "f":
        raise ValueError(
            f"attention: score_mod returned shape {changed.shape} and dtype {changed.dtype} for scores {scores.shape}; "
            "it must return floating scores of the same shape"
        )
    with np.errstate(all="ignore"):
        return changed.astype(scores.dtype, copy=False)


def _softmax(scores: Array, allowed: Array, sink: Any) -> tuple[Array, Array, Array, Array]:
    """Of each row the weights, the logsumexp without the sink, the largest score and the sum of exp beside it.

    Rows without an allowed key give weights 0, -inf, -inf and 0.
    """
    top = scores.max(axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    empty = ~allowed.any(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        weights = np.where(allowed, np.exp(scores - np.where(empty, 0, top)), 0)
        total = weights.sum(axis=-1, keepdims=True)
        lse = top + np.log(total)
        if sink is not None:  # one more term; in float64, where inf means that it takes all
            with_sink = total + np.exp(sink - top.astype(np.float64))
            total = np.where(empty, 0, with_sink).astype(total.dtype)
        # A key that is not allowed has no weight in a NaN row either.
        return np.where(allowed, weights / total, 0), lse[:, 0], top[:, 0], total[:, 0]


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
    slopes: Array | None = None, start: Array | None = None, score_mod: ScoreMod | None = None,
    state: Array | None = None,
) -> None:  # fmt: skip
    """The pass over non-empty 4-D arrays, with the arguments of the compiled one (_core.attend); threads is unused."""
    source = _Scores(q, k, scale, mask, bias, lo, hi, softcap, slopes, start, score_mod)
    group = q.shape[1] // k.shape[1]
    for b, h, tile in np.ndindex(*q.shape[:2], -(-q.shape[2] // TILE_ROWS)):
        rows = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
        scores, allowed = source.tile(b, h, rows)
        if fill is not None:
            scores, allowed = np.where(allowed, scores, scores.dtype.type(fill)), np.ones_like(allowed)
        p, row_lse, top, total = _softmax(scores, allowed, None if sinks is None else sinks[h])
        out[b, h, rows] = _values(p, v[b, h // group], allowed)
        if lse is not None:
            lse[b, h, rows] = row_lse
        if weights is not None:
            weights[b, h, rows] = p
        if state is not None:
            state[b, h, rows, 0], state[b, h, rows, 1] = top, total


def stats(
    q: Array, k: Array, state: Array, *, scale: float, threads: int, mask: Array | None = None,
    bias: Array | None = None, lo: Array | None = None, hi: Array | None = None, softcap: float = 0,
    slopes: Array | None = None, start: Array | None = None, entropy: Array | None = None,
    largest: Array | None = None, received: Array | None = None, top_weights: Array | None = None,
    top_keys: Array | None = None, rows: Array | None = None, chosen: Array | None = None,
) -> None:  # fmt: skip
    """Statistics of the weights, with the arguments of _core.stats.

    Largest score and sum are kept apart: exp(scores - lse) would be off by the rounding of lse, which is that of the
    scores.
    """
    source = _Scores(q, k, scale, mask, bias, lo, hi, softcap, slopes, start)
    for b, h, tile in np.ndindex(*q.shape[:2], -(-q.shape[2] // TILE_ROWS)):
        part = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
        scores, allowed = source.tile(b, h, part)
        top, total = state[b, h, part, :1], state[b, h, part, 1:]
        with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
            p = np.where(allowed, np.exp(scores - top) / total, 0)
            if entropy is not None:  # -log p of two terms that are not negative, so neither cancels the other
                entropy[b, h, part] = np.where(p == 0, 0, p * (np.log(total) - (scores - top))).sum(axis=-1)
        if largest is not None:
            largest[b, h, part] = p.max(axis=-1)
        if received is not None:
            received[b, h] += p.sum(axis=0)
        if top_weights is not None and top_keys is not None:
            # In a NaN row the keys that it uses come first.
            order = np.argsort(np.where(np.isnan(p), -np.inf, -p), axis=-1, kind="stable")[:, : top_keys.shape[-1]]
            best = np.take_along_axis(p, order, axis=-1)
            top_weights[b, h, part, : order.shape[1]] = best
            top_keys[b, h, part, : order.shape[1]] = np.where(best == 0, -1, order)
        if rows is not None and chosen is not None:
            place = chosen[part]
            rows[b, h, place[place >= 0]] = p[place >= 0]
