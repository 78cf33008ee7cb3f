"""python -m attentile: a demonstration, a self-check and a speed table for this machine; also `bench` and `info`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attentile as at

from .runtime import config

Array = NDArray[Any]


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
        all_pairs = 4.0 * self.batch * self.heads * self.queries * self.keys * self.width
        return all_pairs / 2 if self.causal else all_pairs

    def arrays(self) -> tuple[Array, Array, Array]:
        rng = np.random.default_rng(0)
        queries, keys = (self.batch, self.heads, self.queries), (self.batch, self.kv_heads, self.keys)
        shapes = ((*queries, self.width), (*keys, self.width), (*keys, self.width))
        q, k, v = (rng.standard_normal(shape).astype(self.dtype) for shape in shapes)
        return q, k, v

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        name = f"{self.batch}x{self.heads}{kv} heads, {self.queries}x{self.keys}, d={self.width}"
        return name + (" causal" if self.causal else "") + (" fp64" if self.dtype == "float64" else "")


@dataclass
class Row:
    """One measured line of the speed table."""

    shape: Shape
    threads: int
    ms: float
    gflops: float
    peak_percent: float | None
    gbytes_per_second: float
    numpy_ms: float
    speedup: float


SHAPES = (
    Shape(1, 12, 12, 128, 128, 64),
    Shape(1, 12, 12, 512, 512, 64),
    Shape(1, 12, 12, 1024, 1024, 64, causal=True),
    Shape(1, 16, 4, 1024, 1024, 128, causal=True),
    Shape(1, 8, 8, 512, 512, 64, dtype="float64"),
)


# ---- measuring ----


def _median_seconds(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call over about this many seconds, at least three calls after one for warming up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fma_peak(dtype: str, threads: int) -> float | None:
    """FLOPs per second of independent FMAs on one core, times threads; None without the compiled core."""
    core = config.core()
    if core is None:
        return None
    best, size = 0.0, np.dtype(dtype).itemsize
    for _ in range(30):
        start = time.perf_counter()
        flops = core.fma_rounds(size, 20000)
        best = max(best, flops / (time.perf_counter() - start))
    return best * threads


def plain_numpy(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """Attention as everybody writes it first: the yardstick of the speed-up."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.dtype.type(q.shape[-1]))
    if causal:
        scores = np.where(np.tri(q.shape[2], k.shape[2], dtype=bool), scores, q.dtype.type(-1e9))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: Array = weights / weights.sum(axis=-1, keepdims=True) @ v
    return out


def measure(shape: Shape, threads: int, seconds: float) -> Row:
    """Times ours and plain NumPy on one shape, with the FMA peak measured in the same run."""
    q, k, v = shape.arrays()
    peak = fma_peak(shape.dtype, threads)
    ours = _median_seconds(lambda: at.attention(q, k, v, causal=shape.causal, num_threads=threads), seconds)
    numpys = _median_seconds(lambda: plain_numpy(q, k, v, shape.causal), seconds)
    rate = shape.flops() / ours
    return Row(
        shape, threads, ours * 1e3, rate / 1e9, None if peak is None else 100 * rate / peak,
        (k.nbytes + v.nbytes) / ours / 1e9, numpys * 1e3, numpys / ours,
    )  # fmt: skip


def print_rows(rows: list[Row]) -> None:
    """The speed table."""
    print(f"{'problem':44} {'ms':>9} {'GFLOP/s':>8} {'% peak':>7} {'GB/s':>6} {'NumPy ms':>9} {'speed-up':>9}")
    for row in rows:
        peak = "" if row.peak_percent is None else f"{row.peak_percent:.0f}"
        print(
            f"{row.shape!s:44} {row.ms:9.3f} {row.gflops:8.1f} {peak:>7} {row.gbytes_per_second:6.1f} "
            f"{row.numpy_ms:9.3f} {row.speedup:8.1f}x"
        )


# ---- the demonstration ----


def _row(values: Array) -> str:
    return "  ".join(f"{value:7.4f}" for value in values)


def demonstrate() -> None:
    """The four textbook functions on five tokens of width 8."""
    rng = np.random.default_rng(0)
    length, d_model, heads = 5, 8, 2
    x = rng.standard_normal((length, d_model))
    weights = rng.standard_normal((4, d_model, d_model)) / np.sqrt(d_model)
    print(f"Five tokens of width {d_model}, drawn with seed 0\n")
    encoding = at.positional_encoding(length, d_model)
    print(f"positional_encoding({length}, {d_model}) -> {encoding.shape} {encoding.dtype}, row 1")
    print("  ", _row(encoding[1]))
    output, attention_weights = at.self_attention(x, x, x, d_model)
    print(
        f"\nself_attention(Q, K, V, d_k={d_model}) -> {output.shape} and weights {attention_weights.shape}, first rows"
    )
    print("  ", _row(output[0]))
    print("  ", _row(attention_weights[0]))
    _, attention_weights = at.causal_attention(x, x, x, d_model)
    print("\ncausal_attention: each token sees itself and those before it; its weights")
    for i, row in enumerate(attention_weights):
        print("  ", _row(row[: i + 1]))
    output = at.multi_head_attention(x + encoding, d_model, heads, *weights)
    print(f"\nmulti_head_attention with {heads} heads -> {output.shape}, first row")
    print("  ", _row(output[0]))


def self_check() -> bool:
    """The kernels in use against the NumPy twin, over sizes around the tile edges and every kind of mask."""
    if config.core() is None:
        print("\nself-check: the NumPy backend is in use, nothing to compare")
        return True
    rng, worst, cases = np.random.default_rng(1), 0.0, 0
    for dtype in (np.float32, np.float64):
        for queries, keys, width in ((1, 1, 1), (5, 300, 64), (49, 257, 33), (130, 130, 80)):
            q, k, v = (rng.standard_normal((2, 4, n, width)).astype(dtype) for n in (queries, keys, keys))
            mask = rng.random((queries, keys)) < 0.5
            bias = rng.standard_normal((4, 1, keys))
            options: list[dict[str, Any]] = [
                {}, {"mask": mask}, {"bias": bias}, {"causal": "lower_right"}, {"key_lengths": [keys, keys // 2]},
            ]  # fmt: skip
            for option in options:
                ours = at.attention(q, k, v, **option)
                with at.use_backend("numpy"):
                    error = np.abs(ours - at.attention(q, k, v, **option)).max()
                worst, cases = max(worst, float(error / np.finfo(dtype).eps)), cases + 1
    good = worst < 64
    verdict = "ok" if good else "FAILED"
    print(f"\nself-check against NumPy: {cases} cases, largest difference {worst:.1f} units of rounding: {verdict}")
    return good


# ---- the command line ----


def _run_demonstration() -> int:
    demonstrate()
    good = self_check()
    threads = at.get_num_threads()
    shown = at.show_config(as_dict=True)
    print(f"\nSpeed here: {shown['isa']}, {threads} thread(s); the FMA peak is measured in this run\n")
    print_rows([measure(shape, threads, 0.15) for shape in SHAPES])
    return 0 if good else 1


def _run_bench(arguments: argparse.Namespace) -> int:
    threads = arguments.threads or at.get_num_threads()
    shapes = [replace(shape, dtype=arguments.dtype, causal=arguments.causal) for shape in arguments.shape] or list(
        SHAPES
    )
    rows = [measure(shape, threads, arguments.seconds) for shape in shapes]
    if arguments.json:
        report = {"config": at.show_config(as_dict=True), "rows": [asdict(row) for row in rows]}
        text = json.dumps(report, indent=1)
        if arguments.json == "-":
            print(text)
        else:
            with open(arguments.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    if arguments.json != "-":
        print_rows(rows)
    return 0


def _shape(text: str) -> Shape:
    """B,Hq,Hkv,L,S,D"""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 6 or min(numbers) < 1 or numbers[1] % numbers[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,Hq,Hkv,L,S,D (Hq a multiple of Hkv)")
    return Shape(*numbers[:6])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attentile", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    bench = commands.add_parser("bench", help="time shapes: ms, GFLOP/s, %% of the FMA peak, GB/s, against NumPy")
    bench.add_argument("--shape", type=_shape, action="append", default=[], metavar="B,Hq,Hkv,L,S,D", help="repeatable")
    bench.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default: float32")
    bench.add_argument("--causal", action="store_true", help="a query sees the keys up to its own; needs L = S")
    bench.add_argument("--threads", type=int, help="default: as show_config() says")
    bench.add_argument("--seconds", type=float, default=0.5, help="per shape and side (default 0.5)")
    bench.add_argument("--json", metavar="FILE", help="also write numbers and configuration; - for standard output")
    commands.add_parser("info", help="version, instruction set and why, threads and where from, build")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry of `python -m attentile` and of the `attentile` command."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "info":
        at.show_config()
        return 0
    if arguments.command == "bench":
        if arguments.causal and any(shape.queries != shape.keys for shape in arguments.shape):
            _parser().error("--causal needs L = S")
        return _run_bench(arguments)
    return _run_demonstration()


if __name__ == "__main__":
    sys.exit(main())
