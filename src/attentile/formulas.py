"""The formulas as people write them in NumPy: the yardstick of the speed table, of no use to the library itself.

Each is called like the function of the same name. They check nothing, and they store every score.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def softmax(scores: Array) -> Array:
    """Weights that sum to 1 along the last axis."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return weights


def self_attention(Q: Array, K: Array, V: Array, d_k: float, mask: Array | None = None) -> tuple[Array, Array]:
    """Output and weights; a score is -1e9 where mask == 0."""
    scores = Q @ K.swapaxes(-1, -2) / math.sqrt(d_k)
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    weights = softmax(scores)
    return weights @ V, weights


def multi_head_attention(
    x: Array, d_model: int, num_heads: int, W_q: Array, W_k: Array, W_v: Array, W_o: Array, mask: Array | None = None
) -> Array:
    """x of shape (L, d_model); the products of all heads are one batched product."""
    length, d_k = len(x), d_model // num_heads
    q, k, v = ((x @ W).reshape(length, num_heads, d_k).swapaxes(0, 1) for W in (W_q, W_k, W_v))
    heads, _ = self_attention(q, k, v, d_k, mask)
    output: Array = heads.swapaxes(0, 1).reshape(length, d_model) @ W_o
    return output


def attention(
    q: Array, k: Array, v: Array, mask: Array | None = None, bias: Array | None = None, softcap: float | None = None
) -> Array:
    """q of shape (B, H, L, D), k and v of shape (B, Hkv, S, D); a score is -1e9 where mask == 0."""
    scores = grouped_product(q, k.swapaxes(-1, -2)) / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = np.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    return grouped_product(softmax(scores), v)


def grouped_product(rows: Array, shared: Array) -> Array:
    """rows @ shared; the heads that share a matrix become rows of one product, which is quicker than copies of it."""
    B, H, L, width = rows.shape
    heads = shared.shape[1]
    product: Array = rows.reshape(B, heads, H // heads * L, width) @ shared
    return product.reshape(B, H, L, -1)
