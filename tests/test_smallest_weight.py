"""A weight below 2^-100 (float64: 2^-960) of the largest is exactly 0, so that no sum on the way is subnormal.

Such sums take some processors a hundred times as long. What is lost is far below rounding.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import FMA_HERE, two_fma_isas
from helpers import same_bits
from numpy.testing import assert_allclose, assert_array_equal

from attentile import (
    KVCache,
    Partial,
    alibi_slopes,
    attention,
    attention_partial,
    attention_stats,
    merge_attention,
    num_threads,
    self_attention,
    use_backend,
)
from attentile.core.constants import MIN_POWER

DTYPES = (np.float32, np.float64)
LN2 = np.log(2)
ROWS = [1, 3, 50]


@pytest.fixture(params=DTYPES, ids=["float32", "float64"])
def dtype(request) -> Any:
    return request.param


def smallest(dtype: Any) -> float:
    """Its power of 2, which is negative."""
    return MIN_POWER[np.dtype(dtype).itemsize]


def around(dtype: Any) -> Any:
    """12 powers of 2 on both sides of it, none so near that the rounding of a score decides; the first is 0."""
    shares = [0, 0.01, 0.5, 0.9, 0.999, 0.99999, 1.00001, 1.001, 1.1, 1.2, 1.26, 3]
    return smallest(dtype) * np.array(shares)


def of_scores(powers: Any, dtype: Any, rows: int) -> tuple[Any, Any]:
    """q and k of which each row has these scores, in powers of 2."""
    return np.ones((1, rows, 1), dtype), (powers * LN2).astype(dtype)[None, :, None]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("before", [0, 250, 300], ids=lambda n: f"after {n} keys")
def test_0_below_it_and_right_above_it(impl, dtype, rows, before):
    """In returned weights, in outputs whose column e has a value of 1 at key e, and in statistics."""
    powers = np.concatenate([np.full(before, 3.0 * smallest(dtype)), around(dtype)])
    q, k = of_scores(powers, dtype, rows)
    v = np.eye(len(powers), dtype=dtype)[None]
    out, _, weights = attention(q, k, v, scale=1, return_weights=True)
    exact = np.where(powers < smallest(dtype), 0, np.exp2(powers.astype(np.longdouble)))
    exact /= exact.sum()
    rounding = 4 * np.finfo(dtype).eps * abs(smallest(dtype))  # that of a score, in which a weight is exponential
    for found in (weights, attention_stats(q, k, v, scale=1, which="rows", rows=range(rows)).rows):
        assert_array_equal(found[0] == 0, np.broadcast_to(exact == 0, found[0].shape))
        assert_allclose(found[0], np.broadcast_to(exact, found[0].shape), rtol=rounding)
    for found in (out, attention(q, k, v, scale=1)):  # of few rows the few-row path
        assert_array_equal(found[0] == 0, np.broadcast_to(exact == 0, found[0].shape))
        assert_allclose(found[0], np.broadcast_to(exact, found[0].shape), rtol=rounding)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("share", [0.97, 1.03])
def test_a_key_far_below_another_chunk(impl, dtype, rows, share):
    """A weight is a product then: of one in its chunk and the chunk's. The final one is what counts."""
    powers = np.repeat([share, 0.5, 0], [100, 156, 1]) * smallest(dtype)
    q, k = of_scores(powers, dtype, rows)
    result = attention(q, k, np.ones((1, 257, 2), dtype), scale=1, return_weights=True)
    assert_array_equal(result.weights[0, 0] > 0, powers > smallest(dtype))
    assert_array_equal(result.out, 1)


def test_weights_still_sum_to_1(impl, dtype):
    q, k = np.random.default_rng(3).standard_normal((2, 2, 300, 16)).astype(dtype)
    q *= dtype(40 if dtype == np.float32 else 300)
    weights = attention(q, k, k, return_weights=True).weights
    assert (weights == 0).mean() > 0.1
    assert weights[weights > 0].min() >= 2.0 ** smallest(dtype) / 300
    assert_allclose(weights.sum(axis=-1), 1, rtol=300 * np.finfo(dtype).eps)
    found = attention_stats(q, k, k, which=("entropy", "top_k", "received"), top_k=300)
    assert_array_equal(found.top_weights > 0, found.top_keys >= 0)
    assert_array_equal((found.top_keys >= 0).sum(axis=-1), (weights > 0).sum(axis=-1))
    assert_allclose(found.received, weights.sum(axis=-2), rtol=1e-4)
    positive = np.where(weights > 0, weights, 1).astype(np.float64)
    assert_allclose(found.entropy, -(positive * np.log(positive)).sum(axis=-1), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_no_number_at_such_a_key_makes_nan(impl, dtype, rows, masked):
    """0 * NaN and 0 * Inf, as at a key that scores -inf; the same key counts in no row that may not see it."""
    powers = around(dtype)
    q, k = of_scores(powers, dtype, rows)
    options: dict[str, Any] = {"scale": 1}
    if masked:
        options["mask"] = np.arange(rows)[:, None] % 2 == np.array([0] * 12 + [1])
        options["mask"][:, 0] = True
        powers, k = np.append(powers, 0), np.concatenate([k, k[:, :1]], axis=1)
    for bad in (np.nan, np.inf, -np.inf):
        for j, power in enumerate(powers[1:12], 1):
            v = np.ones((1, len(powers), 1), dtype)
            v[:, j] = bad
            found = attention(q, k, v, **options)[0, :, 0]
            want = np.full(rows, bad if power > smallest(dtype) else np.nan)
            assert_array_equal(found, np.where(np.arange(rows) % 2 == 0, want, 1) if masked else want)


def test_the_textbook_functions(impl, dtype):
    q, k = of_scores(around(dtype), dtype, 5)
    weights = self_attention(q[0], k[0], k[0], 1)[1]
    assert_array_equal(weights > 0, np.broadcast_to(around(dtype) > smallest(dtype), weights.shape))


@two_fma_isas
@pytest.mark.parametrize("rows", ROWS)
def test_fma_instruction_sets_agree(dtype, rows):
    """At every float near the smallest power, in a chunk and as the factor of one."""
    near = np.full(400, smallest(dtype) * LN2, dtype)
    near.view(f"i{near.itemsize}")[:] += np.arange(400) - 200
    results = []
    for isa in FMA_HERE:
        with use_backend("compiled", isa):
            found = []
            for place in (0, 399):
                k = near[None, :, None].copy()
                k[:, place] = 0
                one = np.ones((1, rows, 1), dtype)
                found += attention(
                    one, k, np.eye(400, dtype=dtype)[None], scale=1, return_weights=True, return_lse=True
                )
                found.append(attention(one, k, np.eye(400, dtype=dtype)[None], scale=1))
            weights = found[2]
            assert (weights == 0).any()
            assert (weights[..., 1:] > 0).any()
            results.append(found)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            same_bits(a, b)


# ---- factors of a merge ----


def far_rows(dtype: Any, below: float) -> tuple[Partial, Partial]:
    """A row, and one of huge values whose maximum is lower by a power of 2."""
    one, huge = np.ones((1, 1), dtype), np.finfo(dtype).max / dtype(4)
    return Partial(0 * one, one, one[..., None]), Partial(one * dtype(below), one, one[..., None] * huge)


@pytest.mark.parametrize("order", [1, -1])
def test_rows_that_are_merged(dtype, order):
    for below, kept in ((smallest(dtype) + 1, True), (smallest(dtype) - 1, False)):
        merged = merge_attention(far_rows(dtype, below)[::order])
        assert (merged.o != 1).all() == kept
        assert merged.l == 1


def test_results_that_are_merged(dtype):
    huge = np.full((1, 1), np.finfo(dtype).max / 4, dtype)
    for below, kept in ((smallest(dtype) + 1, True), (smallest(dtype) - 1, False)):
        parts = [(np.ones_like(huge), np.zeros(1, dtype)), (huge, np.array([below * LN2], dtype))]
        assert (merge_attention(parts).out != 1).all() == kept


@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_go_on(impl, dtype, rows):
    """What they know of earlier keys is far below the key that comes, or that key far below it."""
    q, k = of_scores(np.array([0.0]), dtype, rows)
    for below, kept in ((smallest(dtype) + 1, True), (smallest(dtype) - 1, False)):
        first, second = (Partial(*(np.repeat(x, rows, axis=1) for x in part)) for part in far_rows(dtype, below))
        assert (attention(q, k, np.ones_like(k), before=second) != 1).all() == kept
        higher = first._replace(m=first.m - dtype(below))
        assert (attention(q, k, second.o[:, :1], before=higher) != 1).all() == kept


# ---- nothing on the way is subnormal ----


@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_normal_or_0(isa, dtype, rows):
    """The key with the maximum comes first and has no value: what o holds are the sums of growing weights after it."""
    least = 2.0 ** (np.finfo(dtype).minexp - smallest(dtype))  # its product with the smallest weight is normal
    powers = np.concatenate([[0], np.linspace(1.4 * smallest(dtype), 0.6 * smallest(dtype), 60)])
    q, k = of_scores(powers, dtype, rows)
    v = np.repeat(np.array([[[1, 300, least]]], dtype), 61, axis=1)
    v[:, 0] = 0
    seen = []
    for n in range(1, 62):
        part = attention_partial(q, k[:, :n], v[:, :n], scale=1)
        assert_array_equal(part.m, 0)
        assert (np.where(part.o == 0, 1, part.o) >= np.finfo(dtype).tiny).all()
        seen.append(part.o.max())
    assert 0 in seen
    assert seen[-1] > 0


UNDERFLOW = {"x86_64": 16, "AMD64": 16, "aarch64": 8, "arm64": 8}.get(platform.machine())


def flags_of_the_processor() -> tuple[Any, Any] | None:
    """The C functions that clear and ask for the processor's flags, if they tell of an underflow here."""
    name = ctypes.util.find_library("m")
    if name is None or UNDERFLOW is None:
        return None
    library = ctypes.CDLL(name)
    library.exp.restype, library.exp.argtypes = ctypes.c_double, [ctypes.c_double]
    library.feclearexcept(UNDERFLOW)
    before = library.fetestexcept(UNDERFLOW)
    library.exp(-740.0)
    works = before == 0 and library.fetestexcept(UNDERFLOW) == UNDERFLOW
    return (library.feclearexcept, library.fetestexcept) if works else None


FLAGS = flags_of_the_processor()


def peaked_calls(rows: int, dtype: Any) -> dict[str, Callable[[], Any]]:
    """Calls with weights of every size, from 1 to far below the smallest number, on values of ordinary size."""
    rng = np.random.default_rng(5)
    keys = 704  # whole panels: what is behind the last token of a cache is whatever was in memory
    scale = 4 if dtype == np.float32 else 40
    q, k, v = (rng.standard_normal((1, 4, n, 64)).astype(dtype) for n in (rows, keys, keys))
    slopes = alibi_slopes(4) * (2 if dtype == np.float32 else 16)
    causal: dict[str, Any] = {"causal": True, "q_start": keys - rows}
    cache = KVCache(1, 4, 64, dtype=dtype)
    cache.append(k, v)

    def in_parts() -> Any:
        before = attention_partial(q, k[:, :, :256], v[:, :, :256], scale=scale)
        before = attention_partial(q, k[:, :, 256:512], v[:, :, 256:512], scale=scale, before=before)
        return attention(q, k[:, :, 512:], v[:, :, 512:], scale=scale, before=before)

    return {
        "scale": lambda: attention(q, k, v, scale=scale),
        "scale, causal": lambda: attention(q, k, v, scale=scale, **causal),
        "alibi": lambda: attention(q, k, v, alibi_slopes=slopes, **causal),
        "bias": lambda: attention(q, k, v, bias=-scale * np.arange(keys, dtype=dtype)[::-1]),
        "softcap": lambda: attention(q, k, v, scale=scale, softcap=400.0),
        "lse": lambda: attention(q, k, v, scale=scale, return_lse=True),
        "weights": lambda: attention(q, k, v, scale=scale, return_weights=True),
        "sinks": lambda: attention(q, k, v, scale=scale, sinks=np.array([1.0, -5, -80, -700])),
        "in parts": in_parts,
        "cache": lambda: cache.attend(q, scale=scale),
        "cache, alibi": lambda: cache.attend(q, alibi_slopes=slopes),
        "statistics": lambda: attention_stats(
            q, k, v, scale=scale, which=("entropy", "max", "received", "top_k"), top_k=9
        ),
    }


@pytest.mark.skipif(FLAGS is None, reason="the C library does not tell of underflows")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", peaked_calls(1, np.float32))
def test_no_operation_underflows(isa, dtype, name, rows):
    """The processor notes each result that was too small for a normal number: here there is none, in the whole call."""
    assert FLAGS is not None
    clear, seen = FLAGS
    call = peaked_calls(rows, dtype)[name]
    with num_threads(1):  # the flags are the thread's own
        clear(UNDERFLOW)
        call()
        assert seen(UNDERFLOW) == 0
