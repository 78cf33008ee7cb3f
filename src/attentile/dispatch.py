"""The way of checked values to what computes: the compiled core, or its twin in NumPy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .core import twin, twin_backward
from .outputs import Outputs, Totals
from .runtime import backend
from .scores import Scores

Array = NDArray[Any]


def chosen(scores: Scores) -> ModuleType:
    """What computes now; a Python function on the scores is the twin's work."""
    return twin if backend.active is None or scores.score_mod is not None else backend.active


def attend(scores: Scores, v: Array, outputs: Outputs, threads: int, on: ModuleType | None = None) -> None:
    """Fills the outputs that are wanted. v: (..., Hkv, S, Dv), ready for the arithmetic. on: default, chosen()."""
    if not scores.empty and v.shape[-1] == 0 and outputs.has_more:
        v = scores.without_values(v)
        outputs = outputs.without_values()
    if scores.empty or v.shape[-1] == 0:
        outputs.of_no_keys()
    else:
        (on or chosen(scores)).attend(scores, v, outputs, threads)


def stats(scores: Scores, v: Array, totals: Totals, found: Any, threads: int, on: ModuleType) -> None:
    """Fills the statistics that are wanted, on the backend whose first pass has left these totals."""
    if not scores.empty:
        v = scores.without_values(v) if v.shape[-1] == 0 else v
        on.stats(scores, v, totals, found, threads)


def backward(scores: Scores, v: Array, given: Any, wanted: Any, threads: int) -> None:
    """Fills the gradients that are wanted, but leaves them if there is no row or no key."""
    if scores.empty:
        return
    if v.shape[-1] == 0:
        v = scores.without_values(v)
        column = np.zeros((*scores.shape[:-1], 1), scores.compute)
        given, wanted = given._replace(dout=column, out=column), wanted._replace(dv=None)
    core = backend.active
    (twin_backward if core is None else core).backward(scores, v, given, wanted, threads)
