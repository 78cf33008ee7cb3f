"""The same attention in plain NumPy: the fallback without the compiled core, and the oracle of its tests.

A block of scores is computed at a time: of all items and heads where they are small, of some rows of one head where
they are large. So memory is bounded, and NumPy is called rarely. The steps of a block:

    1. scores   s = scale * q k^T, then softcap, bias, ALiBi, score_mod
    2. mask     not allowed -> -inf
    3. softmax  p = exp(s - m) with the maximum m of the row; its sum is kept apart
    4. values   o = p v

A value that a row may not see must not reach it, even if it is NaN or Inf. The steps for that are taken only where a
result is not finite. attend(), stats() and explain() take what the compiled ones take (_core.pyi).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..storage import kept_finite, rounded, widened
from .constants import LOG2E, MIN_POWER

Array = NDArray[Any]
Place = tuple[slice, ...]

_BLOCK = 2**19  # scores: 2 MiB in float32 stay in a cache; more products would wait for more threads of the BLAS
_LEAST_ROWS = 64  # of a group, if there are so many: products of fewer rows wait for the keys
_FEW_KEYS = 64  # it takes longer to find those that no row sees than to compute all
_FEW_SCORES = 2**13  # to exclude one by one
_EVERY = slice(None)
_LEAST = {itemsize: power / LOG2E for itemsize, power in MIN_POWER.items()}  # score of the smallest weight
_LOWEST = {np.dtype(real).itemsize: np.finfo(real).min for real in (np.float32, np.float64)}


def places(shape: tuple[int, ...], row: int, group: int = 1) -> Iterator[Place | None]:
    """Where the blocks of an array (..., heads, rows) lie, whose rows are `row` numbers each; None: it is one block.

    group: so many heads stay together.
    """
    if math.prod(shape) * row <= _BLOCK:
        yield None
        return
    *items, heads, rows = shape
    sizes, step = (*items, heads // group, rows), row * group
    steps: list[int] = []
    least = -(-_LEAST_ROWS // group)
    for n in reversed(sizes):
        steps.append(min(n, max(least, _BLOCK // step)))
        step, least = step * steps[-1], 1
    axes = [
        [(at, min(at + step, n)) for at in range(0, n, step)] for n, step in zip(sizes, reversed(steps), strict=True)
    ]
    axes[-2] = [(first * group, end * group) for first, end in axes[-2]]
    for sides in itertools.product(*axes):
        yield tuple(slice(*side) for side in sides)


def cut(array: Array, place: Place | None, tail: int = 1) -> Array:
    """What an array (..., heads, rows, ...), with `tail` axes after the rows, holds at a place.

    It may lack axes in front, and one of length one holds the same everywhere.
    """
    if place is None:
        return array
    sides = place[len(place) - array.ndim + tail :]
    return array[tuple(side if n > 1 else _EVERY for side, n in zip(sides, array.shape, strict=False))]


def weights_of(scores: Array) -> Array:
    """exp(scores), in their place; 0 below the smallest weight of kernels.h: BLAS is slow with subnormals, too."""
    least = _LEAST[scores.itemsize]
    if not scores.min(initial=0) >= least:
        tiny = (scores < least) & (scores > 2 * least)  # of what is smaller, such as -inf, exp is 0 anyway
        if tiny.any():
            _exclude(scores, tiny)
    return np.exp(scores, out=scores)


# ---- scores ----


class _Block(NamedTuple):
    """The scores of one block, (..., heads, rows, keys), -inf for each key that is excluded."""

    place: Place | None
    keys: slice  # no row sees a key outside
    scores: Array
    excluded: list[tuple[slice, Array]]  # some of these keys, and where they are excluded; it broadcasts to the scores
    capped: Array | None  # the scores as softcap gave them, for gradients

    def allowed(self) -> Array:
        """Which of the keys the rows may see."""
        return _allowed(self.scores.shape, self.excluded)


class _Rows(NamedTuple):
    """What the rows of one block know of their keys; natural units."""

    m: Array  # (..., rows, 1) largest score, but the lowest finite number instead of -inf
    total: Array  # (..., rows, 1) sum of exp(score - m)
    values: Array  # (..., rows, Dv) sum of the values with these weights
    full: bool = True  # no total is 0


class _Blocks:
    """The blocks of one call. Its arrays have the axes that the caller gave them; drop: there is no axis of heads."""

    def __init__(self, scores: Any, keep_capped: bool = False) -> None:
        self.source, self.drop = scores, scores.drop
        self.group = scores.heads // max(scores.kv_heads, 1)
        q, self.k = widened(scores.q, scores.compute), widened(scores.k, scores.compute)
        self.q = q if q.ndim > 2 or self.drop else q[None]
        axes = self.q.shape[:-3], self.k.shape[:-3]
        self.narrow = scores.lead not in axes and np.broadcast_shapes(*axes) != scores.lead  # scores lack batch axes
        self.intervals = scores.structure.intervals(scores.queries, scores.keys)
        self.errors: Any = None if scores.score_mod is None else np.geterr()
        self.keep_capped = keep_capped

    def places(self) -> Iterator[Place | None]:
        """Of each block."""
        source = self.source
        return places((*source.lead, source.heads, source.queries), source.keys, self.group)

    def numbers(self, place: Place | None) -> list[range]:
        """Those of the items, heads and rows at a place."""
        sizes = (*self.source.lead, self.source.heads, self.source.queries)
        return [range(n)[side] for n, side in zip(sizes, place or [_EVERY] * len(sizes), strict=True)]

    def shape(self, place: Place | None) -> tuple[int, ...]:
        """How many rows there are, with the axes of the results."""
        return tuple(map(len, self.numbers(place)))[self.drop :]

    def by_key_head(self, array: Array, place: Place | None, keys: slice) -> Array:
        """Keys or values of a block: (..., key heads, keys, width)."""
        if place is not None:
            *items, heads, _ = place
            array = cut(array, (*items, slice(heads.start // self.group, heads.stop // self.group), keys))
        elif keys is not _EVERY:
            array = array[..., keys, :]
        return array

    def by_head(self, array: Array, place: Place | None) -> Array:
        """(heads, 1, 1) of a number per head."""
        return array if self.drop else cut(array[:, None, None], place)

    def by_row(self, array: Array, place: Place | None) -> Array:
        """(..., 1, rows, 1) of a number per row that all heads share, (rows, 1) if all items share it, too."""
        array = array[..., None] if array.ndim == 1 else array[..., None, :, None]
        return cut(array, place)

    def product(self, rows: Array, shared: Array) -> Array:
        """rows (..., heads, rows, n) @ shared (..., key heads, n, m): the heads of a group are rows of one product."""
        if self.group == 1:
            return rows @ shared
        *items, heads, count, n = rows.shape
        found = rows.reshape(*items, heads // self.group, self.group * count, n) @ shared
        return found.reshape(*found.shape[:-3], heads, count, found.shape[-1])

    def block(self, place: Place | None) -> _Block:
        """Steps 1 and 2."""
        source = self.source
        keys, excluded = self.exclusions(place)
        q = np.multiply(cut(self.q, place), self.q.dtype.type(source.scale), order="C")
        scores = self.product(q, self.by_key_head(self.k, place, keys).swapaxes(-1, -2))
        if self.narrow:
            scores = np.broadcast_to(scores, self.shape(place) + scores.shape[-1:]).copy()
        capped = None
        if source.softcap is not None:
            _cap(scores, source.softcap)
            capped = scores.copy() if self.keep_capped else None
        if source.bias is not None:
            bias = self.bias(place, keys)
            scores += bias
            if not bias.min() > -np.inf:
                excluded.append((_EVERY, bias == -np.inf))
        if source.slopes is not None:
            scores -= self.by_head(source.slopes, place).astype(scores.dtype) * self.distance(place, keys)
        if source.score_mod is not None:
            self.modify(scores, place)
            excluded.append((_EVERY, scores == -np.inf))
        for some, where in excluded:
            _exclude(scores[..., some], where)
        return _Block(place, keys, scores, excluded, capped)

    def by_score(self, array: Array, place: Place | None, keys: slice) -> Array:
        """The part of a mask or a bias."""
        if self.drop and array.ndim == 3:
            array = array[0]
        array = cut(array, place)
        return array[..., keys] if array.shape[-1:] > (1,) else array

    def bias(self, place: Place | None, keys: slice) -> Array:
        """The part of the bias, in the dtype of the scores."""
        bias = self.by_score(self.source.bias, place, keys)
        return widened(bias, self.q.dtype) if bias.dtype == np.uint16 else kept_finite(bias, self.q.dtype)

    def exclusions(self, place: Place | None) -> tuple[slice, list[tuple[slice, Array]]]:
        """The keys of a block, and what structure and mask exclude of them."""
        source = self.source
        keys, excluded = _EVERY, []
        if self.intervals is not None:
            lo, hi = (self.by_row(side, place) for side in self.intervals)
            if source.score_mod is None and source.keys > _FEW_KEYS:
                keys = _seen(lo, hi)
                excluded = _outside(lo, hi, keys)
            else:  # score_mod gets every key
                excluded = [(_EVERY, _beyond(lo, hi, 0, source.keys))]
        if source.mask is not None:
            mask = self.by_score(source.mask, place, keys)
            if not _all(mask):
                excluded.append((_EVERY, ~mask))
        return keys, excluded

    def sinks(self, place: Place | None) -> Array | None:
        """(heads, 1, 1) of a block, if there are any."""
        return None if self.source.sinks is None else self.by_head(self.source.sinks, place)

    def before(self, place: Place | None) -> _Rows | None:
        """What the rows of a block know of other keys: a Partial counts in powers of 2."""
        if self.source.before is None:
            return None
        m, total, values = (cut(x, place, tail) for x, tail in zip(self.source.before, (0, 0, 1), strict=True))
        return _Rows((m / m.dtype.type(LOG2E))[..., None], total[..., None], values)

    def distance(self, place: Place | None, keys: slice) -> Array:
        """|query position - key position|, by which ALiBi lowers the scores."""
        source, real = self.source, self.q.dtype.type
        start = np.asarray(source.structure.start(source.queries, source.keys))
        position = self.by_row(start[..., None] + np.arange(source.queries), place)
        distance: Array = np.abs(position - np.arange(source.keys)[keys]).astype(real)
        return distance

    def modify(self, scores: Array, place: Place | None) -> None:
        """score_mod, a head at a time, under the caller's handling of floating-point errors."""
        *items, heads, rows = self.numbers(place)
        i, j = np.array(rows)[:, None], np.arange(self.source.keys)[None]
        for at, (*item, h) in zip(np.ndindex(scores.shape[:-2]), itertools.product(*items, heads), strict=True):
            b = int(np.ravel_multi_index(item, self.source.lead)) if item else 0
            with np.errstate(**self.errors):
                changed = self.source.score_mod(scores[at].copy(), b, h, i, j)
            scores[at] = _modified(changed, scores[at])


def _all(array: Array) -> bool:
    """array.all(), which takes as long as a small product."""
    return bool(np.count_nonzero(array) == array.size)


def _seen(lo: Array, hi: Array) -> slice:
    """The keys that any row sees; one key if none sees any, for maxima to exist."""
    first, end = int(lo.min()), int(hi.max())
    return slice(first, end) if first < end else slice(0, 1)


def _outside(lo: Array, hi: Array, keys: slice) -> list[tuple[slice, Array]]:
    """What the intervals of the rows exclude: before and after the keys that every row sees."""
    first, end = int(lo.max()), int(hi.min())
    sides = [(keys.start, first), (end, keys.stop)] if first < end else [(keys.start, keys.stop)]
    return [
        (slice(start - keys.start, stop - keys.start), _beyond(lo, hi, start, stop))
        for start, stop in sides
        if start < stop
    ]


def _beyond(lo: Array, hi: Array, start: int, stop: int) -> Array:
    j = np.arange(start, stop)
    after: Array = j >= hi
    return (j < lo) | after if np.count_nonzero(lo) else after


def _exclude(scores: Array, where: Array) -> None:
    """-inf where excluded. copyto() takes half as long for few scores, and several times as long for many: instead,
    True / -0 is -inf, and fmin() passes over 0 / -0, NaN."""
    if scores.size <= _FEW_SCORES:
        np.copyto(scores, -np.inf, where=where)
    else:
        np.fmin(scores, np.divide(where, scores.dtype.type(-0.0), dtype=scores.dtype), out=scores)


def _allowed(shape: tuple[int, ...], excluded: list[tuple[slice, Array]]) -> Array:
    found = np.ones(shape, bool)
    for keys, where in excluded:
        found[..., keys] &= ~where
    return found


def cap_in(dtype: np.dtype[Any], softcap: float) -> Any:
    """Within a quarter of the range, beyond which no score changes by a bit, and above 1 / its largest number."""
    limits = np.finfo(dtype)
    return dtype.type(min(max(softcap, float(limits.smallest_normal)), float(limits.max) / 4))


def _cap(scores: Array, softcap: float) -> None:
    cap = cap_in(scores.dtype, softcap)
    scores /= cap
    np.tanh(scores, out=scores)
    scores *= cap


def _modified(changed: Any, scores: Array) -> Array:
    """What score_mod has made of the scores."""
    found = np.asarray(changed)
    if found.shape != scores.shape or found.dtype.kind != "f":
        raise ValueError(
            f"attention: score_mod returned shape {found.shape} and dtype {found.dtype} for scores {scores.shape}; "
            "it must return floating scores of the same shape"
        )
    return found.astype(scores.dtype, copy=False)


# ---- rows ----


def seen_product(
    product: Callable[[Array, Array], Array], factors: Array, shared: Array, allowed: Callable[[], Array] | None
) -> Array:
    """factors (..., rows, n) @ shared (..., n, width) without the terms of pairs that are not allowed, whose factor is
    0 (0 * NaN is NaN). allowed: what gives the shape of the factors; None: all are."""
    found = product(factors, shared)
    if allowed is None or _all(np.isfinite(found)):
        return found
    finite = np.isfinite(shared)
    if _all(finite):
        return found
    found = product(factors, np.where(finite, shared, 0))
    seen, real = allowed(), shared.dtype.type

    def met(by: Array, what: Array) -> Array:
        return product(by.astype(real), what.astype(real)) > 0

    above, below, zero = (seen & sign(factors, 0) for sign in (np.greater, np.less, np.equal))
    found[met(above, shared == np.inf) | met(below, shared == -np.inf)] += np.inf
    found[met(above, shared == -np.inf) | met(below, shared == np.inf)] -= np.inf
    found[met(seen, np.isnan(shared)) | met(zero, np.isinf(shared))] = np.nan
    return found


def _values(blocks: _Blocks, block: _Block, v: Array) -> Array:
    """Step 4."""
    v = blocks.by_key_head(v, block.place, block.keys)
    return seen_product(blocks.product, block.scores, v, block.allowed if block.excluded else None)


def _weighed(blocks: _Blocks, block: _Block, v: Array | None) -> _Rows:
    """Steps 3 and 4; the weights exp(score - m) take the place of the scores."""
    weights, before = block.scores, blocks.before(block.place)
    m = np.maximum.reduce(weights, axis=-1, keepdims=True, initial=_LOWEST[weights.itemsize])
    if before is not None:
        m = np.maximum(m, before.m)
    weights -= m
    weights_of(weights)
    total = np.add.reduce(weights, axis=-1, keepdims=True)
    values = total[..., :0] if v is None else _values(blocks, block, v)
    if before is not None:
        share = weights_of(before.m - m)
        total, values = total + share * before.total, values + share * before.values
    return _Rows(m, total, values, _all(total))


def _final_total(block: _Block, rows: _Rows, sink: Array | None) -> Array:
    """The sum of exp that a row is divided by: with the sink; 0 without keys, NaN if all its keys score -inf."""
    total = rows.total
    if not rows.full:
        total = np.where((total == 0) & block.allowed().any(axis=-1, keepdims=True), np.nan, total)
    if sink is not None:  # in float64, where inf means that it takes all
        total = np.where(total == 0, 0, total + np.exp(sink - rows.m.astype(np.float64)))
    return total.astype(rows.total.dtype, copy=False)


def _shares(block: _Block, total: Array) -> Array:
    """The weights of the softmax, in their place; a key that is not allowed has none in a NaN row either."""
    weights = block.scores
    weights /= total
    return weights if total.min() > 0 else np.where(block.allowed(), weights, 0)


def _write(outputs: Any, block: _Block, rows: _Rows, sink: Array | None) -> None:
    """Everything that is wanted of a block."""
    place = block.place
    if outputs.partial is not None:
        m, total, o = outputs.partial
        cut(m, place, 0)[...] = (rows.m * rows.m.dtype.type(LOG2E))[..., 0]  # the lowest number becomes -inf
        cut(total, place, 0)[...] = rows.total[..., 0]
        cut(o, place)[...] = rows.values
    if outputs.lse is not None:
        cut(outputs.lse, place, 0)[...] = (rows.m + np.log(_final_total(block, rows, None)))[..., 0]
    if outputs.out is not None:
        total, out = _final_total(block, rows, sink), cut(outputs.out, place)
        direct = out.dtype == total.dtype
        found = np.divide(rows.values, total, out=out if direct else None)
        if not rows.full:
            np.copyto(found, 0, where=total == 0)
        if not direct:
            out[...] = rounded(found, out.dtype)
        if outputs.weights is not None:
            cut(outputs.weights, place)[..., block.keys] = _shares(block, total)


# ---- what the core does, too ----


def attend(scores: Any, v: Array, outputs: Any, threads: int) -> None:
    """The pass over checked values, none of them empty; threads is unused."""
    blocks, v = _Blocks(scores), widened(v, scores.compute)
    with np.errstate(all="ignore"):
        for place in blocks.places():
            block = blocks.block(place)
            _write(outputs, block, _weighed(blocks, block, v), blocks.sinks(place))


def stats(scores: Any, v: Array, totals: Any, found: Any, threads: int) -> None:
    """Statistics of the weights. A block has whole rows, so v and the totals of the first pass are not needed."""
    blocks = _Blocks(scores)
    for place in blocks.places():
        with np.errstate(all="ignore"):
            block = blocks.block(place)
            p, entropy = _weights_and_entropy(block.scores, block.allowed(), blocks.sinks(place))
        if found.entropy is not None:
            cut(found.entropy, place, 0)[...] = entropy
        if found.largest is not None:
            cut(found.largest, place, 0)[...] = p.max(axis=-1)
        if found.received is not None:
            to = cut(found.received, None if place is None else place[:-1])
            to[..., block.keys] += p.sum(axis=-2, dtype=np.float64)
        if found.top_keys is not None:
            _keep_top(p, cut(found.top_weights, place), cut(found.top_keys, place), block.keys.start or 0)
        if found.rows is not None:
            chosen = cut(found.chosen, place, 0)
            to = cut(found.rows, None if place is None else (*place[:-1], _EVERY))
            to[..., chosen[chosen >= 0], block.keys] = p[..., chosen >= 0, :]


def _keep_top(p: Array, top_weights: Array, top_keys: Array, first: int) -> None:
    """The strongest keys of each row; in a NaN row the keys that it uses come first."""
    order = np.argsort(np.where(np.isnan(p), -np.inf, -p), axis=-1, kind="stable")[..., : top_keys.shape[-1]]
    best = np.take_along_axis(p, order, axis=-1)
    top_weights[..., : order.shape[-1]] = best
    top_keys[..., : order.shape[-1]] = np.where(best == 0, -1, first + order)


def _weights_and_entropy(scores: Array, allowed: Array, sink: Array | None) -> tuple[Array, Array]:
    """(weights (..., rows, keys), entropies (..., rows)), by the formula of core/_stats.pxi, with sums in float64."""
    m = scores.max(axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    x = np.where(allowed, scores - np.where(np.isneginf(m), 0, m), -np.inf)
    e = weights_of(x.copy())
    most = np.count_nonzero(x == 0, axis=-1, keepdims=True)
    rest = np.where(x == 0, 0, e).sum(axis=-1, keepdims=True, dtype=np.float64)
    moment = (e * np.maximum(x, _LOWEST[x.itemsize])).sum(axis=-1, keepdims=True, dtype=np.float64)
    beyond = np.zeros_like(rest) if sink is None else np.exp(sink - m.astype(np.float64))
    no_key = ~allowed.any(axis=-1, keepdims=True)
    total = np.where(most + rest == 0, np.nan, most + rest)  # allowed keys that all score -inf
    p = np.where(allowed, e / (total + beyond), 0).astype(x.dtype)
    entropy = (total * np.log1p(most - 1 + rest + beyond) - moment) / (total + beyond)
    return p, np.where(no_key | np.isposinf(beyond), 0, entropy).astype(x.dtype)[..., 0]


def explain(scores: Any, v: Array, out: Array | None, with_weights: bool, threads: int) -> dict[str, int]:
    """What attend() would do: by names of core/_count.pxi, those that mean something here."""
    blocks = _Blocks(scores)
    found = Counter(threads=1, core_calls=1)
    for place in blocks.places():
        keys, excluded = blocks.exclusions(place)
        allowed = _allowed((*blocks.shape(place), len(range(scores.keys)[keys])), excluded)
        if scores.bias is not None:
            bias = np.broadcast_to(blocks.bias(place, keys), allowed.shape)
            found["bias_excludes"] |= int((bias[allowed] == -np.inf).any())
            allowed &= bias != -np.inf
            found["bias_adds"] |= int((bias[allowed] != 0).any())
        found["pairs"] += int(allowed.sum())
        found["executed_flops"] += 2 * allowed.size * (scores.width + v.shape[-1])
    return found


def textbook(q: Array, k: Array, v: Array, scale: float, allowed: Array | None, fill: float) -> tuple[Array, Array]:
    """(output, weights) of (..., rows, width) as it is taught: a key that is not allowed has the score `fill`."""
    real = q.dtype.type
    with np.errstate(all="ignore"):
        weights = (q * real(scale)) @ k.swapaxes(-1, -2)
        if allowed is not None:
            weights = np.where(allowed, weights, real(fill))
        weights -= weights.max(axis=-1, keepdims=True)
        weights_of(weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        return weights @ v, weights
