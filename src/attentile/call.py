"""One call of the core: arguments checked, dtypes settled, arrays brought to four axes without copying.

Every check runs before any work. What the core gets is always (batch, head, row, width) with the last axis contiguous;
inputs with more batch axes are folded into one where their strides allow it and looped over where they do not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .arguments import real
from .core import twin
from .core.constants import LOG2E
from .masks import Structure, structure
from .runtime import config

Array = NDArray[Any]

# ---- dtypes ----


def _computed_in(dtype: np.dtype[Any], function: str) -> np.dtype[Any]:
    """The dtype of the arithmetic for this (promoted) input dtype."""
    dtype = dtype.newbyteorder("=")
    if dtype in (np.float32, np.float64):
        return dtype
    if dtype == np.float16 or dtype.name == "bfloat16":
        return np.dtype(np.float32)
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    raise TypeError(
        f"{function}: an array has dtype {dtype}; supported are float64, float32, float16, bfloat16, integers and bool"
    )


def promoted(function: str, *arrays: Array) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """(dtype of the arithmetic, dtype of the result) for arrays that are used together."""
    for array in arrays:
        _computed_in(array.dtype, function)
    try:
        dtype = np.result_type(*arrays)
    except TypeError:
        dtypes = ", ".join(sorted({str(array.dtype) for array in arrays}))
        raise TypeError(f"{function}: NumPy has no common dtype of {dtypes}; convert with .astype()") from None
    compute = _computed_in(dtype, function)
    return compute, compute if dtype.kind in "iub" else dtype.newbyteorder("=")


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this dtype, itself if it has it. Small numbers become subnormal or 0 without a word.

    That is what rounding to a dtype means, whatever np.seterr() says about the program around; only a finite number
    that becomes Inf is NumPy's to report.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(under="ignore", invalid="ignore"):
        return array.astype(dtype)


def ready(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this dtype, native, aligned, last axis contiguous: itself whenever it already is."""
    array = rounded(array, dtype)
    if not array.flags.aligned or (array.shape[-1] > 1 and array.strides[-1] != array.itemsize):
        array = array.copy(order="C")
    return array


def _bias_in(bias: Array, dtype: np.dtype[Any]) -> Array:
    """bias in the dtype of the arithmetic. A finite value must stay finite: only -inf excludes a key."""
    if bias.dtype.itemsize > dtype.itemsize:
        largest = np.finfo(dtype).max
        bias = np.where(np.isinf(bias), bias, np.clip(bias, -largest, largest))
    bias = rounded(bias, dtype)
    return bias if bias.flags.aligned else bias.copy()


# ---- checks ----


def as_array(function: str, name: str, value: Any) -> Array:
    """np.asarray, but not of a masked array, whose mask would be lost without a word."""
    ma = sys.modules.get("numpy.ma.core")  # where it is not loaded there is no masked array, and to load it takes time
    if ma is not None and isinstance(value, ma.MaskedArray):
        raise TypeError(
            f"{function}: {name} is a masked array, whose mask would be lost; pass {name}.filled(...), and keys to "
            "leave out as mask= of attention"
        )
    return np.asarray(value)


@contextmanager
def named_in_errors(function: str) -> Iterator[None]:
    """The checks of this module and of masks.py, which speak of attention(), speak of `function` instead."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        if type(error) not in (TypeError, ValueError) or not text.startswith("attention: "):
            raise
        raise type(error)(function + text.removeprefix("attention")) from None


def _shapes(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """The batch axes, after every check of the shapes of q, k, v (each with a head axis already)."""
    shapes = f"q has shape {q.shape}, k {k.shape}, v {v.shape}"
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention: q has width {q.shape[-1]} and k has {k.shape[-1]}; they must be equal ({shapes})")
    if q.shape[-1] == 0:
        raise ValueError(f"attention: q and k have width 0; it must be at least 1 ({shapes})")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention: k has {k.shape[-2]} keys and v has {v.shape[-2]}; they must be equal ({shapes})")
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"attention: k has {k.shape[-3]} heads and v has {v.shape[-3]}; they must be equal ({shapes})")
    q_heads, heads = q.shape[-3], k.shape[-3]
    if q_heads and (heads == 0 or q_heads % heads):
        raise ValueError(
            f"attention: q has {q_heads} heads and k has {heads}; "
            f"the number of q heads must be a multiple of the number of k heads ({shapes})"
        )
    try:
        return np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(f"attention: the batch axes of q, k and v do not broadcast ({shapes})") from None


def check_scale(function: str, scale: Any) -> float | None:
    """scale as a finite number; None stays None."""
    if scale is None:
        return None
    try:
        number = real(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: scale is {scale!r}; it must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{function}: scale is {number}; it must be finite")
    return number


def check_out(function: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuses an out that is not a writable array of this shape and dtype with every element in a place of its own."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{function}: out is a {type(out).__name__}; it must be a NumPy array, or None")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"{function}: out has shape {out.shape} and dtype {out.dtype}; they must be {shape} and {dtype}, "
            "those of the result"
        )
    if not out.flags.writeable:
        raise ValueError(f"{function}: out is read-only; pass a writable array (out.copy() is)")
    if out.flags.c_contiguous or out.size == 0:
        return
    reach = out.itemsize  # bytes that the axes so far cover, those with the smallest steps first
    for step, n in sorted((abs(step), n) for step, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if step < reach:
            raise ValueError(
                f"{function}: out has shape {out.shape} and strides {out.strides}, so that elements share memory; "
                "pass an array that does not overlap itself"
            )
        reach += (n - 1) * step


def _factor(scale: float, dtype: np.dtype[Any]) -> float:
    """scale, which must fit the arithmetic: it is multiplied by log2 e, for the kernels count in powers of 2."""
    largest = float(np.finfo(dtype).max) / LOG2E
    if abs(scale) > largest:
        bounds = f"{-largest:.3g} and {largest:.3g}"
        raise ValueError(f"attention: scale is {scale}; in {dtype} it must lie between {bounds}")
    return scale


def _softcap(softcap: Any, dtype: np.dtype[Any]) -> float:
    if softcap is None:
        return 0.0
    try:
        number = real(softcap)
    except (TypeError, ValueError):
        raise TypeError(f"attention: softcap is {softcap!r}; it must be a positive number or None") from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"attention: softcap is {number}; it must be positive and finite, None for no cap")
    # Beyond a quarter of the range no score that fits changes by a bit; the smallest normal number, for 2 / softcap.
    limits = np.finfo(dtype)
    return min(max(number, float(limits.smallest_normal)), float(limits.max) / 4)


def _per_head(name: str, value: Any, heads: int) -> Array | None:
    """One number per query head, in float64."""
    if value is None:
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"attention: {name} has dtype {array.dtype}; it must be a real number per query head")
    if array.shape != (heads,):
        raise ValueError(f"attention: {name} has shape {array.shape}; it must be ({heads},), one per query head")
    return np.array(array, np.float64)  # a copy: it is read during the pass, and out may overlap it


def _slopes(value: Any, heads: int, dtype: np.dtype[Any]) -> Array | None:
    slopes = _per_head("alibi_slopes", value, heads)
    if slopes is not None and (np.abs(slopes) > np.finfo(dtype).max).any():
        raise ValueError(f"attention: alibi_slopes has {np.abs(slopes).max()}; slopes must be finite in {dtype}")
    return slopes


def _broadcast(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        if len(shape) == 2 and array.ndim == 3 and array.shape[0] == 1:  # the one head of q, k, v without a head axis
            return _broadcast(name, array[0], shape)
        raise ValueError(
            f"attention: {name} has shape {array.shape}, which does not broadcast to {shape}, the shape of the scores"
        ) from None


def _mask(mask: Any, shape: tuple[int, ...]) -> Array | None:
    if mask is None:
        return None
    mask = as_array("attention", "mask", mask)
    if mask.dtype != np.bool_:
        hint = "pass it as bias=" if mask.dtype.kind == "f" or mask.dtype.name == "bfloat16" else "pass mask != 0"
        raise TypeError(f"attention: mask has dtype {mask.dtype}; it must be bool, True = may attend ({hint}?)")
    return _broadcast("mask", mask.view(np.uint8), shape)


def _bias(bias: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    if bias is None:
        return None
    bias = as_array("attention", "bias", bias)
    if bias.dtype.kind != "f" and bias.dtype.name != "bfloat16":
        hint = "pass it as mask=" if bias.dtype == np.bool_ else "convert it with .astype(float)"
        raise TypeError(f"attention: bias has dtype {bias.dtype}; it must be floating ({hint}?)")
    return _broadcast("bias", _bias_in(bias, dtype), shape)


def _narrow_by_padding(mask: Array | None, keys: Structure) -> Array | None:
    """A mask that is the same for all queries and heads and has its keys in one run is an interval: as fast as lengths.

    Narrows `keys` and returns None if the mask is of this kind, else the mask.
    """
    if mask is None or 0 in mask.shape:
        return mask
    if any(n > 1 and step for n, step in zip(mask.shape[-3:-1], mask.strides[-3:-1], strict=True)):
        return mask
    row = mask[..., 0, 0, :] != 0
    count, lo = row.sum(axis=-1), row.argmax(axis=-1)
    hi = np.where(count > 0, row.shape[-1] - row[..., ::-1].argmax(axis=-1), 0)
    if (hi - lo != count).any():
        return mask
    keys.lo = np.maximum(lo[..., None], 0 if keys.lo is None else keys.lo)
    keys.hi = np.minimum(hi[..., None], row.shape[-1] if keys.hi is None else keys.hi)
    shape = np.broadcast_shapes(keys.lo.shape, keys.hi.shape, mask.shape[-2:-1])
    keys.lo, keys.hi = np.broadcast_to(keys.lo, shape), np.broadcast_to(keys.hi, shape)
    return None


# ---- the call ----


@dataclass(eq=False, repr=False)
class Call:
    """The checked arguments of one call. Arrays have a head axis and batch axes that broadcast to `lead`."""

    q: Array
    k: Array
    v: Array
    lead: tuple[int, ...]
    compute: np.dtype[Any]  # dtype of the arithmetic
    dtype: np.dtype[Any]  # dtype of the result
    drop: int  # 1 if the caller's arrays have no head axis, so that the results have none either
    scale: float
    threads: int
    mask: Array | None
    bias: Array | None
    keys: Structure
    options: dict[str, Any]  # score changes as the core takes them

    @property
    def scores(self) -> tuple[int, ...]:
        """Shape of the scores, (..., Hq, L, S)."""
        return (*self.lead, *self.q.shape[-3:-1], self.k.shape[-2])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output, (..., Hq, L, Dv)."""
        return (*self.scores[:-1], self.v.shape[-1])

    def named(self) -> dict[str, Array | None]:
        """The arrays that decide the scores, by the names of the core's arguments."""
        start = self.keys.start if self.options.get("slopes") is not None else None
        return {
            "q": self.q, "k": self.k, "mask": self.mask, "bias": self.bias, "lo": self.keys.lo, "hi": self.keys.hi,
            "start": start,
        }  # fmt: skip


def prepare(
    q: Any, k: Any, v: Any, *, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, alibi_slopes: Any,
    num_threads: Any, score_mod: Any = None, stored: bool = False, kept: bool = False, **structural: Any,
) -> Call:  # fmt: skip
    """Checks the arguments of attention() and settles dtypes and axes. structural: as masks.structure takes them.

    stored: k and v only stand for shape and dtype of what a cache holds, and stay as they are. kept: rows see the first
    keys whatever the lower ends of their intervals, so a mask must not become one.
    """
    q, k, v = (as_array("attention", name, array) for name, array in (("q", q), ("k", k), ("v", v)))
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim < 2:
            raise ValueError(f"attention: {name} has shape {array.shape}; it needs at least two axes, (rows, width)")
    drop = int(q.ndim == k.ndim == v.ndim == 2)
    compute, dtype = promoted("attention", q, k, v)
    q, k, v = (array[None] if array.ndim == 2 else array for array in (q, k, v))
    lead, heads = _shapes(q, k, v), q.shape[-3]
    scores = (*lead, *q.shape[-3:-1], k.shape[-2])
    threads, factor = config.threads_for(num_threads, "attention"), check_scale("attention", scale)
    factor = 1.0 / math.sqrt(q.shape[-1]) if factor is None else _factor(factor, compute)
    mask, bias = _mask(mask, scores[drop:]), _bias(bias, scores[drop:], compute)
    if drop:
        mask, bias = mask if mask is None else mask[None], bias if bias is None else bias[None]
    options: dict[str, Any] = {
        "softcap": _softcap(softcap, compute), "sinks": _per_head("sinks", sinks, heads),
        "slopes": _slopes(alibi_slopes, heads, compute),
    }  # fmt: skip
    if score_mod is not None:
        if not callable(score_mod):
            raise TypeError(
                f"attention: score_mod is {score_mod!r}; it must be a callable (scores, b, h, i, j) -> scores"
            )
        options["score_mod"] = score_mod
    keys = structure(lead, q.shape[-2], k.shape[-2], alibi=alibi_slopes is not None, **structural)
    mask = mask if kept else _narrow_by_padding(mask, keys)
    if keys.same_segment is not None:
        same = np.broadcast_to(keys.same_segment, scores)
        mask = same.view(np.uint8) if mask is None else mask & same
    q = ready(q, compute)
    if not stored:
        k, v = ready(k, compute), ready(v, compute)
    return Call(q, k, v, lead, compute, dtype, drop, factor, threads, mask, bias, keys, options)


# ---- to four axes, and to the core ----


def _fold(array: Array, n_tail: int) -> Array | None:
    """A view with the axes before the last n_tail folded into one, or None if their strides do not allow it."""
    n_lead = array.ndim - n_tail
    if n_lead == 1:
        return array
    lead, strides, tail = array.shape[:n_lead], array.strides[:n_lead], array.shape[n_lead:]
    axes = [(n, step) for n, step in zip(lead, strides, strict=True) if n != 1]
    for (_, outer), (n, inner) in pairwise(axes):
        if outer != n * inner:
            return None
    step = axes[-1][1] if axes else 0
    return as_strided(array, (math.prod(lead), *tail), (step, *array.strides[n_lead:]))


# Axes after the batch axes of each array that the core takes.
_TAILS = {
    "q": 3, "k": 3, "v": 3, "out": 3, "mask": 3, "bias": 3, "weights": 3, "lse": 2, "lo": 1, "hi": 1, "start": 0,
    "state": 3, "entropy": 2, "largest": 2, "received": 2, "top_weights": 3, "top_keys": 3, "rows": 3,
}  # fmt: skip


def _run(arrays: dict[str, Array], attend: Callable[..., None], options: dict[str, Any]) -> None:
    """Calls the core once if the batch axes of all arrays fold, else for each index of the first batch axis."""
    folded = {name: _fold(array, _TAILS[name]) for name, array in arrays.items()}
    if any(array is None for array in folded.values()):
        for index in range(arrays["q"].shape[0]):
            _run({name: array[index] for name, array in arrays.items()}, attend, options)
        return
    tables = {name: array for name, array in folded.items() if name in ("lo", "hi", "start") and array is not None}
    for name, table in tables.items():  # one row each if the items share them
        shared = all(other.strides[0] == 0 for other in tables.values())
        folded[name] = np.ascontiguousarray(table[:1] if shared else table)
    attend(**folded, **options)


def with_lead(lead: tuple[int, ...], named: dict[str, Array | None]) -> dict[str, Array]:
    """The arrays that are there, by the names of the core's arguments, with all the batch axes, at least one."""
    arrays: dict[str, Array] = {}
    for key, array in named.items():
        if array is not None:
            tail = array.shape[array.ndim - _TAILS[key] :]
            full = array if array.shape == lead + tail else np.broadcast_to(array, lead + tail)
            arrays[key] = full if lead else full[None]
    return arrays


def execute(
    lead: tuple[int, ...], named: dict[str, Array | None], name: str, scale: float, threads: int, *,
    backend: ModuleType | None = None, **options: Any,
) -> None:  # fmt: skip
    """Calls `name` of a backend ("attend" or "stats") with named arrays whose batch axes broadcast to `lead`.

    backend: the core or the twin, for who calls twice and needs the same; default: what is in use.
    """
    arrays = with_lead(lead, named)
    backend = backend or config.core() or twin
    if options.get("score_mod") is not None:  # Python per tile: the twin's work; b must count through all items
        arrays, backend = {key: np.ascontiguousarray(array) for key, array in arrays.items()}, twin
    function = getattr(backend, name)
    _run(arrays, function, {"scale": scale, "threads": threads, **options})


def nothing_to_compute(scores: tuple[int, ...], value_width: int, beside: bool) -> bool:
    """Whether no result depends on a score: no row, no key, or no value and nothing wanted `beside` the output."""
    return 0 in scores or (value_width == 0 and not beside)


def one_column(v: Array) -> Array:
    """A column of zeros in the place of values of width 0: the core takes no empty array."""
    return np.broadcast_to(np.zeros(1, v.dtype), (*v.shape[:-1], 1))


def attend(
    q: Array, k: Array, v: Array, out: Array, scale: float, threads: int, *, mask: Array | None = None,
    lse: Array | None = None, weights: Array | None = None, named: dict[str, Array | None] | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Computes into out, lse, weights: checked arrays (..., H, L, width); mask broadcast to (..., Hq, L, S) already.

    Options go to the core as they are: fill (score that masked keys get instead of being excluded), softcap, sinks,
    slopes. named: further arrays by the names of the core's arguments.
    """
    arrays = {**(named or {}), "q": q, "k": k, "v": v, "out": out, "lse": lse, "weights": weights, "mask": mask}
    beside = any(arrays.get(name) is not None for name in ("lse", "weights", "state"))
    if nothing_to_compute((*out.shape[:-1], k.shape[-2]), out.shape[-1], beside):
        out[...] = 0
        if lse is not None:
            lse[...] = -np.inf
        return
    if out.shape[-1] == 0:  # what is beside it depends on the scores alone
        arrays |= {"v": one_column(v), "out": np.empty((*out.shape[:-1], 1), out.dtype)}
    execute(out.shape[:-3], arrays, "attend", scale, threads, **options)
