"""Reports about threads and processes: fork, affinity, thread pools, the GIL, references and memory over many calls.

Everything that needs a process in a known state, or may hang, runs in a Python of its own with a time limit.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from report_helpers import check, output_of, qkv

import attentile
from attentile import attention
from attentile.runtime import backend
from attentile.runtime import threads as thread_settings

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system sets no CPU affinity")
needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")

# The start of each program: the reports' call, and a fingerprint of its bits.
COMMON = """
import hashlib, json, os, sys
import numpy as np
import attentile

rng = np.random.default_rng(61)
q, k, v = (rng.standard_normal((1, 4, 512, 64)).astype(np.float32) for _ in range(3))

def bits(threads=2):
    return hashlib.sha256(attentile.attention(q, k, v, num_threads=threads)).hexdigest()
"""

# ---- B61: fork ----

POOL_AFTER_USE = """
import multiprocessing
if sys.argv[1] == "parent first":
    bits()
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(bits, [2, 2, 1, 2], chunksize=1)
    again = pool.map(bits, [2, 2], chunksize=1)
print(len({*found, *again, bits(), bits(1)}))
"""

FORK_AFTER_USE = """
def child():
    # Twice, so that the child's own workers are used as well as started.
    return 0 if bits() == bits() == expected else 1

expected = bits()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(child())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bits() == expected  # the parent's workers are still there
print("done")
"""

FORK_OF_A_FORK = """
expected = bits()
if (pid := os.fork()) == 0:
    ok = bits() == expected
    if (grandchild := os.fork()) == 0:
        os._exit(0 if bits() == expected else 1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@needs_fork
@pytest.mark.parametrize("order", ["parent first", "child first"])
def test_b61_fork_pool(compiled, order):
    assert output_of(COMMON + POOL_AFTER_USE, order) == "1"  # different results


@needs_fork
def test_b61_fork_after_use(compiled):
    assert output_of(COMMON + FORK_AFTER_USE) == "done"


@needs_fork
def test_b61_fork_of_a_fork(compiled):
    assert output_of(COMMON + FORK_OF_A_FORK) == "0"


# ---- B64: how many CPUs this process may use ----

ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
"""
DEFAULT_THREADS = """
before = len(os.listdir("/proc/self/task"))
default = hashlib.sha256(attentile.attention(q, k, v)).hexdigest()
started = len(os.listdir("/proc/self/task")) - before
print(json.dumps([attentile.get_num_threads(), started, default == bits(1)]))
"""


@needs_affinity
@needs_proc
def test_b64_affinity_of_one_core(compiled):
    assert json.loads(output_of(ON_ONE_CORE + COMMON + DEFAULT_THREADS)) == [1, 0, True]


@pytest.mark.parametrize(("quota", "threads"), [("200000", 2), ("150000", 2), ("50000", 1), ("max", 8), ("6400000", 8)])
def test_b64_quota_of_the_control_group(tmp_path, monkeypatch, quota, threads):
    """A container on eight cores: the quota counts, rounded up."""
    for path, text in (("proc/self/cgroup", "0::/app"), ("sys/fs/cgroup/app/cpu.max", f"{quota} 100000")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text + "\n")
    for name in ("ATTENTILE_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    real = thread_settings._cgroup_quota
    monkeypatch.setattr(thread_settings, "_cgroup_quota", lambda: real(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(thread_settings, "_process_threads", None)
    monkeypatch.setattr(thread_settings, "_default", None)
    assert attentile.get_num_threads() == threads


# ---- B65: beside the thread pools of others ----

COUNT_THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor

def tasks():
    return len(os.listdir("/proc/self/task"))

def started_by(threads):
    results = list(pool.map(lambda _: attentile.attention(q, k, v, num_threads=threads), range(16)))
    assert all(np.array_equal(x, results[0]) for x in results)
    return tasks() - before

(q[0, 0] @ k[0, 0].T).sum()  # NumPy's own threads, if it has any, are there from here on
with ThreadPoolExecutor(4) as pool:
    together = threading.Barrier(4)
    list(pool.map(lambda _: together.wait(), range(4)))  # and so are all callers
    before = tasks()
    print(json.dumps([started_by(1), started_by(2), started_by(None), started_by(3), attentile.get_num_threads()]))
"""


@needs_proc
def test_b65_threads_per_call(compiled):
    """Workers are kept and shared: n threads are the caller and n - 1 workers, whoever and how many call."""
    one, two, default, three, default_threads = json.loads(output_of(COMMON + COUNT_THREADS))
    assert (one, two) == (0, 1)
    assert two <= default <= max(two, default_threads - 1)  # fewer if there are fewer tasks
    assert three == max(default, 2)


def test_b65_same_result_from_a_thread_pool(compiled):
    cases = [qkv((2, 4, n, 32), seed=n) for n in (3, 17, 200, 400)]
    expected = [attention(*case, causal=True, num_threads=1) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for threads in (1, None, 2):
            calls = [
                (n, pool.submit(attention, *cases[n], causal=True, num_threads=threads)) for n in [0, 1, 2, 3] * 10
            ]
            for n, call in calls:
                assert_array_equal(call.result(timeout=60), expected[n])


def test_b65_settings_of_others_are_untouched(compiled):
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def settings() -> list[tuple[str, int]]:
        others = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] != "attentile"]
        return [(pool["filepath"], pool["num_threads"]) for pool in others]

    a, b = qkv((1, 1, 300, 300))[:2]
    before, product = settings(), a @ b
    for threads in (1, 2, None):
        attention(*qkv((1, 4, 512, 64)), num_threads=threads)
        assert settings() == before
    assert_array_equal(a @ b, product)


# ---- B66: the GIL ----


def beats_during_a_call() -> tuple[int, float]:
    """How often a second thread woke from 1 ms of sleep during one long call, and how long that was (s)."""
    q, k, v = qkv((1, 4, 4096, 64))
    beats, stop = [0], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            beats[0] += 1

    other = threading.Thread(target=beat)
    other.start()
    try:
        attention(q[..., :64, :], k, v)  # starts what must be started
        before, start = beats[0], time.perf_counter()
        attention(q, k, v, num_threads=1)
        return beats[0] - before, time.perf_counter() - start
    finally:
        stop.set()
        other.join()


def test_b66_other_threads_run_during_a_call(compiled):
    """A call that keeps the lock allows one beat or two; a free one about 900 per second on an idle machine."""
    counted = []
    for _ in range(3):  # the other core may be somebody else's for a while
        beats, seconds = beats_during_a_call()
        counted.append((beats, seconds))
        if beats >= max(8, 100 * seconds):
            return
    pytest.fail(f"(beats, seconds) of three calls: {counted}")


# ---- B68: references and memory ----

WRONG = {
    "k of complex numbers": {"k": np.ones((1, 2, 5, 8), np.complex64)},
    "v of objects": {"v": np.ones((1, 2, 5, 8), object)},
    "k of another width": {"k": np.ones((1, 2, 5, 7), np.float32)},
    "integer mask": {"mask": np.ones((5, 5), np.int64)},
    "integer bias": {"bias": np.ones((5, 5), np.int64)},
    "mask of another shape": {"mask": np.ones((4, 5), bool)},
    "key_lengths of floats": {"key_lengths": np.ones(1)},
    "key_lengths beyond the keys": {"key_lengths": np.array([6])},
    "out of another dtype": {"out": np.ones((1, 2, 5, 8), np.float64)},
}


@pytest.mark.parametrize("kind", WRONG)
def test_b68_failing_calls_keep_no_reference(impl, kind):
    given = dict(zip("qkv", qkv((1, 2, 5, 8)), strict=True))
    given |= {"mask": np.ones((5, 5), bool), "bias": np.zeros((5, 5), np.float32), **WRONG[kind]}
    objects = list(given.values())
    before = [sys.getrefcount(x) for x in objects]
    for _ in range(1000):
        with pytest.raises((TypeError, ValueError)):
            attention(**given)
    assert [sys.getrefcount(x) for x in objects] == before


def test_b68_the_core_keeps_no_reference(compiled):
    """The fault as reported: a later argument fails after the memory of earlier ones was borrowed."""
    q, k, v = qkv((1, 2, 5, 8))
    out, wrong, mask = np.empty_like(q), v.astype(np.float64), np.tri(5, dtype=bool)
    options = {"mask": mask, "sinks": np.zeros(2), "key_lengths": np.array([4]), "out": out}
    objects = [q, k, v, out, wrong, *options.values()]
    before = [sys.getrefcount(x) for x in objects]
    for _ in range(1000):
        assert backend.active.attention(q, k, wrong, options, 1) is None
        assert backend.active.attention(q, k, v, {**options, "bias": wrong}, 1) is None
        assert backend.active.attention(q, k, v, options, 1) is out
    assert [sys.getrefcount(x) for x in objects] == before


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_proc
def test_b68_memory_does_not_grow(either):
    q, k, v = qkv((1, 2, 5, 8))
    mask = np.tri(5, dtype=bool)
    check(q, k, v, mask=mask)

    def calls(n: int) -> None:
        for _ in range(n):
            attention(q, k, v)
            attention(q, k, v, mask=mask, key_lengths=[4], return_lse=True, return_weights=True)

    calls(1000)
    before = resident_bytes()
    calls(5000)
    assert resident_bytes() - before < 2**20


# ---- B120: one long sequence on two threads ----


def test_b120_one_long_sequence(compiled):
    for shape in ((1, 1, 1, 128), (1, 1, 400, 128)):
        q, k, v = qkv(shape, keys=65536 if shape[2] == 1 else 4096)
        assert_array_equal(attention(q, k, v, num_threads=2), attention(q, k, v, num_threads=1))
