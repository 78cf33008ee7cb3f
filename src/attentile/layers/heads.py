"""Queries, keys and values of an attention layer: projected, normalised, rotated, and the same backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arguments import between
from ..cache import KVCache
from ..outputs import AttentionResult
from ..positions.items import rotate_items, row_positions, same_rotation, unpadded_positions
from .norms import Norm, Norms
from .projections import NAME, Projections

Array = NDArray[Any]
Gradients = dict[str, Array]  # by the names of arguments


class _Trace(NamedTuple):
    """What the way backwards needs of queries, keys or values."""

    projected: Array  # if they are normalised at once
    rotated: Array | None  # None: they are not


class Heads:
    """What a layer makes of its rows before it attends."""

    def __init__(self, project: Projections, norms: Norms, rotary: dict[str, Any] | None) -> None:
        self.project, self.norms = project, norms
        self.rotary = rotary
        self._agreed: Any = None  # options of a cache that were found to be the same

    @property
    def named(self) -> dict[str, Array]:
        """The arrays by the names of their arguments."""
        return self.project.named | self.norms.named

    def projected(self, x: Array, names: str, dtype: np.dtype[Any]) -> list[Array]:
        """Those of "qkv" in `names`, (..., heads, rows, width), normalised unless that follows the rotation."""
        parts = self.project(x, names, dtype)
        return [_normalised(self.norms.before_rotary(name), part) for name, part in zip(names, parts, strict=True)]

    def rotated(self, name: str, x: Array, positions: Any) -> Array:
        """Queries or keys (..., heads, L, head_dim), ours, rotated and, if that follows, normalised."""
        return _normalised(self.norms.after_rotary(name), self._turned(x, positions))

    def _turned(self, x: Array, positions: Any) -> Array:
        """In place, but for one row a new array is quicker."""
        return rotate_items(x, positions, self.rotary or {}, out=x if x.shape[-2] > 1 else None)

    # ---- gradients ----

    def vjp(
        self, x: Array, names: str, dtype: np.dtype[Any], positions: Any
    ) -> tuple[list[Array], Callable[[Mapping[str, Array]], tuple[Array, Gradients]]]:
        """Those of "qkv" in `names`, and what makes of their gradients that of x and those of the arrays."""
        found, traces = [], {}
        for name, part in zip(names, self.project(x, names, dtype), strict=True):
            result, rotated = _normalised(self.norms.before_rotary(name), part), None
            if self.rotary is not None and name != "v":
                rotated = self._turned(result, positions)  # a norm before it has left `part` as it was
                result = _normalised(self.norms.after_rotary(name), rotated)
            traces[name] = _Trace(part, rotated)
            found.append(result)

        def backward(given: Mapping[str, Array]) -> tuple[Array, Gradients]:
            parts: Gradients = {}
            gradients: Gradients = {}
            for name, d in given.items():
                parts[name], of_norm = self._part_backward(name, traces[name], positions, d)
                gradients |= of_norm
            dx, of_projections = self.project.backward(x, parts)
            return dx, gradients | of_projections

        return found, backward

    def _part_backward(self, name: str, trace: _Trace, positions: Any, d: Array) -> tuple[Array, Gradients]:
        """(gradient of what the projection gave, those of the norm)."""
        gradients: Gradients = {}
        if trace.rotated is not None:
            norm = self.norms.after_rotary(name)
            if norm is not None:
                d, gradients = norm.backward(trace.rotated, d)
            d = rotate_items(d, positions, {**(self.rotary or {}), "inverse": "transpose"})
        norm = self.norms.before_rotary(name)
        return (d, gradients) if norm is None else norm.backward(trace.projected, d)

    # ---- with a cache ----

    def check_cache(self, cache: Any, x: Array, context: tuple[Array, ...], positions: Any) -> None:
        """Refuses what does not go together with a cache."""
        if not isinstance(cache, KVCache):
            raise TypeError(f"{NAME}: cache is a {type(cache).__name__}; it must be a KVCache")
        if context:
            raise ValueError(
                f"{NAME}: cache holds the keys of x; for context call keys_values once and give its result as context="
            )
        if x.ndim > 3:
            raise ValueError(f"{NAME}: x has shape {x.shape}; with a cache it must be (batch, L, {self.project.d_in})")
        if cache.held.rotary is None:
            return
        if self.norms.scheme is not None and self.norms.scheme.after_rotary:
            raise ValueError(
                f"{NAME}: the layer normalises rotated queries and keys, and the cache rotates after the layer; make "
                "the cache with rotary=None"
            )
        # Compared once for each cache: tables may be large.
        if self.rotary is not None and self._agreed is not cache.held.rotary:
            if not same_rotation(self.rotary, cache.held.rotary, self.project.head_dim):
                raise ValueError(
                    f"{NAME}: the layer has rotary={self.rotary} and the cache rotary={cache.held.rotary}; "
                    "they must be equal, or one of them None"
                )
            self._agreed = cache.held.rotary
        if positions is not None:
            raise ValueError(
                f"{NAME}: the cache turns keys at its own positions; for other positions make it with rotary=None"
            )

    def attend_cached(
        self, parts: list[Array], cache: KVCache, positions: Any, lengths: Any, options: dict[str, Any]
    ) -> Array | AttentionResult:
        """Appends the keys and values, with the pages that attempt() may need, and attends."""
        q, k, v = parts
        before, rows = cache.lengths, q.shape[-2]
        counts: Any = rows
        if lengths is not None:
            counts = between(NAME, "lengths", lengths, np.full(before.shape, rows, np.intp), "the rows of x")
        if self.rotary is not None and cache.held.rotary is None:
            if positions is not None:
                positions = positions if lengths is None else unpadded_positions(NAME, positions, counts, rows)
            elif lengths is None and (before.size == 1 or (before == before[:1]).all()):
                positions = int(before[0]) if before.size else None  # an int is the quickest form
            else:
                positions = row_positions(before, counts, rows)
            q, k = self.rotated("q", q, positions), self.rotated("k", k, positions)
        if lengths is not None and options.get("q_start") is None:
            # The cache takes the last L tokens of an item for its queries; rows that are left-aligned start here.
            options["q_start"] = before
            options.setdefault("causal", True)
        cache.held.append(k, v, lengths, keep=True)
        return cache.attend(q, **options)


def _normalised(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
