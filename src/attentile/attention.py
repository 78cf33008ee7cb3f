"""attention(): the call that goes beyond the textbook. Checks and axes are in call.py, the pass is the core's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .call import Call, attend, check_out, prepare, rounded
from .core.twin import ScoreMod
from .runtime import config

Array = NDArray[Any]
Causal = bool | Literal["upper_left", "lower_right"]
Window = tuple[int | None, int | None] | None
Segments = ArrayLike | tuple[ArrayLike, ArrayLike] | None


class AttentionResult(NamedTuple):
    """What `attention` returns when more than the output is asked for; what was not asked for is None.

    Attributes
    ----------
    out : ndarray, shape (..., Hq, L, Dv)
        The output.
    lse : ndarray, shape (..., Hq, L), or None
        Natural logarithm of the sum of exp of the scores, with return_lse.
    weights : ndarray, shape (..., Hq, L, S), or None
        The softmax weights, with return_weights.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention
    >>> out, lse, weights = attention(np.zeros((1, 4)), np.zeros((2, 4)), np.eye(2), return_lse=True)
    >>> lse.round(3)  # log(exp(0) + exp(0))
    array([0.693])
    >>> weights is None
    True
    """

    out: Array
    lse: Array | None
    weights: Array | None


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = ..., bias: ArrayLike | None = ...,
    causal: Causal = ..., q_start: ArrayLike | None = ..., window: Window = ..., key_lengths: ArrayLike | None = ...,
    prefix_lengths: ArrayLike | None = ..., segments: Segments = ..., scale: float | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., alibi_slopes: ArrayLike | None = ...,
    score_mod: ScoreMod | None = ..., return_lse: Literal[False] = ..., return_weights: Literal[False] = ...,
    out: Array | None = ..., num_threads: int | None = ...,
) -> Array: ...  # fmt: skip


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], mask: ArrayLike | None = ...,
    bias: ArrayLike | None = ..., causal: Causal = ..., q_start: ArrayLike | None = ..., window: Window = ...,
    key_lengths: ArrayLike | None = ..., prefix_lengths: ArrayLike | None = ..., segments: Segments = ...,
    scale: float | None = ..., softcap: float | None = ..., sinks: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ..., score_mod: ScoreMod | None = ..., return_weights: bool = ...,
    out: Array | None = ..., num_threads: int | None = ...,
) -> AttentionResult: ...  # fmt: skip


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_weights: Literal[True], mask: ArrayLike | None = ...,
    bias: ArrayLike | None = ..., causal: Causal = ..., q_start: ArrayLike | None = ..., window: Window = ...,
    key_lengths: ArrayLike | None = ..., prefix_lengths: ArrayLike | None = ..., segments: Segments = ...,
    scale: float | None = ..., softcap: float | None = ..., sinks: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ..., score_mod: ScoreMod | None = ..., return_lse: bool = ...,
    out: Array | None = ..., num_threads: int | None = ...,
) -> AttentionResult: ...  # fmt: skip


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = ..., bias: ArrayLike | None = ...,
    causal: Causal = ..., q_start: ArrayLike | None = ..., window: Window = ..., key_lengths: ArrayLike | None = ...,
    prefix_lengths: ArrayLike | None = ..., segments: Segments = ..., scale: float | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., alibi_slopes: ArrayLike | None = ...,
    score_mod: ScoreMod | None = ..., return_lse: bool = ..., return_weights: bool = ...,
    out: Array | None = ..., num_threads: int | None = ...,
) -> Array | AttentionResult: ...  # fmt: skip


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, bias: ArrayLike | None = None,
    causal: Causal = False, q_start: ArrayLike | None = None, window: Window = None,
    key_lengths: ArrayLike | None = None, prefix_lengths: ArrayLike | None = None, segments: Segments = None,
    scale: float | None = None, softcap: float | None = None, sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None, score_mod: ScoreMod | None = None, return_lse: bool = False,
    return_weights: bool = False, out: Array | None = None, num_threads: int | None = None,
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
        True = may attend. Broadcasts to (..., Hq, L, S). With the options below, a key must be allowed by all of them.
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
        A query sees ``left`` keys before and ``right`` keys after its own position, both inclusive; None = unlimited.
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
        Any number whose product with log2(e) is finite in the arithmetic's dtype; default 1 / sqrt(D).
    softcap : float, optional
        Positive: scores become softcap * tanh(score / softcap), before bias and masks.
    sinks : array_like of float, shape (Hq,), optional
        A logit per query head that takes its share of the softmax and has no value; lse leaves it out.
    alibi_slopes : array_like of float, shape (Hq,), optional
        slope * abs(query position - key position) is subtracted from the scores (`alibi_slopes` gives the usual ones).
    score_mod : callable, optional
        For experiments: scores = score_mod(scores, b, h, i, j) after every other change and before the masks, on tiles
        of a head's scores. b counts the batch items, i (rows, 1) and j (1, S) are the query and key indices. A score
        of -inf excludes the key, as a bias does. Runs in NumPy, an order of magnitude slower than everything else.
    return_lse : bool
        Also return the natural logarithm of the sum of exp of the scores, shape (..., Hq, L).
    return_weights : bool
        Also return the softmax weights, shape (..., Hq, L, S).
    out : ndarray, shape (..., Hq, L, Dv), optional
        Written and returned; any strides. It may overlap an input, but not itself.
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
        A mask that is not bool, a bias that is not floating, an unsupported dtype, a masked array, a window that is not
        a pair.
    ValueError
        Shapes that do not fit, D = 0, causal=True or a window where the positions of the queries are ambiguous, an
        `out` that is read-only, overlaps itself or has another shape or dtype. Every check runs before any work.

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
    plain = plain and sinks is None and alibi_slopes is None and score_mod is None and out is None
    plain = plain and not return_lse and not return_weights
    if plain and core is not None:
        result = core.attend_plain(q, k, v, scale, config.threads_for(num_threads, "attention"))
        if result is not None:
            return result  # type: ignore[no-any-return]
    call = prepare(
        q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
        num_threads=num_threads, causal=causal, q_start=q_start, window=window, key_lengths=key_lengths,
        prefix_lengths=prefix_lengths, segments=segments, score_mod=score_mod,
    )  # fmt: skip

    def run(target: Array, lse: Array | None, weights: Array | None) -> None:
        attend(
            call.q, call.k, call.v, target, call.scale, call.threads, mask=call.mask, lse=lse, weights=weights,
            named=call.named(), **call.options,
        )  # fmt: skip

    return finish(call, run, out, return_lse, return_weights)


# Every option with its default, for those who take them on: explain(), KVCache, MultiHeadAttention.
OPTIONS: dict[str, Any] = dict(attention.__kwdefaults__ or {})


def finish(
    call: Call, run: Callable[[Array, Array | None, Array | None], None], out: Array | None, return_lse: bool,
    return_weights: bool,
) -> Array | AttentionResult:  # fmt: skip
    """Checks out, lets run(target, lse, weights) fill arrays of the core's dtype and axes, and returns the caller's."""
    if out is not None:
        check_out("attention", out, call.shape[call.drop :], call.dtype)
    lse = np.empty(call.shape[:-1], call.compute) if return_lse else None
    weights = np.zeros(call.scores, call.compute) if return_weights else None
    target = _target(out, call)
    run(target, lse, weights)
    return _result(out, target, lse, weights, call)


def _target(out: Array | None, call: Call) -> Array:
    """Where the core writes: out itself if it can be written directly and holds no input, else a new array."""
    inputs = (call.q, call.k, call.v, call.mask, call.bias)
    if (
        out is not None
        and call.options.get("score_mod") is None
        and out.dtype == call.compute
        and out.flags.aligned
        and (out.shape[-1] <= 1 or out.strides[-1] == out.itemsize)
        and not any(np.may_share_memory(out, array) for array in inputs if array is not None)
    ):
        return out[None] if call.drop else out
    return np.empty(call.shape, call.compute)


def _result(
    out: Array | None, target: Array, lse: Array | None, weights: Array | None, call: Call
) -> Array | AttentionResult:
    """The arrays in the caller's dtype and axes; without lse and weights the output alone."""
    index = (0,) * call.drop
    computed = target[index] if call.drop else target
    if out is None:
        out = rounded(computed, call.dtype)
    elif not np.may_share_memory(out, target):
        out[...] = rounded(computed, out.dtype)
    if lse is None and weights is None:
        return out
    if weights is not None:
        weights = rounded(weights[index], call.dtype)
    return AttentionResult(out, lse if lse is None else lse[index], weights)
