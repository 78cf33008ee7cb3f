"""The oracle of the tests: float64, row by row, the allowed keys selected first.

Selecting first makes two rules hold by construction: what is excluded has no influence at all, and a row without
keys is 0. `tolerance` gives the bound from a measurement: twice the error that the same formula makes in working
precision, plus a floor of a few units in the last place of the values and of the scores (a score s that is off by
one unit in its last place moves its weight by the factor 1 + s * eps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Expected:
    out: Array
    lse: Array
    weights: Array
    largest_score: float


def allowed_keys(
    shape: tuple[int, ...], *, mask: Any = None, bias: Any = None, causal: Any = False, q_start: Any = None,
    key_lengths: Any = None,
) -> Array:  # fmt: skip
    """Boolean (..., Hq, L, S) from the rules of the documentation, written the slow and obvious way."""
    *lead, _, queries, keys = shape
    allowed = np.ones(shape, bool)
    if mask is not None:
        allowed &= mask
    if bias is not None:
        allowed &= np.asarray(bias) != -np.inf
    for item in np.ndindex(*lead):
        valid = keys if key_lengths is None else int(np.broadcast_to(key_lengths, lead)[item])
        first = 0 if q_start is None else int(np.broadcast_to(q_start, lead)[item])
        if causal == "lower_right":
            first = valid - queries
        for i in range(queries):
            for j in range(keys):
                if j >= valid or (causal is not False and j > first + i):
                    allowed[(*item, slice(None), i, j)] = False
    return allowed


def oracle(q: Array, k: Array, v: Array, allowed: Array, *, bias: Any = None, scale: float | None = None) -> Expected:
    """Attention of q (..., Hq, L, D), k (..., Hkv, S, D), v (..., Hkv, S, Dv); allowed (..., Hq, L, S)."""
    heads, queries, width = q.shape[-3:]
    group = heads // k.shape[-3]
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(x, lead + x.shape[-3:]).astype(np.float64) for x in (q, k, v))
    added = None if bias is None else np.broadcast_to(np.asarray(bias, np.float64), allowed.shape)
    factor = 1 / np.sqrt(width) if scale is None else scale
    out = np.zeros((*lead, heads, queries, v.shape[-1]))
    lse, weights = np.full((*lead, heads, queries), -np.inf), np.zeros(allowed.shape)
    largest = 0.0
    for at in np.ndindex(*lead, heads, queries):
        *item, h, _ = at
        seen = np.flatnonzero(allowed[at])
        if seen.size == 0:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            s = (k[(*item, h // group)][seen] @ q[at]) * factor
            if added is not None:
                s = s + added[at][seen]
            p = np.exp(s - s.max())
            largest = max(largest, float(np.abs(s, where=np.isfinite(s), out=np.zeros_like(s)).max()))
            out[at] = (p / p.sum()) @ v[(*item, h // group)][seen]
            lse[at], weights[(*at, seen)] = s.max() + np.log(p.sum()), p / p.sum()
    return Expected(out, lse, weights, largest)


def same_formula(
    q: Array, k: Array, v: Array, allowed: Array, *, bias: Any = None, scale: float | None = None
) -> Array:
    """The plain formula in the dtype of the inputs: the yardstick for the tolerance."""
    group, dtype = q.shape[-3] // k.shape[-3], q.dtype
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    s = (q @ np.swapaxes(k, -1, -2)) * dtype.type(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        s = s + np.where(np.isinf(bias), 0, bias).astype(dtype)
    s = np.where(allowed, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=np.finfo(dtype).min)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    return (p / np.where(total == 0, 1, total)) @ v


def tolerance(q: Array, k: Array, v: Array, allowed: Array, expected: Expected, **options: Any) -> float:
    """Twice the error of the same formula in working precision, plus 4 + max |s| units in the last place of max |v|."""
    error = np.abs(same_formula(q, k, v, allowed, **options) - expected.out).max(initial=0)
    return float(2 * error + (4 + expected.largest_score) * np.finfo(q.dtype).eps * np.abs(v).max(initial=1))
