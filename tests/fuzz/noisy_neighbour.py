"""Latency of a call of about 0.3 ms alone and beside processes that want every CPU: a report, never a failure.

The goal: the 99th percentile beside the neighbours is at most 3 times the median, plus one time slice of the scheduler.
A pool whose callers wait for preempted workers, or whose workers spin, misses it by far.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from attentile import attention

BURN = "while True: pass"
CALLS = 3000


def slice_ms() -> float:
    """One time slice as the kernel tells it, else what is usual."""
    file = Path("/sys/kernel/debug/sched/base_slice_ns")
    try:
        return int(file.read_text()) / 1e6
    except (OSError, ValueError):
        return 4.0


def latencies(call: Any, calls: int) -> Any:
    taken = np.empty(calls)
    for n in range(calls):
        start = time.perf_counter()
        call()
        taken[n] = time.perf_counter() - start
    return 1e3 * taken


def main() -> None:
    rng = np.random.default_rng(0)
    rows = 64
    while True:  # the size that takes about 0.3 ms on two threads here
        q, k, v = (rng.standard_normal((1, 4, rows, 64), np.float32) for _ in range(3))
        out = np.empty_like(q)

        def call(q: Any = q, k: Any = k, v: Any = v, out: Any = out) -> None:
            attention(q, k, v, out=out, num_threads=2)

        if np.median(latencies(call, 50)) > 0.3 or rows > 4000:
            break
        rows += 32
    want = attention(q, k, v, num_threads=1)
    print(f"{rows} rows, 4 heads, width 64, 2 threads; slice {slice_ms():.1f} ms")
    for name, processes in (("alone", 0), ("beside neighbours", os.cpu_count() or 1)):
        burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(processes)]
        try:
            taken = latencies(call, CALLS)
        finally:
            for process in burning:
                process.kill()
                process.wait()
        assert (out == want).all()
        median, high = np.percentile(taken, [50, 99])
        goal = 3 * median + slice_ms()
        verdict = "met" if high <= goal else "missed"
        print(f"{name:18} median {median:6.3f} ms   99 % {high:7.3f} ms   goal {goal:7.3f} ms   {verdict}")


if __name__ == "__main__":
    main()
