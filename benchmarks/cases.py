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

import numpy as np

SEED = 20240
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    """One attention problem. `mask` is None, "padding" (boolean, (B, 1, 1, S)) or "additive" (float, (1, 1, L, S))."""

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

    @property
    def flops(self) -> float:
        """Floating-point operations of the useful work: two products of 2·B·Hq·L·S·D; a causal case needs half."""
        dense = 4.0 * self.B * self.Hq * self.L * self.S * self.D
        return dense / 2 if self.causal else dense

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
        return ", ".join([f"{batch}{heads}", f"{self.L} × {self.S}", f"width {self.D}", *extras])

    def shortened(self, length: int) -> "Case":
        """The same case with at most `length` rows and keys, its name marked `@length`."""
        return replace(self, name=f"{self.name}@{length}", L=min(self.L, length), S=min(self.S, length))


# fmt: off
CASES = (
    #    name         B  Hq  Hkv     L     S    D  dtype       causal  mask
    Case("bert128",   1, 12, 12,  128,  128,  64, "float32",  False, None),
    Case("bert512",   1, 12, 12,  512,  512,  64, "float32",  False, None),
    Case("bert-pad",  8, 12, 12,  384,  384,  64, "float32",  False, "padding"),
    Case("bert-add",  1, 12, 12, 1024, 1024,  64, "float32",  False, "additive"),
    Case("gpt2-1k",   1, 12, 12, 1024, 1024,  64, "float32",  True,  None),
    Case("gpt2-4k",   1, 12, 12, 4096, 4096,  64, "float32",  True,  None),
    Case("llama-2k",  1, 32,  8, 2048, 2048, 128, "float32",  True,  None),
    Case("vit-197",   4, 12, 12,  197,  197,  64, "float32",  False, None),
    Case("sd-d80",    1,  8,  8, 1024,   77,  80, "float32",  False, None),
    Case("d256",      1,  4,  4, 1024, 1024, 256, "float32",  False, None),
    Case("fp64-512",  1,  8,  8,  512,  512,  64, "float64",  False, None),
    Case("bf16-2k",   1, 32,  8, 2048, 2048, 128, "bfloat16", True,  None),
    Case("fp16-1k",   1, 12, 12, 1024, 1024,  64, "float16",  False, None),
    Case("dec-gpt2",  1, 12, 12,    1, 1024,  64, "float32",  False, None),
    Case("dec-llama", 1, 32,  8,    1, 4096, 128, "float32",  False, None),
    Case("dec-b16",  16, 12, 12,    1,  512,  64, "float32",  False, None),
    Case("tiny-seed", 1,  1,  1,    5,    5,  64, "float64",  False, None),
    Case("tiny-32",   1,  4,  4,   32,   32,  32, "float32",  False, None),
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
    """The arrays of a case, at most one of `mask` (boolean, True = may attend) and `bias` (added to the scores) set."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray | None
    bias: np.ndarray | None
    causal: bool


def make_inputs(case: Case, seed: int = SEED) -> Inputs:
    """Normally distributed inputs of a case: the same arrays for the same seed, in every process."""
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(case.dtype)
    query = random.standard_normal((case.B, case.Hq, case.L, case.D)).astype(dtype)
    key = random.standard_normal((case.B, case.Hkv, case.S, case.D)).astype(dtype)
    value = random.standard_normal((case.B, case.Hkv, case.S, case.D)).astype(dtype)
    mask = bias = None
    if case.mask == "padding":  # sentences of lengths S/3 … S, filled up to S
        lengths = np.linspace(case.S // 3, case.S, case.B).astype(int)
        mask = (np.arange(case.S) < lengths[:, None])[:, None, None, :]
    elif case.mask == "additive":
        bias = random.standard_normal((1, 1, case.L, case.S)).astype(dtype)
    return Inputs(query, key, value, mask, bias, case.causal)


def plain_attention(inputs: Inputs, dtype: str = "float64") -> np.ndarray:
    """Softmax(query · keyᵀ / √D + bias) · value as float64, each step rounded to `dtype`, some rows at a time."""
    B, Hq, L, D = inputs.query.shape
    Hkv, S = inputs.key.shape[1:3]
    target, working = numpy_dtype(dtype), np.dtype("float64" if dtype == "float64" else "float32")

    def rounded(array: np.ndarray) -> np.ndarray:
        return array if target == working else array.astype(target).astype(working)

    mask = None if inputs.mask is None else np.broadcast_to(inputs.mask, (B, Hq, L, S))
    bias = None if inputs.bias is None else np.broadcast_to(inputs.bias, (B, Hq, L, S))
    out = np.empty((B, Hq, L, inputs.value.shape[-1]))
    for b, h in np.ndindex(B, Hq):
        key, value = (array[b, h // (Hq // Hkv)].astype(working) for array in (inputs.key, inputs.value))
        for first in range(0, L, 512):
            rows = slice(first, first + 512)
            scores = rounded(inputs.query[b, h, rows].astype(working) @ key.T * working.type(1 / np.sqrt(D)))
            if bias is not None:
                scores = rounded(scores + bias[b, h, rows].astype(working))
            if mask is not None:
                scores[~mask[b, h, rows]] = -np.inf
            if inputs.causal:
                scores[np.arange(S) > np.arange(L)[rows, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = rounded(weights / weights.sum(axis=-1, keepdims=True))
            out[b, h, rows] = rounded(weights @ value)
    return out


@dataclass(frozen=True)
class Judge:
    """Holds a result against the exact one: an error up to `allowed` is rounding, anything else, NaN too, is wrong."""

    exact: np.ndarray
    allowed: float

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
        """The judge of an attention case, from `plain_attention`."""
        rounded_dtype = "float32" if case.dtype == "float64" else case.dtype
        exact = plain_attention(inputs)
        return cls.from_rounding(exact, plain_attention(inputs, rounded_dtype), rounded_dtype, case.dtype)

    def error(self, result: np.ndarray) -> float:
        """The largest absolute error of a result; infinite if its shape is wrong."""
        return largest_error(result, self.exact) if np.shape(result) == self.exact.shape else float("inf")

    def accepts(self, error: float) -> bool:
        """True if an error is small enough; never for NaN."""
        return error <= self.allowed


def largest_error(result: np.ndarray, exact: np.ndarray) -> float:
    """The largest absolute difference of two arrays of one shape, computed in float64; NaN if one shows up."""
    return float(np.max(np.abs(np.asarray(result).astype(np.float64) - exact), initial=0.0))
