"""Attention over what a cache holds: on its pages by the compiled core, else over copies of it.

The commonest calls go from KVCache.attend straight to the core's view. The others are placed, rotated, converted and
explained here. Callers are in a block of Held.using().
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import dispatch
from ..arguments import as_array, between, check_out, named_in_errors
from ..attention import OPTIONS
from ..masks import FAR, check_causal, per_item
from ..outputs import AttentionResult, Outputs
from ..positions.items import query_positions, rotate_items
from ..runtime.threads import get_num_threads, threads_for
from ..scores import Scores, check_mask, holds_bits
from ..storage import ready, rounded, widened
from .retention import Held

Array = NDArray[Any]
Index = NDArray[np.intp]


def attend_held(held: Held, q: ArrayLike, options: Mapping[str, Any]) -> Array | AttentionResult:
    """KVCache.attend of a caller that is in a block of using()."""
    view = held.view()
    if view is not None:
        given = q if held.rotary is None else held.rotated(q, -1, options)
        found = None if given is None else view.attend(given, options, get_num_threads())
        if found is not None:
            return result_of(found)
    queries = as_array("KVCache.attend", "q", q)
    if queries.ndim != 4 or (queries.shape[0], queries.shape[3]) != (held.batch, held.head_dim):
        raise ValueError(
            f"KVCache.attend: q has shape {queries.shape}; it must be ({held.batch}, heads, rows, {held.head_dim})"
        )
    rows = queries.shape[2]
    with named_in_errors("KVCache.attend"):
        wide, dtype = held.format.result(queries, holds_bits(options.get("dtype")))
        if queries.dtype != held.format.compute:
            return _attend_converted(held, queries, options, wide, dtype)
        start, placed = _place(held, rows, options)
        _check_held(held, start, rows, placed["key_lengths"])
        near = None
        if held.rotary is not None and queries.size:
            given = options.get("q_start") is not None
            at = query_positions(start, rows, held.lengths, held.rotary, placed=given)
            if held.sink_positions == "cache":
                near = rotate_items(queries, np.minimum(at, held.sink_tokens + held.left), held.rotary)
            queries = rotate_items(queries, at, held.rotary, lengths=held.lengths)
        threads = threads_for(options.get("num_threads"), "attention")
        return _attend(held, queries, placed, threads, near)


def _attend_converted(
    held: Held, q: Array, options: Mapping[str, Any], wide: np.dtype[Any], dtype: np.dtype[Any]
) -> Array | AttentionResult:
    """The same for queries of another dtype than that of the arithmetic: they are converted to it, and the result to
    `dtype`, lse to `wide`.

    The cache may be a thousand times larger than either, so it is never what is converted.
    """
    compute = held.format.compute
    other = dtype != compute  # float64 for a cache in float32, float16 for one in float16
    out = options.get("out") if other else None
    if out is not None:
        check_out("attention", out, (*q.shape[:3], held.value_dim), dtype)
        options = {**options, "out": None}
    bits = q.dtype == np.uint16 and options.get("dtype") is not None
    found = attend_held(held, widened(q, compute) if bits else rounded(q, compute), options)
    if not other:
        return found
    whole = found if isinstance(found, AttentionResult) else AttentionResult(found, None, None)
    rows = rounded(whole.out, dtype)
    weights = None if whole.weights is None else rounded(whole.weights, dtype)
    if out is None:
        out = rows
    else:
        out[...] = rows
    lse = None if whole.lse is None else rounded(whole.lse, wide)
    return AttentionResult(out, lse, weights) if isinstance(found, AttentionResult) else out


def result_of(found: Any) -> Array | AttentionResult:
    """What the core has given, as people get it."""
    return AttentionResult(*found) if type(found) is tuple else found


# ---- where the queries stand ----


def _place(held: Held, rows: int, options: Mapping[str, Any]) -> tuple[Index, dict[str, Any]]:
    """(position of the first row of each item, the options of attend() with every default filled in).

    In these, causal is True or False, key_lengths an array, q_start an array where anything asks for positions, and
    window that of the cache if it has one.
    """
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise TypeError(f"KVCache.attend: no option is named {', '.join(unknown)}; use {', '.join(sorted(OPTIONS))}")
    if held.window is not None and options.get("window") is not None:
        raise ValueError(f"KVCache.attend: window= was given and the cache has window={held.window}; leave it out")
    if held.window is not None and options.get("prefix_lengths") is not None:
        raise ValueError(
            f"KVCache.attend: prefix_lengths= opens keys ahead of a row and the cache has window={held.window}: no row "
            "looks ahead there; leave it out, or keep a cache without a window and give window=(left, None) here"
        )
    given = options.get("q_start")
    valid, longest = held.lengths, held.length
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
    """Refuses rows that need tokens that the window has evicted."""
    if held.window is None:
        return
    held_from = held.held_from
    position = start[:, None] + np.arange(rows)
    first = np.maximum(position - held.left, held.sink_tokens)
    gone = first < np.minimum(np.minimum(position + 1, valid[:, None]), held_from[:, None])
    if gone.any():
        item, row = np.argwhere(gone)[0]
        raise ValueError(
            f"KVCache.attend: row {row} of item {item} stands at position {position[item, row]} and needs the tokens "
            f"from {first[item, row]} on; the window has dropped those before {held_from[item]}, which leaves rows "
            f"from position {held_from[item] + held.left} on"
        )


# ---- what computes ----


def _attend(
    held: Held, q: Array, options: dict[str, Any], threads: int, near: Array | None = None
) -> Array | AttentionResult:
    """q, rotated, over what is held; options: those of _place(). near: q rotated for the kept first tokens, if those
    are seen from other positions than the others (sink_positions)."""
    view, apart = held.view(), near is not None
    segmented = held.sink_tokens and not apart and options.get("segments") is not None
    on_pages = view is not None and view.bound and options.get("score_mod") is None and not segmented
    if on_pages:  # nothing but their shapes and dtype is asked of keys and values
        shape = (held.batch, held.kv_heads, held.length)
        zero = np.zeros((), held.format.compute)
        k, v = (np.broadcast_to(zero, (*shape, width)) for width in (held.head_dim, held.value_dim))
        scores = Scores(q, k, v, options, keep=True)
    else:
        k, v = held.copies([held.runs(item) for item in range(held.batch)], held.format.compute, gaps=True)
        settled = {"mask": _window_as_mask(held, q, options, apart), "window": (None, 0)} if held.sink_tokens else {}
        scores = Scores(q, k, v, options | settled)
    outputs = Outputs(scores, v, options)

    def run(outputs: Outputs) -> None:
        if not on_pages:
            dispatch.attend(scores, ready(v, scores.compute), outputs, threads)
        elif scores.empty:
            outputs.of_no_keys()
        else:
            settled = scores.options | ({"window": None} if held.window is not None else {})
            intervals = _behind(held, scores) if apart else scores.intervals
            view.fill(scores.q, settled, intervals, outputs, threads, apart)

    if near is None:
        run(outputs)
    else:
        _run_apart(scores, outputs, run, _first_tokens(held, near, options, scores), threads)
    return outputs.finished()


def _window_as_mask(held: Held, q: Array, options: dict[str, Any], apart: bool) -> Array:
    """The caller's mask, and the window with its kept first tokens, which is no window that Scores knows."""
    key = np.arange(held.length)
    position = options["q_start"][:, None, None, None] + np.arange(q.shape[2])[:, None]
    first = key < held.sink_tokens
    seen: Array = (key >= position - held.left) & ~first if apart else (key >= position - held.left) | first
    mask = check_mask(options.get("mask"), (*q.shape[:3], held.length))
    return seen if mask is None else seen & mask


# ---- kept first tokens that are seen from positions of their own ----


def _behind(held: Held, scores: Scores) -> tuple[Index, Index]:
    """Intervals of the rows that leave out the kept first tokens."""
    shape = (held.batch, scores.queries)
    lo, hi = scores.intervals or (np.zeros(shape, np.intp), np.full(shape, held.length))
    return np.maximum(lo, held.sink_tokens), hi


def _first_tokens(held: Held, q: Array, options: dict[str, Any], scores: Scores) -> tuple[Scores, Array]:
    """The same call over the kept first tokens only: its scores, without sinks, and its values."""
    runs = [[(0, min(held.sink_tokens, end))] if end else [] for end in held.lengths.tolist()]
    k, v = held.copies(runs, held.format.compute)
    n = k.shape[2]

    def columns(array: Array | None) -> Array | None:
        return array if array is None or array.ndim == 0 or array.shape[-1] == 1 else array[..., :n]

    segments = options.get("segments")
    if segments is not None:
        of_rows, of_keys = segments if isinstance(segments, tuple) else (segments, segments)
        segments = np.atleast_2d(of_rows), np.atleast_2d(of_keys)[:, :n]  # with the axis of items: never two items' ids
    mask = check_mask(options.get("mask"), scores.shape)
    own = {"mask": columns(mask), "bias": columns(scores.bias), "segments": segments, "causal": True, "window": None}
    own |= {"key_lengths": np.minimum(options["key_lengths"], n), "sinks": None}
    return Scores(q, k, v, options | own), v


def _run_apart(
    scores: Scores, outputs: Outputs, run: Callable[[Outputs], None], first: tuple[Scores, Array], threads: int
) -> None:
    """Both parts of the keys, one going on from where the other has ended. run: over the later tokens (`scores`)."""
    near, v = first
    before, n = near.before, near.keys
    weights = None
    if outputs.weights is not None:  # of the first tokens: they are those that come last
        rest = Outputs(scores, v, None, partial=True)
        run(rest)
        near.before, near.sinks = rest.partial, scores.sinks
        whole = Outputs(near, v, {"return_weights": True})
        dispatch.attend(near, v, whole, threads)
        weights = whole.weights
        near.before, near.sinks = before, None
    start = Outputs(near, v, None, partial=True)
    dispatch.attend(near, v, start, threads)
    scores.before = start.partial
    run(outputs)
    if outputs.weights is not None:
        outputs.weights[..., :n] = weights
