"""The ONNX operator Attention (opsets 23, 24, 25) with its own semantics, by the fused pass, and those around it.

attention(), rotary_embedding() and tensor_scatter() need NumPy only. operators() gives them as classes for the package
onnx and its onnx.reference.ReferenceEvaluator: Attention, RotaryEmbedding (opset 23), TensorScatter (opset 24).

What Attention leaves to a runtime, or where its description and its reference implementation differ:

* A row without any allowed key gives 0 in Y and in mode 3 of qk_matmul_output (description, errata of opset 23), -inf
  in mode 2.
* Causal order and windows count from the first query's position: the past length, or nonpad_kv_seqlen - L per batch
  item, or 0. This is none of attentile's two alignments when L != S.
* A mask whose last axis is shorter than S excludes the keys after it, also if that axis is 1: it is padded, not
  broadcast, in the reference implementation and in the function body of opset 25.
* qk_matmul_output_mode 0 is before softcap and mode 1 after it, as described and in the function body. The reference
  implementation of onnx 1.23 gives the capped scores in mode 0 too.
* An excluded key is not used, even if it or its value is NaN, where adding -inf to its score would give NaN.
* float16 and bfloat16 are computed in float32 and rounded once, where the function body rounds after every step.
* A softmax_precision below that of the inputs is not imitated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, as_floating, as_real
from ..attention import attention as _fused
from ..masks import structure
from ..outputs import AttentionResult
from ..scores import Window
from ..storage import rounded
from .operators import choice, integers, rotary_embedding, split_heads, tensor_scatter

__all__ = ["AttentionOutputs", "attention", "operators", "rotary_embedding", "tensor_scatter"]

Array = NDArray[Any]

_NAME = "onnx.attention"  # in errors
_DOUBLE = 11  # of TensorProto.DataType
# qk_matmul_output_mode; 1 is after softcap
_RAW = 0
_BIASED = 2
_WEIGHTS = 3


class AttentionOutputs(NamedTuple):
    """The four outputs of the operator Attention.

    Attributes
    ----------
    Y : ndarray, shape (B, Hq, L, Dv) or (B, L, Hq * Dv)
        The output, with as many axes as Q.
    present_key, present_value : ndarray, shapes (B, Hkv, S, D) and (B, Hkv, S, Dv)
        Keys and values with the past before them; views of K and V if there is none.
    qk_matmul_output : ndarray, shape (B, Hq, L, S), or None
        Scores or weights, whichever the mode says; None if not asked for.
    """

    Y: Array
    present_key: Array
    present_value: Array
    qk_matmul_output: Array | None


def _window(left: int, right: int) -> Window:
    for name, side in (("left_window_size", left), ("right_window_size", right)):
        if side < -1:
            raise ValueError(f"{_NAME}: {name} is {side}; it must be -1 (unlimited) or at least 0")
    if left == right == -1:
        return None
    return None if left == -1 else left, None if right == -1 else right


def _check_attributes(is_causal: int, mode: int, precision: int | None, softcap: float, scale: float | None) -> None:
    choice(_NAME, "is_causal", is_causal, (0, 1), "0 or 1")
    choice(_NAME, "qk_matmul_output_mode", mode, (0, 1, 2, 3), "0, 1, 2 or 3")
    known = "one of 1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE), 16 (BFLOAT16)"
    choice(_NAME, "softmax_precision", precision, (None, 1, 10, _DOUBLE, 16), known)
    if not 0 <= as_real(_NAME, "softcap", softcap) < math.inf:
        raise ValueError(f"{_NAME}: softcap is {softcap}; it must be positive, or 0 for no cap")
    if scale is not None and not 0 <= as_real(_NAME, "scale", scale) < math.inf:
        raise ValueError(
            f"{_NAME}: scale is {scale}; it must be finite and not negative, for the operator multiplies "
            "Q and K by its square root"
        )


def _inputs(Q: Any, K: Any, V: Any, q_heads: int | None, kv_heads: int | None) -> tuple[Array, Array, Array]:
    """Q, K, V as (batch, heads, length, width)."""
    wanted = "the operator takes float64, float32, float16 and bfloat16"
    Q, K, V = (as_floating(_NAME, name, x, wanted) for name, x in (("Q", Q), ("K", K), ("V", V)))
    shapes = f"Q has shape {Q.shape}, K {K.shape}, V {V.shape}"
    if Q.ndim not in (3, 4) or not Q.ndim == K.ndim == V.ndim:
        raise ValueError(f"{_NAME}: Q, K and V must all have three axes or all four ({shapes})")
    if not Q.shape[0] == K.shape[0] == V.shape[0]:
        raise ValueError(f"{_NAME}: Q, K and V must have the same batch size ({shapes})")
    q = split_heads(_NAME, "Q", Q, "q_num_heads", q_heads, "3-D inputs")
    k, v = (split_heads(_NAME, name, x, "kv_num_heads", kv_heads, "3-D inputs") for name, x in (("K", K), ("V", V)))
    return q, k, v


def _with_past(k: Array, v: Array, past_key: Any, past_value: Any, lengths: Any) -> tuple[Array, Array]:
    """Past and new keys, past and new values."""
    if (past_key is None) != (past_value is None):
        raise ValueError(f"{_NAME}: past_key and past_value must be given together")
    if past_key is None:
        return k, v
    if lengths is not None:
        raise ValueError(f"{_NAME}: nonpad_kv_seqlen can't be combined with past_key and past_value")

    def joined(name: str, given: Any, new: Array) -> Array:
        past, (batch, heads, _, width) = as_array(_NAME, name, given), new.shape
        if past.shape != (batch, heads, *past.shape[2:3], width):
            wanted = f"({batch}, {heads}, past length, {width})"
            raise ValueError(f"{_NAME}: {name} has shape {past.shape}; it must be {wanted}")
        return np.concatenate((past, new), axis=2, dtype=new.dtype)

    return joined("past_key", past_key, k), joined("past_value", past_value, v)


def _places(
    causal: bool, window: Window, past: int, nonpad_kv_seqlen: Any, queries: int, shape: tuple[int, int], reach: int
) -> dict[str, Any]:
    """The structural arguments for the first `reach` keys of (batch, keys); queries stand where ONNX counts from."""
    places: dict[str, Any] = {"causal": causal, "window": window}
    start: int | NDArray[np.intp] = past
    if nonpad_kv_seqlen is not None:
        valid = integers(_NAME, "nonpad_kv_seqlen", nonpad_kv_seqlen, shape[:1], "batch item")
        if ((valid < 0) | (valid > shape[1])).any():
            raise ValueError(
                f"{_NAME}: nonpad_kv_seqlen has values from {valid.min()} to {valid.max()}; they must lie between 0 "
                f"and the number of keys, {shape[1]}"
            )
        start = valid.astype(np.intp) - queries
        places["key_lengths"] = np.minimum(valid, reach).astype(np.intp)
    if causal or window is not None:
        places["q_start"] = start
    return places


def _mask(attn_mask: Any, keys: int) -> tuple[Array | None, int]:
    """attn_mask as an array, bool or floating, and the number of keys it reaches: those after it are excluded."""
    if attn_mask is None:
        return None, keys
    mask = as_array(_NAME, "attn_mask", attn_mask)
    if mask.ndim == 0 or mask.ndim > 4 or mask.shape[-1] > keys:
        raise ValueError(
            f"{_NAME}: attn_mask has shape {mask.shape}; it must have one to four axes and not more than {keys} "
            "entries, one per key, on the last"
        )
    if mask.dtype.kind in "iu":  # the type list of the operator has integers: they are added, as floats are
        mask = mask.astype(np.float64)
    return mask, mask.shape[-1]


def _scores(q: Array, k: Array, scale: float | None, softcap: float) -> Array:
    """scale * q k^T, capped: (batch, q heads, L, S) in the dtype of the arithmetic. The fused pass gives no scores."""
    dtype = np.result_type(np.float32, q, k)
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    factor, cap = dtype.type(1 / math.sqrt(width) if scale is None else scale), dtype.type(softcap)
    with np.errstate(all="ignore"):
        scaled = q.astype(dtype, copy=False) * factor
        grouped = scaled.reshape(batch, kv_heads, heads // max(kv_heads, 1), queries, width)
        scores: Array = grouped @ k.astype(dtype, copy=False)[:, :, None].swapaxes(-1, -2)
        if softcap:
            scores = cap * np.tanh(scores / cap)
    return scores.reshape(batch, heads, queries, keys)


def _add_masks(scores: Array, mask: Array | None, reach: int, places: dict[str, Any]) -> None:
    """Adds the float mask in place and puts -inf at every key that is excluded by anything."""
    scores[..., reach:] = -np.inf
    within = scores[..., :reach]
    if mask is not None and mask.dtype != np.bool_:
        with np.errstate(all="ignore"):
            within += mask.astype(scores.dtype, copy=False)
        mask = mask != -np.inf
    if mask is not None:
        np.copyto(within, -np.inf, where=~mask)
    batch, _, queries, _ = scores.shape
    intervals = structure((batch,), queries, reach, places).intervals(queries, reach)
    if intervals is not None:
        lo, hi = (side[..., None, :, None] for side in intervals)
        keys = np.arange(reach)
        np.copyto(within, -np.inf, where=(keys < lo) | (keys >= hi))


def attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    attn_mask: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    nonpad_kv_seqlen: ArrayLike | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    return_qk: bool = False,
    num_threads: int | None = None,
) -> AttentionOutputs:
    """The ONNX operator Attention of opsets 23, 24 and 25: inputs in its order, attributes by name.

    https://onnx.ai/onnx/operators/onnx__Attention.html; the description of the module says where its text leaves room.

    Parameters
    ----------
    Q : array_like of float, shape (B, Hq, L, D) or (B, L, Hq * D)
        Queries; three axes go with q_num_heads and kv_num_heads.
    K, V : array_like of float, shapes (B, Hkv, S', D) and (B, Hkv, S', Dv)
        Keys and values, or with three axes like Q. Hq must be a multiple of Hkv.
    attn_mask : array_like of bool or number, optional
        bool: True = may attend; else added to the scores. Broadcasts to (B, Hq, L, S), but a last axis shorter than S
        excludes the keys after it.
    past_key, past_value : array_like, shape (B, Hkv, P, D) and (B, Hkv, P, Dv), optional
        Cached keys and values, put before K and V: S = P + S'. Both or none.
    nonpad_kv_seqlen : array_like of int, shape (B,), optional
        Valid keys of each batch item of a cache that K and V hold as a whole; not together with past_key.
    is_causal : {0, 1}
        Query i sees key j if j <= i + P, with nonpad_kv_seqlen if j <= i + nonpad_kv_seqlen - L.
    q_num_heads, kv_num_heads : int, optional
        Hq and Hkv of three-axis inputs. With four axes they may be left out, and must agree with the shapes if not.
    left_window_size, right_window_size : int
        Keys seen before and after a query's own position (the same as for is_causal); -1 = all.
    qk_matmul_output_mode : {0, 1, 2, 3}
        What qk_matmul_output holds: 0 = scale * Q K^T, 1 = after softcap, 2 = after mask and bias, 3 = the softmax.
    scale : float, optional
        Not negative; default 1 / sqrt(D).
    softcap : float
        As in `attentile.attention`; 0 = no cap.
    softmax_precision : {1, 10, 11, 16}, optional
        TensorProto.DataType of the softmax, a lower bound: 11 (DOUBLE) computes all in float64, others change nothing.
    return_qk : bool
        Whether qk_matmul_output is asked for. Modes 0 to 2 then compute the scores a second time, in NumPy.
    num_threads : int, optional
        As in `attentile.attention`.

    Returns
    -------
    AttentionOutputs (Y, present_key, present_value, qk_matmul_output)
        Y and qk_matmul_output have Q's dtype.

    Raises
    ------
    TypeError, ValueError
        Q, K or V not floating; shapes, heads or attributes that do not fit.

    Examples
    --------
    One decoding step with a cache of five keys:

    >>> import numpy as np
    >>> from attentile import onnx
    >>> x = np.ones((1, 1, 16), np.float32)  # batch 1, one token, 2 heads of width 8
    >>> past = np.zeros((1, 2, 5, 8), np.float32)
    >>> found = onnx.attention(x, x, x, None, past, past, q_num_heads=2, kv_num_heads=2, is_causal=1)
    >>> found.Y.shape, found.present_key.shape
    ((1, 1, 16), (1, 2, 6, 8))
    """
    _check_attributes(is_causal, qk_matmul_output_mode, softmax_precision, softcap, scale)
    window = _window(left_window_size, right_window_size)
    q, k, v = _inputs(Q, K, V, q_num_heads, kv_num_heads)
    present = _with_past(k, v, past_key, past_value, nonpad_kv_seqlen)
    past = present[0].shape[2] - k.shape[2]
    k, v = present
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    dtype = q.dtype.newbyteorder("=")
    mask, reach = _mask(attn_mask, keys)
    places = _places(bool(is_causal), window, past, nonpad_kv_seqlen, queries, (batch, keys), reach)
    if softmax_precision == _DOUBLE:
        q, k, v = (array.astype(np.float64, copy=False) for array in (q, k, v))
    options = places | {"scale": scale, "softcap": softcap or None, "num_threads": num_threads}
    options["mask" if mask is None or mask.dtype == np.bool_ else "bias"] = mask
    options["return_weights"] = return_qk and qk_matmul_output_mode == _WEIGHTS
    if np.ndim(Q) == 3:  # concatenated heads: the pass writes them there, so that Y is a view
        joined = np.empty((batch, queries, heads, v.shape[3]), np.result_type(q, k, v))
        options["out"] = joined.swapaxes(1, 2)
    # The keys that a short mask does not reach are excluded in every row: left out, they need no padded mask.
    result = _fused(q, k[:, :, :reach], v[:, :, :reach], **options)
    Y, weights = (result.out, result.weights) if isinstance(result, AttentionResult) else (result, None)
    if np.ndim(Q) == 3:
        Y = joined.reshape(batch, queries, heads * v.shape[3])
    scores = None
    if weights is not None:
        scores = np.zeros((batch, heads, queries, keys), dtype)
        scores[..., :reach] = weights
    elif return_qk:
        scores = _scores(q, k, scale, softcap if qk_matmul_output_mode != _RAW else 0)
        if qk_matmul_output_mode == _BIASED:
            _add_masks(scores, mask, reach, places)
        scores = rounded(scores, dtype)
    return AttentionOutputs(rounded(Y, dtype), *present, scores)


@cache
def operators() -> tuple[type[Any], ...]:
    """The operators as classes for the reference evaluator of the package onnx, as one tuple.

    Returns
    -------
    tuple of subclasses of onnx.reference.op_run.OpRun
        `Attention`, `RotaryEmbedding` and `TensorScatter`, which this module also has by their names.

    Raises
    ------
    ImportError
        If the package onnx is not installed.

    Examples
    --------
    >>> from attentile.onnx import operators
    >>> from onnx.reference import ReferenceEvaluator  # doctest: +SKIP
    >>> session = ReferenceEvaluator("model.onnx", new_ops=[*operators()])  # doctest: +SKIP
    """
    try:
        from onnx.reference.op_run import OpRun
    except ImportError as error:
        raise ImportError(
            "attentile.onnx: the classes for the reference evaluator need the package onnx; pip install onnx"
        ) from error

    def operator(name: str, function: Callable[..., Any]) -> type[Any]:
        def _run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
            given = {key: value for key, value in attributes.items() if value is not None}
            outputs = list(self.onnx_node.output)
            while not outputs[-1]:  # the last ones may be left out
                outputs.pop()
            if len(outputs) == len(AttentionOutputs._fields):
                given["return_qk"] = True
            found = function(*inputs, **given)
            return found[: len(outputs)] if isinstance(found, tuple) else (found,)

        doc = f"The operator {name} for onnx.reference.ReferenceEvaluator(model, new_ops=[{name}])."
        return type(name, (OpRun,), {"__doc__": doc, "__module__": __name__, "op_domain": "", "_run": _run})

    return (
        operator("Attention", attention),
        operator("RotaryEmbedding", rotary_embedding),
        operator("TensorScatter", tensor_scatter),
    )


def __getattr__(name: str) -> Any:
    if name in ("Attention", "RotaryEmbedding", "TensorScatter"):
        return {operator.__name__: operator for operator in operators()}[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
