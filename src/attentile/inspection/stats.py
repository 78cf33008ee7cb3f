"""Looking at attention without its matrix: statistics of the weights, what a call will do, and which keys it sees."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..call import Call, attend, execute, named_in_errors, prepare
from ..core import twin
from ..masks import positive_index
from ..runtime import config

Array = NDArray[Any]

KINDS = ("entropy", "max", "top_k", "received", "rows")


class AttentionStats(NamedTuple):
    """What `attention_stats` returns; what was not asked for is None. Hq query heads, L queries, S keys.

    Attributes
    ----------
    out : ndarray, shape (..., Hq, L, Dv)
        As `attention` gives it.
    lse : ndarray, shape (..., Hq, L)
        As `attention` gives it: without sinks.
    entropy : ndarray, shape (..., Hq, L), or None
        Of the weights of each row, in nats.
    max : ndarray, shape (..., Hq, L), or None
        The largest weight of each row.
    top_weights : ndarray, shape (..., Hq, L, top_k), or None
        The largest weights of each row, descending; 0 where there are fewer.
    top_keys : ndarray of intp, shape (..., Hq, L, top_k), or None
        Their keys, of equal weights the lower one first. -1 where the weight is 0: the row sees fewer keys, or the
        others score so far below its best ones that their weights underflow.
    received : ndarray, shape (..., Hq, S), or None
        The sum over the queries of the weight that each key got (what cache eviction needs).
    rows : ndarray, shape (..., Hq, n, S), or None
        All weights of the n chosen rows.
    """

    out: Array
    lse: Array
    entropy: Array | None
    max: Array | None
    top_weights: Array | None
    top_keys: Array | None
    received: Array | None
    rows: Array | None


def attention_stats(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, which: str | Sequence[str] = KINDS[:4], top_k: int = 8,
    rows: ArrayLike | None = None, mask: ArrayLike | None = None, bias: ArrayLike | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None, num_threads: int | None = None, **structural: Any,
) -> AttentionStats:  # fmt: skip
    """Attention and statistics of its weights in O(L + S) memory: the (L, S) weights are never stored.

    A first pass computes the output and, of each row, the largest score and the sum of exp beside it; a second one
    forms the final weights from these chunk by chunk, reduces them and forgets them.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, shapes (..., Hq, L, D), (..., Hkv, S, D), (..., Hkv, S, Dv).
    which : str or sequence of str
        What to compute, of "entropy", "max", "top_k", "received" (the default is these four) and "rows".
    top_k : int
        How many of the strongest keys of each row are kept, with "top_k".
    rows : array_like of int, shape (n,)
        Queries whose full weights are wanted; goes with "rows" in `which`, and only with it. Negative ones count from
        the end.
    mask, bias, scale, softcap, sinks, alibi_slopes, num_threads
        As in `attention`.
    **structural
        causal, q_start, window, key_lengths, prefix_lengths, segments, as in `attention`.

    Returns
    -------
    AttentionStats
        The output, the logsumexp, and what was asked for: of the same weights, but for rounding, that `attention`
        returns. Rows without keys have 0 everywhere. With sinks the weights are those of the keys, which sum to less
        than 1. A row with NaN in a score that it uses has NaN for every key that it sees; its strongest keys are then
        the first ones.

    Raises
    ------
    ValueError, TypeError
        An unknown name in `which`, "rows" without rows= or rows= without "rows", rows out of range, and whatever
        `attention` refuses.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention_stats
    >>> q = k = np.zeros((3, 4))
    >>> stats = attention_stats(q, k, np.eye(3), which=("entropy", "received"), causal=True)
    >>> stats.entropy.round(3)  # log 1, log 2, log 3
    array([0.   , 0.693, 1.099])
    >>> stats.received.round(3)
    array([1.833, 0.833, 0.333])
    """
    wanted = (which,) if isinstance(which, str) else tuple(which)
    for name in wanted:
        if name not in KINDS:
            raise ValueError(f"attention_stats: which has {name!r}; the statistics are {', '.join(KINDS)}")
    top_k = positive_index("attention_stats", "top_k", top_k)
    options = {"causal": False, "q_start": None, "window": None, "key_lengths": None, "prefix_lengths": None}
    unknown = structural.keys() - options.keys() - {"segments"}
    if unknown:
        raise TypeError(f"attention_stats: unexpected keyword argument {min(unknown)!r}")
    if rows is not None and "rows" not in wanted:
        raise ValueError('attention_stats: rows= chooses the rows of "rows", which is not in `which`; name it there')
    with named_in_errors("attention_stats"):
        call = prepare(
            q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            num_threads=num_threads, **{**options, "segments": None, **structural},
        )  # fmt: skip
    chosen = _chosen_rows(rows, call.q.shape[-2]) if "rows" in wanted else None
    out, lse = np.empty(call.shape, call.compute), np.empty(call.shape[:-1], call.compute)
    state = np.empty((*call.shape[:-1], 2), call.compute)  # largest score and sum of exp, as the core leaves them
    backend = config.core() or twin  # whose unit the state has
    attend(
        call.q, call.k, call.v, out, call.scale, call.threads, mask=call.mask, lse=lse, backend=backend,
        named={**call.named(), "state": state}, **call.options,
    )  # fmt: skip
    found = _second_pass(call, state, wanted, top_k, chosen, backend)
    return _results(call, out, lse, found)


def _chosen_rows(rows: ArrayLike | None, queries: int) -> NDArray[np.intp]:
    if rows is None:
        raise ValueError('attention_stats: which has "rows"; say which ones with rows=')
    array = np.asarray(rows)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"attention_stats: rows has shape {array.shape}, dtype {array.dtype}; it must be 1-D integers")
    if array.size and (array.min() < -queries or array.max() >= queries):
        raise ValueError(f"attention_stats: rows must lie between 0 and {queries - 1}, the last query")
    return array.astype(np.intp) % max(queries, 1)


def _second_pass(
    call: Call, state: Array, wanted: tuple[str, ...], top_k: int, chosen: NDArray[np.intp] | None, backend: ModuleType
) -> dict[str, Array]:
    """The arrays of the asked statistics, by the names of the core's arguments."""
    *per_row, keys = call.scores
    empty: dict[str, Array] = {}
    if "entropy" in wanted:
        empty["entropy"] = np.zeros(per_row, call.compute)
    if "max" in wanted:
        empty["largest"] = np.zeros(per_row, call.compute)
    if "received" in wanted:
        empty["received"] = np.zeros((*per_row[:-1], keys), call.compute)
    if "top_k" in wanted:
        empty["top_weights"] = np.zeros((*per_row, top_k), call.compute)
        empty["top_keys"] = np.full((*per_row, top_k), -1, np.intp)
    place = None
    if chosen is not None:
        distinct, back = np.unique(chosen, return_inverse=True)
        place = np.full(per_row[-1], -1, np.intp)
        place[distinct] = np.arange(distinct.size)
        empty["rows"] = np.zeros((*per_row[:-1], distinct.size, keys), call.compute)
    if not empty or 0 in call.scores or 0 in [array.size for array in empty.values()]:
        return empty
    options = {name: value for name, value in call.options.items() if name != "sinks"}
    execute(
        call.lead, {**call.named(), **empty, "state": state}, "stats", call.scale, call.threads, chosen=place,
        backend=backend, **options,
    )  # fmt: skip
    if chosen is not None:
        empty["rows"] = empty["rows"][..., back, :]
    return empty


def _results(call: Call, out: Array, lse: Array, found: dict[str, Array]) -> AttentionStats:
    """In the caller's axes and dtype; lse and sums stay in the dtype of the arithmetic."""
    index = (0,) * call.drop
    by_name = {name: array[index] for name, array in found.items()}
    return AttentionStats(
        out[index].astype(call.dtype, copy=False), lse[index], by_name.get("entropy"), by_name.get("largest"),
        by_name.get("top_weights"), by_name.get("top_keys"), by_name.get("received"), by_name.get("rows"),
    )  # fmt: skip
