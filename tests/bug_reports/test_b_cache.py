"""Reports about key-value caches and about merging partial results."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest
from cache_helpers import page_counts
from helpers import normal
from numpy.testing import assert_allclose, assert_array_equal
from report_helpers import assert_same_row, qkv

from attentile import KVCache, alibi_slopes, attention, merge_attention, rotary_embedding, use_backend
from attentile.cache.pages import PageTable

Array = Any

# ---- B17: merging parts without a key ----


def bits(found: Array, expected: Array) -> None:
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_b17_merge_of_rows_without_keys(impl):
    q, k, v = qkv((1, 2, 3, 8), keys=40)
    some = attention(q, k, v, return_lse=True)
    nothing = [
        attention(q, k[:, :, :0], v[:, :, :0], return_lse=True),
        attention(q, k, v, key_lengths=0, return_lse=True),
        attention(q, k, v, mask=np.zeros((3, 40), bool), return_lse=True),
    ]
    for empty in nothing:
        bits(empty.out, np.zeros_like(q))
        bits(empty.lse, np.full((1, 2, 3), -np.inf, np.float32))
        for parts in ([empty, some], [some, empty], [empty, some, empty]):
            merged = merge_attention(parts)
            bits(merged.out, some.out)
            bits(merged.lse, some.lse)
        for other in nothing:
            merged = merge_attention([empty, other])
            bits(merged.out, np.zeros_like(q))
            bits(merged.lse, np.full((1, 2, 3), -np.inf, np.float32))


def test_b17_one_row_without_keys_among_others(impl):
    q, k, v = qkv((1, 2, 3, 8), keys=40)
    mask = np.ones((3, 40), bool)
    mask[1] = False
    whole = attention(q, k, v, mask=mask, return_lse=True)
    parts = [
        attention(q, k[:, :, j], v[:, :, j], mask=mask[:, j], return_lse=True) for j in (slice(0, 9), slice(9, 40))
    ]
    merged = merge_attention(parts)
    assert_allclose(merged.out, whole.out, rtol=0, atol=1e-6)
    assert_allclose(merged.lse, whole.lse, rtol=0, atol=1e-6)
    assert_array_equal(merged.lse[..., 1], np.full((1, 2), -np.inf))
    assert_array_equal(merged.out[..., 1, :], np.zeros((1, 2, 8)))


def test_b17_split_decode_with_a_chunk_that_is_wholly_excluded(impl):
    q, k, v = qkv((1, 2, 1, 8), keys=4096)
    halves = [
        attention(q, k[:, :, j : j + 2048], v[:, :, j : j + 2048], key_lengths=n, return_lse=True, num_threads=2)
        for j, n in ((0, 1), (2048, 0))
    ]
    merged = merge_attention(halves)
    assert_allclose(merged.out, v[:, :, :1], rtol=1e-6)
    assert_allclose(merged.lse[..., 0], (q[:, :, 0] * k[:, :, 0]).sum(-1) / np.sqrt(8), rtol=1e-5, atol=1e-6)


# ---- B83: the token that is dropped when the window fills ----


@pytest.mark.parametrize("steps", [[6, 1, 1, 1, 1], [8, 1, 1], [9, 1, 1], [20, 1, 1, 1], [1] * 20, [7, 2, 8, 9]])
def test_b83_a_window_of_8_holds_the_last_8(impl, steps):
    q, k, v = qkv((1, 2, sum(steps), 4))
    tags = np.broadcast_to(np.arange(sum(steps))[:, None], (1, 2, sum(steps), 4))
    by_tag, cache = KVCache(1, 2, 4, window=(7, 0)), KVCache(1, 2, 4, window=(7, 0))
    whole, end = attention(q, k, v, causal=True, window=(7, 0)), 0
    for n in steps:
        rows, end = slice(end, end + n), end + n
        by_tag.append(tags[:, :, rows], tags[:, :, rows])
        cache.append(k[:, :, rows], v[:, :, rows])
        held = np.arange(max(end - 8, 0), end)  # the last min(t, 8), each once
        for found in (by_tag.keys(), by_tag.values()):
            assert_array_equal(found, np.broadcast_to(held[:, None], (1, 2, len(held), 4)))
        weights = cache.attend(q[:, :, rows], return_weights=True).weights
        for i in range(n):  # and each is used
            position = end - n + i
            seen = np.arange(max(position - 7, 0), position + 1)
            assert_array_equal(np.flatnonzero(weights[0, 0, i]), seen)
        assert_same_row(impl, cache.attend(q[:, :, rows]), whole[:, :, rows])


# ---- B85, B89: chunks behind a past ----


@pytest.mark.parametrize("parts", [(5, 7, 4), (1, 15), (15, 1), (1,) * 16], ids=str)
@pytest.mark.parametrize("turned_by", ["cache", "caller"])
def test_b85_prefill_in_chunks_through_a_cache(impl, parts, turned_by):
    """Grouped heads and rotary positions, which the cache or its caller applies."""
    q, k, v = qkv((2, 4, 16, 8), kv_heads=2)
    turned_q, turned_k = rotary_embedding(q), rotary_embedding(k)
    whole, start, outputs = attention(turned_q, turned_k, v, causal=True), 0, []
    cache = KVCache(2, 2, 8, rotary={} if turned_by == "cache" else None)
    given_q, given_k = (q, k) if turned_by == "cache" else (turned_q, turned_k)
    for n in parts:
        rows = slice(start, start + n)
        cache.append(given_k[:, :, rows], v[:, :, rows])
        outputs.append(cache.attend(given_q[:, :, rows]))
        start += n
    assert_same_row(impl, np.concatenate(outputs, axis=2), whole)


@pytest.mark.parametrize("step", [1, 3])
def test_b89_slopes_in_a_cache(impl, step):
    q, k, v = qkv((2, 4, 10, 8))
    slopes, cache = alibi_slopes(4), KVCache(2, 4, 8)
    whole = attention(q, k, v, causal=True, alibi_slopes=slopes)
    assert np.abs(whole - attention(q, k, v, causal=True)).max() > 0.1
    for start in range(0, 10, step):
        rows = slice(start, min(start + step, 10))
        cache.append(k[:, :, rows], v[:, :, rows])
        assert_same_row(impl, cache.attend(q[:, :, rows], alibi_slopes=slopes), whole[:, :, rows])


# ---- B12: a short prompt in a large storage ----


def test_b12_cache_of_large_capacity(impl):
    q, k, v = qkv((2, 4, 4, 16), kv_heads=2)
    whole, cache = attention(q, k, v, causal=True), KVCache(2, 2, 16, 128)
    cache.append(*(1e30 * np.ones((2, 2, 2, 100, 16), np.float32)))  # what the storage holds beyond the prompt
    cache.truncate(0)
    cache.append(k, v)
    outputs = [cache.attend(q) for _ in range(20)]
    for out in outputs:
        assert_array_equal(out, outputs[0])
    assert_same_row(impl, outputs[0], whole)


# ---- B86: lengths of their own, one storage ----


def test_b86_rows_stand_at_the_end_of_their_item(impl):
    cache = KVCache(3, 1, 8, 8)
    cache.append(normal(3, 1, 7, 8), np.broadcast_to(np.eye(8)[:7], (3, 1, 7, 8)), lengths=[4, 7, 2])
    weights = cache.attend(np.zeros((3, 1, 2, 8)))
    for item, n in enumerate([4, 7, 2]):
        for row, seen in enumerate([n - 1, n]):
            assert_allclose(weights[item, 0, row], np.r_[np.ones(seen) / seen, np.zeros(8 - seen)], rtol=1e-6)


# ---- B88: the prompt and the steps after it see the same ----


def test_b88_window_of_5_in_prompt_and_steps(impl):
    q, k, v = qkv((1, 2, 12, 8))
    whole = attention(q, k, v, causal=True, window=(4, 0))
    rolling, full = KVCache(1, 2, 8, window=(4, 0)), KVCache(1, 2, 8)
    for t in range(12):
        row = slice(t, t + 1)
        for cache, options in ((rolling, {}), (full, {"window": (4, 0)})):
            cache.append(k[:, :, row], v[:, :, row])
            result = cache.attend(q[:, :, row], return_weights=True, **options)
            assert_same_row(impl, result.out, whole[:, :, row])
            assert (result.weights > 0).sum(axis=-1).max() == min(t + 1, 5)


# ---- B128: the cost of a token does not grow with the context ----


@pytest.mark.parametrize("backend", ["numpy", None])
def test_b128_appending_moves_no_token_that_is_there(monkeypatch, backend):
    written: list[int] = []
    write = PageTable.write

    def counted(self, item, start, keys, values):
        written.append(keys.shape[1])
        write(self, item, start, keys, values)

    monkeypatch.setattr(PageTable, "write", counted)
    cache, k = KVCache(1, 4, 64), normal(1, 4, 1, 64)
    addresses: list[int] = []
    with use_backend(backend) if backend else contextlib.nullcontext():
        for t in range(4096):
            cache.append(k, k)
            table = cache.held.pages.table[0, : t // 256 + 1].tolist()
            assert table[: len(addresses)] == addresses  # no page moved
            addresses = table
    if backend:  # the kernels write without the method that is counted
        assert written == [1] * 4096
    assert page_counts(cache.held.pages.pool) == (16, 0)  # and none was taken beside the 16
    assert_array_equal(cache.keys(), np.broadcast_to(k, (1, 4, 4096, 64)))


def test_b128_time_per_token_is_flat():
    cache, k = KVCache(1, 4, 64), normal(1, 4, 1, 64)
    blocks = []
    for _ in range(64):
        start = time.perf_counter()
        for _ in range(64):
            cache.append(k, k)
        blocks.append(time.perf_counter() - start)
    # The best block of a quarter is free of what else the machine does. Copying everything would be 10 times as slow.
    assert min(blocks[48:]) < 3 * min(blocks[:16])
