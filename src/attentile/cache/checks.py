"""Checks of the arguments of KVCache."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arguments import as_array, index
from ..attention import OPTIONS
from ..masks import FAR, check_causal, per_item
from ..positions.rotary import ROTARY_OPTIONS

if TYPE_CHECKING:
    from .kv_cache import KVCache

Array = NDArray[Any]
Index = NDArray[np.intp]


def count(name: str, value: Any, least: int) -> int:
    """value as an integer of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"KVCache: {name} is {value!r}; it must be an integer, at least {least}") from None
    if number < least:
        raise ValueError(f"KVCache: {name} is {number}; it must be at least {least}")
    return number


def storage_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in (np.float32, np.float64):
        raise TypeError(
            f"KVCache: dtype is {dtype!r}; the storage can be float32 or float64 (half precision fits float32)"
        )
    return found


def window_of(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"KVCache: window is {window!r}; it must be a pair (left, 0) or None. "
            "W tokens, the row's own among them, are (W - 1, 0)"
        )
    try:
        left, right = (index(side) for side in window)
    except TypeError:
        raise TypeError(f"KVCache: window is {window!r}; left must be an integer; without a limit, give None") from None
    if left < 0 or right != 0:
        raise ValueError(f"KVCache: window is {window!r}; it must be (left, 0) with left >= 0: no token lies ahead")
    return min(left, FAR), 0


def rotary_options(owner: str, rotary: Any, tables: bool = True) -> dict[str, Any] | None:
    """A copy of the options of rotary_embedding that a cache or a layer may be given; tables: of their arrays too."""
    if rotary is None:
        return None
    if not isinstance(rotary, Mapping):
        raise TypeError(f"{owner}: rotary is {rotary!r}; it must be a dict of rotary_embedding's keyword arguments")
    unknown = [repr(name) for name in rotary if name not in ROTARY_OPTIONS]
    if unknown:
        raise TypeError(
            f"{owner}: rotary has the unknown key {', '.join(unknown)}; known are {', '.join(ROTARY_OPTIONS)}"
        )
    return copied(rotary, tables)


def copied(options: Mapping[str, Any], tables: bool = False) -> dict[str, Any]:
    """A copy that shares nothing with the original, but for cos and sin without `tables`: they may be large, so they
    become views that cannot be written to. Read-only views of dicts, which deepcopy refuses, become dicts."""

    def one(value: Any) -> Any:
        if isinstance(value, np.ndarray) and not tables:
            value = value.view()
            value.flags.writeable = False
            return value
        return copy.deepcopy(dict(value) if isinstance(value, Mapping) else value)

    return {name: one(value) for name, value in options.items()}


def pages_per_item(cache: KVCache, batch: int, size: int) -> int:
    """Pages that `capacity` tokens can touch, wherever they lie; 0 without a capacity."""
    capacity, pages = cache.capacity, 0
    if capacity is not None and cache.window is None:
        pages = -(-capacity // size)
    elif capacity is not None:
        kept = min(cache.sinks, capacity)
        pages = -(-kept // size) + (capacity - kept + 2 * size - 2) // size
    needed = max(batch, 1) * max(pages, 1) * size * cache.kv_heads * (cache.head_dim + cache.value_dim)
    if needed * cache.dtype.itemsize > sys.maxsize:
        raise ValueError(
            f"KVCache: batch {batch}, kv_heads {cache.kv_heads}, head_dim {cache.head_dim}, value_dim "
            f"{cache.value_dim}, capacity {capacity}: the storage would be larger than all memory that can be "
            "addressed; without capacity it grows as needed"
        )
    return pages


def between(function: str, name: str, value: Any, highest: Index, what: str) -> Index:
    """An integer, or one per item, from 0 to `highest` of each item: as one per item."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and not (array.size == 0 and highest.size == 0):
        raise TypeError(f"{function}: {name} has dtype {array.dtype}; it must be an integer, or one per item")
    if array.shape not in ((), highest.shape):
        raise ValueError(
            f"{function}: {name} has shape {array.shape}; give one integer, or {len(highest)}, one per item"
        )
    wrong = (array < 0) | (array > highest)
    if wrong.any():
        item = int(wrong.argmax())
        raise ValueError(
            f"{function}: {name} is {np.broadcast_to(array, highest.shape)[item]} for item {item}; "
            f"it must lie between 0 and {highest[item]} ({what})"
        )
    found: Index = np.broadcast_to(array, highest.shape).astype(np.intp)
    return found


def place(
    rows: int, options: dict[str, Any], lengths: Index, window: tuple[int, int] | None, rotary: bool
) -> tuple[Index, dict[str, Any]]:
    """(position of the first row of each item, the options of attend() with every default filled in).

    In these, causal is True or False, key_lengths an array, and q_start an array where anything asks for positions.
    """
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise TypeError(f"KVCache.attend: no option is named {', '.join(unknown)}; use {', '.join(sorted(OPTIONS))}")
    if window is not None and options.get("window") is not None:
        raise ValueError(f"KVCache.attend: window= was given and the cache has window={window}; leave it out")
    given, valid, longest = options.get("q_start"), lengths, int(lengths.max(initial=0))
    if options.get("key_lengths") is not None:
        valid = between("KVCache.attend", "key_lengths", options["key_lengths"], valid, "the lengths of the items")
    causal = check_causal(options.get("causal", "lower_right" if given is None else True))
    if given is not None:
        if isinstance(causal, str):
            raise ValueError(f"KVCache.attend: q_start= and causal={causal!r} both place the queries; use causal=True")
        start = np.clip(per_item("q_start", given, lengths.shape), -FAR, FAR)
    elif causal is True and rows != longest:
        raise ValueError(
            f"KVCache.attend: causal=True with {rows} queries and {longest} tokens is ambiguous; leave causal out (the "
            "last tokens of each item), or give q_start= (query i stands at q_start + i)"
        )
    else:
        start = np.zeros(1, np.intp) if causal in (True, "upper_left") else valid - rows
    start = np.ascontiguousarray(np.broadcast_to(start, lengths.shape))
    windowed = window is not None or options.get("window") is not None
    positioned = causal is not False or windowed or options.get("alibi_slopes") is not None
    if given is not None and not positioned and not rotary:
        raise ValueError("KVCache.attend: q_start= places the queries for causal=True, window=, alibi_slopes=, rotary")
    filled = {"causal": causal is not False, "q_start": start if positioned else None, "key_lengths": valid}
    return start, {**options, **filled}


def check_held(start: Index, rows: int, valid: Index, left: int, sinks: int, held_from: Index) -> None:
    """Refuses rows that need tokens that the window has dropped."""
    position = start[:, None] + np.arange(rows)
    first = np.maximum(position - left, sinks)
    gone = first < np.minimum(np.minimum(position + 1, valid[:, None]), held_from[:, None])
    if gone.any():
        item, row = np.argwhere(gone)[0]
        raise ValueError(
            f"KVCache.attend: row {row} of item {item} stands at position {position[item, row]} and needs the tokens "
            f"from {first[item, row]} on; the window has dropped those before {held_from[item]}, which leaves rows "
            f"from position {held_from[item] + left} on"
        )


def incoming(cache: KVCache, name: str, value: ArrayLike, width: int) -> Array:
    array = as_array("KVCache.append", name, value)
    if not np.can_cast(array.dtype, cache.dtype, "same_kind"):
        raise TypeError(
            f"KVCache.append: {name} has dtype {array.dtype}; it must be real numbers, which become {cache.dtype}"
        )
    wanted = (cache.batch, cache.kv_heads, array.shape[2] if array.ndim == 4 else "n", width)
    if array.shape != wanted:
        raise ValueError(
            f"KVCache.append: {name} has shape {array.shape}; it must be "
            f"({cache.batch}, {cache.kv_heads}, n, {width}) = (batch, kv_heads, tokens, width)"
        )
    return array


def check_capacity(cache: KVCache, counts: Index, held_from: Index) -> None:
    if cache.capacity is None:
        return
    held = cache._lengths + counts - np.maximum(held_from - cache.sinks, 0)
    if held.max(initial=0) > cache.capacity:
        item = int(held.argmax())
        raise ValueError(
            f"KVCache.append: item {item} would hold {held[item]} tokens and the capacity is {cache.capacity}; "
            "make the cache with a larger capacity, or without one (it grows), or append fewer tokens at once"
        )


def beams(beam_index: ArrayLike, batch: int) -> Index:
    """The old item of each new one."""
    items = np.asarray(beam_index)
    if items.ndim != 1 or (items.size and items.dtype.kind not in "iu"):
        raise TypeError(
            f"KVCache.reorder: beam_index has shape {items.shape} and dtype {items.dtype}; it must be integers on "
            "one axis, the old item of each new one"
        )
    if items.size and (items.min() < 0 or items.max() >= batch):
        raise ValueError(
            f"KVCache.reorder: beam_index has values from {items.min()} to {items.max()}; they must lie between 0 "
            f"and {batch - 1}, the last item"
        )
    found: Index = items.astype(np.intp)
    return found
