"""What a cache holds of the tokens of each item, and what it evicts: the numbers that say so, and every change of them.

    window=(4, 0), sink_tokens=2, 12 tokens:     token      0 1 2 3 4 5 6 7 8 9 . .
                                               held       x x . . . . . x x x x x      held_from = 7
    the next row stands at 12 and sees                    x x             x x x x +itself

A signal may break in anywhere: tokens are disowned before their pages go, and the core's view of both goes first.

Threads: Held trusts its callers to be in a block of using(), for a change or to read. Only what is said of fork() holds
while others read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import get_ident
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arguments import as_array, between, index, integer
from ..core.constants import CHUNK, PANEL
from ..masks import FAR
from ..positions.items import kept_options, rotate_items, row_positions
from ..positions.rotary import rotary_embedding
from ..positions.scaling import depends_on_length
from ..runtime import backend
from ..storage import rounded
from .formats import read_format
from .guard import Guard
from .pages import PagePool, PageTable

Array = NDArray[Any]
Index = NDArray[np.intp]
Result = TypeVar("Result")

_PLACING = {"causal", "q_start", "key_lengths"}  # options that put queries elsewhere than at the last tokens


# ---- checks of the settings ----


def _count(name: str, value: Any, least: int) -> int:
    wanted = f"at least {least}"
    return integer("KVCache", name, value, least, wanted=f"an integer, {wanted}", otherwise=wanted)


def _window(window: Any) -> tuple[int, int] | None:
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


def _check_sink_positions(given: Any, sink_tokens: int, rotary: Mapping[str, Any] | None) -> None:
    if not isinstance(given, str) or given not in ("text", "cache"):
        raise ValueError(f"KVCache: sink_positions is {given!r}; it must be 'text' or 'cache'")
    if given == "text":
        return
    if rotary is None or not sink_tokens:
        raise ValueError(
            "KVCache: sink_positions='cache' says how queries are rotated for the first tokens that a window keeps; "
            "give window=, sink_tokens= and rotary= too"
        )
    if rotary.get("cos") is not None or depends_on_length(rotary.get("scaling")):
        raise ValueError(
            "KVCache: sink_positions='cache' needs a rotation by angles that grow with the position and stay what they "
            "are; tables (cos, sin), dynamic and longrope scaling go with sink_positions='text'"
        )


class Held:
    """The tokens of a cache: its settings, arrays with one entry for each item, and the pages.

    lengths: tokens ever appended. held_from: those below it are gone, but for the first `sink_tokens`. writable: end
    of the last page, if that is there and nobody else's, or 0. guard: keeps calls apart that must not meet and, of the
    compiled core, holds the arrays for its quick ways, which write lengths and held_from; Python replaces arrays and
    writes into none, but for fork().
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        widths: tuple[int, int | None],
        capacity: int | None,
        dtype: DTypeLike,
        window: Any,
        sinks: tuple[Any, Any],
        rotary: Any,
    ) -> None:
        """The arguments of KVCache, unchecked. widths: of a key and a value; sinks: sink_tokens, sink_positions."""
        head_dim, value_dim = widths
        sink_tokens, self.sink_positions = sinks
        batch = _count("batch", batch, 0)
        self.kv_heads = _count("kv_heads", kv_heads, 1)
        self.head_dim = _count("head_dim", head_dim, 1)
        self.value_dim = self.head_dim if value_dim is None else _count("value_dim", value_dim, 1)
        self.capacity = None if capacity is None else _count("capacity", capacity, 1)
        self.format = read_format(dtype)
        self.dtype = self.format.dtype
        self.window = _window(window)
        self.left = FAR if self.window is None else self.window[0]
        self.sink_tokens = _count("sink_tokens", sink_tokens, 0)
        if self.sink_tokens and self.window is None:
            raise ValueError(
                f"KVCache: sink_tokens={self.sink_tokens} keeps first tokens beside a window; give window=(left, 0) too"
            )
        size = CHUNK  # a chunk of the pass; a small cache has one smaller page for each item
        if self.capacity is not None and self.window is None:
            size = min(CHUNK, -(-self.capacity // PANEL) * PANEL)
        pages = self._pages_per_item(batch, size)
        self.rotary = kept_options("KVCache", rotary)
        if self.rotary is not None:  # its own checks, before anything is stored
            rotate_items(np.zeros((1, 1, 1, self.head_dim), self.format.compute), 0, self.rotary)
        _check_sink_positions(self.sink_positions, self.sink_tokens, self.rotary)
        pool = PagePool(self.kv_heads, self.head_dim, self.value_dim, size, self.format.items)
        pool.grow(batch * pages)
        self.pages = PageTable(pool, np.zeros((batch, pages), np.intp))
        self.page_shape = (self.kv_heads, size, self.head_dim, self.value_dim)  # as the core takes it
        self.lengths = np.zeros(batch, np.intp)
        self.held_from = np.zeros(batch, np.intp)
        self._open_guard()

    def _pages_per_item(self, batch: int, size: int) -> int:
        """Pages that `capacity` tokens can touch, wherever they lie; 0 without a capacity."""
        capacity = self.capacity or 0
        pages = -(-capacity // size)
        if capacity and self.window is not None:
            kept = min(self.sink_tokens, capacity)
            pages = -(-kept // size) + (capacity - kept + 2 * size - 2) // size
        needed = max(batch, 1) * max(pages, 1) * size * self.kv_heads * (self.head_dim + self.value_dim)
        if needed * self.format.items.itemsize > sys.maxsize:
            raise ValueError(
                f"KVCache: batch {batch}, kv_heads {self.kv_heads}, head_dim {self.head_dim}, value_dim "
                f"{self.value_dim}, capacity {self.capacity}: the storage would be larger than all memory that can be "
                "addressed; without capacity it grows as needed"
            )
        return pages

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        return int(self.lengths.max(initial=0))

    # ---- threads, and the core's view ----

    def _open_guard(self) -> None:
        """A guard of its own, for arrays of its own; no page may be written to as it is."""
        self.owner: int | None = None  # the thread that is in attempt(), which may read there
        self.guard: Any = Guard()
        if backend.compiled is not None:
            left = -1 if self.window is None else self.window[0]
            capacity = -1 if self.capacity is None else self.capacity
            limits = (left, self.sink_tokens, capacity)
            self.guard = backend.compiled.CacheView(self.page_shape, str(self.dtype), limits, self.rotary is not None)
        self.replaced()

    def replaced(self, writable: Index | None = None) -> None:
        """Arrays are others now. By default no page may be written to as it is."""
        self.writable = np.zeros_like(self.lengths) if writable is None else writable
        self.guard.bind((self.pages.table, self.lengths, self.held_from, self.writable) if self.batch else None)

    def using(self, caller: str, change: bool) -> AbstractContextManager[None]:
        """A block that has the tokens for itself, to change them, or reads them; RuntimeError if others are there."""
        if not change and self.owner == get_ident():
            return nullcontext()
        found = "is in use" if change else "is being changed"
        return self.guard.using(  # type: ignore[no-any-return]
            change,
            f"{caller}: this cache {found} by another call, probably of another thread; let the threads take turns "
            "(a lock), or give each its own fork()",
        )

    def view(self) -> Any:
        """The core's view of the arrays, or None where NumPy computes."""
        return None if backend.active is None else self.guard

    # ---- tokens in ----

    def append(
        self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None, bits: bool = False, keep: bool = False
    ) -> None:
        """KVCache.append. bits: those of uint16 hold bfloat16. keep: pages of evicted tokens stay, for attempt()."""
        view = self.view()
        if view is not None and lengths is None:
            given = k if self.rotary is None else self.rotated(k, 0, {})
            if given is not None and view.append(given, v, bits):
                return
        k, v = self._incoming("k", k, self.head_dim), self._incoming("v", v, self.value_dim)
        n = k.shape[2]
        if v.shape[2] != n:
            raise ValueError(f"KVCache.append: k has {n} tokens and v has {v.shape[2]}; they must be equal")
        counts = np.full(self.batch, n, np.intp)
        if lengths is not None:
            counts = between("KVCache.append", "lengths", lengths, counts, "the tokens of k")
        before = self.held_from  # an item that gets nothing has no new row, so it loses nothing
        held_from = np.where(counts > 0, np.maximum(before, self.lengths - self.left), before)
        self.check_capacity(counts, held_from)
        # Copies come before changes: there may be no memory for them.
        k, v = self.format.incoming(k, self.rotary is not None, bits), self.format.incoming(v, False, bits)
        if self.rotary is not None and k.size:
            k = rotate_items(k, row_positions(self.lengths, counts, n), self.rotary)
        if backend.active is None:
            k, v = rounded(k, self.format.items), rounded(v, self.format.items)
        table, writable = self.pages.table, None
        self.guard.bind(None)
        self.held_from = held_from
        try:
            self.pages.open(self.lengths, counts, before if keep else held_from, self.sink_tokens)
            self.write(k, v, self.lengths, counts)
            self.lengths = self.lengths + counts
            size = self.pages.pool.page_keys
            writable = np.where(counts > 0, -(-self.lengths // size) * size, 0)
        finally:
            if writable is None and self.pages.table is table:
                self.held_from = before
            self.replaced(writable)

    def _incoming(self, name: str, value: ArrayLike, width: int) -> Array:
        array = as_array("KVCache.append", name, value)
        if not np.can_cast(array.dtype, self.format.compute, "same_kind"):
            raise TypeError(
                f"KVCache.append: {name} has dtype {array.dtype}; it must be real numbers, which become {self.dtype}"
            )
        wanted = (self.batch, self.kv_heads, array.shape[2] if array.ndim == 4 else "n", width)
        if array.shape != wanted:
            raise ValueError(
                f"KVCache.append: {name} has shape {array.shape}; it must be "
                f"({self.batch}, {self.kv_heads}, n, {width}) = (batch, kv_heads, tokens, width)"
            )
        return array

    def rotated(self, x: ArrayLike, before: int, options: Mapping[str, Any]) -> Array | None:
        """x rotated, if it is in the dtype of the arithmetic and all items have one length; else None.

        before: 0, tokens that come next; -1, queries of the last tokens, with the options of attend.
        """
        if before and (self.sink_positions == "cache" or not _PLACING.isdisjoint(options)):
            return None
        fits = type(x) is np.ndarray and x.dtype is self.format.compute and x.ndim == 4 and x.size > 0
        if not fits or x.shape[0] != self.batch or x.shape[3] != self.head_dim:  # type: ignore[union-attr]
            return None
        length = int(self.lengths[0])
        start = length + before * x.shape[2]  # type: ignore[union-attr]
        if start < 0 or (self.batch > 1 and (self.lengths != length).any()):
            return None
        return rotary_embedding(x, start, **(self.rotary or {}))

    def check_capacity(self, counts: Index, held_from: Index) -> None:
        """Refuses counts[b] more tokens than an item may hold when those below held_from[b] are evicted."""
        if self.capacity is None:
            return
        held = self.lengths + counts - np.maximum(held_from - self.sink_tokens, 0)
        if held.max(initial=0) > self.capacity:
            item = int(held.argmax())
            raise ValueError(
                f"KVCache.append: item {item} would hold {held[item]} tokens and the capacity is {self.capacity}; "
                "make the cache with a larger capacity, or without one (it grows), or append fewer tokens at once"
            )

    def write(self, k: Array, v: Array, starts: Index, counts: Index) -> None:
        """Backend: the first counts[b] tokens of item b go to starts[b] ... of opened pages.

        k, v: as incoming() of the format gives them; where NumPy computes, rounded to its items.
        """
        core = backend.active
        if core is not None and k.size:
            core.store_tokens(k, v, self.page_shape, str(self.dtype), self.pages.table, starts, counts)
        else:
            for item, n in enumerate(counts):
                self.pages.write(item, int(starts[item]), k[item, :, :n], v[item, :, :n])

    # ---- what is held ----

    def runs(self, item: int, held_from: int = 0) -> list[tuple[int, int]]:
        """The runs (first, end) of the tokens of an item that are held; of the later ones, those from held_from on."""
        end = int(self.lengths[item])
        later = max(int(self.held_from[item]), held_from)
        runs = [(0, end)] if later <= self.sink_tokens else [(0, min(self.sink_tokens, end)), (later, end)]
        return [(first, last) for first, last in runs if first < last]

    def visible(self) -> list[list[tuple[int, int]]]:
        """The runs of each item that the row of its last token sees."""
        return [self.runs(item, end - self.left - 1) for item, end in enumerate(self.lengths.tolist())]

    def copies(
        self, runs: list[list[tuple[int, int]]], dtype: np.dtype[Any], gaps: bool = False
    ) -> tuple[Array, Array]:
        """Keys and values (batch, kv_heads, n, width) of the runs of tokens of each item; elsewhere zeros.

        dtype: one of those of the format. gaps: every token stands at its own place; else they are in a row.
        """
        n = self.length if gaps else max((sum(end - first for first, end in item) for item in runs), default=0)
        k = np.zeros((self.batch, self.kv_heads, n, self.head_dim), dtype)
        v = np.zeros((self.batch, self.kv_heads, n, self.value_dim), dtype)
        for item, own in enumerate(runs):
            at = 0
            for first, end in own:
                at = first if gaps else at
                part = slice(at, at + end - first)
                self.pages.read(item, first, end, k[item, :, part], v[item, :, part])
                at = part.stop
        return k, v

    # ---- going back, branching ----

    def truncate(self, length: ArrayLike) -> None:
        """KVCache.truncate, where the core's view did not do it."""
        ends = between("KVCache.truncate", "length", length, self.lengths, "the lengths of the items")
        if self.window is not None:
            whole = (self.held_from <= self.sink_tokens) | (ends <= self.sink_tokens)
            lost = ~whole & (ends - self.left < self.held_from)
            if lost.any():
                item = int(lost.argmax())
                raise ValueError(
                    f"KVCache.truncate: item {item} cannot go back to {ends[item]} tokens; the window has dropped "
                    f"those before {self.held_from[item]}, which leaves lengths from "
                    f"{self.held_from[item] + self.left} on, or up to {self.sink_tokens}"
                )
        size = self.pages.pool.page_keys
        same_page = (ends - 1) // size == (self.lengths - 1) // size
        self.guard.bind(None)
        self.lengths = ends
        self.held_from = np.where(ends <= self.sink_tokens, 0, self.held_from)
        # Where the window holds no later token any more, only the kept first ones stay.
        stay = np.where(self.held_from < ends, ends, np.minimum(self.sink_tokens, ends))
        self.pages.cut(stay)
        self.replaced(np.where(same_page & (stay == ends), self.writable, 0))

    def fork(self) -> Held:
        """The same tokens on the same pages. Other threads may read and fork meanwhile: they need no `writable`."""
        self.writable[:] = 0  # from here on every page is shared
        twin = copy.copy(self)
        twin.pages = self.pages.fork()
        twin.lengths = self.lengths.copy()
        twin.held_from = self.held_from.copy()
        twin._open_guard()
        return twin

    def reorder(self, beam_index: ArrayLike) -> None:
        """KVCache.reorder."""
        items = as_array("KVCache.reorder", "beam_index", beam_index)
        if items.ndim != 1 or (items.size and items.dtype.kind not in "iu"):
            raise TypeError(
                f"KVCache.reorder: beam_index has shape {items.shape} and dtype {items.dtype}; it must be integers on "
                "one axis, the old item of each new one"
            )
        if items.size and (items.min() < 0 or items.max() >= self.batch):
            raise ValueError(
                f"KVCache.reorder: beam_index has values from {items.min()} to {items.max()}; they must lie between 0 "
                f"and {self.batch - 1}, the last item"
            )
        items = items.astype(np.intp)
        self.guard.bind(None)
        self.pages.reorder(items)
        self.lengths = self.lengths[items]
        self.held_from = self.held_from[items]
        self.replaced()

    # ---- taking back an append ----

    def attempt(self, caller: str, call: Callable[[], Result]) -> Result:
        """call() in a block of using(), which may append once with keep=True; if it fails, the cache is as before.

        It may read through the methods of KVCache, which a subclass may have replaced; other threads may not.

        Pages of evicted tokens go when the call has come to its end. A fork would do the same, but makes every page
        shared, so that each step of a decoder copied one.
        """
        with self.using(caller, change=True):
            self.owner = get_ident()
            try:
                return self._attempted(call)
            finally:
                self.owner = None

    def _attempted(self, call: Callable[[], Result]) -> Result:
        lengths, held_from = self.lengths.copy(), self.held_from.copy()  # the core's view changes these in place
        try:
            result = call()
        except BaseException:
            self.guard.bind(None)
            self.held_from = held_from  # first: between the two lines a signal finds tokens that are there
            self.lengths = lengths
            self.pages.cut(lengths)
            self.replaced()
            raise
        size = self.pages.pool.page_keys
        if (held_from // size != self.held_from // size).any():
            self.guard.bind(None)
            with suppress(MemoryError):  # the call has succeeded; the next append tries again
                self.pages.open(self.lengths, np.zeros_like(self.lengths), self.held_from, self.sink_tokens)
            self.replaced(self.writable)
        return result
