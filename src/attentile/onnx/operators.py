"""The ONNX operators around Attention: RotaryEmbedding (opset 23) and TensorScatter (opset 24), for attentile.onnx.

What the operators leave to a runtime, or where their description and their reference implementation differ:

* RotaryEmbedding computes in float64 and rounds once, where the function body rounds after every step. A position that
  the caches do not have is an error, a negative one too; the reference implementation would count from their end.
* num_heads of a 4-D input is accepted if it agrees with the shape. Caches may have another floating type than X.
* TensorScatter in linear mode refuses indices before the start and updates beyond the end of the cache; in circular
  mode any index counts modulo the length. The inputs are never written to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_floating, integer
from ..positions.rotary import rotary_embedding as _rotary
from .inputs import integers, split_heads

Array = NDArray[Any]

_ROTARY, _SCATTER = "onnx.rotary_embedding", "onnx.tensor_scatter"  # in errors


def _rotated(rotary_embedding_dim: int, width: int) -> int:
    dim = rotary_embedding_dim or width
    if not 0 < dim <= width or dim % 2:
        name = "rotary_embedding_dim" if rotary_embedding_dim else "the head size"
        raise ValueError(
            f"{_ROTARY}: {name} is {dim}; the rotated part must be even, positive and at most {width}, the head size"
        )
    return dim


def _caches(cos: Array, sin: Array, position_ids: Any, batch: int, rows: int, half: int) -> tuple[Array, Array, Array]:
    """The caches as tables of two axes, and which of their rows each token uses, (batch, rows)."""
    expected = f"({batch}, {rows}, {half})" if position_ids is None else f"(positions, {half})"
    axes, why = (3, "without position_ids") if position_ids is None else (2, "with position_ids")
    fits = cos.ndim == axes and cos.shape == sin.shape and cos.shape[-1] == half
    if not fits or (position_ids is None and cos.shape[:2] != (batch, rows)):
        raise ValueError(
            f"{_ROTARY}: cos_cache has shape {cos.shape} and sin_cache {sin.shape}; {why} both must be "
            f"{expected}, half the rotated part on the last axis"
        )
    if position_ids is None:
        places = np.arange(batch * rows, dtype=np.int64).reshape(batch, rows)
        return cos.reshape(-1, half), sin.reshape(-1, half), places
    ids = integers(_ROTARY, "position_ids", position_ids, (batch, rows), "token")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(cos):
        raise IndexError(
            f"{_ROTARY}: position_ids run from {ids.min()} to {ids.max()}; they must lie between 0 and "
            f"{len(cos) - 1}, the last row of the caches"
        )
    return cos, sin, ids


def rotary_embedding(
    X: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """The ONNX operator RotaryEmbedding of opset 23: inputs in its order, attributes by name.

    Parameters
    ----------
    X : array_like of float, shape (B, H, L, D) or (B, L, H * D)
        Queries or keys; three axes go with num_heads.
    cos_cache, sin_cache : array_like of float, shape (positions, r / 2) or (B, L, r / 2)
        Cosines and sines, r = rotary_embedding_dim or D; with position_ids by position, without by token.
    position_ids : array_like of int, shape (B, L), optional
        Row of the caches that each token uses.
    interleaved : {0, 1}
        1: pairs are elements 2i and 2i + 1; 0: i and i + r / 2.
    num_heads : int, optional
        H of a three-axis X.
    rotary_embedding_dim : int
        How many elements of a head are rotated, the first ones; 0 = all.

    Returns
    -------
    ndarray, shape and dtype of X

    Raises
    ------
    TypeError
        X or a cache not floating.
    ValueError
        Shapes or attributes that do not fit.
    IndexError
        A position without a row in the caches.

    Notes
    -----
    https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html; `attentile.rotary_embedding` is the general function.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import onnx
    >>> angles = np.arange(8)[:, None] * 10000.0 ** (-np.arange(2) / 2)
    >>> x = np.ones((1, 2, 3, 4))
    >>> onnx.rotary_embedding(x, np.cos(angles), np.sin(angles), [[5, 6, 7]]).shape
    (1, 2, 3, 4)
    """
    if interleaved not in (0, 1):
        raise ValueError(f"{_ROTARY}: interleaved is {interleaved!r}; it must be 0 or 1")
    wanted = "the operator takes float32, float16 and bfloat16, here float64 too"
    given, cos, sin = (
        as_floating(_ROTARY, name, value, wanted)
        for name, value in (("X", X), ("cos_cache", cos_cache), ("sin_cache", sin_cache))
    )
    if given.ndim not in (3, 4):
        raise ValueError(
            f"{_ROTARY}: X has shape {given.shape}; it must be (batch, heads, length, head size) or "
            "(batch, length, hidden size)"
        )
    if given.ndim == 4 and num_heads == 0:  # the attribute's default
        num_heads = None
    x = split_heads(_ROTARY, "X", given, "num_heads", num_heads, "a 3-D X")
    batch, heads, rows, width = x.shape
    dim = _rotated(rotary_embedding_dim, width)
    cos, sin, places = _caches(cos, sin, position_ids, batch, rows, dim // 2)
    dtype = x.dtype.newbyteorder("=")
    out: Array = np.empty(x.shape, dtype)
    if given.ndim == 3:  # heads side by side: written there, so that the result is a view
        out = np.empty((batch, rows, heads, width), dtype).swapaxes(1, 2)
    _rotary(x, places, rotary_dim=dim, interleaved=bool(interleaved), cos=cos, sin=sin, out=out)
    return out if given.ndim == 4 else out.swapaxes(1, 2).reshape(given.shape)


# ---- TensorScatter ----


def _cache_axis(past: Array, update: Array, axis: int) -> int:
    """The axis counted from the front, after the checks of the shapes."""
    shapes = f"past_cache has shape {past.shape} and update {update.shape}"
    if past.ndim < 2 or past.ndim != update.ndim:
        raise ValueError(f"{_SCATTER}: {shapes}; they need the same number of axes, at least two")
    axis = integer(_SCATTER, "axis", axis, wanted="an integer")
    if not -past.ndim < axis < past.ndim or axis == 0:
        raise ValueError(
            f"{_SCATTER}: axis is {axis}; it must name one of the {past.ndim} axes but not the first, the batch"
        )
    axis %= past.ndim
    others = [n for n in range(past.ndim) if n != axis]
    if any(past.shape[n] != update.shape[n] for n in others) or update.shape[axis] > past.shape[axis]:
        raise ValueError(
            f"{_SCATTER}: {shapes}; they must agree but for axis {axis}, where update must not be the longer"
        )
    return axis


def _write_starts(write_indices: Any, batch: int, size: int, new: int, mode: str) -> list[int]:
    """Where the update of each batch item starts in the cache."""
    if write_indices is None:
        return [0] * batch
    indices = integers(_SCATTER, "write_indices", write_indices, (batch,), "batch item")
    if mode == "circular":
        return [int(start) % size if size else 0 for start in indices.tolist()]
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) <= size - new:
        raise ValueError(
            f"{_SCATTER}: write_indices run from {indices.min()} to {indices.max()}; in linear mode they must "
            f"lie between 0 and {size - new}, so that {new} entries fit into {size} (mode='circular' wraps around)"
        )
    return [int(start) for start in indices.tolist()]


def tensor_scatter(
    past_cache: ArrayLike,
    update: ArrayLike,
    write_indices: ArrayLike | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Array:
    """The ONNX operator TensorScatter of opset 24: a cache with new entries at an index per batch item.

    Parameters
    ----------
    past_cache : array_like of any dtype, shape (B, ..., S, ...)
        The cache; it is not written to.
    update : array_like of the same dtype, shape (B, ..., L, ...)
        New entries, L <= S on the sequence axis, elsewhere as long as past_cache.
    write_indices : array_like of int, shape (B,), optional
        Where the entries of each batch item start; default 0.
    axis : int
        The sequence axis; not 0.
    mode : {"linear", "circular"}
        linear: all entries must fit before the end. circular: they go on at the start.

    Returns
    -------
    ndarray, shape and dtype of past_cache
        Always a new array.

    Raises
    ------
    TypeError
        If the two dtypes differ.
    ValueError
        Shapes, axis, mode or indices that do not fit.

    Notes
    -----
    https://onnx.ai/onnx/operators/onnx__TensorScatter.html

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import onnx
    >>> onnx.tensor_scatter(np.zeros((1, 4, 1)), np.ones((1, 2, 1)), [3], mode="circular").ravel()
    array([1., 0., 0., 1.])
    """
    past, new = np.asarray(past_cache), np.asarray(update)
    if mode not in ("linear", "circular"):
        raise ValueError(f"{_SCATTER}: mode is {mode!r}; it must be 'linear' or 'circular'")
    if past.dtype != new.dtype:
        raise TypeError(f"{_SCATTER}: past_cache has dtype {past.dtype} and update {new.dtype}; make them equal")
    along = _cache_axis(past, new, axis)
    size, length = past.shape[along], new.shape[along]
    starts = _write_starts(write_indices, len(past), size, length, mode)
    present = past.copy()
    to, entries = np.moveaxis(present, along, 1), np.moveaxis(new, along, 1)
    for item, start in enumerate(starts):
        before_end = min(length, size - start)
        to[item, start : start + before_end] = entries[item, :before_end]
        to[item, : length - before_end] = entries[item, before_end:]
    return present
