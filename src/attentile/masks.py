"""Structural masks as per-row key intervals: query row i of a batch item sees the keys lo[i] <= j < hi[i].

Two integers per row say everything that causal order and key lengths can say, in any combination, so no (L, S) array
is ever built for them and keys that no row sees are never read. To add a structural mask: one function here that
narrows the intervals.

    causal="upper_left", L = 3, S = 5          causal="lower_right", L = 3, S = 5
        1 0 0 0 0                                  1 1 1 0 0
        1 1 0 0 0                                  1 1 1 1 0
        1 1 1 0 0                                  1 1 1 1 1
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = tuple[NDArray[np.intp], NDArray[np.intp]]

ALIGNMENTS = (
    "'upper_left' (query i stands at position i) or 'lower_right' (the last query stands at the last valid key)"
)


def _per_item(name: str, value: Any, lead: tuple[int, ...]) -> NDArray[np.intp]:
    """An integer, or one per batch item, as an array whose axes broadcast against the batch axes."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"attention: {name} has dtype {array.dtype}; it must be an integer, or one per batch item")
    if array.dtype.kind == "u":
        array = np.minimum(array, 2**62)  # must not wrap to negative ones
    try:
        shape = np.broadcast_shapes(array.shape, lead)
    except ValueError:
        shape = ()
    if array.ndim and shape != lead:
        raise ValueError(
            f"attention: {name} has shape {array.shape} and the batch axes are {lead}; "
            "give one integer, or one per batch item"
        )
    full: NDArray[np.intp] = array.astype(np.intp).reshape((1,) * (len(lead) - array.ndim) + array.shape)
    return full


def _valid_keys(key_lengths: Any, lead: tuple[int, ...], keys: int) -> NDArray[np.intp]:
    if key_lengths is None:
        return np.full((1,) * len(lead), keys, np.intp)
    lengths = _per_item("key_lengths", key_lengths, lead)
    if lengths.size and (lengths.min() < 0 or lengths.max() > keys):
        raise ValueError(
            f"attention: key_lengths has values from {lengths.min()} to {lengths.max()}; "
            f"they must lie between 0 and the number of keys, {keys}"
        )
    return lengths


def _causal_start(
    causal: Any, q_start: Any, lead: tuple[int, ...], queries: int, keys: int, valid: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Position of query 0 of each batch item."""
    if q_start is not None:
        if causal is not True:
            raise ValueError(f"attention: q_start= and causal={causal!r} both place the queries; use causal=True")
        return _per_item("q_start", q_start, lead)
    if causal is True and queries != keys:
        raise ValueError(
            f"attention: causal=True with {queries} queries and {keys} keys is ambiguous; "
            f"use causal={ALIGNMENTS}, or q_start= (query i stands at q_start + i)"
        )
    return valid - queries if causal == "lower_right" else np.zeros((1,) * len(lead), np.intp)


def key_intervals(
    causal: Any, q_start: Any, key_lengths: Any, lead: tuple[int, ...], queries: int, keys: int
) -> Intervals | None:
    """(lo, hi), each (..., L), 0 <= lo, hi <= S, batch axes that broadcast to `lead`; None: every row sees all."""
    causal = bool(causal) if isinstance(causal, (bool, np.bool_)) else causal
    if not (causal in (True, False) if isinstance(causal, bool) else causal in ("upper_left", "lower_right")):
        raise ValueError(f"attention: causal is {causal!r}; it must be True, False, {ALIGNMENTS}")
    if causal is False and q_start is not None:
        raise ValueError("attention: q_start= places the queries of a causal mask and needs causal=True")
    if causal is False and key_lengths is None:
        return None
    valid = _valid_keys(key_lengths, lead, keys)
    if causal is False:
        hi = np.broadcast_to(valid[..., None], (*valid.shape, queries))
    else:
        start = _causal_start(causal, q_start, lead, queries, keys, valid)
        # int64 positions near the end of their range must not wrap: nothing beyond the keys matters.
        start = np.clip(start, -(2**62), 2**62)
        hi = np.clip(start[..., None] + np.arange(1, queries + 1), 0, valid[..., None])
    return np.zeros_like(hi), hi


def positive_index(function: str, name: str, value: Any) -> int:
    """value as a positive int, with the message every function gives."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} is {value!r}; it must be a positive integer") from None
    if number < 1:
        raise ValueError(f"{function}: {name} is {number}; it must be a positive integer")
    return number
