"""Structural masks as per-row key intervals: query row i of a batch item sees the keys lo[i] <= j < hi[i].

Two integers per row say everything that causal order, windows, prefixes, key lengths and packed segments can say, in
any combination, so no (L, S) array is built for them and keys that no row sees are never read. To add a structural
mask: one function here that narrows the intervals.

    causal="upper_left", L = 3, S = 5          causal="lower_right", L = 3, S = 5
        1 0 0 0 0                                  1 1 1 0 0
        1 1 0 0 0                                  1 1 1 1 0
        1 1 1 0 0                                  1 1 1 1 1

    window=(1, 1), L = S = 5                   segments=[0, 0, 1, 1, 1]
        1 1 0 0 0                                  1 1 0 0 0
        1 1 1 0 0                                  1 1 0 0 0
        0 1 1 1 0                                  0 0 1 1 1
        0 0 1 1 1                                  0 0 1 1 1
        0 0 0 1 1                                  0 0 1 1 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import index

Index = NDArray[np.intp]

ALIGNMENTS = (
    "'upper_left' (query i stands at position i) or 'lower_right' (the last query stands at the last valid key)"
)
FAR = 2**60  # beyond any key; positions are clipped to it so that sums cannot wrap


@dataclass(eq=False, repr=False)
class Structure:
    """The checked structural arguments of one call, with the axes of `lead`, the batch axes, where they have any.

    The compiled core works the interval of a row out where it uses it (interval_of in core/_blocks.pxi); `intervals` is
    the same in NumPy.
    """

    causal: bool | str = False  # or an alignment
    left: int | None = None  # of the window; None: unlimited
    right: int | None = None
    q_start: Index | None = None  # (...,) position of query 0, if it was given
    key_lengths: Index | None = None  # (...,)
    prefix_lengths: Index | None = None  # (...,)
    segments: tuple[Index, Index] | None = None  # (..., L) first key and end of each row's segment
    same_segment: NDArray[np.bool_] | None = None  # (..., L, S), only if a segment's keys are not contiguous

    @property
    def limits(self) -> bool:
        """Whether some row may see less than all keys by its position."""
        windowed = self.left is not None or self.right is not None
        return windowed or self.causal is not False or self.key_lengths is not None or self.segments is not None

    def options(self) -> dict[str, Any]:
        """The arguments again, as the compiled core takes them."""
        # A q_start goes with a window even if that limits nothing.
        unlimited = self.left is None and self.right is None and self.q_start is None
        return {
            "causal": self.causal,
            "window": None if unlimited else (self.left, self.right),
            "q_start": self.q_start,
            "key_lengths": self.key_lengths,
            "prefix_lengths": self.prefix_lengths,
        }

    def start(self, queries: int, keys: int) -> Index:
        """(...,) position of query 0, 0 where nothing asks for one."""
        if self.q_start is not None:
            return self.q_start
        if self.causal != "lower_right":
            return np.zeros((), np.intp)
        valid: Index = np.asarray(keys if self.key_lengths is None else self.key_lengths)
        return valid - queries

    def intervals(self, queries: int, keys: int) -> tuple[Index, Index] | None:
        """(lo, hi), each (..., L) with 0 <= lo, hi <= keys: row i sees lo[i] <= j < hi[i]; None: all."""
        if not self.limits:
            return None
        lo: Index = np.zeros(queries, np.intp)
        hi: Index = lo + (keys if self.key_lengths is None else self.key_lengths[..., None])
        position = self.start(queries, keys)[..., None] + np.arange(queries)
        if self.causal is not False:
            ahead = position + 1
            if self.prefix_lengths is not None:
                ahead = np.maximum(ahead, self.prefix_lengths[..., None])
            hi = np.minimum(hi, ahead)
        if self.right is not None:
            hi = np.minimum(hi, position + self.right + 1)
        if self.left is not None:
            lo = np.maximum(lo, position - self.left)
        if self.segments is not None:
            lo = np.maximum(lo, self.segments[0])
            hi = np.minimum(hi, self.segments[1])
        lo, hi = np.broadcast_arrays(np.clip(lo, 0, keys), np.clip(hi, 0, keys))
        return lo, hi


def per_item(name: str, value: Any, lead: tuple[int, ...]) -> Index:
    """An integer, or one per batch item, as an array whose axes broadcast against the batch axes."""
    array = np.asarray(value)
    if array.size == 0 and array.dtype == np.float64:  # [], for no items
        array = array.astype(np.intp)
    if array.dtype.kind not in "iu":
        raise TypeError(f"attention: {name} has dtype {array.dtype}; it must be an integer, or one per batch item")
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), np.uint64(FAR))  # must not wrap to negative ones
    try:
        shape = np.broadcast_shapes(array.shape, lead)
    except ValueError:
        shape = ()
    if array.ndim and shape != lead:
        raise ValueError(
            f"attention: {name} has shape {array.shape} and the batch axes are {lead}; "
            "give one integer, or one per batch item"
        )
    return array.astype(np.intp)


def _key_lengths(key_lengths: Any, lead: tuple[int, ...], keys: int) -> Index:
    lengths = per_item("key_lengths", key_lengths, lead)
    if lengths.size and (lengths.min() < 0 or lengths.max() > keys):
        raise ValueError(
            f"attention: key_lengths has values from {lengths.min()} to {lengths.max()}; "
            f"they must lie between 0 and the number of keys, {keys}"
        )
    return lengths


def _prefixes(prefix_lengths: Any, lead: tuple[int, ...]) -> Index:
    prefixes = per_item("prefix_lengths", prefix_lengths, lead)
    if prefixes.size and prefixes.min() < 0:
        raise ValueError(f"attention: prefix_lengths has {prefixes.min()}; no prefix may have a negative length")
    return prefixes


def check_causal(causal: Any) -> Any:
    if isinstance(causal, (bool, np.bool_)):
        return bool(causal)
    if not isinstance(causal, str) or causal not in ("upper_left", "lower_right"):
        raise ValueError(f"attention: causal is {causal!r}; it must be True, False, {ALIGNMENTS}")
    return causal


def _check_window(window: Any) -> tuple[int | None, int | None]:
    """(left, right), each None (unlimited) or an integer >= 0, inclusive."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"attention: window is {window!r}; it must be a pair (left, right), both inclusive, None = unlimited. "
            "Libraries disagree on what one number W counts: W keys with the query itself are (W - 1, 0)"
        )
    sides: list[int | None] = []
    for side in window:
        try:
            sides.append(None if side is None else min(index(side), FAR))
        except TypeError:
            raise TypeError(f"attention: window is {window!r}; each side must be an integer or None") from None
        if side is not None and side < 0:
            raise ValueError(f"attention: window is {window!r}; no side may be negative, (0, 0) sees the query itself")
    return sides[0], sides[1]


def _check_positions(structure: Structure, q_start: Any, named: bool, needed: bool, queries: int, keys: int) -> None:
    """Refuses queries that stand nowhere, or in two places.

    needed: a window or ALiBi asks for positions. named: one of them was given, even if it asks for nothing.
    """
    causal = structure.causal
    if q_start is not None:
        if isinstance(causal, str):
            raise ValueError(f"attention: q_start= and causal={causal!r} both place the queries; use causal=True")
        if causal is False and not named:
            raise ValueError("attention: q_start= places the queries for causal=True, window= or alibi_slopes=")
    elif (causal is True or (needed and causal is False)) and queries != keys:
        what = "causal=True" if causal is True else "window= or alibi_slopes="
        raise ValueError(
            f"attention: {what} with {queries} queries and {keys} keys is ambiguous; "
            f"use causal={ALIGNMENTS}, or q_start= (query i stands at q_start + i)"
        )


def structure(
    lead: tuple[int, ...], queries: int, keys: int, options: Mapping[str, Any], alibi: bool = False
) -> Structure:
    """The structural ones among the options of a call, checked."""
    left, right = _check_window(options.get("window"))
    found = Structure(check_causal(options.get("causal", False)), left, right)
    if options.get("prefix_lengths") is not None and found.causal is False:
        raise ValueError("attention: prefix_lengths= opens the first keys of a causal mask and needs a causal form")
    if options.get("key_lengths") is not None:
        found.key_lengths = _key_lengths(options["key_lengths"], lead, keys)
    q_start = options.get("q_start")
    needed = alibi or left is not None or right is not None
    _check_positions(found, q_start, alibi or options.get("window") is not None, needed, queries, keys)
    if q_start is not None:
        found.q_start = np.clip(per_item("q_start", q_start, lead), -FAR, FAR)
    if options.get("prefix_lengths") is not None:
        found.prefix_lengths = _prefixes(options["prefix_lengths"], lead)
    if options.get("segments") is not None:
        _add_segments(found, options["segments"], lead, queries, keys)
    return found


# ---- packed segments ----


def _segment_ids(segments: Any, lead: tuple[int, ...], queries: int, keys: int) -> tuple[Index, Index]:
    """(query ids (..., L), key ids (..., S)) with as many batch axes as the call."""
    pair = segments if isinstance(segments, tuple) else (segments, segments)
    if len(pair) != 2 or (not isinstance(segments, tuple) and queries != keys):
        raise ValueError(
            f"attention: segments with {queries} queries and {keys} keys must be a pair (query ids, key ids) of arrays"
        )
    ids = []
    for name, value, length in (("query", pair[0], queries), ("key", pair[1], keys)):
        array = np.asarray(value)
        if array.dtype.kind not in "iu":
            raise TypeError(f"attention: segments ({name} ids) has dtype {array.dtype}; they must be integers")
        try:
            fits = array.shape[-1:] == (length,) and np.broadcast_shapes(array.shape[:-1], lead) == lead
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"attention: segments ({name} ids) has shape {array.shape}; it must broadcast to {(*lead, length)}"
            )
        ids.append(array.reshape((1,) * (len(lead) + 1 - array.ndim) + array.shape))
    if np.result_type(*ids).kind == "f":  # int64 beside uint64: NumPy would compare them as float64
        ids = [array.astype(object) for array in ids]
    return ids[0], ids[1]


def _runs(key_ids: Index) -> tuple[Index, Index, Index] | None:
    """(ids in order, first key, end) of the runs of equal ids of one item; None if an id comes in several runs."""
    first = np.flatnonzero(np.r_[True, key_ids[1:] != key_ids[:-1]]) if key_ids.size else np.empty(0, np.intp)
    order = np.argsort(key_ids[first], kind="stable")
    ids = key_ids[first][order]
    if (ids[1:] == ids[:-1]).any():
        return None
    return ids, first[order], np.r_[first[1:], key_ids.size][order].astype(np.intp)


def _add_segments(found: Structure, segments: Any, lead: tuple[int, ...], queries: int, keys: int) -> None:
    """Intervals of each query's segment, or the comparison of ids where the keys of an id are not contiguous."""
    query_ids, key_ids = _segment_ids(segments, lead, queries, keys)
    items = np.broadcast_shapes(query_ids.shape[:-1], key_ids.shape[:-1])
    first, end = np.zeros((*items, queries), np.intp), np.zeros((*items, queries), np.intp)
    query_ids, key_ids = np.broadcast_to(query_ids, (*items, queries)), np.broadcast_to(key_ids, (*items, keys))
    for item in np.ndindex(*items):
        runs = _runs(key_ids[item])
        if runs is None:
            found.same_segment = query_ids[..., :, None] == key_ids[..., None, :]
            return
        ids, starts, ends = runs
        if ids.size:
            place = np.minimum(np.searchsorted(ids, query_ids[item]), ids.size - 1)
            there = ids[place] == query_ids[item]
            first[item], end[item] = np.where(there, starts[place], 0), np.where(there, ends[place], 0)
    found.segments = first, end


def segment_ids(lengths: ArrayLike | None = None, *, cu_seqlens: ArrayLike | None = None) -> Index:
    """Ids for `attention(segments=...)` from the lengths of packed sequences.

    Parameters
    ----------
    lengths : array_like of int, shape (n,)
        Tokens of each sequence, in order.
    cu_seqlens : array_like of int, shape (n + 1,)
        The same as cumulative sums that start with 0, as kernels for variable lengths take them.

    Returns
    -------
    ndarray of intp, shape (total,)
        Token t belongs to sequence ids[t].

    Raises
    ------
    ValueError, TypeError
        If not exactly one of the two is given, or a length is negative.

    Examples
    --------
    >>> from attentile import segment_ids
    >>> segment_ids([2, 3])
    array([0, 0, 1, 1, 1])
    >>> segment_ids(cu_seqlens=[0, 2, 5])
    array([0, 0, 1, 1, 1])
    """
    if (lengths is None) == (cu_seqlens is None):
        raise ValueError("segment_ids: give either lengths or cu_seqlens")
    given = np.asarray(lengths if lengths is not None else cu_seqlens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(
            f"segment_ids: got shape {given.shape} and dtype {given.dtype}; it must be integers on one axis"
        )
    given = given.astype(np.intp)
    if cu_seqlens is not None:
        if given.size == 0 or given[0] != 0:
            raise ValueError("segment_ids: cu_seqlens must start with 0")
        given = np.diff(given)
    if (given < 0).any():
        raise ValueError("segment_ids: no sequence may have a negative length")
    return np.repeat(np.arange(given.size), given)
