"""The query, key and value projections of an attention layer: three weights, or one fused, applied as x @ W.

Shapes: x (..., L, d_in), context (..., S, d_context); per head (..., heads, rows, width). Hq query heads, Hkv key
heads, D their width, Dv the width of the values. A fused weight has its columns in groups, each of which holds as many
queries, keys and values as the others:

    layout         groups   columns of one group
    side_by_side   1        Hq · D | Hkv · D | Hkv · Dv
    per_head       Hkv      queries of Hq / Hkv heads | key | value
    codegen        4        queries | values | keys, of a quarter of the heads

Slices of the weights and of the products are views; only parts of several groups with several heads each are copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import as_array
from ..storage import rounded

Array = NDArray[Any]
Affine = tuple[Array, Array | None]  # a weight and its bias

NAME = "MultiHeadAttention"  # errors carry the name of the class that people call

# Order of the parts in a group; the number of groups, None for as many as there are key heads.
LAYOUTS: dict[str, tuple[str, int | None]] = {
    "side_by_side": ("qkv", 1),
    "per_head": ("qkv", None),
    "codegen": ("qvk", 4),
}
_ADVICE = "a weight that is used as x @ W.T must be given as W.T, fewer key heads as num_kv_heads="


def matrix(name: str, value: Any) -> Array:
    """The weight as an array with two axes, none of them empty."""
    array = as_array(NAME, name, value)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{NAME}: {name} has shape {array.shape}; it must be a matrix W (rows, columns), used as x @ W"
        )
    return array


def vector(name: str, value: Any, size: int, each: str = "column of its weight") -> Array | None:
    """A bias, or whatever else there is one of for `each`."""
    if value is None:
        return None
    array = as_array(NAME, name, value)
    if array.shape != (size,):
        raise ValueError(f"{NAME}: {name} has shape {array.shape}; it must be ({size},), one per {each}")
    return array


def width_per_head(name: str, size: int, axis: str, heads: int) -> int:
    """size / heads; axis names what is counted."""
    if size % heads:
        raise ValueError(f"{NAME}: {name} has {size} {axis}; it must be a multiple of num_heads = {heads} ({_ADVICE})")
    return size // heads


def times(x: Array, weight: Array, bias: Array | None, dtype: np.dtype[Any]) -> Array:
    """x (..., d) @ weight (d, n) + bias in dtype, a fresh array.

    One product of two matrices whatever the batch axes are: NumPy would make one product per batch item.
    """
    flat = rounded(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), dtype)
    with np.errstate(all="ignore"):  # as in the core, where no setting of NumPy counts
        product: Array = flat @ rounded(weight, dtype)
        if bias is not None:
            product += rounded(bias, dtype)
    return product.reshape(*x.shape[:-1], weight.shape[1])


def times_backward(x: Array, weight: Array, d: Array) -> tuple[Array, Array, Array]:
    """Gradients of x, of the weight and of the bias from d, that of times(x, weight, bias); all in the dtype of d."""
    flat = rounded(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), d.dtype)
    rows = d.reshape(len(flat), weight.shape[1])
    dx: Array = rows @ rounded(weight, d.dtype).T
    return dx.reshape(x.shape), flat.T @ rows, rows.sum(axis=0)


@dataclass(eq=False)
class Projections:
    """The checked weights of q, k and v, and the widths that follow from them."""

    weights: InitVar[tuple[Any, Any, Any]]
    biases: InitVar[tuple[Any, Any, Any]]
    heads: int
    kv_heads: int
    value_dim: int
    layout: str | None

    def __post_init__(self, weights: tuple[Any, Any, Any], biases: tuple[Any, Any, Any]) -> None:
        self._fused: Affine | None = None
        self._parts: dict[str, Affine] = {}  # of q, k and v; none if they are not slices of the fused weight
        if weights[1] is None and weights[2] is None:
            self._take_fused(weights[0], biases)
        elif weights[1] is None or weights[2] is None:
            raise ValueError(f"{NAME}: give w_k and w_v, or neither if w_q is the fused weight of all three")
        else:
            self._take_separate(weights, biases)

    def _take_separate(self, weights: tuple[Any, Any, Any], biases: tuple[Any, Any, Any]) -> None:
        if self.layout is not None:
            raise ValueError(
                f"{NAME}: layout={self.layout!r} is for a fused weight; pass it as w_q with w_k = w_v = None"
            )
        w_q, w_k, w_v = (matrix(f"w_{p}", w) for p, w in zip("qkv", weights, strict=True))
        shapes = f"w_q has shape {w_q.shape}, w_k {w_k.shape}, w_v {w_v.shape}"
        self.head_dim = width_per_head("w_q", w_q.shape[1], "columns", self.heads)
        for name, weight, width, what in (
            ("w_k", w_k, self.head_dim, "columns of w_q / num_heads"),
            ("w_v", w_v, self.value_dim, "rows of w_o / num_heads"),
        ):
            if weight.shape[1] != self.kv_heads * width:
                raise ValueError(
                    f"{NAME}: {name} has {weight.shape[1]} columns; it must have {self.kv_heads * width}, "
                    f"num_kv_heads = {self.kv_heads} times the {what} = {width} ({shapes}; {_ADVICE})"
                )
        if w_k.shape[0] != w_v.shape[0]:
            raise ValueError(f"{NAME}: w_k and w_v project the same rows and must have as many rows ({shapes})")
        self.d_in, self.d_context = w_q.shape[0], w_k.shape[0]
        for p, weight, bias in zip("qkv", (w_q, w_k, w_v), biases, strict=True):
            self._parts[p] = weight, vector(f"b_{p}", bias, weight.shape[1])

    def _take_fused(self, weight: Any, biases: tuple[Any, Any, Any]) -> None:
        if biases[1] is not None or biases[2] is not None:
            raise ValueError(f"{NAME}: with a fused weight b_q is the bias of all three; leave b_k and b_v out")
        fused = matrix("w_q", weight)
        columns, both = fused.shape[1], self.heads + self.kv_heads
        values = self.kv_heads * self.value_dim
        width = (columns - values) // both
        if width < 1 or width * both + values != columns:
            raise ValueError(
                f"{NAME}: the fused weight w_q has shape {fused.shape}; with {self.heads} query heads, "
                f"{self.kv_heads} key heads and values of width {self.value_dim} (rows of w_o / num_heads) it must "
                f"have {both} * head_dim + {values} columns ({_ADVICE})"
            )
        self.head_dim = width
        self.d_in = self.d_context = fused.shape[0]
        bias = vector("b_q", biases[0], columns)
        self._fused = fused, bias
        self._settle_groups()
        if self._groups == 1:
            cut = [None] * 3 if bias is None else np.split(bias, self._ends)
            self._parts = dict(zip("qkv", zip(np.split(fused, self._ends, axis=1), cut, strict=True), strict=True))

    def _settle_groups(self) -> None:
        layout = "side_by_side" if self.layout is None else self.layout
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise ValueError(f"{NAME}: layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
        self._order, groups = LAYOUTS[layout]
        self._groups = self.kv_heads if groups is None else groups
        if layout == "per_head" and self.head_dim != self.value_dim:
            raise ValueError(
                f"{NAME}: layout='per_head' needs values as wide as keys; the values (rows of w_o / num_heads) have "
                f"width {self.value_dim}, which leaves {self.head_dim} for the keys"
            )
        if self.kv_heads % self._groups:
            raise ValueError(
                f"{NAME}: layout={layout!r} has {self._groups} groups; num_kv_heads must be a multiple of that and is "
                f"{self.kv_heads}"
            )

    @property
    def _ends(self) -> list[int]:
        """Where the second and the third part of a group begin."""
        widths = {"q": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim}
        widths["v"] = self.kv_heads * self.value_dim
        first, second, _ = (widths[part] // self._groups for part in self._order)
        return [first, first + second]

    @property
    def arrays(self) -> list[Array]:
        """Every array that is used, a fused one and its slices too."""
        return [array for part in (*self._parts.values(), self._fused or ()) for array in part if array is not None]

    @property
    def _given(self) -> dict[str, Affine]:
        """Weights and biases by the letter of the arguments that they came in."""
        return self._parts if self._fused is None else {"q": self._fused}

    @property
    def named(self) -> dict[str, Array]:
        """The arrays by the names of their arguments."""
        pairs = [(f"{role}_{p}", x) for p, part in self._given.items() for role, x in zip("wb", part, strict=True)]
        return {name: array for name, array in pairs if array is not None}

    def __call__(self, x: Array, names: str, dtype: np.dtype[Any]) -> list[Array]:
        """Those of "qkv" in `names`, (..., heads, rows, width) each: fresh, of one product where a weight is fused."""
        if self._fused is None or (names != "qkv" and self._parts):
            found = {name: times(x, *self._parts[name], dtype) for name in names}
        else:
            product = times(x, *self._fused, dtype)
            groups = product.reshape(*x.shape[:-1], self._groups, product.shape[-1] // self._groups)
            found = dict(zip(self._order, np.split(groups, self._ends, axis=-1), strict=True))
        return [found[name].reshape(*x.shape[:-1], *self._heads(name)).swapaxes(-2, -3) for name in names]

    def _heads(self, name: str) -> tuple[int, int]:
        """How many heads queries, keys or values have, and how wide they are."""
        heads = self.heads if name == "q" else self.kv_heads
        return heads, self.value_dim if name == "v" else self.head_dim

    def backward(self, x: Array, given: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        """(gradient of x, those of weights and biases by argument), from those of some of q, k, v as a call gave them.

        All in the dtype of the arithmetic.
        """
        lead, dtype = x.shape[:-1], next(iter(given.values())).dtype
        columns = {name: d.swapaxes(-2, -3).reshape(*lead, math.prod(self._heads(name))) for name, d in given.items()}
        if self._fused is not None:  # parts that are not there have gradient 0
            parts = []
            for name in self._order:
                shape = (*lead, self._groups, math.prod(self._heads(name)) // self._groups)
                parts.append(columns[name].reshape(shape) if name in columns else np.zeros(shape, dtype))
            columns = {"q": np.concatenate(parts, axis=-1).reshape(*lead, self._fused[0].shape[1])}
        total, found = np.zeros(x.shape, dtype), {}
        for name, d in columns.items():
            weight, bias = self._given[name]
            dx, found[f"w_{name}"], db = times_backward(x, weight, d)
            total += dx
            if bias is not None:
                found[f"b_{name}"] = db
        return total, found
