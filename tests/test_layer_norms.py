"""Norms of queries and keys in MultiHeadAttention, and what a layer has by default: scale and sinks.

Every test runs on the NumPy twin and on the compiled core (fixture `either`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_oracle import CLOSE32, CLOSE64, Weights, make, normal, oracle, rotated
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from attentile import KVCache, MultiHeadAttention

pytestmark = pytest.mark.usefixtures("either")

Array = NDArray[Any]

KINDS = ("rms", "rms_plus_one", "layer")
HEADS = {"q": 4, "k": 2}


def of_row(x: Array, kind: str, eps: float, weight: Any = None, bias: Any = None) -> Array:
    """The norm of one vector."""
    if kind == "layer":
        x = x - sum(x) / len(x)
    x = x / np.sqrt(sum(x * x) / len(x) + eps)
    if weight is not None:
        x = x * (1 + weight if kind == "rms_plus_one" else weight)
    return x if bias is None else x + bias


def weights(kind: str, over: str) -> dict[str, Array]:
    """q_norm and so on; over: "head", "each head" or "all heads"."""
    found = {}
    for seed, part in enumerate("qk"):
        shape = {"head": (6,), "each head": (HEADS[part], 6), "all heads": (HEADS[part] * 6,)}[over]
        found[f"{part}_norm"] = normal(*shape, seed=seed + 10)
        if kind == "layer":
            found[f"b_{part}_norm"] = normal(*shape, seed=seed + 20)
    return found


def normalised(x: Array, part: str, kind: str, given: dict[str, Array]) -> Array:
    """The formula for x (L, heads * 6), with eps = 0.01."""
    w, b = given.get(f"{part}_norm"), given.get(f"b_{part}_norm")
    if w is not None and w.shape == (x.shape[1],):
        return np.array([of_row(row, kind, 0.01, w, b) for row in x])
    each = [None if array is None else np.broadcast_to(array, (HEADS[part], 6)) for array in (w, b)]
    out = np.empty_like(x)
    for head in range(HEADS[part]):
        at = slice(6 * head, 6 * head + 6)
        mine = [None if array is None else array[head] for array in each]
        out[:, at] = [of_row(row, kind, 0.01, *mine) for row in x[:, at]]
    return out


def expected(w: Weights, x: Array, kind: str, given: dict[str, Array], late: bool = False, **options: Any) -> Array:
    """The layer by weights that leave q and k as they are, so that the oracle sees normalised ones."""
    rotary = options.pop("rotary", None)
    source = options.pop("context", x)
    parts = {"q": x @ w.q + w.b_q, "k": source @ w.k + w.b_k}
    for part, value in parts.items():
        if not late:
            value = normalised(value, part, kind, given)
        if rotary is not None:
            each = [rotated(value[:, 6 * h : 6 * h + 6], np.arange(len(value)), **rotary) for h in range(HEADS[part])]
            value = np.concatenate(each, axis=1)
        parts[part] = normalised(value, part, kind, given) if late else value
    return oracle(w, x, source, projected=(parts["q"], parts["k"]), **options)


def layer_of(w: Weights, kind: str, given: dict[str, Array], late: bool = False, **options: Any) -> MultiHeadAttention:
    norm = {"kind": kind, "eps": 0.01, "after_rotary": late, "values": options.pop("values", False)}
    return w.layer(norm=norm, **given, **options)


@pytest.mark.parametrize("order", ["no rotation", "before", "after"])
@pytest.mark.parametrize("over", ["head", "each head", "all heads", "no weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_norms(kind, over, order):
    w, x = make(kv_heads=2), normal(2, 5, 12)
    given = {} if over == "no weight" else weights(kind, over)
    rotary = None if order == "no rotation" else {"base": 50.0}
    layer = layer_of(w, kind, given, order == "after", rotary=rotary)
    want = [expected(w, item, kind, given, order == "after", rotary=rotary) for item in x]
    assert_allclose(layer(x), want, **CLOSE64)


def test_the_oracle_tells_norms_apart():
    w, x = make(kv_heads=2), normal(5, 12)
    found = [
        expected(w, x, kind, weights(kind, over), late, rotary={"base": 50.0})
        for kind in KINDS
        for over in ("head", "each head", "all heads")
        for late in (False, True)
    ]
    apart = [np.abs(one - other).max() for n, one in enumerate(found) for other in found[:n]]
    assert min(apart) > 1e-3


@pytest.mark.parametrize("over", ["head", "all heads"])
@pytest.mark.parametrize("rotates", ["the layer", "the layer, then the norm", "the cache"])
def test_steps_are_the_rows_of_the_whole(rotates, over):
    w, x = make(kv_heads=2), normal(1, 7, 12)
    given, late, rotary = weights("rms", over), rotates.endswith("norm"), {"base": 50.0}
    layer = layer_of(w, "rms", given, late, rotary=None if rotates == "the cache" else rotary)
    cache = KVCache(1, 2, 6, dtype="float64", rotary=rotary if rotates == "the cache" else None)
    steps = [layer(x[:, at], cache=cache) for at in (slice(0, 4), slice(4, 5), slice(5, 7))]
    want = expected(w, x[0], "rms", given, late, rotary=rotary, allowed=np.tri(7, dtype=bool))
    assert_allclose(np.concatenate(steps, axis=1)[0], want, **CLOSE64)


def test_context():
    w, x, context = make(kv_heads=2), normal(3, 12), normal(6, 12, seed=1)
    for late in (False, True):  # nothing is rotated, so the order is the same
        given = weights("layer", "head")
        layer = layer_of(w, "layer", given, late)
        want = expected(w, x, "layer", given, context=context)
        assert_allclose(layer(x, context), want, **CLOSE64)
        assert_allclose(layer(x, layer.keys_values(context)), want, **CLOSE64)


def test_values_are_normalised_without_a_weight():
    w, x = make(kv_heads=2), normal(5, 12)
    given = weights("rms", "head")
    layer, plain = layer_of(w, "rms", given, values=True), layer_of(w, "rms", given)
    _, v = plain.keys_values(x)
    k, found = layer.keys_values(x)
    assert_allclose(found, v / np.sqrt((v * v).mean(axis=-1, keepdims=True) + 0.01), **CLOSE64)
    assert_allclose(layer(x), plain(x, (k, found)), **CLOSE64)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_dtypes(dtype):
    w, x = make(kv_heads=2), normal(5, 12).astype(dtype)
    given = {name: array.astype(dtype) for name, array in weights("layer", "each head").items()}
    matrices = [matrix.astype(dtype) for matrix in w.matrices]
    biases = {name: bias.astype(dtype) for name, bias in w.biases.items()}
    narrow = Weights(*matrices, *biases.values(), 4, 2)
    layer = layer_of(narrow, "layer", given)
    wide = Weights(*(m.astype(float) for m in matrices), *(b.astype(float) for b in biases.values()), 4, 2)
    want = expected(wide, x.astype(float), "layer", {name: array.astype(float) for name, array in given.items()})
    with np.errstate(all="raise"):
        found = layer(x)
    assert found.dtype == dtype
    assert_allclose(found, want, **(CLOSE32 if dtype is np.float32 else dict(rtol=2e-3, atol=2e-3)))


def test_settings_of_numpy_change_nothing():
    w = make(kv_heads=2)
    layer = w.layer(norm={"kind": "rms", "eps": 0.0})
    with np.errstate(all="raise"):
        assert np.isfinite(layer(np.full((2, 12), 1e200))).all()  # their squares overflow
        assert np.isnan(layer(np.full((2, 12), np.inf))).all()


def test_the_layer_tells_its_norm():
    layer = make(kv_heads=2).layer(norm={"kind": "rms", "eps": 1e-6}, scale=0.5)
    assert layer.norm == {"kind": "rms", "eps": 1e-6, "after_rotary": False, "values": False}
    assert repr(layer).endswith(
        "scale=0.5, norm={'kind': 'rms', 'eps': 1e-06, 'after_rotary': False, 'values': False})"
    )
    assert make().layer().norm is None


NORM = {"kind": "rms", "eps": 1e-6}
ROW = np.ones(6)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "norm is 'rms'; it must be a dict with the keys kind, eps, after_rotary, values", dict(norm="rms")),
        (TypeError, "norm has the unknown key 'weight'", dict(norm={**NORM, "weight": ROW})),
        (ValueError, "norm lacks 'kind' and 'eps', for which models differ", dict(norm={})),
        (ValueError, "norm lacks 'eps'", dict(norm={"kind": "rms"})),
        (ValueError, r"norm\['kind'\] is 'RMS'; it must be one of rms, rms_plus_one, layer",
         dict(norm={**NORM, "kind": "RMS"})),
        (ValueError, r"norm\['eps'\] is -1.0; it must be finite and at least 0", dict(norm={**NORM, "eps": -1.0})),
        (TypeError, r"norm\['values'\] is 1; it must be True or False", dict(norm={**NORM, "values": 1})),
        (ValueError, "q_norm and k_norm need norm=, such as", dict(q_norm=ROW, k_norm=ROW)),
        (ValueError, "give q_norm and k_norm, and biases of both or neither", dict(norm=NORM, q_norm=ROW)),
        (ValueError, r"k_norm has shape \(5,\); it must be \(6,\) or \(2, 6\) for .* or \(12,\) for",
         dict(norm=NORM, q_norm=ROW, k_norm=ROW[:5])),
        (ValueError, r"b_q_norm is for norm\['kind'\] 'layer', and goes with q_norm",
         dict(norm=NORM, q_norm=ROW, k_norm=ROW, b_q_norm=ROW, b_k_norm=ROW)),
        (ValueError, "q_norm and b_q_norm have different shapes",
         dict(norm={**NORM, "kind": "layer"}, q_norm=ROW, k_norm=ROW, b_q_norm=np.ones(24), b_k_norm=ROW)),
        (TypeError, "k_norm is a masked array", dict(norm=NORM, q_norm=ROW, k_norm=np.ma.array(ROW, mask=ROW > 0))),
        (TypeError, "sinks is a masked array", dict(sinks=np.ma.array(ROW[:4], mask=False))),
        (TypeError, "complex128", dict(norm=NORM, q_norm=ROW * 1j, k_norm=ROW)),
        (ValueError, r"sinks has shape \(2,\); it must be \(4,\), one per query head", dict(sinks=[0.0, 1.0])),
    ],
)  # fmt: skip
def test_errors(error, message, options):
    with pytest.raises(error, match=message) as caught:
        make(kv_heads=2).layer(**options)
    assert str(caught.value).startswith("MultiHeadAttention: ")


def test_a_norm_after_the_rotation_is_for_a_layer_that_rotates():
    layer = make(kv_heads=2).layer(norm={**NORM, "after_rotary": True}, rotary={})
    cache = KVCache(1, 2, 6, dtype="float64", rotary={})
    with pytest.raises(ValueError, match="the layer normalises rotated queries and keys, and the cache rotates after"):
        layer(normal(3, 12), cache=cache)
    assert cache.length == 0


# ---- what the layer has, and the call may say otherwise ----


def test_none_in_a_call_means_the_layers_own():
    w, x, sinks = make(kv_heads=2), normal(5, 12), normal(4, seed=2)
    layer = w.layer(scale=1.0, sinks=sinks)
    want = w.layer()(x, scale=1.0, sinks=sinks)
    for options in ({}, {"scale": None}, {"sinks": None}, {"scale": None, "sinks": None}):
        assert_array_equal(layer(x, **options), want)
        cache = KVCache(1, 2, 6, dtype="float64")
        assert_allclose(layer(x, cache=cache, causal=False, **options), want, **CLOSE64)
    assert_array_equal(layer(x, scale=0.3), w.layer()(x, scale=0.3, sinks=sinks))
    assert_array_equal(layer(x, sinks=-sinks), w.layer()(x, scale=1.0, sinks=-sinks))


def test_every_option_may_be_passed_on_with_its_default():
    """A wrapper that passes on what it was not given changes nothing."""
    from attentile.attention import OPTIONS

    w, x = make(kv_heads=2), normal(5, 12)
    layer = w.layer(scale=1.0, sinks=normal(4, seed=2), rotary={}, norm=NORM)
    defaults = {name: value for name, value in OPTIONS.items() if name != "out"}
    assert_array_equal(layer(x, None, positions=None, cache=None, lengths=None, out=None, **defaults), layer(x))
    for name, value in defaults.items():
        assert_array_equal(layer(x, **{name: value}), layer(x))
