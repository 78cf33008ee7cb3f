"""MultiHeadAttention against the formula in float64, head by head.

Every test runs on the NumPy twin and on the compiled core (fixture `either`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import dtype_of
from layer_oracle import CLOSE32, CLOSE64, SHAPES, Weights, gguf, make, neox, normal, oracle
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from attentile import AttentionResult, KVCache, MultiHeadAttention

pytestmark = pytest.mark.usefixtures("either")

Array = NDArray[Any]


@pytest.fixture(params=SHAPES)
def w(request: pytest.FixtureRequest) -> Weights:
    return make(**SHAPES[request.param])


# ---- the formula ----


def test_the_oracle_tells_heads_apart():
    w = make()
    swapped = replace(w, o=np.roll(w.o, 6, axis=0))
    assert np.abs(oracle(w, normal(5, 12)) - oracle(swapped, normal(5, 12))).max() > 0.1


def test_layer(w):
    x = normal(2, 5, w.q.shape[0])
    found = w.layer()(x)
    assert found.dtype == np.float64
    assert_allclose(found, [oracle(w, item) for item in x], **CLOSE64)


def test_causal_in_any_batch_shape(w):
    x = normal(2, 3, 4, w.q.shape[0])
    found = w.layer()(x, causal=True)
    expected = [[oracle(w, item, allowed=np.tri(4, dtype=bool)) for item in row] for row in x]
    assert_allclose(found, expected, **CLOSE64)
    assert_allclose(w.layer()(x[1, 2], causal=True), expected[1][2], **CLOSE64)


def test_fused_weight_is_the_three_side_by_side(w):
    x = normal(2, 5, w.q.shape[0])
    fused = np.concatenate([w.q, w.k, w.v], axis=1)
    bias = None if w.b_q is None else np.concatenate([w.b_q, w.b_k, w.b_v])
    layer = MultiHeadAttention(fused, None, None, w.o, num_heads=w.heads, num_kv_heads=w.kv_heads, b_q=bias, b_o=w.b_o)
    assert (layer.head_dim, layer.value_dim) == (w.layer().head_dim, w.layer().value_dim)
    assert_allclose(layer(x), [oracle(w, item) for item in x], **CLOSE64)
    other = normal(3, w.q.shape[0], seed=1)
    assert_allclose(layer(x, other), [oracle(w, item, other) for item in x], **CLOSE64)


def test_float32_and_attributes(w):
    layer = MultiHeadAttention(
        *(m.astype(np.float32) for m in w.matrices), num_heads=w.heads, num_kv_heads=w.kv_heads,
        **{name: None if b is None else b.astype(np.float32) for name, b in w.biases.items()},
    )  # fmt: skip
    x = normal(9, w.q.shape[0]).astype(np.float32)
    found = layer(x)
    assert found.dtype == np.float32
    assert_allclose(found, oracle(w, x), **CLOSE32)
    assert (layer.d_in, layer.d_out) == (w.q.shape[0], w.o.shape[1])
    assert (layer.num_heads, layer.num_kv_heads) == (w.heads, w.kv_heads)


def test_scale_of_the_layer_and_of_the_call():
    w, x = make(), normal(5, 12)
    layer = w.layer(scale=0.0)
    assert_allclose(layer(x), oracle(w, x, scale=0.0), **CLOSE64)
    assert_allclose(layer(x, scale=2), oracle(w, x, scale=2.0), **CLOSE64)
    assert_allclose(w.layer(scale=2)(x), oracle(w, x, scale=2.0), **CLOSE64)


def test_options_reach_attention():
    w, x = make(kv_heads=2), normal(6, 12)
    layer, i, j = w.layer(), np.arange(6)[:, None], np.arange(6)
    mask = normal(6, 6, seed=3) > -0.5
    for options, allowed in (
        (dict(mask=mask), mask),
        (dict(bias=np.where(mask, 0, -np.inf)), mask),
        (dict(window=(1, 2)), (j >= i - 1) & (j <= i + 2)),
        (dict(key_lengths=4), np.broadcast_to(j < 4, (6, 6))),
        (dict(causal=True, prefix_lengths=3), (j <= i) | (j < 3)),
        (dict(segments=[0, 0, 1, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 2])[:, None] == [0, 0, 1, 1, 1, 2]),
    ):
        assert_allclose(layer(x, num_threads=1, **options), oracle(w, x, allowed=allowed), **CLOSE64)


def test_lse_and_weights():
    w, x = make(kv_heads=2, value_width=3), normal(2, 5, 12)
    result = w.layer()(x, return_lse=True, return_weights=True)
    assert isinstance(result, AttentionResult)
    assert result.lse.shape == (2, 4, 5)
    assert result.weights.shape == (2, 4, 5, 5)
    assert_allclose(result.weights.sum(axis=-1), np.ones((2, 4, 5)), **CLOSE64)
    assert_array_equal(result.out, w.layer()(x))
    only = w.layer()(x, return_lse=True)
    assert only.weights is None
    assert_array_equal(only.lse, result.lse)


# ---- cross attention ----


@pytest.mark.parametrize("fused", [False, True])
def test_context(fused):
    w = make(heads=4, kv_heads=2, d_context=None if fused else 5)
    layer = w.layer()
    if fused:
        both = np.concatenate([w.q, w.k, w.v], axis=1)
        bias = np.concatenate([w.b_q, w.b_k, w.b_v])
        layer = MultiHeadAttention(both, None, None, w.o, num_heads=4, num_kv_heads=2, b_q=bias, b_o=w.b_o)
    x, context = normal(3, 4, 12), normal(7, layer.d_context, seed=1)
    expected = [oracle(w, item, context) for item in x]
    assert_allclose(layer(x, context), expected, **CLOSE64)  # one context for all
    each = np.stack([context, context[::-1], context + 1])
    assert_allclose(layer(x, each)[2], oracle(w, x[2], context + 1), **CLOSE64)
    assert_allclose(layer(x[0], each)[2], oracle(w, x[0], context + 1), **CLOSE64)
    k, v = layer.keys_values(context)
    assert (k.shape, v.shape) == ((2, 7, 6), (2, 7, 6))
    assert_allclose(layer(x, (k, v)), expected, **CLOSE64)
    assert_allclose(layer(x, context=(k, v), key_lengths=5), [oracle(w, item, context[:5]) for item in x], **CLOSE64)


def test_context_of_a_weight_per_head():
    w = make()
    layer = MultiHeadAttention.from_arrays(neox(w), num_heads=4)
    x, context = normal(4, 12), normal(7, 12, seed=1)
    assert_allclose(layer(x, context), oracle(w, x, context), **CLOSE64)
    assert_allclose(layer(x, layer.keys_values(context)), oracle(w, x, context), **CLOSE64)


# ---- rotary ----


@pytest.mark.parametrize("rotary", [{}, {"base": 500.0}, {"interleaved": True}])
def test_rotary(rotary):
    w, x = make(kv_heads=2), normal(2, 5, 12)
    layer = w.layer(rotary=rotary)
    expected = [oracle(w, item, rotary=rotary, allowed=np.tri(5, dtype=bool)) for item in x]
    assert_allclose(layer(x, causal=True), expected, **CLOSE64)
    assert_allclose(layer(x, causal=True, positions=1000), expected, rtol=0, atol=1e-12)  # only differences count
    assert np.abs(w.layer()(x, causal=True) - expected).max() > 0.05


def test_rotary_at_given_positions():
    w, x = make(), normal(2, 5, 12)
    positions = np.array([[0, 1, 2, 0, 1], [7, 3, 30, 4, 5]])
    layer = w.layer(rotary={})
    expected = [oracle(w, item, rotary={}, positions=at) for item, at in zip(x, positions, strict=True)]
    assert_allclose(layer(x, positions=positions), expected, **CLOSE64)
    assert_allclose(layer(x, positions=positions[1])[1], expected[1], **CLOSE64)


def test_rotary_options_are_copied():
    given = {"base": 50.0}
    layer = make().layer(rotary=given)
    given["base"] = 70.0
    assert layer.rotary == {"base": 50.0}


# ---- with a cache ----


def cache_for(layer: MultiHeadAttention, batch: int, **options: Any) -> KVCache:
    return KVCache(
        batch, layer.num_kv_heads, layer.head_dim, value_dim=layer.value_dim, **{"dtype": "float64", **options}
    )


@pytest.mark.parametrize("rotates", ["nobody", "the layer", "the cache", "equal options"])
def test_steps_are_the_rows_of_the_whole(w, rotates):
    if rotates != "nobody" and w.q.shape[1] // w.heads % 2:
        w = make(d_in=w.q.shape[0], heads=w.heads, kv_heads=w.kv_heads, width=4)
    rotary = {"base": 300.0}
    of_layer = rotary if rotates in ("the layer", "equal options") else None
    of_cache = dict(rotary) if rotates in ("the cache", "equal options") else None
    layer = w.layer(rotary=of_layer)
    x = normal(2, 9, w.q.shape[0])
    shape = np.tri(9, dtype=bool)
    expected = [oracle(w, item, allowed=shape, rotary=None if rotates == "nobody" else rotary) for item in x]
    cache = cache_for(layer, 2, rotary=of_cache)
    parts = [layer(x[:, :4], cache=cache), layer(x[:, 4:5], cache=cache), layer(x[:, 5:7], cache=cache)]
    parts += [layer(x[:, 7:8], cache=cache), layer(x[:, 8:9], cache=cache)]
    assert_allclose(np.concatenate(parts, axis=1), expected, rtol=0, atol=4e-14)
    assert cache.length == 9


def test_cache_of_one_item_takes_two_axes():
    w, x = make(value_width=3), normal(6, 12)
    layer = w.layer(rotary={})
    cache = cache_for(layer, 1)
    first = layer(x[:4], cache=cache)
    result = layer(x[4:], cache=cache, return_lse=True, return_weights=True)
    expected = oracle(w, x, rotary={}, allowed=np.tri(6, dtype=bool))
    assert_allclose(np.concatenate([first, result.out]), expected, **CLOSE64)
    assert (result.lse.shape, result.weights.shape) == ((4, 2), (4, 2, 6))
    out = np.full((2, 12), np.nan)
    assert layer(x[4:], cache=cache, out=out) is out
    assert np.isfinite(out).all()


@pytest.mark.parametrize("rotates", ["the layer", "the cache"])
def test_ragged_items(rotates):
    w = make(kv_heads=2)
    layer = w.layer(rotary={} if rotates == "the layer" else None)
    cache = cache_for(layer, 3, rotary={} if rotates == "the cache" else None)
    rows: list[list[Array]] = [[], [], []]  # of each item, as they came in
    found: list[list[Array]] = [[], [], []]
    for seed, lengths in enumerate([(5, 2, 4), (3, 1, 0), (1, 1, 1), (0, 4, 2)]):
        x = normal(3, max(lengths), 12, seed=seed)
        given = x.copy()
        for item, n in enumerate(lengths):
            given[item, n:] = np.nan  # padding is never used
        out = layer(given, cache=cache, lengths=None if seed == 2 else lengths)
        for item, n in enumerate(lengths):
            rows[item].append(x[item, :n])
            found[item].append(out[item, :n])
    for item in range(3):
        whole = np.concatenate(rows[item])
        expected = oracle(w, whole, rotary={}, allowed=np.tri(len(whole), dtype=bool))
        assert_allclose(np.concatenate(found[item]), expected, **CLOSE64)


def test_cache_takes_options_of_attention():
    w, x = make(), normal(1, 5, 12)
    layer = w.layer()
    everything = layer(x, cache=cache_for(layer, 1), causal=False)
    assert_allclose(everything[0], oracle(w, x[0]), **CLOSE64)
    scaled = w.layer(scale=2.0)
    found = scaled(x, cache=cache_for(layer, 1), causal=False)
    assert_allclose(found[0], oracle(w, x[0], scale=2.0), **CLOSE64)


def test_a_failed_call_leaves_the_cache_as_it_was():
    w, x = make(), normal(2, 6, 12)
    layer = w.layer()
    cache = cache_for(layer, 2)
    layer(x[:, :3], cache=cache)
    for wrong in (dict(mask=np.ones((9, 9, 9), bool)), dict(scale=np.nan), dict(softcap=-1), dict(causl=True)):
        with pytest.raises((ValueError, TypeError)):
            layer(x[:, 3:], cache=cache, **wrong)
        assert cache.lengths.tolist() == [3, 3]
    with pytest.raises(ValueError, match="out has shape"):
        layer(x[:, 3:], cache=cache, out=np.empty((2, 6, 12)))
    assert cache.lengths.tolist() == [3, 3]
    rest = layer(x[:, 3:], cache=cache)
    assert_allclose(rest[1], oracle(w, x[1], allowed=np.tri(6, dtype=bool))[3:], **CLOSE64)


# ---- dtypes, memory, empty axes ----


def test_dtypes():
    w = make()
    x = normal(3, 12)
    half = MultiHeadAttention(*(m.astype(np.float16) for m in w.matrices), num_heads=4)
    single = MultiHeadAttention(*(m.astype(np.float32) for m in w.matrices), num_heads=4)
    assert half(x.astype(np.float16)).dtype == np.float16
    assert half(x.astype(np.float32)).dtype == np.float32
    assert half(x).dtype == np.float64
    assert single(x.astype(np.float16)).dtype == np.float32
    assert single(np.ones((3, 12), int)).dtype == np.float64
    assert single(x.astype(np.float32), x[:2]).dtype == np.float64
    assert [array.dtype for array in half.keys_values(x.astype(np.float16))] == [np.float16] * 2
    exact = half(x.astype(np.float16).astype(np.float32))
    result = half(x.astype(np.float16), return_weights=True)
    assert_array_equal(result.out, exact.astype(np.float16))  # computed in float32, rounded once
    assert result.weights.dtype == np.float16
    integers = MultiHeadAttention(*[np.eye(4, dtype=int)] * 4, num_heads=2)
    assert_array_equal(integers(np.ones((3, 4), bool)), np.ones((3, 4)))


def test_bfloat16():
    bfloat16 = dtype_of("bfloat16")
    w, x = make(), normal(2, 3, 12).astype(bfloat16)
    layer = MultiHeadAttention.from_arrays(
        {name: array.astype(bfloat16) for name, array in gguf(w).items()}, num_heads=4, rotary={}
    )
    found = layer(x)
    assert found.dtype == bfloat16
    assert_array_equal(found, layer(x.astype(np.float32)).astype(bfloat16))


def test_strides_and_read_only_inputs():
    w, x = make(kv_heads=2), normal(2, 5, 12)
    layer, expected = w.layer(), w.layer()(x)
    strange = np.asfortranarray(x)[::-1][::-1]
    strange.flags.writeable = False
    wide = np.repeat(x, 2, axis=-1)[..., ::2]
    swapped = x.astype(">f8")
    before = wide.copy()
    for array in (strange, wide, swapped, x.tolist()):
        found = layer(array, causal=False)
        assert found.dtype == np.float64
        assert_allclose(found, expected, **CLOSE64)
    assert_array_equal(wide, before)
    odd = MultiHeadAttention(
        *(np.repeat(m, 2, axis=1)[:, ::2] for m in w.matrices), num_heads=4, num_kv_heads=2, **w.biases
    )
    assert_allclose(odd(x), expected, **CLOSE64)


def test_inputs_are_not_modified():
    w, x = make(), normal(1, 5, 12)
    layer = w.layer(rotary={})
    copies = [x.copy(), *(array.copy() for array in layer._heads.project.arrays)]
    plain, pair = w.layer(), w.layer().keys_values(x)
    pair_copies = [array.copy() for array in pair]
    layer(x, causal=True)
    layer(x, cache=cache_for(layer, 1))
    plain(x, pair)
    for array, copy in zip([x, *layer._heads.project.arrays, *pair], [*copies, *pair_copies], strict=True):
        assert_array_equal(array, copy)


def test_out():
    w, x = make(d_out=5), normal(2, 4, 12)
    layer = w.layer()
    wide = np.full((2, 4, 10), np.nan)
    assert layer(x, out=wide[..., ::2]) is not None
    assert_array_equal(wide[..., ::2], layer(x))
    assert np.isnan(wide[..., 1::2]).all()
    square = make().layer()
    expected = square(x)
    assert_array_equal(square(x, out=x), expected)  # out may be x
    assert_array_equal(x, expected)


@pytest.mark.parametrize("shape", [(0, 3, 12), (2, 0, 12), (0, 12), (0, 0, 12)])
def test_empty_axes(shape):
    w = make(kv_heads=2)
    for layer in (w.layer(rotary={}), MultiHeadAttention.from_arrays(neox(w), num_heads=4, num_kv_heads=2)):
        assert layer(np.empty(shape)).shape == shape


@pytest.mark.parametrize(("batch", "rows"), [(0, 3), (2, 0), (0, 0)])
def test_empty_axes_with_a_cache(batch, rows):
    layer = make(kv_heads=2).layer(rotary={})
    for rotates in (None, {}):
        cache = cache_for(layer, batch, rotary=rotates)
        assert layer(np.empty((batch, rows, 12)), cache=cache).shape == (batch, rows, 12)
        assert cache.lengths.tolist() == [rows] * batch


def test_no_key_gives_the_bias_of_the_output():
    w = make()
    assert_array_equal(w.layer()(normal(3, 12), np.empty((0, 12))), np.tile(w.b_o, (3, 1)))


def test_repr():
    assert repr(make().layer()) == "MultiHeadAttention(d_in=12, d_out=12, num_heads=4, head_dim=6)"
    w = make(kv_heads=2, value_width=3, d_context=5)
    assert repr(w.layer(rotary=None)) == (
        "MultiHeadAttention(d_in=12, d_context=5, d_out=12, num_heads=4, num_kv_heads=2, head_dim=6, value_dim=3)"
    )


# ---- errors ----

EYE = np.eye(4)
FUSED, WIDER, NOT = np.ones((4, 12)), np.ones((4, 20)), None


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, "num_heads is 0", [EYE] * 4, dict(num_heads=0)),
        (TypeError, "num_kv_heads is 1.5", [EYE] * 4, dict(num_heads=2, num_kv_heads=1.5)),
        (ValueError, "num_heads is 4 and num_kv_heads is 3", [EYE] * 4, dict(num_heads=4, num_kv_heads=3)),
        (ValueError, r"w_q has shape \(4,\)", [EYE[0], EYE, EYE, EYE], dict(num_heads=2)),
        (ValueError, r"w_o has shape \(0, 4\)", [EYE, EYE, EYE, EYE[:0]], dict(num_heads=2)),
        (ValueError, "w_q has 4 columns; it must be a multiple of", [EYE] * 3 + [np.eye(3)], dict(num_heads=3)),
        (ValueError, "w_o has 4 rows; it must be a multiple of num_heads = 3", [EYE] * 4, dict(num_heads=3)),
        (ValueError, "w_k has 4 columns; it must have 2", [EYE] * 4, dict(num_heads=4, num_kv_heads=2)),
        (ValueError, "w_v has 2 columns; it must have 4", [EYE, EYE, EYE[:, :2], EYE], dict(num_heads=4)),
        (ValueError, "w_k and w_v project the same rows", [EYE, EYE, EYE[:2], EYE], dict(num_heads=4)),
        (ValueError, "give w_k and w_v, or neither", [EYE, NOT, EYE, EYE], dict(num_heads=4)),
        (ValueError, "the fused weight w_q has shape", [EYE, NOT, NOT, EYE], dict(num_heads=4)),
        (ValueError, r"6 \* head_dim \+ 2 columns", [WIDER[:, :9], NOT, NOT, EYE], dict(num_heads=4, num_kv_heads=2)),
        (ValueError, "leave b_k and b_v out", [FUSED, NOT, NOT, EYE], dict(num_heads=4, b_k=EYE[0])),
        (ValueError, r"b_q has shape \(4,\); .* \(12,\)", [FUSED, NOT, NOT, EYE], dict(num_heads=4, b_q=EYE[0])),
        (ValueError, r"b_v has shape \(3,\); it must be \(4,\)", [EYE] * 4, dict(num_heads=2, b_v=EYE[0, :3])),
        (ValueError, r"b_o has shape \(\); it must be \(4,\)", [EYE] * 4, dict(num_heads=2, b_o=1.0)),
        (ValueError, "layout='per_head' is for a fused weight", [EYE] * 4, dict(num_heads=2, layout="per_head")),
        (ValueError, "needs values as wide as keys", [WIDER, NOT, NOT, EYE], dict(num_heads=4, layout="per_head")),
        (ValueError, "layout is 'heads'; it must be one of side_by_side, per_head, codegen", [FUSED, NOT, NOT, EYE],
         dict(num_heads=4, layout="heads")),
        (ValueError, "layout='codegen' has 4 groups; num_kv_heads must be a multiple of that and is 2",
         [FUSED, NOT, NOT, EYE], dict(num_heads=2, layout="codegen")),
        (TypeError, "scale is 'x'", [EYE] * 4, dict(num_heads=2, scale="x")),
        (ValueError, "scale is inf", [EYE] * 4, dict(num_heads=2, scale=np.inf)),
        (TypeError, "rotary is True; it must be a dict", [EYE] * 4, dict(num_heads=2, rotary=True)),
        (TypeError, "the unknown key 'theta'; known are base,", [EYE] * 4, dict(num_heads=2, rotary={"theta": 1e4})),
        (TypeError, "complex128", [EYE, EYE, EYE * 1j, EYE], dict(num_heads=2)),
    ],
)  # fmt: skip
def test_errors_of_the_constructor(error, message, arguments, options):
    with pytest.raises(error, match=message) as caught:
        MultiHeadAttention(*arguments, **options)
    assert str(caught.value).startswith("MultiHeadAttention: ")


def test_rotary_options_are_checked_with_the_width_of_the_heads():
    with pytest.raises(ValueError, match="rotary_embedding: "):
        MultiHeadAttention(*[np.eye(6)] * 4, num_heads=2, rotary={})


X = np.ones((2, 3, 4))


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, r"x has shape \(4,\)", dict(x=X[0, 0])),
        (ValueError, r"x has shape \(2, 3, 3\); it must be \(..., rows, 4\)", dict(x=X[..., :3])),
        (TypeError, "complex128", dict(x=X * 1j)),
        (ValueError, r"context has shape \(3, 2\); it must be \(..., rows, 4\)", dict(context=X[0, :, :2])),
        (ValueError, "context is a tuple of 3", dict(context=(X, X, X))),
        (ValueError, r"v of context has shape \(2, 3, 4\); it must be \(..., 2, S, 2\)", dict(context=(X[..., :2], X))),
        (ValueError, r"do not broadcast \(\(2, 3, 4\) and \(5, 3, 4\)\)", dict(context=np.ones((5, 3, 4)))),
        (ValueError, "positions are for a layer with rotary", dict(positions=3)),
        (ValueError, "lengths go with a cache; without one give key_lengths", dict(lengths=[1, 2])),
        (TypeError, "unknown option 'casual'; known are alibi_slopes, before, bias, causal", dict(casual=True)),
        (TypeError, "cache is a dict; it must be a KVCache", dict(cache={})),
        (ValueError, "cache holds the keys of x", dict(cache=KVCache(2, 2, 2), context=X)),
        (ValueError, "with a cache it must be", dict(cache=KVCache(2, 2, 2), x=X[None])),
        (TypeError, "out is a list", dict(out=[])),
        (ValueError, r"out has shape \(2, 3, 3\) and dtype float64; they must be \(2, 3, 4\)", dict(out=X[..., :3])),
        (ValueError, "out has shape .* and dtype float32", dict(out=X.astype(np.float32))),
        (ValueError, "out is read-only", dict(out=np.broadcast_to(1.0, (2, 3, 4)))),
    ],
)
def test_errors_of_the_call(error, message, options):
    layer = MultiHeadAttention(*[EYE] * 4, num_heads=2)
    options = {"x": X, **options}
    with pytest.raises(error, match=message) as caught:
        layer(options.pop("x"), **options)
    assert str(caught.value).startswith("MultiHeadAttention: ")


def test_errors_of_rotary_in_the_call():
    layer = MultiHeadAttention(*[EYE] * 4, num_heads=2, rotary={"base": 100.0})
    with pytest.raises(ValueError, match="context and rotary do not go together"):
        layer(X, X)
    with pytest.raises(ValueError, match=r"the layer has rotary=.* and the cache rotary="):
        layer(X, cache=KVCache(2, 2, 2, rotary={"base": 200.0}))
    with pytest.raises(ValueError, match="the cache turns keys at its own positions"):
        layer(X, cache=KVCache(2, 2, 2, rotary={"base": 100.0}), positions=3)
    tables = {"cos": np.ones((9, 1)), "sin": np.zeros((9, 1))}
    layer = MultiHeadAttention(*[EYE] * 4, num_heads=2, rotary=tables)
    cache = KVCache(2, 2, 2, rotary={"cos": np.ones((9, 1)), "sin": np.ones((9, 1))})
    with pytest.raises(ValueError, match="the layer has rotary="):
        layer(X, cache=cache)


def test_context_that_every_call_needs():
    layer = MultiHeadAttention(EYE, np.ones((6, 4)), np.ones((6, 4)), EYE, num_heads=2)
    with pytest.raises(ValueError, match=r"context is missing; w_k and w_v project rows of width 6, x has width 4"):
        layer(X)
    with pytest.raises(ValueError, match=r"context has shape \(2, 3, 4\)"):
        layer.keys_values(X)


def test_cache_of_another_shape():
    layer = MultiHeadAttention(*[EYE] * 4, num_heads=2)
    with pytest.raises(ValueError, match=r"KVCache\.append: k"):
        layer(X, cache=KVCache(3, 2, 2))


def test_a_layer_of_one_value_width_shows_it():
    layer = MultiHeadAttention(normal(6, 8), normal(6, 8), normal(6, 4), normal(4, 5), num_heads=2)
    assert repr(layer) == "MultiHeadAttention(d_in=6, d_out=5, num_heads=2, head_dim=4, value_dim=2)"


def test_positions_for_a_layer_with_rotary_and_a_cache():
    """The layer's rotary, the cache has none, and the caller places the rows."""
    x = normal(2, 5, 8)
    layer = MultiHeadAttention(*(normal(8, 8, seed=n) for n in range(4)), num_heads=2, rotary={})
    whole, cache = layer(x, causal=True, positions=np.arange(40, 45)), KVCache(2, 2, 4, dtype="float64")
    rows = [layer(x[:, i : i + 1], cache=cache, positions=np.full((2, 1), 40 + i)) for i in range(5)]
    assert_allclose(np.concatenate(rows, axis=1), whole, rtol=0, atol=1e-12)
