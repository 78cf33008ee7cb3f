"""Where the results of one call go, and how they come back in the caller's dtype."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arguments import check_out
from .core.constants import LOG2E
from .partial import Partial
from .scores import Scores
from .storage import rounded

Array = NDArray[Any]


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


def why_indirect(given: Array, scores: Scores, v: Array) -> str:
    """Why a backend cannot write the caller's array while it reads scores and values; "" if it can."""
    if scores.score_mod is not None:
        return "score_mod= given"
    if not given.flags.aligned:
        return "not aligned"
    if given.shape[-1] > 1 and given.strides[-1] != given.itemsize:
        return "last axis not contiguous"
    inputs = (scores.q, scores.k, v, scores.mask, scores.bias, *(scores.before or ()))
    if any(x is not None and np.may_share_memory(given, x) for x in inputs):
        return "it overlaps an input"
    return ""


class Totals(NamedTuple):
    """What the statistics of the weights need of each row, without sinks: arrays of shape (..., Hq, L)."""

    m: Array  # as of a Partial
    total: Array  # its l, summed once more in float64


class Outputs:
    """The arrays that a backend writes, with the caller's axes; None: not wanted.

    The output is in the dtype of the result, the others are in that of the arithmetic.
    """

    def __init__(self, scores: Scores, v: Array, options: Mapping[str, Any] | None, partial: bool = False) -> None:
        """options: those of `attention` that say what is wanted; None for no output. partial: a Partial is wanted."""
        self._scores = scores
        rows, dtype = scores.shape[:-1], scores.compute
        self.shape = (*rows, v.shape[-1])
        wanted = options or {}
        given = wanted.get("out")
        if given is not None:
            check_out("attention", given, self.shape, scores.dtype)
        self._given: Array | None = given  # the caller's array, which `out` may or may not be
        self.out: Array | None = None
        result = np.dtype(scores.dtype.type)  # NumPy's own object, by which the core knows it
        if given is not None and not why_indirect(given, scores, v):
            self.out = given.view(np.ndarray).view(result)
        elif options is not None:
            self.out = np.empty(self.shape, result)
        self.lse = np.empty(rows, dtype) if wanted.get("return_lse") else None
        self.weights = np.zeros(scores.shape, dtype) if wanted.get("return_weights") else None
        self.partial = self._of_no_keys() if partial else None
        self.totals: Totals | None = None  # for statistics, which set it

    def _of_no_keys(self) -> Partial:
        nothing = np.zeros(self.shape[:-1], self._scores.compute)
        return Partial(nothing - np.inf, nothing, np.zeros(self.shape, nothing.dtype))

    @property
    def has_more(self) -> bool:
        """Whether anything but the output is wanted."""
        return any(array is not None for array in (self.lse, self.weights, self.partial))

    def without_values(self) -> Outputs:
        """The same results, with an output of one column that is discarded."""
        other = copy.copy(self)
        other.out = np.empty((*self.shape[:-1], 1), self._scores.compute)
        if self.partial is not None:
            other.partial = self.partial._replace(o=np.empty_like(other.out))
        return other

    def of_no_keys(self) -> None:
        """The results of rows that see no key here: 0, or what they know of earlier keys."""
        scores = self._scores
        before = self._of_no_keys() if scores.before is None else scores.before
        if self.lse is not None:
            self.lse[...] = before.lse
        for own, there in zip(self.partial or (), before, strict=False):
            own[...] = there
        if self.out is not None:
            out = before.out
            if scores.sinks is not None and self.out.size:
                sinks = scores.sinks if scores.drop else scores.sinks[:, None]
                with np.errstate(all="ignore"):
                    sink = np.exp2(sinks * LOG2E - before.m)
                    out *= np.where(before.l == 0, 1, before.l / (before.l + sink))[..., None]
            self.out[...] = rounded(out, scores.dtype)

    def finished(self) -> Array | AttentionResult:
        """The output in the caller's dtype and array; with what else was wanted."""
        assert self.out is not None
        dtype, out = self._scores.dtype, self._given
        if out is None:
            out = self.out
        elif not np.may_share_memory(out, self.out):
            out[...] = self.out
        if self.lse is None and self.weights is None:
            return out
        return AttentionResult(out, self.lse, None if self.weights is None else rounded(self.weights, dtype))
