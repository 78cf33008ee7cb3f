"""What the tests of the cache share: poison in the memory that holds no token, and a model that keeps everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from conftest import FMA_ISAS
from helpers import normal
from numpy.testing import assert_allclose, assert_array_equal

from attentile import AttentionResult, KVCache, attention
from attentile.cache.pages import PagePool

Array = Any

BATCH, Q_HEADS, HEADS, WIDTH, VALUE_WIDTH = 3, 4, 2, 8, 5
LENGTHS = (300, 17, 256)


def compute_of(cache: KVCache) -> np.dtype[Any]:
    """The dtype of the arithmetic: float32 for a cache of 16 bits."""
    return np.dtype(np.float64 if cache.dtype == np.float64 else np.float32)


def shown_of(dtype: Any) -> np.dtype[Any]:
    """The dtype of keys() and values(): that of the cache, but float32 for bfloat16."""
    return np.dtype(np.float32 if dtype == "bfloat16" else dtype)


def as_stored(x: Array, dtype: Any) -> Array:
    """Tokens as a cache of this dtype gives them back. 16 bits: whole steps of a number's size, halfway to even."""
    shown = shown_of(dtype)
    if shown != np.float16 and dtype != "bfloat16":
        return x.astype(shown)
    bits, smallest, largest = (11, -24, 65504.0) if shown == np.float16 else (8, -133, 2.0**128 - 2.0**120)
    x = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        steps = np.ldexp(np.longdouble(1), np.maximum(np.frexp(x)[1] - bits, smallest))
        near = np.where(np.isfinite(x), np.rint(x / steps) * steps, x)
        return np.where(abs(near) > largest, np.copysign(np.inf, near), near).astype(shown)


def poison(cache: KVCache) -> int:
    """NaN in every slot that holds no token and in every free page; returns the number of slots.

    Shared pages are left alone: a slot that is empty here may hold a token of a fork.
    """
    pool, table = cache.held.pages.pool, cache.held.pages.table
    page_counts(pool)  # counts off the pages of tables that died
    slots, nan = 0, 0x7FC0 if pool.dtype == np.uint16 else np.nan
    for address in pool._free:
        pool.page(address)[:] = nan
        slots += pool.page_keys
    for item, column in np.argwhere(table):
        if pool._references[int(table[item, column])] > 1:
            continue
        token = pool.page_keys * column + np.arange(pool.page_keys)
        held = np.zeros(pool.page_keys, bool)
        for first, end in cache.held.runs(int(item)):
            held |= (token >= first) & (token < end)
        keys, values = pool.keys(int(table[item, column])), pool.values(int(table[item, column]))
        keys.swapaxes(2, 3)[:, ~held.reshape(-1, 16)] = nan
        values[:, ~held] = nan
        slots += int((~held).sum())
    return slots


def page_counts(pool: PagePool) -> tuple[int, int]:
    """(pages in use, free pages)."""
    pool._settle()
    return len(pool._references), len(pool._free)


def pages_in_use(cache: KVCache) -> int:
    return page_counts(cache.held.pages.pool)[0]


def pages_made(cache: KVCache) -> int:
    return sum(page_counts(cache.held.pages.pool))


class Model:
    """The same tokens in plain lists, nothing ever dropped."""

    def __init__(
        self, batch: int, heads: int, width: int, value_width: int, dtype: Any, window: Any, sink_tokens: int
    ) -> None:
        self.shown = shown_of(dtype)
        self.k: list[Array] = [np.zeros((heads, 0, width), self.shown) for _ in range(batch)]
        self.v: list[Array] = [np.zeros((heads, 0, value_width), self.shown) for _ in range(batch)]
        self.held_from = [0] * batch
        self.window, self.sink_tokens, self.heads, self.dtype = window, sink_tokens, heads, dtype
        self.widths = (width, value_width)

    @classmethod
    def of(cls, cache: KVCache) -> Model:
        """An empty one of the same shape."""
        return cls(
            cache.batch, cache.kv_heads, cache.head_dim, cache.value_dim, cache.dtype, cache.window, cache.sink_tokens
        )

    @property
    def lengths(self) -> list[int]:
        return [k.shape[1] for k in self.k]

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    def append(self, k: Array, v: Array, counts: Any = None) -> None:
        for b in range(len(self.k)):
            n = k.shape[2] if counts is None else int(counts[b])
            if n and self.window is not None:
                self.held_from[b] = max(self.held_from[b], self.lengths[b] - self.window[0])
            self.k[b] = np.concatenate([self.k[b], as_stored(k[b, :, :n], self.dtype)], axis=1)
            self.v[b] = np.concatenate([self.v[b], as_stored(v[b, :, :n], self.dtype)], axis=1)

    def can_truncate(self, ends: Any) -> bool:
        return self.window is None or all(
            end - self.window[0] >= held or held <= self.sink_tokens or end <= self.sink_tokens
            for end, held in zip(ends, self.held_from, strict=True)
        )

    def truncate(self, ends: Any) -> None:
        for b, end in enumerate(ends):
            self.k[b], self.v[b] = self.k[b][:, :end], self.v[b][:, :end]
            if end <= self.sink_tokens:
                self.held_from[b] = 0

    def reorder(self, items: Any) -> None:
        self.k, self.v = [self.k[i] for i in items], [self.v[i] for i in items]
        self.held_from = [self.held_from[i] for i in items]

    def copy(self) -> Model:
        twin = object.__new__(Model)
        twin.__dict__.update(self.__dict__)
        twin.k, twin.v, twin.held_from = list(self.k), list(self.v), list(self.held_from)
        return twin

    def full(self) -> tuple[Array, Array]:
        """All tokens, zeros after an item's end."""
        made = []
        for rows, width in zip((self.k, self.v), self.widths, strict=True):
            array = np.zeros((len(rows), self.heads, self.length, width), self.shown)
            for b, own in enumerate(rows):
                array[b, :, : own.shape[1]] = own
            made.append(array)
        return made[0], made[1]

    def visible(self) -> tuple[Array, Array]:
        """What keys() and values() must be."""
        chosen = []
        for b, n in enumerate(self.lengths):
            oldest = 0 if self.window is None else max(n - self.window[0] - 1, self.held_from[b])
            chosen.append([t for t in range(n) if t < self.sink_tokens or t >= oldest])
        most = max((len(own) for own in chosen), default=0)
        made = []
        for rows, width in zip((self.k, self.v), self.widths, strict=True):
            array = np.zeros((len(rows), self.heads, most, width), self.shown)
            for b, own in enumerate(chosen):
                array[b, :, : len(own)] = rows[b][:, own]
            made.append(array)
        return made[0], made[1]

    def seen(self, rows: int, start: Any) -> Array:
        """(batch, 1, rows, length): what the window and the kept first tokens let a row see, row by row."""
        seen = np.ones((len(self.k), 1, rows, self.length), bool)
        if self.window is not None:
            for b, i in np.ndindex(len(self.k), rows):
                at = int(start[b]) + i
                seen[b, 0, i, max(at + 1, 0) :] = False
                seen[b, 0, i, self.sink_tokens : max(at - self.window[0], self.sink_tokens)] = False
        return seen

    def lacks(self, rows: int, valid: Any, start: Any = None) -> bool:
        """Whether a row, from start on or of the last valid tokens, sees a token that is gone, token by token."""
        if self.window is None:
            return False
        seen = self.seen(rows, valid - rows if start is None else start)
        for b, held in enumerate(self.held_from):
            seen[b, ..., valid[b] :] = False
            if seen[b, ..., self.sink_tokens : max(held, self.sink_tokens)].any():
                return True
        return False

    def start(self, rows: int, options: Any) -> Any:
        """Where the first row of each item stands."""
        if options.get("q_start") is not None:
            return np.broadcast_to(options["q_start"], len(self.k))
        if options.get("causal") in (True, "upper_left"):
            return np.zeros(len(self.k), np.intp)
        return np.broadcast_to(options.get("key_lengths", self.lengths), len(self.k)) - rows

    def attend(self, q: Array, **options: Any) -> Array | AttentionResult:
        """attention() over all tokens in the dtype of the cache's arithmetic, with its lengths and window."""
        compute = np.result_type(self.shown, np.float32)
        k, v = (x.astype(compute) for x in self.full())
        if self.window is not None:
            mask = self.seen(q.shape[2], self.start(q.shape[2], options))
            options["mask"] = mask & options["mask"] if "mask" in options else mask
        valid = np.broadcast_to(options.pop("key_lengths", self.lengths), len(self.k)).astype(np.intp)
        if not {"causal", "q_start"} & options.keys():
            options["causal"] = "lower_right"
        found = attention(q.astype(compute), k, v, key_lengths=valid, **options)
        dtype = result_dtype(q.dtype, self.dtype)
        if isinstance(found, AttentionResult):
            wide = np.result_type(dtype, np.float32)  # of lse
            return AttentionResult(
                *(None if x is None else x.astype(to) for x, to in zip(found, (dtype, wide, dtype), strict=True))
            )
        return found.astype(dtype)


def result_dtype(q: np.dtype[Any], dtype: Any) -> np.dtype[Any]:
    """What attend() gives for queries of this dtype over a cache of that one."""
    if q.name == "bfloat16" and dtype == "bfloat16":
        return q
    return np.result_type(q, shown_of(dtype)).newbyteorder("=")


def pair_of(
    batch: int, heads: int, n: int, width: int, value_width: int | None = None, **kind: Any
) -> tuple[Array, Array]:
    seed = kind.pop("seed", 0)
    k = normal(batch, heads, n, width, seed=2 * seed, **kind)
    return k, normal(batch, heads, n, width if value_width is None else value_width, seed=2 * seed + 1, **kind)


def ragged(dtype: Any = "float32", **options: Any) -> tuple[KVCache, Model]:
    """300, 17 and 256 tokens in three items, from two appends, and the model of them."""
    cache = KVCache(BATCH, HEADS, WIDTH, value_dim=VALUE_WIDTH, dtype=dtype, **options)
    model = Model.of(cache)
    for seed, counts in enumerate([(40, 17, 200), (260, 0, 56)]):
        k, v = pair_of(BATCH, HEADS, max(counts), WIDTH, VALUE_WIDTH, dtype=compute_of(cache), seed=seed)
        cache.append(k, v, lengths=counts)
        model.append(k, v, counts)
    poison(cache)
    return cache, model


def assert_same(impl: str, found: Any, expected: Any) -> None:
    """Equal in bits where FMA tiles run; close elsewhere, where no such promise is made."""
    if isinstance(expected, AttentionResult):
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same(impl, a, b)
        return
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if impl in FMA_ISAS:
        assert_array_equal(found, expected)
    else:
        assert_allclose(found, expected, rtol=2.0**-7 if expected.itemsize == 2 else 1e-5, atol=2e-6)


def state_of(cache: KVCache) -> tuple[Any, ...]:
    """Everything that a failed call must leave alone."""
    return (
        repr(cache), cache.lengths.tolist(), cache.held.held_from.tolist(), cache.held.pages.table.tolist(),
        cache.keys().tobytes(), cache.values().tobytes(), page_counts(cache.held.pages.pool),
    )  # fmt: skip
