"""Forward and backward of `attentile.attention_vjp` on the cases of `cases.py` that train; see README.md."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import formulas
import numpy as np
import pytest
from cases import CASES, Case, make_inputs

import attentile

MODERATE = 7e9
TRAINING = [case if case.flops <= MODERATE else case.shortened(256) for case in CASES if case.train]


@pytest.mark.parametrize("case", TRAINING, ids=attrgetter("name"))
def test_backward(case: Case, timed: Callable[..., Any], check_against_fallback: Callable[..., None]) -> None:
    """The output and three gradients, in arrays allocated by the call."""
    inputs = make_inputs(case)

    def forward_and_backward(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, ...]:
        out, vjp = attentile.attention_vjp(q, k, v, **inputs.options)
        return out, *vjp(dout)[:3]

    arrays = (inputs.query, inputs.key, inputs.value, inputs.gradient)
    formula = partial(formulas.attention_and_gradients, mask=inputs.visible())
    group = f"gradients {case.name}: {case.description}"
    result = timed(forward_and_backward, *arrays, formula=formula, group=group, flops=case.flops)
    check_against_fallback(result, forward_and_backward, *arrays)
