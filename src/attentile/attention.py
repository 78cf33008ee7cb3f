"""attention(): checks the arguments, brings the arrays to four axes without copying, calls the core.

Every check runs before any work. What the core gets is always (batch, head, row, width) with the last axis contiguous;
inputs with more batch axes are folded into one where their strides allow it and looped over where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import ArrayLike, NDArray

from . import config, reference
from .masks import Structure, structure

Array = NDArray[Any]
Causal = bool | Literal["upper_left", "lower_right"]
Window = tuple[int | None, int | None] | None
Segments = ArrayLike | tuple[ArrayLike, ArrayLike] | None


class AttentionResult(NamedTuple):
    """What attention() returns when more than the output is asked for; what was not asked for is None."""

    out: Array
    lse: Array | None
    weights: Array | None


# ---- dtypes ----


def _computed_in(dtype: np.dtype[Any], function: str) -> np.dtype[Any]:
    """The dtype of the arithmetic for this (promoted) input dtype."""
    dtype = dtype.newbyteorder("=")
    if dtype in (np.float32, np.float64):
        return dtype
    if dtype == np.float16 or dtype.name == "bfloat16":
        return np.dtype(np.float32)
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    raise TypeError(
        f"{function}: an array has dtype {dtype}; supported are float64, float32, float16, bfloat16, integers and bool"
    )


def promoted(function: str, *arrays: Array) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """(dtype of the arithmetic, dtype of the result) for arrays that are used together."""
    for array in arrays:
        _computed_in(array.dtype, function)
    dtype = np.result_type(*arrays)
    compute = _computed_in(dtype, function)
    return compute, compute if dtype.kind in "iub" else dtype.newbyteorder("=")


def _ready(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this dtype, native, aligned, last axis contiguous: itself whenever it already is."""
    array = array.astype(dtype, copy=False)
    if not array.flags.aligned or (array.shape[-1] > 1 and array.strides[-1] != array.itemsize):
        array = array.copy(order="C")
    return array


def _bias_in(bias: Array, dtype: np.dtype[Any]) -> Array:
    """bias in the dtype of the arithmetic. A finite value must stay finite: only -inf excludes a key."""
    if bias.dtype.itemsize > dtype.itemsize:
        largest = np.finfo(dtype).max
        bias = np.where(np.isinf(bias), bias, np.clip(bias, -largest, largest))
    bias = bias.astype(dtype, copy=False)
    return bias if bias.flags.aligned else bias.copy()


# ---- checks ----


def _shapes(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """The batch axes, after every check of the shapes of q, k, v (each with a head axis already)."""
    shapes = f"q has shape {q.shape}, k {k.shape}, v {v.shape}"
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention: q has width {q.shape[-1]} and k has {k.shape[-1]}; they must be equal ({shapes})")
    if q.shape[-1] == 0:
        raise ValueError(f"attention: q and k have width 0; it must be at least 1 ({shapes})")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention: k has {k.shape[-2]} keys and v has {v.shape[-2]}; they must be equal ({shapes})")
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"attention: k has {k.shape[-3]} heads and v has {v.shape[-3]}; they must be equal ({shapes})")
    q_heads, heads = q.shape[-3], k.shape[-3]
    if q_heads and (heads == 0 or q_heads % heads):
        raise ValueError(
            f"attention: q has {q_heads} heads and k has {heads}; "
            f"the number of q heads must be a multiple of the number of k heads ({shapes})"
        )
    try:
        return np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(f"attention: the batch axes of q, k and v do not broadcast ({shapes})") from None


def _scale(scale: Any, width: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(width)
    try:
        number = float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"attention: scale is {scale!r}; it must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"attention: scale is {number}; it must be finite")
    return number


def _softcap(softcap: Any) -> float:
    if softcap is None:
        return 0.0
    try:
        number = float(softcap)
    except (TypeError, ValueError):
        raise TypeError(f"attention: softcap is {softcap!r}; it must be a positive number or None") from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"attention: softcap is {number}; it must be positive and finite, None for no cap")
    return number


def _per_head(name: str, value: Any, heads: int) -> Array | None:
    """One number per query head, in float64."""
    if value is None:
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"attention: {name} has dtype {array.dtype}; it must be a real number per query head")
    if array.shape != (heads,):
        raise ValueError(f"attention: {name} has shape {array.shape}; it must be ({heads},), one per query head")
    return np.ascontiguousarray(array, np.float64)


def _broadcast(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"attention: {name} has shape {array.shape}, which does not broadcast to {shape}, the shape of the scores"
        ) from None


def _mask(mask: Any, shape: tuple[int, ...]) -> Array | None:
    if mask is None:
        return None
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        hint = "pass it as bias=" if mask.dtype.kind == "f" or mask.dtype.name == "bfloat16" else "pass mask != 0"
        raise TypeError(f"attention: mask has dtype {mask.dtype}; it must be bool, True = may attend ({hint}?)")
    return _broadcast("mask", mask.view(np.uint8), shape)


def _bias(bias: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    if bias is None:
        return None
    bias = np.asarray(bias)
    if bias.dtype.kind != "f" and bias.dtype.name != "bfloat16":
        hint = "pass it as mask=" if bias.dtype == np.bool_ else "convert it with .astype(float)"
        raise TypeError(f"attention: bias has dtype {bias.dtype}; it must be floating ({hint}?)")
    return _broadcast("bias", _bias_in(bias, dtype), shape)


def _check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"attention: out is a {type(out).__name__}; it must be a NumPy array")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"attention: out has shape {out.shape} and dtype {out.dtype}; they must be {shape} and {dtype}"
        )
    if not out.flags.writeable:
        raise ValueError("attention: out is read-only; pass a writable array")


# ---- to four axes, and to the core ----


def _fold(array: Array, n_tail: int) -> Array | None:
    """A view with the axes before the last n_tail folded into one, or None if their strides do not allow it."""
    n_lead = array.ndim - n_tail
    if n_lead == 1:
        return array
    lead, strides, tail = array.shape[:n_lead], array.strides[:n_lead], array.shape[n_lead:]
    axes = [(n, step) for n, step in zip(lead, strides, strict=True) if n != 1]
    for (_, outer), (n, inner) in pairwise(axes):
        if outer != n * inner:
            return None
    step = axes[-1][1] if axes else 0
    return as_strided(array, (math.prod(lead), *tail), (step, *array.strides[n_lead:]))


# Axes after the batch axes of each array that the core takes.
_TAILS = {"q": 3, "k": 3, "v": 3, "out": 3, "mask": 3, "bias": 3, "weights": 3, "lse": 2, "lo": 1, "hi": 1, "start": 0}


def _run(arrays: dict[str, Array], attend: Callable[..., None], options: dict[str, Any]) -> None:
    """Calls the core once if the batch axes of all arrays fold, else for each index of the first batch axis."""
    folded = {name: _fold(array, _TAILS[name]) for name, array in arrays.items()}
    if any(array is None for array in folded.values()):
        for index in range(arrays["out"].shape[0]):
            _run({name: array[index] for name, array in arrays.items()}, attend, options)
        return
    tables = {name: array for name, array in folded.items() if name in ("lo", "hi", "start") and array is not None}
    for name, table in tables.items():  # one row each if the items share them
        shared = all(other.strides[0] == 0 for other in tables.values())
        folded[name] = np.ascontiguousarray(table[:1] if shared else table)
    attend(**folded, **options)


def execute(
    q: Array, k: Array, v: Array, out: Array, scale: float, threads: int, *, mask: Array | None = None,
    bias: Array | None = None, keys: Structure | None = None, lse: Array | None = None,
    weights: Array | None = None, **options: Any,
) -> None:  # fmt: skip
    """Computes into out (and lse, weights): checked arrays (..., H, L, width), batch axes that broadcast to out's.

    mask, bias are broadcast to (..., Hq, L, S) already. Other options go to the core as they are: fill (score that
    masked keys get instead of being excluded), softcap, sinks, slopes.
    """
    shape, lead = out.shape, out.shape[:-3]
    if 0 in shape or k.shape[-2] == 0:
        out[...] = 0
        if lse is not None:
            lse[...] = -np.inf
        return
    named = {"q": q, "k": k, "v": v, "out": out, "mask": mask, "bias": bias, "lse": lse, "weights": weights}
    if keys is not None:
        named |= {"lo": keys.lo, "hi": keys.hi, "start": keys.start if options.get("slopes") is not None else None}
    arrays: dict[str, Array] = {}
    for name, array in named.items():
        if array is not None:
            tail = array.shape[array.ndim - _TAILS[name] :]
            full = array if array.shape == lead + tail else np.broadcast_to(array, lead + tail)
            arrays[name] = full if lead else full[None]
    core = config.core()
    attend = core.attend if core is not None else reference.attend
    _run(arrays, attend, {"scale": scale, "threads": threads, **options})


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = ..., bias: ArrayLike | None = ...,
    causal: Causal = ..., q_start: ArrayLike | None = ..., window: Window = ..., key_lengths: ArrayLike | None = ...,
    prefix_lengths: ArrayLike | None = ..., segments: Segments = ..., scale: float | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., alibi_slopes: ArrayLike | None = ...,
    return_lse: Literal[False] = ..., return_weights: Literal[False] = ...,
    out: Array | None = ..., num_threads: int | None = ...,
) -> Array: ...  # fmt: skip


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = ..., bias: ArrayLike | None = ...,
    causal: Causal = ..., q_start: ArrayLike | None = ..., window: Window = ..., key_lengths: ArrayLike | None = ...,
    prefix_lengths: ArrayLike | None = ..., segments: Segments = ..., scale: float | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., alibi_slopes: ArrayLike | None = ...,
    return_lse: bool = ..., return_weights: bool = ...,
    out: Array | None = ..., num_threads: int | None = ...,
) -> Array | AttentionResult: ...  # fmt: skip


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, bias: ArrayLike | None = None,
    causal: Causal = False, q_start: ArrayLike | None = None, window: Window = None,
    key_lengths: ArrayLike | None = None, prefix_lengths: ArrayLike | None = None, segments: Segments = None,
    scale: float | None = None, softcap: float | None = None, sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None, return_lse: bool = False, return_weights: bool = False,
    out: Array | None = None, num_threads: int | None = None,
) -> Array | AttentionResult:  # fmt: skip
    """Exact scaled dot-product attention, softmax(scale * q k^T + bias, over the allowed keys) v, in one fused pass.

    Parameters
    ----------
    q : array_like, shape (..., Hq, L, D)
        Queries. Two-dimensional arrays (L, D) have no head axis. Batch axes (...) broadcast as in NumPy.
    k : array_like, shape (..., Hkv, S, D)
        Keys. Hq must be a multiple of Hkv (grouped-query attention): query head h uses key head h // (Hq // Hkv).
    v : array_like, shape (..., Hkv, S, Dv)
        Values; Dv may differ from D.
    mask : array_like of bool, optional
        True = may attend. Broadcasts to (..., Hq, L, S).
    bias : array_like of float, optional
        Added to the scores; broadcasts to (..., Hq, L, S). -inf excludes the key, no finite value does.
    causal : bool or {"upper_left", "lower_right"}
        A query sees the keys up to its own position. True: query i stands at position i and L must equal S, or
        at q_start + i. For L != S name the alignment ("lower_right" counts from the last valid key)::

            "upper_left"      "lower_right"
             1 0 0 0 0         1 1 1 0 0
             1 1 0 0 0         1 1 1 1 0
             1 1 1 0 0         1 1 1 1 1

    q_start : int or array_like of int (one per batch item), optional
        Position of query 0, for causal=True, window and alibi_slopes: chunked prefill and decoding.
    window : (left, right), optional
        A query sees `left` keys before and `right` keys after its own position, both inclusive; None = unlimited.
        Without a causal form a query's position is its row if L = S, else q_start must be given::

            window=(1, 1)     causal=True, window=(1, None)
             1 1 0 0           1 0 0 0
             1 1 1 0           1 1 0 0
             0 1 1 1           0 1 1 0
             0 0 1 1           0 0 1 1

    key_lengths : int or array_like of int (one per batch item), optional
        Valid keys of each item; keys at and after it are excluded and never read.
    prefix_lengths : int or array_like of int (one per batch item), optional
        The first keys of a causal mask that every query sees (prefix language model).
    segments : array_like of int, shape (..., S), or a pair (..., L), (..., S), optional
        Packed sequences: a query sees the keys with its id. `segment_ids` makes ids from lengths.
    scale : float, optional
        Any finite number; default 1 / sqrt(D).
    softcap : float, optional
        Positive: scores become softcap * tanh(score / softcap), before bias and masks.
    sinks : array_like of float, shape (Hq,), optional
        A logit per query head that takes its share of the softmax and has no value; lse leaves it out.
    alibi_slopes : array_like of float, shape (Hq,), optional
        slope * |query position - key position| is subtracted from the scores (`alibi_slopes` gives the usual ones).
    return_lse, return_weights : bool
        Also return the natural logarithm of the sum of exp of the scores, shape (..., Hq, L), and the softmax
        weights, shape (..., Hq, L, S).
    out : ndarray, shape (..., Hq, L, Dv), optional
        Written and returned; any strides. It may overlap an input.
    num_threads : int, optional
        Threads of this call; default `get_num_threads()`. It never changes a bit of the result.

    Returns
    -------
    ndarray, shape (..., Hq, L, Dv), or AttentionResult(out, lse, weights)
        dtype: that of q, k and v by NumPy's promotion; float16 and bfloat16 are computed in float32 and rounded once,
        integers and bool become float64. mask, bias and scale never change it. lse is float32, for float64 float64.

    Raises
    ------
    TypeError
        mask that is not bool, bias that is not floating, unsupported dtype.
    ValueError
        Shapes that do not fit, D = 0, ambiguous causal. Always before any work.

    Notes
    -----
    A row without any allowed key gives out 0, weights 0 and lse -inf. Excluded keys, values and bias entries may hold
    NaN or Inf: they are never used. The bits of a row depend on its query and on the keys it may see, and on nothing
    else (batch, L, padding, threads). Formula: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 6, 8), dtype=np.float32)  # batch 2, 4 heads, 6 tokens, width 8
    >>> attention(q, k, v, causal=True).shape
    (2, 4, 6, 8)
    >>> result = attention(q, k, v, key_lengths=[6, 2], return_weights=True)
    >>> result.weights[1, 0, 0].round(3)  # item 1 has two valid keys
    array([0.499, 0.501, 0.   , 0.   , 0.   , 0.   ], dtype=float32)
    """
    core = config.active
    plain = mask is None and bias is None and causal is False and q_start is None and window is None
    plain = plain and key_lengths is None and prefix_lengths is None and segments is None and softcap is None
    plain = plain and sinks is None and alibi_slopes is None and out is None and not return_lse and not return_weights
    if plain and core is not None:
        result = core.attend_plain(q, k, v, scale, config.threads_for(num_threads, "attention"))
        if result is not None:
            return result  # type: ignore[no-any-return]
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim < 2:
            raise ValueError(f"attention: {name} has shape {array.shape}; it needs at least two axes, (rows, width)")
    no_head_axis = q.ndim == k.ndim == v.ndim == 2
    compute, dtype = promoted("attention", q, k, v)
    q, k, v = (array[None] if array.ndim == 2 else array for array in (q, k, v))
    lead = _shapes(q, k, v)
    heads, queries, keys = q.shape[-3], q.shape[-2], k.shape[-2]
    threads, factor = config.threads_for(num_threads, "attention"), _scale(scale, q.shape[-1])
    scores, shape = (*lead, heads, queries, keys), (*lead, heads, queries, v.shape[-1])
    drop = 1 if no_head_axis else 0
    mask, bias = _mask(mask, scores[drop:]), _bias(bias, scores[drop:], compute)
    if drop:
        mask, bias = mask if mask is None else mask[None], bias if bias is None else bias[None]
    options = {
        "softcap": _softcap(softcap), "sinks": _per_head("sinks", sinks, heads),
        "slopes": _per_head("alibi_slopes", alibi_slopes, heads),
    }  # fmt: skip
    seen = structure(
        lead, queries, keys, causal=causal, q_start=q_start, window=window, key_lengths=key_lengths,
        prefix_lengths=prefix_lengths, segments=segments, alibi=alibi_slopes is not None,
    )  # fmt: skip
    if seen.same_segment is not None:
        same = np.broadcast_to(seen.same_segment, scores)
        mask = same.view(np.uint8) if mask is None else mask & same
    if out is not None:
        _check_out(out, shape[drop:], dtype)
    lse = np.empty(shape[:-1], compute) if return_lse else None
    weights = np.zeros(scores, compute) if return_weights else None
    target = _target(out, shape, compute, (q, k, v, mask, bias))
    execute(
        _ready(q, compute), _ready(k, compute), _ready(v, compute), target, factor, threads, mask=mask, bias=bias,
        keys=seen, lse=lse, weights=weights, **options,
    )  # fmt: skip
    return _result(out, target, lse, weights, dtype, drop)


def _target(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: tuple[Array | None, ...]) -> Array:
    """Where the core writes: out itself if it can be written directly and holds no input, else a new array."""
    if (
        out is not None
        and out.dtype == dtype
        and out.flags.aligned
        and (out.shape[-1] <= 1 or out.strides[-1] == out.itemsize)
        and not any(np.may_share_memory(out, array) for array in inputs if array is not None)
    ):
        return out.reshape(shape) if out.shape == shape else out[None]
    return np.empty(shape, dtype)


def _result(
    out: Array | None, target: Array, lse: Array | None, weights: Array | None, dtype: np.dtype[Any], drop: int
) -> Array | AttentionResult:
    """The arrays in the caller's dtype and axes; without lse and weights the output alone."""
    index = (0,) * drop
    computed = target[index] if drop else target
    if out is None:
        out = computed.astype(dtype, copy=False)
    elif not np.may_share_memory(out, target):
        out[...] = computed
    if lse is None and weights is None:
        return out
    if weights is not None:
        weights = weights[index].astype(dtype, copy=False)
    return AttentionResult(out, lse if lse is None else lse[index], weights)
