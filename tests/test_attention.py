"""attention() against the select-first oracle, over odd sizes, masks of every kind, layouts and dtypes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import dtype_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from oracle import allowed_keys, oracle, tolerance

import attentile
from attentile import AttentionResult, attention

DTYPES = (np.float32, np.float64)
# Around every edge of a tile: one lane, one vector, one block, one mask word, one chunk of keys.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 97, 255, 256, 257, 513)
WIDTHS = (1, 2, 3, 7, 8, 16, 33, 64, 67, 80, 128, 256, 257)


def inputs(
    rng: np.random.Generator, batch, q_heads, heads, queries, keys, width, value_width, dtype
) -> tuple[Any, ...]:
    return (
        rng.standard_normal((batch, q_heads, queries, width)).astype(dtype),
        rng.standard_normal((batch, heads, keys, width)).astype(dtype),
        rng.standard_normal((batch, heads, keys, value_width)).astype(dtype),
    )


def check(q, k, v, **options) -> None:
    """Output, lse and weights of a call with every extra against the oracle."""
    allowed = allowed_keys((*q.shape[:-1], k.shape[-2]), **options)
    expected = oracle(q, k, v, allowed, **options)
    bound = tolerance(q, k, v, allowed, expected, **options)
    result = attention(q, k, v, return_lse=True, return_weights=True, **options)
    assert isinstance(result, AttentionResult)
    assert result.out.dtype == q.dtype
    np.testing.assert_allclose(result.out, expected.out, rtol=0, atol=bound)
    np.testing.assert_allclose(result.weights, expected.weights, rtol=0, atol=bound)
    assert (result.weights[~allowed] == 0).all()
    largest = np.abs(expected.lse[np.isfinite(expected.lse)]).max(initial=1)
    np.testing.assert_allclose(result.lse, expected.lse, rtol=0, atol=bound + 8 * np.finfo(q.dtype).eps * largest)
    np.testing.assert_array_equal(attention(q, k, v, **options), result.out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", LENGTHS)
def test_query_lengths(impl, queries, dtype):
    check(*inputs(np.random.default_rng(queries), 1, 2, 2, queries, 33, 16, 8, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", LENGTHS)
def test_key_lengths_of_every_remainder(impl, keys, dtype):
    check(*inputs(np.random.default_rng(keys), 2, 1, 1, 5, keys, 7, 3, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(impl, width, dtype):
    rng = np.random.default_rng(width)
    check(*inputs(rng, 1, 1, 1, 19, 21, width, 5, dtype))
    check(*inputs(rng, 1, 1, 1, 19, 21, 5, width, dtype))


@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_remainder(impl, vectors, dtype):
    """Each count of keys and of value columns up to the longest tile, for blocks of one, two and three vectors."""
    rng = np.random.default_rng(vectors)
    for n in range(1, 15):
        check(*inputs(rng, 1, 1, 1, 16 * vectors - 3, n, 4, n, dtype))


@pytest.mark.parametrize(("q_heads", "heads"), [(1, 1), (4, 4), (4, 2), (6, 3), (5, 1), (12, 4)])
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_grouped_heads(impl, q_heads, heads, queries):
    check(*inputs(np.random.default_rng(1), 2, q_heads, heads, queries, 40, 8, 6, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (300, 300), (5, 300), (300, 5), (64, 600)])
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_causal_alignments(impl, causal, queries, keys, dtype):
    q, k, v = inputs(np.random.default_rng(3), 2, 2, 1, queries, keys, 8, 8, dtype)
    check(q, k, v, causal=causal)
    check(q, k, v, causal=causal, key_lengths=[keys, keys // 3])


@pytest.mark.parametrize("start", [0, 3, 250, -4, [0, 290]])
def test_q_start(impl, start):
    q, k, v = inputs(np.random.default_rng(4), 2, 2, 2, 10, 300, 8, 8, np.float32)
    check(q, k, v, causal=True, q_start=start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rows", "keys", "full", "heads", "scalar", "blocks", "empty rows"])
def test_boolean_masks(impl, kind, dtype):
    rng = np.random.default_rng(5)
    batch, heads, queries, keys = 2, 3, 50, 530
    q, k, v = inputs(rng, batch, heads, heads, queries, keys, 9, 10, dtype)
    shape = {"rows": (queries, 1), "keys": (batch, 1, 1, keys), "full": (batch, heads, queries, keys)}.get(
        kind, (heads, 1, keys) if kind == "heads" else (queries, keys)
    )
    mask = rng.random(shape) < 0.4
    if kind == "scalar":
        mask = np.array(True)
    if kind == "blocks":  # whole chunks and whole words of nothing and of everything
        mask = np.zeros((queries, keys), bool)
        mask[:20, 256:300], mask[10:, 512:], mask[30:, 64:96] = True, True, True
    if kind == "empty rows":
        mask[::3] = False
    check(q, k, v, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300,), (40, 300), (3, 1, 300), (2, 1, 40, 1), (2, 3, 40, 300), ()])
def test_bias(impl, shape, dtype):
    rng = np.random.default_rng(6)
    q, k, v = inputs(rng, 2, 3, 3, 40, 300, 9, 10, dtype)
    bias = np.asarray(rng.standard_normal(shape) * 3, dtype)
    check(q, k, v, bias=bias)
    if shape[-1:] == (300,):
        bias[rng.random(shape) < 0.3] = -np.inf
        check(q, k, v, bias=bias)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_everything_combined(impl, data):
    """Mixtures: sizes, dtype, grouping, scale, causal, lengths, mask and bias, with poison in what is excluded."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, 70)), draw(st.integers(1, 300))
    dtype, scale = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, 0.0, 1.0, -0.3, 0.1117923]))
    q, k, v = inputs(
        rng, batch, heads * group, heads, queries, keys, draw(st.integers(1, 20)), draw(st.integers(1, 20)), dtype
    )
    options: dict[str, Any] = {"scale": scale, "causal": draw(st.sampled_from([False, "upper_left", "lower_right"]))}
    if options["causal"] is False and draw(st.booleans()):
        options |= {"causal": True, "q_start": rng.integers(-3, keys + 3, batch)}
    if draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, keys + 1, batch)
    if draw(st.booleans()):
        options["mask"] = rng.random((batch, 1, queries, keys)) < draw(st.sampled_from([0.02, 0.5, 0.98]))
    if draw(st.booleans()):
        options["bias"] = rng.standard_normal((heads * group, queries, keys)).astype(dtype)
        options["bias"][rng.random(options["bias"].shape) < 0.2] = -np.inf
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.7, 5.0, 50.0]))
    if draw(st.booleans()):
        options["sinks"] = rng.standard_normal(heads * group)
    if draw(st.booleans()):
        options["segments"] = tuple(np.sort(rng.integers(0, 4, (batch, n))) for n in (queries, keys))
    if options["causal"] is not False:
        if draw(st.booleans()):
            options["window"] = draw(st.sampled_from([(0, 0), (7, 0), (40, 3), (None, 2), (33, None)]))
        if draw(st.booleans()):
            options["prefix_lengths"] = rng.integers(0, keys + 1, batch)
        if draw(st.booleans()):
            options["alibi_slopes"] = rng.random(heads * group)
    check(q, k, v, **options)
    poison(q, k, v, options)


def poison(q, k, v, options) -> None:
    """NaN and Inf in every key and value that no query sees must change no bit."""
    allowed = allowed_keys((*q.shape[:-1], k.shape[-2]), **options)
    group = q.shape[-3] // k.shape[-3]
    seen = allowed.reshape(allowed.shape[0], k.shape[-3], group, *allowed.shape[-2:]).any(axis=(2, 3))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[~seen], bad_v[~seen] = np.nan, np.inf
    np.testing.assert_array_equal(attention(q, bad_k, bad_v, **options), attention(q, k, v, **options))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_poison_beside_allowed_keys(impl, bad):
    """A value that some rows of a block see and others do not: the others keep their bits, the seeing rows show it."""
    rng = np.random.default_rng(7)
    q, k, v = inputs(rng, 1, 1, 1, 100, 300, 8, 8, np.float32)
    mask = rng.random((100, 300)) < 0.5
    mask[:, 17] = np.arange(100) % 2 == 0
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_v[0, 0, 17, 3] = bad
    clean, dirty = attention(q, k, v, mask=mask), attention(q, k, dirty_v, mask=mask)
    np.testing.assert_array_equal(dirty[0, 0, 1::2], clean[0, 0, 1::2])
    assert not np.isfinite(dirty[0, 0, ::2, 3]).any()
    dirty_k[0, 0, 17] = np.nan
    dirty = attention(q, dirty_k, v, mask=mask)
    np.testing.assert_array_equal(dirty[0, 0, 1::2], clean[0, 0, 1::2])
    assert np.isnan(dirty[0, 0, ::2]).all()


def test_allowed_scores_of_minus_infinity_are_nan(impl):
    """The softmax of scores that are all -inf is NaN; only a row without keys is 0."""
    q, v = np.ones((1, 2)), np.ones((3, 2))
    k = np.full((3, 2), -np.inf)
    assert np.isnan(attention(q, k, v)).all()
    np.testing.assert_array_equal(attention(q, k, v, mask=np.zeros((1, 3), bool)), np.zeros((1, 2)))


def test_batch_axes_broadcast_without_copies(impl):
    rng = np.random.default_rng(8)
    q = rng.standard_normal((2, 3, 1, 4, 5, 8))
    k, v = rng.standard_normal((2, 3, 1, 2, 6, 8)), rng.standard_normal((7, 2, 6, 3))
    got = attention(q, k, v, causal="upper_left", key_lengths=rng.integers(0, 7, (2, 3, 7)))
    assert got.shape == (2, 3, 7, 4, 5, 3)
    full = [np.broadcast_to(x, (2, 3, 7, *x.shape[-3:])).reshape(42, *x.shape[-3:]) for x in (q, k, v)]
    lengths = np.random.default_rng(8)
    for _ in range(3):
        lengths.standard_normal(1)
    np.testing.assert_allclose(
        attention(*[x[:, None].swapaxes(0, 1) for x in full])[0], attention(*full), rtol=0, atol=0
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:])
def test_unfoldable_batch_axes(impl, order):
    """Batch axes in any memory order, where no single stride can walk them."""
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((2, 3, 4, 2, 5, 6)).transpose(*order, 3, 4, 5) for _ in range(3))
    lengths, mask = rng.integers(0, 6, q.shape[:3]), rng.random((*q.shape[:3], 2, 5, 5)) < 0.7
    got = attention(q, k, v, key_lengths=lengths, mask=mask, causal=True)
    flat = [np.ascontiguousarray(x).reshape(24, 2, 5, 6) for x in (q, k, v)]
    want = attention(*flat, key_lengths=lengths.ravel(), mask=mask.reshape(24, 2, 5, 5), causal=True)
    np.testing.assert_array_equal(got.reshape(want.shape), want)


def test_two_and_three_dimensional_inputs(impl):
    rng = np.random.default_rng(10)
    q, k, v = rng.standard_normal((3, 5, 8))
    flat = attention(q, k, v, causal=True, return_lse=True, return_weights=True)
    deep = attention(q[None, None], k[None, None], v[None, None], causal=True, return_lse=True, return_weights=True)
    for got, want in zip(flat, deep, strict=True):
        np.testing.assert_array_equal(got, want[0, 0])
    np.testing.assert_array_equal(attention(q[None], k[None], v[None], causal=True)[0], flat.out)
    np.testing.assert_array_equal(attention(q[None, None], k, v, causal=True)[0, 0], flat.out)


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4, 5, 6), (1, 0, 3, 4, 5, 6), (1, 2, 0, 4, 5, 6), (1, 2, 3, 0, 5, 6), (1, 2, 3, 4, 5, 0)]
)
def test_empty_axes(impl, shape):
    batch, heads, queries, keys, width, value_width = shape
    q, k, v = (
        np.ones((batch, heads, queries, width)),
        np.ones((batch, heads, keys, width)),
        np.ones((batch, heads, keys, value_width)),
    )
    result = attention(q, k, v, causal="lower_right", return_lse=True, return_weights=True)
    assert result.out.shape == (batch, heads, queries, value_width)
    assert result.weights.shape == (batch, heads, queries, keys)
    assert (result.out == 0).all()
    assert np.isneginf(result.lse).all() == (keys == 0 or result.lse.size == 0)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "lower_right", "sinks": [0.5, -1.0]},
        {"mask": np.array([True, False, True, True, False, True, True])},
        {"softcap": 2.0, "bias": np.array([0.5, -np.inf, 0, 0, 0, 1, 2])},
        {"score_mod": lambda scores, b, h, i, j: scores + b + h},
    ],
    ids=["plain", "causal", "mask", "bias", "score_mod"],
)
def test_logsumexp_and_weights_without_values(impl, options, queries):
    """Dv = 0: both depend on the scores alone; batch axes that do not fold, a result that is written to out."""
    rng = np.random.default_rng(21)
    q, k = rng.standard_normal((3, 2, 2, queries, 4)).swapaxes(0, 1), rng.standard_normal((2, 3, 1, 7, 4))
    v, out = rng.standard_normal((2, 3, 1, 7, 3)), np.empty((2, 3, 2, queries, 0))
    returned = {"return_lse": True, "return_weights": True}
    want = attention(q, k, v, **options, **returned)
    got = attention(q, k, v[..., :0], out=out, **options, **returned)
    assert got.out is out
    np.testing.assert_array_equal(got.weights, want.weights)
    np.testing.assert_array_equal(got.lse, want.lse)
    for name in returned:
        alone = attention(q, k, v[..., :0], **options, **{name: True})
        np.testing.assert_array_equal(getattr(alone, name[7:]), getattr(want, name[7:]))
    assert attention(q, k, v[..., :0], **options).shape == out.shape


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32_and_rounded_once(impl, name):
    dtype = dtype_of(name)
    q, k, v = (x.astype(dtype) for x in inputs(np.random.default_rng(11), 1, 2, 2, 20, 30, 16, 8, np.float32))
    single = attention(*(x.astype(np.float32) for x in (q, k, v)), return_weights=True, return_lse=True)
    half = attention(q, k, v, return_weights=True, return_lse=True)
    assert half.out.dtype == half.weights.dtype == dtype
    assert half.lse.dtype == np.float32
    np.testing.assert_array_equal(half.out, single.out.astype(dtype))
    out = np.zeros(half.out.shape, dtype)
    assert attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, half.out)


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ("i4", "i8", "f8"),
        ("?", "?", "f8"),
        ("f4", "f8", "f8"),
        ("f4", "f2", "f4"),
        ("u1", "f4", "f4"),
        (">f4", "f4", "f4"),
    ],
)
def test_dtypes_promote(impl, a, b, want):
    x = np.arange(6).reshape(2, 3) % 2
    got = attention(x.astype(a), x.astype(b), x.astype(a), scale=np.float64(0.5))
    assert got.dtype == want
    np.testing.assert_allclose(got, attention(x.astype("f8"), x.astype("f8"), x.astype("f8"), scale=0.5), atol=1e-6)


def test_out_in_any_layout(impl):
    rng = np.random.default_rng(12)
    q, k, v = inputs(rng, 2, 3, 3, 10, 12, 8, 6, np.float32)
    want = attention(q, k, v)
    for out in (
        np.empty((2, 10, 3, 6), np.float32).swapaxes(1, 2),
        np.empty((2, 3, 10, 12), np.float32)[..., ::2],
        np.empty((2, 3, 10, 6), np.float32)[:, :, ::-1],
        np.empty((2, 3, 6, 10), np.float32).swapaxes(2, 3),
    ):
        out[...] = np.nan
        assert attention(q, k, v, out=out) is out
        np.testing.assert_array_equal(out, want)
    result = attention(q, k, v, out=out, return_lse=True)
    assert result.out is out


def test_out_may_overlap_inputs(impl):
    rng = np.random.default_rng(13)
    for target in range(3):
        arrays = list(inputs(rng, 1, 2, 2, 9, 9, 8, 8, np.float64))
        want = attention(*arrays)
        assert attention(*arrays, out=arrays[target]) is arrays[target]
        np.testing.assert_array_equal(arrays[target], want)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_out_may_overlap_what_belongs_to_the_heads(impl, name):
    q, k, v = inputs(np.random.default_rng(15), 1, 8, 8, 400, 400, 16, 16, np.float64)
    out = np.zeros(q.shape)
    per_head = out[0, 0, 0, :8]
    per_head[:] = 0.5
    want = attention(q, k, v, **{name: per_head.copy()})
    np.testing.assert_array_equal(attention(q, k, v, out=out, **{name: per_head}), want)


def test_inputs_are_not_modified(impl):
    rng = np.random.default_rng(14)
    arrays = [
        *inputs(rng, 1, 2, 2, 40, 300, 8, 8, np.float32),
        rng.random((40, 300)) < 0.5,
        rng.standard_normal((40, 300)).astype("f4"),
    ]
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.setflags(write=False)
    attention(*arrays[:3], mask=arrays[3], bias=arrays[4], causal="lower_right")
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_items_and_empty_lists(impl):
    q = np.zeros((0, 2, 3, 4))
    assert attention(q, q, q, key_lengths=[]).shape == q.shape
    assert attention(q, q, q, causal=True, q_start=[]).shape == q.shape
    with pytest.raises(TypeError, match="key_lengths has dtype float64"):
        attention(*np.ones((3, 4, 4)), key_lengths=1.0)


def test_biases_with_an_axis_for_the_one_head(impl):
    """Those of relative_bias and t5_bias have an axis for the heads; two-dimensional arrays have one head."""
    x, table = np.eye(4), np.random.default_rng(0).standard_normal((32, 1))
    bias = attentile.t5_bias(table, 4, 4)
    assert bias.shape == (1, 4, 4)
    assert_array_equal(attention(x, x, x, bias=bias), attention(x[None], x[None], x[None], bias=bias)[0])
    mask = np.tri(4, dtype=bool)
    assert_array_equal(attention(x, x, x, mask=mask[None]), attention(x, x, x, mask=mask))
    for wrong in (np.zeros((2, 4, 4)), np.zeros((1, 1, 4, 4)), np.zeros((1, 5, 4))):
        with pytest.raises(ValueError, match="does not broadcast"):
            attention(x, x, x, bias=wrong)
