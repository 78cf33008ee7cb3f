"""merge_attention(): one result from attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import as_array
from .core.constants import MIN_POWER
from .core.twin import weights_of
from .outputs import AttentionResult
from .partial import Partial
from .storage import promoted

Array = NDArray[Any]
Part = AttentionResult | tuple[ArrayLike, ArrayLike]


@overload
def merge_attention(parts: Iterable[Partial]) -> Partial: ...


@overload
def merge_attention(parts: Iterable[Part]) -> AttentionResult: ...


def merge_attention(parts: Iterable[Part] | Iterable[Partial]) -> AttentionResult | Partial:
    """Attention over the union of disjoint key sets, from the results over each.

    Parameters
    ----------
    parts : sequence of Partial, or of (out, lse) or AttentionResult
        Results of the same queries: what `attention_partial` returns, or out (..., L, Dv) and lse (..., L), as
        ``attention(..., return_lse=True)`` gives them. Shapes must be equal; nothing is broadcast.

    Returns
    -------
    Partial, or AttentionResult(out, lse, None)
        Of the kind of the parts, new arrays, out and lse in the promoted dtypes of the parts; computed at least in
        float32.

    Raises
    ------
    TypeError, ValueError
        No part at all, a part without lse, shapes that differ, unsupported dtypes.

    Notes
    -----
    With m = max lse_i and w_i = exp(lse_i - m)::

        out = sum w_i out_i / sum w_i        lse = m + log(sum w_i)

    which is associative and commutative within rounding: the online softmax of Milakov and Gimelshein, "Online
    normalizer calculation for softmax", 2018, with values as in Dao et al., "FlashAttention", 2022. A row without keys
    (lse -inf) is the identity, bit for bit, whatever its out holds. NaN in a part that has keys shows in its rows. One
    part alone is copied.

    lse leaves sinks out: compute the parts without them, merge, and multiply out by 1 / (1 + exp(sink - lse)), the
    share of the softmax that a sink leaves.

    Where all scores of a row are large (a bias of -1e30 on every key, say), lse loses the logarithm of the number of
    keys, and with it the parts' shares. A Partial keeps largest score and sum apart and loses nothing: the sums of
    2^(m_i - m) l_i and 2^(m_i - m) o_i go with m = max m_i.

    Gradients: with w_i = exp(lse_i - lse), those of the parts are::

        dout_i = w_i dout        dlse_i = w_i (rowsum(dout * (out_i - out)) + dlse)

    To get those of queries, keys and values it is less work to call `attention_backward` for each part with the merged
    out and lse.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention, merge_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 8))
    >>> first = attention(q, k[:, :4], v[:, :4], return_lse=True)
    >>> rest = attention(q, k[:, 4:], v[:, 4:], return_lse=True)
    >>> np.allclose(merge_attention([first, rest]).out, attention(q, k, v))
    True
    """
    if isinstance(parts, (Partial, AttentionResult, np.ndarray)) or not isinstance(parts, Iterable):
        raise TypeError(f"merge_attention: parts is a {type(parts).__name__}; it must be a list of (out, lse) pairs")
    given = list(parts)
    if not given:
        raise ValueError("merge_attention: parts is empty; give at least one (out, lse) pair")
    if all(isinstance(part, Partial) for part in given):
        return _merged(given)
    outs, lses = _checked(given)
    compute, dtype = promoted("merge_attention", *outs)
    compute_lse, lse_dtype = promoted("merge_attention", *lses)
    if len(outs) == 1:
        return AttentionResult(outs[0].astype(dtype), lses[0].astype(lse_dtype), None)
    work = np.result_type(compute, compute_lse)
    stack = np.stack([lse.astype(work, copy=False) for lse in lses])
    with np.errstate(all="ignore"):
        top = stack.max(axis=0)
        weights = weights_of(stack - np.where(np.isneginf(top), 0, top))
        total = weights.sum(axis=0)
        # Not top + log(1): that would turn -0.0 into 0.0, and one part with keys must come out as it went in.
        lse = np.where(total == 1, top, top + np.log(total))
        shares = weights / np.where(total == 0, 1, total)
        out = np.full(outs[0].shape, -0.0, work)  # -0.0 + x is x for every x, also for -0.0
        for share, part, own in zip(shares, outs, stack, strict=True):
            out += np.where(np.isneginf(own)[..., None], -0.0, share[..., None] * part.astype(work, copy=False))
        out[total == 0] = 0
        return AttentionResult(out.astype(dtype, copy=False), lse.astype(lse_dtype, copy=False), None)


def _merged(parts: list[Any]) -> Partial:
    """Unfinished rows over all keys, from unfinished rows over some of them."""
    parts = [
        Partial(*(as_array("merge_attention", f"{x} of part {i}", y) for x, y in part._asdict().items()))
        for i, part in enumerate(parts)
    ]
    for i, part in enumerate(parts):
        for name, array, first in zip(Partial._fields, part, parts[0], strict=True):
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"merge_attention: {name} of part {i} has shape {array.shape} and dtype {array.dtype}, of part 0 "
                    f"{first.shape} and {first.dtype}; they must be equal"
                )
    m = np.maximum.reduce([part.m for part in parts])
    total, o = np.zeros_like(parts[0].l), np.zeros_like(parts[0].o)
    with np.errstate(all="ignore"):
        for part in parts:
            x = part.m - m
            share = np.exp2(np.where(np.isneginf(part.m) | (x < MIN_POWER[m.itemsize]), -np.inf, x)).astype(m.dtype)
            total += share * part.l
            o += share[..., None] * part.o
    return Partial(m, total, o)


def _checked(pairs: list[Any]) -> tuple[list[Array], list[Array]]:
    outs, lses = [], []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != (3 if isinstance(pair, AttentionResult) else 2):
            raise TypeError(f"merge_attention: part {i} is a {type(pair).__name__}; it must be a pair (out, lse)")
        if pair[0] is None or pair[1] is None:
            raise TypeError(f"merge_attention: part {i} has no lse; call attention with return_lse=True")
        out, lse = (
            as_array("merge_attention", f"{name} of part {i}", array)
            for name, array in zip(("out", "lse"), pair, strict=False)
        )
        has = f"merge_attention: part {i} has out {out.shape}"
        if out.ndim < 2 or lse.shape != out.shape[:-1]:
            raise ValueError(f"{has} and lse {lse.shape}; they must be (..., L, Dv) and (..., L)")
        outs.append(out)
        lses.append(lse)
        if out.shape != outs[0].shape:
            raise ValueError(f"{has} and part 0 has {outs[0].shape}; they must be equal")
    return outs, lses
