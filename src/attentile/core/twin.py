"""The same attention in plain NumPy: the fallback without the compiled core, and the oracle of its tests.

One (batch, head) slice and TILE_ROWS queries at a time, so the scores take TILE_ROWS x S numbers and no more:

    1. scores   s = scale * q k^T, then softcap, bias, ALiBi, score_mod
    2. mask     not allowed -> -inf
    3. softmax  p = exp(s - max); its sum is kept apart
    4. values   o = p v, in which a value that a row may not see is left out, even if it is NaN or Inf

attend(), stats() and explain() take what the compiled ones take (_core.pyi).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .constants import LOG2E

Array = NDArray[Any]

TILE_ROWS = 256


class _Rows(NamedTuple):
    """What the rows of one tile know of their keys; natural units. Rows without a key: -inf, 0, 0."""

    top: Array  # (rows, 1) largest score
    total: Array  # (rows, 1) sum of exp(score - top)
    values: Array  # (rows, Dv) sum of the values with these weights


class _Tiles:
    """The scores of one call, a tile at a time. Arrays have every batch axis and all heads, by broadcasting."""

    def __init__(self, scores: Any) -> None:
        self.source = scores
        self.group = scores.heads // scores.kv_heads
        shape = (*scores.lead, scores.heads, scores.queries, scores.keys)
        self.q = headed(scores.q, scores.lead)
        self.k = headed(scores.k, scores.lead)
        self.mask = None if scores.mask is None else np.broadcast_to(scores.mask, shape)
        self.bias = None if scores.bias is None else np.broadcast_to(scores.bias, shape)
        intervals = scores.structure.intervals(scores.queries, scores.keys)
        rows = (*scores.lead, scores.queries)
        self.intervals = None if intervals is None else [np.broadcast_to(side, rows) for side in intervals]
        self.start = np.broadcast_to(scores.structure.start(scores.queries, scores.keys), scores.lead)

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...], int, slice]]:
        """(number of the item, its index, head, rows) of each tile."""
        tiles = -(-self.source.queries // TILE_ROWS)
        for b, item in enumerate(np.ndindex(*self.source.lead)):
            for h, tile in np.ndindex(self.source.heads, tiles):
                yield b, item, h, slice(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, self.source.queries))

    def allowed(self, item: tuple[int, ...], h: int, rows: slice) -> Array:
        """Which keys (columns) the queries (rows) may see, before the bias is looked at."""
        j = np.arange(self.source.keys)
        allowed = np.ones((rows.stop - rows.start, j.size), bool)
        if self.intervals is not None:
            lo, hi = (side[item][rows, None] for side in self.intervals)
            allowed &= (j >= lo) & (j < hi)
        if self.mask is not None:
            allowed &= self.mask[item][h, rows]
        return allowed

    def tile(self, b: int, item: tuple[int, ...], h: int, rows: slice) -> tuple[Array, Array]:
        """Final scores of some queries of one head, and which of them are allowed."""
        source, real = self.source, self.q.dtype.type
        i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(source.keys)[None]
        allowed = self.allowed(item, h, rows)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            scores = (self.q[item][h, rows] * real(source.scale)) @ self.k[item][h // self.group].T
            if source.softcap is not None:
                scores = _capped(scores, source.softcap)
            if self.bias is not None:
                bias = self.bias[item][h, rows]
                allowed &= bias != -np.inf
                scores = scores + bias
            if source.slopes is not None:
                distance = np.abs(self.start[item] + i - j).astype(self.q.dtype)
                scores = scores - real(source.slopes[h]) * distance
        if source.score_mod is not None:
            scores = _modified(source.score_mod(scores, b, h, i, j), scores)
            allowed &= scores != -np.inf
        return scores, allowed


def headed(array: Array, lead: tuple[int, ...]) -> Array:
    """(..., heads, rows, width) with all batch axes, by broadcasting."""
    array = array[None] if array.ndim == 2 else array
    return np.broadcast_to(array, (*lead, *array.shape[-3:]))


def _capped(scores: Array, softcap: float) -> Array:
    """Within a quarter of the range, beyond which no score changes by a bit, and above 1 / its largest number."""
    limits = np.finfo(scores.dtype)
    cap = scores.dtype.type(min(max(softcap, float(limits.smallest_normal)), float(limits.max) / 4))
    return np.asarray(np.tanh(scores / cap) * cap)


def _modified(changed: Any, scores: Array) -> Array:
    """What score_mod has made of the scores."""
    found = np.asarray(changed)
    if found.shape != scores.shape or found.dtype.kind != "f":
        raise ValueError(
            f"attention: score_mod returned shape {found.shape} and dtype {found.dtype} for scores {scores.shape}; "
            "it must return floating scores of the same shape"
        )
    with np.errstate(all="ignore"):
        return found.astype(scores.dtype, copy=False)


def _weigh(scores: Array, allowed: Array, v: Array, before: _Rows | None) -> tuple[_Rows, Array]:
    """The rows after these keys, and the weights exp(score - top) of the keys."""
    top = scores.max(axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    if before is not None:
        top = np.maximum(top, before.top)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        weights = np.where(allowed, np.exp(scores - np.where(np.isneginf(top), 0, top)), 0)
        total = weights.sum(axis=-1, keepdims=True)
        values = _values(weights, v, allowed)
        if before is not None:
            share = np.where(np.isneginf(before.top), 0, np.exp(before.top - top)).astype(top.dtype)
            total, values = total + share * before.total, values + share * before.values
    return _Rows(top, total, values), weights


def _values(weights: Array, v: Array, allowed: Array) -> Array:
    """weights @ v without the products of keys that a row may not see (0 * NaN is NaN)."""
    finite = np.isfinite(v)
    if finite.all() or allowed.all():
        return weights @ v
    out: Array = weights @ np.where(finite, v, 0)
    for j in np.flatnonzero(~finite.all(axis=-1)):
        out += np.where(allowed[:, j, None] & ~finite[j], weights[:, j, None] * np.where(finite[j], 0, v[j]), 0)
    return out


def _final_total(rows: _Rows, allowed: Array, sink: Any) -> Array:
    """The sum of exp that a row is divided by: with the sink; 0 without keys, NaN if all its keys score -inf."""
    total = np.where((rows.total == 0) & allowed.any(axis=-1, keepdims=True), np.nan, rows.total)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if sink is not None:  # in float64, where inf means that it takes all
            total = np.where(total == 0, 0, total + np.exp(sink - rows.top.astype(np.float64)))
        return total.astype(rows.total.dtype)


def _write(outputs: Any, at: tuple[Any, ...], rows: _Rows, weights: Array, allowed: Array, sink: Any) -> None:
    """Everything that is wanted of one tile; at: its place in the results."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        if outputs.partial is not None:
            outputs.partial.m[at] = (rows.top * rows.top.dtype.type(LOG2E))[:, 0]
            outputs.partial.l[at] = rows.total[:, 0]
            outputs.partial.o[at] = rows.values
        if outputs.lse is not None:
            outputs.lse[at] = (rows.top + np.log(_final_total(rows, allowed, None)))[:, 0]
        total = _final_total(rows, allowed, sink)
        if outputs.weights is not None:  # a key that is not allowed has no weight in a NaN row either
            outputs.weights[at] = np.where(allowed, weights / total, 0)
        if outputs.out is not None:
            outputs.out[at] = np.where(total == 0, 0, rows.values / np.where(total == 0, 1, total))


def attend(scores: Any, v: Array, outputs: Any, threads: int) -> None:
    """The pass over checked values, none of them empty; threads is unused."""
    tiles = _Tiles(scores)
    v = headed(v, scores.lead)
    for b, item, h, rows in tiles:
        tile, allowed = tiles.tile(b, item, h, rows)
        at = (rows,) if scores.drop else (*item, h, rows)
        before = None
        if scores.before is not None:  # a Partial, which counts in powers of 2
            m, l, o = (array[at] for array in scores.before)  # noqa: E741
            with np.errstate(under="ignore", invalid="ignore"):
                before = _Rows(m[:, None] / m.dtype.type(LOG2E), l[:, None], o)
        found, weights = _weigh(tile, allowed, v[item][h // tiles.group], before)
        _write(outputs, at, found, weights, allowed, None if scores.sinks is None else scores.sinks[h])


def stats(scores: Any, v: Array, totals: Any, found: Any, threads: int) -> None:
    """Statistics of the weights. The tile has whole rows, so the totals of the first pass are not needed."""
    tiles = _Tiles(scores)
    for b, item, h, rows in tiles:
        tile, allowed = tiles.tile(b, item, h, rows)
        p, entropy = _weights_and_entropy(tile, allowed, None if scores.sinks is None else scores.sinks[h])
        at = () if scores.drop else (*item, h)
        if found.entropy is not None:
            found.entropy[(*at, rows)] = entropy
        if found.largest is not None:
            found.largest[(*at, rows)] = p.max(axis=-1)
        if found.received is not None:
            found.received[at] += p.sum(axis=0, dtype=np.float64)
        if found.top_keys is not None:
            _keep_top(p, found.top_weights[(*at, rows)], found.top_keys[(*at, rows)])
        if found.rows is not None:
            place = found.chosen[rows]
            found.rows[(*at, place[place >= 0])] = p[place >= 0]


def _weights_and_entropy(scores: Array, allowed: Array, sink: Any) -> tuple[Array, Array]:
    """(weights (rows, S), entropies (rows,)), by the formula of core/_stats.pxi and with sums in float64."""
    with np.errstate(all="ignore"):
        m = scores.max(axis=-1, keepdims=True, where=allowed, initial=-np.inf)
        x = np.where(allowed, scores - np.where(np.isneginf(m), 0, m), -np.inf)
        e = np.exp(x)
        most = np.count_nonzero(x == 0, axis=-1, keepdims=True)
        rest = np.where(x == 0, 0, e).sum(axis=-1, keepdims=True, dtype=np.float64)
        moment = (e * np.maximum(x, np.finfo(x.dtype).min)).sum(axis=-1, keepdims=True, dtype=np.float64)
        beyond = np.zeros_like(rest) if sink is None else np.exp(sink - m.astype(np.float64))
        no_key = ~allowed.any(axis=-1, keepdims=True)
        total = np.where(most + rest == 0, np.nan, most + rest)  # allowed keys that all score -inf
        p = np.where(allowed, e / (total + beyond), 0).astype(x.dtype)
        entropy = (total * np.log1p(most - 1 + rest + beyond) - moment) / (total + beyond)
        return p, np.where(no_key | np.isposinf(beyond), 0, entropy).astype(x.dtype)[:, 0]


def explain(scores: Any, v: Array, out: Array | None, with_weights: bool, threads: int) -> dict[str, int]:
    """What attend() would do: by names of core/_count.pxi, those that mean something here. Every score is computed."""
    tiles = _Tiles(scores)
    found = Counter(threads=1, core_calls=1)
    for _, item, h, rows in tiles:
        allowed = tiles.allowed(item, h, rows)
        if tiles.bias is not None:
            bias = tiles.bias[item][h, rows]
            found["bias_excludes"] |= int((bias[allowed] == -np.inf).any())
            allowed &= bias != -np.inf
            found["bias_adds"] |= int((bias[allowed] != 0).any())
        found["pairs"] += int(allowed.sum())
        found["executed_flops"] += 2 * allowed.size * (scores.width + v.shape[-1])
    return found


def _keep_top(p: Array, top_weights: Array, top_keys: Array) -> None:
    """The strongest keys of each row; in a NaN row the keys that it uses come first."""
    order = np.argsort(np.where(np.isnan(p), -np.inf, -p), axis=-1, kind="stable")[:, : top_keys.shape[-1]]
    best = np.take_along_axis(p, order, axis=-1)
    top_weights[:, : order.shape[1]] = best
    top_keys[:, : order.shape[1]] = np.where(best == 0, -1, order)


def textbook(q: Array, k: Array, v: Array, scale: float, allowed: Array | None, fill: float) -> tuple[Array, Array]:
    """(output, weights) of (..., rows, width) as it is taught: a key that is not allowed has the score `fill`."""
    real = q.dtype.type
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        scores = (q * real(scale)) @ k.swapaxes(-1, -2)
        if allowed is not None:
            scores = np.where(allowed, scores, real(fill))
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        return weights @ v, weights
