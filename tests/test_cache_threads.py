"""Threads at one cache: who may be there at once, who is refused before anything is written, and forks side by side."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cache_helpers import Model, page_counts, pair_of, state_of
from helpers import normal
from layer_oracle import make
from numpy.testing import assert_array_equal

from attentile import KVCache, use_backend
from attentile.cache.guard import Guard
from attentile.runtime import backend

K, V = pair_of(2, 2, 5, 4)
Q = normal(2, 2, 1, 4)
LAYER, X = make(kv_heads=2, width=4).layer(), normal(2, 1, 12, dtype=np.float64)

CHANGES: dict[str, Callable[[KVCache], Any]] = {
    "append": lambda cache: cache.append(K, V),
    "append with lengths": lambda cache: cache.append(K, V, lengths=[1, 2]),
    "truncate": lambda cache: cache.truncate(3),
    "truncate items": lambda cache: cache.truncate([1, 2]),
    "reorder": lambda cache: cache.reorder([1, 0]),
    "layer": lambda cache: LAYER(X, cache=cache),
}
READS: dict[str, Callable[[KVCache], Any]] = {
    "attend": lambda cache: cache.attend(Q),
    "attend with options": lambda cache: cache.attend(Q, score_mod=lambda s, *_: s),
    "keys": lambda cache: cache.keys(),
    "values": lambda cache: cache.values(),
    "fork": lambda cache: cache.fork(),
    "copy": copy.copy,
    "save": lambda cache: cache.save(io.BytesIO()),
    "pickle": pickle.dumps,
}
NAMES = {"layer": "MultiHeadAttention", "copy": "KVCache.fork", "pickle": "KVCache"}


@pytest.fixture(params=["compiled", "numpy", "no core"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The guard of the core with both backends, and the one of a process without a core."""
    if request.param != "no core" and backend.compiled is None:
        pytest.skip("no compiled core in this build")
    with use_backend("compiled" if request.param == "compiled" else "numpy"):
        if request.param == "no core":
            monkeypatch.setattr(backend, "compiled", None)
        yield request.param


def made(**options: Any) -> KVCache:
    cache = KVCache(2, 2, 4, **options)
    cache.append(K, V)
    return cache


def elsewhere(call: Callable[[], Any]) -> Any:
    """What call() gives in another thread: its result or its exception."""
    found = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


# ---- who may be there at once ----


@pytest.mark.parametrize("rotary", [None, {}])
@pytest.mark.parametrize("change", [True, False])
@pytest.mark.parametrize("name", CHANGES | READS)
def test_who_is_refused(way, name, change, rotary):
    cache, call = made(rotary=rotary), (CHANGES | READS)[name]
    assert isinstance(cache.held.guard, Guard) == (way == "no core")
    before = None
    with cache.held.using("test", change=change):
        lengths, pages = cache.lengths, page_counts(cache.held.pages.pool)
        found = elsewhere(lambda: call(cache))
        if change or name in CHANGES:
            text = "is in use" if name in CHANGES else "is being changed"
            caller = NAMES.get(name, f"KVCache.{name.split()[0]}")
            assert isinstance(found, RuntimeError)
            assert str(found).startswith(f"{caller}: this cache {text} by another call")
            assert_array_equal(cache.lengths, lengths)
            assert page_counts(cache.held.pages.pool) == pages
        else:
            assert not isinstance(found, BaseException)
        before = repr(cache), cache.length, cache.lengths.tolist()  # these may be asked at any time
    assert before is not None
    call(cache)  # and now it is free


def test_a_function_on_the_scores_may_read_the_cache_and_not_change_it(way):
    cache, found = made(), []

    def looks(scores: Any, *_: Any) -> Any:
        found.append(elsewhere(lambda: cache.attend(Q)))
        found.append(elsewhere(lambda: cache.append(K, V)))
        return scores

    cache.attend(Q, score_mod=looks)
    assert_array_equal(found[0], cache.attend(Q))
    assert isinstance(found[1], RuntimeError)
    assert cache.length == 5


def test_a_layer_reads_through_the_methods_of_a_subclass(way):
    class Counting(KVCache):
        asked = 0

        def attend(self, q: Any, **options: Any) -> Any:
            self.asked += 1
            forks.append(self.fork())
            return super().attend(q, **options)

    cache, forks = Counting(2, 2, 4), []
    found = LAYER(X, cache=cache)
    assert cache.asked == 1
    assert_array_equal(found, LAYER(X, cache=KVCache(2, 2, 4)))
    for one in (cache, forks[0]):  # the cache is free again, and its fork was never anything else
        assert one.held.owner is None
        one.append(K, V)


@pytest.mark.parametrize("name", ["append", "attend", "layer"])
def test_errors_leave_the_guard(way, name):
    cache = made()
    before = state_of(cache)

    def broken(*_: Any) -> Any:
        raise KeyboardInterrupt

    wrong: dict[str, Callable[[], Any]] = {
        "append": lambda: cache.append(K[:1], V),
        "attend": lambda: cache.attend(Q, score_mod=broken),
        "layer": lambda: LAYER(X, cache=cache, score_mod=broken),
    }
    with pytest.raises((ValueError, KeyboardInterrupt)):
        wrong[name]()
    assert state_of(cache)[:-1] == before[:-1]
    for call in (CHANGES | READS).values():
        call(cache)


def test_a_mark_that_an_interrupt_has_left_goes_with_the_next_call_of_its_thread():
    guard = Guard()
    guard.using(True, "").__enter__()
    assert isinstance(elsewhere(lambda: guard.using(False, "taken").__enter__()), RuntimeError)
    with guard.using(True, ""):
        pass
    assert guard.users == {}


# ---- races ----


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None], threads: int = 4) -> None:
    failed, start = [], threading.Barrier(threads)

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    started = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("options", [{"capacity": 4096}, {}, {"window": (30, 0), "sink_tokens": 2}, {"rotary": {}}])
def test_appends_at_once_are_whole_or_refused(way, switching, options):
    cache, appended = KVCache(1, 2, 64, **options), [0] * 4

    def work(number: int) -> None:
        k = normal(1, 2, 60, 64, seed=number)
        for _ in range(10):
            try:
                cache.append(k, k)
            except RuntimeError as error:
                assert str(error).startswith("KVCache.append: ")  # noqa: PT017
            else:
                appended[number] += 1

    together(work)
    assert cache.length == 60 * sum(appended)
    assert sum(appended) > 0
    if cache.held.rotary is None:
        assert_array_equal(cache.keys(), cache.values())


def test_forks_that_share_pages_are_changed_side_by_side(way, switching):
    """Every thread has a fork of one cache, the first one the cache itself, all of whose pages are shared."""
    cache = KVCache(2, 2, 4, window=(200, 0), sink_tokens=3)
    model = Model.of(cache)
    k, v = pair_of(2, 2, 500, 4)
    for each in (cache, model):
        each.append(k, v)
    own = [cache, *(cache.fork() for _ in range(3))]
    models = [model, *(model.copy() for _ in range(3))]

    def work(number: int) -> None:
        rng, cache, model = np.random.default_rng(number), own[number], models[number]
        for step in range(15):
            n = int(rng.choice([1, 3, 30]))
            k, v = pair_of(2, 2, n, 4, seed=100 * number + step)
            items = rng.integers(0, 2, 2)
            for each in (cache, model):
                each.append(k, v)
                each.reorder(items)
            ends = [length - int(rng.integers(0, 2)) for length in model.lengths]
            if model.can_truncate(ends):
                cache.truncate(ends)
                model.truncate(ends)
            twin = cache.fork()  # dies here, and gives its pages back
            assert_array_equal(twin.keys(), model.visible()[0])
        assert_array_equal(cache.values(), model.visible()[1])

    together(work)
    used = {int(page) for each in own for page in each.held.pages.table.ravel() if page}
    assert page_counts(cache.held.pages.pool)[0] == len(used)


def test_a_fork_never_leaves_an_append_writing_into_a_shared_page(compiled, switching):
    """Some threads attend while others fork: the cache must know all the same that its pages are shared."""
    cache, k = KVCache(1, 2, 64), normal(1, 2, 40, 64)
    cache.append(k, k)
    for seed in range(20):
        twins: list[KVCache] = []

        def work(number: int, twins: list[KVCache] = twins) -> None:
            for _ in range(10):
                if number % 2:
                    twins.append(cache.fork())
                else:
                    cache.attend(k[:, :, :1])

        together(work)
        length, before = cache.length, cache.keys()
        cache.append(k[:, :, seed : seed + 1], k[:, :, seed : seed + 1])
        for twin in twins:
            twin.append(-k[:, :, :1], -k[:, :, :1])
        assert_array_equal(cache.keys()[:, :, length:], k[:, :, seed : seed + 1])
        assert_array_equal(twins[0].keys(), np.concatenate([before, -k[:, :, :1]], axis=2))
