"""Attention over what a cache holds: on its pages by the compiled core, else over copies by attention() itself.

The commonest calls go from KVCache.attend straight to the core's view. The others are placed, rotated, converted and
explained here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, between, named_in_errors
from ..attention import OPTIONS, attention
from ..masks import FAR, check_causal, per_item
from ..outputs import AttentionResult, Outputs
from ..positions.rotary import rotate_items
from ..positions.scaling import depends_on_length
from ..runtime.threads import threads_for
from ..scores import Scores, check_mask
from ..storage import promoted
from .retention import Held

Array = NDArray[Any]
Index = NDArray[np.intp]

_PLACING = {"causal", "q_start", "key_lengths"}  # options that put queries elsewhere than at the last tokens


def last_turned(held: Held, q: ArrayLike, options: dict[str, Any]) -> Array | None:
    """q rotated, if the quick way takes it: at the last tokens."""
    if options and not _PLACING.isdisjoint(options):
        return None
    return held.turned(q, -1)


def attend_held(held: Held, q: ArrayLike, options: dict[str, Any]) -> Array | AttentionResult:
    """KVCache.attend, where the core's view did not do it."""
    queries = as_array("KVCache.attend", "q", q)
    if queries.ndim != 4 or (queries.shape[0], queries.shape[3]) != (held.batch, held.head_dim):
        raise ValueError(
            f"KVCache.attend: q has shape {queries.shape}; it must be ({held.batch}, heads, rows, {held.head_dim})"
        )
    rows = queries.shape[2]
    with named_in_errors("KVCache.attend"):
        start, placed = _place(held, rows, options)
        _check_held(held, start, rows, placed["key_lengths"])
        if held.rotary is not None:
            queries = queries.astype(promoted("attention", queries, np.empty(0, held.dtype))[1], copy=False)
            if queries.size:
                at = _positions(held, start, rows, options.get("q_start") is not None)
                queries = rotate_items(queries, at, held.rotary, lengths=held.lengths)
        threads = threads_for(options.get("num_threads"), "attention")
        python = options.get("score_mod") is not None or (held.sinks and options.get("segments") is not None)
        view = held.view()
        if view is None or python or promoted("attention", queries)[0] != held.dtype:
            return _attend_gathered(held, queries, placed)
        return _attend_pages(held, view, queries, placed, threads)


# ---- where the queries stand ----


def _place(held: Held, rows: int, options: dict[str, Any]) -> tuple[Index, dict[str, Any]]:
    """(position of the first row of each item, the options of attend() with every default filled in).

    In these, causal is True or False, key_lengths an array, q_start an array where anything asks for positions, and
    window that of the cache if it has one.
    """
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise TypeError(f"KVCache.attend: no option is named {', '.join(unknown)}; use {', '.join(sorted(OPTIONS))}")
    if held.window is not None and options.get("window") is not None:
        raise ValueError(f"KVCache.attend: window= was given and the cache has window={held.window}; leave it out")
    given, valid, longest = options.get("q_start"), held.lengths, int(held.lengths.max(initial=0))
    if options.get("key_lengths") is not None:
        valid = between("KVCache.attend", "key_lengths", options["key_lengths"], valid, "the lengths of the items")
    causal = check_causal(options.get("causal", "lower_right" if given is None else True))
    if given is not None:
        if isinstance(causal, str):
            raise ValueError(f"KVCache.attend: q_start= and causal={causal!r} both place the queries; use causal=True")
        start = np.clip(per_item("q_start", given, valid.shape), -FAR, FAR)
    elif causal is True and rows != longest:
        raise ValueError(
            f"KVCache.attend: causal=True with {rows} queries and {longest} tokens is ambiguous; leave causal out (the "
            "last tokens of each item), or give q_start= (query i stands at q_start + i)"
        )
    else:
        start = np.zeros(1, np.intp) if causal in (True, "upper_left") else valid - rows
    start = np.ascontiguousarray(np.broadcast_to(start, valid.shape))
    window = options.get("window") if held.window is None else held.window
    positioned = causal is not False or window is not None or options.get("alibi_slopes") is not None
    if given is not None and not positioned and held.rotary is None:
        raise ValueError("KVCache.attend: q_start= places the queries for causal=True, window=, alibi_slopes=, rotary")
    filled = {"causal": causal is not False, "q_start": start if positioned else None, "key_lengths": valid}
    return start, {**options, **filled, "window": window}


def _check_held(held: Held, start: Index, rows: int, valid: Index) -> None:
    """Refuses rows that need tokens that the window has dropped."""
    if held.window is None:
        return
    left, held_from = held.window[0], held.held_from
    position = start[:, None] + np.arange(rows)
    first = np.maximum(position - left, held.sinks)
    gone = first < np.minimum(np.minimum(position + 1, valid[:, None]), held_from[:, None])
    if gone.any():
        item, row = np.argwhere(gone)[0]
        raise ValueError(
            f"KVCache.attend: row {row} of item {item} stands at position {position[item, row]} and needs the tokens "
            f"from {first[item, row]} on; the window has dropped those before {held_from[item]}, which leaves rows "
            f"from position {held_from[item] + left} on"
        )


def _positions(held: Held, start: Index, rows: int, placed: bool) -> Index:
    """Positions (items, rows) of queries from start[b] on; placed: the caller has given them.

    Tables, and frequencies that depend on the length, know an end: for them the rows behind the last token of an item
    that has rows before it are padding. Where no row is a token of its item, as when a chunk attends to the cache
    before it is appended, the rows stand ahead and are no padding.
    """
    options: dict[str, Any] = held.rotary or {}
    tables = options.get("cos") is not None
    position: Index = start[:, None] + np.arange(rows)
    if not tables and not depends_on_length(options.get("scaling")):
        return position
    if not placed:  # rows before the first token of an item with fewer tokens than there are rows
        position = np.maximum(position, 0)
    ahead = start >= held.lengths
    free = ahead.all() if tables else ahead
    last = np.where(free, np.iinfo(np.intp).max, np.maximum(held.lengths - 1, 0))
    return np.minimum(position, last[:, None])


# ---- what computes: q is rotated, options are those of _place() ----


def _attend_pages(held: Held, view: Any, q: Array, options: dict[str, Any], threads: int) -> Array | AttentionResult:
    """By the core, on the pages."""
    shape = (held.batch, held.kv_heads, int(held.lengths.max(initial=0)))
    k, v = (np.broadcast_to(np.zeros((), held.dtype), (*shape, width)) for width in (held.head_dim, held.value_dim))
    scores = Scores(q, k, v, options, keep=True)
    outputs = Outputs(scores, held.value_dim)
    outputs.want_out(options.get("out"), (scores.q, scores.mask, scores.bias, *(scores.before or ())))
    if options.get("return_lse"):
        outputs.want_lse()
    if options.get("return_weights"):
        outputs.want_weights()
    if scores.empty:
        outputs.of_no_keys()
    else:
        settled = scores.options | ({"window": None} if held.window is not None else {})
        view.fill(scores.q, settled, scores.intervals, outputs, threads)
    return outputs.finished()


def _attend_gathered(held: Held, q: Array, options: dict[str, Any]) -> Array | AttentionResult:
    """By attention(), over copies (batch, heads, length, width) with zeros where tokens are gone."""
    n = int(held.lengths.max(initial=0))
    k = np.zeros((held.batch, held.kv_heads, n, held.head_dim), held.dtype)
    v = np.zeros((held.batch, held.kv_heads, n, held.value_dim), held.dtype)
    for item in range(held.batch):
        for first, end in held.runs(item):
            held.pages.read(item, first, end, k[item, :, first:end], v[item, :, first:end])
    if held.window is not None and held.sinks:
        position = options["q_start"][:, None, None, None] + np.arange(q.shape[2])[:, None]
        seen = (np.arange(n) >= position - held.window[0]) | (np.arange(n) < held.sinks)
        if options.get("mask") is not None:
            check_mask(options["mask"], (*q.shape[:3], n))
            seen = seen & np.asarray(options["mask"])
        options = options | {"mask": seen, "window": (None, 0)}
    result: Array | AttentionResult = attention(q, k, v, **options)
    return result
