"""The formulas as they are taught, argument for argument, on the compiled kernels.

They differ from `attention` in one rule: mask == 0 sets the score to -1e9 instead of excluding the key, so a row that
is masked everywhere averages all values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import as_array, as_real, positive_index
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
    q, k, v = (as_array(function, name, array) for name, array in (("Q", Q), ("K", K), ("V", V)))
    lead = _batch_axes(function, q, k, v, causal)
    number = as_real(function, "d_k", d_k, "a positive number")
    if not 0 < number < math.inf:
        raise ValueError(f"{function}: d_k is {d_k!r}; it must be a positive number")
    rows, keys, width = q.shape[-2], *v.shape[-2:]
    allowed = _allowed(function, mask, (*lead, rows, keys))
    compute, dtype = promoted(function, q, k, v)
    q, k, v = (ready(array, compute) for array in (q, k, v))
    if 0 in (*lead, rows, keys):
        output, weights = np.zeros((*lead, rows, width), compute), np.zeros((*lead, rows, keys), compute)
    elif core is None:
        visible = np.tri(rows, dtype=bool) if causal else allowed
        if q.shape[:-2] != lead:
            q = np.broadcast_to(q, (*lead, *q.shape[-2:]))  # for the weights to have the batch axes of V too
        output, weights = twin.textbook(q, k, v, 1.0 / math.sqrt(number), visible, MASKED_SCORE)
    else:
        values = v if width else np.zeros((*v.shape[:-1], 1), compute)  # the core takes no empty array
        seen = "causal" if causal else allowed
        output, weights = core.textbook(q, k, values, number, seen, MASKED_SCORE, None, get_num_threads())
        output = output[..., :width]
    return rounded(output, dtype), rounded(weights, dtype)


def _batch_axes(function: str, q: Array, k: Array, v: Array, causal: bool) -> tuple[int, ...]:
    """Those of the result, after every check of the shapes."""
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
    if q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:  # in most calls; broadcast_shapes() takes as long as a product
        return q.shape[:-2]
    try:
        return np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        raise ValueError(f"{function}: the batch axes do not broadcast ({shapes})") from None


def self_attention(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, d_k: float, mask: ArrayLike | None = None
) -> tuple[Array, Array]:
    """Scaled dot-product attention: softmax(Q K^T / sqrt(d_k)) V.

    Formula: Vaswani et al., "Attention Is All You Need", 2017, equation 1.

    Parameters
    ----------
    Q, K, V : array_like, shapes (..., L, d), (..., S, d), (..., S, d_v)
        Queries, keys, values.
    d_k : number
        The scores are divided by sqrt(d_k), whatever the width of Q is.
    mask : array_like, any numeric dtype or bool, broadcastable to (..., L, S), optional
        Where mask == 0 the score becomes -1e9; a row that is masked everywhere averages all values.

    Returns
    -------
    output, attention_weights : ndarray, shapes (..., L, d_v) and (..., L, S)
        Rows of weights sum to 1. The dtype is that of Q, K and V by the rules of `attention`: float64 for integers.

    Raises
    ------
    ValueError, TypeError
        Shapes that do not fit, d_k that is not a positive number.

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

    Formula: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3.

    Parameters
    ----------
    Q, K, V, d_k
        As in `self_attention`.

    Returns
    -------
    output, attention_weights : ndarray, shapes (..., L, d_v) and (..., L, L)
        As `self_attention` gives them; the weights are zero above the diagonal.

    Raises
    ------
    ValueError, TypeError
        If the numbers of rows of Q and K differ, and whatever `self_attention` refuses.

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
    x: ArrayLike,
    d_model: int,
    num_heads: int,
    W_q: ArrayLike,
    W_k: ArrayLike,
    W_v: ArrayLike,
    W_o: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
) -> Array:
    """Multi-head self-attention: project, attend in num_heads groups of columns, concatenate, project.

    Formula: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

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
    x = as_array(name, "x", x)
    if x.ndim < 2 or x.shape[-1] != d_model:
        raise ValueError(f"{name}: x has shape {x.shape}; it must be (..., L, d_model) with d_model = {d_model}")
    given = {"W_q": W_q, "W_k": W_k, "W_v": W_v, "W_o": W_o, "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    layer = {part: as_array(name, part, value) for part, value in given.items() if value is not None or part[0] == "W"}
    for part, array in layer.items():
        shape = (d_model, d_model) if part[0] == "W" else (d_model,)
        if array.shape != shape:
            raise ValueError(f"{name}: {part} has shape {array.shape}; it must be {shape}")
    compute, dtype = promoted(name, x, *layer.values())
    rows, split = rounded(x, compute), (*x.shape[:-1], num_heads, d_model // num_heads)
    q, k, v = [_project(rows, layer, part).reshape(split).swapaxes(-2, -3) for part in "qkv"]
    joined = np.empty(split, compute)  # the heads of each row, concatenated
    _attend_heads(name, q, k, v, mask, joined.swapaxes(-2, -3))
    return rounded(_project(joined.reshape(x.shape), layer, "o"), dtype)


def _project(x: Array, layer: dict[str, Array], part: str) -> Array:
    weight, bias = rounded(layer["W_" + part], x.dtype), layer.get("b_" + part)
    with np.errstate(all="ignore"):  # as in the core, where no setting of NumPy counts
        # The call of dot costs half as much as that of @ and gives the same bits, but for one row.
        projected: Array = x.dot(weight) if x.ndim == 2 and len(x) > 1 else x @ weight
        return projected if bias is None else projected + rounded(bias, x.dtype)


def _attend_heads(function: str, q: Array, k: Array, v: Array, mask: ArrayLike | None, out: Array) -> None:
    """Attention of arrays (..., H, L, d_k) of one dtype."""
    core, d_k = backend.active, q.shape[-1]
    if core is not None and core.textbook(q, k, v, d_k, mask, MASKED_SCORE, out, get_num_threads()) is not None:
        return
    allowed = _allowed(function, mask, (*q.shape[:-3], q.shape[-2], q.shape[-2]))
    if not out.size:
        return
    if core is None:
        for place in twin.places(q.shape[:-1], q.shape[-2]):
            every = None if place is None else (*place[:-1], slice(None))
            some = twin.cut(q, place), twin.cut(k, every), twin.cut(v, every)
            seen = None if allowed is None else twin.cut(allowed[..., None, :, :], place)
            twin.cut(out, place)[...] = twin.textbook(*some, 1.0 / math.sqrt(d_k), seen, MASKED_SCORE)[0]
    else:
        core.textbook(q, k, v, d_k, allowed, MASKED_SCORE, out, get_num_threads())


def _allowed(function: str, mask: ArrayLike | None, scores: tuple[int, ...]) -> Array | None:
    """The mask as truth values of the shape of the scores."""
    if mask is None:
        return None
    array = as_array(function, "mask", mask)
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise TypeError(f"{function}: mask has dtype {array.dtype}; it must be numeric or bool, 0 = masked")
    seen: Array = array != 0
    if seen.shape == scores:
        return seen
    try:
        return np.broadcast_to(seen, scores)
    except ValueError:
        raise ValueError(
            f"{function}: mask has shape {array.shape}, which does not broadcast to {scores}, the shape of the scores"
        ) from None
