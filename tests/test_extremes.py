"""Numbers at the ends of their range, settings of the program around, and arguments that only look like numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import attentile
from attentile import KVCache, attention, causal_attention, multi_head_attention, onnx, self_attention

RNG = np.random.default_rng(0)
REALS = [np.float32, np.float64]


def qkv(dtype=np.float32):
    return RNG.standard_normal((3, 1, 2, 5, 8)).astype(dtype)


# ---- the ends of the range ----


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("share", [1e-6, 0.2, 0.5, 1.0])
def test_a_softcap_near_the_largest_number_is_none(impl, dtype, share):
    q, k, v = qkv(dtype)
    softcap = share * float(np.finfo(dtype).max)
    assert_allclose(attention(q, k, v, softcap=softcap), attention(q, k, v), rtol=0, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", REALS)
def test_a_softcap_beyond_the_range_of_the_arithmetic_is_clipped(impl, dtype):
    q, k, v = qkv(dtype)
    assert_allclose(attention(q, k, v, softcap=1e300), attention(q, k, v), rtol=0, atol=8 * np.finfo(dtype).eps)
    for softcap in (1e-300, 1e-320, 5e-324):  # every score becomes 0, or next to it
        assert_allclose(
            attention(q, k, v, softcap=softcap), np.broadcast_to(v.mean(axis=2, keepdims=True), v.shape), atol=1e-6
        )


@pytest.mark.parametrize(("dtype", "largest"), [(np.float32, 2.35e38), (np.float64, 1.24e308)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_scale_must_fit_the_arithmetic(impl, dtype, largest, sign):
    q, k, v = qkv(dtype)
    for scale in (sign * largest, np.float64(sign * largest)):
        assert_allclose(attention(0 * q, k, v, scale=scale)[0, 0, 0], v[0, 0].mean(axis=0), rtol=1e-5)
    for scale in (sign * 1.02 * largest, np.float64(sign * 1.02 * largest)):
        with pytest.raises(ValueError, match=r"^attention: scale is .*; in float\d\d it must lie between"):
            attention(0 * q, k, v, scale=scale)


def test_slopes_must_fit_the_arithmetic(impl):
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"alibi_slopes has 1e\+39; slopes must be finite in float32"):
        attention(q, k, v, causal=True, alibi_slopes=[1e39, 0])
    assert np.isfinite(attention(q, k, v, causal=True, alibi_slopes=[1e38, 0])).all()
    assert np.isfinite(attention(*qkv(np.float64), causal=True, alibi_slopes=[1e39, 0])).all()


@pytest.mark.parametrize("dtype", REALS)
def test_the_quick_way_of_a_cache_knows_the_range_too(impl, dtype):
    largest = float(np.finfo(dtype).max)
    cache, (q, k, v) = KVCache(1, 2, 8, dtype=dtype), qkv(dtype)
    cache.append(k, v)
    last = q[:, :, -1:]
    for softcap in (largest, largest / 3, largest / 5, 1e300, 1e-300):
        general = cache.attend(last, softcap=softcap, return_lse=True).out
        assert_array_equal(cache.attend(last, softcap=softcap), general)
    for scale in (largest / 1.4427 * 1.02, -largest):
        with pytest.raises(ValueError, match=r"^KVCache.attend: scale is .*; in float\d\d it must lie between"):
            cache.attend(last, scale=scale)
    assert np.isfinite(cache.attend(0 * last, scale=0.99 * largest / 1.4427)).all()


def test_integers_beyond_float64_are_out_of_range(impl):
    q, k, v = qkv(np.float64)
    with pytest.raises(ValueError, match=r"^attention: scale is inf; it must be finite"):
        attention(q, k, v, scale=10**400)
    with pytest.raises(ValueError, match=r"^attention: softcap is inf"):
        attention(q, k, v, softcap=10**400)


# ---- np.seterr ----


def rounding_calls(dtype):
    """Calls in which numbers become subnormal, 0 or Inf when results are rounded."""
    q, k, v = (1e-6 * x for x in qkv())
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    bias = np.full((5, 5), 1e-300)
    out = np.empty(q.shape, dtype)
    large, steep = (
        np.full(v.shape, 6e4, dtype),
        np.full(k.shape, 3e4, dtype) * np.linspace(-1, 1, 5, dtype=dtype)[:, None],
    )
    x, w = q[:, 0], np.eye(8, dtype=dtype)
    layer = attentile.MultiHeadAttention(w, w, w, w, num_heads=2)

    def cached():
        cache = KVCache(1, 2, 8)
        cache.append(np.full((1, 2, 3, 8), 1e-300), np.full((1, 2, 3, 8), -1e-42))
        return cache.lengths

    return {
        "attention": lambda: attention(q, k, v),
        "out": lambda: attention(q, k, v, out=out),
        "weights": lambda: attention(q, steep, large, sinks=[90.0, -90.0], return_weights=True).weights,
        "bias": lambda: attention(q, k, v, bias=bias),
        "score_mod": lambda: attention(q, k, v, score_mod=lambda s, b, h, i, j: np.full(s.shape, 1e-300)),
        "self_attention": lambda: self_attention(q, k, v, 8)[0],
        "causal_attention": lambda: causal_attention(q, k, v, 8)[0],
        "multi_head_attention": lambda: multi_head_attention(x, 8, 2, w, w, w, w),
        "layer": lambda: layer(x),
        "layer out": lambda: layer(x, out=np.empty_like(x)),
        "cache": cached,
    }


@pytest.mark.parametrize("name", rounding_calls(np.float16))
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_settings_of_numpy_change_nothing(impl, name, dtype):
    call = rounding_calls(dtype)[name]
    expected = call()
    with np.errstate(all="raise"):
        assert_array_equal(call(), expected)


# ---- score_mod ----


def test_a_score_of_minus_infinity_excludes_the_key(impl):
    q, k, v = qkv(np.float64)
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


# ---- what is no number ----

X = np.eye(4)


@pytest.mark.parametrize("wrong", ["0.5", b"1", True, np.True_, np.array(True), np.array("0.5"), np.array(1.0, object)])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_text_and_truth_are_no_numbers(impl, name, wrong):
    with pytest.raises(TypeError, match=f"^attention: {name} is .* must be a (positive )?number"):
        attention(X, X, X, **{name: wrong})


@pytest.mark.parametrize("wrong", ["2", True, np.True_])
def test_the_width_of_the_textbook_is_a_number(impl, wrong):
    with pytest.raises(TypeError, match=r"^self_attention: d_k is .*; it must be a positive number"):
        self_attention(X, X, X, wrong)


@pytest.mark.parametrize("right", [0.5, 1, np.float32(0.5), np.int8(1), np.array(0.5), np.array(1)])
def test_numbers_of_every_kind(impl, right):
    assert_array_equal(attention(X, X, X, scale=right), attention(X, X, X, scale=float(right)))
    assert_array_equal(attention(X, X, X, softcap=right), attention(X, X, X, softcap=float(right)))


CALLS_OF_INTEGERS = {
    "num_threads": lambda: attention(X, X, X, num_threads=True),
    "window": lambda: attention(X, X, X, window=(True, False)),
    "batch": lambda: KVCache(True, 1, 4),
    "num_heads": lambda: attentile.MultiHeadAttention(X, X, X, X, num_heads=True),
    "seq_len": lambda: attentile.positional_encoding(True, 4),
    "set_num_threads": lambda: attentile.set_num_threads(True),
}


@pytest.mark.parametrize("name", CALLS_OF_INTEGERS)
def test_truth_is_no_integer(name):
    with pytest.raises(TypeError, match="must be"):
        CALLS_OF_INTEGERS[name]()


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_masked_arrays_are_refused_for_their_mask_would_be_lost(impl, name):
    arrays = {"q": X, "k": X, "v": X, "mask": np.ones((4, 4), bool), "bias": X}
    arrays[name] = np.ma.array(arrays[name], mask=np.eye(4, dtype=bool))
    with pytest.raises(TypeError, match=rf"^attention: {name} is a masked array.*filled"):
        attention(**arrays)


def test_masked_arrays_are_refused_everywhere(impl):
    x = np.ma.array(np.ones((1, 2, 3, 8)), mask=False)
    cache = KVCache(1, 2, 8, rotary={})
    with pytest.raises(TypeError, match=r"^KVCache.append: k is a masked array"):
        cache.append(x, np.ones(x.shape))
    with pytest.raises(TypeError, match=r"^KVCache.attend: q is a masked array"):
        cache.attend(x)
    with pytest.raises(TypeError, match=r"^rotary_embedding: x is a masked array"):
        attentile.rotary_embedding(x)
    w = np.eye(8)
    with pytest.raises(TypeError, match=r"^MultiHeadAttention: x is a masked array"):
        attentile.MultiHeadAttention(w, w, w, w, num_heads=2)(x[0])


# ---- shapes at the edge ----


def test_no_items_and_empty_lists(impl):
    q = np.zeros((0, 2, 3, 4))
    assert attention(q, q, q, key_lengths=[]).shape == q.shape
    assert attention(q, q, q, causal=True, q_start=[]).shape == q.shape
    with pytest.raises(TypeError, match="key_lengths has dtype float64"):
        attention(X, X, X, key_lengths=1.0)


def test_biases_with_an_axis_for_the_one_head(impl):
    """Those of relative_bias and t5_bias have an axis for the heads; two-dimensional arrays have one head."""
    table = RNG.standard_normal((32, 1))
    bias = attentile.t5_bias(table, 4, 4)
    assert bias.shape == (1, 4, 4)
    assert_array_equal(attention(X, X, X, bias=bias), attention(X[None], X[None], X[None], bias=bias)[0])
    mask = np.tri(4, dtype=bool)
    assert_array_equal(attention(X, X, X, mask=mask[None]), attention(X, X, X, mask=mask))
    for wrong in (np.zeros((2, 4, 4)), np.zeros((1, 1, 4, 4)), np.zeros((1, 5, 4))):
        with pytest.raises(ValueError, match="does not broadcast"):
            attention(X, X, X, bias=wrong)


def test_the_message_about_a_mask_of_the_textbook_tells_what_was_given(impl):
    w = np.eye(4)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1, 3, 3\), which does not broadcast to \(2, 3, 3\)"):
        multi_head_attention(np.ones((2, 3, 4)), 4, 2, w, w, w, w, mask=np.ones((2, 1, 3, 3), bool))


def test_dtypes_without_a_common_one(impl):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.ones((1, 2, 3, 4))
    half, brain = x.astype(np.float16), x.astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"^attention: NumPy has no common dtype of bfloat16, float16; convert with"):
        attention(half, brain, half)
    with pytest.raises(TypeError, match=r"^merge_attention: NumPy has no common dtype"):
        attentile.merge_attention([(half, x[..., 0]), (brain, x[..., 0])])


Y = np.ones((1, 2, 3, 4), np.float32)
WRONG_KINDS = {
    "onnx scale": (lambda: onnx.attention(Y, Y, Y, scale="1"), "onnx.attention: scale is '1'; it must be a number"),
    "onnx softcap": (
        lambda: onnx.attention(Y, Y, Y, softcap="1"),
        "onnx.attention: softcap is '1'; it must be a number",
    ),
    "onnx axis": (
        lambda: onnx.tensor_scatter(Y, Y, axis=2.0),
        "onnx.tensor_scatter: axis is 2.0; it must be an integer",
    ),
    "isa": (lambda: attentile.use_backend("compiled", 5), "use_backend: isa is 5; it must be the name"),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_messages_name_the_function_and_the_argument(compiled, name):
    call, message = WRONG_KINDS[name]
    with pytest.raises(TypeError, match=f"^{message}"):
        call()
