"""Changes of a cache that are broken off, by a fork, an exception or a lack of memory."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from attentile import KVCache
from attentile.cache.retention import Held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_does_not_inherit_a_locked_pool():
    """A fork while another thread holds the pool of pages: the child waited for ever."""
    import threading

    cache = KVCache(1, 1, 8)
    token = np.ones((1, 1, 300, 8), np.float32)
    cache.append(token, token)
    pool, inside, leave = cache.held.pages.pool, threading.Event(), threading.Event()
    grow = pool.grow
    pool.grow = lambda pages: (inside.set(), leave.wait(0.3), grow(pages))
    other = threading.Thread(target=cache.fork().append, args=(token, token))
    other.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        pool.grow = grow
        cache.append(token, token)
        os._exit(0 if cache.length == 600 else 1)
    leave.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other.join()


class Broken(Exception):
    """Stands in for a signal that breaks in."""


def raise_broken(*_: Any, **__: Any) -> None:
    raise Broken


@pytest.mark.parametrize("moment", ["write", "after open", "cut", "reorder"])
def test_a_change_that_is_broken_off_leaves_no_stale_view(monkeypatch, moment):
    """The core's view of a cache outlived pages that were given up, and rows could be led to pages that were gone."""
    rng = np.random.default_rng(3)
    k, v, q = (rng.standard_normal((1, 1, n, 8)).astype("f4") for n in (600, 600, 1))
    cache = KVCache(1, 1, 8, window=(4, 0))
    cache.append(k[:, :, :500], v[:, :, :500])
    cache.append(k[:, :, 500:515], v[:, :, 500:515])
    pages = cache.held.pages
    if moment == "write":
        monkeypatch.setattr(Held, "write", raise_broken)
        change: Any = lambda: cache.append(k[:, :, :100], v[:, :, :100], lengths=60)  # noqa: E731
    elif moment == "after open":
        opened = pages.open
        monkeypatch.setattr(pages, "open", lambda *a: (opened(*a), raise_broken()))
        change = lambda: cache.append(k, v)  # noqa: E731
    elif moment == "cut":
        monkeypatch.setattr(pages, "cut", raise_broken)
        change = lambda: cache.truncate(504)  # noqa: E731
    else:
        monkeypatch.setattr(pages, "reorder", raise_broken)
        change = lambda: cache.reorder([0])  # noqa: E731
    with pytest.raises(Broken):
        change()
    for b in range(cache.batch):  # every token that the books show has its page
        for first, end in cache.held.runs(b):
            assert all(pages.table[b, first // 256 : -(-end // 256)])
    try:
        assert np.isfinite(cache.attend(q)).all()
    except ValueError as error:  # the row lost its tokens, and says so
        assert "the window has dropped" in str(error)  # noqa: PT017


def test_an_append_without_memory_for_copies_changes_nothing(monkeypatch):
    cache = KVCache(1, 1, 8, window=(4, 0))
    token = np.ones((1, 1, 300, 8), np.float32)
    cache.append(token, token)
    cache.append(token[:, :, :5], token[:, :, :5])
    before = cache.lengths.tolist(), cache.held.held_from.tolist(), cache.held.pages.table.tolist()

    def no_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("attentile.cache.formats.ready", no_memory)
    with pytest.raises(MemoryError):
        cache.append(token.astype(np.float64), token)
    assert (cache.lengths.tolist(), cache.held.held_from.tolist(), cache.held.pages.table.tolist()) == before
