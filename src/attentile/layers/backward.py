"""The gradients of a layer: attention_vjp() between its projections and the same backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import as_array
from ..backward import attention_vjp
from ..storage import gradient_dtype, is_floating, rounded
from .heads import Gradients, Heads
from .projections import NAME, Affine, times, times_backward

Array = NDArray[Any]


class LayerCall:
    """One call of a layer, with what its gradients need of it."""

    def __init__(
        self, heads: Heads, output: Affine, x: Array, source: tuple[Array, ...], compute: np.dtype[Any]
    ) -> None:
        """output: weight and bias of the last projection. source: none, rows to project, or keys and values. compute:
        dtype of the arithmetic."""
        self.heads, self.output = heads, output
        self.x, self.source = x, source
        self.compute = compute

    def forward(self, positions: Any, options: dict[str, Any]) -> Array:
        """The output, in the dtype of the arithmetic."""
        heads, rows = self.heads, [(self.x, "qkv")]
        if self.source:
            rows = [(self.x, "q"), (self.source[0], "kv")][: 3 - len(self.source)]
        parts: list[Array] = []
        self._projections: list[tuple[str, Callable[..., tuple[Array, Gradients]]]] = []
        for source, names in rows:
            found, backward = heads.vjp(source, names, self.compute, positions)
            parts += found
            self._projections.append((names, backward))
        if len(self.source) == 2:
            parts += [rounded(array, self.compute) for array in self.source]
        self._given = {name: options[name] for name in ("bias", "sinks") if options.get(name) is not None}
        q, k, v = parts
        out, self._through = attention_vjp(q, k, v, **options)
        joined = out.swapaxes(-2, -3)
        self._joined = joined.reshape(*joined.shape[:-2], self.output[0].shape[0])
        return times(self._joined, *self.output, self.compute)

    def backward(self, dout: Any) -> dict[str, Any]:
        """The gradients by the names of the arguments, each of the shape and dtype of its argument."""
        d = self._checked(dout)
        with np.errstate(all="ignore"):  # as in the core, where no setting of NumPy counts
            return self._rounded(self._gradients(d))

    def _gradients(self, dout: Array) -> dict[str, Any]:
        """Those in the dtype of the arithmetic."""
        weight, bias = self.output
        found: dict[str, Any] = {}
        rows, found["w_o"], db = times_backward(self._joined, weight, dout)
        if bias is not None:
            found["b_o"] = db
        project = self.heads.project
        by_head = rows.reshape(*rows.shape[:-1], project.heads, project.value_dim).swapaxes(-2, -3)
        passed = self._through(by_head, wrt=("q", "k", "v", *self._given))
        found |= {name: getattr(passed, "d" + name) for name in self._given}
        for source, (names, backward) in zip(("x", "context"), self._projections, strict=False):
            found[source], gradients = backward({name: getattr(passed, "d" + name) for name in names})
            for name, array in gradients.items():  # a fused weight projects both
                found[name] = found[name] + array if name in found else array
        if len(self.source) == 2:
            found["context"] = passed.dk, passed.dv
        return found

    def _checked(self, dout: Any) -> Array:
        d = as_array(NAME, "dout", dout)
        shape = (*self._joined.shape[:-1], self.output[0].shape[1])
        if not (is_floating(d.dtype) or d.dtype.kind in "iu"):
            raise TypeError(f"{NAME}: dout has dtype {d.dtype}; it must be real numbers")
        if d.shape != shape:
            raise ValueError(f"{NAME}: dout has shape {d.shape}; it must be {shape}, that of the output")
        return rounded(d, self.compute)

    def _rounded(self, found: dict[str, Any]) -> dict[str, Any]:
        """In the dtype of each argument."""
        arguments: dict[str, Any] = {"x": self.x, **self.heads.named, "w_o": self.output[0], "b_o": self.output[1]}
        arguments["context"] = self.source[0] if len(self.source) == 1 else self.source
        arguments |= {name: as_array(NAME, name, value) for name, value in self._given.items()}

        def one(array: Any, argument: Any) -> Any:
            if isinstance(array, tuple):
                return tuple(map(one, array, argument))
            return rounded(array, gradient_dtype(argument.dtype))

        return {name: one(array, arguments[name]) for name, array in found.items()}
