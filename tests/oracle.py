"""The oracle of the tests: float64, row by row, the allowed keys selected first.

Selecting first makes two rules hold by construction: what is excluded has no influence at all, and a row without
keys is 0. `tolerance` gives the bound from a measurement: twice the error that the same formula makes in working
precision, plus a floor of a few units in the last place of the values and of the scores (a score s that is off by
one unit in its last place moves its weight by the factor 1 + s * eps).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def frozen(value: Any) -> Any:
    """A value as a key of a dictionary: equal for equal arguments."""
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, hashlib.sha1(np.ascontiguousarray(value).tobytes()).digest()
    if is_dataclass(value):
        return frozen(astuple(value))  # type: ignore[arg-type]
    if isinstance(value, dict):
        return tuple((name, frozen(value[name])) for name in sorted(value))
    return type(value), tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else repr(value)


def remembered(function: Function) -> Function:
    """Computed once for the same arguments: a test has them again on each implementation, and these take their time."""
    known: dict[Any, Any] = {}

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        key = frozen((arguments, options))
        if key not in known:
            while len(known) > 200:
                del known[next(iter(known))]
            known[key] = function(*arguments, **options)
        return known[key]

    return called  # type: ignore[return-value]


@dataclass
class Expected:
    out: Array
    lse: Array
    weights: Array
    largest_score: float


def first_position(
    options: dict[str, Any], item: tuple[int, ...], lead: tuple[int, ...], queries: int, keys: int
) -> int:
    """Position of query 0 of one batch item."""
    if options.get("q_start") is not None:
        return int(np.broadcast_to(options["q_start"], lead)[item])
    if options.get("causal") == "lower_right":
        lengths = options.get("key_lengths")
        return (keys if lengths is None else int(np.broadcast_to(lengths, lead)[item])) - queries
    return 0


@remembered
def allowed_keys(shape: tuple[int, ...], **options: Any) -> Array:
    """Boolean (..., Hq, L, S) from the rules of the documentation, written the obvious way, query by query."""
    *lead, _, queries, keys = shape
    batch = tuple(lead)
    allowed = np.ones(shape, bool)
    if options.get("mask") is not None:
        allowed &= options["mask"]
    if options.get("bias") is not None:
        allowed &= np.asarray(options["bias"]) != -np.inf
    causal, (left, right) = options.get("causal", False), options.get("window") or (None, None)
    lengths, prefixes, segments = (options.get(name) for name in ("key_lengths", "prefix_lengths", "segments"))
    for item in np.ndindex(*batch):
        valid = keys if lengths is None else int(np.broadcast_to(lengths, batch)[item])
        prefix = 0 if prefixes is None else int(np.broadcast_to(prefixes, batch)[item])
        first = first_position(options, item, batch, queries, keys)
        if segments is not None:
            pair = segments if isinstance(segments, tuple) else (segments, segments)
            q_ids, k_ids = (np.broadcast_to(x, (*batch, n))[item] for x, n in zip(pair, (queries, keys), strict=True))
        j = np.arange(keys)
        for i in range(queries):
            at = first + i  # Python's integers, which do not overflow
            seen = j < valid
            if causal is not False:
                seen &= (j <= at) | (j < prefix)
            if left is not None:
                seen &= j >= at - left
            if right is not None:
                seen &= j <= at + right
            if segments is not None:
                seen &= q_ids[i] == k_ids
            allowed[(*item, slice(None), i)] &= seen
    return allowed


def changed(s: Array, i: int, h: int, first: int, seen: Array, options: dict[str, Any], added: Array | None) -> Array:
    """Scores of the allowed keys after softcap, bias and ALiBi, in this order."""
    if options.get("softcap"):
        s = options["softcap"] * np.tanh(s / options["softcap"])
    if added is not None:
        s = s + added
    if options.get("alibi_slopes") is not None:
        s = s - options["alibi_slopes"][h] * np.abs(first + i - seen)
    return s


@remembered
def oracle(
    q: Array, k: Array, v: Array, allowed: Array, *, bias: Any = None, scale: float | None = None, **options: Any
) -> Expected:
    """Attention of q (..., Hq, L, D), k (..., Hkv, S, D), v (..., Hkv, S, Dv); allowed (..., Hq, L, S).

    options: softcap, sinks, alibi_slopes, and what places the queries (causal, q_start, key_lengths).
    """
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
            first = first_position(options, tuple(item), lead, queries, k.shape[-2])
            s = changed(s, at[-1], h, first, seen, options, None if added is None else added[at][seen])
            p = np.exp(s - s.max())
            largest = max(largest, float(np.abs(s, where=np.isfinite(s), out=np.zeros_like(s)).max()))
            sink = 0 if options.get("sinks") is None else np.exp(options["sinks"][h] - s.max())
            out[at] = (p / (p.sum() + sink)) @ v[(*item, h // group)][seen]
            lse[at], weights[(*at, seen)] = s.max() + np.log(p.sum()), p / (p.sum() + sink)
    return Expected(out, lse, weights, largest)


@dataclass
class Matrices:
    """The matrices of the plain formula (..., Hq, L, S), and what a row is divided by (..., Hq, L, 1)."""

    capped: Array  # scores after softcap
    exponentials: Array  # of the final scores minus the row's largest
    total: Array  # their sum, 1 in rows without keys
    total_with_sink: Array
    distance: Array | None  # of ALiBi


def matrices(
    q: Array, k: Array, allowed: Array, *, bias: Any = None, scale: float | None = None, **options: Any
) -> Matrices:
    """Those of q and k with one head for each query head, in their dtype."""
    dtype, lead, distance = q.dtype, q.shape[:-3], None
    s = (q @ np.swapaxes(k, -1, -2)) * dtype.type(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    if options.get("softcap"):
        s = (options["softcap"] * np.tanh(s / options["softcap"])).astype(dtype)
    capped = s
    if bias is not None:
        s = s + np.where(np.isinf(bias), 0, bias).astype(dtype)
    if options.get("alibi_slopes") is not None:
        first = np.array([first_position(options, at, lead, *s.shape[-2:]) for at in np.ndindex(*lead)]).reshape(lead)
        distance = np.abs(first[..., None, None, None] + np.arange(s.shape[-2])[:, None] - np.arange(s.shape[-1]))
        s = s - (np.asarray(options["alibi_slopes"])[:, None, None] * distance).astype(dtype)
    s = np.where(allowed, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=np.finfo(dtype).min)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    with_sink = total
    if options.get("sinks") is not None:
        with np.errstate(over="ignore"):
            with_sink = (total + np.exp(np.asarray(options["sinks"])[:, None, None] - top)).astype(dtype)
    return Matrices(capped, p, np.where(total == 0, 1, total), np.where(with_sink == 0, 1, with_sink), distance)


def same_formula(q: Array, k: Array, v: Array, allowed: Array, **options: Any) -> Array:
    """The plain formula in the dtype of the inputs: the yardstick for the tolerance."""
    group = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    found = matrices(q, k, allowed, **options)
    return (found.exponentials / found.total_with_sink) @ v


@remembered
def gradients(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, allowed: Array, **options: Any
) -> dict[str, Array]:
    """The gradients of sum(dout * out) + sum(dlse * lse) by each argument, by the plain formula in the dtype of q.

    Arrays as in `oracle`, with every batch axis; "bias" has the shape of the scores.
    """
    group = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    found = matrices(q, k, allowed, **options)
    p = found.exponentials / found.total_with_sink
    delta = (dout * (p @ v)).sum(axis=-1, keepdims=True)
    ds = p * (dout @ v.swapaxes(-1, -2) - delta)
    if dlse is not None:
        ds = ds + dlse[..., None] * found.exponentials / found.total
    by_score = ds
    if options.get("softcap"):
        by_score = ds * (1 - (found.capped / options["softcap"]) ** 2).astype(q.dtype)
    scale = options.get("scale")
    by_score = by_score * q.dtype.type(1 / np.sqrt(q.shape[-1]) if scale is None else scale)

    def of_key_heads(array: Array) -> Array:
        split = (*array.shape[:-3], array.shape[-3] // group, group, *array.shape[-2:])
        return array.reshape(split).sum(axis=-3)

    def of_heads(array: Array) -> Array:
        return array.sum(axis=(*range(array.ndim - 3), -2, -1))

    result = {"q": by_score @ k, "k": of_key_heads(by_score.swapaxes(-1, -2) @ q)}
    result |= {"v": of_key_heads(p.swapaxes(-1, -2) @ dout), "bias": ds}
    if options.get("sinks") is not None:
        rest = np.where(allowed.any(axis=-1, keepdims=True), 1 - found.total / found.total_with_sink, 0)
        result["sinks"] = of_heads(-rest * delta)
    if found.distance is not None:
        result["alibi_slopes"] = of_heads(-ds * found.distance)
    return result


@remembered
def tolerance(q: Array, k: Array, v: Array, allowed: Array, expected: Expected, **options: Any) -> float:
    """Twice the error of the same formula in working precision, plus 4 + max |s| units in the last place of max |v|."""
    error = np.abs(same_formula(q, k, v, allowed, **options) - expected.out).max(initial=0)
    return float(2 * error + (4 + expected.largest_score) * np.finfo(q.dtype).eps * np.abs(v).max(initial=1))
