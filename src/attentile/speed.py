"""The speed table of `python -m attentile`: ours against the formula in NumPy and against the library's NumPy twin.

The twin stands in for the kernels where there is no compiler. The speed-up is over the faster of the two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import attentile as at

from . import formulas
from .runtime import backend

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """One attention problem: batch, query and key heads, queries, keys, width."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    dtype: str = "float32"
    causal: bool = False

    def flops(self) -> float:
        """FLOPs of the useful work: two products of 2 L S D each per head, half of them if causal."""
        share = 0.5 if self.causal else 1.0
        return share * 4 * self.batch * self.heads * self.queries * self.keys * self.width

    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.batch * self.kv_heads * self.keys * self.width * np.dtype(self.dtype).itemsize

    def calls(self) -> tuple[Call, Call]:
        """Ours and the formula, on the same arrays in every run."""
        rng = np.random.default_rng(0)
        rows = ((self.heads, self.queries), (self.kv_heads, self.keys), (self.kv_heads, self.keys))
        q, k, v = (rng.standard_normal((self.batch, *n, self.width)).astype(self.dtype) for n in rows)
        mask = np.tri(self.queries, self.keys, dtype=bool) if self.causal else None
        return partial(at.attention, q, k, v, causal=self.causal), partial(formulas.attention, q, k, v, mask)

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        name = f"{self.batch}x{self.heads}{kv} heads, {self.queries}x{self.keys}, d={self.width}"
        return name + (" causal" if self.causal else "") + (" fp64" if self.dtype == "float64" else "")


@dataclass(frozen=True)
class Textbook:
    """A call as in a textbook, float64: `multi_head_attention` if there are heads, `self_attention` otherwise."""

    rows: int
    width: int
    heads: int | None = None
    masked: bool = False
    dtype: str = "float64"

    def flops(self) -> float:
        """FLOPs of the two products of attention, and of the four projections of a layer."""
        projections = 8.0 * self.rows * self.width**2 if self.heads else 0.0
        return 4.0 * self.rows**2 * self.width + projections

    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.rows * self.width * np.dtype(self.dtype).itemsize

    def calls(self) -> tuple[Call, Call]:
        """Ours and the formula, on the same arrays in every run."""
        rng = np.random.default_rng(0)
        mask = np.tri(self.rows, dtype=int) if self.masked else None
        q, k, v = rng.standard_normal((3, self.rows, self.width))
        if self.heads is None:
            vectors = (q, k, v, self.width, mask)
            return partial(at.self_attention, *vectors), partial(formulas.self_attention, *vectors)
        weights = rng.standard_normal((4, self.width, self.width)) / np.sqrt(self.width)
        layer = (q, self.width, self.heads, *weights, mask)
        return partial(at.multi_head_attention, *layer), partial(formulas.multi_head_attention, *layer)

    def __str__(self) -> str:
        name = "multi_head_attention" if self.heads else "self_attention"
        heads = f", {self.heads} heads" if self.heads else ""
        return f"{name} {self.rows}x{self.width}{heads}{' masked' if self.masked else ''} fp64"


TEXTBOOK = (
    Textbook(5, 64),
    Textbook(5, 64, masked=True),
    Textbook(64, 64),
    Textbook(64, 64, masked=True),
    Textbook(64, 64, heads=4),
)

SHAPES = (
    Shape(1, 12, 12, 128, 128, 64),
    Shape(1, 12, 12, 512, 512, 64),
    Shape(1, 12, 12, 1024, 1024, 64, causal=True),
    Shape(1, 16, 4, 1024, 1024, 128, causal=True),
    Shape(1, 8, 8, 512, 512, 64, dtype="float64"),
)


@dataclass
class Row:
    """One measured line of the speed table."""

    shape: Shape | Textbook
    threads: int
    ms: float
    gflops: float
    peak_percent: float | None
    gbytes_per_second: float
    formula_ms: float
    twin_ms: float
    speedup: float


def _median_seconds(call: Call, seconds: float) -> float:
    """Median time of a call over about this many seconds, at least three: one slow first call does not matter."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fma_peak(dtype: str, threads: int) -> float | None:
    """FLOPs per second of independent FMAs on one core, times threads; None without the compiled core."""
    core = backend.active
    if core is None:
        return None
    best, size = 0.0, np.dtype(dtype).itemsize
    for _ in range(30):
        start = time.perf_counter()
        flops = core.fma_rounds(size, 20000)
        best = max(best, flops / (time.perf_counter() - start))
    return best * threads


def measure(problem: Shape | Textbook, threads: int, seconds: float) -> Row:
    """Times ours, the formula and the twin on one problem, with the FMA peak measured in the same run."""
    ours, formula = problem.calls()
    with at.num_threads(threads):
        peak = fma_peak(problem.dtype, threads)
        own = _median_seconds(ours, seconds)
        plain = _median_seconds(formula, seconds)
        with at.use_backend("numpy"):
            twin = _median_seconds(ours, seconds)
    rate, bandwidth = problem.flops() / own, problem.kv_bytes() / own
    percent = None if peak is None else 100 * rate / peak
    speedup = min(plain, twin) / own
    return Row(problem, threads, own * 1e3, rate / 1e9, percent, bandwidth / 1e9, plain * 1e3, twin * 1e3, speedup)


def print_rows(rows: list[Row]) -> None:
    """The speed table."""
    print(f"{'problem':41}        ms  GFLOP/s  % peak   GB/s  formula ms    twin ms  speed-up")
    for row in rows:
        peak = "" if row.peak_percent is None else f"{row.peak_percent:.0f}"
        print(
            f"{row.shape!s:41} {row.ms:9.4f} {row.gflops:8.1f} {peak:>7} {row.gbytes_per_second:6.1f} "
            f"{row.formula_ms:11.4f} {row.twin_ms:10.4f} {row.speedup:8.2f}x"
        )
    print("formula: plain NumPy as people write it; twin: this library without its kernels")
    print("speed-up: over the faster of the two")
