"""Attention over what a KVCache holds: on its pages by the compiled core, else over copies by attention() itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..attention import AttentionResult, attention, finish
from ..call import _mask, prepare, promoted
from ..positions.rotary import rotary_embedding
from ..positions.scaling import depends_on_length
from ..runtime import config

if TYPE_CHECKING:
    from .kv_cache import KVCache

Array = NDArray[Any]
Index = NDArray[np.intp]

# The options of prepare() that a call need not name.
_UNUSED: dict[str, Any] = dict.fromkeys(
    ("mask", "bias", "scale", "softcap", "sinks", "alibi_slopes", "num_threads", "window")
)


def attend_stored(cache: KVCache, q: Array, options: dict[str, Any]) -> Array | AttentionResult:
    """q (rotated) over what the cache holds. options: as checks.place() gives them."""
    n = cache.length
    options = options | {"window": cache.window} if cache.window is not None else dict(options)
    if (options["key_lengths"] == n).all():
        options["key_lengths"] = None
    core = config.active
    python = options.get("score_mod") is not None or (cache.sinks and options.get("segments") is not None)
    if core is None or python or promoted("attention", q)[0] != cache.dtype:
        return _attend_gathered(cache, q, options)
    returned = [bool(options.pop(name, False)) for name in ("return_lse", "return_weights")]
    out = options.pop("out", None)
    k, v = (
        np.broadcast_to(np.zeros((), cache.dtype), (cache.batch, cache.kv_heads, n, width))
        for width in (cache.head_dim, cache.value_dim)
    )
    call = prepare(q, k, v, stored=True, kept=cache.sinks > 0, **{**_UNUSED, **options})

    def run(target: Array, lse: Array | None, weights: Array | None) -> None:
        if 0 in target.shape or n == 0:
            target[...] = 0
            if lse is not None:
                lse[...] = -np.inf
            return
        named = call.named()
        for name in ("lo", "hi", "start"):
            if (index := named[name]) is not None:
                named[name] = np.ascontiguousarray(index, np.intp)
        del named["k"]
        core.attend_pages(
            named.pop("q"), cache._shape, cache._pages.table, n, cache.sinks, target, call.scale, call.threads,
            lse=lse, weights=weights, **named, **call.options,
        )  # fmt: skip

    return finish(call, run, out, *returned)


def _attend_gathered(cache: KVCache, q: Array, options: dict[str, Any]) -> Array | AttentionResult:
    """The same over copies (batch, heads, length, width) with zeros where tokens are gone."""
    n = cache.length
    k = np.zeros((cache.batch, cache.kv_heads, n, cache.head_dim), cache.dtype)
    v = np.zeros((cache.batch, cache.kv_heads, n, cache.value_dim), cache.dtype)
    for item in range(cache.batch):
        for first, end in cache._held(item):
            cache._pages.read(item, first, end, k[item, :, first:end], v[item, :, first:end])
    if cache.window is not None and cache.sinks:
        position = options["q_start"][:, None, None, None] + np.arange(q.shape[2])[:, None]
        seen = (np.arange(n) >= position - cache.window[0]) | (np.arange(n) < cache.sinks)
        if options.get("mask") is not None:
            _mask(options["mask"], (*q.shape[:3], n))  # its checks
            seen = seen & np.asarray(options["mask"])
        options |= {"mask": seen, "window": (None, 0)}
    result: Array | AttentionResult = attention(q, k, v, **options)
    return result


def turned(cache: KVCache, x: ArrayLike, before: int) -> Array | None:
    """x rotated, if it is what the quick ways take: at the next tokens, or (before = -1) at the last ones."""
    fits = type(x) is np.ndarray and x.dtype is cache.dtype and x.ndim == 4 and x.size > 0
    if not fits or x.shape[0] != cache.batch or x.shape[3] != cache.head_dim:  # type: ignore[union-attr]
        return None
    length = int(cache._lengths[0])
    start = length + before * x.shape[2]  # type: ignore[union-attr]
    if start < 0 or (cache.batch > 1 and (cache._lengths != length).any()):
        return None
    return rotary_embedding(x, start, **(cache._rotary or {}))


def row_positions(starts: Index, counts: Index | int, rows: int) -> Index:
    """Positions (items, rows) of counts[b] tokens from starts[b] on. Padding behind them takes no later position, for
    which tables may have no row, and which would change frequencies that depend on the length."""
    last: Index = np.maximum(starts + counts - 1, 0)
    positions: Index = np.minimum(starts[:, None] + np.arange(rows), last[:, None])
    return positions


def query_positions(cache: KVCache, start: Index, rows: int, placed: bool) -> Index:
    """Positions (items, rows) of queries from start[b] on; placed: the caller has given them.

    Tables, and frequencies that depend on the length, know an end: for them the rows behind the last token of an item
    that has rows before it are padding. Where no row is a token of its item, as when a chunk attends to the cache
    before it is appended, the rows stand ahead and are no padding.
    """
    options: dict[str, Any] = cache._rotary or {}
    tables = options.get("cos") is not None
    position: Index = start[:, None] + np.arange(rows)
    if not tables and not depends_on_length(options.get("scaling")):
        return position
    if not placed:  # rows before the first token of an item with fewer tokens than there are rows
        position = np.maximum(position, 0)
    ahead = start >= cache._lengths
    free = ahead.all() if tables else ahead
    last = np.where(free, np.iinfo(np.intp).max, np.maximum(cache._lengths - 1, 0))
    return np.minimum(position, last[:, None])
