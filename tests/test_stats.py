"""Statistics of the weights against the weights themselves."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from helpers import most_allocated
from oracle import allowed_keys

from attentile import attention, attention_stats, dispatch, use_backend
from attentile.inspection.stats import KINDS

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


# Shifts of all scores of a row: the weights are to be those without it, but for the rounding of the scores.
SHIFTS = {"0": 0.0, "1e2": 1e2, "1e4": 1e4, "1e9": 1e9, "-1e4": -1e4, "-1e9": -1e9, "min": None}
CHANGES = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "causal": {"causal": "lower_right"},
    "mask": {"mask": np.random.default_rng(54).random((2, 1, 5, 300)) < 0.2},
    "bias": {"excluded": np.random.default_rng(55).random((5, 300)) < 0.5},
}


def exact_statistics(s, sinks):
    """Weights and entropy from final scores (B, H, L, S), -inf where excluded; a row without keys is 0."""
    top = s.max(axis=-1, keepdims=True)
    p = np.where(np.isneginf(s), 0, np.exp(s - np.where(np.isneginf(top), 0, top)))
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, s.dtype)[:, None, None] - top)
    w = np.where(p > 0, p / total, 0)
    return w, -(w * np.log(w, where=w > 0, out=np.zeros_like(w))).sum(axis=-1)


@pytest.mark.parametrize(
    ("change", "with_sinks"), [*((change, False) for change in CHANGES), ("plain", True), ("bias", True)]
)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_scores(impl, dtype, shift, change, with_sinks):
    """Neither bias nor scores of any size disturb the weights, which are those of attention() and of the formula."""
    rng, kind = np.random.default_rng(56), np.finfo(dtype)
    by = float(kind.min) if SHIFTS[shift] is None else SHIFTS[shift]
    q, k, v = (rng.standard_normal((2, h, n, 8)).astype(dtype) for h, n in ((4, 5), (2, 300), (2, 300)))
    options = dict(CHANGES[change])
    excluded = options.pop("excluded", np.zeros((5, 300), bool))
    bias = np.where(excluded, -np.inf, by).astype(dtype)
    sinks = (by + np.array([0.5, -1.0, 3.0, 6.0])) if with_sinks else None
    full = attention(q, k, v, bias=bias, sinks=sinks, return_weights=True, return_lse=True, **options)
    got = attention_stats(q, k, v, which=KINDS, top_k=3, rows=range(5), bias=bias, sinks=sinks, **options)
    np.testing.assert_array_equal(got.lse, full.lse)
    w = full.weights.astype(np.longdouble)
    near = {"rtol": 16 * kind.eps, "atol": 64 * kind.tiny}  # attention() has a sum of fewer digits
    np.testing.assert_allclose(got.rows, full.weights, **near)
    np.testing.assert_allclose(got.max, full.weights.max(axis=-1), **near)
    np.testing.assert_allclose(got.top_weights, -np.sort(-full.weights, axis=-1)[..., :3], **near)
    np.testing.assert_allclose(got.received, w.sum(axis=-2), **near)
    logs = np.log(w, where=w > 0, out=np.zeros_like(w))
    np.testing.assert_allclose(got.entropy, -(w * logs).sum(axis=-1), rtol=32 * kind.eps, atol=32 * kind.eps)
    assert (got.entropy >= 0).all()
    # The formula, as closely as the rounding of the scores to their size allows (in both bases: twice, and the scale).
    s = np.einsum("bhid,bhjd->bhij", q.astype(np.longdouble), np.repeat(k, 2, axis=1)) / np.sqrt(np.longdouble(8))
    if "softcap" in options:
        s = 3 * np.tanh(s / 3)
    off = (8 * abs(by) + 64) * float(kind.eps)
    if off < 1:
        s = np.where(allowed_keys(s.shape, bias=bias, **options), s + by, -np.inf)
        w, entropy = exact_statistics(s, sinks)
        np.testing.assert_allclose(got.rows, w, rtol=off, atol=kind.tiny)
        np.testing.assert_allclose(got.entropy, entropy, rtol=10 * off)
    elif sinks is None:  # nothing of the scores is left beside the shift
        np.testing.assert_allclose(got.rows.sum(axis=-1), full.weights.any(axis=-1), rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_in_the_thousands(impl, dtype):
    """No weight above 1, no entropy below 0, and each row gives out 1, whatever the size of its scores."""
    q, k = np.random.default_rng(57).standard_normal((2, 40, 16)) * 40
    got = attention_stats(q.astype(dtype), k.astype(dtype), k.astype(dtype))
    assert np.abs(got.lse).max() > 2000
    assert (got.max <= 1).all()
    assert (got.entropy >= 0).all()
    np.testing.assert_allclose(got.received.sum(), 40, rtol=40 * np.finfo(dtype).eps)


def test_weights_that_underflow_have_no_key(impl):
    got = attention_stats(np.ones((1, 1)), np.array([[0.0], [-2000.0], [0.0]]), np.eye(3), which="top_k", top_k=3)
    np.testing.assert_array_equal(got.top_keys, [[0, 2, -1]])
    np.testing.assert_array_equal(got.top_weights, [[0.5, 0.5, 0.0]])


# (keys, what of row 0 is excluded): row 1 sees key 0 and the last one. NaN is used by row 0.
NANS = {
    "nan": ([1, np.nan, 1, 1], []),
    "nan and an excluded key": ([1, np.nan, 1, 1], [2]),
    "inf": ([1, np.inf, 1, 1], []),
    "only -inf": ([-np.inf, -np.inf, -np.inf, 1], [3]),
    "nan beside a weight that underflows": ([-2000, np.nan, 1, 1], [2]),
}


@pytest.mark.parametrize("far", [0, 300], ids=["one_chunk", "two_chunks"])
@pytest.mark.parametrize("kind", NANS)
@pytest.mark.parametrize("how", ["mask", "bias"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_shows_where_it_is_used(impl, dtype, how, kind, far):
    values, excluded = NANS[kind]
    keys = np.array(values[:1] + [1] * far + values[1:], dtype)[:, None]
    seen = np.zeros((2, far + 4), bool)
    seen[0, [0, far + 1, far + 2, far + 3]] = True
    seen[0, [far + i for i in excluded]] = False
    seen[1, [far + 3]] = True
    options = {"mask": seen} if how == "mask" else {"bias": np.where(seen, 0, -np.inf)}
    got = attention_stats(
        np.ones((2, 1), dtype), keys, np.ones_like(keys), which=KINDS, top_k=2, rows=[0, 1], **options
    )
    expected = np.where(seen, [[np.nan], [1]], 0)
    np.testing.assert_array_equal(got.rows, expected)
    np.testing.assert_array_equal(got.received, expected.sum(axis=0))
    np.testing.assert_array_equal(got.max, [np.nan, 1])
    np.testing.assert_array_equal(got.entropy, [np.nan, 0])
    np.testing.assert_array_equal(got.top_weights, [[np.nan, np.nan], [1, 0]])
    np.testing.assert_array_equal(got.top_keys, [np.flatnonzero(seen[0])[:2], [far + 3, -1]])
    full = attention(np.ones((2, 1), dtype), keys, np.ones_like(keys), return_weights=True, **options)
    np.testing.assert_array_equal(full.weights, expected)
    np.testing.assert_array_equal(full.out, [[np.nan], [1]])


def test_minus_infinite_scores_are_weight_0_for_every_number_of_rows(impl):
    """The last vector of rows is filled up with zeros, and 0 * inf is NaN."""
    for rows in (1, 3, 17):
        got = attention_stats(np.ones((rows, 1)), np.array([[1.0], [-np.inf]]), np.ones((2, 1)))
        np.testing.assert_array_equal(got.received, [rows, 0])
        np.testing.assert_array_equal(got.max, np.ones(rows))


@pytest.mark.parametrize("sink", [-np.inf, 1e300, np.inf])
def test_sinks_that_take_nothing_or_all(impl, sink):
    mask = np.array([[True, True, False], [False, False, False]])
    got = attention_stats(np.zeros((2, 1)), np.zeros((3, 1)), np.ones((3, 1)), which=KINDS, rows=[0, 1],
                          sinks=[sink], mask=mask)  # fmt: skip
    weight = 0.5 if sink < 0 else 0
    np.testing.assert_allclose(got.rows, mask * weight)
    np.testing.assert_allclose(got.out, [[2 * weight], [0]])
    np.testing.assert_allclose(got.max, [weight, 0])
    np.testing.assert_allclose(got.received, [weight, weight, 0])
    np.testing.assert_allclose(got.entropy, [np.log(2) if weight else 0, 0])
    np.testing.assert_allclose(got.lse, [np.log(2), -np.inf])


def test_without_values(impl, qkv):
    """Dv = 0: the weights depend on the scores alone."""
    q, k, v = qkv
    options = {"causal": "lower_right", "sinks": [0.5] * 4, "mask": CASES["mask"]["mask"]}
    with_values = attention_stats(q, k, v, which=KINDS, rows=[1], **options)
    got = attention_stats(q, k, v[..., :0], which=KINDS, rows=[1], **options)
    assert got.out.shape == (*q.shape[:-1], 0)
    for name in got._fields[1:]:
        np.testing.assert_array_equal(getattr(got, name), getattr(with_values, name))


def test_same_bits_on_any_number_of_threads(compiled, qkv):
    one, two = (attention_stats(*qkv, causal="lower_right", num_threads=n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_does_not_grow_with_the_matrix(compiled):
    """L = S = 4096: the weights alone would be 64 MiB; the statistics stay under 16 MiB."""
    q, k, v = np.random.default_rng(53).standard_normal((3, 1, 1, 4096, 16), dtype=np.float32)
    assert most_allocated(lambda: attention_stats(q, k, v)) < 16 * 2**20


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
        ({"rows": [0]}, ValueError, "not in `which`"),
        ({"which": "rows", "rows": [3]}, ValueError, "between 0 and 2"),
        ({"which": "rows", "rows": [0.5]}, TypeError, "1-D integers"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"causality": True}, TypeError, "causality"),
        ({"window": 3}, TypeError, "window is 3"),
        ({"causal": "x"}, ValueError, "causal is 'x'"),
        ({"mask": np.ones((2, 2), bool)}, ValueError, "mask has shape"),
        ({"scale": np.inf}, ValueError, "scale is inf"),
        ({"softcap": -1}, ValueError, "softcap is -1"),
        ({"num_threads": 0}, ValueError, "num_threads"),
    ],
)
def test_errors(either, change, error, words):
    with pytest.raises(error, match=rf"^attention_stats: .*{words}"):
        attention_stats(np.ones((3, 4)), np.ones((3, 4)), np.ones((3, 4)), **change)


def test_both_passes_run_on_one_backend(compiled, monkeypatch):
    """Another thread may call use_backend() between them, and what they share is exact in one backend only."""
    q = np.random.default_rng(0).standard_normal((1, 2, 9, 8))
    expected = attention_stats(q, q, q)
    real = dispatch.attend

    def switching(*arguments, **options):
        real(*arguments, **options)
        use_backend("numpy")

    monkeypatch.setattr(dispatch, "attend", switching)
    with use_backend("compiled"):
        found = attention_stats(q, q, q)
        monkeypatch.undo()
    np.testing.assert_array_equal(found.entropy, expected.entropy)


def test_no_chosen_row_takes_nothing_from_the_rest(impl):
    q = k = np.zeros((3, 4))
    which = ("entropy", "max", "received", "top_k", "rows")
    found = attention_stats(q, k, np.eye(3), which=which, rows=[], top_k=1)
    np.testing.assert_allclose(found.entropy, np.log(3))
    np.testing.assert_allclose(found.max, 1 / 3)
    np.testing.assert_allclose(found.received, 1)
    assert found.top_keys.tolist() == [[0], [0], [0]]
    assert found.rows.shape == (0, 3)


def test_a_sink_beyond_the_range_says_nothing(impl):
    x = np.ones((1, 3, 4), np.float32)
    with np.errstate(all="raise"):
        found = attention_stats(x, x, x, sinks=np.array([300.0]))
    assert not found.max.any()


def test_a_tiny_call_wakes_no_thread(compiled):
    """A fresh process, whose pool has no worker before one is needed."""
    code = """
import numpy as np
from attentile import attention_stats
from attentile.runtime import backend
x = np.ones((1, 8, 4, 8), np.float32)
attention_stats(x, x, x, num_threads=2)
few = backend.active.pool_workers()
x = np.ones((1, 8, 256, 64), np.float32)
attention_stats(x, x, x, num_threads=2)
print(few, backend.active.pool_workers())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "1"]
