"""What the pool's threads do and leave alone, seen from outside: signals, processors, arithmetic, who is woken."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from attentile import attention, num_threads, rotary_embedding

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")

COMMON = """
import json, os, signal, sys, threading, time
import numpy as np
from pathlib import Path
import attentile

q = np.ones((1, 8, 512, 64), np.float32)

def tasks():
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}

def status(task, key):
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(key + ":"))

def workers_of(threads):
    before = tasks()
    attentile.attention(q, q, q, num_threads=threads)
    return sorted(tasks() - before)

def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def places(workers, wanted):
    # a worker that the system has not let run yet has not moved
    for _ in range(500):
        found = [sorted(os.sched_getaffinity(task)) for task in workers]
        if found == [wanted] * len(workers):
            break
        time.sleep(0.01)
    return found
"""


def told_by(code: str) -> object:
    """What the code prints as JSON, in a Python of its own."""
    clean = {name: x for name, x in os.environ.items() if not name.startswith(("ATTENTILE_NUM", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code], env=clean, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_proc
def test_workers_take_no_signals_but_those_of_their_own_faults(compiled):
    """A fault whose signal is blocked would kill the process before faulthandler could say where."""
    code = """
faults = [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT]
others = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGPROF, signal.SIGUSR1]
def blocked(task, which):
    return [bool(int(status(task, "SigBlk"), 16) >> (number - 1) & 1) for number in which]
print(json.dumps([[blocked(task, faults), blocked(task, others)] for task in workers_of(3)]))
"""
    told = told_by(code)
    assert told == [[[False] * 7, [True] * 6]] * 2


@needs_proc
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_a_caller_on_one_processor_does_not_put_the_workers_there(compiled):
    """Nor does it make one thread the default of the process."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    code = """
found = []
def pinned():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found.extend(workers_of(3))
    found.append(attentile.get_num_threads())
    found.append(attentile.show_config(as_dict=True)["threads_why"])
in_a_thread(pinned)
*workers, default, why = found
of_process = sorted(os.sched_getaffinity(0))
print(json.dumps([places(workers, of_process), of_process, default, why]))
"""
    of_workers, of_process, default, why = told_by(code)
    assert of_workers == [of_process] * 2
    assert default == len(of_process) or "quota" in why


@needs_proc
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_a_first_thread_on_one_processor_does_not_put_the_workers_there(compiled):
    """As OpenMP's OMP_PROC_BIND does to it."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    code = """
every, found = os.sched_getaffinity(0), []
os.sched_setaffinity(0, {min(every)})
def free():
    os.sched_setaffinity(0, every)
    found.extend(workers_of(3))
in_a_thread(free)
print(json.dumps([places(found, sorted(every)), sorted(every)]))
"""
    of_workers, every = told_by(code)
    assert of_workers == [every] * 2


@needs_proc
def test_a_call_for_few_threads_wakes_no_others(compiled):
    """After one call with many threads, the workers that later calls have no work for sleep on."""
    code = """
workers = workers_of(9)
time.sleep(0.2)
before = [int(status(task, "voluntary_ctxt_switches")) for task in workers]
for _ in range(50):
    attentile.attention(q, q, q, num_threads=2)
    time.sleep(0.002)  # long enough to fall asleep in
print(json.dumps([int(status(task, "voluntary_ctxt_switches")) - n for task, n in zip(workers, before)]))
"""
    switches = sorted(told_by(code))
    assert switches[:-1] == [0] * 7
    assert switches[-1] > 0


# ---- arithmetic ----

UPWARD = {"x86_64": 0x800, "AMD64": 0x800, "aarch64": 0x400000}.get(platform.machine())


@pytest.fixture
def rounding_upward():
    """A thread that rounds upward, as some numerical code has it for a while: run(function) runs there."""
    if UPWARD is None or sys.platform != "linux":
        pytest.skip("the value of FE_UPWARD is known for Linux on x86-64 and AArch64 only")
    libm = ctypes.CDLL("libm.so.6" if platform.libc_ver()[0] == "glibc" else None)

    def run(function):
        found = []

        def upward():
            before = libm.fegetround()
            assert libm.fesetround(UPWARD) == 0
            try:
                found.append(function())
            finally:
                libm.fesetround(before)

        thread = threading.Thread(target=upward)
        thread.start()
        thread.join()
        return found[0]

    return run


def test_workers_round_as_their_caller_does(compiled, rounding_upward):
    """The number of threads changes no bit, whatever the caller's arithmetic is and whatever it was before."""
    q, k, v = np.random.default_rng(5).standard_normal((3, 1, 16, 300, 32), np.float32)
    x = np.random.default_rng(6).standard_normal((4, 16, 600, 64), np.float32)
    nearest = attention(q, k, v, num_threads=3)  # starts the workers
    upward = rounding_upward(lambda: attention(q, k, v, num_threads=1))
    assert (upward != nearest).any()

    def turn(threads):
        with num_threads(threads):
            return rotary_embedding(x, 3)

    turned = rounding_upward(lambda: turn(1))
    for _ in range(20):
        np.testing.assert_array_equal(rounding_upward(lambda: attention(q, k, v, num_threads=3)), upward)
        np.testing.assert_array_equal(attention(q, k, v, num_threads=3), nearest)
        np.testing.assert_array_equal(rounding_upward(lambda: turn(3)), turned)
        time.sleep(0.001)
