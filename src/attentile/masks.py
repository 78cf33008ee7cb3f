"""Structural masks as per-row key intervals: query row i of a batch item sees the keys lo[i] <= j < hi[i].

Two integers per row say everything that causal order, windows, prefixes, key lengths and packed segments can say, in
any combination, so no (L, S) array is built for them and keys that no row sees are never read. To add a structural
mask: one function here that narrows the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import as_array, index

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
        """(lo, hi), each (..., L) with 0 <= lo, hi <= keys: row i sees lo[i] <= j < hi[i]; None: all.

        Both have the batch axes on which they differ, by broadcasting.
        """
        moves = self.causal is not False or self.left is not None or self.right is not None  # with the rows
        if not moves and self.key_lengths is None and self.segments is None:
            return None
        lo: Index = np.zeros(queries, np.intp)
        valid: Any = keys if self.key_lengths is None else self.key_lengths[..., None]
        if self.segments is not None:
            lo, valid = self.segments[0], np.minimum(valid, self.segments[1])
        elif not moves:
            valid = lo + valid
        if not moves:
            return lo, valid
        position, placed = np.arange(queries), self.q_start is not None or self.causal == "lower_right"
        if placed:
            position = self.start(queries, keys)[..., None] + position
        hi: Index = position + (1 if self.causal is not False else FAR)
        if self.prefix_lengths is not None:
            hi = np.maximum(hi, self.prefix_lengths[..., None])
        if self.right is not None:
            hi = np.minimum(hi, position + self.right + 1)
        if self.left is not None:
            lo = np.minimum(np.maximum(lo, position - self.left), keys)
        hi = np.minimum(hi, valid)
        return lo, np.maximum(hi, 0) if placed else hi


_NAMES = frozenset(("causal", "window", "q_start", "key_lengths", "prefix_lengths", "segments"))


def _broadcasts(shape: tuple[int, ...], lead: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, lead) == lead
    except ValueError:
        return False


def per_item(name: str, value: Any, lead: tuple[int, ...]) -> Index:
    """An integer, or one per batch item, as an array whose axes broadcast against the batch axes."""
    array = as_array("attention", name, value)
    if array.size == 0 and array.dtype == np.float64:  # [], for no items
        array = array.astype(np.intp)
    if array.dtype.kind not in "iu":
        raise TypeError(f"attention: {name} has dtype {array.dtype}; it must be an integer, or one per batch item")
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), np.uint64(FAR))  # must not wrap to negative ones
    if array.ndim and not _broadcasts(array.shape, lead):
        raise ValueError(
            f"attention: {name} has shape {array.shape} and the batch axes are {lead}; "
            "give one integer, or one per batch item"
        )
    return array.astype(np.intp)


def check_causal(causal: Any) -> Any:
    if causal is False or causal is True:
        return causal
    if isinstance(causal, np.bool_):
        return bool(causal)
    if not isinstance(causal, str) or causal not in ("upper_left", "lower_right"):
        raise ValueError(f"attention: causal is {causal!r}; it must be True, False, {ALIGNMENTS}")
    return "upper_left" if causal == "upper_left" else "lower_right"  # plain text, if it was an enumeration's


def _check_window(window: Any) -> tuple[int | None, int | None]:
    """(left, right), each None (unlimited) or an integer >= 0, inclusive."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"attention: window is {window!r}; it must be a pair (left, right), both inclusive, None = unlimited. "
            "Libraries disagree on what one number W counts: W keys with the query itself are (W - 1, 0)"
        )
    try:
        left, right = (None if side is None else min(index(side), FAR) for side in window)
    except TypeError:
        raise TypeError(f"attention: window is {window!r}; each side must be an integer or None") from None
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"attention: window is {window!r}; no side may be negative, (0, 0) sees the query itself")
    return left, right


def _check_positions(structure: Structure, q_start: Any, named: bool, needed: bool, queries: int, keys: int) -> None:
    """Refuses queries whose positions are unknown or given twice.

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
    if not alibi and _NAMES.isdisjoint(options):  # in most calls
        return Structure()
    window, q_start = options.get("window"), options.get("q_start")
    segments = options.get("segments")
    key_lengths, prefix_lengths = options.get("key_lengths"), options.get("prefix_lengths")
    left, right = _check_window(window)
    found = Structure(check_causal(options.get("causal", False)), left, right)
    if prefix_lengths is not None and found.causal is False:
        raise ValueError("attention: prefix_lengths= opens the first keys of a causal mask and needs a causal form")
    if key_lengths is not None:
        found.key_lengths = lengths = per_item("key_lengths", key_lengths, lead)
        if np.count_nonzero((lengths < 0) | (lengths > keys)):
            raise ValueError(
                f"attention: key_lengths has values from {lengths.min()} to {lengths.max()}; "
                f"they must lie between 0 and the number of keys, {keys}"
            )
    needed = alibi or left is not None or right is not None
    _check_positions(found, q_start, alibi or window is not None, needed, queries, keys)
    if q_start is not None:
        found.q_start = np.clip(per_item("q_start", q_start, lead), -FAR, FAR)
    if prefix_lengths is not None:
        found.prefix_lengths = prefixes = per_item("prefix_lengths", prefix_lengths, lead)
        if prefixes.min(initial=0) < 0:
            raise ValueError(f"attention: prefix_lengths has {prefixes.min()}; no prefix may have a negative length")
    if segments is not None:
        _add_segments(found, segments, lead, queries, keys)
    return found


# ---- packed segments ----


def _segment_ids(segments: Any, lead: tuple[int, ...], queries: int, keys: int) -> list[Index]:
    """[query ids (..., L), key ids (..., S)] with as many batch axes as the call, or one array if they are the same."""
    pair = segments if isinstance(segments, tuple) else (segments,)
    if len(pair) != 2 and (isinstance(segments, tuple) or queries != keys):
        raise ValueError(
            f"attention: segments with {queries} queries and {keys} keys must be a pair (query ids, key ids) of arrays"
        )
    ids = []
    for name, value, length in zip(("query", "key"), pair, (queries, keys), strict=False):
        array = as_array("attention", f"segments ({name} ids)", value)
        if array.dtype.kind not in "iu":
            raise TypeError(f"attention: segments ({name} ids) has dtype {array.dtype}; they must be integers")
        if array.shape[-1:] != (length,) or not _broadcasts(array.shape[:-1], lead):
            raise ValueError(
                f"attention: segments ({name} ids) has shape {array.shape}; it must broadcast to {(*lead, length)}"
            )
        ids.append(array)
    if len(ids) == 2 and ids[0].shape == ids[1].shape and _broadcasts((2, *ids[0].shape[:-1]), lead):
        raise ValueError(
            f"attention: segments is a tuple of two arrays of shape {ids[0].shape}, which may be (query ids, key ids) "
            "or the ids of two batch items; for items pass one array (np.stack(segments)), for a pair two of shape "
            f"{(*(1,) * len(lead), queries)}"
        )
    ids = [array.reshape((1,) * (len(lead) + 1 - array.ndim) + array.shape) for array in ids]
    dtype = np.result_type(*ids)
    if dtype.kind == "f":  # int64 with uint64: NumPy would compare them as float64
        dtype = np.dtype(object)
    elif dtype != np.uint64:
        dtype = np.dtype(np.intp)
    return [array.astype(dtype, copy=False) for array in ids]


def _numbered(ids: list[Index]) -> list[Index]:
    """Arrays of ids (items, rows) as numbers that differ between items, too, and grow with item and id."""
    low = min(int(some.min(initial=0)) for some in ids)
    number = max(int(some.max(initial=0)) for some in ids) - low + 1
    if number * len(ids[0]) < FAR:
        found = [(some - low).astype(np.intp, copy=False) for some in ids]
    else:
        known, places = np.unique(np.concatenate(ids, axis=1), return_inverse=True)
        number, ends = known.size, np.cumsum([some.shape[1] for some in ids])[:-1]
        found = np.split(places.reshape(len(ids[0]), -1), ends, axis=1)
    return [some + np.arange(len(some))[:, None] * number for some in found]


def _run_intervals(starts: NDArray[np.bool_]) -> tuple[Index, Index]:
    """(first key, end) of the run of each key (items, keys), from where the runs start."""
    first, keys = np.flatnonzero(starts), starts.shape[1]
    lengths = np.diff(first, append=starts.size)
    run = np.repeat(np.arange(first.size), lengths).reshape(starts.shape)
    first -= first // keys * keys
    return first[run], (first + lengths)[run]


def _run_starts(ids: Index) -> NDArray[np.bool_]:
    """Where ids (items, keys) differ from the one before; on one axis, as short rows take several times as long."""
    flat = ids.ravel()
    starts = np.ones(ids.shape, bool)
    np.not_equal(flat[1:], flat[:-1], out=starts.reshape(-1)[1:])
    starts[:, 0] = True
    return starts


def _ascending(ids: Index) -> bool:
    """Whether the ids (items, keys) of each item are."""
    flat = ids.ravel()
    falls = flat[1:] < flat[:-1]
    falls[ids.shape[1] - 1 :: ids.shape[1]] = False
    return not falls.any()


def _segment_intervals(query_ids: Index, key_ids: Index) -> tuple[Index, Index] | None:
    """(first key, end) of the segment of each query (items, rows); None if the keys of an id are not contiguous."""
    items, keys = key_ids.shape
    if keys == 0:
        return np.zeros_like(query_ids), np.zeros_like(query_ids)
    starts = _run_starts(key_ids)
    first = np.flatnonzero(starts)  # of each run of equal ids, counted through all items
    end, ids = np.append(first[1:], starts.size), key_ids.ravel()[first]
    before = np.arange(items)[:, None] * keys  # keys of the items before
    order: Any = slice(None)
    if (ids[1:] <= ids[:-1]).any():
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if (ids[1:] == ids[:-1]).any():
            return None
    if query_ids is key_ids:
        return _run_intervals(starts)
    place = np.minimum(np.searchsorted(ids, query_ids), ids.size - 1)
    sides = [np.where(ids[place] == query_ids, side[order][place] - before, 0) for side in (first, end)]
    return sides[0], sides[1]


def _add_segments(found: Structure, segments: Any, lead: tuple[int, ...], queries: int, keys: int) -> None:
    """Intervals of each query's segment, or the comparison of ids where the keys of an id are not contiguous."""
    ids = _segment_ids(segments, lead, queries, keys)
    items = np.broadcast_shapes(*(some.shape[:-1] for some in ids))
    if len(ids) == 1 and keys and _ascending(ids[0].reshape(-1, keys)):  # as most are: each id has one run of keys
        lo, hi = _run_intervals(_run_starts(ids[0].reshape(-1, keys)))
        found.segments = lo.reshape(*items, keys), hi.reshape(*items, keys)
        return
    each = _numbered(
        [np.broadcast_to(some, items + some.shape[-1:]).reshape(math.prod(items), some.shape[-1]) for some in ids]
    )
    sides = _segment_intervals(each[0], each[-1])
    if sides is None:
        found.same_segment = ids[0][..., :, None] == ids[-1][..., None, :]
    else:
        found.segments = sides[0].reshape(*items, queries), sides[1].reshape(*items, queries)


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
        Token t belongs to sequence ids[t]. Batch items that are packed differently get one array of a row each,
        ``np.stack([segment_ids(a), segment_ids(b)])``: a tuple would be a pair (query ids, key ids).

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
    name, value = ("lengths", lengths) if lengths is not None else ("cu_seqlens", cu_seqlens)
    given = as_array("segment_ids", name, value)
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
