"""What sanitizers, fuzzers and hostile reading found, each as the kind of mistake that it was."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from test_config import config_of, write

from attentile import KVCache, attention, rotary_embedding
from attentile.cache.retention import Held
from attentile.positions import rotary
from attentile.runtime import backend, threads


def misaligned(array: Any) -> Any:
    raw = np.empty(array.nbytes + 1, np.uint8)
    moved = raw[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    assert not moved.flags.aligned
    assert moved.flags.c_contiguous
    return moved


class Spy:
    """Stands in for the core and keeps the arguments of rotate()."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.arrays: list[Any] = []

    def rotate(self, *arguments: Any) -> None:
        turn = arguments[2]
        self.arrays += [x for x in (*arguments, *turn) if isinstance(x, np.ndarray)]
        self.core.rotate(*arguments)


@pytest.mark.parametrize("what", ["positions", "float64 tables", "float32 tables", "inverse", "half"])
def test_the_core_gets_no_misaligned_table(compiled, monkeypatch, what):
    """A contiguous array need not be aligned: positions reached the core as they came (UBSan, 64-bit load)."""
    x = np.ones((3, 4), np.float16 if what == "half" else np.float32)
    options: dict[str, Any] = {"positions": np.array([2, 0, 1])}
    if what not in ("positions", "half"):
        kind = np.float32 if what == "float32 tables" else np.float64
        options |= {"cos": np.eye(3, 2, dtype=kind), "sin": np.ones((3, 2), kind)}
    if what == "inverse":
        options["inverse"] = True
    want = rotary_embedding(x, **options)
    spy = Spy(backend.active)
    monkeypatch.setattr(backend, "active", spy)
    moved = {name: misaligned(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    np.testing.assert_array_equal(rotary_embedding(x, **moved), want)
    assert len(spy.arrays) >= 3
    assert all(array.flags.aligned for array in spy.arrays)
    assert rotary._plain(misaligned(np.arange(3)), np.int64).flags.aligned


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("keys", [2**40, 2**50])
def test_a_view_that_repeats_a_key_needs_no_memory(compiled, keys, heads, threads):
    """Scratch for partial results grew with S, seen or not: MemoryError, and sizes beyond 2^63 bytes in the end."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, heads, 1, 8)).astype("f4") for _ in range(3))
    k, v = (np.broadcast_to(x, (1, heads, keys, 8)) for x in (k, v))
    found = attention(q, k, v, key_lengths=300, num_threads=threads)
    np.testing.assert_array_equal(found, attention(q, k[:, :, :300], v[:, :, :300]))


@pytest.mark.parametrize("text", ["²", "9" * 5000, "٣"])
def test_numbers_that_python_cannot_read(text):
    """str.isdigit() is true for more than int() takes."""
    shown = config_of(OMP_NUM_THREADS=text)
    want = {"²": config_of()["threads"], "٣": 3}.get(text, 256)
    assert shown["threads"] == want


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (b"", None),
        (b"\n\n0::/a\n", 0.5),
        (b"nothing like it\n:\n0::/a\n", 0.5),
        (b"0::/../a\n", 0.5),
        (b"0::/\xff\xfe/a\n", None),
        (b"0::/a\0b\n", None),
        (b"1:cpu:/../../a\n", 2.0),
        (b"1:cpuacct,cpu:/b\n0::/a\n", 0.25),
        (b"3:memory:/a\n", None),
    ],
)
def test_cgroup_files_of_every_kind(tmp_path, content, want):
    """Names in bytes that are no UTF-8, lines that are none, groups beyond the container's root."""
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", "50000 100000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "sys/fs/cgroup/cpuacct,cpu/b/cpu.cfs_quota_us", "25000\n")
    write(tmp_path / "sys/fs/cgroup/cpuacct,cpu/b/cpu.cfs_period_us", "100000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(content)
    assert threads._cgroup_quota(tmp_path) == want


@pytest.mark.parametrize(
    "text", ["-1 100000", "0 100000", "5 0", "5 -5", "1e5 100000", "max", "", "1 2 3", "5 " + "9" * 400]
)
def test_a_quota_that_makes_no_sense_is_none(tmp_path, text):
    write(tmp_path / "proc/self/cgroup", "0::/a\n")
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", text)
    assert threads._cgroup_quota(tmp_path) is None


def test_a_hybrid_mount_of_version_2(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/a\n")
    write(tmp_path / "sys/fs/cgroup/unified/a/cpu.max", "150000 100000")
    assert threads._cgroup_quota(tmp_path) == 1.5


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

    monkeypatch.setattr("attentile.cache.retention.ready", no_memory)
    with pytest.raises(MemoryError):
        cache.append(token.astype(np.float64), token)
    assert (cache.lengths.tolist(), cache.held.held_from.tolist(), cache.held.pages.table.tolist()) == before
