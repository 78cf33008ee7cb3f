"""KVCache: going back (truncate), branching (fork, reorder, copies) and threads; pages are shared and given back."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from pathlib import Path

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
    page_counts,
    pages_in_use,
    pages_made,
    pair_of,
    poison,
    ragged,
    state_of,
)
from helpers import normal
from numpy.testing import assert_array_equal

from attentile import KVCache
from attentile.cache import pages

ROWS = 5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_truncate_and_go_on(impl, dtype):
    cache, model = ragged(dtype)
    for ends in [(290, 17, 256), (256, 3, 0), (40, 0, 0), (40, 0, 0)]:
        cache.truncate(ends)
        model.truncate(ends)
        assert cache.lengths.tolist() == list(ends)
        assert pages_in_use(cache) == sum(-(-n // 256) for n in ends)
        poison(cache)
        q = normal(BATCH, Q_HEADS, 2, WIDTH)
        assert_same(impl, cache.attend(q), model.attend(q))
        k, v = pair_of(BATCH, HEADS, 20, WIDTH, VALUE_WIDTH)
        for each in (cache, model):
            each.append(k, v)
        poison(cache)
        assert_same(impl, cache.attend(q), model.attend(q))
        cache.truncate(ends)
        model.truncate(ends)
    cache.truncate(0 * cache.lengths)
    assert (cache.length, pages_in_use(cache)) == (0, 0)


def test_truncate_a_window(impl):
    cache = KVCache(1, 1, 4, window=(4, 0), sink_tokens=2)
    model = Model.of(cache)
    for seed, (n, end) in enumerate(
        [(20, 20), (5, 20), (3, 22), (1, 22), (300, 200), (50, 2), (9, 8), (600, 0), (3, 3)]
    ):
        k, v = pair_of(1, 1, n, 4, seed=seed)
        q = normal(1, 1, 1, 4, seed=seed)
        for each in (cache, model):
            each.append(k, v)
        assert model.can_truncate([end])
        cache.truncate(end)
        model.truncate([end])
        poison(cache)
        assert_array_equal(cache.keys(), model.visible()[0])
        twin, twin_model = cache.fork(), model.copy()
        for each in (twin, twin_model):
            each.append(k[:, :, :1], v[:, :, :1])
        assert_same(impl, twin.attend(q), twin_model.attend(q))


def test_truncate_is_refused_where_the_next_row_would_lack_tokens():
    cache, k = KVCache(1, 1, 4, window=(4, 0), sink_tokens=2), normal(1, 1, 20, 4)
    cache.append(k, k)
    cache.append(k[:, :, :3], k[:, :, :3])  # held from 16: rows from 20 on
    before = state_of(cache)
    for end in (19, 10, 3):
        with pytest.raises(
            ValueError, match=f"cannot go back to {end} tokens; .* before 16, .* from 20 on, or up to 2"
        ):
            cache.truncate(end)
    assert state_of(cache) == before
    cache.truncate(20)
    cache.truncate(2)
    assert_array_equal(cache.keys(), k[:, :, :2])


@pytest.mark.parametrize("sink_tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 20, 255, 256, 257])
def test_truncate_to_where_the_window_holds_nothing(impl, n, sink_tokens):
    cache = KVCache(1, 1, 4, window=(0, 0), sink_tokens=sink_tokens)
    model, k = Model.of(cache), normal(1, 1, n, 4)
    for tokens in (k, k[:, :, :1]):
        for each in (cache, model):
            each.append(tokens, tokens)
    cache.truncate(n)
    model.truncate([n])
    assert cache.keys().shape[2] == min(n, sink_tokens)
    assert pages_in_use(cache) == (min(n, sink_tokens) > 0)
    for each in (cache, model):
        each.append(k, k)
    poison(cache)
    q = normal(1, 2, n, 4)
    assert_same(impl, cache.attend(q), model.attend(q))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fork_shares_pages_until_one_writes(impl, dtype):
    cache, model = ragged(dtype)
    twin, twin_model = cache.fork(), model.copy()
    pages = pages_in_use(cache)
    assert pages == 4
    assert_array_equal(twin.held.pages.table, cache.held.pages.table)
    for seed, (one, own) in enumerate([(cache, model), (twin, twin_model), (cache, model)]):
        k, v = pair_of(BATCH, HEADS, 3, WIDTH, VALUE_WIDTH, seed=10 + seed)
        one.append(k, v)
        own.append(k, v)
        poison(cache)
        poison(twin)
        for each, expected in ((cache, model), (twin, twin_model)):
            q = normal(BATCH, Q_HEADS, 3, WIDTH, seed=seed)
            assert_same(impl, each.attend(q), expected.attend(q))
            assert_array_equal(each.keys(), expected.visible()[0])
            assert_array_equal(each.values(), expected.visible()[1])
    # Item 0 writes into its second page, item 1 into its first, item 2 into a new one: its first stays shared.
    assert pages_in_use(cache) == 2 * 5 - 2
    assert cache.held.pages.table[0, 0] == twin.held.pages.table[0, 0]
    assert cache.held.pages.table[2, 0] == twin.held.pages.table[2, 0]


@pytest.mark.parametrize("cyclic", [False, True])
def test_a_fork_that_dies_gives_its_pages_back(cyclic):
    cache, k = KVCache(1, 1, 4), normal(1, 1, 300, 4)
    cache.append(k, k)
    twin = cache.fork()
    twin.append(k, k)
    assert pages_in_use(cache) == 2 + 2  # one shared, one copied, one of its own
    if cyclic:
        twin.itself = twin
    del twin
    gc.collect()
    assert pages_in_use(cache) == 2
    table, made = cache.held.pages.table.copy(), pages_made(cache)
    cache.append(k[:, :, :200], k[:, :, :200])  # nothing is shared any more, so nothing is copied
    assert_array_equal(cache.held.pages.table, table)
    assert pages_made(cache) == made


def test_a_fork_outlives_its_origin():
    cache, k = KVCache(1, 1, 4), normal(1, 1, 300, 4)
    cache.append(k, k)
    twin = cache.fork()
    del cache
    assert_array_equal(twin.keys(), k)
    twin.append(k, k)
    assert pages_in_use(twin) == 3
    assert_array_equal(twin.keys(), np.concatenate([k, k], axis=2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beams", [[0, 0, 1, 2, 2], [2, 1, 0], [1], [0, 1, 2], [], [0, 0, 0]])
def test_reorder(impl, beams, dtype):
    cache, model = ragged(dtype)
    cache.reorder(beams)
    model.reorder(beams)
    assert (cache.batch, cache.lengths.tolist()) == (len(beams), [LENGTHS[b] for b in beams])
    assert pages_in_use(cache) == sum(-(-LENGTHS[b] // 256) for b in set(beams))  # no token was copied
    for seed in range(3):
        k, v = pair_of(len(beams), HEADS, 1, WIDTH, VALUE_WIDTH, seed=seed)
        for each in (cache, model):
            each.append(k, v)
        poison(cache)
        q = normal(len(beams), Q_HEADS, 2, WIDTH)
        assert_same(impl, cache.attend(q), model.attend(q))
        assert_array_equal(cache.values(), model.visible()[1])


def test_beams_of_a_full_batch_need_no_more_pages():
    cache, k = KVCache(3, 1, 4, 64), normal(3, 1, 20, 4)
    cache.append(k, k)
    for beams in ([0, 0, 0], [1, 1, 2], [2, 2, 2]):
        cache.reorder(beams)
        cache.append(k[:, :, :1], k[:, :, :1])
        assert (pages_in_use(cache), pages_made(cache)) == (3, 3)
    assert_array_equal(cache.keys()[:, :, -1], k[:, :, 0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_copies_are_independent(way, dtype):
    cache, _ = ragged(dtype, window=(20, 0), sink_tokens=3)
    twin = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda c: pickle.loads(pickle.dumps(c))}[way](cache)
    before, tokens = state_of(cache)[:-1], cache.keys()
    assert_array_equal(twin.keys(), tokens)
    k, v = pair_of(BATCH, HEADS, 30, WIDTH, VALUE_WIDTH)
    twin.append(k, v)
    assert state_of(cache)[:-1] == before
    assert_array_equal(twin.keys()[0, :, 3:], as_stored(k[0, :, -21:], dtype))


def test_threads_attend_together_and_change_their_forks(impl):
    cache, model = ragged()
    q = normal(BATCH, Q_HEADS, ROWS, WIDTH)
    expected, failed = cache.attend(q), []

    def work(seed: int) -> None:
        try:
            own, own_model = cache.fork(), model.copy()
            for step in range(20):
                assert_array_equal(cache.attend(q), expected)
                k, v = pair_of(BATCH, HEADS, 30, WIDTH, VALUE_WIDTH, seed=100 * seed + step)
                own.append(k, v)
                own_model.append(k, v)
            assert_array_equal(own.values(), own_model.visible()[1])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert pages_in_use(cache) == 4


def test_a_page_of_a_fork_is_copied_after_a_way_back(impl):
    """Only the pages that the latest appends opened are known to be the cache's own; truncate may leave them."""
    k = normal(1, 2, 400, 4, seed=5)
    cache = KVCache(1, 2, 4)
    cache.append(k[:, :, :300], k[:, :, :300])
    twin = cache.fork()
    cache.append(k[:, :, 300:301], k[:, :, 300:301])  # its own second page, the first is shared
    for end in (299, 256, 255, 200):
        cache.truncate(end)
        cache.append(-k[:, :, end : end + 3], k[:, :, end : end + 3])
        cache.append(-k[:, :, end + 3 : end + 4], k[:, :, end + 3 : end + 4])
        assert_array_equal(cache.keys()[:, :, end:], -k[:, :, end : end + 4])
        assert_array_equal(twin.keys(), k[:, :, :300])
        assert_array_equal(twin.values(), k[:, :, :300])


@pytest.mark.parametrize("n", [2, 3, 40, 256, 257, 300])
def test_nothing_is_appended_where_no_page_is(impl, n):
    """A window of one token, gone back by one: every token is dropped, and so is the page of the next one."""
    cache, k = KVCache(1, 1, 4, window=(0, 0)), normal(1, 1, n + 1, 4)
    for j in range(n):
        cache.append(k[:, :, j : j + 1], k[:, :, j : j + 1])
    cache.truncate(n - 1)
    cache.append(k[:, :, :0], k[:, :, :0])
    assert (cache.length, cache.keys()[0].shape[1]) == (n - 1, 0)
    cache.append(k[:, :, n:], k[:, :, n:])
    assert_array_equal(cache.attend(k[:, :, :1]), k[:, :, n:])


def test_addresses_of_the_upper_half_of_memory():
    """Of 32 bits of addresses programs have them all."""
    half = 2 ** (8 * np.dtype(np.intp).itemsize - 1)
    assert pages.signed([64, half - 64, half, 2 * half - 64]) == [64, half - 64, -half, -64]


# ---- broken off ----


ROOM = Path(pages.__file__).parent
# Leaving a block is traced at its `with` again, before the lock is released; no signal is handled there.
WITH = {
    (path.name, number)
    for path in ROOM.glob("*.py")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    if line.strip().startswith("with ")
}


class Interrupter:
    """A trace function that raises KeyboardInterrupt at the n-th line of the cache's code, as a signal could; 0: never.

    Not in what Python runs where it swallows exceptions.
    """

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if path.parent != ROOM or frame.f_code.co_name == "__del__":
            return None
        if event == "line" and (path.name, frame.f_lineno) not in WITH:
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self


def assert_pages_kept(*caches: KVCache) -> None:
    """Every page of a table is in use, with a reference for each place, and not to be had by anybody else."""
    pool, places = caches[0].held.pages.pool, {}
    page_counts(pool)
    for cache in caches:
        for address in cache.held.pages.table[cache.held.pages.table != 0].tolist():
            places[address] = places.get(address, 0) + 1
    assert not places.keys() & set(pool._free)
    assert len(set(pool._free)) == len(pool._free)
    assert all(pool._references[address] >= n for address, n in places.items())


CHANGES = {
    "append": lambda cache, k: cache.append(k, k),
    "truncate": lambda cache, k: cache.truncate(cache.length - 90),
    "reorder": lambda cache, k: cache.reorder([1, 1]),
    "fork": lambda cache, k: cache.fork(),
}


def broken_off(change: str, at: int) -> int:
    """Breaks the change off at this line of the cache's code; the cache and its fork must be sound. The lines run."""
    k = normal(2, 1, 700, 4)
    cache = KVCache(2, 1, 4, window=(60, 0), sink_tokens=3)  # the next append drops the second page of each item
    cache.append(k[:, :, :600], k[:, :, :600])
    twin = cache.fork()
    q, interrupter, before = normal(2, 1, 2, 4), Interrupter(at), sys.gettrace()
    expected = twin.attend(q)
    sys.settrace(interrupter)
    try:
        CHANGES[change](cache, k[:, :, 600:])
    except KeyboardInterrupt:
        assert 0 < at == interrupter.lines
    finally:
        sys.settrace(before)
    assert_pages_kept(cache, twin)
    other = twin.fork()  # takes whatever is free
    other.append(np.full_like(k, np.nan), k)
    assert_pages_kept(cache, twin, other)
    assert_array_equal(twin.attend(q), expected)
    try:
        found = cache.attend(q)
    except ValueError:  # rows that need tokens of dropped pages
        found = np.zeros(1)
    assert np.isfinite(found).all()
    return interrupter.lines


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_broken_off_at_any_line_keeps_the_pages(either, change):
    lines = broken_off(change, 0)
    assert lines > 3
    for line in range(1, lines + 1):
        broken_off(change, line)
