"""`attentile.attention` on the cases of `cases.py`; run with `pytest benchmarks`, see README.md.

Cases of more than MODERATE floating-point operations are shortened, for the formula stores the scores of all heads and
takes seconds for them. `peers.py` times the cases in full.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import formulas
import pytest
from cases import CASES, Case, make_inputs, numpy_dtype

import attentile

MODERATE = 2e9
MODERATE_CASES = [case if case.flops <= MODERATE else case.shortened(256) for case in CASES if not case.train]


@pytest.fixture(params=MODERATE_CASES, ids=attrgetter("name"))
def case(request: pytest.FixtureRequest) -> Case:
    """Each case whose dtype there is: bfloat16 needs ml_dtypes."""
    try:
        numpy_dtype(request.param.dtype)
    except ImportError as error:
        pytest.skip(str(error))
    return request.param


def test_attention(case: Case, timed: Callable[..., Any], check_against_fallback: Callable[..., None]) -> None:
    """One call with the output allocated by it, as most callers do."""
    inputs = make_inputs(case)
    attention = partial(attentile.attention, **inputs.options)
    arrays = (inputs.query, inputs.key, inputs.value)
    formula = partial(formulas.attention, mask=inputs.visible(), bias=inputs.bias, softcap=inputs.softcap)
    if case.dtype in ("float16", "bfloat16"):
        formula = formulas.in_float32(formula)
    group = f"attention {case.name}: {case.description}"
    result = timed(attention, *arrays, formula=formula, group=group, flops=case.flops)
    check_against_fallback(result, attention, *arrays)
