"""Attention over what a KVCache holds: on its pages by the compiled core, else over copies by attention() itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import config
from .attention import AttentionResult, attention, finish
from .call import _mask, prepare, promoted
from .rotary import rotary_embedding

if TYPE_CHECKING:
    from .cache import KVCache

Array = NDArray[Any]

# The options of prepare() that a call need not name.
_UNUSED: dict[str, Any] = dict.fromkeys(
    ("mask", "bias", "scale", "softcap", "sinks", "alibi_slopes", "num_threads", "window")
)


def attend_stored(cache: KVCache, q: Array, options: dict[str, Any]) -> Array | AttentionResult:
    """q (rotated) over what the cache holds. options: as cache_checks.place() gives them."""
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
    start = int(cache._lengths[0])
    if cache.batch > 1 and (cache._lengths != start).any():
        return None
    return rotary_embedding(x, start + before * x.shape[2], **(cache._rotary or {}))  # type: ignore[union-attr]
