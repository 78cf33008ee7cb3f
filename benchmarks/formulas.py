"""The formulas as people write them in NumPy, the third candidate of the pytest-benchmark suite.

Those that `python -m attentile` times too are in the package. They check nothing, and they store every score.
"""

from collections.abc import Callable

import numpy as np

from attentile.formulas import attention, grouped_product, multi_head_attention, self_attention, softmax

__all__ = [
    "attention",
    "attention_and_gradients",
    "causal_attention",
    "decode_step",
    "in_float32",
    "multi_head_attention",
    "positional_encoding",
    "rotary_embedding",
    "self_attention",
]


def in_float32(formula: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The formula of float16 or bfloat16 arrays: NumPy has no fast products of them, so people convert."""

    def converted(*arrays: np.ndarray) -> np.ndarray:
        return formula(*(array.astype(np.float32) for array in arrays)).astype(arrays[0].dtype)

    return converted


def causal_attention(Q: np.ndarray, K: np.ndarray, V: np.ndarray, d_k: float) -> tuple[np.ndarray, np.ndarray]:
    """Each row sees the keys up to its own."""
    return self_attention(Q, K, V, d_k, np.tri(len(Q)))


def attention_and_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, mask: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """The output and the gradients of q, k and v; a score is -1e9 where mask is False."""
    scale = np.float32(q.shape[-1] ** -0.5) if q.dtype == np.float32 else q.shape[-1] ** -0.5
    scores = grouped_product(q, k.swapaxes(-1, -2)) * scale
    if mask is not None:
        scores = np.where(mask, scores, scores.dtype.type(-1e9))
    weights = softmax(scores)
    out = grouped_product(weights, v)
    dweights = grouped_product(dout, v.swapaxes(-1, -2))
    dscores = weights * (dweights - (dout * out).sum(axis=-1, keepdims=True)) * scale
    dk, dv = transposed_product(dscores, q, k.shape[1]), transposed_product(weights, dout, k.shape[1])
    return out, grouped_product(dscores, k), dk, dv


def transposed_product(weights: np.ndarray, rows: np.ndarray, heads: int) -> np.ndarray:
    """weights^T @ rows, summed over the query heads that share one of so many key heads."""
    by_key_head = [array.reshape(len(array), heads, -1, array.shape[-1]) for array in (weights, rows)]
    return by_key_head[0].swapaxes(-1, -2) @ by_key_head[1]


def decode_step(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The output of one token, and the keys and values with those of the token behind them."""
    keys = np.concatenate((keys, k), axis=2)
    values = np.concatenate((values, v), axis=2)
    return attention(q, keys, values), keys, values


def positional_encoding(positions: int, d_model: int, dtype: str) -> np.ndarray:
    """Sines in the even columns, cosines in the odd ones; d_model is even."""
    angles = np.arange(positions)[:, None] / 10000 ** (np.arange(0, d_model, 2) / d_model)
    encoding = np.empty((positions, d_model), dtype)
    encoding[:, 0::2] = np.sin(angles)
    encoding[:, 1::2] = np.cos(angles)
    return encoding


def rotary_embedding(x: np.ndarray, first: int, interleaved: bool) -> np.ndarray:
    """x · cos + rotate_half(x) · sin for the positions from `first` on, whose angles are computed in every call."""
    length, width = x.shape[-2:]
    angles = np.arange(first, first + length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    if interleaved:
        angles = np.repeat(angles, 2, axis=-1)
        rotated = np.stack((-x[..., 1::2], x[..., 0::2]), axis=-1).reshape(x.shape)
    else:
        angles = np.concatenate((angles, angles), axis=-1)
        rotated = np.concatenate((-x[..., width // 2 :], x[..., : width // 2]), axis=-1)
    return x * np.cos(angles).astype(x.dtype) + rotated * np.sin(angles).astype(x.dtype)
