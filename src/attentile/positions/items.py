"""Rotary options that KVCache and MultiHeadAttention keep, and the rotation of items of different lengths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import as_array
from .rotary import places_of, rotary_embedding, settled_options
from .scaling import counted_length, depends_on_length, read_scaling

Array = NDArray[Any]

ROTARY_OPTIONS = tuple(name for name in rotary_embedding.__kwdefaults__ or () if name not in ("inverse", "out"))


def kept_options(owner: str, rotary: Any, tables: bool = True) -> dict[str, Any] | None:
    """A copy of the options given to a cache or a layer, with copies of their arrays if tables is true."""
    if rotary is None:
        return None
    if not isinstance(rotary, Mapping):
        raise TypeError(f"{owner}: rotary is {rotary!r}; it must be a dict of rotary_embedding's keyword arguments")
    unknown = [repr(name) for name in rotary if name not in ROTARY_OPTIONS]
    if unknown:
        raise TypeError(
            f"{owner}: rotary has the unknown key {', '.join(unknown)}; known are {', '.join(ROTARY_OPTIONS)}"
        )
    return copied_options(rotary, tables)


def copied_options(options: Mapping[str, Any], tables: bool = False) -> dict[str, Any]:
    """A deep copy; without `tables`, cos and sin, which may be large, become read-only views instead. Read-only views
    of dicts, which deepcopy refuses, become dicts."""

    def one(value: Any) -> Any:
        if isinstance(value, np.ndarray) and not tables:
            value = value.view()
            value.flags.writeable = False
            return value
        return copy.deepcopy(dict(value) if isinstance(value, Mapping) else value)

    return {name: one(value) for name, value in options.items()}


def row_positions(starts: Array, counts: Array | int, rows: int) -> Array:
    """Positions (items, rows) of counts[b] tokens from starts[b] on. The padding behind them repeats the last position:
    for a later one tables may have no row, and it would change frequencies that depend on the length."""
    last = np.maximum(starts + counts - 1, 0)
    return np.minimum(starts[:, None] + np.arange(rows), last[:, None])


def unpadded_positions(owner: str, positions: Any, counts: Array, rows: int) -> Any:
    """Given positions with those of padding replaced by the last one before it, or by 0 if there is none."""
    at = as_array(owner, "positions", positions)
    fits = at.shape[-1:] in ((), (rows,)) and at.shape[:-1] in ((), (1,), (len(counts),))
    if at.dtype.kind not in "iu" or not fits or at.size == 0 or (at.ndim == 0 and abs(int(at)) >= 2**62):
        return positions  # for rotary_embedding to refuse
    if at.ndim == 0:
        at = int(at) + np.arange(rows)
    row = np.minimum(np.arange(rows), counts[:, None] - 1)
    found = np.take_along_axis(np.broadcast_to(at, row.shape), np.maximum(row, 0), axis=1)
    return np.where(row < 0, 0, found)


def query_positions(starts: Array, rows: int, lengths: Array, options: Mapping[str, Any], *, placed: bool) -> Array:
    """Positions (items, rows) of queries from starts[b] on, over lengths[b] tokens; placed: the caller gave starts.

    For tables, and for frequencies that depend on the length, rows behind the last token of their item are padding and
    repeat its position. The exception is an item all of whose rows lie behind its last token, as when a chunk attends
    to the cache before it is appended: these rows are tokens to come.
    """
    tables = options.get("cos") is not None
    position: Array = starts[:, None] + np.arange(rows)
    if not tables and not depends_on_length(options.get("scaling")):
        return position
    if not placed:  # rows before the first token of an item with fewer tokens than there are rows
        position = np.maximum(position, 0)
    ahead = starts >= lengths
    free = ahead.all() if tables else ahead
    last = np.where(free, np.iinfo(np.intp).max, np.maximum(lengths - 1, 0))
    return np.minimum(position, last[:, None])


def rotate_items(
    x: Array, positions: Any, options: Mapping[str, Any], out: Array | None = None, lengths: Array | None = None
) -> Array:
    """rotary_embedding with the options of a cache or a layer, so that no item changes the result of another.

    Frequencies that depend on the length follow each item's own positions, or its entry in lengths if that is larger.
    Items with the same frequencies share a call; without such frequencies one call rotates all.
    """
    scaling = options.get("scaling")
    if scaling is None or np.ndim(positions) < 2 or not x.size or not depends_on_length(scaling):
        return rotary_embedding(x, positions, **options, out=out)
    items, rules = x.reshape(-1, *x.shape[-3:]), read_scaling(scaling)
    given = places_of(positions, x.shape[:-3], x.shape[-2]).array
    at = np.broadcast_to(given if given is not None else 0, (len(items), x.shape[-2]))
    reached = at.max(axis=1) + 1
    wanted = reached if lengths is None else np.maximum(reached, lengths)
    counted = np.array([counted_length(rules, length) for length in wanted.tolist()])
    rotated = np.empty_like(items)
    for kind in np.unique(counted):
        group = np.flatnonzero(counted == kind)
        part, places = items[group], at[group]
        if (reached[group] < wanted[group]).any():  # one more row, at the end of the item, gives the call its length
            part = np.concatenate([part, part[:, :, -1:]], axis=2)
            places = np.concatenate([places, wanted[group, None] - 1], axis=1)
        rotated[group] = rotary_embedding(part, places, **options)[:, :, : x.shape[-2]]
    if out is None:
        return rotated.reshape(x.shape)
    out[...] = rotated.reshape(x.shape)
    return out


def same_rotation(one: Mapping[str, Any], other: Mapping[str, Any], width: int) -> bool:
    """Whether both rotate rows of this width alike, by their options with defaults filled in."""
    *plain, cos, sin = settled_options(one, width)
    *others, cos_too, sin_too = settled_options(other, width)
    pairs = ((cos, cos_too), (sin, sin_too))
    return plain == others and all(
        a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs
    )
