"""Structural masks: the same bits as the pattern given as a dense mask, without ever building one."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
from helpers import most_allocated
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from oracle import allowed_keys

from attentile import attention, segment_ids
from attentile.runtime import backend

Array = NDArray[Any]
Options = dict[str, Any]

BATCH, Q_HEADS, HEADS, WIDTH = 2, 4, 2, 8
SQUARE, WIDE, TALL = (70, 70), (33, 300), (90, 31)  # (L, S); 300 keys are more than one chunk, 31 less than a word
SHAPES = {"square": SQUARE, "wide": WIDE, "tall": TALL}


@functools.cache
def inputs(queries: int, keys: int, dtype: Any) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(queries + keys)
    shapes = ((BATCH, Q_HEADS, queries, WIDTH), (BATCH, HEADS, keys, WIDTH), (BATCH, HEADS, keys, WIDTH + 1))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


@functools.cache
def _pattern(pickled: bytes) -> Array:
    shape, options = pickle.loads(pickled)
    return allowed_keys((BATCH, Q_HEADS, *shape), **options)


def pattern(shape: tuple[int, int], **options: Any) -> Array:
    """allowed_keys of the options, which is slow, once for all implementations."""
    return _pattern(pickle.dumps((shape, options)))


def drawn(rows: str) -> Array:
    """A boolean matrix from rows of 0 and 1 with blanks between them."""
    return np.array([[digit == "1" for digit in row] for row in rows.split()])


def poisoned(k: Array, v: Array, allowed: Array) -> tuple[Array, Array]:
    """k and v with NaN and Inf in every key that no query of its heads sees."""
    group = allowed.shape[1] // k.shape[1]
    seen = allowed.reshape(len(allowed), k.shape[1], group, *allowed.shape[2:]).any(axis=(2, 3))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[~seen], bad_v[~seen] = np.nan, np.inf
    bad_k[~seen, ::2], bad_v[~seen, ::2] = -np.inf, np.nan
    return bad_k, bad_v


def same_but_for_order(got: Array, want: Array) -> None:
    """The same bits; from the twin, which leaves out keys where structure says that no row sees them, to rounding."""
    if backend.active is not None:
        assert_array_equal(got, want)
    assert_array_equal(got == 0, want == 0)
    assert_allclose(got, want, rtol=0, atol=32 * np.finfo(got.dtype).eps)


def same_as_dense(shape: tuple[int, int], structural: Options, **others: Any) -> Array:
    """Checks the structural options against their pattern as a mask, with and without poison; returns the pattern.

    others: options that both calls get (bias, softcap, sinks; a mask that narrows both).
    """
    allowed = pattern(shape, **structural, mask=others.get("mask"))
    for dtype in (np.float32, np.float64):
        q, k, v = inputs(*shape, dtype)
        dense = attention(q, k, v, return_lse=True, return_weights=True, **{**others, "mask": allowed})
        for keys, values in ((k, v), poisoned(k, v, allowed)):
            sparse = attention(q, keys, values, return_lse=True, return_weights=True, **structural, **others)
            for got, want in zip(sparse, dense, strict=True):
                same_but_for_order(got, want)
            assert_array_equal(attention(q, keys, values, **structural, **others), sparse.out)
        assert_array_equal(dense.weights != 0, allowed)  # the scores are too small for a weight to vanish
        assert_array_equal(dense.out[~allowed.any(axis=-1)], 0)
    return allowed


# ---- the patterns as the documentation draws them ----

DRAWN: dict[str, tuple[Options, str]] = {
    "window": ({"window": (1, 1)}, "11000 11100 01110 00111 00011"),
    "window, left only": ({"window": (1, None)}, "11111 11111 01111 00111 00011"),
    "window, right only": ({"window": (None, 1)}, "11000 11100 11110 11111 11111"),
    "window and causal": ({"window": (1, None), "causal": True}, "10000 11000 01100 00110 00011"),
    "window, upper left": ({"window": (1, 0), "causal": "upper_left"}, "10000 11000 01100"),
    "window, lower right": ({"window": (1, 0), "causal": "lower_right"}, "01100 00110 00011"),
    "window, lower right of 4": (
        {"window": (1, 0), "causal": "lower_right", "key_lengths": 4},
        "11000 01100 00110",
    ),
    "window at a place": ({"window": (1, 1), "q_start": 2}, "01110 00111 00011"),
    "window before and behind the keys": ({"window": (1, 0), "q_start": -1}, "00000 10000 11000"),
    "prefix": ({"prefix_lengths": 3, "causal": True}, "11100 11100 11100 11110 11111"),
    "prefix, lower right": ({"prefix_lengths": 4, "causal": "lower_right"}, "11110 11110 11111"),
    "prefix and window": ({"prefix_lengths": 2, "causal": True, "window": (1, None)}, "11000 11000 01100 00110 00011"),
    "segments": ({"segments": [7, 7, 3, 3, 3]}, "11000 11000 00111 00111 00111"),
    "segments and causal": ({"segments": [7, 7, 3, 3, 3], "causal": True}, "10000 11000 00100 00110 00111"),
    "scattered segments": ({"segments": [0, 1, 0, 1, 1]}, "10100 01011 10100 01011 01011"),
    "segments of queries and keys": ({"segments": ([1, 0, 5], [0, 0, 1, 1, 2])}, "00110 11000 00000"),
    "lengths": ({"key_lengths": 2}, "11000 11000 11000"),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_patterns(impl, name):
    options, rows = DRAWN[name]
    expected = drawn(rows)
    queries, keys = expected.shape
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((queries, 4)), rng.standard_normal((keys, 4)), rng.standard_normal((keys, 4))
    weights = attention(q, k, v, return_weights=True, **options).weights
    assert_array_equal(weights != 0, expected)
    assert_array_equal(allowed_keys((1, queries, keys), **options)[0], expected)  # the oracle draws the same


# ---- windows ----

WINDOWS = [(0, 0), (3, 0), (0, 5), (64, 2), (None, 0), (None, 4), (7, None), (2**62, 2**70)]
PLACES: dict[str, tuple[str, Options]] = {
    "square": ("square", {}),
    "square causal": ("square", {"causal": True}),
    "square lower right": ("square", {"causal": "lower_right", "key_lengths": [70, 41]}),
    "wide upper left": ("wide", {"causal": "upper_left"}),
    "wide lower right": ("wide", {"causal": "lower_right"}),
    "wide lower right of lengths": ("wide", {"causal": "lower_right", "key_lengths": [290, 12]}),
    "wide causal at places": ("wide", {"causal": True, "q_start": [245, -5]}),
    "wide at places": ("wide", {"q_start": np.array([250, 290])}),
    "wide at one place": ("wide", {"q_start": 17}),
    "tall upper left": ("tall", {"causal": "upper_left"}),
    "tall lower right": ("tall", {"causal": "lower_right"}),
    "tall at places": ("tall", {"q_start": [-45, 20]}),
}  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_window(impl, place, window):
    shape, options = PLACES[place]
    same_as_dense(SHAPES[shape], {**options, "window": window})


@pytest.mark.parametrize("causal", [{}, {"causal": True}], ids=["", "causal"])
def test_window_without_sides_is_none(impl, causal):
    q, k, v = inputs(*SQUARE, np.float32)
    assert_array_equal(attention(q, k, v, window=(None, None), **causal), attention(q, k, v, **causal))
    wide = inputs(*WIDE, np.float32)  # no position is needed, so none is ambiguous
    assert_array_equal(attention(*wide, window=(None, None)), attention(*wide))


@pytest.mark.parametrize("shape", [WIDE, TALL], ids=str)
@pytest.mark.parametrize("window", [(3, 0), (None, 0), (0, None)], ids=str)
def test_window_needs_a_position(either, shape, window):
    words = rf"window= .* with {shape[0]} queries and {shape[1]} keys is ambiguous.*upper_left.*lower_right.*q_start"
    with pytest.raises(ValueError, match=words):
        attention(*inputs(*shape, np.float32), window=window)


# ---- prefixes and key lengths ----


@pytest.mark.parametrize("prefix", [0, 1, 20, [31, 5]], ids=str)
@pytest.mark.parametrize("place", [name for name, (_, options) in PLACES.items() if "causal" in options])
def test_prefix_lengths(impl, place, prefix):
    shape, options = PLACES[place]
    same_as_dense(SHAPES[shape], {**options, "prefix_lengths": prefix})


def test_prefix_of_all_keys_is_no_mask(impl):
    q, k, v = inputs(*WIDE, np.float32)
    for prefix in (300, 10**6):
        assert_array_equal(attention(q, k, v, causal="lower_right", prefix_lengths=prefix), attention(q, k, v))


@pytest.mark.parametrize("lengths", [0, 1, 64, 256, 257, 300, [0, 300], [31, 259]], ids=str)
def test_key_lengths(impl, lengths):
    same_as_dense(WIDE, {"key_lengths": lengths})


# ---- segments ----


def packed(*lengths: int) -> Array:
    return segment_ids(lengths)


SEGMENTS: dict[str, tuple[tuple[int, int], Any]] = {
    "array": (SQUARE, packed(1, 30, 0, 3, 36)),
    "list": (SQUARE, [0] * 31 + [1] * 39),
    "one document": (SQUARE, packed(70)),
    "every token alone": (SQUARE, np.arange(70)[::-1]),
    "per item": (SQUARE, np.stack([packed(20, 50), packed(33, 1, 36)])),
    "per item, one scattered": (SQUARE, np.stack([packed(20, 50), np.arange(70) % 3])),
    "ids not in order": (SQUARE, np.repeat([9, -4, 2], [16, 33, 21])),
    "ids not contiguous": (SQUARE, np.arange(70) // 5 % 3),
    "padded with -1": (SQUARE, np.r_[packed(30, 20), [-1] * 20]),
    "padded in front and behind": (SQUARE, np.r_[[-1] * 7, packed(30, 20), [-1] * 13]),
    "pair": (WIDE, (packed(3, 20, 10), packed(100, 157, 43))),
    "pair per item": (WIDE, (packed(3, 20, 10), np.stack([packed(100, 157, 43), packed(1, 290, 9)]))),
    "pair, queries per item": (WIDE, (np.stack([packed(3, 30), packed(33)]), packed(257, 43))),
    "pair, ids without keys": (WIDE, (np.repeat([5, 0, -9, 2], [3, 20, 5, 5]), packed(100, 157, 43))),
    "pair, scattered": (TALL, (np.arange(90) % 7, np.arange(31) % 4)),
    "pair, unsigned": (TALL, (np.arange(90, dtype=np.uint8) // 40, (np.arange(31) // 12).astype(np.uint64))),
}  # fmt: skip


@pytest.mark.parametrize("kind", SEGMENTS)
@pytest.mark.parametrize("causal", [False, "lower_right"])
def test_segments(impl, kind, causal):
    shape, segments = SEGMENTS[kind]
    same_as_dense(shape, {"segments": segments, "causal": causal})


def test_packed_documents_equal_separate_calls(impl):
    q, k, v = inputs(*SQUARE, np.float64)
    lengths = [9, 1, 33, 27]
    whole = attention(q, k, v, segments=segment_ids(lengths), causal=True)
    ends = np.cumsum(lengths)
    alone = [
        attention(*(x[..., end - n : end, :] for x in (q, k, v)), causal=True)
        for n, end in zip(lengths, ends, strict=True)
    ]
    assert_allclose(whole, np.concatenate(alone, axis=-2), rtol=0, atol=1e-14)


def test_query_id_without_keys(impl):
    """Such rows are zero; padding with ids that the other side does not use is made of them."""
    q, k, v = inputs(*WIDE, np.float32)
    query_ids, key_ids = np.r_[[0] * 10, [4] * 3, [-1] * 20], np.r_[[0] * 150, [1] * 100, [-2] * 50]
    result = attention(q, k, v, segments=(query_ids, key_ids), return_lse=True, return_weights=True)
    assert_array_equal(result.out[..., 10:, :], 0)
    assert_array_equal(result.weights[..., 10:, :], 0)
    assert_array_equal(result.lse[..., 10:], -np.inf)
    assert_array_equal(result.out[..., :10, :], attention(q[..., :10, :], k, v, key_lengths=150))


def test_padding_does_not_touch_documents(impl):
    """Padding with the id -1 on both sides sees itself and nothing else, whatever it holds."""
    q, k, v = (x.copy() for x in inputs(*SQUARE, np.float32))
    ids = np.r_[segment_ids([30, 20]), [-1] * 20]
    clean = attention(q, k, v, segments=ids)
    for array in (q, k, v):
        array[..., 50:, :] = np.nan
    dirty = attention(q, k, v, segments=ids)
    assert_array_equal(dirty[..., :50, :], clean[..., :50, :])
    assert np.isnan(dirty[..., 50:, :]).all()
    assert np.isfinite(clean).all()


# ---- segment_ids ----


@pytest.mark.parametrize(
    ("lengths", "ids"),
    [([2, 3], [0, 0, 1, 1, 1]), ([2, 0, 1], [0, 0, 2]), ([0], []), ([], []), ((1, 1, 1), [0, 1, 2]), ([4], [0] * 4)],
)
@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.uint8, np.uint64])
def test_segment_ids(lengths, ids, kind):
    sums = [0, *np.cumsum(lengths, dtype=int).tolist()]
    given, sums = (x if kind in (list, tuple) else np.array(x, kind) for x in (lengths, sums))
    for got in (segment_ids(given), segment_ids(cu_seqlens=sums)):
        assert got.dtype == np.intp
        assert_array_equal(got, np.array(ids, np.intp))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "give either lengths or cu_seqlens"),
        ({"lengths": [1], "cu_seqlens": [0, 1]}, ValueError, "give either lengths or cu_seqlens"),
        ({"lengths": [2, -1]}, ValueError, "negative length"),
        ({"cu_seqlens": [0, 3, 2]}, ValueError, "negative length"),
        ({"cu_seqlens": [1, 3]}, ValueError, "must start with 0"),
        ({"cu_seqlens": []}, ValueError, "must start with 0"),
        ({"lengths": [1.0, 2.0]}, TypeError, "dtype float64; it must be integers"),
        ({"cu_seqlens": [0.0, 2.0]}, TypeError, "dtype float64; it must be integers"),
        ({"lengths": [True, False]}, TypeError, "dtype bool"),
        ({"lengths": 3}, TypeError, r"shape \(\).*one axis"),
        ({"lengths": [[1, 2]]}, TypeError, r"shape \(1, 2\).*one axis"),
    ],
)
def test_segment_ids_errors(arguments, error, words):
    with pytest.raises(error, match=f"segment_ids: .*{words}"):
        segment_ids(**arguments)


# ---- combinations ----

NARROW = np.random.default_rng(2).random((BATCH, 1, *SQUARE)) < 0.7
COMBINED: dict[str, tuple[str, Options]] = {
    "window, lengths": ("square", {"window": (9, 3), "key_lengths": [50, 3]}),
    "window, prefix": ("square", {"window": (9, None), "causal": True, "prefix_lengths": [40, 3]}),
    "window, segments": ("square", {"window": (9, 3), "segments": packed(5, 30, 35)}),
    "window, scattered segments": ("square", {"window": (9, 3), "segments": np.arange(70) % 3}),
    "segments, lengths": ("square", {"segments": packed(5, 30, 35), "key_lengths": [0, 44]}),
    "segments, prefix": ("square", {"segments": packed(5, 30, 35), "causal": True, "prefix_lengths": 20}),
    "all": (
        "wide",
        {
            "window": (60, None), "causal": True, "q_start": [240, 30], "key_lengths": [280, 55],
            "prefix_lengths": [250, 40], "segments": (packed(20, 13), np.stack([packed(205, 95), packed(48, 252)])),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMBINED)
def test_combinations(impl, name):
    shape, options = COMBINED[name]
    allowed = same_as_dense(SHAPES[shape], options)
    for left_out in set(options) - {"causal", "q_start"}:  # each part narrows or widens what is seen
        fewer = {key: value for key, value in options.items() if key != left_out}
        assert (pattern(SHAPES[shape], **fewer) != allowed).any(), left_out


@pytest.mark.parametrize("name", [name for name, (shape, _) in COMBINED.items() if shape == "square"])
def test_combined_with_masks_and_changed_scores(impl, name):
    options = COMBINED[name][1]
    bias = np.random.default_rng(3).standard_normal((Q_HEADS, *SQUARE)).astype(np.float32)
    same_as_dense(SQUARE, options, mask=NARROW)
    same_as_dense(SQUARE, options, bias=bias, softcap=3.0, sinks=np.array([0.5, -1, 2, 0]))


# ---- the promise of equal bits, and of no dense mask ----

KINDS: dict[str, Options] = {
    "window": {"window": (40, 3), "q_start": [245, 100]},
    "window and prefix": {"window": (40, None), "causal": True, "q_start": [245, 100], "prefix_lengths": 230},
    "segments": {"segments": (packed(3, 20, 10), packed(100, 157, 43))},
    "scattered segments": {"segments": (np.arange(33) % 3, np.arange(300) % 4)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_the_batch(isa, kind):
    q, k, v = inputs(*WIDE, np.float32)
    whole = attention(q, k, v, **KINDS[kind])
    for item, head, row in [(0, 0, 0), (1, 3, 17), (0, 2, 32), (1, 1, 8)]:
        options = dict(KINDS[kind])
        if "q_start" in options:
            options["q_start"] = options["q_start"][item] + row
        if "segments" in options:
            query_ids, key_ids = options["segments"]
            options["segments"] = (query_ids[row : row + 1], key_ids)
        heads = (item, head // (Q_HEADS // HEADS))
        assert_array_equal(
            attention(q[item, head, row : row + 1], k[heads], v[heads], **options)[0], whole[item, head, row]
        )


LONG, MIB = 8192, 2**20


@pytest.mark.parametrize(
    "options",
    [
        {"window": (64, 0), "causal": True},
        {"window": (64, 64)},
        {"segments": packed(*[LONG // 16] * 16)},
        {"segments": packed(*[LONG // 16] * 16), "window": (64, 0), "causal": True},
        {"causal": True, "prefix_lengths": 50, "key_lengths": LONG - 10},
    ],
    ids=["window causal", "window", "segments", "segments window", "prefix"],
)
def test_no_dense_mask_is_built(compiled, options):
    q, k, v = np.random.default_rng(4).standard_normal((3, LONG, WIDTH), dtype=np.float32)
    assert most_allocated(lambda: attention(q, k, v, **options)) < 8 * MIB


def test_a_dense_mask_would_be_noticed():
    assert most_allocated(lambda: np.ones((LONG, LONG), bool)) >= 64 * MIB


def test_segment_ids_of_mixed_signedness_are_compared_exactly(impl):
    """int64 beside uint64 must not meet as float64, where ids above 2^53 collide."""
    big = 2**60
    q, k = np.zeros((2, 4)), np.zeros((2, 4))
    queries, keys = np.array([big, big + 1], np.uint64), np.array([big, big + 1], np.int64)
    np.testing.assert_array_equal(attention(q, k, np.eye(2), segments=(queries, keys)), np.eye(2))
    np.testing.assert_array_equal(attention(q, k, np.eye(2), segments=(queries, keys[::-1].copy())), np.eye(2)[::-1])
    wrapped = (np.array([2**64 - 1, 0], np.uint64), np.array([-1, 0]))
    np.testing.assert_array_equal(attention(q, k, np.eye(2), segments=wrapped), [[0, 0], [0, 1]])


@pytest.mark.parametrize("lead", [(2,), (3, 2)])
def test_two_arrays_of_ids_that_could_be_two_items(impl, lead):
    """A tuple is (query ids, key ids); where it could be the ids of two items as well, only the axes tell."""
    q, k, v = np.random.default_rng(72).standard_normal((3, *lead, 1, 4, 8))
    a, b = np.array([0, 0, 1, 1]), np.array([1, 0, 0, 0])
    axes = (*(1,) * len(lead), 4)
    for pair in ((a, b), (a.tolist(), b.tolist()), (a, a)):
        with pytest.raises(ValueError, match=r"shape \(4,\), which may be \(query ids, key ids\) or the ids of two"):
            attention(q, k, v, segments=pair)
    as_pair = attention(q, k, v, segments=(a.reshape(axes), b.reshape(axes)))
    np.testing.assert_allclose(as_pair, attention(q, k, v, mask=a[:, None] == b), atol=1e-12)
    as_items = attention(q, k, v, segments=[a, b])
    items = np.stack([a, b])
    np.testing.assert_allclose(as_items, attention(q, k, v, mask=(items[:, :, None] == items[:, None])[:, None]))
    attention(*(x[..., :1, :, :, :] for x in (q, k, v)), segments=(a, b))  # not two items: one meaning


def test_segments_of_many_items(impl):
    """Each item has its own ids, in runs, in any order, negative, huge or of another item's number."""
    rng = np.random.default_rng(73)
    q, k, v = rng.standard_normal((3, 300, 1, 8, 4))
    runs = np.sort(rng.integers(0, 4, (300, 8)), axis=1)
    names = rng.permuted(np.tile([7, -3, 0, 12], (300, 1)), axis=1)
    for ids in (runs, np.take_along_axis(names, runs, axis=1), runs - 2**62, runs * 2**61, runs.astype(np.uint8)):
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        want = attention(q, k, v, mask=mask)
        for given in (ids, list(ids), (ids, ids.astype(np.int64))):
            np.testing.assert_allclose(attention(q, k, v, segments=given), want, atol=1e-12)
    others = rng.integers(0, 5, (300, 8))
    got = attention(q, k, v, segments=(others, runs))
    np.testing.assert_allclose(
        got, attention(q, k, v, mask=(others[:, :, None] == runs[:, None, :])[:, None]), atol=1e-12
    )


def test_ids_of_items_take_no_loop_over_them(monkeypatch):
    q = np.zeros((5000, 1, 8, 2), np.float32)
    calls = []
    for name in ("flatnonzero", "searchsorted", "repeat"):
        real = getattr(np, name)
        monkeypatch.setattr(np, name, lambda *a, real=real, **kw: calls.append(1) or real(*a, **kw))
    attention(q, q, q, segments=np.tile([0, 0, 0, 1, 1, 1, 2, 2], (5000, 1)))
    assert 0 < len(calls) < 10


def test_an_unlimited_window_goes_with_q_start(impl):
    x = np.random.default_rng(70).standard_normal((3, 4))
    np.testing.assert_array_equal(attention(x, x, x, q_start=0, window=(None, None)), attention(x, x, x, key_lengths=3))


def test_a_padding_mask_becomes_an_interval(impl):
    """The same row for all queries and heads, with its keys in one run, costs what key_lengths costs."""
    rng = np.random.default_rng(71)
    q, k, v = rng.standard_normal((3, 3, 2, 40, 8), dtype=np.float32)
    keys = np.arange(40)
    run = np.stack([keys < 25, (keys >= 7) & (keys < 9), keys < 0])[:, None, None]
    dense = np.repeat(run, 40, axis=2)  # the same as a dense array
    for more in ({}, {"causal": True}, {"key_lengths": [40, 8, 3]}):
        np.testing.assert_array_equal(attention(q, k, v, mask=run, **more), attention(q, k, v, mask=dense, **more))


def test_segments_whose_batch_axes_do_not_fit():
    q = np.ones((2, 1, 4, 8), np.float32)
    with pytest.raises(ValueError, match=r"segments \(query ids\) has shape \(3, 4\); it must broadcast to \(2, 4\)"):
        attention(q, q, q, segments=np.zeros((3, 4), int))


def test_segments_without_any_key(impl):
    q, k, v = np.ones((2, 1, 4, 8), np.float32), *np.ones((2, 2, 1, 0, 8), np.float32)
    out = attention(q, k, v, segments=(np.zeros((2, 4), int), np.zeros((2, 0), int)))
    assert_array_equal(out, np.zeros_like(q))
