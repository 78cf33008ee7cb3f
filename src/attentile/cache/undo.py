"""Taking back an append when what a layer computes after it fails: the cache is then as it was before.

The append keeps the pages that its window drops. They go when the call has come to its end, and stay if it fails. A
fork would do the same, but makes every page shared, so that each step of a decoder copied one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .kv_cache import KVCache

Index = NDArray[np.intp]


def mark(cache: KVCache) -> tuple[Index, Index]:
    """What undo() needs: copies, because the core's view changes these arrays in place."""
    return cache._lengths.copy(), cache._held_from.copy()


def undo(cache: KVCache, before: tuple[Index, Index]) -> None:
    """The tokens of `before`, whatever came since by one append(keep=True), whole or not."""
    cache._made = None
    cache._held_from = before[1]  # first: between the two lines a signal finds tokens that are there
    cache._lengths = before[0]
    cache._pages.cut(before[0])
    cache._replaced()


def settle(cache: KVCache, before: tuple[Index, Index]) -> None:
    """Gives up the pages that append(keep=True) has kept since `before`."""
    size = cache._pages.pool.page_keys
    if cache.window is None or (before[1] // size == cache._held_from // size).all():
        return
    cache._made = None
    with suppress(MemoryError):  # the call has succeeded; the next append tries again
        cache._pages.open(cache._lengths, np.zeros_like(cache._lengths), cache._held_from, cache.sinks)
    cache._replaced(cache._writable, cache._own_from)


def attempt(cache: KVCache, call: Any) -> Any:
    """call(), which may append once with keep=True; if it fails the cache is as before."""
    before = mark(cache)
    try:
        result = call()
    except BaseException:
        undo(cache, before)
        raise
    settle(cache, before)
    return result
