"""Norms of queries, keys and values, between the projections and the attention.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Ba, Kiros and Hinton, "Layer Normalization", 2016;
for queries and keys: Henry et al., "Query-Key Normalization for Transformers", 2020. Over the D elements of a head, or
over the H · D elements of all heads together:

    rms            x / sqrt(mean(x^2) + eps) · w
    rms_plus_one   x / sqrt(mean(x^2) + eps) · (1 + w)
    layer          (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) · w + b

What the elements are taken over follows from the shape of w: (D,) and (H, D) are norms of each head, with one weight
for all heads or one for each; (H · D,) is a norm of all heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import as_array, finite, flag
from ..core.twin_backward import summed_to
from ..storage import rounded
from .projections import NAME

Array = NDArray[Any]

KINDS = ("rms", "rms_plus_one", "layer")
_KEYS = ("kind", "eps", "after_rotary", "values")


@dataclass(frozen=True)
class Scheme:
    """The checked options of the norms of a layer."""

    kind: str
    eps: float
    after_rotary: bool
    values: bool  # whether the values are normalised too, without a weight


def _read(norm: Any) -> Scheme:
    """Checks the dictionary that a layer is given."""
    if not isinstance(norm, Mapping):
        raise TypeError(f"{NAME}: norm is {norm!r}; it must be a dict with the keys {', '.join(_KEYS)}")
    unknown = [repr(key) for key in norm if key not in _KEYS]
    if unknown:
        raise TypeError(f"{NAME}: norm has the unknown key {', '.join(unknown)}; known are {', '.join(_KEYS)}")
    missing = [repr(key) for key in _KEYS[:2] if key not in norm]
    if missing:
        raise ValueError(
            f"{NAME}: norm lacks {' and '.join(missing)}, for which models differ; see their configuration"
        )
    if norm["kind"] not in KINDS:
        raise ValueError(f"{NAME}: norm['kind'] is {norm['kind']!r}; it must be one of {', '.join(KINDS)}")
    return Scheme(
        norm["kind"],
        finite(NAME, "norm['eps']", norm["eps"], 0.0),
        flag(NAME, "norm['after_rotary']", norm.get("after_rotary", False)),
        flag(NAME, "norm['values']", norm.get("values", False)),
    )


class Norm:
    """The norm of queries, of keys or of values, (..., heads, rows, width)."""

    def __init__(self, name: str, scheme: Scheme, weights: tuple[Any, Any], shape: tuple[int, int]) -> None:
        """name: that of the weight in errors; weights: w and b, of which either may be None; shape: heads and width."""
        heads, width = shape
        self._kind, self._eps = scheme.kind, scheme.eps
        self._axes: tuple[int, ...] = (-1,)
        shapes = ((width,), (heads, width), (heads * width,))
        self.arrays: dict[str, Array] = {}
        self.named: dict[str, Array] = {}  # the same by argument, in the caller's shapes
        for role, label, value in zip("wb", (name, f"b_{name}"), weights, strict=True):
            if value is None:
                continue
            array = as_array(NAME, label, value)
            if array.shape not in shapes:
                raise ValueError(
                    f"{NAME}: {label} has shape {array.shape}; it must be {shapes[0]} or {shapes[1]} for a norm of "
                    f"each head, or {shapes[2]} for one of all heads together"
                )
            self.named[label] = array
            if array.shape != shapes[0]:
                self._axes = (-1,) if array.ndim == 2 else (-3, -1)
                array = array.reshape(heads, 1, width)
            self.arrays[role] = array
        if "b" in self.arrays and (self._kind != "layer" or "w" not in self.arrays):
            raise ValueError(f"{NAME}: b_{name} is for norm['kind'] 'layer', and goes with {name}")
        if len(self.arrays) == 2 and self.arrays["w"].shape != self.arrays["b"].shape:
            raise ValueError(f"{NAME}: {name} and b_{name} have different shapes")

    def __call__(self, x: Array) -> Array:
        """A fresh array of x's dtype. Settings of np.errstate around the call change nothing."""
        with np.errstate(all="ignore"):
            x, _ = self._scaled(x)
            if "w" in self.arrays:
                x *= self._factor(x.dtype)
            if "b" in self.arrays:
                x += rounded(self.arrays["b"], x.dtype)
        return x

    def _scaled(self, x: Array) -> tuple[Array, Array]:
        """(x before weight and bias, what it was divided by)."""
        if self._kind == "layer":
            x = x - x.mean(axis=self._axes, keepdims=True)
        size = np.square(x).mean(axis=self._axes, keepdims=True)
        size += x.dtype.type(self._eps)
        np.sqrt(size, out=size)
        return x / size, size

    def _factor(self, dtype: np.dtype[Any]) -> Array:
        weight = rounded(self.arrays["w"], dtype)
        return weight + 1 if self._kind == "rms_plus_one" else weight

    def backward(self, x: Array, d: Array) -> tuple[Array, dict[str, Array]]:
        """(gradient of x, those of weight and bias by argument), from that of what the call gave for x."""
        scaled, size = self._scaled(x)
        by_role = {"w": d * scaled, "b": d}
        if "w" in self.arrays:
            d = d * self._factor(d.dtype)
        dx = d - scaled * (d * scaled).mean(axis=self._axes, keepdims=True)
        if self._kind == "layer":
            dx -= d.mean(axis=self._axes, keepdims=True)
        dx /= size
        found = {
            label: summed_to(by_role[role], own.shape).reshape(array.shape)
            for (role, own), (label, array) in zip(self.arrays.items(), self.named.items(), strict=True)
        }
        return dx, found


class Norms:
    """The norms of a layer, none of them if it has no scheme."""

    def __init__(
        self, norm: Any, given: Mapping[str, tuple[Any, Any]], shapes: Mapping[str, tuple[int, int]], rotates: bool
    ) -> None:
        """given: weight and bias of q and k; shapes: heads and width of q, k, v; rotates: whether the layer does."""
        self.scheme = None if norm is None else _read(norm)
        self._norms: dict[str, Norm] = {}
        there = {part: [array is not None for array in arrays] for part, arrays in given.items()}
        if self.scheme is None:
            if any(map(any, there.values())):
                raise ValueError(
                    f"{NAME}: q_norm and k_norm need norm=, such as {{'kind': 'rms', 'eps': 1e-6}}; no array tells the "
                    "kind of a norm and its eps"
                )
            return
        if there["q"] != there["k"]:
            raise ValueError(f"{NAME}: give q_norm and k_norm, and biases of both or neither")
        for part in "qkv" if self.scheme.values else "qk":
            weights = given.get(part, (None, None))
            self._norms[part] = Norm(f"{part}_norm", self.scheme, weights, shapes[part])
        # What is not rotated can be normalised at once.
        self._late = "qk" if self.scheme.after_rotary and rotates else ""

    @property
    def arrays(self) -> list[Array]:
        return [array for one in self._norms.values() for array in one.arrays.values()]

    @property
    def named(self) -> dict[str, Array]:
        """The arrays by the names of their arguments."""
        return {name: array for one in self._norms.values() for name, array in one.named.items()}

    def before_rotary(self, part: str) -> Norm | None:
        """What normalises queries, keys or values as the projection gives them."""
        return self._norms[part] if part in self._norms and part not in self._late else None

    def after_rotary(self, part: str) -> Norm | None:
        """What normalises queries or keys after the layer has rotated them."""
        return self._norms[part] if part in self._norms and part in self._late else None
