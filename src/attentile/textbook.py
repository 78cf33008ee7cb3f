"""The formulas as they are taught, argument for argument, on the compiled kernels.

They differ from `attention` in one rule: mask == 0 sets the score to -1e9 instead of excluding the key, so a row that
is masked everywhere averages all values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import as_real, positive_index
from .core import twin
from .runtime import backend
from .runtime.threads import get_num_threads
from .storage import promoted, ready, rounded

Array = NDArray[Any]

MASKED_SCORE = -1e9


def _self_attention(
    function: str, Q: ArrayLike, K: ArrayLike, V: ArrayLike, d_k: Any, mask: ArrayLike | None, causal: bool = False
) -> tuple[Array, Array]:
    """Output and weights of Q (..., L, d), K (..., S, d), V (..., S, d_v)."""
    core = backend.active
    if core is not None:
        found = core.textbook(Q, K, V, d_k, "causal" if causal else mask, MASKED_SCORE, None, get_num_threads())
        if found is not None:
            return found  # type: ignore[no-any-return]
    q, k, v = np.asarray(Q), np.asarray(K), np.asarray(V)
    _check_shapes(function, q, k, v, causal)
    number = as_real(function, "d_k", d_k, "a positive number")
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{function}: d_k is {d_k!r}; it must be a positive number")
    lead = _batch_axes(function, q, k, v)
    shape = (*lead, q.shape[-2], k.shape[-2])
    allowed = _allowed(function, mask, shape)
    compute, dtype = promoted(function, q, k, v)
    output, weights = _attend(q, k, v, number, allowed, causal, compute)
    return rounded(output, dtype), rounded(weights, dtype)


def _attend(
    q: Array, k: Array, v: Array, d_k: float, allowed: Array | None, causal: bool, compute: np.dtype[Any]
) -> tuple[Array, Array]:
    """Checked arrays of any dtype and memory."""
    q, k, v = (ready(array, compute) for array in (q, k, v))
    core = backend.active
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    rows, keys = q.shape[-2], k.shape[-2]
    if 0 in (*lead, rows, keys):
        return np.zeros((*lead, rows, v.shape[-1]), compute), np.zeros((*lead, rows, keys), compute)
    if core is None:
        seen = np.tri(rows, dtype=bool) if causal else allowed
        return twin.textbook(q, k, v, 1.0 / math.sqrt(d_k), seen, MASKED_SCORE)
    width = v.shape[-1]
    if width == 0:  # the core takes no empty array
        v = np.zeros((*v.shape[:-1], 1), compute)
    found = core.textbook(q, k, v, d_k, "causal" if causal else allowed, MASKED_SCORE, None, get_num_threads())
    return found[0][..., :width], found[1]


def _check_shapes(function: str, q: Array, k: Array, v: Array, causal: bool) -> None:
    shapes = f"Q has shape {q.shape}, K {k.shape}, V {v.shape}"
    if causal and (q.ndim < 2 or k.ndim < 2 or q.shape[-2] != k.shape[-2]):
        raise ValueError(f"{function}: Q has shape {q.shape}, K {k.shape}; they must have the same number of rows")
    for name, array in (("Q", q), ("K", k), ("V", v)):
        if array.ndim < 2:
            raise ValueError(f"{function}: {name} has shape {array.shape}; it needs at least two axes, (rows, width)")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(f"{function}: Q and K must have the same width, at least 1 ({shapes})")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{function}: K and V must have the same number of rows ({shapes})")


def _batch_axes(function: str, q: Array, k: Array, v: Array) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        shapes = f"Q has shape {q.shape}, K {k.shape}, V {v.shape}"
        raise ValueError(f"{function}: the batch axes do not broadcast ({shapes})") from None


def _allowed(function: str, mask: ArrayLike | None, scores: tuple[int, ...]) -> Array | None:
    if mask is None:
        return None
    array = np.asarray(mask)
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise TypeError(f"{function}: mask has dtype {array.dtype}; it must be numeric or bool, 0 = masked")
    allowed: Array = np.asarray(array != 0)
    try:
        np.broadcast_to(allowed, scores)
    except ValueError:
        raise ValueError(
            f"{function}: mask has shape {array.shape}, which does not broadcast to {scores}, the shape of the scores"
        ) from None
    return allowed


def self_attention(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, d_k: float, mask: ArrayLike | None = None
) -> tuple[Array, Array]:
    """Scaled dot-product attention: softmax(Q K^T / sqrt(d_k)) V.

    Parameters
    ----------
    Q : array_like, shape (..., L, d)
        Queries.
    K : array_like, shape (..., S, d)
        Keys.
    V : array_like, shape (..., S, d_v)
        Values.
    d_k : number
        The scores are divided by sqrt(d_k), whatever the width of Q is.
    mask : array_like, any numeric dtype or bool, broadcastable to (..., L, S), optional
        Where mask == 0 the score becomes -1e9; a row that is masked everywhere averages all values.

    Returns
    -------
    output : ndarray, shape (..., L, d_v)
    attention_weights : ndarray, shape (..., L, S)
        Rows sum to 1. The dtype of both is that of Q, K and V by the rules of `attention`: float64 for integers.

    Raises
    ------
    ValueError, TypeError
        Shapes that do not fit, d_k that is not a positive number.

    Notes
    -----
    Formula: Vaswani et al., "Attention Is All You Need", 2017, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import self_attention
    >>> x = np.eye(2)
    >>> output, weights = self_attention(x, x, x, d_k=2, mask=[[1, 0], [1, 1]])
    >>> weights.round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    """
    return _self_attention("self_attention", Q, K, V, d_k, mask)


def causal_attention(Q: ArrayLike, K: ArrayLike, V: ArrayLike, d_k: float) -> tuple[Array, Array]:
    """`self_attention` with a lower-triangular mask: row i sees the keys 0 .. i. L must equal S.

    Parameters
    ----------
    Q, K : array_like, shape (..., L, d)
        Queries and keys.
    V : array_like, shape (..., L, d_v)
        Values.
    d_k : number
        The scores are divided by sqrt(d_k), whatever the width of Q is.

    Returns
    -------
    output : ndarray, shape (..., L, d_v)
    attention_weights : ndarray, shape (..., L, L)
        Zero above the diagonal.

    Raises
    ------
    ValueError, TypeError
        If the numbers of rows of Q and K differ, and whatever `self_attention` refuses.

    Notes
    -----
    Formula: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import causal_attention
    >>> output, weights = causal_attention(np.zeros((3, 4)), np.zeros((3, 4)), np.arange(3.0)[:, None], d_k=4)
    >>> output.ravel()
    array([0. , 0.5, 1. ])
    """
    return _self_attention("causal_attention", Q, K, V, d_k, None, causal=True)


def multi_head_attention(
    x: ArrayLike, d_model: int, num_heads: int, W_q: ArrayLike, W_k: ArrayLike, W_v: ArrayLike, W_o: ArrayLike,
    mask: ArrayLike | None = None, *, b_q: ArrayLike | None = None, b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
) -> Array:  # fmt: skip
    """Multi-head self-attention: project, attend in num_heads groups of columns, concatenate, project.

    Parameters
    ----------
    x : array_like, shape (..., L, d_model)
        One row per token; a sequence has two axes, more are batch axes.
    d_model, num_heads : int
        d_model must be a multiple of num_heads; d_k = d_model // num_heads.
    W_q, W_k, W_v, W_o : array_like, shape (d_model, d_model)
        Applied as x @ W. Head h uses the columns h * d_k .. (h + 1) * d_k - 1.
    mask : array_like, any numeric dtype or bool, broadcastable to (L, L) or (..., L, L), optional
        As in `self_attention`, the same for every head.
    b_q, b_k, b_v, b_o : array_like, shape (d_model,), optional
        Biases of the projections.

    Returns
    -------
    ndarray, shape (..., L, d_model)
        dtype: that of x, weights and biases by the rules of `attention`.

    Raises
    ------
    ValueError, TypeError
        If d_model % num_heads != 0 or a shape does not fit; unsupported dtypes.

    Notes
    -----
    Formula: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import multi_head_attention
    >>> x = np.arange(12.0).reshape(3, 4)
    >>> multi_head_attention(x, 4, 2, *[np.eye(4)] * 4).shape
    (3, 4)
    """
    name = "multi_head_attention"
    d_model, num_heads = positive_index(name, "d_model", d_model), positive_index(name, "num_heads", num_heads)
    if d_model % num_heads:
        raise ValueError(f"{name}: d_model is {d_model} and num_heads is {num_heads}; d_model must be a multiple of it")
    x = np.asarray(x)
    if x.ndim < 2 or x.shape[-1] != d_model:
        raise ValueError(f"{name}: x has shape {x.shape}; it must be (..., L, d_model) with d_model = {d_model}")
    square = (d_model, d_model)
    weights = [_checked(name, f"W_{p}", w, square) for p, w in zip("qkvo", (W_q, W_k, W_v, W_o), strict=True)]
    biases = [
        None if b is None else _checked(name, f"b_{p}", b, (d_model,))
        for p, b in zip("qkvo", (b_q, b_k, b_v, b_o), strict=True)
    ]
    compute, dtype = promoted(name, x, *weights, *[b for b in biases if b is not None])
    d_k, length, lead = d_model // num_heads, x.shape[-2], x.shape[:-2]
    allowed = _allowed(name, mask, (*lead, length, length))
    x = rounded(x, compute)
    q, k, v = (
        _project(x, w, b, compute).reshape(*lead, length, num_heads, d_k).swapaxes(-2, -3)
        for w, b in zip(weights[:3], biases[:3], strict=True)
    )
    concatenated = _heads(q, k, v, d_k, allowed)
    return rounded(_project(concatenated, weights[3], biases[3], compute), dtype)


def _heads(q: Array, k: Array, v: Array, d_k: int, allowed: Array | None) -> Array:
    """Attention of q, k, v (..., H, L, d_k), with the heads of a row side by side: (..., L, H * d_k)."""
    *lead, heads, length, _ = q.shape
    beside = np.empty((*lead, length, heads, d_k), q.dtype)
    out, core = beside.swapaxes(-2, -3), backend.active
    if core is None:
        seen = None if allowed is None else np.broadcast_to(allowed, (*lead, length, length))
        for item in np.ndindex(*lead, heads):
            own = None if seen is None else seen[item[:-1]]
            out[item] = twin.textbook(q[item], k[item], v[item], 1.0 / math.sqrt(d_k), own, MASKED_SCORE)[0]
    elif out.size:
        core.textbook(q, k, v, d_k, allowed, MASKED_SCORE, out, get_num_threads())
    return beside.reshape(*lead, length, heads * d_k)


def _checked(function: str, name: str, value: ArrayLike, shape: tuple[int, ...]) -> Array:
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{function}: {name} has shape {array.shape}; it must be {shape}")
    return array


def _project(x: Array, weight: Array, bias: Array | None, dtype: np.dtype[Any]) -> Array:
    projected: Array = x @ rounded(weight, dtype)
    return projected if bias is None else projected + rounded(bias, dtype)
