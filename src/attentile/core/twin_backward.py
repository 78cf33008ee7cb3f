"""The gradients of attention in plain NumPy: the fallback without the compiled core, and the oracle of its tests.

Block by block as in twin.py, with the names of the papers (Dao et al., "FlashAttention", 2022, appendix B.4): from
O and lse of the forward pass and dO, the gradient of O,

    E     = exp(S - lse)                  lse is without the sink, as attention() returns it
    P     = E * share                     the weights; share = 1 / (1 + exp(sink - lse)) is what a sink leaves
    dV    = P^T dO
    dP    = dO V^T
    delta = rowsum(dO * O)
    dS    = E * (share * (dP - delta) + dlse)
    dQ    = scale * dS K
    dK    = scale * dS^T Q

dS is also the gradient of the bias and, times the distance, of ALiBi's slopes; before Q and K it takes softcap's
derivative, 1 - (S / softcap)^2. P and dS are 0 where a key is excluded, and such a pair reaches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..storage import rounded, widened
from .twin import _Block, _Blocks, cap_in, cut, seen_product, weights_of

Array = NDArray[Any]


def summed_to(array: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which an array of this shape was broadcast: itself if there are none."""
    if array.shape == shape:
        return array
    added = array.ndim - len(shape)
    axes = tuple(i for i, n in enumerate(array.shape) if i < added or shape[i - added] != n)
    found: Array = array.sum(axis=axes, keepdims=True)
    return found.reshape(shape)


def backward(scores: Any, v: Array, given: Any, wanted: Any, threads: int) -> None:
    """Fills the gradients that are wanted; threads is unused. What the arrays hold: see `backward.py`."""
    with np.errstate(all="ignore"):
        gradients = _Gradients(scores, v, given, wanted)
        for block in gradients.blocks():
            gradients.add(block)
        for array, total in gradients.totals:
            if array is not total:
                array[...] = rounded(total, array.dtype)


class _Gradients:
    """Those of one call, while its blocks are added."""

    def __init__(self, scores: Any, v: Array, given: Any, wanted: Any) -> None:
        self.scores, self.wanted = scores, wanted
        self.given = given._replace(dout=widened(given.dout, scores.compute), out=widened(given.out, scores.compute))
        self.of = _Blocks(scores, keep_capped=True)
        self.v = widened(v, scores.compute)
        self.scale = scores.compute.type(scores.scale)
        self.totals: list[tuple[Array, Array]] = []  # (array that is wanted, its sum in the dtype of the arithmetic)
        self.dk, self.dv = self._total(wanted.dk), self._total(wanted.dv)

    def _total(self, array: Array | None) -> Array | None:
        if array is None:
            return None
        total = array if array.dtype == self.scores.compute else np.empty(array.shape, self.scores.compute)
        total[...] = 0
        self.totals.append((array, total))
        return total

    def blocks(self) -> Iterator[_Block]:
        return map(self.of.block, self.of.places())

    def add(self, block: _Block) -> None:
        """The five products of a block, and what is summed of its dS."""
        of, place = self.of, block.place
        wanted = self.wanted
        dout = cut(self.given.dout, place)
        p, ds = self._weights(block, dout)
        if self.dv is not None:
            self._add_by_key(self.dv, block, p, dout)
        if wanted.dbias is not None:
            part = of.by_score(wanted.dbias, place, block.keys)
            part += summed_to(ds, part.shape)
        if wanted.dslopes is not None:
            steps = ds * of.distance(place, block.keys)
            heads = of.numbers(place)[-2]
            axes = tuple(i for i in range(steps.ndim) if i != steps.ndim - 3)
            wanted.dslopes[heads.start : heads.stop] -= steps.sum(axis=axes, dtype=np.float64)
        if block.capped is not None:
            ds *= 1 - np.square(block.capped / cap_in(ds.dtype, self.scores.softcap))
            _clear(block, ds)
        ds *= self.scale
        if wanted.dq is not None:
            k = of.by_key_head(of.k, place, block.keys)
            dq = seen_product(of.product, ds, k, block.allowed if block.excluded else None)
            cut(wanted.dq, place)[...] = rounded(dq, wanted.dq.dtype)
        if self.dk is not None:
            self._add_by_key(self.dk, block, ds, cut(of.q, place))

    def _weights(self, block: _Block, dout: Array) -> tuple[Array, Array]:
        """P and dS."""
        of, place = self.of, block.place
        given = self.given
        lse = cut(given.lse, place, 0)[..., None]
        lse = np.where(np.isneginf(lse), np.inf, lse)  # without keys E is 0
        delta = np.add.reduce(dout * cut(given.out, place), axis=-1, keepdims=True)
        if self.wanted.delta is not None:
            cut(self.wanted.delta, place, 0)[...] = delta[..., 0]
        p = weights_of(block.scores - lse)
        ds = of.product(dout, of.by_key_head(self.v, place, block.keys).swapaxes(-1, -2))
        ds -= delta
        sink = of.sinks(place)
        share = None if sink is None else (1 / (1 + np.exp(sink - lse))).astype(lse.dtype)
        if share is not None:
            ds *= share
        if given.dlse is not None:
            ds += cut(given.dlse, place, 0)[..., None]
        ds *= p
        if share is not None:
            p *= share
        _clear(block, p, ds)
        return p, ds

    def _add_by_key(self, total: Array, block: _Block, pairs: Array, rows: Array) -> None:
        """Adds pairs^T rows, over all rows of all heads that share a key head."""
        allowed = None
        if block.excluded:
            allowed = lambda: self._by_key_head(block.allowed()).swapaxes(-1, -2)  # noqa: E731
        by_key = self._by_key_head(pairs).swapaxes(-1, -2)
        found = seen_product(np.matmul, by_key, self._by_key_head(rows), allowed)
        part = self.of.by_key_head(total, block.place, block.keys)
        part += found

    def _by_key_head(self, rows: Array) -> Array:
        """(..., heads, rows, n) as (..., key heads, rows of its heads one after the other, n)."""
        if self.of.group == 1:
            return rows
        *items, heads, count, n = rows.shape
        return rows.reshape(*items, heads // self.of.group, self.of.group * count, n)


def _clear(block: _Block, *arrays: Array) -> None:
    """0 where a key is excluded: what they hold there may be NaN."""
    for array in arrays:
        for keys, where in block.excluded:
            np.copyto(array[..., keys], 0, where=where)
