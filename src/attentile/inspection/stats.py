"""Statistics of the weights of attention, without its matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import dispatch
from ..arguments import as_array, named_in_errors, positive_index, unknown_option
from ..outputs import AttentionResult, Outputs
from ..runtime.threads import threads_for
from ..scores import SCORE_OPTIONS, ScoreOptions, Scores, checked

Array = NDArray[Any]

_OPTIONS = SCORE_OPTIONS.keys() - {"score_mod", "before"}
KINDS = ("entropy", "max", "top_k", "received", "rows")


class AttentionStats(NamedTuple):
    """What `attention_stats` returns; what was not asked for is None. Hq query heads, L queries, S keys.

    Attributes
    ----------
    out, lse : ndarray, shapes (..., Hq, L, Dv) and (..., Hq, L)
        As `attention` gives them: lse without sinks.
    entropy, max : ndarray, shape (..., Hq, L), or None
        Of the weights of each row: their entropy in nats, and the largest.
    top_weights, top_keys : ndarray, shape (..., Hq, L, top_k), or None
        The largest weights of each row, descending, and their keys (intp), of equal weights the lower key first. 0 and
        -1 where the row sees fewer keys, or the others score so far below its best ones that their weights underflow.
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
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    which: str | Sequence[str] = KINDS[:4],
    top_k: int = 8,
    rows: ArrayLike | None = None,
    **options: Unpack[ScoreOptions],
) -> AttentionStats:
    """Attention and statistics of its weights in O(L + S) memory: the (L, S) weights are never stored.

    A first pass computes the output and, of each row, the largest score and the sum of exp; a second one forms the
    final weights from these chunk by chunk, reduces them and forgets them.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, shapes (..., Hq, L, D), (..., Hkv, S, D), (..., Hkv, S, Dv).
    which : str or sequence of str
        Of "entropy", "max", "top_k", "received" (these four by default) and "rows".
    top_k : int
        How many of the strongest keys of each row are kept, with "top_k".
    rows : array_like of int, shape (n,)
        Queries whose full weights are wanted, with "rows" in `which` only. Negative ones count from the end.
    **options
        Those of `attention` that decide the scores, but score_mod and before; num_threads.

    Returns
    -------
    AttentionStats
        The output, the logsumexp, and what was asked for of the weights that `attention` returns, but for rounding.
        Rows without keys have 0 everywhere. With sinks the weights of the keys sum to less than 1. A row with NaN in a
        score that it uses has NaN for every key that it sees; its strongest keys are then the first ones.

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
    unknown_option("attention_stats", options, _OPTIONS)
    if rows is not None and "rows" not in wanted:
        raise ValueError('attention_stats: rows= chooses the rows of "rows", which is not in `which`; name it there')
    with named_in_errors("attention_stats"):
        threads = threads_for(options.get("num_threads"), "attention")
        scores, values = checked(q, k, v, options)
    found = _Found(scores, wanted, top_k, rows)
    outputs = Outputs(scores, values, {"return_lse": True}, partial=True)
    assert outputs.partial is not None
    on = dispatch.chosen(scores)  # for both passes, whatever another thread chooses in between
    dispatch.attend(scores, values, outputs, threads, on)
    if found.asks:
        dispatch.stats(scores, values, outputs.partial, found, threads, on)
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
        self.entropy = np.zeros(rows, dtype) if "entropy" in wanted else None
        self.largest = np.zeros(rows, dtype) if "max" in wanted else None
        self.received = np.zeros((*heads, keys), dtype) if "received" in wanted else None
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
        assert isinstance(out, AttentionResult)
        assert out.lse is not None
        strongest = self.top_weights, self.top_keys
        return AttentionStats(out.out, out.lse, self.entropy, self.largest, *strongest, self.received, rows)
