"""Threads and processes under stress: callers at once, exceptions, signals, forks, exits and interpreters.

Short here; ATTENTILE_STRESS=long (as .ci/sanitize --long sets it) runs the same for minutes. Whatever may hang or crash
runs in a process of its own with a time limit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attentile
from attentile import KVCache, attention, explain, rotary_embedding

LONG = os.environ.get("ATTENTILE_STRESS") == "long"
HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "src" / "attentile" / "core" / "kernels"

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
needs_timer = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")


def often(short: int, long: int) -> int:
    return long if LONG else short


def finished(code: str, seconds: int = 120) -> str:
    """What a new interpreter prints; it must end in time, with exit code 0 and without a word on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds * (5 if LONG else 1), check=False,
        env={**os.environ, "ATTENTILE_STRESS_ROUNDS": str(often(1, 20))},
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def cases() -> list[tuple[str, Any]]:
    """Calls that take each way through the core: tiles, few rows, shared chunks, statistics, pages, rotary."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 200, 32), np.float32) for _ in range(3))
    long_k, long_v = (rng.standard_normal((1, 1, 9000, 32), np.float32) for _ in range(2))
    x, few = rng.standard_normal((2, 8, 600, 64), np.float32), rng.standard_normal((1, 1, 2, 32), np.float32)
    mask = rng.random((200, 200)) < 0.5
    cache = KVCache(1, 2, 32)
    cache.append(k, v)
    return [
        ("tiles", lambda: attention(q, k, v, num_threads=2)),
        ("mask", lambda: attention(q, k, v, mask=mask, causal=True, return_weights=True, num_threads=3).weights),
        ("few rows", lambda: attention(few, long_k, long_v, num_threads=2)),
        ("statistics", lambda: attentile.attention_stats(q, k, v, num_threads=2).entropy),
        ("pages", lambda: cache.attend(q[:, :, :3], num_threads=2)),
        ("rotary", lambda: rotary_embedding(x, 5)),
    ]


# ---- the pool ----


@pytest.mark.skipif(not (sys.platform.startswith("linux") and shutil.which("cc")), reason="needs a C compiler on Linux")
@pytest.mark.skipif(not KERNELS.exists(), reason="the sources are not beside the tests")
def test_the_pool_alone(tmp_path):
    """Tiny regions, 16 callers, nested calls, signals, growing scratch and forks (tests/fuzz/pool_stress.c)."""
    sources = [str(HERE / "fuzz" / "pool_stress.c"), str(KERNELS / "pool.c")]
    program = tmp_path / "pool_stress"
    command = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-I", str(KERNELS), *sources]
    subprocess.run([*command, "-o", str(program), "-pthread"], check=True, timeout=120)
    done = subprocess.run(
        [program, str(often(10_000, 1_000_000))], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all right" in done.stdout


def test_many_small_calls_on_two_threads(compiled):
    """Just above the size from which a call wakes a second thread."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 16, 64, 32), np.float32) for _ in range(3))
    assert explain(q, k, v, num_threads=2).threads == 2
    want = attention(q, k, v, num_threads=1)
    out = np.empty_like(want)
    for _ in range(often(1500, 200_000)):
        out[...] = np.nan
        attention(q, k, v, out=out, num_threads=2)
        assert (out == want).all()


def test_sixteen_callers_with_exceptions_between(compiled):
    """Every caller gets the serial results, whoever holds the pool, and a refused call leaves nothing behind."""
    want = {name: call() for name, call in cases()}
    shared, failed, start = cases(), [], threading.Barrier(16)
    q = np.ones((1, 3, 4, 8), np.float32)

    def work(number: int) -> None:
        start.wait()
        for turn in range(often(6, 300)):
            name, call = shared[(number + turn) % len(shared)]
            if not np.array_equal(call(), want[name]):
                failed.append(name)
            try:
                attention(q, q[:, :2], q[:, :2])
            except ValueError as error:
                if "multiple of the number of k heads" not in str(error):
                    failed.append(str(error))
            else:
                failed.append("not refused")

    before = threading.active_count()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert threading.active_count() == before


CACHE = """
import os, sys, threading, time
import numpy as np
from attentile import KVCache
sys.setswitchinterval(1e-5)
refused, done, failed = {}, {}, []

def counted(call, *arguments):  # a thread that comes too late is told so, or that what it asks for is gone
    try:
        result = call(*arguments)
    except (RuntimeError, ValueError) as error:
        text = str(error)
        known = ("this cache is ", "must lie between", "cannot go back to", "the window has dropped", "would hold")
        assert text.startswith("KVCache.") and any(part in text for part in known), text
        refused[call.__name__] = refused.get(call.__name__, 0) + 1
    else:
        done[call.__name__] = done.get(call.__name__, 0) + 1
        return result

def live(cache, seed, until):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 2, 300, 64), dtype=np.float32)
    try:
        while time.monotonic() < until:
            n = int(rng.choice([1, 1, 1, 17, 60, 300]))
            kind = rng.integers(0, 8)
            if kind < 3:
                counted(cache.append, x[:, :, :n], x[:, :, :n])
            elif kind < 5:
                found = counted(cache.attend, x[:, :, : min(n, 3)])
                assert found is None or np.isfinite(found).all()
            elif kind == 5:
                counted(cache.truncate, max(cache.length - n, 0))
            elif kind == 6:
                counted(cache.reorder, rng.integers(0, 2, 2))
            else:
                twin = counted(cache.fork)
                if twin is not None:  # this thread's own: nothing is refused, and no token is torn
                    if cache.capacity is None:
                        twin.append(x[:, :, :n], x[:, :, :n])
                    assert (twin.keys() == twin.values()).all()
            if cache.length > 20000:
                counted(cache.truncate, 0)
    except BaseException as error:
        failed.append(error)
        raise

def check(cache):
    pool, places = cache.held.pages.pool, {}
    pool._settle()
    for page in cache.held.pages.table[cache.held.pages.table != 0].tolist():
        places[page] = places.get(page, 0) + 1
    assert places == pool._references and not places.keys() & set(pool._free)
    assert (cache.keys() == cache.values()).all()
    cache.truncate(0)  # nobody has left the guard closed

options = [{}, {"window": (100, 0), "sink_tokens": 3}, {"capacity": 2000}]
for turn in range(3 * int(os.environ["ATTENTILE_STRESS_ROUNDS"])):
    cache = KVCache(2, 2, 64, **options[turn % 3])
    until = time.monotonic() + 1
    threads = [threading.Thread(target=live, args=(cache, 10 * turn + n, until)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    check(cache)
assert min(done.values()) > 5 and sum(refused.values()) > 5, (done, refused)
print(done, refused)
"""


def test_four_threads_at_one_cache(compiled):
    finished(CACHE)


# ---- signals ----


@needs_timer
def test_handlers_run_between_calls_and_change_nothing(compiled):
    """A signal every half millisecond: system calls of the pool are interrupted, handlers run in Python."""
    seen: list[bool] = []
    before = signal.signal(
        signal.SIGALRM, lambda *_: seen.append(threading.current_thread() is threading.main_thread())
    )
    want = {name: call() for name, call in cases()}
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(often(10, 2000)):
            for name, call in cases():
                np.testing.assert_array_equal(call(), want[name])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) > 10
    assert all(seen)


INTERRUPTED = """
import os, random, signal, sys
import numpy as np
from attentile import KVCache, attention
rng, r = np.random.default_rng(0), random.Random(0)
q, k, v = (rng.standard_normal((1, 4, 200, 32), np.float32) for _ in range(3))
want, interrupts, armed = attention(q, k, v), 0, False

def ignored(report):  # an interrupt inside a __del__, which nobody can catch
    if report.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(report)

sys.unraisablehook = ignored

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for turn in range(150 * int(os.environ["ATTENTILE_STRESS_ROUNDS"])):
    cache = KVCache(1, 4, 32, window=(40, 0), sink_tokens=3)
    twin = cache.fork()
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, r.uniform(1e-5, 4e-3))
        for _ in range(300):  # an interrupt that strikes inside a __del__ is swallowed there
            attention(q, k, v, num_threads=2)
            for one in (cache, twin):
                one.append(k, v)
                one.attend(q[:, :, :2], num_threads=2)
            cache.truncate(cache.length - 1)
            cache.reorder([0])
            twin = cache.fork()
    except KeyboardInterrupt:
        interrupts += 1
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert (attention(q, k, v, num_threads=2) == want).all()
    for one in (cache, twin):  # whatever it lost: no crash
        try:
            one.attend(q[:, :, :2])
        except ValueError as error:
            assert "KVCache.attend: " in str(error)
assert interrupts > 100, interrupts
"""


@needs_timer
def test_keyboard_interrupts_leave_calls_right_and_caches_alive(compiled):
    finished(INTERRUPTED)


# ---- processes ----

FORKS = """
import os, signal, sys, threading
import numpy as np
from attentile import KVCache, attention
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 4, 300, 32), np.float32) for _ in range(3))
want, cache, stop = attention(q, k, v, num_threads=2), KVCache(1, 4, 32), False
cache.append(k, v)
expected = cache.attend(q[:, :, :1])

def busy():
    while not stop:
        attention(q, k, v, num_threads=2)

def growing():
    while not stop:
        twin = cache.fork()
        twin.append(k, v)

threads = [threading.Thread(target=body) for body in (busy, growing)]
for thread in threads:
    thread.start()
codes = []
for n in range(25 * int(os.environ["ATTENTILE_STRESS_ROUNDS"])):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        own = cache.fork()
        own.append(k, v)
        right = (attention(q, k, v, num_threads=2) == want).all() and own.length == 600
        os._exit(0 if right and (cache.attend(q[:, :, :1]) == expected).all() else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop = True
for thread in threads:
    thread.join()
assert not any(codes), codes
"""


@needs_fork
def test_forks_in_the_middle_of_calls_of_other_threads(compiled):
    if sys.version_info >= (3, 12):
        pytest.skip(
            "Python warns of every fork beside threads from 3.12 on; tests/fuzz/pool_stress.c does the same in C"
        )
    finished(FORKS)


RUNNING = """
import sys, threading, time, os
import numpy as np
from attentile import attention, rotary_embedding
q = np.ones((1, 4, 1500, 64), np.float32)
def work():
    while True:
        attention(q, q, q, num_threads=2)
        rotary_embedding(q)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
print("out", flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)", "raise SystemExit", ""])
def test_the_interpreter_ends_while_calls_run(compiled, ending):
    for _ in range(often(1, 20)):
        assert finished(RUNNING.format(ending=ending)) == "out\n"


SUBINTERPRETER = """
import sys
import numpy as np
import attentile
try:
    import _interpreters as interpreters
    made, run = interpreters.create("legacy"), interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    made, run = interpreters.create(isolated=False), interpreters.run_string
code = '''
try:
    import attentile
except ImportError as error:
    print("ImportError:", error, flush=True)
else:
    print("imported", flush=True)
'''
run(made, code)
interpreters.destroy(made)
x = np.ones((2, 3, 4))
print(attentile.attention(x, x, x).sum())
"""


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="subinterpreters are CPython's")
def test_a_second_interpreter_is_refused_with_an_import_error(compiled):
    """NumPy refuses it before the core is asked; the first interpreter goes on."""
    lines = finished(SUBINTERPRETER).splitlines()
    assert lines[0].startswith("ImportError: ")
    assert len(lines[0]) > 30
    assert lines[-1] == "24.0"
