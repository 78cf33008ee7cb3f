"""Reports about what a query may see: masks, biases, causal order, key lengths, chunked prefill and decoding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_allclose, assert_array_equal
from report_helpers import Array, assert_same_row, check, qkv

from attentile import attention, causal_attention, self_attention

# ---- B21: rows without any key ----

TOP_LEFT = np.zeros((8, 8), bool)
TOP_LEFT[:4, :4] = True


@pytest.mark.parametrize(
    "options", [{"mask": TOP_LEFT}, {"bias": np.where(TOP_LEFT, 0, -np.inf)}], ids=["mask", "bias"]
)
def test_b21_rows_without_keys_are_zero(impl, options):
    q, k, v = (np.random.default_rng(x).random((1, 1, 8, 8), dtype=np.float32) for x in range(3))
    result = check(q, k, v, **options)
    assert_array_equal(result.out[..., 4:, :], 0)
    assert_array_equal(result.weights[..., 4:, :], 0)
    first = attention(q[..., :4, :], k[..., :4, :], v[..., :4, :])
    assert_same_row(impl, result.out[..., :4, :], first)


def test_b21_item_without_keys(impl):
    q, k, v = qkv((3, 2, 8, 8))
    result = check(q, k, v, key_lengths=[8, 0, 4])
    assert_array_equal(result.out[1], 0)
    assert_array_equal(result.weights[1], 0)


def test_b21_left_padding_and_causal(impl):
    q, k, v = qkv((2, 2, 8, 8))
    padding = np.array([3, 0])
    mask = np.arange(8) >= padding[:, None, None, None]
    result = check(q, k, v, mask=mask, causal=True)
    assert_array_equal(result.out[0, :, :3], 0)
    assert (result.weights[0, :, 3:].sum(axis=-1) > 0.999).all()


# ---- B23, B24, B37: what each dtype of a mask means ----


def test_b23_all_true_mask_is_no_mask(impl):
    q = k = v = normal(2, 4, 8, 16)
    plain = attention(q, k, v)
    mask = np.ones((8, 8), bool)
    assert_same_row(impl, attention(q, k, v, mask=mask), plain, atol=1e-6)
    assert_allclose(attention(q, k, v, bias=np.zeros((8, 8), np.float32)), plain, rtol=0, atol=1e-6)
    mask[5] = False
    out = attention(q, k, v, mask=mask)
    assert_array_equal(out[..., 5, :], 0)
    assert_same_row(impl, np.delete(out, 5, axis=-2), np.delete(plain, 5, axis=-2), atol=1e-6)


BIASES = {
    "ordinary numbers": 0.3 * np.random.default_rng(24).standard_normal((6, 6)),
    "zero or -inf": np.where(np.tri(6, dtype=bool), 0, -np.inf),
    "one row for all queries": np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0]),
}


@pytest.mark.parametrize("kind", BIASES)
def test_b24_bias_is_added(impl, kind):
    bias = BIASES[kind].astype(np.float32)
    weights = check(*qkv((2, 2, 6, 8)), bias=bias).weights
    assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-6)


def test_b24_bias_of_two_keys(impl):
    q, k, v = np.zeros((3, 1, 2, 4), np.float32)
    weights = check(q[None], k[None], v[None], bias=np.array([0.0, 1.0])).weights
    assert_allclose(weights[0, 0, 0], [1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "way_out"),
    [(np.int64, "mask != 0"), (np.uint8, "mask != 0"), (np.float32, "bias="), (np.float64, "bias=")],
)
def test_b37_numeric_mask_is_refused(either, dtype, way_out):
    q, k, v = qkv((1, 2, 5, 8))
    mask = np.tri(5, dtype=dtype)
    with pytest.raises(TypeError, match=f"mask has dtype {np.dtype(dtype)}.*{way_out}"):
        attention(q, k, v, mask=mask)
    assert_array_equal(attention(q, k, v, mask=mask != 0), attention(q, k, v, mask=np.tri(5, dtype=bool)))


def test_b37_float_zeros_and_ones_are_added(impl):
    check(*qkv((1, 2, 5, 8)), bias=np.tri(5, dtype=np.float32))


def test_b37_textbook_mask_of_any_dtype(impl):
    """As taught, mask == 0 is what masks, whatever the dtype."""
    q, k, v = normal(3, 5, 8)
    expected = self_attention(q, k, v, 8, np.tri(5, dtype=bool))
    for dtype in (np.int64, np.uint8, np.float32):
        for ours, want in zip(self_attention(q, k, v, 8, np.tri(5, dtype=dtype)), expected, strict=True):
            assert_array_equal(ours, want)


# ---- B25, B31: causal ----


def test_b25_causal_whatever_else_is_asked_for(impl):
    q, k, v = qkv((2, 3, 12, 8))
    plain = attention(q, k, v, causal=True)
    everyone = np.ones((12, 12), bool)
    check(q, k, v, causal=True)
    calls: list[dict[str, Any]] = [{"return_lse": x, "return_weights": y} for x in (True, False) for y in (True, False)]
    for extra in [*calls, *({**call, "mask": everyone} for call in calls)]:
        result = attention(q, k, v, causal=True, **extra)
        assert_same_row(impl, getattr(result, "out", result), plain, atol=1e-6)
        if extra["return_weights"]:
            assert_array_equal(result.weights[..., ~np.tri(12, dtype=bool)], 0)
            assert_allclose(result.weights.sum(axis=-1), 1, rtol=0, atol=1e-6)
    out, weights = causal_attention(q, k, v, 8)
    assert_allclose(out, plain, rtol=0, atol=1e-6)
    assert_array_equal(weights[..., ~np.tri(12, dtype=bool)], 0)


SEEN = {  # (alignment, L, S): number of keys that each row sees
    ("lower_right", 1, 16): [16],
    ("lower_right", 2, 4): [3, 4],
    ("lower_right", 3, 10): [8, 9, 10],
    ("upper_left", 1, 16): [1],
    ("upper_left", 2, 4): [1, 2],
    ("upper_left", 3, 10): [1, 2, 3],
}


@pytest.mark.parametrize(("alignment", "queries", "keys"), SEEN)
def test_b31_alignment_of_fewer_queries_than_keys(impl, alignment, queries, keys):
    q, k, v = qkv((1, 4, queries, 64), keys=keys)
    weights = check(q, k, v, causal=alignment).weights
    seen = np.arange(keys) < np.array(SEEN[alignment, queries, keys])[:, None]
    assert_array_equal(weights != 0, np.broadcast_to(seen, weights.shape))


def test_b31_alignment_must_be_named(either):
    q, k, v = qkv((1, 4, 2, 64), keys=16)
    with pytest.raises(ValueError, match=r"2 queries and 16 keys is ambiguous.*upper_left.*lower_right.*q_start"):
        attention(q, k, v, causal=True)


# ---- B27, B29, B30: windows ----


def test_b27_window_without_a_mask(impl):
    q, k, v = qkv((2, 3, 20, 8))
    results = []
    for window in ((0, 3), (2, 2), (5, 1)):
        result = check(q, k, v, window=window)
        behind = np.subtract.outer(np.arange(20), np.arange(20))
        seen = (-window[1] <= behind) & (behind <= window[0])
        assert_array_equal(result.weights != 0, np.broadcast_to(seen, result.weights.shape))
        masked = check(q, k, v, window=window, mask=np.ones((20, 20), bool))
        assert_array_equal(masked.out, result.out)
        results.append(result.out)
    for one, other in itertools.combinations(results, 2):
        assert np.abs(one - other).max() > 0.1


def uniform(length: int) -> tuple[Array, Array, Array]:
    """All scores are equal and each key's value is its own unit vector, so that the output is the weights."""
    eye = np.eye(length, dtype=np.float32)
    return np.zeros((1, length, 8), np.float32), normal(1, length, 8), eye[None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [1, 2, 5, 31, 32, 40])
def test_b29_window_of_so_many_tokens(impl, width, causal):
    """A window that counts the query's own token among its `width` ones is (width - 1, 0)."""
    q, k, v = uniform(32)
    result = attention(q, k, v, causal=causal, window=(width - 1, 0), return_weights=True)
    counts = np.minimum(np.arange(32) + 1, width)
    assert_array_equal((result.weights[0] != 0).sum(axis=-1), counts)
    behind = np.subtract.outer(np.arange(32), np.arange(32))
    expected = np.where((behind >= 0) & (behind < width), 1 / counts[:, None], 0)
    assert_allclose(result.out[0], expected, rtol=1e-6, atol=0)
    if width == 1:
        assert_array_equal(result.out, v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (4, 2), (0, 4)])
def test_b29_both_sides_are_inclusive(impl, left, right, causal):
    q, k, v = uniform(32)
    weights = check(q, k, v, causal=causal, window=(left, right)).weights[0]
    for i in range(32):
        seen = [j for j in range(32) if -right <= i - j <= left and (j <= i or not causal)]
        assert_array_equal(np.flatnonzero(weights[i]), seen)


@pytest.mark.parametrize("causal", [True, False])
def test_b30_no_window_and_windows_of_nothing(impl, causal):
    q, k, v = qkv((1, 2, 20, 8))
    plain = attention(q, k, v, causal=causal)
    assert_array_equal(attention(q, k, v, causal=causal, window=None), plain)
    assert_array_equal(attention(q, k, v, causal=causal, window=(None, None)), plain)
    assert_array_equal(attention(q, k, v, causal=causal, window=(None, 0)), attention(q, k, v, causal=True))
    assert_array_equal(attention(q, k, v, causal=causal, window=(0, 0)), v)
    assert_array_equal(attention(q, k, v, causal=causal, window=(np.int64(0), np.int64(0))), v)


@pytest.mark.parametrize("window", [0, -1, 5, np.int64(0)], ids=repr)
def test_b30_one_number_is_refused(either, window):
    with pytest.raises(TypeError, match=r"window is .*it must be a pair \(left, right\)"):
        attention(*qkv((1, 2, 5, 8)), causal=True, window=window)


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (-1, None)], ids=str)
def test_b30_negative_sides_are_refused(either, window):
    with pytest.raises(ValueError, match="no side may be negative"):
        attention(*qkv((1, 2, 5, 8)), causal=True, window=window)


# ---- B33: broadcasting ----

MASK_SHAPES = [
    (), (7,), (5, 7), (1, 7), (5, 1), (3, 1, 7), (3, 5, 7),
    (1, 1, 5, 7), (2, 1, 1, 7), (2, 1, 5, 1), (2, 3, 1, 7), (2, 3, 5, 7),
]  # fmt: skip


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_b33_masks_and_biases_broadcast(impl, shape, kv_heads):
    q, k, v = qkv((2, 3, 5, 8), kv_heads=kv_heads, keys=7)
    rng = np.random.default_rng(33)
    for name, given in (("mask", rng.random(shape) < 0.6), ("bias", rng.standard_normal(shape).astype(np.float32))):
        given = np.asarray(given)
        full = np.broadcast_to(given, (2, 3, 5, 7)).copy()
        result = check(q, k, v, **{name: full})
        assert_array_equal(attention(q, k, v, **{name: given}), result.out)


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 5, 7), (3, 3, 5, 7), (2, 3, 5, 8), (1, 2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), [("mask", bool), ("bias", np.float32)])
def test_b33_shapes_that_do_not_broadcast(either, shape, name, dtype):
    q, k, v = qkv((2, 3, 5, 8), keys=7)
    with pytest.raises(ValueError, match=rf"{name} has shape .*does not broadcast to \(2, 3, 5, 7\)"):
        attention(q, k, v, **{name: np.ones(shape, dtype)})


# ---- B36: key lengths ----

LENGTHS = [24, 125, 53, 28, 77, 96, 13, 114]


@pytest.mark.parametrize("kind", [list, np.int32, np.int64, np.uint8, np.uint64])
def test_b36_key_lengths_hold_per_item(impl, kind):
    q, k, v = (x.swapaxes(1, 2) for x in normal(3, 8, 128, 4, 16))
    for item, length in enumerate(LENGTHS):
        k[item, :, length:] = v[item, :, length:] = 1e4 * normal(4, 128 - length, 16, seed=item)
    lengths = LENGTHS if kind is list else np.array(LENGTHS, kind)
    out = attention(q, k, v, key_lengths=lengths)
    for item, length in enumerate(LENGTHS):
        alone = attention(q[item], k[item, :, :length], v[item, :, :length])
        assert_same_row(impl, out[item], alone, atol=1e-6)


# ---- B85, B86: chunks and single tokens behind a past ----


@pytest.mark.parametrize("parts", [(5, 7, 4), (1, 15), (15, 1), (1,) * 16], ids=str)
def test_b85_prefill_in_chunks(impl, parts):
    q, k, v = qkv((2, 4, 16, 8), kv_heads=2)
    whole = check(q, k, v, causal=True).out
    growing, fixed, start = [], [], 0
    for rows in parts:
        stop = start + rows
        part = q[..., start:stop, :]
        growing.append(attention(part, k[..., :stop, :], v[..., :stop, :], causal=True, q_start=start))
        # The same in a buffer of full capacity, of which `stop` slots are filled.
        fixed.append(attention(part, k, v, causal=True, q_start=[start, start], key_lengths=stop))
        start = stop
    for chunks in (growing, fixed):
        assert_same_row(impl, np.concatenate(chunks, axis=-2), whole)


@pytest.mark.parametrize("placed", ["alignment", "q_start"])
def test_b86_causal_stands_at_each_items_end(impl, placed):
    lengths = np.array([4, 7, 2])
    q, v = np.zeros((3, 1, 2, 8), np.float32), np.tile(np.eye(8, dtype=np.float32), (3, 1, 1, 1))
    options: dict[str, Any] = {"causal": "lower_right"}
    if placed == "q_start":
        options = {"causal": True, "q_start": lengths - 2}
    out = check(q, normal(3, 1, 8, 8), v, key_lengths=lengths, **options).out
    expected = np.zeros((3, 1, 2, 8))
    for item, length in enumerate(lengths):
        for row in range(2):
            seen = length - 1 + row
            expected[item, 0, row, :seen] = 1 / seen
    assert_allclose(out, expected, rtol=1e-6, atol=0)


def test_b86_slots_beyond_the_length_are_never_used(impl):
    q, k, v = qkv((3, 2, 2, 8), keys=8)
    clean = attention(q, k, v, causal="lower_right", key_lengths=[4, 7, 2])
    for item, length in enumerate((4, 7, 2)):
        k[item, :, length:] = v[item, :, length:] = np.nan
    poisoned: Array = attention(q, k, v, causal="lower_right", key_lengths=[4, 7, 2])
    assert_array_equal(poisoned, clean)


@pytest.mark.parametrize("start", [[2, 5, 0], [-1, 7, 100]], ids=str)
def test_b86_position_per_item(impl, start):
    """Without key lengths, which would give every item intervals of its own anyway."""
    q, k, v = qkv((3, 2, 2, 8), keys=8)
    out = check(q, k, v, causal=True, q_start=start).out
    for item, position in enumerate(start):
        assert_same_row(impl, out[item], attention(q[item], k[item], v[item], causal=True, q_start=position))


# ---- B96: what the gradients must agree with ----


@pytest.mark.parametrize("window", [None, (2, 0)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(3, 8), (8, 3)])
def test_b96_cross_attention_counts_from_the_last_key(impl, queries, keys, window):
    """The forward pass that the report's gradients were wrong for."""
    q, k, v = qkv((1, 2, queries, 4), keys=keys, dtype=np.float64)
    options: dict[str, Any] = {"causal": "lower_right", "window": window}
    weights = check(q, k, v, **options).weights[0, 0]
    for i in range(queries):
        at = keys - queries + i
        seen = range(max(at - 2, 0) if window else 0, at + 1)
        assert_array_equal(np.flatnonzero(weights[i]), [j for j in seen if 0 <= j < keys])


# ---- B83, B88: windows while decoding ----


@pytest.mark.parametrize("prefill", [6, 8, 9, 20])
def test_b83_last_tokens_are_the_window(impl, prefill):
    """Token t is tagged by the unit vector t; the newest of t tokens sees the last min(t, 8) tags, once each."""
    q, k, v = uniform(24)
    for tokens in range(prefill, prefill + 5):
        rows = slice(0, tokens) if tokens == prefill else slice(tokens - 1, tokens)
        options: dict[str, Any] = {"causal": True, "q_start": rows.start, "window": (7, 0)}
        out = attention(q[:, rows], k[:, :tokens], v[:, :tokens], **options)
        kept = min(tokens, 8)
        expected = np.zeros(24)
        expected[tokens - kept : tokens] = 1 / kept
        assert_allclose(out[0, -1], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cache", ["growing", "fixed"])
@pytest.mark.parametrize("placed", ["alignment", "q_start"])
def test_b88_window_in_prefill_and_decode(impl, placed, cache):
    q, k, v = qkv((2, 4, 12, 8), kv_heads=2)
    whole = check(q, k, v, causal=True, window=(4, 0))
    assert_array_equal((whole.weights != 0).sum(axis=-1)[0, 0], np.minimum(np.arange(12) + 1, 5))
    for t in range(12):
        options: dict[str, Any] = {"causal": "lower_right"} if placed == "alignment" else {"causal": True, "q_start": t}
        keys = slice(0, t + 1)
        if cache == "fixed":
            keys, options["key_lengths"] = slice(None), t + 1
        step = check(q[..., t : t + 1, :], k[..., keys, :], v[..., keys, :], window=(4, 0), **options)
        assert_same_row(impl, step.out, whole.out[..., t : t + 1, :])
        assert_array_equal((step.weights != 0).sum(axis=-1), min(t + 1, 5))
