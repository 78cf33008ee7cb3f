"""python -m attentile: a demonstration, a self-check and a speed table for this machine; also `bench` and `info`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attentile as at

from . import speed
from .runtime import backend

Array = NDArray[Any]


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
    if backend.active is None:
        print("\nself-check: the NumPy backend is in use, nothing to compare")
        return True
    rng, worst, cases = np.random.default_rng(1), 0.0, 0
    for dtype in (np.float32, np.float64):
        for queries, keys, width in ((1, 1, 1), (5, 300, 64), (49, 257, 33), (130, 130, 80)):
            q, k, v = (rng.standard_normal((2, 4, n, width)).astype(dtype) for n in (queries, keys, keys))
            mask = rng.random((queries, keys)) < 0.5
            bias = rng.standard_normal((4, 1, keys))
            options: list[dict[str, Any]] = [
                {},
                {"mask": mask},
                {"bias": bias},
                {"causal": "lower_right"},
                {"key_lengths": [keys, keys // 2]},
            ]
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
    speed.print_rows([speed.measure(problem, threads, 0.05) for problem in (*speed.TEXTBOOK, *speed.SHAPES)])
    return 0 if good else 1


def _run_bench(arguments: argparse.Namespace) -> int:
    threads = arguments.threads or at.get_num_threads()
    asked = [replace(shape, dtype=arguments.dtype, causal=arguments.causal) for shape in arguments.shape]
    shapes = asked or speed.SHAPES
    rows = [speed.measure(shape, threads, arguments.seconds) for shape in shapes]
    if arguments.json:
        report = {"config": at.show_config(as_dict=True), "rows": [asdict(row) for row in rows]}
        text = json.dumps(report, indent=1)
        if arguments.json == "-":
            print(text)
        else:
            with open(arguments.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    if arguments.json != "-":
        speed.print_rows(rows)
    return 0


def _shape(text: str) -> speed.Shape:
    """B,Hq,Hkv,L,S,D"""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 6 or min(numbers) < 1 or numbers[1] % numbers[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,Hq,Hkv,L,S,D (Hq a multiple of Hkv)")
    return speed.Shape(*numbers[:6])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attentile", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    bench = commands.add_parser("bench", help="time shapes: ms, GFLOP/s, %% of the FMA peak, GB/s, speed-up over NumPy")
    bench.add_argument("--shape", type=_shape, action="append", default=[], metavar="B,Hq,Hkv,L,S,D", help="repeatable")
    bench.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default: float32")
    bench.add_argument("--causal", action="store_true", help="a query sees the keys up to its own; needs L = S")
    bench.add_argument("--threads", type=int, help="default: as show_config() says")
    bench.add_argument("--seconds", type=float, default=0.5, help="per shape and candidate (default 0.5)")
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
