"""What decides the scores of one call: queries, keys, and every option that changes a score or hides a key.

    attention(q, k, v, **options)
        the core's own check (core/_call.pxi) takes what it can use as it is, and that is all for most calls
        else  checked(...)          every check again, to explain; or the values converted to what the core takes
              attend(scores, v, outputs)      the core, or the twin, see dispatch.py

A `Scores` is checked and settled: arrays native, aligned, in the dtype of the arithmetic or one that the core widens to
it, the last axis contiguous, batch axes that broadcast to `lead`. CONTRIBUTING.md tells how to add a score change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import as_array, as_real, check_scale
from .core.constants import LOG2E
from .masks import structure
from .partial import Partial
from .storage import is_floating, promoted, readable, ready, stored

Array = NDArray[Any]
Causal = bool | Literal["upper_left", "lower_right"]
Window = tuple[int | None, int | None] | None
Segments = ArrayLike | tuple[ArrayLike, ArrayLike] | None
# (scores, b, h, i, j) -> scores: i (rows, 1) and j (1, S) are the indices of the tile's queries and keys.
ScoreMod = Callable[[Array, int, int, Array, Array], Array]


class ScoreOptions(TypedDict, total=False):
    """The options that decide the scores: those of `attention`, `attention_stats`, `explain` and `KVCache.attend`."""

    mask: ArrayLike | None
    bias: ArrayLike | None
    causal: Causal
    q_start: ArrayLike | None
    window: Window
    key_lengths: ArrayLike | None
    prefix_lengths: ArrayLike | None
    segments: Segments
    scale: float | None
    softcap: float | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    score_mod: ScoreMod | None
    before: Partial | None
    dtype: Literal["bfloat16"] | None
    num_threads: int | None


SCORE_OPTIONS: dict[str, Any] = dict.fromkeys(ScoreOptions.__annotations__) | {"causal": False}


# ---- checks ----


def _factor(scale: Any, width: int, dtype: np.dtype[Any]) -> float:
    """scale, which must fit the arithmetic: it is multiplied by log2 e, for the kernels count in powers of 2."""
    number = check_scale("attention", scale)
    if number is None:
        return 1.0 / math.sqrt(width)
    largest = float(np.finfo(dtype).max) / LOG2E
    if abs(number) > largest:
        bounds = f"{-largest:.3g} and {largest:.3g}"
        raise ValueError(f"attention: scale is {number}; in {dtype} it must lie between {bounds}")
    return number


def _softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    number = as_real("attention", "softcap", softcap, "a positive number or None")
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"attention: softcap is {number}; it must be positive and finite, None for no cap")
    return number


def _per_head(name: str, value: Any, heads: int) -> Array | None:
    """One number per query head, in float64."""
    if value is None:
        return None
    array = as_array("attention", name, value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"attention: {name} has dtype {array.dtype}; it must be a real number per query head")
    if array.shape != (heads,):
        raise ValueError(f"attention: {name} has shape {array.shape}; it must be ({heads},), one per query head")
    return array.astype(np.float64)


def _slopes(value: Any, heads: int, dtype: np.dtype[Any]) -> Array | None:
    slopes = _per_head("alibi_slopes", value, heads)
    if slopes is not None and (np.abs(slopes) > np.finfo(dtype).max).any():
        raise ValueError(f"attention: alibi_slopes has {np.abs(slopes).max()}; slopes must be finite in {dtype}")
    return slopes


def _check_broadcast(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape == shape[max(0, len(shape) - array.ndim) :]:  # in most calls
        return
    if len(shape) == 2 and array.ndim == 3 and array.shape[0] == 1:  # the one head of q, k, v without a head axis
        array = array[0]
    try:
        np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"attention: {name} has shape {array.shape}, which does not broadcast to {shape}, the shape of the scores"
        ) from None


def check_mask(mask: Any, shape: tuple[int, ...]) -> Array | None:
    """A boolean mask that broadcasts to the shape of the scores."""
    if mask is None:
        return None
    array = as_array("attention", "mask", mask)
    if array.dtype != np.bool_:
        hint = "pass it as bias=" if is_floating(array.dtype) else "pass mask != 0"
        raise TypeError(f"attention: mask has dtype {array.dtype}; it must be bool, True = may attend ({hint}?)")
    _check_broadcast("mask", array, shape)
    return array.view(np.bool_)  # of NumPy's own bool


def holds_bits(dtype: Any) -> bool:
    """Whether arrays of uint16 hold the bits of bfloat16."""
    if dtype is not None and str(dtype) != "bfloat16":
        raise ValueError(f'attention: dtype is {dtype!r}; it says what arrays of uint16 hold: "bfloat16", or None')
    return dtype is not None


def _bias(bias: Any, shape: tuple[int, ...], dtype: np.dtype[Any], bits: bool) -> Array | None:
    """bias as the core reads it; the dtype of the arithmetic is `dtype`."""
    if bias is None:
        return None
    bias = as_array("attention", "bias", bias)
    if not (is_floating(bias.dtype) or (bits and bias.dtype == np.uint16)):
        hint = "pass it as mask=" if bias.dtype == np.bool_ else "convert it with .astype(float)"
        raise TypeError(f"attention: bias has dtype {bias.dtype}; it must be floating ({hint}?)")
    _check_broadcast("bias", bias, shape)
    return readable(bias, dtype, bits)


def _lead(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, ...]:
    """The batch axes, after every check of the shapes of q, k, v (each with a head axis)."""
    q_heads, _, width = q[-3:]
    heads, keys, k_width = k[-3:]
    if width != k_width:
        wrong = f"q has width {width} and k has {k_width}; they must be equal"
    elif width == 0:
        wrong = "q and k have width 0; it must be at least 1"
    elif keys != v[-2]:
        wrong = f"k has {keys} keys and v has {v[-2]}; they must be equal"
    elif heads != v[-3]:
        wrong = f"k has {heads} heads and v has {v[-3]}; they must be equal"
    elif q_heads and (heads == 0 or q_heads % heads):
        number = "the number of q heads must be a multiple of the number of k heads"
        wrong = f"q has {q_heads} heads and k has {heads}; {number}"
    elif q[:-3] == k[:-3] == v[:-3]:  # in most calls; broadcast_shapes() takes as long as a small product
        return q[:-3]
    else:
        try:
            return np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
        except ValueError:
            wrong = "the batch axes of q, k and v do not broadcast"
    raise ValueError(f"attention: {wrong} (q has shape {q}, k {k}, v {v})")


def _before(before: Any, shape: tuple[int, ...], width: int, dtype: np.dtype[Any]) -> Partial | None:
    """The unfinished rows that this call continues, in the dtype of the arithmetic."""
    if before is None:
        return None
    if not isinstance(before, Partial):
        raise TypeError(
            f"attention: before is a {type(before).__name__}; it must be a Partial, as attention_partial returns it"
        )
    given = [as_array("attention", f"before.{name}", array) for name, array in before._asdict().items()]
    for name, array, wanted in zip(Partial._fields, given, (shape, shape, (*shape, width)), strict=True):
        if array.shape != wanted or array.dtype != dtype:
            raise ValueError(
                f"attention: before.{name} has shape {array.shape} and dtype {array.dtype}; they must be {wanted} and "
                f"{dtype}, those of the rows of this call"
            )
    return Partial(*(ready(array, dtype) for array in given))


# ---- the value ----

_CHANGES = frozenset(("mask", "bias", "softcap", "sinks", "alibi_slopes", "score_mod", "before"))


class Scores:
    """The checked values of one call that decide its scores. Arrays have the axes that the caller gave them."""

    mask: Array | None = None
    bias: Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    slopes: Array | None = None
    score_mod: ScoreMod | None = None
    before: Partial | None = None

    def __init__(self, q: Array, k: Array, v: Array, options: Mapping[str, Any], keep: bool = False) -> None:
        """keep: k and v only stand for shape and dtype of what a cache holds."""
        axes = q.ndim, k.ndim, v.ndim
        if min(axes) < 2:
            name, shape = next((n, x.shape) for n, x in (("q", q), ("k", k), ("v", v)) if x.ndim < 2)
            raise ValueError(f"attention: {name} has shape {shape}; it needs at least two axes, (rows, width)")
        self.drop = axes == (2, 2, 2)  # no array has a head axis, so the results have none
        self.bits = holds_bits(options.get("dtype"))
        self.compute, self.dtype = promoted("attention", q, k, v, bits=self.bits)
        shapes = [array.shape if array.ndim > 2 else (1, *array.shape) for array in (q, k, v)]
        self.lead = _lead(*shapes)
        self.heads, self.queries, self.width = shapes[0][-3:]
        self.kv_heads, self.keys = shapes[1][-3:-1]
        rows = (self.queries,) if self.drop else (*self.lead, self.heads, self.queries)
        self.shape = (*rows, self.keys)  # of the scores, with the caller's axes
        self.scale = _factor(options.get("scale"), self.width, self.compute)
        if not _CHANGES.isdisjoint(options):  # most calls have none
            self._take_changes(options, rows, v.shape[-1])
        self.structure = structure(self.lead, self.queries, self.keys, options, alibi=self.slopes is not None)
        same = self.structure.same_segment
        if same is not None:
            same = same if self.drop else same[..., None, :, :]
            self.mask = same if self.mask is None else self.mask & same
        self.q = stored(q, self.compute, self.bits)
        self.k = k if keep else stored(k, self.compute, self.bits)

    def _take_changes(self, options: Mapping[str, Any], rows: tuple[int, ...], width: int) -> None:
        """What changes scores or hides keys one by one; rows: the axes of the results, width: that of a value."""
        self.mask = check_mask(options.get("mask"), self.shape)
        self.bias = _bias(options.get("bias"), self.shape, self.compute, self.bits)
        self.softcap = _softcap(options.get("softcap"))
        self.sinks = _per_head("sinks", options.get("sinks"), self.heads)
        self.slopes = _slopes(options.get("alibi_slopes"), self.heads, self.compute)
        self.score_mod = options.get("score_mod")
        if self.score_mod is not None and not callable(self.score_mod):
            wanted = "a callable (scores, b, h, i, j) -> scores"
            raise TypeError(f"attention: score_mod is {self.score_mod!r}; it must be {wanted}")
        self.before = _before(options.get("before"), rows, width, self.compute)

    @property
    def options(self) -> dict[str, Any]:
        """The options again, by their public names, as the compiled core takes them."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.slopes,
            "mask": self.mask,
            "bias": self.bias,
            "before": self.before,
            "dtype": "bfloat16" if self.bits else None,
            **self.structure.options(),
        }

    @property
    def intervals(self) -> tuple[Array, Array] | None:
        """(lo, hi) of packed segments: each (..., L) with every batch axis."""
        if self.structure.segments is None:
            return None
        lo, hi = (np.broadcast_to(side, (*self.lead, self.queries)) for side in self.structure.segments)
        return lo, hi

    @property
    def empty(self) -> bool:
        """Whether there is no row or no key, so that no result depends on a score."""
        return 0 in self.shape

    def without_values(self, v: Array) -> Array:
        """A column of zeros in place of values of width 0, for results other than the output."""
        if self.before is not None:
            self.before = self.before._replace(o=np.zeros((*self.shape[:-1], 1), self.compute))
        return np.zeros((*v.shape[:-1], 1), self.compute)


def checked(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> tuple[Scores, Array]:
    """The scores and the values of a call, or the error that tells what is wrong with it."""
    q = as_array("attention", "q", q)
    k = as_array("attention", "k", k)
    v = as_array("attention", "v", v)
    scores = Scores(q, k, v, options)
    return scores, stored(v, scores.compute, scores.bits)
