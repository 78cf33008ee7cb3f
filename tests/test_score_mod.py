"""score_mod: a Python callable on tiles of scores, against the score changes it can imitate."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from attentile import attention


@pytest.fixture
def qkv():
    rng = np.random.default_rng(60)
    return tuple(rng.standard_normal((2, heads, n, 8)) for heads, n in ((4, 300), (2, 310), (2, 310)))


def test_imitates_the_built_in_changes(impl, qkv):
    slopes, bias = np.array([0.5, 0.25, 0.1, 0.0]), np.random.default_rng(61).standard_normal((2, 4, 300, 310))
    common = {"q_start": 10, "causal": True, "key_lengths": [310, 200]}
    for mod, built_in in (
        (lambda s, b, h, i, j: 2 * np.tanh(s / 2), {"softcap": 2.0}),
        (lambda s, b, h, i, j: s - slopes[h] * np.abs(10 + i - j), {"alibi_slopes": slopes}),
        (lambda s, b, h, i, j: s + bias[b, h, i, j], {"bias": bias}),
    ):
        got = attention(*qkv, score_mod=mod, return_lse=True, **common)
        want = attention(*qkv, return_lse=True, **built_in, **common)
        np.testing.assert_allclose(got.out, want.out, atol=1e-12)
        np.testing.assert_allclose(got.lse, want.lse, atol=1e-12)


def test_comes_after_the_other_changes_and_before_the_masks(impl, qkv):
    mask = np.random.default_rng(62).random((300, 310)) < 0.5
    got = attention(
        *qkv, bias=np.full(310, 3.0), softcap=1.0, mask=mask, score_mod=lambda s, *_: np.where(s > 3, s, 0.0)
    )
    scores = np.tanh(np.repeat(qkv[1], 2, 1) @ qkv[0].swapaxes(-1, -2) / np.sqrt(8)).swapaxes(-1, -2) + 3
    bias = np.where(scores > 3, scores, 0.0)
    want = attention(np.zeros_like(qkv[0]), *qkv[1:], bias=bias, mask=mask)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_batch_items_are_counted_through_all_axes(impl):
    x = np.random.default_rng(63).standard_normal((3, 2, 1, 4, 8)).swapaxes(0, 1)  # axes that do not fold
    seen = []
    out = np.zeros_like(x)
    got = attention(x, x, x, score_mod=lambda s, b, h, i, j: seen.append(b) or s, out=out)
    assert got is out
    assert sorted(seen) == list(range(6))
    np.testing.assert_allclose(out, attention(x, x, x), atol=1e-13)


@pytest.mark.parametrize(
    ("mod", "error", "words"),
    [
        (3, TypeError, "score_mod is 3; it must be a callable"),
        (lambda s, *_: s[:1], ValueError, "score_mod returned shape"),
        (lambda s, *_: s > 0, ValueError, "dtype bool"),
    ],
)
def test_errors(either, qkv, mod, error, words):
    with pytest.raises(error, match=words):
        attention(*qkv, score_mod=mod)


def test_a_score_of_minus_infinity_excludes_the_key(impl):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 8))
    later = np.where(np.arange(5) < np.arange(5)[:, None], 0, -np.inf)  # row 0 sees nothing
    v[:, :, 4] = np.nan  # the last key is seen by nobody

    def strictly_causal(scores, b, h, i, j):
        return np.where(j < i, scores, -np.inf)

    found = attention(q, k, v, score_mod=strictly_causal, return_lse=True, return_weights=True)
    wanted = attention(q, k, v, bias=later, return_lse=True, return_weights=True)
    for one, other in zip(found, wanted, strict=True):
        assert_allclose(one, other, rtol=1e-12)
    assert_array_equal(found.out[:, :, 0], 0)
    assert_array_equal(found.lse[:, :, 0], -np.inf)
