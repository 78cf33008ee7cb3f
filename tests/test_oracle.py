"""The testers tested: the oracle and the tolerance must tell right from wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracle import allowed_keys, oracle, tolerance


def test_oracle_by_hand():
    """Two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    q, k, v = np.array([[1.0]]), np.array([[0.0], [math.log(3)]]), np.array([[4.0], [8.0]])
    got = oracle(q[None], k[None], v[None], np.ones((1, 1, 2), bool))
    np.testing.assert_allclose(got.weights[0, 0], [0.25, 0.75], rtol=1e-15)
    np.testing.assert_allclose(got.out[0, 0], [7.0], rtol=1e-15)
    np.testing.assert_allclose(got.lse[0, 0], math.log(4), rtol=1e-15)


def test_oracle_ignores_what_is_excluded():
    q, k, v = np.ones((1, 1, 1)), np.array([[[1.0], [np.nan]]]), np.array([[[5.0], [np.inf]]])
    assert oracle(q, k, v, np.array([[[True, False]]])).out.item() == 5
    empty = oracle(q, k, v, np.zeros((1, 1, 2), bool))
    assert empty.out.item() == 0
    assert empty.lse.item() == -np.inf


def test_allowed_keys_draws_both_alignments():
    upper = allowed_keys((1, 1, 2, 4), causal="upper_left")[0, 0].astype(int).tolist()
    lower = allowed_keys((1, 1, 2, 4), causal="lower_right")[0, 0].astype(int).tolist()
    assert upper == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert lower == [[1, 1, 1, 0], [1, 1, 1, 1]]
    shorter = allowed_keys((1, 1, 2, 4), causal="lower_right", key_lengths=3)[0, 0].astype(int).tolist()
    assert shorter == [[1, 1, 0, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tolerance_rejects_a_small_fault(dtype):
    """Leaving out one key of 200, or a scale off by one part in 10^4, lies far outside the bound."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 20, 8)).astype(dtype) for _ in range(3))
    allowed = np.ones((1, 20, 20), bool)
    expected = oracle(q, k, v, allowed)
    bound = tolerance(q, k, v, allowed, expected)
    assert 0 < bound < 1e3 * np.finfo(dtype).eps
    allowed[..., 7] = False
    assert np.abs(oracle(q, k, v, allowed).out - expected.out).max() > 100 * bound
    wrong_scale = oracle(q, k, v, np.ones_like(allowed), scale=1.0001 / math.sqrt(8)).out
    assert np.abs(wrong_scale - expected.out).max() > 4 * bound
