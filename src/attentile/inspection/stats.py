"""Statistics of the attention weights, which are computed but never stored as a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import dispatch
from ..arguments import as_array, named_in_errors, positive_index, unknown_option
from ..outputs import AttentionResult, Outputs, Totals
from ..runtime.threads import threads_for
from ..scores import SCORE_OPTIONS, ScoreOptions, Scores, checked
from ..storage import rounded

Array = NDArray[Any]

_OPTIONS = SCORE_OPTIONS.keys() - {"score_mod", "before"}
KINDS = ("entropy", "max", "top_k", "received", "rows")


class AttentionStats(NamedTuple):
    """What `attention_stats` returns; what was not asked for is None. Hq query heads, L queries, S keys.

    Everything but `out` and `top_keys` is float64 for float64 input and float32 for float32, float16 and bfloat16.

    Attributes
    ----------
    out, lse : ndarray, shapes (..., Hq, L, Dv) and (..., Hq, L)
        As `attention` gives them: lse without sinks.
    entropy, max : ndarray, shape (..., Hq, L), or None
        Of the weights of each row: their entropy in nats, and the largest one.
    top_weights, top_keys : ndarray, shape (..., Hq, L, top_k), or None
        The largest weights of each row in descending order, and their keys (intp); of equal weights, the one of the
        lower key comes first. Padded with 0 and -1 where the row has fewer keys whose weights are not 0.
    received : ndarray, shape (..., Hq, S), or None
        The weight that each key received, summed over the queries (what cache eviction needs).
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
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    which: str | Sequence[str] = KINDS[:4],
    top_k: int = 8,
    rows: ArrayLike | None = None,
    **options: Unpack[ScoreOptions],
) -> AttentionStats:
    """Attention, and statistics of its weights in O(L + S) memory: the (L, S) weights are never stored.

    A first pass computes the output and, for each row, the maximum of its scores and the sum of their exponentials. A
    second pass computes the scores again and turns each chunk of them into final weights, which are reduced at once.
    Sums over keys and rows are taken in float64, so their results are right to a few units in the last place (ULP) of
    their dtype at any number of keys.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, shapes (..., Hq, L, D), (..., Hkv, S, D), (..., Hkv, S, Dv).
    which : str or sequence of str
        Of "entropy", "max", "top_k", "received" (these four by default) and "rows".
    top_k : int
        How many of the strongest keys of each row to return, with "top_k".
    rows : array_like of int, shape (n,)
        Queries whose weights are wanted in full; needs "rows" in `which`. Negative ones count from the end.
    **options
        Those of `attention` that decide the scores, except score_mod and before; num_threads.

    Returns
    -------
    AttentionStats
        The output, the logsumexp, and the statistics that were asked for, of the weights that `attention` returns up to
        rounding. A row without keys has 0 everywhere. With sinks, the weights of the keys sum to less than 1. If a
        score that a row uses is NaN, so is the weight of every key that it sees; its strongest keys are then the first
        ones.

    Raises
    ------
    ValueError, TypeError
        For an unknown name in `which`, "rows" without rows= or rows= without "rows", rows out of range, and whatever
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
    unknown_option("attention_stats", options, _OPTIONS)
    if rows is not None and "rows" not in wanted:
        raise ValueError('attention_stats: rows= chooses the rows of "rows", which is not in `which`; name it there')
    with named_in_errors("attention_stats"):
        threads = threads_for(options.get("num_threads"), "attention")
        scores, values = checked(q, k, v, options)
    found = _Found(scores, wanted, top_k, rows)
    outputs = Outputs(scores, values, {"return_lse": True})
    if found.asks:
        outputs.totals = Totals(np.zeros(scores.shape[:-1], scores.compute), np.zeros(scores.shape[:-1]))
    on = dispatch.chosen(scores)  # for both passes, whatever another thread chooses in between
    dispatch.attend(scores, values, outputs, threads, on)
    if outputs.totals is not None:
        dispatch.stats(scores, values, outputs.totals, found, threads, on)
    return found.results(outputs)


def _chosen_rows(rows: ArrayLike | None, queries: int) -> NDArray[np.intp]:
    if rows is None:
        raise ValueError('attention_stats: which has "rows"; say which ones with rows=')
    array = as_array("attention_stats", "rows", rows)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"attention_stats: rows has shape {array.shape}, dtype {array.dtype}; it must be 1-D integers")
    if array.size and (array.min() < -queries or array.max() >= queries):
        raise ValueError(f"attention_stats: rows must lie between 0 and {queries - 1}, the last query")
    return array.astype(np.intp) % max(queries, 1)


class _Found:
    """The statistics that are wanted, by the names that the core knows, with the caller's axes; None: not wanted."""

    def __init__(self, scores: Scores, wanted: tuple[str, ...], top_k: int, asked: ArrayLike | None) -> None:
        *heads, queries, keys = scores.shape
        rows, dtype = (*heads, queries), scores.compute
        self._dtype = dtype
        self.entropy = np.zeros(rows, dtype) if "entropy" in wanted else None
        self.largest = np.zeros(rows, dtype) if "max" in wanted else None
        self.received = np.zeros((*heads, keys)) if "received" in wanted else None  # rounded once, at the end
        self.top_weights = np.zeros((*rows, top_k), dtype) if "top_k" in wanted else None
        self.top_keys = np.full((*rows, top_k), -1, np.intp) if "top_k" in wanted else None
        self.rows: Array | None = None
        self.chosen = np.full(queries, -1, np.intp)  # index into rows of each query, or -1
        if "rows" in wanted:  # each row once; _back: from these to those asked for
            distinct, self._back = np.unique(_chosen_rows(asked, queries), return_inverse=True)
            self.chosen[distinct] = np.arange(distinct.size)
            self.rows = np.zeros((*heads, distinct.size, keys), dtype)

    @property
    def asks(self) -> bool:
        """Whether there is anything to compute."""
        arrays = [self.entropy, self.largest, self.received, self.top_weights, self.rows]
        return any(array is not None and array.size for array in arrays)

    def results(self, outputs: Outputs) -> AttentionStats:
        """With the output in the caller's dtype; lse and sums stay in the dtype of the arithmetic."""
        out = outputs.finished()
        rows = None if self.rows is None else self.rows[..., self._back, :]
        received = None if self.received is None else rounded(self.received, self._dtype)
        assert isinstance(out, AttentionResult)
        assert out.lse is not None
        strongest = self.top_weights, self.top_keys
        return AttentionStats(out.out, out.lse, self.entropy, self.largest, *strongest, received, rows)
