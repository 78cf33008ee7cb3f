"""What a small call costs: every option of attention(), a cache's steps and the textbook functions, in microseconds.

    python benchmarks/calls.py [--rounds N] [--only NAME]

Arrays so small that a call is mostly the way to the kernels: (1, 4, 8, 16) float32, one thread. Each table names its
yardstick: the plain call, PyTorch's scaled_dot_product_attention with the same option (where torch is installed, in a
process of its own), a cache's plain step, the formula as people write it. Candidates take turns; medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

B, H, L, D = 1, 4, 8, 16
CALLS = 200  # in one go: some milliseconds
Case = Callable[[], object]

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, B, H, L, D), dtype=np.float32)
mask = np.tri(L, dtype=bool)
bias = rng.standard_normal((L, L)).astype(np.float32)


def option_cases() -> dict[str, Case]:
    """attention() with each option alone, all of them together, and arrays of other shapes and dtypes."""
    from attentile import alibi_slopes, attention

    few = k[:, :2].copy(), v[:, :2].copy()
    half = [x.astype(np.float16) for x in (q, k, v)]
    out, sinks, slopes = np.empty_like(q), np.zeros(H), alibi_slopes(H)
    padding = np.arange(L)[None, None, None] < 6
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"causal": True},
        "causal upper_left": {"causal": "upper_left"},
        "causal lower_right": {"causal": "lower_right"},
        "q_start": {"causal": True, "q_start": 0},
        "window": {"window": (2, 1)},
        "key_lengths": {"key_lengths": 6},
        "key_lengths, a list": {"key_lengths": [6]},
        "prefix_lengths": {"causal": True, "prefix_lengths": 3},
        "mask": {"mask": mask},
        "mask, padding": {"mask": padding},
        "bias": {"bias": bias},
        "softcap": {"softcap": 20.0},
        "sinks": {"sinks": sinks},
        "alibi_slopes": {"alibi_slopes": slopes},
        "out": {"out": out},
        "return_lse": {"return_lse": True},
        "return_weights": {"return_weights": True},
    }
    everything: dict[str, Any] = {name: value for one in options.values() for name, value in one.items()}
    everything |= {"window": (5, None), "mask": mask, "return_weights": False}
    cases: dict[str, Case] = {
        name: lambda given=given: attention(q, k, v, **given)  # type: ignore[misc]
        for name, given in options.items()
    }
    cases["GQA"] = lambda: attention(q, *few)
    cases["all together"] = lambda: attention(q, k, v, **everything)
    cases["2-D"] = lambda: attention(q[0, 0], k[0, 0], v[0, 0])
    cases["3-D"] = lambda: attention(q[0], k[0], v[0])
    cases["5-D"] = lambda: attention(q[None], k[None], v[None])
    cases["float16"] = lambda: attention(*half)
    double = [x.astype(np.float64) for x in (q, k, v)]
    cases["float64"] = lambda: attention(*double)
    return cases


def torch_cases() -> dict[str, Case]:
    """The same in PyTorch, by the names above."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(1)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    few = [torch.from_numpy(x[:, :2].copy()) for x in (k, v)]
    allowed, added = torch.from_numpy(mask), torch.from_numpy(bias)
    padding = torch.arange(L)[None, None, None] < 6
    return {
        "plain": lambda: sdpa(*tensors),
        "scale": lambda: sdpa(*tensors, scale=0.3),
        "causal": lambda: sdpa(*tensors, is_causal=True),
        "GQA": lambda: sdpa(tensors[0], *few, enable_gqa=True),
        "mask": lambda: sdpa(*tensors, attn_mask=allowed),
        "bias": lambda: sdpa(*tensors, attn_mask=added),
        "key_lengths": lambda: sdpa(*tensors, attn_mask=padding),
    }


def cache_cases() -> dict[str, Case]:
    """Steps of a cache of 8 heads and 64 keys of width 64."""
    from attentile import KVCache

    prompt = rng.standard_normal((2, 1, 8, 64, 64), dtype=np.float32)
    step, token = rng.standard_normal((2, 1, 8, 1, 64), dtype=np.float32)
    cache, growing, back = (KVCache(1, 8, 64, capacity=64 + 16 * CALLS) for _ in range(3))
    for one in (cache, growing, back):
        one.append(*prompt)
    options: dict[str, dict[str, Any]] = {
        "attend": {},
        "softcap": {"softcap": 20.0},
        "sinks": {"sinks": np.zeros(8)},
        "return_lse": {"return_lse": True},
        "mask": {"mask": np.arange(64)[None] != 3},
        "bias": {"bias": rng.standard_normal((8, 1, 64)).astype(np.float32)},
        "window": {"window": (40, 0)},
    }
    cases: dict[str, Case] = {
        name: lambda given=given: cache.attend(step, **given)  # type: ignore[misc]
        for name, given in options.items()
    }

    def append_and_attend() -> None:
        if growing.length > 250:  # as short as the others
            growing.truncate(64)
        growing.append(token, token)
        growing.attend(step)

    def append_attend_truncate() -> None:
        back.append(token, token)
        back.attend(step)
        back.truncate(64)

    cases["append + attend"] = append_and_attend
    cases["append + attend + truncate"] = append_attend_truncate
    return cases


def textbook_cases(formulas: Any, functions: Any) -> dict[str, Case]:
    """The functions as they are taught, float64, width 64, and multi_head_attention with 4 heads."""
    cases: dict[str, Case] = {}
    for rows in (5, 16, 64, 256):
        Q, K, V, x = np.random.default_rng(rows).standard_normal((4, rows, 64))
        weights = np.random.default_rng(1).standard_normal((4, 64, 64)) / 8
        allowed = np.random.default_rng(2).random((rows, rows)) < 0.7
        cases[f"self_attention {rows}"] = lambda Q=Q, K=K, V=V: functions.self_attention(Q, K, V, 64)
        cases[f"self_attention {rows}, mask"] = lambda Q=Q, K=K, V=V, m=allowed: functions.self_attention(
            Q, K, V, 64, m
        )
        cases[f"causal_attention {rows}"] = lambda Q=Q, K=K, V=V: formulas(functions, Q, K, V)
        cases[f"multi_head_attention {rows}"] = lambda x=x, w=weights: functions.multi_head_attention(x, 64, 4, *w)
    return cases


def candidates() -> dict[str, Callable[[], dict[str, Case]]]:
    """Who can be timed in a process of its own."""

    def ours() -> dict[str, Case]:
        import attentile

        attentile.set_num_threads(1)
        textbook = textbook_cases(lambda at, *given: at.causal_attention(*given, 64), attentile)
        return option_cases() | {f"cache: {name}": case for name, case in cache_cases().items()} | textbook

    def formula() -> dict[str, Case]:
        from attentile import formulas

        def causal(given: Any, Q: Any, K: Any, V: Any) -> object:
            return given.self_attention(Q, K, V, 64, np.tri(len(Q)))

        return textbook_cases(causal, formulas)

    return {"ours": ours, "torch": torch_cases, "formula": formula}


# ---- the processes ----


def serve(name: str) -> None:
    """Answers each case's name with microseconds per call."""
    cases = candidates()[name]()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        case = cases[line.strip()]
        case()
        start = time.perf_counter()
        for _ in range(CALLS):
            case()
        print((time.perf_counter() - start) / CALLS * 1e6, flush=True)


class Candidate:
    """A process that times its cases when it is told to."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--serve", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cases = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process of calls.py has ended; its message is above")
        return line

    def microseconds(self, case: str) -> float:
        assert self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        return float(self._line())


def measure(rounds: int, only: str) -> dict[tuple[str, str], float]:
    """Median microseconds of (candidate, case), everybody in turns."""
    names = [name for name in candidates() if name != "torch" or find_spec("torch") is not None]
    running = {name: Candidate(name) for name in names}
    wanted = {name: [case for case in one.cases if only in case] for name, one in running.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for case in wanted["ours"]:
            for name, one in running.items():
                if case in wanted[name]:
                    times.setdefault((name, case), []).append(one.microseconds(case))
    for one in running.values():
        one.process.kill()
    return {key: statistics.median(found) for key, found in times.items()}


def report(times: dict[tuple[str, str], float]) -> None:
    """Each case with its yardsticks: a ratio below 1 is quicker than the yardstick."""
    yardstick = {"cache: append + attend + truncate": "cache: append + attend"}
    print(f"{'case':38} {'µs':>8}   against")
    for (name, case), found in times.items():
        if name != "ours":
            continue
        own = "cache: attend" if case.startswith("cache") else "plain"
        own = yardstick.get(case, own)
        parts = []
        if ("ours", own) in times and case != own and ("formula", case) not in times:
            parts.append(f"{own} {found / times['ours', own]:.2f}")
        others = [(other, times[other, case]) for other in ("torch", "formula") if (other, case) in times]
        parts += [f"{other} {time:.2f} µs, ratio {found / time:.2f}" for other, time in others]
        print(f"{case:38} {found:8.2f}   {'; '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each case (default 15)")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--serve", choices=list(candidates()), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
    else:
        report(measure(arguments.rounds, arguments.only))


if __name__ == "__main__":
    main()
