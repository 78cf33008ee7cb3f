"""logsumexp and sinks against exact values: what the end of a row computes with a log2 and an exp2 of its own."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from conftest import HERE

from attentile import attention, use_backend

ROWS = 600
EPS = np.finfo(np.float64).eps


def rows_of_equal_scores(**options):
    """Row i sees i + 1 keys, whose scores are all 0 and whose values are all 1."""
    zeros, ones = np.zeros((1, 1, ROWS, 4)), np.ones((1, 1, ROWS, 1))
    return attention(zeros, zeros, ones, causal=True, return_lse=True, **options)


def test_lse_of_n_equal_scores_is_the_logarithm_of_n(impl):
    with mpmath.workdps(40):
        exact = [mpmath.log(n) for n in range(1, ROWS + 1)]
        lse = rows_of_equal_scores().lse[0, 0]
        errors = [abs(mpmath.mpf(float(x)) - y) / np.spacing(float(y) or 1.0) for x, y in zip(lse, exact, strict=True)]
    assert lse[0] == 0
    assert max(errors) <= 1.5  # ULP: the logarithm, ln 2 and their product, half a unit each


@pytest.mark.parametrize("sink", [-800.0, -745.2, -36.0, -0.3, 0.0, 0.7, 36.0, 700.0, 800.0, -np.inf, np.inf])
def test_a_sink_takes_its_share(impl, sink):
    out = rows_of_equal_scores(sinks=[sink]).out[0, 0, :, 0]
    with mpmath.workdps(40):
        exact = np.array([float(n / (n + mpmath.exp(sink))) for n in range(1, ROWS + 1)])
    # The sink in units of log2(e) is rounded once; the exponential multiplies that error. NumPy's sums round n times.
    bar = ((40 if impl == "reference" else 4) + (abs(sink) if np.isfinite(sink) else 0)) * EPS
    np.testing.assert_allclose(out, exact, rtol=bar, atol=np.finfo(np.float64).tiny)


def test_every_instruction_set_gives_the_same_logarithms(compiled):
    found = []
    for isa in HERE:
        with use_backend("compiled", isa):
            found.append(rows_of_equal_scores().lse)  # without FMA too: the sums of ones are exact
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
