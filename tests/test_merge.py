"""merge_attention(): parts over disjoint keys are attention over all of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import dtype_of, normal, same_bits
from numpy.testing import assert_allclose, assert_array_equal

from attentile import AttentionResult, attention, merge_attention


def part(*shape: int, dtype: Any = np.float32, seed: int = 0) -> tuple[Any, Any]:
    return normal(*shape, dtype=dtype, seed=2 * seed), normal(*shape[:-1], dtype=dtype, seed=2 * seed + 1)


def nothing(*shape: int, dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.zeros(shape, dtype), np.full(shape[:-1], -np.inf, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cuts", [(0, 700), (0, 300, 700), (0, 1, 2, 256, 257, 700), (0, 0, 700, 700)])
def test_parts_of_the_keys(impl, cuts, dtype):
    q, k, v = (normal(2, 3, n, 16, dtype=dtype, seed=n) for n in (5, 700, 700))
    bias = normal(3, 5, 700, dtype=dtype)
    bias[:, 2, :300] = -np.inf
    parts = [
        attention(q, k[:, :, a:b], v[:, :, a:b], bias=bias[..., a:b], return_lse=True)
        for a, b in itertools.pairwise(cuts)
    ]
    merged, whole = merge_attention(parts), attention(q, k, v, bias=bias, return_lse=True)
    assert isinstance(merged, AttentionResult)
    assert merged.weights is None
    for found, expected in ((merged.out, whole.out), (merged.lse, whole.lse)):
        assert found.dtype == dtype
        assert_allclose(found, expected, rtol=0, atol=8 * np.finfo(dtype).eps * 8)


def test_the_formula_in_exact_numbers():
    out, lse = merge_attention(
        [([[1.0, 2.0]], [np.log(3.0)]), ([[5.0, -2.0]], [np.log(1.0)]), ([[0.0, 8.0]], [np.log(4.0)])]
    )[:2]
    assert_allclose(out, [[8 / 8, 36 / 8]], rtol=1e-15)
    assert_allclose(lse, [np.log(8)], rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_identity_changes_no_bit(place, dtype):
    out, lse = part(2, 6, 4, dtype=dtype)
    out[0, 0], out[0, 1], lse[0, 2] = -0.0, [np.inf, -np.inf, -0.0, 0.0], -0.0
    lse[0, 3], lse[0, 4] = np.finfo(dtype).max, -np.finfo(dtype).max
    parts = [nothing(2, 6, 4, dtype=dtype), nothing(2, 6, 4, dtype=dtype)]
    parts.insert(place, (out, lse))
    merged = merge_attention(parts)
    same_bits(merged.out, out)
    same_bits(merged.lse, lse)


def test_nothing_with_nothing_is_nothing():
    empty = nothing(3, 4, 5)
    for parts in ([empty], [empty, empty], [empty] * 5):
        merged = merge_attention(parts)
        same_bits(merged.out, empty[0])
        same_bits(merged.lse, empty[1])


def test_what_a_part_without_keys_holds_is_not_used():
    out, lse = part(3, 4)
    poisoned = np.full((3, 4), np.nan), np.full(3, -np.inf)
    for parts in ([(out, lse), poisoned], [poisoned, (out, lse), poisoned]):
        assert_array_equal(merge_attention(parts).out, out)
        assert_array_equal(merge_attention(parts).lse, lse)
    assert_array_equal(merge_attention([poisoned, poisoned]).out, np.zeros((3, 4)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nan_shows_in_its_rows_only(order):
    (out, lse), other = part(4, 3), part(4, 3, seed=1)
    clean = merge_attention([(out, lse), other])
    out[1, 2], lse[2] = np.nan, np.nan
    lse[1] = -1e30  # even at a weight of 0
    merged = merge_attention([[(out, lse), other][i] for i in order])
    assert_array_equal(np.isnan(merged.out), [[False] * 3, [False, False, True], [True] * 3, [False] * 3])
    assert_array_equal(np.isnan(merged.lse), [False, False, True, False])
    assert_allclose(merged.out[[0, 3]], clean.out[[0, 3]], rtol=1e-6)


def test_far_apart_and_huge():
    high, low = part(4, 3), part(4, 3, seed=1)
    merged = merge_attention([(high[0], high[1] + 1000), (low[0], low[1] - 1000)])
    same_bits(merged.out, high[0])
    same_bits(merged.lse, high[1] + 1000)
    largest = np.full((2, 3), np.finfo(np.float32).max, np.float32)
    merged = merge_attention([(largest, np.zeros(2, np.float32))] * 3)
    assert_allclose(merged.out, largest, rtol=3e-7)  # the mean of equal values is no sum of them


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_associative_and_commutative_within_rounding(dtype):
    parts = [part(20, 6, dtype=dtype, seed=seed) for seed in range(5)]
    parts[2][1][:7] = -np.inf
    whole = merge_attention(parts)
    for other in (
        merge_attention([merge_attention(parts[:2]), merge_attention(parts[2:])]),
        merge_attention([parts[0], merge_attention([parts[1], merge_attention(parts[2:])])]),
        merge_attention(parts[::-1]),
    ):
        assert_allclose(other.out, whole.out, rtol=0, atol=16 * np.finfo(dtype).eps)
        assert_allclose(other.lse, whole.lse, rtol=0, atol=16 * np.finfo(dtype).eps)


def test_one_part_comes_back_as_a_copy():
    out, lse = part(2, 3, 4)
    merged = merge_attention([(out, lse)])
    same_bits(merged.out, out)
    same_bits(merged.lse, lse)
    assert not np.may_share_memory(merged.out, out)
    assert not np.may_share_memory(merged.lse, lse)


def test_inputs_are_not_modified_and_may_be_read_only_views():
    (a, la), (b, lb) = part(6, 8), part(6, 8, seed=1)
    for array in (a, la, b, lb):
        array.flags.writeable = False
    before = [array.copy() for array in (a, la, b, lb)]
    merged = merge_attention([(a[::-2, ::2], la[::-2]), (b[::-2, ::2], lb[::-2])])
    assert_array_equal(merged.out, merge_attention([(a, la), (b, lb)]).out[::-2, ::2])
    for array, old in zip((a, la, b, lb), before, strict=True):
        assert_array_equal(array, old)


def test_dtypes_are_promoted():
    single, double = part(2, 3), part(2, 3, dtype=np.float64)
    merged = merge_attention([single, double])
    assert (merged.out.dtype, merged.lse.dtype) == (np.float64, np.float64)
    half = part(200, 3, dtype=np.float16)[0], part(200, 3)[1]
    merged = merge_attention([half, (half[0][::-1], half[1][::-1])])
    assert (merged.out.dtype, merged.lse.dtype) == (np.float16, np.float32)
    exact = merge_attention([(half[0].astype(float), half[1]), (half[0][::-1].astype(float), half[1][::-1])])
    assert_allclose(merged.out, exact.out, rtol=5.1e-4, atol=1e-7)  # rounded once
    bfloat16 = dtype_of("bfloat16")
    assert merge_attention([(half[0].astype(bfloat16), half[1])] * 2).out.dtype == bfloat16


def test_empty_axes():
    for shape in ((0, 4), (3, 0), (2, 0, 3, 4)):
        merged = merge_attention([nothing(*shape), nothing(*shape)])
        assert (merged.out.shape, merged.lse.shape) == (shape, shape[:-1])


def test_a_sink_is_applied_once_at_the_end(impl):
    q, k, v, sinks = normal(2, 4, 8), normal(2, 60, 8, seed=1), normal(2, 60, 8, seed=2), np.array([0.5, 3.0])
    parts = [attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 20), (20, 60))]
    merged = merge_attention(parts)
    share = 1 / (1 + np.exp(sinks[:, None] - merged.lse))
    expected = attention(q, k, v, sinks=sinks, return_lse=True)
    assert_allclose(merged.out * share[..., None], expected.out, rtol=0, atol=1e-6)
    assert_allclose(merged.lse, expected.lse, rtol=1e-6)


OUT, LSE = np.zeros((2, 3, 4)), np.zeros((2, 3))
ERRORS = [
    ([], ValueError, "parts is empty; give at least one"),
    (AttentionResult(OUT, LSE, None), TypeError, "parts is a AttentionResult; it must be a list"),
    (OUT, TypeError, "parts is a ndarray"),
    (3, TypeError, "parts is a int"),
    ([OUT], TypeError, "part 0 is a ndarray; it must be a pair"),
    ([(OUT, LSE), (OUT, LSE, LSE)], TypeError, "part 1 is a tuple; it must be a pair"),
    ([(OUT, LSE), (OUT,)], TypeError, "part 1 is a tuple"),
    ([AttentionResult(OUT, None, LSE)], TypeError, "part 0 has no lse; call attention with return_lse=True"),
    ([(OUT, LSE), (OUT[:1], LSE[:1])], ValueError, r"part 1 has out \(1, 3, 4\) and part 0 has \(2, 3, 4\)"),
    ([(OUT, LSE), (OUT, LSE[:1])], ValueError, r"part 1 has out \(2, 3, 4\) and lse \(1, 3\); they must be"),
    ([(OUT, LSE[..., None])], ValueError, "lse .2, 3, 1."),
    ([(OUT[0, 0], LSE[0, 0])], ValueError, r"out \(4,\)"),
    ([(OUT.astype(complex), LSE)], TypeError, "merge_attention: .*complex128; supported are"),
    ([(OUT, LSE), (OUT, LSE.astype(object))], TypeError, "merge_attention: .*object"),
]


@pytest.mark.parametrize(("parts", "error", "match"), ERRORS)
def test_errors(parts, error, match):
    with pytest.raises(error, match=match) as caught:
        merge_attention(parts)
    assert str(caught.value).startswith("merge_attention: ")


def test_a_generator_of_parts():
    parts = [part(3, 4, seed=seed) for seed in range(3)]
    same_bits(merge_attention(p for p in parts).out, merge_attention(parts).out)
