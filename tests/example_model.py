"""The example language model for its tests: the modules, a vocabulary of bytes, a tiny model and its formula."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
smollm2, generate, layer_times, cache_dtypes = (
    importlib.import_module(name) for name in ("smollm2", "generate", "layer_times", "cache_dtypes")
)
sys.path.remove(str(EXAMPLES))


BYTES = list(smollm2.byte_characters().values())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ã ¤", "a a", "aa aa"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]


def tiny(seed: int = 0) -> tuple[dict[str, Any], dict[str, Array]]:
    """Metadata and random weights: 2 layers, 4 query heads and 2 key heads of width 6, model width 20."""
    rng = np.random.default_rng(seed)
    metadata = {
        "general.architecture": "llama", "llama.context_length": 300, "llama.block_count": 2,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.freq_base": 500.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
    }  # fmt: skip
    shapes = {"token_embd": (len(TOKENS), 20), "output_norm": (20,)}
    for layer in range(2):
        parts = {
            "attn_norm": (20,), "attn_q": (24, 20), "attn_k": (12, 20), "attn_v": (12, 20), "attn_output": (20, 24),
            "ffn_norm": (20,), "ffn_gate": (28, 20), "ffn_up": (28, 20), "ffn_down": (20, 28),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    weights = {
        f"{name}.weight": (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        if len(shape) == 2
        else rng.uniform(0.5, 2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    return metadata, weights


def oracle(metadata: dict[str, Any], weights: dict[str, Array], ids: list[int]) -> Array:
    """Logits of every row in float64, one head and one query after the other."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    eps = metadata["llama.attention.layer_norm_rms_epsilon"]

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * w[name]

    def turned(x: Array, position: int) -> Array:
        z = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * metadata["llama.rope.freq_base"] ** (-np.arange(3) / 3))
        return np.stack([z.real, z.imag], axis=1).ravel()

    x = w["token_embd.weight"][ids]
    for layer in ("blk.0", "blk.1"):
        h = norm(x, f"{layer}.attn_norm.weight")
        q, k, v = (h @ w[f"{layer}.attn_{part}.weight"].T for part in "qkv")
        heads = np.zeros((len(ids), 24))
        for head in range(4):
            mine, its = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
            for i in range(len(ids)):
                scores = [turned(q[i, mine], i) @ turned(k[j, its], j) / np.sqrt(6) for j in range(i + 1)]
                p = np.exp(np.array(scores) - max(scores))
                heads[i, mine] = p / p.sum() @ v[: i + 1, its]
        x = x + heads @ w[f"{layer}.attn_output.weight"].T
        h = norm(x, f"{layer}.ffn_norm.weight")
        gate, up = h @ w[f"{layer}.ffn_gate.weight"].T, h @ w[f"{layer}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.ffn_down.weight"].T
    return norm(x, "output_norm.weight") @ w.get("output.weight", w["token_embd.weight"]).T
