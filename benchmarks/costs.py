"""What a mask or a score change costs: each form against its yardstick, in turns, one thread by default.

    python benchmarks/costs.py [--threads N] [--rounds N] [--only NAME]

A cost of 1.00 is free, below 1 the form saves work. The bar is what the project asks of itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import attentile as at

rng = np.random.default_rng(0)


@dataclass
class Cost:
    """Two calls whose times are compared."""

    name: str
    form: Callable[[], object]
    yardstick: Callable[[], object]
    bar: float


def qkv(heads: int, length: int, width: int = 64) -> list[Any]:
    return list(rng.standard_normal((3, 1, heads, length, width), dtype=np.float32))


def side_by_side(arrays: list[Any]) -> list[Any]:
    """The same arrays with a token's heads one after the other, as projections give them."""
    return [array.swapaxes(1, 2).copy().swapaxes(1, 2) for array in arrays]


def weights_in_numpy(q: Any, k: Any, v: Any) -> object:
    """The statistics of attention_stats from the returned weights."""
    w = at.attention(q, k, v, return_weights=True).weights
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(w > 0, w * np.log(w), 0).sum(axis=-1)
    top = np.argpartition(-w, 8, axis=-1)[..., :8]
    return entropy, w.max(axis=-1), np.take_along_axis(w, top, axis=-1), w.sum(axis=-2)


def top(arrays: list[Any], count: int) -> object:
    """The strongest keys of each row."""
    return at.attention_stats(*arrays, which="top_k", top_k=count)


def argsorted(arrays: list[Any], count: int) -> object:
    """The same from the returned weights."""
    w = at.attention(*arrays, return_weights=True).weights
    order = np.argsort(-w, axis=-1)[..., :count]
    return order, np.take_along_axis(w, order, axis=-1)


def run(arrays: list[Any], **options: Any) -> Callable[[], object]:
    """A call of attention()."""
    return lambda: at.attention(*arrays, **options)


def peaked(kind: str, arrays: list[Any]) -> list[Cost]:
    """Rows whose weight lies on a few keys, nearly all others having tiny ones; of one row a cache's step too."""
    heads, rows, keys = arrays[0].shape[1], arrays[0].shape[2], arrays[1].shape[2]
    causal: dict[str, Any] = {"causal": True, "q_start": keys - rows}
    slopes = at.alibi_slopes(heads)
    ordered = run(arrays, **causal)
    found = [
        Cost(f"scale=4 / default, {kind}", run(arrays, scale=4.0), run(arrays), 1.03),
        Cost(f"scale=4 / default, causal, {kind}", run(arrays, scale=4.0, **causal), ordered, 1.03),
        Cost(f"ALiBi / none, causal, {kind}", run(arrays, alibi_slopes=slopes, **causal), ordered, 1.08),
    ]
    if rows == 1:
        q, k, v = arrays
        cache = at.KVCache(1, heads, q.shape[-1], dtype=q.dtype)
        cache.append(k, v)

        def step() -> object:
            return cache.attend(q)

        found += [
            Cost(f"scale=4 / default, cache, {kind}", lambda: cache.attend(q, scale=4.0), step, 1.03),
            Cost(f"ALiBi / none, cache, {kind}", lambda: cache.attend(q, alibi_slopes=slopes), step, 1.08),
        ]
    return found


def costs() -> list[Cost]:
    """Every comparison: the mask and score forms, dense masks that say what a structural form says, statistics."""
    x, heads, length = qkv(12, 1024), 12, 1024
    y, long = qkv(1, 8192), 8192
    s, z, w = qkv(4, 512), qkv(1, 4096), qkv(8, 1024, 128)
    row = [array[:, :, -n:] for n, array in zip((1, 4096, 4096), qkv(8, 4096), strict=True)]
    i, j = np.arange(length)[:, None], np.arange(length)
    padding, band = np.broadcast_to(j < 600, (length, length)), (j <= i) & (j >= i - 100)
    documents = at.segment_ids([512] * 16)

    bias = rng.standard_normal((heads, length, length), np.float32)
    half = rng.random((length, length)) < 0.5

    return [
        Cost("heads side by side, d=64 / apart", run(side_by_side(x)), run(x), 1.15),
        Cost("heads side by side, d=128 / apart", run(side_by_side(w)), run(w), 1.15),
        Cost("dense random mask / none", run(x, mask=half), run(x), 1.08),
        Cost("dense float bias (H, L, S) / none", run(x, bias=bias), run(x), 1.12),
        Cost("dense float bias (L, S) / none", run(x, bias=bias[0]), run(x), 1.12),
        Cost("window 256 at 8192 / causal", run(y, causal=True, window=(255, None)), run(y, causal=True), 0.10),
        Cost("dense causal mask / causal=True", run(x, mask=j <= i), run(x, causal=True), 1.15),
        Cost("dense band mask / window", run(x, mask=band), run(x, causal=True, window=(100, None)), 1.15),
        Cost("dense padding mask / key_lengths", run(x, mask=padding), run(x, key_lengths=600), 1.15),
        Cost("16 segments in 8192 / one", run(y, segments=documents), run(y, segments=np.zeros(long, int)), 0.09),
        Cost("softcap / none", run(x, softcap=30.0), run(x), 1.25),
        Cost("sinks / none", run(x, sinks=np.ones(heads)), run(x), 1.02),
        Cost("ALiBi / none", run(x, alibi_slopes=at.alibi_slopes(heads)), run(x), 1.05),
        Cost("16 of 512 top_k / argsort of weights", lambda: top(s, 16), lambda: argsorted(s, 16), 0.6),
        Cost("256 of 512 top_k / argsort of weights", lambda: top(s, 256), lambda: argsorted(s, 256), 1.0),
        Cost("4096 of 4096 top_k / argsort of weights", lambda: top(z, 4096), lambda: argsorted(z, 4096), 1.0),
        Cost("statistics / from the weights", lambda: at.attention_stats(*z), lambda: weights_in_numpy(*z), 1 / 3),
        *peaked("float32", x),
        *peaked("float64", [array.astype(np.float64) for array in x]),
        *peaked("a row, float32", row),
        *peaked("a row, float64", [array.astype(np.float64) for array in row]),
    ]  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(cost: Cost, rounds: int) -> float:
    """Median over the rounds of form / yardstick, each pair timed one right after the other."""
    cost.form(), cost.yardstick()
    return statistics.median(seconds(cost.form) / seconds(cost.yardstick) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="only the lines that contain this")
    arguments = parser.parse_args()
    print(f"{'cost of':42} {'measured':>8} {'bar':>6}")
    with at.num_threads(arguments.threads):
        for cost in costs():
            if arguments.only in cost.name:
                print(f"{cost.name:42} {measure(cost, arguments.rounds):8.3f} {cost.bar:6.2f}", flush=True)


if __name__ == "__main__":
    main()
