"""The textbook functions against the formulas as they are taught, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attentile import attention, causal_attention, multi_head_attention, self_attention


def formula(Q, K, V, d_k, mask=None):
    """softmax(Q K^T / sqrt(d_k)) V with score -1e9 where mask == 0."""
    scores = np.asarray(Q, float) @ np.swapaxes(np.asarray(K, float), -1, -2) / np.sqrt(d_k)
    if mask is not None:
        scores = np.where(np.asarray(mask) == 0, -1e9, scores)
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = exponents / exponents.sum(axis=-1, keepdims=True)
    return weights @ np.asarray(V, float), weights


def heads_formula(x, num_heads, W_q, W_k, W_v, W_o, mask=None):
    d_k = W_q.shape[1] // num_heads
    parts = []
    for h in range(num_heads):
        columns = slice(h * d_k, (h + 1) * d_k)
        parts.append(formula(x @ W_q[:, columns], x @ W_k[:, columns], x @ W_v[:, columns], d_k, mask)[0])
    return np.concatenate(parts, axis=-1) @ W_o


def relative(got, want) -> float:
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-300))


def random_mask(rng, queries, keys):
    """A mask of one of the kinds people write, or none."""
    lower = np.tri(queries, keys)
    kinds = [
        None, lower, lower.astype(bool), lower.astype(np.int64), np.triu(np.ones((queries, keys), np.uint8)),
        rng.random((queries, keys)) < 0.5, rng.integers(0, 2, (queries, keys)), rng.integers(-1, 2, (queries, keys)),
        np.zeros((queries, keys)), np.zeros((queries, 1)), rng.random(keys) < 0.5, rng.integers(0, 2, (queries, 1)),
        0, 1.5,
        np.where(rng.random((queries, keys)) < 0.5, np.nan, 0.0),
    ]  # fmt: skip
    return kinds[rng.integers(len(kinds))]


def test_a_thousand_random_cases(impl):
    """Acceptance: within 1e-13 relative of the formula, masks of every kind, fully masked rows included."""
    rng = np.random.default_rng(30)
    worst = 0.0
    for _ in range(1000):
        queries, keys, d, d_v = (int(n) for n in rng.integers(1, 70, 4))
        Q, K, V = rng.standard_normal((queries, d)), rng.standard_normal((keys, d)), rng.standard_normal((keys, d_v))
        d_k, mask = rng.choice([d, 1, 64, 7.5]), random_mask(rng, queries, keys)
        got, want = self_attention(Q, K, V, d_k, mask), formula(Q, K, V, d_k, mask)
        worst = max(worst, relative(got[0], want[0]), relative(got[1], want[1]))
    assert worst <= 1e-13


def test_causal(impl):
    rng = np.random.default_rng(31)
    for n in (1, 2, 5, 50, 300):
        Q, K, V = rng.standard_normal((3, n, 16))
        got, want = causal_attention(Q, K, V, 16), formula(Q, K, V, 16, np.tri(n))
        assert relative(got[0], want[0]) <= 1e-13
        assert relative(got[1], want[1]) <= 1e-13
        assert (np.triu(got[1], 1) == 0).all()
    with pytest.raises(ValueError, match="same number of rows"):
        causal_attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 3)), 3)


@pytest.mark.parametrize(("d_model", "num_heads"), [(8, 2), (12, 3), (64, 8), (15, 3), (5, 5), (7, 1)])
def test_multi_head(impl, d_model, num_heads):
    rng = np.random.default_rng(32)
    x, (W_q, W_k, W_v, W_o) = (
        rng.standard_normal((9, d_model)),
        rng.standard_normal((4, d_model, d_model)) / np.sqrt(d_model),
    )
    for mask in (None, np.tri(9), np.zeros((9, 9)), rng.integers(0, 2, 9)):
        got = multi_head_attention(x, d_model, num_heads, W_q, W_k, W_v, W_o, mask)
        assert relative(got, heads_formula(x, num_heads, W_q, W_k, W_v, W_o, mask)) <= 1e-13


def test_multi_head_batch_and_biases(impl):
    rng = np.random.default_rng(33)
    x, W = rng.standard_normal((2, 3, 9, 8)), rng.standard_normal((4, 8, 8)) / 3
    b = rng.standard_normal((4, 8))
    mask = rng.integers(0, 2, (2, 3, 9, 9))
    got = multi_head_attention(x, 8, 2, *W, mask, b_q=b[0], b_k=b[1], b_v=b[2], b_o=b[3])
    for at in np.ndindex(2, 3):
        q, k, v = (x[at] @ W[n] + b[n] for n in range(3))
        parts = [formula(q[:, c], k[:, c], v[:, c], 4, mask[at])[0] for c in (slice(0, 4), slice(4, 8))]
        assert relative(got[at], np.concatenate(parts, -1) @ W[3] + b[3]) <= 1e-13


def test_fully_masked_row_averages(impl):
    V = np.array([[1.0, 2.0], [3.0, 4.0], [8.0, 0.0]])
    output, weights = self_attention(np.ones((2, 4)), np.ones((3, 4)), V, 4, mask=[[0, 0, 0], [1, 0, 0]])
    np.testing.assert_allclose(output, [[4, 2], [1, 2]], rtol=1e-15)
    np.testing.assert_allclose(weights, [[1 / 3] * 3, [1, 0, 0]], rtol=1e-15)


def test_masked_score_is_a_score(impl):
    """-1e9 replaces the score; where every score lies below it, masked keys win, as in the formula."""
    Q, K, V = np.array([[-1e10]]), np.array([[1.0], [2.0]]), np.array([[3.0], [5.0]])
    np.testing.assert_array_equal(self_attention(Q, K, V, 1, mask=[[1, 0]])[0], [[5.0]])
    np.testing.assert_array_equal(self_attention(Q, K, V, 1, mask=[[0, 1]])[0], [[3.0]])


def test_d_k_is_taken_as_given(impl):
    rng = np.random.default_rng(34)
    Q, K, V = rng.standard_normal((3, 6, 8))
    for d_k in (8, 2, 100, np.int64(5), np.float32(3.0)):
        assert relative(self_attention(Q, K, V, d_k)[0], formula(Q, K, V, float(d_k))[0]) <= 1e-13


@pytest.mark.parametrize(
    ("dtype", "want"), [("f8", "f8"), ("f4", "f4"), ("f2", "f2"), ("i4", "f8"), ("?", "f8"), ("u1", "f8")]
)
def test_dtypes(either, dtype, want):
    rng = np.random.default_rng(35)
    Q, K, V = (rng.integers(0, 2, (6, 4)).astype(dtype) for _ in range(3))
    output, weights = self_attention(Q, K, V, 4)
    assert output.dtype == weights.dtype == want
    atol = {"f8": 1e-13, "f4": 1e-6, "f2": 1e-3}[want]
    np.testing.assert_allclose(output, formula(Q, K, V, 4)[0], atol=atol)
    x = rng.integers(0, 2, (6, 4)).astype(dtype)
    assert multi_head_attention(x, 4, 2, *[np.eye(4, dtype=dtype)] * 4).dtype == want


def test_lists_and_positional_use(impl):
    output, weights = self_attention([[1, 0], [0, 1]], [[1, 0], [0, 1]], [[1, 2], [3, 4]], 2, [[1, 1], [1, 1]])
    want = formula([[1, 0], [0, 1]], [[1, 0], [0, 1]], [[1, 2], [3, 4]], 2)
    np.testing.assert_allclose(output, want[0], rtol=1e-14)
    np.testing.assert_allclose(weights, want[1], rtol=1e-14)


def test_batch_axes(impl):
    rng = np.random.default_rng(36)
    Q, K, V = rng.standard_normal((2, 1, 5, 8)), rng.standard_normal((3, 7, 8)), rng.standard_normal((2, 3, 7, 4))
    mask = rng.integers(0, 2, (3, 5, 7))
    output, weights = self_attention(Q, K, V, 8, mask)
    want = formula(Q, K, V, 8, mask)
    assert output.shape == (2, 3, 5, 4)
    assert weights.shape == (2, 3, 5, 7)
    assert relative(output, want[0]) <= 1e-13
    assert relative(weights, want[1]) <= 1e-13
    assert self_attention(Q[0], K[0], V, 8)[1].shape == (2, 3, 5, 7)  # where only V has an axis, too


def test_products_of_a_layer_have_the_bits_of_matmul(impl):
    """Whatever quicker call NumPy has for them: of one row, some rows and a batch, weights in either order."""
    rng = np.random.default_rng(38)
    for rows, width in itertools.product((1, 2, 5, 16, 65), (1, 3, 64)):
        x, W, b = rng.standard_normal((rows, width)), rng.standard_normal((4, width, width)), rng.standard_normal(width)
        for weights in (list(W), [np.asfortranarray(w) for w in W]):
            q, k, v = ((x @ w)[None] for w in weights[:3])
            heads = self_attention(q, k, v, width)[0][0]
            got = multi_head_attention(x, width, 1, *weights, b_o=b)
            np.testing.assert_array_equal(got, heads @ weights[3] + b)
            np.testing.assert_array_equal(multi_head_attention(x[None], width, 1, *weights, b_o=b)[0], got)


def test_empty(impl):
    assert self_attention(np.ones((0, 3)), np.ones((4, 3)), np.ones((4, 2)), 3)[0].shape == (0, 2)
    output, weights = self_attention(np.ones((2, 3)), np.ones((0, 3)), np.ones((0, 2)), 3)
    assert output.tolist() == [[0, 0], [0, 0]]
    assert weights.shape == (2, 0)
    output, weights = self_attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 0)), 3)
    assert output.shape == (2, 0)
    assert weights.tolist() == [[0.25] * 4] * 2


def test_nan_shows_where_the_formula_shows_it(impl):
    """0 * NaN is NaN in the formula, so a NaN value shows in every row even where it is masked."""
    V = np.ones((3, 2))
    V[2, 0] = np.nan
    got = self_attention(np.ones((2, 4)), np.ones((3, 4)), V, 4, mask=[[1, 1, 0], [1, 1, 1]])[0]
    assert np.isnan(got[:, 0]).all()
    np.testing.assert_allclose(got[:, 1], 1)


def test_agrees_with_attention(impl):
    """With at least one key per row the -1e9 rule and exclusion give the same bits."""
    rng = np.random.default_rng(37)
    Q, K, V = rng.standard_normal((3, 40, 16))
    mask = rng.random((40, 40)) < 0.5
    mask[:, 0] = True
    got, want = self_attention(Q, K, V, 16, mask), attention(Q, K, V, mask=mask, return_weights=True)
    np.testing.assert_allclose(got[0], want.out, rtol=0, atol=1e-15)
    np.testing.assert_allclose(got[1], want.weights, rtol=0, atol=1e-15)


ONES = np.ones((2, 4))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: self_attention(ONES, np.ones((3, 5)), np.ones((3, 2)), 4), ValueError, r"same width.*\(3, 5\)"),
        (lambda: self_attention(ONES, ONES, np.ones((3, 2)), 4), ValueError, "same number of rows"),
        (lambda: self_attention(np.ones(4), ONES, ONES, 4), ValueError, "at least two axes"),
        (lambda: self_attention(ONES, ONES, ONES, 0), ValueError, "d_k is 0"),
        (lambda: self_attention(ONES, ONES, ONES, "4x"), TypeError, "d_k is '4x'"),
        (lambda: self_attention(ONES, ONES, ONES, 4, np.ones((3, 3))), ValueError, r"mask has shape \(3, 3\)"),
        (lambda: self_attention(ONES, ONES, ONES, 4, [["a", "b"]]), TypeError, "mask has dtype"),
        (lambda: self_attention(ONES.astype(complex), ONES, ONES, 4), TypeError, "complex128"),
        (lambda: multi_head_attention(ONES, 4, 3, *[np.eye(4)] * 4), ValueError, "d_model is 4 and num_heads is 3"),
        (lambda: multi_head_attention(ONES, 5, 1, *[np.eye(5)] * 4), ValueError, "x has shape"),
        (lambda: multi_head_attention(ONES, 4, 2, np.eye(3), *[np.eye(4)] * 3), ValueError, r"W_q has shape \(3, 3\)"),
        (lambda: multi_head_attention(ONES, 4, 2, *[np.eye(4)] * 4, b_o=np.ones(3)), ValueError, "b_o has shape"),
        (lambda: multi_head_attention(ONES, 4.0, 2, *[np.eye(4)] * 4), TypeError, "d_model is 4.0"),
        (lambda: multi_head_attention(ONES, 4, 0, *[np.eye(4)] * 4), ValueError, "num_heads is 0"),
    ],
)
def test_errors(either, call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_layer_of_no_rows_and_of_many(impl):
    """No row gives none; more rows than NumPy takes at a time give those of shorter calls."""
    weights = np.random.default_rng(0).standard_normal((4, 4, 4))
    assert multi_head_attention(np.zeros((0, 4)), 4, 2, *weights).shape == (0, 4)
    assert multi_head_attention(np.zeros((2, 0, 4)), 4, 2, *weights).shape == (2, 0, 4)
    x = np.random.default_rng(1).standard_normal((800, 4))
    heads = [(x @ w).reshape(800, 2, 2).swapaxes(0, 1) for w in weights[:3]]
    scores = heads[0] @ heads[1].swapaxes(1, 2) / np.sqrt(2)
    scores = np.where(np.tri(800) == 0, -1e9, scores)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = (p / p.sum(axis=-1, keepdims=True) @ heads[2]).swapaxes(0, 1).reshape(800, 4) @ weights[3]
    np.testing.assert_allclose(multi_head_attention(x, 4, 2, *weights, np.tri(800)), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("d_k", ["eight", None, [1, 2]], ids=repr)
def test_d_k_that_is_no_number(d_k):
    with pytest.raises(TypeError, match=r"^self_attention: d_k is .*; it must be a positive number$"):
        self_attention(*np.ones((3, 3, 8)), d_k)


@pytest.mark.parametrize("wrong", ["2", True, np.True_])
def test_the_width_of_the_textbook_is_a_number(wrong):
    with pytest.raises(TypeError, match=r"^self_attention: d_k is .*; it must be a positive number"):
        self_attention(*np.ones((3, 4, 4)), wrong)


def test_the_message_about_a_mask_of_the_textbook_tells_what_was_given():
    w = np.eye(4)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1, 3, 3\), which does not broadcast to \(2, 3, 3\)"):
        multi_head_attention(np.ones((2, 3, 4)), 4, 2, w, w, w, w, mask=np.ones((2, 1, 3, 3), bool))
