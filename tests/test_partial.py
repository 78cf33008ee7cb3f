"""Rows that are left unfinished and go on: `attention_partial`, `attention(before=)`, and `merge_attention` of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from oracle import oracle

from attentile import Partial, alibi_slopes, attention, attention_partial, merge_attention

HEADS, KEY_HEADS, KEYS, WIDTH, VALUES = 6, 2, 700, 24, 19
# What the whole call gets; key_lengths and q_start are in its keys.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_start": 640},
    "window": {"window": (300, 5), "q_start": 600},
    "lengths": {"key_lengths": [650, 130]},
    "mask": {"mask": np.random.default_rng(1).random((2, 1, 40, KEYS)) < 0.5},
    "bias": {"bias": np.random.default_rng(2).standard_normal((HEADS, 1, KEYS)).astype(np.float32)},
    "softcap": {"softcap": 3.0, "scale": 0.5},
    "alibi": {"alibi_slopes": alibi_slopes(HEADS), "q_start": 660},
    "sinks": {"sinks": np.linspace(-2, 2, HEADS)},
}


def arrays(rows: int, dtype: Any = np.float32, keys: int = KEYS) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(rows)
    shapes = ((2, HEADS, rows, WIDTH), (2, KEY_HEADS, keys, WIDTH), (2, KEY_HEADS, keys, VALUES))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def of_keys(options: dict[str, Any], first: int, end: int, rows: int) -> dict[str, Any]:
    """The options of a call over the keys first .. end alone."""
    cut = dict(options)
    if "q_start" in cut:
        cut["q_start"] -= first
    if "key_lengths" in cut:
        cut["key_lengths"] = np.clip(np.array(cut["key_lengths"]) - first, 0, end - first)
    for name in ("mask", "bias"):
        if name in cut:
            cut[name] = cut[name][..., first:end]
    if "mask" in cut:
        cut["mask"] = cut["mask"][..., :rows, :]
    return cut


def in_pieces(q: Any, k: Any, v: Any, options: dict[str, Any], ends: list[int], **more: Any) -> Any:
    """The call over all keys as one over each run of them, each going on from the one before."""
    partial, first = None, 0
    unfinished = {name: value for name, value in options.items() if name != "sinks"}
    for end in ends:
        part = of_keys(unfinished, first, end, q.shape[2])
        partial = attention_partial(q, k[:, :, first:end], v[:, :, first:end], before=partial, **part)
        first = end
    last = of_keys(options, first, KEYS, q.shape[2])
    return attention(q, k[:, :, first:], v[:, :, first:], before=partial, **last, **more)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_row_that_goes_on_after_whole_chunks_has_the_bits_of_one_call(fma_isa, case, dtype, rows):
    """Few rows and many, one thread and two, every option."""
    q, k, v = arrays(rows, dtype)
    options = dict(OPTIONS[case])
    if "mask" in options:
        options["mask"] = options["mask"][:, :, :rows]
    whole = attention(q, k, v, return_lse=True, **options)
    for ends in ([256], [512], [256, 512]):
        for threads in (1, 2):
            found = in_pieces(q, k, v, options, ends, return_lse=True, num_threads=threads)
            assert_array_equal(found.out, whole.out)
            assert_array_equal(found.lse, whole.lse)


@pytest.mark.parametrize("case", OPTIONS)
def test_any_other_cut_is_right_to_rounding(impl, case):
    q, k, v = arrays(5)
    options = dict(OPTIONS[case])
    if "mask" in options:
        options["mask"] = options["mask"][:, :, :5]
    whole = attention(q, k, v, return_lse=True, **options)
    for ends in ([1], [300], [100, 101, 699]):
        found = in_pieces(q, k, v, options, ends, return_lse=True)
        assert_allclose(found.out, whole.out, rtol=2e-5, atol=2e-6)
        assert_allclose(found.lse, whole.lse, rtol=2e-6, atol=2e-6)


def test_weights_are_those_of_the_whole_row(impl):
    q, k, v = arrays(3)
    whole = attention(q, k, v, return_weights=True)
    first = attention_partial(q, k[:, :, :256], v[:, :, :256])
    rest = attention(q, k[:, :, 256:], v[:, :, 256:], before=first, return_weights=True)
    assert_allclose(rest.weights, whole.weights[..., 256:], rtol=1e-5, atol=1e-8)


def test_the_parts_say_what_they_are(impl):
    """m in powers of two, l and o relative to it; out and lse follow."""
    q, k, v = (x[0, :1] for x in arrays(4, np.float64))
    found = attention_partial(q[0], k[0], v[0])
    expected = oracle(q, k, v, np.ones((1, 4, KEYS), bool))
    scores = (q[0] / np.sqrt(WIDTH)) @ k[0].T
    assert (found.m.shape, found.l.shape, found.o.shape) == ((4,), (4,), (4, VALUES))
    assert_allclose(found.m, scores.max(axis=1) * np.log2(np.e), rtol=1e-12)
    assert_allclose(found.l, np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1), rtol=1e-12)
    assert_allclose(found.out, expected.out[0], rtol=1e-10)
    assert_allclose(found.lse, expected.lse[0], rtol=1e-12)
    assert_allclose(found.o, found.out * found.l[:, None], rtol=1e-12)


def test_merged_parts_are_a_part(impl):
    q, k, v = arrays(3)
    runs = [slice(0, 10), slice(10, 11), slice(11, 400), slice(400, None)]
    parts = [attention_partial(q, k[:, :, run], v[:, :, run]) for run in runs]
    whole = attention(q, k, v, return_lse=True)
    for merged in (merge_attention(parts), merge_attention([merge_attention(parts[:2]), merge_attention(parts[2:])])):
        assert isinstance(merged, Partial)
        assert_allclose(merged.out, whole.out, rtol=2e-5, atol=2e-6)
        assert_allclose(merged.lse, whole.lse, rtol=1e-6)
    one = merge_attention(parts[:1])
    for a, b in zip(one, parts[0], strict=True):
        assert_array_equal(a, b)
        assert not np.may_share_memory(a, b)


def test_huge_scores_lose_nothing_in_parts(compiled):
    """lse alone absorbs the number of keys where all scores are large; largest score and sum apart do not."""
    q, k, v = arrays(1)
    bias = np.full((1, KEYS), -1e30, np.float32)
    even = attention(q, k, v, bias=bias)
    parts = [attention_partial(q, k[:, :, r], v[:, :, r], bias=bias[:, r]) for r in (slice(0, 600), slice(600, None))]
    assert_allclose(merge_attention(parts).out, even, rtol=2e-5, atol=1e-6)


def test_rows_without_a_key_are_the_identity(impl):
    q, k, v = arrays(3)
    nothing = attention_partial(q, k, v, key_lengths=0)
    none = attention_partial(q, k[:, :, :0], v[:, :, :0])
    for part in (nothing, none):
        assert np.isneginf(part.m).all()
        assert not part.l.any()
        assert not part.o.any()
        assert_array_equal(part.out, np.zeros_like(part.o))
        assert np.isneginf(part.lse).all()
        assert_array_equal(attention(q, k, v, before=part), attention(q, k, v))
    some = attention_partial(q, k, v)
    sinks = np.linspace(-1, 3, HEADS)
    for empty in ({"k": k[:, :, :0], "v": v[:, :, :0]}, {"k": k, "v": v, "key_lengths": 0}):
        rest = attention(q, **empty, before=some, sinks=sinks, return_lse=True)
        whole = attention(q, k, v, sinks=sinks, return_lse=True)
        assert_allclose(rest.out, whole.out, rtol=1e-5, atol=1e-7)
        assert_allclose(rest.lse, whole.lse, rtol=1e-6)


def test_rows_without_an_axis_of_heads(impl):
    q, k, v = (x[0, 0] for x in arrays(3))
    whole = attention(q, k, v, sinks=[0.5], return_lse=True)
    first = attention_partial(q, k[:256], v[:256])
    assert first.o.shape == (3, VALUES)
    for rest in (slice(256, None), slice(0, 0)):
        before = first if rest.stop is None else attention_partial(q, k[256:], v[256:], before=first)
        found = attention(q, k[rest], v[rest], before=before, sinks=[0.5], return_lse=True)
        assert_allclose(found.out, whole.out, rtol=2e-5, atol=2e-6)
        assert_allclose(found.lse, whole.lse, rtol=1e-6)


def test_settings_around_the_call_change_nothing(impl):
    tiny, one = np.full((1, 1), 1e-160), np.ones((1, 1))
    with np.errstate(all="raise"):
        before = attention_partial(tiny, tiny, one)
        assert_array_equal(attention(one, one, one, before=before), one)
        small = attention_partial(np.zeros((1, 1)), np.zeros((2, 1)), np.array([[5e-324], [0]]))
        assert (small.out.shape, small.lse.shape) == ((1, 1), (1,))
        assert before.lse.shape == (1,)


def test_values_of_no_width(impl):
    q, k, v = arrays(3)
    part = attention_partial(q, k[:, :, :256], v[:, :, :256, :0])
    assert part.o.shape == (2, HEADS, 3, 0)
    found = attention(q, k[:, :, 256:], v[:, :, 256:, :0], before=part, return_lse=True)
    assert_allclose(found.lse, attention(q, k, v, return_lse=True).lse, rtol=1e-6)


def test_half_precision_is_computed_in_float32(impl):
    q, k, v = (x.astype(np.float16) for x in arrays(3))
    part = attention_partial(q, k[:, :, :256], v[:, :, :256])
    assert part.o.dtype == np.float32
    out = attention(q, k[:, :, 256:], v[:, :, 256:], before=part)
    assert out.dtype == np.float16
    assert_allclose(out.astype(float), attention(q, k, v).astype(float), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"before": tuple}, TypeError, r"^attention: before is a tuple; it must be a Partial"),
        ({"m": np.zeros((2, HEADS, 4), np.float32)}, ValueError, r"^attention: before\.m has shape \(2, 6, 4\)"),
        ({"o": np.zeros((2, HEADS, 3, 1), np.float32)}, ValueError, r"^attention: before\.o has shape \(2, 6, 3, 1\)"),
        (
            {"l": np.zeros((2, HEADS, 3))},
            ValueError,
            r"^attention: before\.l .* float64; they must be .* float32",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(either, change, error, words):
    q, k, v = arrays(3)
    before = attention_partial(q, k, v)
    before = tuple(before) if "before" in change else before._replace(**change)
    with pytest.raises(error, match=words):
        attention(q, k, v, before=before)


def test_errors_name_the_function(either):
    q, k, v = arrays(3)
    with pytest.raises(TypeError, match=r"^attention_partial: unexpected keyword argument 'sinks'"):
        attention_partial(q, k, v, sinks=np.zeros(HEADS))
    with pytest.raises(ValueError, match=r"^attention_partial: softcap is -1"):
        attention_partial(q, k, v, softcap=-1.0)
    parts = [attention_partial(q, k, v), attention_partial(q[:, :, :2], k, v)]
    with pytest.raises(ValueError, match=r"^merge_attention: m of part 1 has shape \(2, 6, 2\)"):
        merge_attention(parts)


def test_a_part_may_lie_in_any_memory(impl):
    q, k, v = arrays(40)
    part = attention_partial(q, k[:, :, :256], v[:, :, :256])
    wanted = attention(q, k[:, :, 256:], v[:, :, 256:], before=part)
    turned = Partial(*(np.asfortranarray(x) for x in part))
    assert_array_equal(attention(q, k[:, :, 256:], v[:, :, 256:], before=turned), wanted)
    out = part.o  # the result over what it goes on from
    assert_array_equal(attention(q, k[:, :, 256:], v[:, :, 256:], before=part, out=out), wanted)
