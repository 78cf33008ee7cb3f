"""The way of checked values to what computes: the compiled core, or its twin in NumPy."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..core import twin
from . import config

if TYPE_CHECKING:
    from ..outputs import Outputs
    from ..scores import Scores

Array = NDArray[Any]


def _backend(scores: Scores) -> ModuleType:
    """What computes now; a Python function on the scores is the twin's work."""
    return twin if config.active is None or scores.score_mod is not None else config.active


def attend(scores: Scores, v: Array, outputs: Outputs, threads: int) -> None:
    """Fills the outputs that are wanted. v: (..., Hkv, S, Dv), ready for the arithmetic."""
    if not scores.empty and v.shape[-1] == 0 and outputs.beside:
        v = scores.without_values(v)
        outputs = outputs.without_values()
    if scores.empty or v.shape[-1] == 0:
        outputs.of_no_keys()
    else:
        _backend(scores).attend(scores, v, outputs, threads)


def explain(scores: Scores, v: Array, out: Array | None, with_weights: bool, threads: int) -> dict[str, int]:
    """What attend() would do, in numbers; no axis is empty. out: the array it would write, None for a new one."""
    found: dict[str, int] = _backend(scores).explain(scores, v, out, with_weights, threads)
    return found


def stats(scores: Scores, v: Array, m: Array, l: Array, found: Any, threads: int) -> None:  # noqa: E741
    """Fills the statistics that are wanted, from the m and l that a first pass has left."""
    if not scores.empty:
        v = scores.without_values(v) if v.shape[-1] == 0 else v
        _backend(scores).stats(scores, v, m, l, found, threads)
