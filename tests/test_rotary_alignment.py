"""What reaches the compiled rotation is aligned, whatever the caller passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attentile import rotary_embedding
from attentile.positions import rotary
from attentile.runtime import backend


def misaligned(array: Any) -> Any:
    raw = np.empty(array.nbytes + 1, np.uint8)
    moved = raw[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    assert not moved.flags.aligned
    assert moved.flags.c_contiguous
    return moved


class Spy:
    """Stands in for the core and keeps the arguments of rotate()."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.arrays: list[Any] = []

    def rotate(self, *arguments: Any) -> None:
        turn = arguments[2]
        self.arrays += [x for x in (*arguments, *turn) if isinstance(x, np.ndarray)]
        self.core.rotate(*arguments)


@pytest.mark.parametrize("what", ["positions", "float64 tables", "float32 tables", "inverse", "half"])
def test_the_core_gets_no_misaligned_table(compiled, monkeypatch, what):
    """A contiguous array need not be aligned: positions reached the core as they came (UBSan, 64-bit load)."""
    x = np.ones((3, 4), np.float16 if what == "half" else np.float32)
    options: dict[str, Any] = {"positions": np.array([2, 0, 1])}
    if what not in ("positions", "half"):
        kind = np.float32 if what == "float32 tables" else np.float64
        options |= {"cos": np.eye(3, 2, dtype=kind), "sin": np.ones((3, 2), kind)}
    if what == "inverse":
        options["inverse"] = True
    want = rotary_embedding(x, **options)
    spy = Spy(backend.active)
    monkeypatch.setattr(backend, "active", spy)
    moved = {name: misaligned(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    np.testing.assert_array_equal(rotary_embedding(x, **moved), want)
    assert len(spy.arrays) >= 3
    assert all(array.flags.aligned for array in spy.arrays)
    assert rotary._plain(misaligned(np.arange(3)), np.int64).flags.aligned
