"""What the tests of attention layers share: weights, the formula in float64, arrays of checkpoints."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import helpers
import numpy as np
from numpy.typing import NDArray

from attentile import MultiHeadAttention

Array = NDArray[Any]

# Largest difference from the oracle over 20 seeds of each shape: 1.8e-15 in float64, 1.0e-6 in float32.
CLOSE64 = dict(rtol=0, atol=1e-14)
CLOSE32 = dict(rtol=0, atol=8e-6)


@dataclass(frozen=True)
class Weights:
    """A layer as the formula has it: x @ q + b_q and so on."""

    q: Array
    k: Array
    v: Array
    o: Array
    b_q: Array | None
    b_k: Array | None
    b_v: Array | None
    b_o: Array | None
    heads: int
    kv_heads: int

    @property
    def matrices(self) -> tuple[Array, Array, Array, Array]:
        return self.q, self.k, self.v, self.o

    @property
    def biases(self) -> dict[str, Array | None]:
        return {"b_q": self.b_q, "b_k": self.b_k, "b_v": self.b_v, "b_o": self.b_o}

    def layer(self, **options: Any) -> MultiHeadAttention:
        return MultiHeadAttention(
            *self.matrices, num_heads=self.heads, num_kv_heads=self.kv_heads, **self.biases, **options
        )


normal = functools.partial(helpers.normal, dtype=np.float64)


def make(
    d_in: int = 12, heads: int = 4, kv_heads: int | None = None, width: int = 6, value_width: int | None = None,
    d_out: int | None = None, d_context: int | None = None, bias: bool = True,
) -> Weights:  # fmt: skip
    """Random weights, scaled so that scores and outputs are of order 1."""
    rng = np.random.default_rng(7)
    kv_heads, value_width = kv_heads or heads, value_width or width
    d_out, d_context = d_out or d_in, d_context or d_in
    shapes = (
        (d_in, heads * width), (d_context, kv_heads * width), (d_context, kv_heads * value_width),
        (heads * value_width, d_out),
    )  # fmt: skip
    matrices = [rng.standard_normal(shape) / np.sqrt(shape[0]) for shape in shapes]
    biases = [rng.standard_normal(shape[1]) if bias else None for shape in shapes]
    return Weights(*matrices, *biases, heads, kv_heads)


def rotated(x: Array, positions: Array, base: float = 10000.0, interleaved: bool = False) -> Array:
    """Rotary by complex numbers: pair i of row p times exp(1j * p * base**(-2i / D)); x (rows, D)."""
    width = x.shape[-1]
    factor = np.exp(1j * np.outer(positions, base ** (-np.arange(0, width, 2) / width)))
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, : width // 2], x[:, width // 2 :])
    pairs = (first + 1j * second) * factor
    if interleaved:
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def oracle(
    w: Weights, x: Array, context: Array | None = None, allowed: Array | None = None, scale: float | None = None,
    rotary: dict[str, Any] | None = None, positions: Any = None, projected: tuple[Array, Array] | None = None,
) -> Array:  # fmt: skip
    """The layer for x (L, d_in) in float64, one head after the other; allowed (L, S); projected: q and k, if given."""
    x = x.astype(np.float64)
    source = x if context is None else context.astype(np.float64)
    zero = {name: 0.0 if bias is None else bias for name, bias in w.biases.items()}
    q, k, v = x @ w.q + zero["b_q"], source @ w.k + zero["b_k"], source @ w.v + zero["b_v"]
    q, k = (q, k) if projected is None else projected
    width, value_width = q.shape[1] // w.heads, v.shape[1] // w.kv_heads
    attended = []
    for head in range(w.heads):
        kv_head = head // (w.heads // w.kv_heads)
        q_h, k_h = q[:, head * width :][:, :width], k[:, kv_head * width :][:, :width]
        if rotary is not None:
            places = np.arange(len(x)) if positions is None else positions
            q_h, k_h = rotated(q_h, places, **rotary), rotated(k_h, places, **rotary)
        scores = q_h @ k_h.T * (width**-0.5 if scale is None else scale)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended.append(p / p.sum(axis=1, keepdims=True) @ v[:, kv_head * value_width :][:, :value_width])
    return np.concatenate(attended, axis=1) @ w.o + zero["b_o"]


SHAPES = {
    "plain": dict(),
    "no bias": dict(bias=False),
    "grouped": dict(heads=6, kv_heads=2, width=3),
    "one key head": dict(heads=5, kv_heads=1, width=4),
    "own widths": dict(d_in=7, heads=3, width=5, value_width=2, d_out=11),
    "one head": dict(heads=1, width=1),
}


def linear(w: Weights, place: str, names: str, transposed: bool = True) -> dict[str, Array]:
    """Arrays of four layers as PyTorch's Linear stores them."""
    arrays = {}
    for name, matrix, bias in zip(names.split(), w.matrices, w.biases.values(), strict=True):
        arrays[f"{place}{name}.weight"] = np.ascontiguousarray(matrix.T) if transposed else matrix
        if bias is not None:
            arrays[f"{place}{name}.bias"] = bias
    return arrays


def fused(w: Weights, place: str, names: str, transposed: bool = True) -> dict[str, Array]:
    """The same with q, k and v side by side."""
    joined = np.concatenate([w.q, w.k, w.v], axis=1)
    bias = None if w.b_q is None else np.concatenate([w.b_q, w.b_k, w.b_v])
    arrays = {}
    for name, matrix, b in zip(names.split(), (joined, w.o), (bias, w.b_o), strict=True):
        arrays[f"{place}{name}.weight"] = np.ascontiguousarray(matrix.T) if transposed else matrix
        if b is not None:
            arrays[f"{place}{name}.bias"] = b
    return arrays


def torch_fused(w: Weights) -> dict[str, Array]:
    arrays = fused(w, "layers.0.self_attn.", "in_proj out_proj")
    return {name.replace("in_proj.", "in_proj_"): array for name, array in arrays.items()}


def torch_separate(w: Weights) -> dict[str, Array]:
    arrays = {f"cross.{p}_proj_weight": np.ascontiguousarray(m.T) for p, m in zip("qkv", w.matrices[:3], strict=True)}
    arrays["cross.out_proj.weight"] = w.o.T.copy()
    if w.b_q is not None:
        arrays |= {"cross.in_proj_bias": np.concatenate([w.b_q, w.b_k, w.b_v]), "cross.out_proj.bias": w.b_o}
    return arrays


def grouped(w: Weights, place: str, names: str, groups: int, order: str) -> dict[str, Array]:
    """The same with q, k and v in groups of equally many heads, `order` within each."""
    arrays = {}
    joined, bias = (
        np.concatenate([np.split(parts[p], groups, axis=-1)[g] for g in range(groups) for p in order], axis=-1)
        for parts in (
            dict(zip("qkv", w.matrices, strict=False)),
            {
                p: np.zeros(m.shape[1]) if b is None else b
                for p, m, b in zip("qkv", w.matrices, w.biases.values(), strict=False)
            },
        )
    )
    biases = (None, None) if w.b_q is None else (bias, w.b_o)
    for name, matrix, b in zip(names.split(), (joined, w.o), biases, strict=True):
        arrays[f"{place}{name}.weight"] = np.ascontiguousarray(matrix.T)
        if b is not None:
            arrays[f"{place}{name}.bias"] = b
    return arrays


def neox(w: Weights) -> dict[str, Array]:
    """Rows of query_key_value: for each key head its queries, its key, its value."""
    place = "gpt_neox.layers.1."
    arrays = grouped(w, f"{place}attention.", "query_key_value dense", w.kv_heads, "qkv")
    arrays |= {f"{place}attention.masked_bias": np.array(-1e9), f"{place}mlp.dense_h_to_4h.weight": np.ones((2, 2))}
    return {**arrays, f"{place}input_layernorm.weight": np.ones(2)}


def bert(w: Weights) -> dict[str, Array]:
    arrays = linear(w, "encoder.layer.0.attention.", "self.query self.key self.value output.dense")
    arrays["encoder.layer.0.attention.output.LayerNorm.weight"] = np.ones(3)
    arrays["encoder.layer.0.output.dense.weight"] = np.ones((3, 3))
    return arrays


def gpt2(w: Weights) -> dict[str, Array]:
    arrays = fused(w, "h.1.attn.", "c_attn c_proj", transposed=False)
    arrays |= {"h.1.attn.bias": np.tri(8, dtype=bool)[None, None], "h.1.attn.masked_bias": np.array(-1e4)}
    arrays |= {"h.1.mlp.c_fc.weight": np.ones((3, 4)), "h.1.mlp.c_proj.weight": np.ones((4, 3))}
    return arrays


def gguf(w: Weights) -> dict[str, Array]:
    arrays = linear(w, "blk.7.", "attn_q attn_k attn_v attn_output")
    return {**arrays, "blk.7.attn_norm.weight": np.ones(3), "blk.7.ffn_up.weight": np.ones((3, 4))}
