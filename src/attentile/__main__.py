"""python -m attentile: a demonstration, a self-check and a speed table for this machine; also `bench` and `info`."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import attentile as at

from . import speed
from .runtime import backend


def _show(title: str, rows: Iterable[Any]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  ", "  ".join(f"{value:7.4f}" for value in row))


def demonstrate() -> None:
    """The four textbook functions on five tokens of width 8."""
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((5, 8)), rng.standard_normal((4, 8, 8)) / np.sqrt(8)
    print("Five tokens of width 8, drawn with seed 0")
    encoding = at.positional_encoding(5, 8)
    _show(f"positional_encoding(5, 8) -> {encoding.shape} {encoding.dtype}, row 1", encoding[1:2])
    out, shares = at.self_attention(x, x, x, 8)
    title = f"self_attention(Q, K, V, d_k=8) -> {out.shape} and weights {shares.shape}, first rows"
    _show(title, (out[0], shares[0]))
    _, shares = at.causal_attention(x, x, x, 8)
    triangle = (row[: i + 1] for i, row in enumerate(shares))
    _show("causal_attention: each token sees itself and those before it; its weights", triangle)
    out = at.multi_head_attention(x + encoding, 8, 2, *weights)
    _show(f"multi_head_attention with 2 heads -> {out.shape}, first row", out[:1])


def self_check() -> bool:
    """The kernels in use against the NumPy twin, over sizes around the tile edges and every kind of mask."""
    if backend.active is None:
        print("\nself-check: the NumPy backend is in use, nothing to compare")
        return True
    rng, errors = np.random.default_rng(1), []
    sizes = ((1, 1, 1), (5, 300, 64), (49, 257, 33), (130, 130, 80))
    for dtype, (queries, keys, width) in itertools.product((np.float32, np.float64), sizes):
        q, k, v = (rng.standard_normal((2, 4, n, width)).astype(dtype) for n in (queries, keys, keys))
        option: dict[str, Any]
        for option in (
            {},
            {"mask": rng.random((queries, keys)) < 0.5},
            {"bias": rng.standard_normal((4, 1, keys))},
            {"causal": "lower_right"},
            {"key_lengths": [keys, keys // 2]},
        ):
            ours = at.attention(q, k, v, **option)
            with at.use_backend("numpy"):
                error = np.abs(ours - at.attention(q, k, v, **option)).max()
            errors.append(error / np.finfo(ours.dtype).eps)
    worst = np.max(errors)  # NaN if there is one
    good = bool(worst < 64)
    found = f"{len(errors)} cases, largest difference {worst:.1f} units of rounding"
    print(f"\nself-check against NumPy: {found}: {'ok' if good else 'FAILED'}")
    return good


def _run_demonstration() -> int:
    demonstrate()
    good = self_check()
    threads = at.get_num_threads()
    isa = at.show_config(as_dict=True)["isa"]
    print(f"\nSpeed here: {isa}, {threads} thread(s); the FMA peak is measured in this run\n")
    speed.print_rows([speed.measure(problem, threads, 0.05) for problem in (*speed.TEXTBOOK, *speed.SHAPES)])
    return int(not good)


def _run_bench(arguments: argparse.Namespace) -> int:
    threads = arguments.threads or at.get_num_threads()
    asked = [replace(shape, dtype=arguments.dtype, causal=arguments.causal) for shape in arguments.shape]
    rows = [speed.measure(shape, threads, arguments.seconds) for shape in asked or speed.SHAPES]
    text = json.dumps({"config": at.show_config(as_dict=True), "rows": [asdict(row) for row in rows]}, indent=1)
    if arguments.json == "-":
        print(text)
        return 0
    if arguments.json:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
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
    bench.add_argument("--causal", action="store_true", help="a query sees keys up to its own position; needs L = S")
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
