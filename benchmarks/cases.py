"""The one list of benchmark cases, their inputs, and what a right result is.

Shapes, with the letters used everywhere in this directory:

    query  (B, Hq, L, D)     B  batch items     Hq   query heads             L  query rows    D  width of a head
    key    (B, Hkv, S, D)                       Hkv  key and value heads     S  keys
    value  (B, Hkv, S, D)    query head h uses key head h // (Hq // Hkv)

`plain_attention` is the formula of the textbooks, independent of the library under test. In float64 it is the truth
that every result is held against; in the precision of a case it shows how much rounding the formula itself causes, and
`Judge` allows a small multiple of that: the tolerance is measured, not chosen.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

SEED = 20240
CHECKED_PAIRS = 2**28  # of queries and keys, over all heads; a case with more is checked in some of its rows
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    """One attention problem. `mask` is None, "padding" (boolean, (B, 1, 1, S)) or "additive" (float, (1, 1, L, S)).

    A causal case may have a `window`, the number of keys that a query sees, its own included. `segments` is the number
    of documents of equal length packed into the rows, none of which sees another. `softcap` bounds the scores.

    `peak` multiplies the queries. At 32 the scores spread as with scale=4, and a row's weight lies on a few keys, as it
    does in trained models. `alibi` lets the scores of a causal case fall with the distance (Press et al., 2022).
    `train`: the output, and then the gradients of query, key and value from that of the output.
    """

    name: str
    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    D: int
    dtype: str
    causal: bool
    mask: str | None
    window: int | None = None
    segments: int | None = None
    softcap: float | None = None
    peak: float = 1
    alibi: bool = False
    train: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of the useful work: two products of 2·D for each pair of a query and a visible key.

        A causal case has half of the pairs. Gradients take five products more.
        """
        pairs = self.L * self.S / (self.segments or 1)
        if self.window:  # the first rows see fewer keys
            pairs = self.window * self.L - self.window * (self.window - 1) / 2
        elif self.causal:
            pairs /= 2
        return (14.0 if self.train else 4.0) * self.B * self.Hq * self.D * pairs

    @property
    def description(self) -> str:
        """Shape, type and mask in one short phrase."""
        batch = f"{self.B} × " if self.B > 1 else ""
        heads = f"{self.Hq} heads" if self.Hq > 1 else "1 head"
        if self.Hkv != self.Hq:
            heads += f" on {self.Hkv}"
        extras = [self.dtype] if self.dtype != "float32" else []
        extras += ["causal"] if self.causal else []
        extras += [f"{self.mask} mask"] if self.mask else []
        extras += [f"window {self.window}"] if self.window else []
        extras += [f"{self.segments} segments"] if self.segments else []
        extras += [f"softcap {self.softcap:g}"] if self.softcap else []
        extras += [f"queries × {self.peak:g}"] if self.peak != 1 else []
        extras += ["ALiBi"] if self.alibi else []
        extras += ["and gradients"] if self.train else []
        return ", ".join([f"{batch}{heads}", f"{self.L} × {self.S}", f"width {self.D}", *extras])

    def shortened(self, length: int) -> "Case":
        """The case with at most `length` rows and keys, its name marked `@length`; a window shrinks in proportion."""
        L, S = min(self.L, length), min(self.S, length)
        window = max(self.window * S // self.S, 1) if self.window else None
        return replace(self, name=f"{self.name}@{length}", L=L, S=S, window=window)


# fmt: off
CASES = (
    #    name           B  Hq  Hkv     L     S    D  dtype       causal  mask
    Case("bert128",     1, 12, 12,  128,  128,  64, "float32",  False, None),
    Case("bert512",     1, 12, 12,  512,  512,  64, "float32",  False, None),
    Case("bert-pad",    8, 12, 12,  384,  384,  64, "float32",  False, "padding"),
    Case("bert-add",    1, 12, 12, 1024, 1024,  64, "float32",  False, "additive"),
    Case("gpt2-1k",     1, 12, 12, 1024, 1024,  64, "float32",  True,  None),
    Case("gpt2-4k",     1, 12, 12, 4096, 4096,  64, "float32",  True,  None),
    Case("llama-2k",    1, 32,  8, 2048, 2048, 128, "float32",  True,  None),
    Case("vit-197",     4, 12, 12,  197,  197,  64, "float32",  False, None),
    Case("sd-d80",      1,  8,  8, 1024,   77,  80, "float32",  False, None),
    Case("d256",        1,  4,  4, 1024, 1024, 256, "float32",  False, None),
    Case("fp64-512",    1,  8,  8,  512,  512,  64, "float64",  False, None),
    Case("bf16-2k",     1, 32,  8, 2048, 2048, 128, "bfloat16", True,  None),
    Case("fp16-1k",     1, 12, 12, 1024, 1024,  64, "float16",  False, None),
    Case("window-8k",   1,  8,  8, 8192, 8192,  64, "float32",  True,  None, window=256),
    Case("segments-8k", 1,  8,  8, 8192, 8192,  64, "float32",  False, None, segments=16),
    Case("softcap-1k",  1, 12, 12, 1024, 1024,  64, "float32",  True,  None, softcap=30.0),
    Case("peaked-1k",   1, 12, 12, 1024, 1024,  64, "float32",  False, None, peak=32.0),
    Case("peaked-gpt2", 1, 12, 12, 1024, 1024,  64, "float32",  True,  None, peak=32.0),
    Case("alibi-1k",    1,  8,  8, 1024, 1024,  64, "float32",  True,  None, alibi=True),
    Case("dec-gpt2",    1, 12, 12,    1, 1024,  64, "float32",  False, None),
    Case("dec-llama",   1, 32,  8,    1, 4096, 128, "float32",  False, None),
    Case("dec-fp16",    1, 32,  8,    1, 4096, 128, "float16",  False, None),
    Case("dec-bf16",    1, 32,  8,    1, 4096, 128, "bfloat16", False, None),
    Case("dec-b16",    16, 12, 12,    1,  512,  64, "float32",  False, None),
    Case("dec-peaked",  1,  8,  8,    1, 4096,  64, "float32",  False, None, peak=32.0),
    Case("bert128-bwd",  1, 12, 12,  128,  128,  64, "float32",  False, None, train=True),
    Case("bert512-bwd",  1, 12, 12,  512,  512,  64, "float32",  False, None, train=True),
    Case("gpt2-1k-bwd",  1, 12, 12, 1024, 1024,  64, "float32",  True,  None, train=True),
    Case("llama-2k-bwd", 1, 32,  8, 2048, 2048, 128, "float32",  True,  None, train=True),
    Case("fp64-512-bwd", 1,  8,  8,  512,  512,  64, "float64",  False, None, train=True),
    Case("tiny-seed",   1,  1,  1,    5,    5,  64, "float64",  False, None),
    Case("tiny-32",     1,  4,  4,   32,   32,  32, "float32",  False, None),
)
# fmt: on


def find_cases(names: str | None = None) -> list[Case]:
    """The cases of a comma-separated list of names; None is all of them. An unknown name raises ValueError."""
    if names is None:
        return list(CASES)
    by_name = {case.name: case for case in CASES}
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise ValueError(f"no case named {', '.join(unknown)}; the cases are {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name; bfloat16 comes from ml_dtypes and raises ImportError without it."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Inputs:
    """The arrays of a case, at most one of `mask` (boolean, True = may attend) and `bias` (added to the scores) set.

    `segments` is the number of its document for each token. `slopes`, one per head, are for a library that knows ALiBi:
    what the bias says, which holds the causal order then, too. `gradient` is that of the output, in cases that train.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray | None
    bias: np.ndarray | None
    causal: bool
    window: int | None = None
    segments: np.ndarray | None = None
    softcap: float | None = None
    slopes: np.ndarray | None = None
    gradient: np.ndarray | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attentile.attention` that say all of this, without those that say nothing."""
        window = None if self.window is None else (self.window - 1, None)
        bias = self.bias if self.slopes is None else None
        options = {"mask": self.mask, "bias": bias, "causal": self.causal, "window": window}
        options |= {"segments": self.segments, "softcap": self.softcap, "alibi_slopes": self.slopes}
        return {name: value for name, value in options.items() if value is not None}

    def visible(self) -> np.ndarray | None:
        """Who sees whom as one dense mask, (1, 1, L, S) or `mask` with its shape; None if everybody sees everything."""
        L, S = self.query.shape[2], self.key.shape[2]
        rows, keys = np.arange(L, dtype=np.int32)[:, None], np.arange(S, dtype=np.int32)
        forms = [] if self.mask is None else [self.mask]
        if self.causal:
            forms.append((keys <= rows)[None, None])
        if self.window is not None:
            forms.append((keys > rows - self.window)[None, None])
        if self.segments is not None:
            forms.append((self.segments[:, None] == self.segments)[None, None])
        return reduce(np.logical_and, forms) if forms else None


def make_inputs(case: Case, seed: int = SEED) -> Inputs:
    """Normally distributed inputs of a case: the same arrays for the same seed, in every process."""
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(case.dtype)
    query = random.standard_normal((case.B, case.Hq, case.L, case.D)).astype(dtype)
    key = random.standard_normal((case.B, case.Hkv, case.S, case.D)).astype(dtype)
    value = random.standard_normal((case.B, case.Hkv, case.S, case.D)).astype(dtype)
    query *= dtype.type(case.peak)
    mask = bias = slopes = None
    if case.mask == "padding":  # sentences of lengths S/3 … S, filled up to S
        lengths = np.linspace(case.S // 3, case.S, case.B).astype(int)
        mask = (np.arange(case.S) < lengths[:, None])[:, None, None, :]
    elif case.mask == "additive":
        bias = random.standard_normal((1, 1, case.L, case.S)).astype(dtype)
    elif case.alibi:
        slopes = 2.0 ** (-8 / case.Hq * np.arange(1, case.Hq + 1))
        distance = np.arange(case.L)[:, None] - np.arange(case.S)
        bias = np.where(distance < 0, -np.inf, -slopes[:, None, None] * distance)[None].astype(dtype)
    segments = np.arange(case.S) * case.segments // case.S if case.segments else None
    gradient = random.standard_normal(query.shape).astype(dtype) if case.train else None
    return Inputs(query, key, value, mask, bias, case.causal, case.window, segments, case.softcap, slopes, gradient)


def plain_attention(inputs: Inputs, dtype: str = "float64", rows: np.ndarray | None = None) -> np.ndarray:
    """Softmax(query · keyᵀ / √D + bias) · value as float64, each step rounded to `dtype`, some rows at a time.

    `rows`, boolean of length L, selects the rows that are wanted; the result has no others.
    """
    B, Hq, L, D = inputs.query.shape
    Hkv, S = inputs.key.shape[1:3]
    target, working = numpy_dtype(dtype), np.dtype("float64" if dtype == "float64" else "float32")

    def rounded(array: np.ndarray) -> np.ndarray:
        return array if target == working else array.astype(target).astype(working)

    visible = inputs.visible()
    visible = None if visible is None else np.broadcast_to(visible, (B, Hq, L, S))
    bias = None if inputs.bias is None else np.broadcast_to(inputs.bias, (B, Hq, L, S))
    wanted = np.arange(L) if rows is None else np.flatnonzero(rows)
    out = np.empty((B, Hq, len(wanted), inputs.value.shape[-1]))
    for b, h in np.ndindex(B, Hq):
        key, value = (array[b, h // (Hq // Hkv)].astype(working) for array in (inputs.key, inputs.value))
        for first in range(0, len(wanted), 512):
            some = wanted[first : first + 512]
            scores = rounded(inputs.query[b, h, some].astype(working) @ key.T * working.type(1 / np.sqrt(D)))
            if inputs.softcap is not None:
                cap = working.type(inputs.softcap)
                scores = rounded(cap * rounded(np.tanh(scores / cap)))
            if bias is not None:
                scores = rounded(scores + bias[b, h, some].astype(working))
            if visible is not None:
                scores[~visible[b, h, some]] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = rounded(weights / weights.sum(axis=-1, keepdims=True))
            out[b, h, first : first + 512] = rounded(weights @ value)
    return out


def joined(*parts: np.ndarray) -> np.ndarray:
    """Output and gradients, which are of about the same size, as one row of numbers."""
    return np.concatenate([np.ravel(part) for part in parts])


def plain_gradients(inputs: Inputs, dtype: str) -> np.ndarray:
    """The output and the gradients of query, key and value by the formula in this dtype, head by head, joined."""
    query, key, value, gradient = (
        array.astype(dtype) for array in (inputs.query, inputs.key, inputs.value, inputs.gradient)
    )
    found = [np.zeros_like(array) for array in (gradient, query, key, value)]
    out, dquery, dkey, dvalue = found
    group, scale = query.shape[1] // key.shape[1], query.dtype.type(query.shape[-1] ** -0.5)
    visible = inputs.visible()
    for b, h in np.ndindex(query.shape[:2]):
        one = b, h // group
        scores = query[b, h] @ key[one].T * scale
        if visible is not None:
            scores[~np.broadcast_to(visible, (*query.shape[:2], *scores.shape))[b, h]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[b, h] = weights @ value[one]
        delta = (gradient[b, h] * out[b, h]).sum(axis=-1, keepdims=True)
        dscores = weights * (gradient[b, h] @ value[one].T - delta) * scale
        dquery[b, h] = dscores @ key[one]
        dkey[one] += dscores.T @ query[b, h]
        dvalue[one] += weights.T @ gradient[b, h]
    return joined(*found)


def checked_rows(case: Case) -> np.ndarray | None:
    """The rows of a large case that are checked, boolean of length L: one at random of each 16. None is all rows."""
    if case.train or case.B * case.Hq * case.L * case.S <= CHECKED_PAIRS:
        return None
    firsts = np.arange(0, case.L, 16)
    rows = np.zeros(case.L, bool)
    rows[np.minimum(firsts + np.random.default_rng(SEED).integers(16, size=len(firsts)), case.L - 1)] = True
    return rows


@dataclass(frozen=True)
class Judge:
    """Holds a result against the exact one: an error up to `allowed` is rounding, anything else, NaN too, is wrong.

    `rows`, boolean of length L, selects the rows of a result that `exact` has; without it, it has them all.
    """

    exact: np.ndarray
    allowed: float
    rows: np.ndarray | None = None

    @classmethod
    def from_rounding(cls, exact: np.ndarray, rounded: np.ndarray, rounded_dtype: str, dtype: str) -> "Judge":
        """Allow four times the rounding error of `rounded`, plus the spacing of numbers at the largest exact value.

        `rounded` is the result of a known-good formula in `rounded_dtype`; rounding errors scale with the machine
        epsilon, so that a float32 run also tells what float64 may show.
        """
        rounding = largest_error(rounded, exact) * EPSILON[dtype] / EPSILON[rounded_dtype]
        largest = float(np.max(np.abs(exact), initial=0.0))
        return cls(exact, 4 * rounding + EPSILON[dtype] * largest)

    @classmethod
    def of_case(cls, case: Case, inputs: Inputs) -> "Judge":
        """The judge of an attention case, from `plain_attention` or `plain_gradients`."""
        rounded_dtype = "float32" if case.dtype == "float64" else case.dtype
        rows = checked_rows(case)
        if case.train:
            exact, rounded = (plain_gradients(inputs, dtype) for dtype in ("float64", rounded_dtype))
        else:
            exact, rounded = (plain_attention(inputs, dtype, rows) for dtype in ("float64", rounded_dtype))
        return replace(cls.from_rounding(exact, rounded, rounded_dtype, case.dtype), rows=rows)

    def error(self, result: np.ndarray) -> float:
        """The largest absolute error of a result; infinite if its shape is wrong, NaN if it has one in any row."""
        if self.rows is not None and np.ndim(result) > 1 and np.shape(result)[-2] == len(self.rows):
            if np.isnan(result).any():
                return float("nan")
            result = np.asarray(result)[..., self.rows, :]
        elif self.rows is not None:
            return float("inf")
        return largest_error(result, self.exact) if np.shape(result) == self.exact.shape else float("inf")

    def accepts(self, error: float) -> bool:
        """True if an error is small enough; never for NaN."""
        return error <= self.allowed


def largest_error(result: np.ndarray, exact: np.ndarray) -> float:
    """The largest absolute difference of two arrays of one shape, computed in float64; NaN if one shows up."""
    return float(np.max(np.abs(np.asarray(result).astype(np.float64) - exact), initial=0.0))
