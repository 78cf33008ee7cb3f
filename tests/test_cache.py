"""KVCache against attention() over arrays that keep everything, with NaN in all memory that holds no token."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import numpy as np
import pytest
from cache_helpers import (
    BATCH,
    HEADS,
    LENGTHS,
    Q_HEADS,
    VALUE_WIDTH,
    WIDTH,
    Model,
    as_stored,
    assert_same,
    compute_of,
    pages_in_use,
    pages_made,
    pair_of,
    poison,
    ragged,
    shown_of,
    state_of,
)
from helpers import normal
from numpy.testing import assert_array_equal

from attentile import KVCache, alibi_slopes, attention
from attentile.cache.pages import PagePool

# ---- against attention() ----


@pytest.mark.parametrize("step", [1, 7])
def test_every_length_to_600(impl, step):
    cache = KVCache(1, 2, 8)
    k, v = pair_of(1, 2, 600, 8)
    q = normal(1, 4, 600, 8, seed=7)
    for start in range(0, 600, step):
        rows = slice(start, min(start + step, 600))
        cache.append(k[:, :, rows], v[:, :, rows])
        assert poison(cache) > 0 or cache.length % 256 == 0
        expected = attention(q[:, :, rows], k[:, :, : rows.stop], v[:, :, : rows.stop], causal="lower_right")
        assert_same(impl, cache.attend(q[:, :, rows]), expected)


def test_decoding_gives_the_bits_of_the_prompt(impl):
    k, v = pair_of(2, 2, 520, 16)
    q = normal(2, 4, 520, 16, seed=7)
    whole, cache = attention(q, k, v, causal=True), KVCache(2, 2, 16, capacity=520)
    for start, stop in [(0, 250), (250, 257), (257, 258), (258, 511), (511, 512), (512, 513), (513, 520)]:
        cache.append(k[:, :, start:stop], v[:, :, start:stop])
        poison(cache)
        assert_same(impl, cache.attend(q[:, :, start:stop]), whole[:, :, start:stop])


ROWS = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "named": {"causal": "lower_right"},
    "no causal": {"causal": False},
    "upper left": {"causal": "upper_left"},
    "q_start": {"q_start": [295, 3, 250]},
    "q_start and causal": {"causal": True, "q_start": 12},
    "key_lengths": {"key_lengths": [299, 0, 17]},
    "one key_length": {"key_lengths": 17, "causal": False},
    "mask": {"mask": np.random.default_rng(1).random((Q_HEADS, ROWS, 300)) < 0.5},
    "padding mask": {"mask": np.arange(300) < 200, "causal": False},
    "bias": {"bias": normal(ROWS, 300), "causal": False},
    "scores": {"scale": 0.7, "softcap": 2.0, "sinks": np.linspace(-1, 1, Q_HEADS)},
    "alibi": {"alibi_slopes": alibi_slopes(Q_HEADS), "q_start": [200, 10, 3]},
    "window": {"window": (20, 3), "q_start": [100, 7, 30], "causal": False},
    "causal window": {"window": (20, None)},
    "segments": {"segments": (np.arange(ROWS) % 2, np.arange(300) % 2)},
    "prefix": {"causal": "upper_left", "prefix_lengths": [100, 3, 0]},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s + 0.01 * (b + h + i - j)},
    "threads": {"num_threads": 2},
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(impl, name, dtype):
    cache, model = ragged(dtype)
    q, options = normal(BATCH, Q_HEADS, ROWS, WIDTH, dtype=shown_of(dtype), seed=9), OPTIONS[name]
    everything = {**options, "return_lse": True, "return_weights": True}
    expected = model.attend(q, **{"causal": "q_start" in options or "lower_right", **everything})
    found = cache.attend(q, **everything)
    assert_same(impl, found, expected)
    assert found.out.dtype == shown_of(dtype)
    out = np.empty_like(found.out)
    assert cache.attend(q, out=out, **options) is out
    assert_same(impl, out, expected.out)


WINDOWS: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 0)},
    "one token": {"window": (0, 0)},
    "kept first tokens": {"window": (20, 0), "sink_tokens": 3},
    "kept and still in the window": {"window": (40, 0), "sink_tokens": 270},
    "longer than a page": {"window": (270, 0), "sink_tokens": 5},
}


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_with_every_window(impl, name, kind):
    """Items of different lengths, some tokens taken back and appended anew."""
    cache, model = ragged(**WINDOWS[kind])
    back, (k, v) = [n - 4 for n in LENGTHS], pair_of(BATCH, HEADS, 4, WIDTH, VALUE_WIDTH, seed=5)
    for each in (cache, model) if model.can_truncate(back) else ():
        each.truncate(back)
        each.append(k, v)
    poison(cache)
    q, options = normal(BATCH, Q_HEADS, ROWS, WIDTH, seed=9), OPTIONS[name]
    valid = np.broadcast_to(options.get("key_lengths", LENGTHS), BATCH)
    refusal = None
    if "window" in options:
        refusal = r"^KVCache\.attend: window= was given and the cache has window="
    elif "prefix_lengths" in options:
        refusal = r"^KVCache\.attend: prefix_lengths= opens keys ahead of a row and the cache has window="
    elif model.lacks(ROWS, valid, model.start(ROWS, options)):
        refusal = r"^KVCache\.attend: row .* the window has dropped those before"
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            cache.attend(q, **options)
        return
    everything = {**options, "return_lse": True, "return_weights": True}
    if "q_start" in options or options.get("causal") is True:
        everything["causal"] = options.get("causal", True)
    assert_same(impl, cache.attend(q, **everything), model.attend(q, **everything))
    assert_same(impl, cache.attend(q, **options), model.attend(q, **everything).out)


def test_without_a_position_the_last_tokens_are_meant(impl):
    cache, model = ragged()
    q = normal(BATCH, Q_HEADS, ROWS, WIDTH)
    last = np.array(LENGTHS) - ROWS
    for options in ({"alibi_slopes": alibi_slopes(Q_HEADS)}, {"window": (9, 2)}):
        expected = model.attend(q, causal=False, q_start=last, **options)
        assert_same(impl, cache.attend(q, causal=False, **options), expected)


def test_causal_true_at_full_length(impl):
    cache, model = ragged()
    q = normal(BATCH, Q_HEADS, 300, WIDTH)
    assert_same(impl, cache.attend(q, causal=True), model.attend(q, causal=True))


def test_strides_read_only_and_unchanged_inputs():
    base = normal(4, 40, 2, 3)
    k = base.transpose(2, 3, 1, 0)[:, :, ::-2]  # (2, 3, 20, 4), every stride odd
    v = np.broadcast_to(normal(1, 3, 1, 4), (2, 3, 20, 4))
    k.flags.writeable = False
    before = base.copy()
    cache = KVCache(2, 3, 4)
    cache.append(k, v)
    cache.append(k.tolist(), v.tolist())
    assert_array_equal(cache.keys(), np.concatenate([k, k], axis=2))
    assert_array_equal(cache.values(), np.concatenate([v, v], axis=2))
    assert_array_equal(base, before)


def test_nan_and_inf_in_tokens_are_data(impl):
    cache, model = KVCache(1, 1, 4), None
    k, v = pair_of(1, 1, 20, 4)
    k[0, 0, 3], v[0, 0, 7] = np.nan, np.inf
    cache.append(k, v)
    model = Model.of(cache)
    model.append(k, v)
    assert_array_equal(cache.keys(), k)
    assert_array_equal(cache.values(), v)
    q = normal(1, 1, 20, 4)
    out = cache.attend(q)
    assert_same(impl, out, model.attend(q))
    assert np.isnan(out[0, 0, 3:]).all()
    assert np.isfinite(out[0, 0, :3]).all()


def test_padding_of_a_ragged_append_is_never_read(impl):
    k, v = pair_of(2, 1, 9, 4)
    q, counts = normal(2, 2, 9, 4), [9, 4]
    k[1, :, 4:] = v[1, :, 4:] = np.nan
    cache = KVCache(2, 1, 4)
    for _ in range(2):
        start = cache.lengths
        cache.append(k, v, lengths=counts)
        poison(cache)
        out = cache.attend(q, q_start=start)
        for b, n in enumerate(counts):  # each item as if it were alone
            alone = KVCache(1, 1, 4)
            for _ in range(1 + start[b] // n):
                alone.append(k[b : b + 1, :, :n], v[b : b + 1, :, :n])
            assert_same(impl, out[b : b + 1, :, :n], alone.attend(q[b : b + 1, :, :n]))
    assert cache.lengths.tolist() == [18, 8]
    assert cache.length == 18


def test_empty_in_every_way(impl):
    cache = KVCache(2, 1, 4)
    assert cache.keys().shape == cache.values().shape == (2, 1, 0, 4)
    result = cache.attend(np.ones((2, 2, 3, 4)), return_lse=True, return_weights=True)
    assert_array_equal(result.out, np.zeros((2, 2, 3, 4)))
    assert_array_equal(result.lse, np.full((2, 2, 3), -np.inf))
    assert result.weights.shape == (2, 2, 3, 0)
    cache.append(np.ones((2, 1, 0, 4)), np.ones((2, 1, 0, 4)))
    cache.append(np.full((2, 1, 3, 4), np.nan), np.full((2, 1, 3, 4), np.nan), lengths=0)
    assert (cache.length, pages_made(cache)) == (0, 0)
    cache.append(np.ones((2, 1, 1, 4)), np.ones((2, 1, 1, 4)), lengths=[0, 1])
    assert_array_equal(cache.attend(np.ones((2, 1, 1, 4))), np.array([0, 1.0])[:, None, None, None] * np.ones(4))
    assert cache.attend(np.ones((2, 1, 0, 4))).shape == (2, 1, 0, 4)
    nobody = KVCache(0, 1, 4)
    nobody.append(np.ones((0, 1, 2, 4)), np.ones((0, 1, 2, 4)))
    assert nobody.attend(np.ones((0, 1, 2, 4))).shape == (0, 1, 2, 4)
    assert nobody.length == 0


# ---- storage ----


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("capacity", "size"), [(None, 256), (5, 16), (16, 16), (100, 112), (255, 256), (600, 256)])
def test_layout_of_the_pages(dtype, capacity, size):
    cache = KVCache(2, 3, 5, capacity, value_dim=7, dtype=dtype)
    n = capacity or 300
    k, v = pair_of(2, 3, n, 5, 7, dtype=compute_of(cache))
    cache.append(k, v)
    k, v = as_stored(k, dtype), as_stored(v, dtype)
    table = cache.held.pages.table
    assert (table.dtype, table.shape) == (np.intp, (2, -(-n // size)))
    assert (table % 64 == 0).all()
    assert len(np.unique(table)) == table.size
    items = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    for b, t in [(b, t) for b in range(2) for t in range(n)]:
        memory = (ctypes.c_char * (3 * size * 12 * items.itemsize)).from_address(int(table[b, t // size]))
        page, slot = np.frombuffer(memory, items), t % size
        if dtype == "bfloat16":
            page = (page.astype(np.uint32) << 16).view(np.float32)
        keys = page[: 3 * size * 5].reshape(3, size // 16, 5, 16)
        values = page[3 * size * 5 :].reshape(3, size, 7)
        assert_array_equal(keys[:, slot // 16, :, slot % 16], k[b, :, t])
        assert_array_equal(values[:, slot], v[b, :, t])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pages_of_odd_sizes_begin_on_cache_lines(dtype):
    """16 tokens of three numbers of 16 bits are one cache line and a half."""
    cache, k = KVCache(5, 1, 2, 16, value_dim=1, dtype=dtype), normal(5, 1, 16, 2)
    cache.append(k, k[..., :1])
    assert (cache.held.pages.table % 64 == 0).all()
    assert_array_equal(cache.keys(), as_stored(k, dtype))


def test_growing_moves_no_token():
    cache, k = KVCache(2, 1, 4), normal(2, 1, 1, 4)
    seen = np.zeros((2, 0), np.intp)
    for t in range(1500):
        cache.append(k, k)
        table = cache.held.pages.table
        assert_array_equal(table[:, : seen.shape[1]], seen)
        assert pages_made(cache) == 2 * (t // 256 + 1)
        seen = table[:, : t // 256 + 1]


@pytest.mark.parametrize("options", [{}, {"window": (40, 0)}, {"window": (40, 0), "sink_tokens": 20}])
@pytest.mark.parametrize("capacity", [61, 112, 700])
def test_with_a_capacity_nothing_is_allocated_later(capacity, options):
    cache = KVCache(2, 2, 4, capacity, **options)
    made, k = pages_made(cache), normal(2, 2, capacity, 4)
    cache.append(k, k)
    assert cache.length == capacity
    for n in [1] * 400 * ("window" in options):
        cache.append(k[:, :, :n], k[:, :, :n])
    assert pages_made(cache) == made


@pytest.mark.parametrize(("left", "sink_tokens", "most"), [(300, 4, 4), (256, 0, 2), (0, 1, 2)])
def test_a_window_uses_its_pages_again(left, sink_tokens, most):
    cache, k = KVCache(1, 1, 4, window=(left, 0), sink_tokens=sink_tokens), normal(1, 1, 1, 4)
    for t in range(1200):
        cache.append(k, k)
        held = {j // 256 for j in (*range(min(sink_tokens, t + 1)), *range(max(t - left, 0), t + 1))}
        assert pages_in_use(cache) == len(held)
        assert pages_made(cache) <= most  # a page that is given up is the next one to be taken
    assert cache.keys().shape == (1, 1, sink_tokens + left + 1, 4)


def test_a_failed_allocation_changes_nothing(monkeypatch):
    cache, k = KVCache(2, 1, 4, window=(3, 0)), normal(2, 1, 250, 4)
    cache.append(k, k)
    twin = cache.fork()  # the next append must copy, and take pages
    before = state_of(cache)

    def full(self, pages):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "grow", full)
        with pytest.raises(MemoryError):
            cache.append(k, k)
    assert state_of(cache) == before
    cache.append(k, k)
    assert_array_equal(cache.keys(), k[:, :, -4:])
    assert_array_equal(twin.keys(), k[:, :, -4:])


# ---- windows ----


@pytest.mark.parametrize(
    ("left", "sink_tokens", "capacity"),
    [
        (0, 0, None),
        (3, 0, 900),
        (7, 2, None),
        (15, 300, 900),
        (255, 0, None),
        (256, 4, 900),
        (300, 300, None),
        (10**30, 1, 900),
    ],
)
def test_window_as_if_nothing_was_dropped(impl, left, sink_tokens, capacity):
    cache = KVCache(2, 1, 4, capacity, value_dim=3, window=(left, 0), sink_tokens=sink_tokens)
    model, slopes = Model.of(cache), alibi_slopes(2)
    for seed, n in enumerate([1, 1, 5, 30, 1, 300, 1, 40, 1, 1, 260]):
        k, v = pair_of(2, 1, n, 4, 3, seed=seed)
        cache.append(k, v)
        model.append(k, v)
        poison(cache)
        q = normal(2, 2, n, 4, seed=seed)
        result = cache.attend(q, return_lse=True, return_weights=True)
        assert_same(impl, result, model.attend(q, return_lse=True, return_weights=True))
        for options in ({"alibi_slopes": slopes}, {"mask": np.arange(model.length) % 3 > 0}, {"softcap": 1.0}):
            assert_same(impl, cache.attend(q, **options), model.attend(q, **options))
        for found, expected in zip((cache.keys(), cache.values()), model.visible(), strict=True):
            assert_array_equal(found, expected)


@pytest.mark.parametrize("sink_tokens", [0, 3])
def test_window_with_items_of_different_lengths(impl, sink_tokens):
    cache = KVCache(3, 2, 4, window=(5, 0), sink_tokens=sink_tokens)
    model = Model.of(cache)
    for seed, counts in enumerate([(9, 0, 2), (1, 1, 1), (0, 4, 1), (300, 1, 20), (1, 1, 1)]):
        k, v = pair_of(3, 2, max(counts), 4, seed=seed)
        q, start = normal(3, 2, max(counts), 4, seed=seed), cache.lengths
        cache.append(k, v, lengths=counts)
        model.append(k, v, counts)
        poison(cache)
        assert cache.held.held_from.tolist() == model.held_from
        found, expected = cache.attend(q, q_start=start), model.attend(q, causal=True, q_start=start)
        for b, n in enumerate(counts):
            assert_same(impl, found[b, :, :n], expected[b, :, :n])
        for found, expected in zip((cache.keys(), cache.values()), model.visible(), strict=True):
            assert_array_equal(found, expected)


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_window_without_causal_looks_back_all_the_same(impl, sink_tokens):
    cache, k = KVCache(1, 1, 4, window=(3, 0), sink_tokens=sink_tokens), normal(1, 1, 9, 4)
    cache.append(k, k)
    q = normal(1, 1, 2, 4)
    assert_same(impl, cache.attend(q, causal=False), cache.attend(q))
    assert_same(impl, cache.attend(q, causal=False, q_start=4), cache.attend(q, q_start=4))


def test_capacity_of_a_window_counts_what_is_held():
    cache = KVCache(1, 1, 2, 10, window=(4, 0), sink_tokens=3)
    one = normal(1, 1, 10, 2)
    cache.append(one, one)
    for _ in range(50):
        cache.append(one[:, :, :1], one[:, :, :1])  # 3 + 5 tokens after each
    cache.append(one[:, :, :3], one[:, :, :3])
    before = state_of(cache)
    with pytest.raises(ValueError, match="item 0 would hold 11 tokens and the capacity is 10"):
        cache.append(one[:, :, :4], one[:, :, :4])
    assert state_of(cache) == before


def test_rows_that_need_dropped_tokens_are_refused():
    cache, k = KVCache(2, 1, 4, window=(4, 0), sink_tokens=2), normal(2, 1, 20, 4)
    cache.append(k, k, lengths=[20, 7])
    cache.append(k[:, :, :1], k[:, :, :1])  # held from 16 and from 3
    q = normal(2, 1, 1, 4)
    for start in ([20, 7], [21, 30], [0, 0], [1, 1], [-5, -1]):
        cache.attend(q, q_start=start)
    for start, item, need in [([19, 7], 0, 15), ([2, 7], 0, 2), ([20, 6], 1, 2)]:
        with pytest.raises(ValueError, match=f"KVCache.attend: row 0 of item {item} stands at .* from {need} on"):
            cache.attend(q, q_start=start)
    with pytest.raises(ValueError, match="row 0 of item 0 stands at position 19"):
        cache.attend(normal(2, 1, 2, 4))
    cache.attend(q, q_start=[19, 7], key_lengths=[2, 5])  # the keys that are left out are not needed


# ---- what it shows ----


def test_lengths_are_a_copy_and_results_too():
    cache, _ = ragged()
    before = state_of(cache)
    cache.lengths[:] = 1
    cache.keys()[:] = 1
    cache.values()[:] = 1
    assert state_of(cache) == before
    assert cache.lengths.dtype == np.intp
    assert isinstance(cache.length, int)


def test_repr():
    assert repr(ragged(window=(600, 0), sink_tokens=2)[0]) == (
        "KVCache(batch=3, kv_heads=2, head_dim=8, dtype=float32, value_dim=5, window=(600, 0), sink_tokens=2): "
        "17 to 300 tokens, 4 pages of 256 (104.0 KiB)"
    )
    assert "capacity=4096): 0 tokens, 0 pages of 256 (0.0 KiB)" in repr(KVCache(1, 1, 1, 4096))
    big = KVCache(1, 8, 128)
    big.append(np.zeros((1, 8, 1, 128)), np.zeros((1, 8, 1, 128)))
    assert repr(big).endswith("): 1 token, 1 page of 256 (2.0 MiB)")
    half = KVCache(1, 8, 128, dtype="bfloat16")
    half.append(np.zeros((1, 8, 1, 128)), np.zeros((1, 8, 1, 128)))
    assert repr(half) == (
        "KVCache(batch=1, kv_heads=8, head_dim=128, dtype=bfloat16): 1 token, 1 page of 256 (1.0 MiB)"
    )


# ---- rotary ----


@pytest.mark.parametrize("options", [{}, {"interleaved": True, "base": 500.0}, {"rotary_dim": 4}, "tables"])
@pytest.mark.parametrize("steps", [[16], [5, 7, 4], [1] * 16])
def test_rotary_at_the_positions_of_the_tokens(impl, steps, options):
    rotary_embedding = pytest.importorskip("attentile.positions.rotary").rotary_embedding
    if options == "tables":
        angles = np.outer(np.arange(16), 0.3 ** np.arange(4))
        options = {"cos": np.cos(angles), "sin": np.sin(angles)}
    k, v = pair_of(2, 2, 16, 8)
    q, at = normal(2, 4, 16, 8, seed=3), 0
    whole = attention(rotary_embedding(q, **options), rotary_embedding(k, **options), v, causal=True)
    cache = KVCache(2, 2, 8, rotary=options)
    for n in steps:
        rows, at = slice(at, at + n), at + n
        cache.append(k[:, :, rows], v[:, :, rows])
        poison(cache)
        assert_same(impl, cache.attend(q[:, :, rows]), whole[:, :, rows])
    assert_same(impl, cache.keys(), rotary_embedding(k, **options))  # as stored
    everything = cache.attend(q[:, :, :1], causal=False, q_start=3)
    placed = rotary_embedding(q[:, :, :1], 3, **options)
    assert_same(impl, everything, attention(placed, cache.keys(), v))
    twin = pickle.loads(pickle.dumps(cache))
    assert_same(impl, twin.attend(q[:, :, -1:]), whole[:, :, -1:])


def test_rotary_of_items_of_different_lengths(impl):
    pytest.importorskip("attentile.positions.rotary")
    counts = [(5, 2), (1, 1), (0, 4)]
    both = KVCache(2, 1, 8, rotary={})
    alone = [KVCache(1, 1, 8, rotary={}) for _ in range(2)]
    for seed, own in enumerate(counts):
        k, v = pair_of(2, 1, max(own), 8, seed=seed)
        both.append(k, v, lengths=own)
        for b, n in enumerate(own):
            alone[b].append(k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        q = normal(2, 2, 1, 8, seed=seed)
        found = both.attend(q)
        for b in range(2):
            assert_same(impl, found[b : b + 1], alone[b].attend(q[b : b + 1]))
    for b, n in enumerate((6, 7)):
        assert_same(impl, both.keys()[b : b + 1, :, :n], alone[b].keys())


def test_rotary_options_are_checked_at_once():
    pytest.importorskip("attentile.positions.rotary")
    with pytest.raises(ValueError, match="rotary_dim"):
        KVCache(1, 1, 8, rotary={"rotary_dim": 3})


@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_cache_gives_all_results(impl, rows):
    result = KVCache(2, 1, 4).attend(np.ones((2, 3, rows, 4), np.float32), return_lse=True, return_weights=True)
    assert_array_equal(result.out, np.zeros((2, 3, rows, 4), np.float32))
    assert_array_equal(result.lse, np.full((2, 3, rows), -np.inf, np.float32))
    assert result.weights.shape == (2, 3, rows, 0)
