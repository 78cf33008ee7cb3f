"""`attentile.attention` on the cases of `cases.py`; run with `pytest benchmarks`, see README.md.

Cases of more than MODERATE floating-point operations are shortened, for the NumPy backend stores the scores of all
heads and takes seconds for them. `peers.py` times the cases in full.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
from cases import CASES, Case, make_inputs, numpy_dtype

import attentile

MODERATE = 2e9
MODERATE_CASES = [case if case.flops <= MODERATE else case.shortened(256) for case in CASES]


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
    result = timed(attention, *arrays, group=f"attention {case.name}: {case.description}", flops=case.flops)
    check_against_fallback(result, attention, *arrays)
