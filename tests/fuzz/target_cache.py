"""Fuzz target: random lives of KVCaches, of their forks and of their files, beside models that keep everything."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
from cache_helpers import Model, assert_same, poison, state_of
from source import Source, expect_text

from attentile import KVCache, rotary_embedding
from attentile.runtime import backend

Life = tuple[KVCache, Model]


def isa() -> str:
    core = backend.active
    return "reference" if core is None else core.get_isa()


def made(source: Source) -> Life:
    window = source.choice([None, None, (4, 0), (0, 0), (20, 0), (300, 0)])
    cache = KVCache(
        source.integer(1, 3), source.integer(1, 3), 2 * source.integer(1, 20), source.choice([None, 40, 300, 700]),
        value_dim=source.integer(1, 35), dtype=source.choice(["f4", "f8"]), window=window,
        sink_tokens=source.choice([0, 2, 17, 300]) if window else 0,
        rotary=source.choice([None, None, {}, {"interleaved": True, "rotary_dim": 2}]),
    )  # fmt: skip
    return cache, Model.of(cache)


def rotated(cache: KVCache, x: Any, start: Any) -> Any:
    """What the cache does with keys and queries that stand at start, start + 1, ... of each item."""
    if cache.held.rotary is None or 0 in x.shape:
        return x
    positions = np.asarray(start)[:, None] + np.arange(x.shape[2])
    return rotary_embedding(x.astype(np.result_type(x, cache.dtype), copy=False), positions, **cache.held.rotary)


def append(source: Source, cache: KVCache, model: Model) -> None:
    n = source.choice([1, 0, 2, 3, 15, 16, 17, 31, 64, 255, 256, 257])
    dtype = source.choice([cache.dtype, np.float32, np.float64, np.float16])
    k = source.normal((cache.batch, cache.kv_heads, n, cache.head_dim), dtype)
    v = source.normal((cache.batch, cache.kv_heads, n, cache.value_dim), dtype)
    counts = [source.integer(0, n) for _ in range(cache.batch)] if source.boolean() else None
    later, before = model.copy(), state_of(cache)
    stored = rotated(cache, np.asarray(k, cache.dtype), cache.lengths)
    later.append(stored, v, counts)
    if cache.capacity is not None:
        gone = [max(held - later.sink_tokens, 0) for held in later.held_from]
        if max(length - lost for length, lost in zip(later.lengths, gone, strict=True)) > cache.capacity:
            refused(cache, before, "the capacity is", cache.append, k, v, lengths=counts)
            return
    cache.append(k, v, lengths=counts)
    model.__dict__.update(later.__dict__)


def refused(cache: KVCache, before: Any, text: str, call: Any, *arguments: Any, **options: Any) -> None:
    """ValueError with this text, and a cache that is as before."""
    try:
        call(*arguments, **options)
    except ValueError as error:
        expect_text(error, text)
        assert state_of(cache) == before
        return
    raise AssertionError(f"{call} was not refused ({text})")


def attend(source: Source, cache: KVCache, model: Model) -> None:
    rows, heads = source.choice([1, 1, 2, 5, 17, 49]), cache.kv_heads * source.choice([1, 1, 2, 4])
    q = source.normal((cache.batch, heads, rows, cache.head_dim), source.choice([cache.dtype, np.float32, np.float64]))
    options: dict[str, Any] = {}
    rng, n = source.rng(), model.length
    if source.boolean():
        options["mask"] = source.laid_out(rng.random(source.choice([(rows, n), (cache.batch, 1, 1, n), ()])) < 0.6)
    if source.boolean():
        options["bias"] = source.laid_out(rng.standard_normal(source.choice([(heads, rows, n), (n,)])))
    if source.boolean():
        options |= {"return_weights": True, "return_lse": True, "sinks": rng.standard_normal(heads)}
    if source.boolean():
        options["softcap"] = 5.0
    if source.boolean():
        options["alibi_slopes"] = rng.random(heads)
    valid = np.array(model.lengths)
    if source.boolean():
        valid = options["key_lengths"] = np.array([source.integer(0, length) for length in model.lengths], int)
    before = state_of(cache)
    if model.lacks(rows, valid):
        refused(cache, before, "the window has dropped", cache.attend, q, **options)
        return
    found = cache.attend(q, num_threads=source.integer(1, 3), **options)
    turned = rotated(cache, np.asarray(q, cache.dtype), valid - rows).astype(np.result_type(q, cache.dtype))
    assert_same(isa(), found, model.attend(turned, **options))
    assert state_of(cache) == before


def truncate(source: Source, cache: KVCache, model: Model) -> None:
    ends = [max(n - source.integer(0, source.choice([3, 20, 600])), 0) for n in model.lengths]
    if model.can_truncate(ends):
        cache.truncate(ends)
        model.truncate(ends)
    else:
        refused(cache, state_of(cache), "cannot go back to", cache.truncate, ends)


def reorder(source: Source, cache: KVCache, model: Model) -> None:
    items = [source.integer(0, cache.batch - 1) for _ in range(source.integer(1, 4))]
    cache.reorder(items)
    model.reorder(items)


def saved(cache: KVCache) -> bytes:
    file = io.BytesIO()
    cache.save(file)
    return file.getvalue()


def twin(source: Source, cache: KVCache, model: Model) -> Life:
    way = source.choice(["fork", "copy", "deepcopy", "pickle", "file"])
    if way == "file":
        return KVCache.load(io.BytesIO(saved(cache))), model.copy()
    if way == "pickle":
        return pickle.loads(pickle.dumps(cache)), model.copy()
    copied = cache.fork() if way == "fork" else copy.copy(cache) if way == "copy" else copy.deepcopy(cache)
    return copied, model.copy()


def damaged_file(source: Source, cache: KVCache) -> None:
    """ValueError, or a cache that works: whatever stands in a file, nothing else may happen."""
    content = bytearray(saved(cache))
    for _ in range(source.integer(1, 4)):
        content[source.integer(0, len(content) - 1)] = source.byte()
    if source.boolean():
        del content[source.integer(0, len(content) - 1) :]
    try:
        loaded = KVCache.load(io.BytesIO(bytes(content)))
    except ValueError as error:
        expect_text(error, "KVCache.load: ")
        return
    assert loaded.keys().shape[:2] == (loaded.batch, loaded.kv_heads)
    assert isinstance(repr(loaded), str)


def check(lives: list[Life]) -> None:
    for cache, _ in lives:
        poison(cache)
    for cache, model in lives:
        assert cache.lengths.tolist() == model.lengths
        for found, wanted in zip((cache.keys(), cache.values()), model.visible(), strict=True):
            np.testing.assert_array_equal(found, wanted)


def run(data: bytes) -> None:
    source = Source(data)
    lives = [made(source)]
    for _ in range(24):
        if source.ended():
            break
        at = source.integer(0, len(lives) - 1)
        step = source.choice([append, attend, append, attend, truncate, reorder, twin, damaged_file, "forget"])
        if step == "forget":
            if len(lives) > 1:
                del lives[at]
        elif step is twin:
            if len(lives) < 4:
                lives.append(twin(source, *lives[at]))
        elif step is damaged_file:
            damaged_file(source, lives[at][0])
        else:
            step(source, *lives[at])
        check(lives)
