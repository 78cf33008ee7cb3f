"""Decode steps against a plain reading of the same bytes: what share of the memory's speed reaches the result.

    python benchmarks/bandwidth.py [--threads N] [--rounds N]

"read" is a loop of loads over the very memory that the step reads, on the library's own threads, and takes turns with
it; the medians count. "KVCache" and "arrays" are `KVCache.attend` and `attention`, with one query row for each head.
Bars are those the project asks of itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import attentile as at
from attentile.runtime import backend


@dataclass(frozen=True)
class Case:
    """A decode step of one batch item; bars in percent of the plain reading."""

    heads: int
    kv_heads: int
    keys: int
    width: int
    cache_bar: int
    arrays_bar: int

    @property
    def nbytes(self) -> int:
        return 2 * self.kv_heads * self.keys * self.width * 4


CASES = (
    Case(12, 12, 1024, 64, 80, 70),  # 6 MiB: GPT-2
    Case(32, 8, 4096, 128, 80, 75),  # 32 MiB: Llama with grouped heads
    Case(16, 16, 32768, 64, 85, 80),  # 256 MiB: outside every cache
)


def candidates(case: Case, threads: int) -> dict[str, dict[str, Callable[[], object]]]:
    """For each way to store keys and values, the step and a plain reading of the same memory."""
    rng = np.random.default_rng(0)
    both = rng.random((2, 1, case.kv_heads, case.keys, case.width), np.float32) - np.float32(0.5)
    q = rng.random((1, case.heads, 1, case.width), np.float32) - np.float32(0.5)
    cache = at.KVCache(1, case.kv_heads, case.width, case.keys)  # with a capacity, its pages are one piece of memory
    cache.append(*both)
    core, pool = backend.active, cache.held.pages.pool
    if core is None:
        raise SystemExit("bandwidth.py measures the compiled core, and there is none")
    if not np.array_equal(cache.attend(q), at.attention(q, *both)):
        raise SystemExit("the cache and the arrays give different results")
    slab = pool.page(int(cache.held.pages.table.min())).base[64:]
    pages, arrays = slab[: both.nbytes // 64 * 64 - 64].view(np.float32), both.reshape(-1)
    return {
        "KVCache": {"read": lambda: core.read_plainly(pages, threads), "step": lambda: cache.attend(q)},
        "arrays": {"read": lambda: core.read_plainly(arrays, threads), "step": lambda: at.attention(q, *both)},
    }


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=at.get_num_threads())
    parser.add_argument("--rounds", type=int, default=0, help="default: about two seconds of each case")
    options = parser.parse_args()
    at.set_num_threads(options.threads)
    print(f"{options.threads} threads, {at.show_config(as_dict=True)['isa']}")
    print(f"{'keys and values':32}", end="")
    print("".join(f"{'read GB/s':>12}{name:>10}{'share':>7}{'bar':>6}" for name in ("KVCache", "arrays")))
    for case in CASES:
        rounds = options.rounds or max(20, min(3000, int(4e10 / case.nbytes / 2)))
        row = f"{f'{case.kv_heads} x {case.keys} x {case.width}, {case.heads} query heads':32}"
        for (_, calls), bar in zip(
            candidates(case, options.threads).items(), (case.cache_bar, case.arrays_bar), strict=True
        ):
            speed = {name: case.nbytes / seconds / 1e9 for name, seconds in medians(calls, rounds).items()}
            row += f"{speed['read']:12.1f}{speed['step']:10.1f}{100 * speed['step'] / speed['read']:5.0f} %{bar:4d} %"
        print(row, flush=True)


if __name__ == "__main__":
    main()
