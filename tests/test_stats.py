"""Statistics of the weights against the weights themselves."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from attentile import attention, attention_stats

CASES = {
    "plain": {},
    "causal": {"causal": "lower_right"},
    "window": {"causal": "upper_left", "window": (40, 3)},
    "mask": {"mask": np.random.default_rng(50).random((2, 1, 70, 600)) < 0.1},
    "bias": {"bias": np.where(np.random.default_rng(51).random((70, 600)) < 0.3, -np.inf, 0.5)},
    "lengths": {"key_lengths": [0, 333]},
    "sinks": {"sinks": [1.0, -2.0, 0.5, 3.0], "softcap": 2.0},
    "alibi": {"q_start": 500, "alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
}


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def qkv(request):
    rng = np.random.default_rng(52)
    return tuple(rng.standard_normal((2, h, n, 16)).astype(request.param) for h, n in ((4, 70), (2, 600), (2, 600)))


@pytest.mark.parametrize("kind", CASES)
def test_against_the_weights(impl, kind, qkv):
    options, rows = CASES[kind], [3, 69, 0, 3, -1]
    full = attention(*qkv, return_weights=True, return_lse=True, **options)
    got = attention_stats(*qkv, which=("entropy", "max", "top_k", "received", "rows"), top_k=5, rows=rows, **options)
    w = full.weights.astype(np.float64)
    rtol = 1e-5 if qkv[0].dtype == np.float32 else 1e-12
    np.testing.assert_array_equal(got.out, full.out)
    np.testing.assert_array_equal(got.lse, full.lse)
    logs = np.log(w, where=w > 0, out=np.zeros_like(w))
    np.testing.assert_allclose(got.entropy, -(w * logs).sum(-1), rtol=rtol, atol=10 * rtol)
    np.testing.assert_allclose(got.max, w.max(-1), rtol=rtol)
    np.testing.assert_allclose(got.received, w.sum(-2), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(got.rows, full.weights[..., rows, :], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(got.top_weights, -np.sort(-w, axis=-1)[..., :5], rtol=rtol, atol=rtol)
    picked = np.take_along_axis(w, np.maximum(got.top_keys, 0), axis=-1)
    np.testing.assert_allclose(np.where(got.top_keys < 0, 0, picked), got.top_weights, rtol=rtol, atol=rtol)


def test_top_keys_of_equal_weights_and_of_few_keys(impl):
    got = attention_stats(np.zeros((2, 4)), np.zeros((3, 4)), np.eye(3), which="top_k", top_k=5, key_lengths=2)
    np.testing.assert_array_equal(got.top_keys, [[0, 1, -1, -1, -1]] * 2)
    np.testing.assert_allclose(got.top_weights, [[0.5, 0.5, 0, 0, 0]] * 2)
    assert got.entropy is None
    assert got.rows is None


def test_poison_stays_outside(impl):
    q, k, v = np.zeros((2, 4)), np.zeros((3, 4)), np.eye(3)
    k[2], v[2] = np.nan, np.nan
    got = attention_stats(q, k, v, which=("entropy", "max", "top_k", "received"), mask=[True, True, False])
    np.testing.assert_allclose(got.entropy, np.log(2))
    np.testing.assert_allclose(got.received, [1, 1, 0])


def test_same_bits_on_any_number_of_threads(compiled, qkv):
    one, two = (attention_stats(*qkv, causal="lower_right", num_threads=n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_does_not_grow_with_the_matrix(compiled):
    """L = S = 4096: the weights alone would be 64 MiB; the statistics stay under 16 MiB."""
    q, k, v = np.random.default_rng(53).standard_normal((3, 1, 1, 4096, 16), dtype=np.float32)
    tracemalloc.start()
    attention_stats(q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5)])
def test_empty(impl, shape):
    queries, keys, width = shape
    got = attention_stats(np.ones((queries, width)), np.ones((keys, width)), np.ones((keys, 2)))
    assert got.entropy.shape == (queries,)
    assert got.received.shape == (keys,)
    assert got.top_keys.shape == (queries, 8)
    assert (got.received == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"which": "entropies"}, ValueError, "which has 'entropies'"),
        ({"which": "rows"}, ValueError, "say which ones"),
        ({"which": "rows", "rows": [3]}, ValueError, "between 0 and 2"),
        ({"which": "rows", "rows": [0.5]}, TypeError, "1-D integers"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"causality": True}, TypeError, "causality"),
        ({"window": 3}, TypeError, "window is 3"),
    ],
)
def test_errors(impl, change, error, words):
    with pytest.raises(error, match=words):
        attention_stats(np.ones((3, 4)), np.ones((3, 4)), np.ones((3, 4)), **change)
