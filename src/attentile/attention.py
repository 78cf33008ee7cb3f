"""attention(), and attention_partial(), whose rows can be continued with more keys.

The compiled check takes most calls as they are; scores.py converts the others, or says what is wrong with them.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from . import dispatch
from .arguments import named_in_errors, unknown_option
from .outputs import AttentionResult, Outputs
from .partial import Partial
from .runtime import backend
from .runtime.threads import get_num_threads, threads_for
from .scores import SCORE_OPTIONS, ScoreOptions, checked

Array = NDArray[Any]


class Options(ScoreOptions, total=False):
    """Every option of `attention` but the two that change what it returns."""

    out: Array | None


class AllOptions(Options, total=False):
    """Every option of `attention`."""

    return_lse: bool
    return_weights: bool


# Every option with its default, for callers that pass them on: explain(), KVCache, MultiHeadAttention.
OPTIONS: dict[str, Any] = {**SCORE_OPTIONS, "return_lse": False, "return_weights": False, "out": None}
_PARTIAL_OPTIONS = {name: default for name, default in SCORE_OPTIONS.items() if name != "sinks"}


@overload
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[Options]) -> Array: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    return_weights: bool = ...,
    **options: Unpack[Options],
) -> AttentionResult: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_weights: Literal[True],
    return_lse: bool = ...,
    **options: Unpack[Options],
) -> AttentionResult: ...


@overload
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[AllOptions]) -> Array | AttentionResult: ...


def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Any) -> Array | AttentionResult:
    """Exact scaled dot-product attention, softmax(scale * q k^T + bias) v over the allowed keys, in one fused pass.

    Parameters
    ----------
    q : array_like, shape (..., Hq, L, D)
        Queries. Two-dimensional arrays (L, D) have no head axis. Batch axes (...) broadcast as in NumPy.
    k : array_like, shape (..., Hkv, S, D)
        Keys. Hq must be a multiple of Hkv (grouped-query attention): query head h uses key head h // (Hq // Hkv).
    v : array_like, shape (..., Hkv, S, Dv)
        Values; Dv may differ from D.
    mask : array_like of bool, optional
        True = may attend. Broadcasts to (..., Hq, L, S). With the options below, all of them must allow a key.
    bias : array_like of float, optional
        Added to the scores; broadcasts to (..., Hq, L, S). -inf excludes a key; a finite value, however low, does not.
    causal : bool or {"upper_left", "lower_right"}
        A query sees the keys up to its own position. True: query i stands at position i and L must equal S, or
        at q_start + i. For L != S name the alignment ("lower_right" counts from the last valid key)::

            "upper_left"      "lower_right"
             1 0 0 0 0         1 1 1 0 0
             1 1 0 0 0         1 1 1 1 0
             1 1 1 0 0         1 1 1 1 1

    q_start : int or array_like of int (one per batch item), optional
        Position of query 0, for causal=True, window and alibi_slopes, as in chunked prefill and decoding.
    window : (left, right), optional
        A query sees ``left`` keys before and ``right`` keys after its own position, both inclusive; None = unlimited.
        Without a causal form a query's position is its row if L = S, else q_start must be given::

            window=(1, 1)     causal=True, window=(1, None)
             1 1 0 0           1 0 0 0
             1 1 1 0           1 1 0 0
             0 1 1 1           0 1 1 0
             0 0 1 1           0 0 1 1

    key_lengths : int or array_like of int (one per batch item), optional
        Number of valid keys of each item; the keys behind them are padding, excluded and never read.
    prefix_lengths : int or array_like of int (one per batch item), optional
        With a causal form: how many of the first keys every query sees (prefix language model).
    segments : array_like of int, shape (..., S), or a tuple of two, (..., L) and (..., S), optional
        Packed sequences: a query sees the keys with its id. `segment_ids` makes ids from lengths. A tuple is always
        (query ids, key ids), never the ids of two batch items.
    scale : float, optional
        Factor of the scores, default 1 / sqrt(D). Times log2(e) it must be finite in the arithmetic's dtype.
    softcap : float, optional
        Positive: scores become softcap * tanh(score / softcap), before bias and masks.
    sinks : array_like of float, shape (Hq,), optional
        One logit per query head whose exponential is added to the softmax's denominator: a key without a value. lse
        leaves it out.
    alibi_slopes : array_like of float, shape (Hq,), optional
        slope * abs(query position - key position) is subtracted from the scores; the function of this name gives the
        published slopes.
    score_mod : callable, optional
        For experiments; runs in NumPy, about ten times slower. Called as scores = score_mod(scores, b, h, i, j) on
        tiles of a head's scores, after every other change and before the masks; b is the item, h the query head,
        i (rows, 1) and j (1, S) the query and key indices. A score of -inf excludes the key.
    before : Partial, optional
        Rows that have seen other keys already (`attention_partial`). Positions, key_lengths and so on are relative to
        the keys of this call.
    dtype : "bfloat16", optional
        What arrays of uint16 hold: the bits of bfloat16, for which NumPy has no dtype
        (``tensor.view(torch.uint16).numpy()`` in PyTorch). If q, k and v do, so do the output and the weights.
    return_lse : bool
        Also return the natural logarithm of the sum of exp of the scores, shape (..., Hq, L).
    return_weights : bool
        Also return the softmax weights, shape (..., Hq, L, S).
    out : ndarray, shape (..., Hq, L, Dv), optional
        Where the result is written; also returned. Any strides; it may overlap an input, but not itself.
    num_threads : int, optional
        Threads of this call; default `get_num_threads()`. The result is the same, bit for bit, for any number.

    Returns
    -------
    ndarray, shape (..., Hq, L, Dv), or AttentionResult(out, lse, weights)
        The dtype is that of q, k and v by NumPy's promotion; float16 and bfloat16 are read as they are stored, computed
        in float32 and rounded once, integers and bool become float64. mask, bias and scale never change it. lse is
        float64 where the arithmetic is, else float32.

    Raises
    ------
    TypeError
        A mask that is not bool, a bias that is not floating, an unsupported dtype, a masked array, a window that is not
        a pair.
    ValueError
        Shapes that do not fit, D = 0, ambiguous query positions, an `out` that is read-only, overlaps itself or has
        another shape or dtype. Every check runs before any work.

    Notes
    -----
    A row without any allowed key gives output 0, weights 0 and lse -inf. Excluded keys, values and bias entries are
    never used: they may hold NaN or Inf. The bits of a row depend on its query and on the keys it may see, not on
    batch, L, padding or threads. Formula: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.

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
    core = backend.active
    if core is not None:
        found = core.attention(q, k, v, options, get_num_threads())
        if found is not None:
            return AttentionResult(*found) if type(found) is tuple else found
    unknown_option("attention", options, OPTIONS.keys())
    threads = threads_for(options.get("num_threads"), "attention")
    scores, v = checked(q, k, v, options)
    outputs = Outputs(scores, v, options)
    dispatch.attend(scores, v, outputs, threads)
    return outputs.finished()


def attention_partial(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Any) -> Partial:
    """Unfinished rows of `attention` over some of their keys, to be continued with more keys or to be merged.

    Parameters
    ----------
    q, k, v, mask, bias, scale, softcap, alibi_slopes, score_mod, before, dtype, num_threads
        As in `attention`. There is no ``sinks``: pass it to the call that finishes the rows.
    causal, q_start, window, key_lengths, prefix_lengths, segments
        As in `attention`, relative to the keys of this call: q_start is the position of query 0 minus that of this
        call's first key, and may be negative.

    Returns
    -------
    Partial
        (m, l, o) in the dtype of the arithmetic: float64 for float64 and integers, else float32.

    Raises
    ------
    TypeError, ValueError
        Whatever `attention` refuses.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention, attention_partial, merge_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 8))
    >>> parts = [attention_partial(q, k[:, :4], v[:, :4]), attention_partial(q, k[:, 4:], v[:, 4:])]
    >>> np.allclose(merge_attention(parts).out, attention(q, k, v))
    True
    """
    core = backend.active
    if core is not None and "sinks" not in options:
        found = core.partial(q, k, v, options, get_num_threads())
        if found is not None:
            return Partial(*found)
    unknown_option("attention_partial", options, _PARTIAL_OPTIONS.keys())
    threads = threads_for(options.get("num_threads"), "attention_partial")
    with named_in_errors("attention_partial"):
        scores, v = checked(q, k, v, options)
    outputs = Outputs(scores, v, None, partial=True)
    dispatch.attend(scores, v, outputs, threads)
    assert outputs.partial is not None
    return outputs.partial


def _name_options(function: Any, options: dict[str, Any]) -> None:
    """Names the options in help() and signature(), while the call itself passes them on as they come."""
    given, types = inspect.signature(function), AllOptions.__annotations__
    arrays = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in options.items()
    ]
    function.__signature__ = given.replace(parameters=[*arrays, *named])


_name_options(attention, OPTIONS)
_name_options(attention_partial, _PARTIAL_OPTIONS)
