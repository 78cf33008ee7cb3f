"""KVCache, as its callers see it. What is held: retention.py; where: pages.py; queries: attend.py; files: file.py.

The commonest calls go straight to the core's view of what is held; only what it does not take goes to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..arguments import named_in_errors
from ..attention import AllOptions
from ..outputs import AttentionResult
from ..positions.items import copied_options
from ..runtime.threads import get_num_threads
from ..scores import holds_bits
from . import file as cache_file
from .attend import attend_held, result_of
from .file import File
from .pages import addresses_in
from .retention import Held

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
    dtype : {"float32", "float64", "float16", "bfloat16"}
        Of the storage. What is appended is converted to it, rounded once. The last two take half the memory and are
        computed with in float32 (Notes). bfloat16 is a string or the dtype of ml_dtypes, which need not be installed.
    window : (left, 0), optional
        A row at position t sees the tokens t - left ... t. Older ones are evicted and their pages used again.
    sink_tokens : int
        With a window: how many of the first tokens are kept all the same; every later row sees them.
    sink_positions : {"text", "cache"}
        With sink_tokens and `rotary`: from where a row at position t looks at the kept first tokens. "text": from t, as
        in a full cache. "cache": as if the tokens that it does not see had never been, from min(t, sink_tokens + left),
        which is how StreamingLLM counts: the distance never grows beyond what the model was trained for. Not with
        tables, dynamic or longrope scaling.
    rotary : dict, optional
        Keyword arguments of `rotary_embedding` (base, rotary_dim, interleaved, scaling, cos, sin). Keys are rotated
        when they are appended, queries when they attend, at their positions in the text: evicted tokens count. With
        dynamic or longrope scaling the frequencies are those of the item's length at that moment (after the append),
        and stored keys stay as they are: past the trained length the result depends on the sizes of the appends.

    Attributes
    ----------
    length : int
        Tokens appended so far, of the longest item, evicted ones included.
    lengths : ndarray of intp, shape (batch,)
        The same for each item; a copy.
    dtype : dtype or "bfloat16"
        Of the storage. NumPy has no bfloat16, so this one is a string, whatever other packages are installed.
    batch, kv_heads, head_dim, value_dim, capacity, window, sink_tokens, sink_positions, rotary
        As given.

    Raises
    ------
    TypeError, ValueError
        A size that is not a positive integer, another dtype, a window that looks ahead, sink_tokens without a window,
        more storage than can be addressed, an unknown option of rotary.
    IndexError
        Tables of `rotary` without a row.

    Notes
    -----
    Window: the rows of an append that starts at length n need the tokens from n - left on, so tokens before held_from,
    the largest n - left of the item's appends (at least 0), are evicted, except the first `sink_tokens`. An `attend` or
    `truncate` that needs one of them raises. All rows of the latest append can always attend, even if it was longer
    than the window. Results are those of a full cache with the same window, as if nothing had been evicted.

    float16 and bfloat16: results are those of attention over the rounded tokens in float32, to the bit. float16 keeps
    11 bits of a number between 6e-5 and 65504; above, it becomes infinite, as in NumPy, and below, subnormal. bfloat16
    keeps 8 bits and has the range of float32. With `rotary`, keys are rotated in float32 (float64 if they are given in
    it) and then rounded.

    Pages are shared by forks and beams and copied by the first write.

    Threads: any number of them may attend, fork, save and read tokens at once. What changes the cache (append,
    truncate, reorder, the call of a layer) needs it for itself: of two calls that must not meet, the later one raises
    RuntimeError before it does anything; none of them waits. Forks are caches of their own, whatever pages they share.
    A child of ``os.fork()`` begins with a fork of the cache if other threads were using it.

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
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int | None = None,
        *,
        value_dim: int | None = None,
        dtype: DTypeLike = "float32",
        window: tuple[int, int] | None = None,
        sink_tokens: int = 0,
        sink_positions: Literal["text", "cache"] = "text",
        rotary: Mapping[str, Any] | None = None,
    ) -> None:
        sinks = sink_tokens, sink_positions
        held = Held(batch, kv_heads, (head_dim, value_dim), capacity, dtype, window, sinks, rotary)
        self.held = held  # internal: the way in for the other rooms of this package
        self.kv_heads = held.kv_heads
        self.head_dim = held.head_dim
        self.value_dim = held.value_dim
        self.capacity = held.capacity
        self.dtype = held.dtype
        self.window = held.window
        self.sink_tokens = held.sink_tokens
        self.sink_positions = held.sink_positions

    @property
    def batch(self) -> int:
        return self.held.batch

    @property
    def length(self) -> int:
        """Tokens appended so far, of the longest item."""
        return self.held.length

    @property
    def rotary(self) -> Mapping[str, Any] | None:
        """The options of the rotation, a copy with read-only tables, or None."""
        rotary = self.held.rotary
        return None if rotary is None else MappingProxyType(copied_options(rotary))

    @property
    def lengths(self) -> Index:
        """Tokens appended so far, of each item: a copy."""
        return self.held.lengths.copy()

    def __repr__(self) -> str:
        value_dim = self.value_dim if self.value_dim != self.head_dim else None
        extra: dict[str, Any] = {"value_dim": value_dim, "capacity": self.capacity, "window": self.window}
        extra |= {"sink_tokens": self.sink_tokens or None}
        extra |= {"sink_positions": "cache" if self.sink_positions == "cache" else None, "rotary": self.held.rotary}
        options = "".join(f", {name}={value}" for name, value in extra.items() if value is not None)
        tokens = " to ".join(str(n) for n in sorted({int(self.held.lengths.min(initial=self.length)), self.length}))
        tokens += " token" if tokens == "1" else " tokens"
        pages, pool = len(set(addresses_in(self.held.pages.table))), self.held.pages.pool
        kib = pages * pool.page_bytes / 1024
        memory = f"{kib:.1f} KiB" if kib < 1024 else f"{kib / 1024:.1f} MiB"
        return (
            f"KVCache(batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, dtype={self.dtype}"
            f"{options}): {tokens}, {pages} page{'s' * (pages != 1)} of {pool.page_keys} ({memory})"
        )

    # ---- tokens in ----

    def append(
        self,
        k: ArrayLike,
        v: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        dtype: Literal["bfloat16"] | None = None,
    ) -> None:
        """Adds tokens at the end of each item.

        Parameters
        ----------
        k : array_like, shape (batch, kv_heads, n, head_dim)
            Keys; not yet rotated if the cache has `rotary`. Any real dtype, any strides; n may be 0.
        v : array_like, shape (batch, kv_heads, n, value_dim)
            Values.
        lengths : int or array_like of int (one per item), optional
            Tokens of each item that count, the first ones of its row; the others are padding and never read.
        dtype : "bfloat16", optional
            What arrays of uint16 hold: the bits of bfloat16, as in `attention`. Else they are integers.

        Raises
        ------
        TypeError, ValueError
            Wrong shapes or dtypes, lengths beyond n, more tokens than the capacity, another dtype=. The cache is then
            as before.
        IndexError
            A token at a position for which the tables of `rotary` have no row. The cache is then as before.
        RuntimeError
            Another thread is using the cache.
        """
        held = self.held
        bits = dtype is not None
        if bits:
            with named_in_errors("KVCache.append"):
                holds_bits(dtype)
        view = held.view() if lengths is None and held.rotary is None else None
        if view is None or not view.append(k, v, bits, False):
            with held.using("KVCache.append", change=True):
                held.append(k, v, lengths, bits)

    # ---- attention ----

    def attend(self, q: ArrayLike, **options: Unpack[AllOptions]) -> Array | AttentionResult:
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
            lengths of the items, which are its default. A cache with a window refuses window and prefix_lengths: no
            row of it looks ahead. `sinks` are logits, as in `attention`; `sink_tokens` of the cache are tokens.

            After an append with `lengths` the queries' padding, too, comes last in each row: give the lengths before
            the append as ``q_start``. With tables, dynamic or longrope scaling in `rotary`, rows behind the end of an
            item that has others before it are always padding.

        Returns
        -------
        ndarray, shape (batch, Hq, L, value_dim), or AttentionResult
            As `attention` does, in the dtype that q and the cache promote to, where bfloat16 counts as float32 unless q
            is bfloat16 too. The arithmetic is that of the cache, float32 for one of 16 bits: q is converted to it, for
            the cache may be much larger. Rows of padding are to be ignored.

        Raises
        ------
        TypeError, ValueError
            As `attention`, and if a row needs tokens that the window has evicted.
        RuntimeError
            Another thread is changing the cache.
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
        held = self.held
        view = held.view() if held.rotary is None else None
        found = None if view is None else view.attend(q, options, get_num_threads(), False)
        if found is not None:
            return result_of(found)
        with held.using("KVCache.attend", change=False):
            return attend_held(held, q, options)

    # ---- tokens out ----

    def keys(self) -> Array:
        """The keys of the tokens so far, oldest first: a copy (batch, kv_heads, n, head_dim), 0 after an item's end.

        With a window: the kept first tokens and the last left + 1. With `rotary`: as stored, that is, rotated. In the
        cache's dtype; those of bfloat16 in float32.
        """
        with self.held.using("KVCache.keys", change=False):
            return self.held.copies(self.held.visible(), self.held.format.shown)[0]

    def values(self) -> Array:
        """The values of the tokens of `keys()`: a copy (batch, kv_heads, n, value_dim)."""
        with self.held.using("KVCache.values", change=False):
            return self.held.copies(self.held.visible(), self.held.format.shown)[1]

    # ---- going back, branching ----

    def truncate(self, length: ArrayLike) -> None:
        """Forgets the tokens from `length` on (speculative decoding, an edited prompt).

        A window that is full evicts a token for each one that comes, so the way back is one append long: guesses that
        are appended in one call can be taken back. To go back over several appends, append the guesses to a `fork` and
        those that hold to this cache; the fork shares its pages and evicts nothing here.

        Parameters
        ----------
        length : int or array_like of int (one per item)
            Tokens to keep, counted from the first one ever appended; at most the length of the item.

        Raises
        ------
        TypeError, ValueError
            Not an integer between 0 and the item's length, or the next row would need tokens that the window has
            evicted: length - left must be at least held_from (Notes of the class), unless nothing was evicted or
            nothing but kept first tokens is left. The cache is then as before.
        RuntimeError
            Another thread is using the cache.
        """
        view = self.held.view()
        if view is None or not view.truncate(length, False):
            with self.held.using("KVCache.truncate", change=True):
                self.held.truncate(length)

    def fork(self) -> KVCache:
        """An independent cache with the same tokens. They share pages until one of them writes into one."""
        twin = object.__new__(type(self))
        with self.held.using("KVCache.fork", change=False):
            twin.__dict__ |= self.__dict__ | {"held": self.held.fork()}
        return twin

    def reorder(self, beam_index: ArrayLike) -> None:
        """Item b becomes a copy of the old item beam_index[b] (beam search); pages are shared, no token is copied.

        Parameters
        ----------
        beam_index : array_like of int, shape (new_batch,)
            Old items, each as often as wanted; those not named are forgotten.

        Raises
        ------
        TypeError, ValueError
            Not integers on one axis, or not between 0 and batch - 1.
        RuntimeError
            Another thread is using the cache.
        """
        with self.held.using("KVCache.reorder", change=True):
            self.held.reorder(beam_index)

    def __copy__(self) -> KVCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.fork()  # nothing but read-only pages is shared

    # ---- files ----

    def save(self, file: File) -> None:
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
        cache_file.write(file, self._packed("KVCache.save"))

    @classmethod
    def load(cls, file: File) -> KVCache:
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
        cache: KVCache = cache_file.restore(cls, cache_file.read(file))
        return cache

    def __reduce__(self) -> tuple[Any, ...]:
        return cache_file.restore, (type(self), self._packed("KVCache"))

    def _packed(self, caller: str) -> dict[str, Array]:
        with self.held.using(caller, change=False):
            return cache_file.pack(self.held)
