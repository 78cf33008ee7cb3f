"""Statistics of the weights to the last digits, at any number of keys, and their bits."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import FMA_HERE, two_fma_isas
from helpers import same_bits

from attentile import attention_stats, use_backend
from attentile.core.constants import LOG2E
from attentile.inspection.stats import KINDS

RNG = np.random.default_rng(58)


def eighths(values):
    """Multiples of 1/8, of which differences are exact in every dtype here."""
    return np.round(np.asarray(values) * 8) / 8


def scores_of(kind: str, keys: int) -> np.ndarray:
    """Scores of one row."""
    j = np.arange(keys)
    if kind == "uniform":
        return np.zeros(keys)
    if kind == "normal":
        return eighths(RNG.standard_normal(keys))
    if kind == "peaked":
        return np.where(j == keys // 3, 6, eighths(-RNG.random(keys) * 8))
    if kind == "ascending":
        return eighths(4 * j / keys)
    return np.where(j == keys - 1, 0, -28.0 - (j % 3))  # one key has all, but for e^-14


def exact(scores, base, sinks):
    """(entropy, largest weight, received) in float64 from rows of scores, for a sink each."""
    x = scores - scores.max(axis=-1, keepdims=True)
    others = np.where(x < 0, base**x, 0)
    beyond = np.count_nonzero(x == 0, axis=-1, keepdims=True) - 1 + others.sum(axis=-1, keepdims=True)
    beyond += base ** (sinks[:, None] - scores.max(axis=-1, keepdims=True))
    p = base**x / (1 + beyond)
    return (p * (np.log1p(beyond) - x * np.log(base))).sum(axis=-1), p.max(axis=-1), p.sum(axis=0)


def ulps(found, expected) -> float:
    """The largest error in units of the last place of float32."""
    single = expected.astype(np.float32)
    return float(np.abs((found.astype(np.float64) - expected) / np.spacing(single)).max())


@pytest.mark.parametrize("kind", ["uniform", "normal", "peaked", "ascending", "one key"])
@pytest.mark.parametrize(
    ("queries", "keys", "with_sink"),
    [(1, 31, False), (1, 31, True), (40, 700, False), (40, 700, True), (20, 70_000, True), (1, 1_000_000, False)],
)
def test_errors_of_float32(impl, queries, keys, kind, with_sink):
    """Below 4 ULP for every dtype that is computed in float32. Rows differ by their scale, and scores are exact."""
    if impl == "reference" and keys * queries > 10**6:
        queries = 2
    base = np.e if impl == "reference" else 2.0  # in which the scores are counted, so that they are exact
    q = np.repeat([1.0, 0.5, 2.0], 14)[:queries, None]
    k, v = scores_of(kind, keys)[:, None], np.zeros((keys, 1))
    sinks = np.array([1.5]) if with_sink else None
    log_sinks = np.full(queries, 1.5 if with_sink else -np.inf) / np.log(base)
    entropy, largest, received = exact(q * k.T, base, log_sinks)
    scale = 1.0 if impl == "reference" else 1 / LOG2E
    for dtype in (np.float32, np.float16):
        arrays = (x.astype(dtype) for x in (q, k, v))
        found = attention_stats(*arrays, scale=scale, sinks=sinks, top_k=1)
        assert found.entropy.dtype == found.received.dtype == np.float32
        assert ulps(found.entropy, entropy) < 4
        assert ulps(found.received, received) < 4
        assert ulps(found.max, largest) < 4
        same_bits(found.max, found.top_weights[..., 0])


def test_an_entropy_near_0(impl):
    """The logarithm of 1 + 1e-14, without which the entropy is 3 % too small."""
    found = attention_stats(
        np.ones((1, 1), np.float32), np.array([[0], [-32]], np.float32), np.eye(2, dtype=np.float32), scale=1.0
    )
    x = np.exp(-32.0)
    np.testing.assert_allclose(found.entropy, x * 32 + np.log1p(x), rtol=3e-6)
    np.testing.assert_allclose(found.received, [1, x], rtol=3e-6)


@pytest.mark.parametrize("keys", [10, 5000])
def test_no_digit_of_float64_is_lost(impl, keys):
    q, k = np.array([[1.0], [0.5], [2.0]]), scores_of("normal", keys)[:, None]
    found = attention_stats(q, k, np.zeros((keys, 1)), scale=1.0, which=("entropy", "max", "received"))
    entropy, largest, received = exact(q * k.T, np.e, np.full(3, -np.inf))
    np.testing.assert_allclose(found.entropy, entropy, rtol=2e-15)
    np.testing.assert_allclose(found.max, largest, rtol=4e-15)
    np.testing.assert_allclose(found.received, received, rtol=4e-15)


# ---- bits ----

ROWS = 53
BITS = {
    "plain": {},
    "causal": {"causal": "lower_right"},
    "mask": {"mask": RNG.random((ROWS, 1100)) < 0.5},
    "sinks": {"sinks": [0.5, 1.0, -2.0, 3.0], "softcap": 3.0},
}


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def qkv(request):
    rng = np.random.default_rng(59)
    return tuple(rng.standard_normal((2, h, n, 16)).astype(request.param) for h, n in ((4, ROWS), (2, 1100), (2, 1100)))


def everything(qkv, **options):
    return attention_stats(*qkv, which=KINDS, rows=[0, 52], top_k=40, **options)


@two_fma_isas
@pytest.mark.parametrize("kind", BITS)
def test_fma_instruction_sets_agree(kind, qkv):
    found = []
    for isa in FMA_HERE:
        with use_backend("compiled", isa):
            found.append(everything(qkv, **BITS[kind]))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("kind", BITS)
def test_a_row_alone_and_in_any_group_of_rows(compiled, kind, qkv):
    q, k, v = qkv
    whole = everything(qkv, **BITS[kind])
    for i in (0, 17, 52):
        options = dict(BITS[kind])
        if kind == "causal":
            options = {"causal": True, "q_start": 1100 - ROWS + i}
        if kind == "mask":
            options["mask"] = options["mask"][i]
        alone = attention_stats(q[:, :, i : i + 1], k, v, which=KINDS, rows=[0], top_k=40, **options)
        for name in ("out", "lse", "entropy", "max", "top_weights", "top_keys"):
            same_bits(getattr(alone, name)[:, :, 0], getattr(whole, name)[:, :, i])


@pytest.mark.parametrize("kind", BITS)
def test_thread_counts(compiled, kind, qkv):
    one = everything(qkv, num_threads=1, **BITS[kind])
    for threads in (2, 3):
        for a, b in zip(one, everything(qkv, num_threads=threads, **BITS[kind]), strict=True):
            same_bits(a, b)


def test_few_rows_whose_keys_threads_share(compiled):
    """The sums of the splits of one head are merged in the order of one thread."""
    q, k = RNG.standard_normal((1, 1, 2, 8), np.float32), RNG.standard_normal((1, 1, 60_000, 8), np.float32)
    one, two = (attention_stats(q, k, k, num_threads=n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        if a is not None:
            same_bits(a, b)


# ---- strongest keys ----


def weights_of(kind: str, queries: int, keys: int, dtype) -> np.ndarray:
    """Scores (L, S) whose weights come in a certain order."""
    i, j = np.arange(queries)[:, None], np.arange(keys)
    of = {
        "random": RNG.standard_normal((queries, keys)),
        "ascending": j / 64 + 0 * i,
        "descending": -j / 64 + 0 * i,
        "equal": np.zeros((queries, keys)),
        "few values": RNG.integers(0, 4, (queries, keys)),
        "nearly equal": RNG.integers(0, 40, (queries, keys)) * np.finfo(dtype).eps,
        "far apart": -RNG.random((queries, keys)) * 700,
        "excluded": np.where(RNG.random((queries, keys)) < 0.7, -np.inf, RNG.standard_normal((queries, keys))),
        "nan": np.where(
            RNG.random((queries, keys)) < 0.1, np.nan, np.where(i % 2, -np.inf, RNG.standard_normal((queries, keys)))
        ),
    }[kind]
    return of.astype(dtype)


@pytest.mark.parametrize("keys", [3, 64, 300, 1500])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "kind", ["random", "ascending", "descending", "equal", "few values", "nearly equal", "far apart", "excluded", "nan"]
)
def test_strongest_keys_are_those_of_a_stable_sort(impl, kind, dtype, keys):
    queries = 19
    bias = weights_of(kind, queries, keys, dtype)
    x, same = np.zeros((queries, 1), dtype), np.zeros((keys, 1), dtype)
    rows = attention_stats(x, same, same, bias=bias, which=("rows",), rows=range(queries)).rows
    order = np.argsort(np.where(np.isnan(rows), -np.inf, -rows), axis=-1, kind="stable")
    best = np.take_along_axis(rows, order, axis=-1)
    for top_k in sorted({1, 2, 5, 8, 9, 40, 42, 43, 127, 129, keys - 1, keys, keys + 3}):
        found = attention_stats(x, same, same, bias=bias, which=("top_k",), top_k=top_k)
        n = min(top_k, keys)
        same_bits(found.top_weights[:, :n], best[:, :n])
        np.testing.assert_array_equal(found.top_keys[:, :n], np.where(best == 0, -1, order)[:, :n])
        assert (found.top_keys[:, n:] == -1).all()
        assert (found.top_weights[:, n:] == 0).all()
