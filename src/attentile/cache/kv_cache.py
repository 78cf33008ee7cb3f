"""KVCache: the keys and values of the tokens so far, in pages (pages.py), and attention over them.

Only `_write`, which puts tokens into the pages, and attend.py, which runs attention over what is held, know what
computes; for the commonest calls the core holds a view of the arrays. Everything else is bookkeeping on three arrays,
one entry per batch item: the pages, the length, and `held_from`.

    window=(4, 0), sinks=2, 12 tokens in:      token      0 1 2 3 4 5 6 7 8 9 . .
                                               held       x x . . . . . x x x x x      held_from = 7
    the next row stands at 12 and sees                    x x             x x x x +itself
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arguments import as_array, named_in_errors
from ..core.constants import CHUNK, PANEL
from ..outputs import AttentionResult
from ..positions.rotary import rotate_items
from ..runtime import backend
from ..runtime.threads import get_num_threads, threads_for
from ..storage import promoted, ready
from . import checks
from . import file as cache_file
from .attend import attend_stored, query_positions, row_positions, turned
from .pages import PagePool, PageTable, addresses_in

Array = NDArray[Any]
Index = NDArray[np.intp]


class KVCache:
    """The keys and values of all tokens so far, for decoding: append what is new, attend to everything.

    Parameters
    ----------
    batch : int
        Batch items. Each has a length of its own.
    kv_heads : int
        Key heads.
    head_dim : int
        Width of a key.
    capacity : int, optional
        Tokens that an item may hold; storage for them is allocated at once and an append beyond raises. With a window
        only held tokens count: the kept first ones, and those from held_from on (Notes). Default: grows as needed, by
        pages of 256 tokens and without ever copying tokens.
    value_dim : int, optional
        Width of a value; default head_dim.
    dtype : {"float32", "float64"}
        Of the storage. What is appended is converted to it.
    window : (left, 0), optional
        A row at position t sees the tokens t - left ... t. Older ones are dropped and their pages used again.
    sinks : int
        With a window: the first tokens, which are kept and which every later row sees.
    rotary : dict, optional
        Keyword arguments of `rotary_embedding` (base, rotary_dim, interleaved, scaling, cos, sin). Keys are rotated
        when they are appended, queries when they attend, at their positions. The frequencies of dynamic and longrope
        scaling are those of the item's length at that moment (after the append). Stored keys are not rotated again
        when it grows: past the trained length the result depends on how the tokens were split into appends.

    Attributes
    ----------
    length : int
        Tokens appended so far, of the longest item; dropped ones count.
    lengths : ndarray of intp, shape (batch,)
        The same for each item; a copy.
    batch, kv_heads, head_dim, value_dim, capacity, dtype, window, sinks, rotary
        As given.

    Raises
    ------
    TypeError, ValueError
        A size that is not a positive integer, another dtype, a window that looks ahead, sinks without a window, more
        storage than can be addressed, an unknown option of rotary.
    IndexError
        Tables of `rotary` without a row.

    Notes
    -----
    The rows of an append that starts at length n need the tokens from n - left on, so held_from, for each item, is
    the largest n - left of its appends, at least 0. Tokens below held_from are gone, except the first `sinks`; an
    `attend` or `truncate` that needs one of them raises. All rows of the latest append can always attend, even if it
    was longer than the window. Results are those of a full cache, as if nothing had been dropped.

    Pages are shared by forks and beams and copied by the first write. One cache must not be changed by two threads at
    once, nor while another attends; attending in several threads, and forks in different threads, are fine.
    ``copy.copy``, ``copy.deepcopy`` and pickle give an independent cache. Windows with kept first tokens: Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", 2023; pages: Kwon et al., "Efficient Memory Management
    for Large Language Model Serving with PagedAttention", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import KVCache
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 4, 10, 8), dtype=np.float32)  # 4 heads, 10 tokens, width 8
    >>> cache = KVCache(batch=1, kv_heads=4, head_dim=8)
    >>> cache.append(k[:, :, :9], v[:, :, :9])  # the prompt
    >>> prompt = cache.attend(q[:, :, :9])
    >>> cache.append(k[:, :, 9:], v[:, :, 9:])  # one more token
    >>> cache.attend(q[:, :, 9:]).shape
    (1, 4, 1, 8)
    >>> cache
    KVCache(batch=1, kv_heads=4, head_dim=8, dtype=float32): 10 tokens, 1 page of 256 (64.0 KiB)
    """

    def __init__(
        self, batch: int, kv_heads: int, head_dim: int, capacity: int | None = None, *, value_dim: int | None = None,
        dtype: DTypeLike = "float32", window: tuple[int, int] | None = None, sinks: int = 0,
        rotary: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        batch = checks.count("batch", batch, 0)
        self.kv_heads, self.head_dim = checks.count("kv_heads", kv_heads, 1), checks.count("head_dim", head_dim, 1)
        self.value_dim = self.head_dim if value_dim is None else checks.count("value_dim", value_dim, 1)
        self.capacity = None if capacity is None else checks.count("capacity", capacity, 1)
        self.dtype = checks.storage_dtype(dtype)
        self.window, self.sinks = checks.window_of(window), checks.count("sinks", sinks, 0)
        if self.sinks and self.window is None:
            raise ValueError(
                f"KVCache: sinks={self.sinks} keeps first tokens beside a window; give window=(left, 0) too"
            )
        size = CHUNK  # a chunk of the pass; a small cache has one smaller page for each item
        if self.capacity is not None and self.window is None:
            size = min(CHUNK, -(-self.capacity // PANEL) * PANEL)
        pages = checks.pages_per_item(self, batch, size)
        self._rotary = checks.rotary_options("KVCache", rotary)
        if self._rotary is not None:  # its own checks, before anything is stored
            rotate_items(np.zeros((1, 1, 1, self.head_dim), self.dtype), 0, self._rotary)
        self._lengths, self._held_from = np.zeros(batch, np.intp), np.zeros(batch, np.intp)
        pool = PagePool(self.kv_heads, self.head_dim, self.value_dim, size, self.dtype)
        pool.grow(batch * pages)
        self._pages = PageTable(pool, np.zeros((batch, pages), np.intp))
        self._shape = (self.kv_heads, size, self.head_dim, self.value_dim)  # of a page, as the core takes it
        # Tokens of each item from and up to which its pages are there and its own; the core's view of these arrays.
        self._own_from, self._writable, self._made = np.zeros(batch, np.intp), np.zeros(batch, np.intp), None

    @property
    def batch(self) -> int:
        return len(self._lengths)

    @property
    def length(self) -> int:
        """Tokens appended so far, of the longest item."""
        return int(self._lengths.max(initial=0))

    @property
    def rotary(self) -> Mapping[str, Any] | None:
        """The options of the rotation, a copy with read-only tables, or None."""
        return None if self._rotary is None else MappingProxyType(checks.copied(self._rotary))

    @property
    def lengths(self) -> Index:
        """Tokens appended so far, of each item: a copy."""
        return self._lengths.copy()

    def __repr__(self) -> str:
        extra: dict[str, Any] = {
            "value_dim": self.value_dim if self.value_dim != self.head_dim else None,
            "capacity": self.capacity,
        }
        extra |= {"window": self.window, "sinks": self.sinks or None, "rotary": self._rotary}
        options = "".join(f", {name}={value}" for name, value in extra.items() if value is not None)
        tokens = " to ".join(str(n) for n in sorted({int(self._lengths.min(initial=self.length)), self.length}))
        tokens += " token" if tokens == "1" else " tokens"
        pages, size = len(set(addresses_in(self._pages.table))), self._pages.pool.page_keys
        kib = pages * self._pages.pool.page_items * self.dtype.itemsize / 1024
        memory = f"{kib:.1f} KiB" if kib < 1024 else f"{kib / 1024:.1f} MiB"
        return (
            f"KVCache(batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, dtype={self.dtype}"
            f"{options}): {tokens}, {pages} page{'s' * (pages != 1)} of {size} ({memory})"
        )

    # ---- tokens in ----

    def append(self, k: ArrayLike, v: ArrayLike, *, lengths: ArrayLike | None = None) -> None:
        """Adds tokens at the end of each item.

        Parameters
        ----------
        k : array_like, shape (batch, kv_heads, n, head_dim)
            Keys; not yet rotated if the cache has `rotary`. Any real dtype, any strides; n may be 0.
        v : array_like, shape (batch, kv_heads, n, value_dim)
            Values.
        lengths : int or array_like of int (one per item), optional
            Tokens of each item that count, the first ones of its row; the others are padding and never read.

        Raises
        ------
        TypeError, ValueError
            Wrong shapes or dtypes, lengths beyond n, more tokens than the capacity. The cache is then as before.
        IndexError
            A token at a position for which the tables of `rotary` have no row. The cache is then as before.
        """
        self._append(k, v, lengths)

    def _append(self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None, keep: bool = False) -> None:
        """keep: pages that the window drops stay, for undo.py."""
        view = self.view()
        if view is not None and lengths is None:
            given = k if self._rotary is None else turned(self, k, 0, {})
            if given is not None and view.append(given, v):
                return
        k, v = checks.incoming(self, "k", k, self.head_dim), checks.incoming(self, "v", v, self.value_dim)
        n = k.shape[2]
        if v.shape[2] != n:
            raise ValueError(f"KVCache.append: k has {n} tokens and v has {v.shape[2]}; they must be equal")
        counts = np.full(self.batch, n, np.intp)
        if lengths is not None:
            counts = checks.between("KVCache.append", "lengths", lengths, counts, "the tokens of k")
        held_from = self._held_from
        if self.window is not None:  # an item that gets nothing has no new row, so it loses nothing
            held_from = np.where(counts > 0, np.maximum(held_from, self._lengths - self.window[0]), held_from)
        checks.check_capacity(self, counts, held_from)
        k, v = ready(k, self.dtype), ready(v, self.dtype)  # copies come before changes: there may be no memory for them
        if self._rotary is not None and k.size:
            k = rotate_items(k, row_positions(self._lengths, counts, n), self._rotary)
        # A signal may break in anywhere: tokens are disowned before their pages go, and so is the core's view of both.
        table, before = self._pages.table, self._held_from
        self._made, self._held_from = None, held_from
        try:
            self._pages.open(self._lengths, counts, before if keep else held_from, self.sinks)
        except BaseException:
            self._held_from = before if self._pages.table is table else held_from
            raise
        self._write(k, v, self._lengths, counts)
        self._lengths = self._lengths + counts
        size = self._pages.pool.page_keys
        own_from = (self._lengths - counts) // size * size
        self._replaced(np.where(counts > 0, -(-self._lengths // size) * size, 0), own_from)

    def _write(self, k: Array, v: Array, starts: Index, counts: Index) -> None:
        """Backend: the first counts[b] tokens of item b go to starts[b] ... of opened pages. k, v: as ready() gives."""
        core = backend.active
        if core is not None and k.size:
            core.store_tokens(k, v, self._shape, self._pages.table, starts, counts)
        else:
            for item, n in enumerate(counts):
                self._pages.write(item, int(starts[item]), k[item, :, :n], v[item, :, :n])

    def _replaced(self, writable: Index | None = None, own_from: Index | None = None) -> None:
        """Arrays that the core's view holds are others now. By default no page may be written to as it is."""
        nothing = np.zeros_like(self._lengths)
        self._writable, self._own_from = (nothing if index is None else index for index in (writable, own_from))
        self._made, core = None, backend.active
        if core is not None and self.batch:
            left, capacity = (-1 if n is None else n for n in (self.window and self.window[0], self.capacity))
            arrays = (self._pages.table, self._lengths, self._held_from, self._writable)
            limits = (left, self.sinks, capacity)
            self._made = core.CacheView(self._shape, arrays, self.dtype, limits, self._rotary is not None)

    def view(self) -> Any:
        """The core's view of the arrays, or None where NumPy computes."""
        if backend.active is None:
            return None
        if self._made is None and self.batch:
            self._replaced(self._writable, self._own_from)
        return self._made

    # ---- attention ----

    def attend(self, q: ArrayLike, **options: Any) -> Array | AttentionResult:
        """Attention of queries over the tokens so far.

        Parameters
        ----------
        q : array_like, shape (batch, Hq, L, head_dim)
            Queries, not yet rotated if the cache has `rotary`. By default they are the last L tokens of each item:
            the last one sees everything, the one before everything but the last token, and so on.
        **options
            Those of `attention`. S is `length`, the tokens ever appended to the longest item, for the shapes of mask,
            bias and the returned weights. Differences: causal is "lower_right" by default, True if q_start is given;
            without q_start and causal, window and ALiBi count from the last L tokens. key_lengths may not exceed the
            lengths of the items, which are its default. window is refused if the cache has one. sinks are logits, as
            in `attention`, not the first tokens that a cache with a window keeps.

            After an append with `lengths` the queries' padding, too, comes last in each row: give the lengths before
            the append as ``q_start``. With tables, dynamic or longrope scaling in `rotary`, rows behind the end of an
            item that has others before it are always padding.

        Returns
        -------
        ndarray, shape (batch, Hq, L, value_dim), or AttentionResult
            As `attention` does; q and the cache are promoted. Rows of padding are to be ignored.

        Raises
        ------
        TypeError, ValueError
            As `attention`, and if a row needs tokens that the window has dropped.
        IndexError
            A row at a position for which the tables of `rotary` have no row.

        Examples
        --------
        >>> import numpy as np
        >>> from attentile import KVCache
        >>> x = np.random.default_rng(0).standard_normal((2, 1, 3, 4))  # item 1 has two tokens and padding
        >>> cache = KVCache(batch=2, kv_heads=1, head_dim=4, dtype="float64")
        >>> start = cache.lengths
        >>> cache.append(x, x, lengths=[3, 2])
        >>> cache.attend(x, q_start=start, return_weights=True).weights[1, 0].round(2)
        array([[1.  , 0.  , 0.  ],
               [0.31, 0.69, 0.  ],
               [0.6 , 0.4 , 0.  ]])
        """
        view = self.view()
        if view is not None:
            given = q if self._rotary is None else turned(self, q, -1, options)
            found = None if given is None else view.attend(given, options, get_num_threads())
            if found is not None:
                return AttentionResult(*found) if type(found) is tuple else found
        queries = as_array("KVCache.attend", "q", q)
        if queries.ndim != 4 or (queries.shape[0], queries.shape[3]) != (self.batch, self.head_dim):
            raise ValueError(
                f"KVCache.attend: q has shape {queries.shape}; it must be ({self.batch}, heads, rows, {self.head_dim})"
            )
        with named_in_errors("KVCache.attend"):
            start, placed = checks.place(
                queries.shape[2], options, self._lengths, self.window, self._rotary is not None
            )
            if self.window is not None:
                valid = placed["key_lengths"]
                checks.check_held(start, queries.shape[2], valid, self.window[0], self.sinks, self._held_from)
            if self._rotary is not None:
                queries = queries.astype(promoted("attention", queries, np.empty(0, self.dtype))[1], copy=False)
                if queries.size:
                    at = query_positions(self, start, queries.shape[2], options.get("q_start") is not None)
                    queries = rotate_items(queries, at, self._rotary, lengths=self._lengths)
            threads = threads_for(options.get("num_threads"), "attention")
            return attend_stored(self, queries, placed, threads)

    # ---- tokens out ----

    def _held(self, item: int, held_from: int | None = None) -> list[tuple[int, int]]:
        """The runs (first, end) of the tokens of an item that are held; of the later ones, those from held_from on."""
        end = int(self._lengths[item])
        later = max(int(self._held_from[item]), 0 if held_from is None else held_from)
        runs = [(0, end)] if later <= self.sinks else [(0, min(self.sinks, end)), (later, end)]
        return [(first, last) for first, last in runs if first < last]

    def _visible(self) -> list[list[tuple[int, int]]]:
        """The runs of keys() and values(): of what is held, what the row of the last token sees."""
        if self.window is None:
            return [self._held(item) for item in range(self.batch)]
        return [self._held(item, int(self._lengths[item]) - self.window[0] - 1) for item in range(self.batch)]

    def _packed(self, runs: list[list[tuple[int, int]]]) -> tuple[Array, Array]:
        """Keys and values (batch, kv_heads, n, width) of the runs of tokens of each item in a row, then zeros."""
        n = max((sum(end - first for first, end in item) for item in runs), default=0)
        k = np.zeros((self.batch, self.kv_heads, n, self.head_dim), self.dtype)
        v = np.zeros((self.batch, self.kv_heads, n, self.value_dim), self.dtype)
        for item, own in enumerate(runs):
            at = 0
            for first, end in own:
                part = slice(at, at + end - first)
                self._pages.read(item, first, end, k[item, :, part], v[item, :, part])
                at = part.stop
        return k, v

    def keys(self) -> Array:
        """The keys that are held, oldest first: a copy (batch, kv_heads, n, head_dim) with zeros after an item's end.

        With a window: the kept first tokens and the last left + 1. With `rotary`: as stored, that is, rotated.
        """
        return self._packed(self._visible())[0]

    def values(self) -> Array:
        """The values of the tokens of `keys()`: a copy (batch, kv_heads, n, value_dim)."""
        return self._packed(self._visible())[1]

    # ---- going back, branching ----

    def truncate(self, length: ArrayLike) -> None:
        """Forgets the tokens from `length` on (speculative decoding, an edited prompt).

        Parameters
        ----------
        length : int or array_like of int (one per item)
            Tokens to keep, counted from the first one ever appended; at most the length of the item.

        Raises
        ------
        TypeError, ValueError
            Not an integer between 0 and the item's length, or the next row would need tokens that the window has
            dropped: length - left must be at least held_from, unless nothing was dropped or nothing but kept first
            tokens is left. The cache is then as before.
        """
        view = self.view()
        if view is not None and view.truncate(length):
            return
        ends = checks.between("KVCache.truncate", "length", length, self._lengths, "the lengths of the items")
        if self.window is not None:
            whole = (self._held_from <= self.sinks) | (ends <= self.sinks)
            lost = ~whole & (ends - self.window[0] < self._held_from)
            if lost.any():
                item = int(lost.argmax())
                raise ValueError(
                    f"KVCache.truncate: item {item} cannot go back to {ends[item]} tokens; the window has dropped "
                    f"those before {self._held_from[item]}, which leaves lengths from "
                    f"{self._held_from[item] + self.window[0]} on, or up to {self.sinks}"
                )
        self._made, self._lengths = None, ends  # the core's view would still see the pages that are given up now
        self._held_from = np.where(ends <= self.sinks, 0, self._held_from)
        # Where the window holds no later token any more, only the kept first ones stay.
        stay = np.where(self._held_from < ends, ends, np.minimum(self.sinks, ends))
        self._pages.cut(stay)
        size, own = self._pages.pool.page_keys, (ends > self._own_from) & (stay == ends)
        self._replaced(np.where(own, np.minimum(self._writable, -(-ends // size) * size), 0), self._own_from)

    def fork(self) -> KVCache:
        """An independent cache with the same tokens. They share pages until one of them writes into one."""
        pages = self._pages.fork()
        twin = object.__new__(type(self))
        self._replaced()  # every page is shared now
        twin.__dict__ |= self.__dict__ | {
            "_pages": pages,
            "_lengths": self._lengths.copy(),
            "_held_from": self._held_from.copy(),
        }
        twin._replaced()
        return twin

    def reorder(self, beam_index: ArrayLike) -> None:
        """Item b becomes a copy of the old item beam_index[b] (beam search); pages are shared, no token is copied.

        Parameters
        ----------
        beam_index : array_like of int, shape (new_batch,)
            Old items, each as often as wanted; those not named are dropped.

        Raises
        ------
        TypeError, ValueError
            Not integers on one axis, or not between 0 and batch - 1.
        """
        items, self._made = checks.beams(beam_index, self.batch), None
        self._pages.reorder(items)
        self._lengths, self._held_from = self._lengths[items], self._held_from[items]
        self._replaced()

    def __copy__(self) -> KVCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.fork()  # nothing but read-only pages is shared

    # ---- files ----

    def save(self, file: cache_file.File) -> None:
        """Writes all that is needed to go on to an .npz file.

        Parameters
        ----------
        file : path or binary file
            A path is used as it is (no suffix is added) and gets the new content whole or not at all.

        Raises
        ------
        TypeError, OSError
            Another kind of `file`; what the system says.

        Examples
        --------
        >>> import io, numpy as np
        >>> from attentile import KVCache
        >>> cache, file = KVCache(batch=1, kv_heads=1, head_dim=2), io.BytesIO()
        >>> cache.append(np.ones((1, 1, 3, 2)), np.ones((1, 1, 3, 2)))
        >>> cache.save(file)
        >>> _ = file.seek(0)
        >>> KVCache.load(file).length
        3
        """
        cache_file.write(file, cache_file.pack(self))

    @classmethod
    def load(cls, file: cache_file.File) -> KVCache:
        """The cache that `save` wrote to `file`, a path or a binary file.

        Parameters
        ----------
        file : path or binary file

        Returns
        -------
        KVCache

        Raises
        ------
        TypeError, ValueError, OSError
            Another kind of `file`; a file that is no cache, or damaged; what the system says. Pickles are never loaded.
        """
        return cache_file.restore(cls, cache_file.read(file))

    def __reduce__(self) -> tuple[Any, ...]:
        return cache_file.restore, (type(self), cache_file.pack(self))
