"""The ONNX operators RotaryEmbedding and TensorScatter for attentile.onnx, and what all its operators check alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, as_floating, integer
from ..positions.rotary import rotary_embedding as _rotary

Array = NDArray[Any]

_ROTARY, _SCATTER = "onnx.rotary_embedding", "onnx.tensor_scatter"  # in errors


def choice(function: str, name: str, value: Any, known: tuple[Any, ...], wanted: str) -> None:
    """Refuses an attribute that has none of the known values."""
    if value not in known:
        raise ValueError(f"{function}: {name} is {value!r}; it must be {wanted}")


def split_heads(function: str, name: str, array: Array, count: str, heads: int | None, given: str) -> Array:
    """A 3-D input (batch, length, heads * width) as a view (batch, heads, length, width); a 4-D input as it is.

    count: name of the attribute that holds `heads`. given: how a message calls an input of three axes.
    """
    has = f"{name} has shape {array.shape}"
    if array.ndim == 4:
        if heads is not None and heads != array.shape[1]:
            raise ValueError(f"{function}: {count} is {heads} and {has}, {array.shape[1]} heads")
        return array
    if heads is None or heads < 1:
        raise ValueError(f"{function}: {count} is {heads}; with {given} it must be a positive integer")
    if array.shape[2] % heads:
        raise ValueError(f"{function}: {has}; its last axis must be a multiple of {count}, {heads}")
    return array.reshape(*array.shape[:2], heads, array.shape[2] // heads).swapaxes(1, 2)


def integers(function: str, name: str, value: Any, shape: tuple[int, ...], each: str) -> Array:
    """An array of integers of exactly this shape, one per `each`."""
    array = as_array(function, name, value)
    if array.dtype.kind not in "iu" or array.shape != shape:
        raise ValueError(
            f"{function}: {name} has shape {array.shape} and dtype {array.dtype}; it must be integers of shape "
            f"{shape}, one per {each}"
        )
    return array


def _caches(cos: Array, sin: Array, position_ids: Any, batch: int, rows: int, half: int) -> tuple[Array, Array, Array]:
    """The caches as tables of two axes, and which of their rows each token uses, (batch, rows)."""
    by_token = position_ids is None
    shape = (batch, rows, half) if by_token else (*cos.shape[:1], half)
    if not cos.shape == sin.shape == shape:
        wanted = f"without position_ids both must be {shape}"
        if not by_token:
            wanted = f"with position_ids both must be (positions, {half})"
        raise ValueError(
            f"{_ROTARY}: cos_cache has shape {cos.shape} and sin_cache {sin.shape}; {wanted}, half the rotated part "
            "on the last axis"
        )
    if by_token:
        return cos.reshape(-1, half), sin.reshape(-1, half), np.arange(batch * rows).reshape(batch, rows)
    ids = integers(_ROTARY, "position_ids", position_ids, (batch, rows), "token")
    if ((ids < 0) | (ids >= len(cos))).any():
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

    https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html; `attentile.rotary_embedding` is the general function.

    Parameters
    ----------
    X : array_like of float, shape (B, H, L, D) or (B, L, H * D)
        Queries or keys; three axes go with num_heads.
    cos_cache, sin_cache : array_like of float, shape (positions, r / 2) or (B, L, r / 2)
        Cosines and sines, r = rotary_embedding_dim or D; with position_ids by position, without by token. Their
        floating type may be another one than that of X.
    position_ids : array_like of int, shape (B, L), optional
        Row of the caches that each token uses.
    interleaved : {0, 1}
        1: pairs are elements 2i and 2i + 1; 0: i and i + r / 2.
    num_heads : int, optional
        H of a three-axis X. With four axes it may be left out, and must agree with the shape if not.
    rotary_embedding_dim : int
        How many elements of a head are rotated, the first ones; 0 = all.

    Returns
    -------
    ndarray, shape and dtype of X; computed in float64 and rounded once

    Raises
    ------
    TypeError, ValueError
        X or a cache not floating; shapes or attributes that do not fit.
    IndexError
        A position without a row in the caches; the reference implementation counts a negative one from their end.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import onnx
    >>> angles = np.arange(8)[:, None] * 10000.0 ** (-np.arange(2) / 2)
    >>> x = np.ones((1, 2, 3, 4))
    >>> onnx.rotary_embedding(x, np.cos(angles), np.sin(angles), [[5, 6, 7]]).shape
    (1, 2, 3, 4)
    """
    choice(_ROTARY, "interleaved", interleaved, (0, 1), "0 or 1")
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
    default = given.ndim == 4 and num_heads == 0  # of the attribute
    x = split_heads(_ROTARY, "X", given, "num_heads", None if default else num_heads, "a 3-D X")
    batch, heads, rows, width = x.shape
    dim = rotary_embedding_dim or width
    if not 0 < dim <= width or dim % 2:
        name = "rotary_embedding_dim" if rotary_embedding_dim else "the head size"
        raise ValueError(
            f"{_ROTARY}: {name} is {dim}; the rotated part must be even, positive and at most {width}, the head size"
        )
    cos, sin, places = _caches(cos, sin, position_ids, batch, rows, dim // 2)
    out: Array = np.empty(given.shape, given.dtype.newbyteorder("="))
    # Concatenated heads are written there, so that the result is no copy.
    heads_of_out = out if given.ndim == 4 else out.reshape(batch, rows, heads, width).swapaxes(1, 2)
    _rotary(x, places, rotary_dim=dim, interleaved=bool(interleaved), cos=cos, sin=sin, out=heads_of_out)
    return out


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
    longest = (*update.shape[:axis], past.shape[axis], *update.shape[axis + 1 :])
    if longest != past.shape or update.shape[axis] > past.shape[axis]:
        raise ValueError(
            f"{_SCATTER}: {shapes}; they must agree but for axis {axis}, where update must not be the longer"
        )
    return axis


def tensor_scatter(
    past_cache: ArrayLike,
    update: ArrayLike,
    write_indices: ArrayLike | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Array:
    """The ONNX operator TensorScatter of opset 24: a cache with new entries at an index per batch item.

    https://onnx.ai/onnx/operators/onnx__TensorScatter.html

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
        linear: all entries must lie within the cache. circular: indices count modulo S, and entries wrap around.

    Returns
    -------
    ndarray, a new one with the shape and dtype of past_cache

    Raises
    ------
    TypeError, ValueError
        The two dtypes differ; shapes, axis, mode or indices that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import onnx
    >>> onnx.tensor_scatter(np.zeros((1, 4, 1)), np.ones((1, 2, 1)), [3], mode="circular").ravel()
    array([1., 0., 0., 1.])
    """
    past, new = as_array(_SCATTER, "past_cache", past_cache), as_array(_SCATTER, "update", update)
    choice(_SCATTER, "mode", mode, ("linear", "circular"), "'linear' or 'circular'")
    if past.dtype != new.dtype:
        raise TypeError(f"{_SCATTER}: past_cache has dtype {past.dtype} and update {new.dtype}; make them equal")
    along = _cache_axis(past, new, axis)
    size, length = past.shape[along], new.shape[along]
    given = np.zeros(len(past), np.intp) if write_indices is None else write_indices
    starts = integers(_SCATTER, "write_indices", given, past.shape[:1], "batch item")
    if mode == "linear" and ((starts < 0) | (starts > size - length)).any():
        raise ValueError(
            f"{_SCATTER}: write_indices run from {starts.min()} to {starts.max()}; in linear mode they must lie "
            f"between 0 and {size - length}, so that {length} entries fit into {size} (mode='circular' wraps around)"
        )
    present = past.copy()
    to, entries = np.moveaxis(present, along, 1), np.moveaxis(new, along, 1)
    size = max(size, 1)
    first = (starts.astype(np.uint64 if starts.dtype.kind == "u" else np.int64) % size).astype(np.intp)
    places = (first[:, None] + np.arange(length)) % size
    to[np.arange(len(to))[:, None], places] = entries
    return present
