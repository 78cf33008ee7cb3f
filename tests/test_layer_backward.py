"""Gradients of MultiHeadAttention and of the textbook functions, against central differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import same_bits
from layer_oracle import make, normal
from numpy.testing import assert_allclose, assert_array_equal
from test_layer_norms import KINDS, weights

from attentile import MultiHeadAttention, attention_vjp, causal_attention, multi_head_attention, self_attention

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.usefixtures("either")


def by_differences(loss: Any, arrays: dict[str, Array], gradients: dict[str, Any]) -> None:
    """Each gradient along two random directions of its argument."""
    for i, (name, array) in enumerate(arrays.items()):
        for seed in (i, i + 50):
            direction = normal(*array.shape, seed=seed)
            up, down = (loss(**{**arrays, name: array + e * direction}) for e in (1e-5, -1e-5))
            slope = float((gradients[name] * direction).sum())
            assert abs((up - down) / 2e-5 - slope) <= 1e-7 * max(1.0, float(np.abs(gradients[name]).sum())), name


def check(arrays: dict[str, Array], call: dict[str, Array], options: dict[str, Any], **constructor: Any) -> None:
    """A layer by these arrays, called with those of `call`."""

    def layer(**given: Array) -> MultiHeadAttention:
        matrices = [given.pop(f"w_{name}", None) for name in "qkvo"]
        return MultiHeadAttention(*matrices, **given, **constructor)

    def loss(**given: Array) -> float:
        mine = {name: given.pop(name) for name in call}
        return float((np.asarray(layer(**given)(**mine, **options)) * dout).sum())

    out, vjp = layer(**arrays).vjp(**call, **options)
    same_bits(out, layer(**arrays)(**call, **options))
    dout = normal(*out.shape, seed=99)
    gradients = vjp(dout)
    every = {**arrays, **call}
    assert gradients.keys() == every.keys()
    assert {name: array.shape for name, array in gradients.items()} == {n: x.shape for n, x in every.items()}
    by_differences(loss, every, gradients)


def arrays_of(bias: bool = True, **sizes: Any) -> dict[str, Array]:
    w = make(kv_heads=2, bias=bias, **sizes)
    found = dict(zip(("w_q", "w_k", "w_v", "w_o"), w.matrices, strict=True))
    return found | {name: array for name, array in w.biases.items() if array is not None}


ITEMS = {"x": normal(2, 5, 12)}
OPTIONS = {"num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": np.tri(5, dtype=bool), "softcap": 2.0, "scale": 0.4}]
)
@pytest.mark.parametrize("bias", [True, False])
def test_weights_and_x(bias, options):
    check(arrays_of(bias), ITEMS, options, **OPTIONS)


def test_other_widths_and_batch_axes():
    check(arrays_of(width=4, value_width=7, d_out=3), {"x": normal(2, 3, 5, 12)}, {}, **OPTIONS)
    check(arrays_of(), {"x": normal(5, 12)}, {}, **OPTIONS)


@pytest.mark.parametrize("order", ["no rotation", "before", "after"])
@pytest.mark.parametrize("over", ["head", "each head", "all heads", "no weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_norms(kind, over, order):
    given = {} if over == "no weight" else weights(kind, over)
    norm = {"kind": kind, "eps": 0.01, "after_rotary": order == "after", "values": True}
    rotary = None if order == "no rotation" else {"base": 50.0}
    check(arrays_of() | given, ITEMS, {"causal": True}, norm=norm, rotary=rotary, **OPTIONS)


ROTARY: dict[str, Any] = {
    "plain": {},
    "interleaved": {"interleaved": True, "rotary_dim": 4},
    "with a factor": {"scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    "by length": {"scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}},
    "tables": {"cos": normal(20, 3), "sin": normal(20, 3, seed=1)},
}


@pytest.mark.parametrize(
    "positions", [None, 7, np.array([[0, 1, 2, 3, 4], [9, 2, 11, 3, 3]])], ids=["", "int", "items"]
)
@pytest.mark.parametrize("kind", ROTARY)
def test_rotary(kind, positions):
    check(arrays_of(), ITEMS, {"positions": positions}, rotary=ROTARY[kind], **OPTIONS)


def test_sinks_and_bias():
    sinks, bias = {"sinks": normal(4, seed=3)}, {"bias": normal(4, 1, 5, seed=4)}
    check(arrays_of() | sinks, ITEMS | bias, {"causal": True}, **OPTIONS)


def fused(arrays: dict[str, Array], layout: str) -> dict[str, Array]:
    """The three weights as one, whose values do not matter here: its columns in any order."""
    joined = {kind: np.concatenate([arrays[f"{kind}_{p}"] for p in "qkv"], axis=-1) for kind in "wb"}
    return {"w_q": joined["w"], "b_q": joined["b"], "w_o": arrays["w_o"], "b_o": arrays["b_o"]}


@pytest.mark.parametrize("layout", ["side_by_side", "per_head", "codegen"])
@pytest.mark.parametrize("cross", [False, True])
def test_fused_weights(layout, cross):
    heads = {"num_heads": 4, "num_kv_heads": 4 if layout == "codegen" else 2}
    w = make(kv_heads=heads["num_kv_heads"])
    arrays = dict(zip(("w_q", "w_k", "w_v", "w_o"), w.matrices, strict=True)) | {"b_o": w.b_o, "b_q": w.b_q}
    arrays |= {"b_k": w.b_k, "b_v": w.b_v}
    call = ITEMS | ({"context": normal(2, 7, 12, seed=5)} if cross else {})
    check(fused(arrays, layout), call, {}, layout=layout, **heads)


def test_cross_attention():
    arrays = arrays_of(d_context=9)
    check(arrays, ITEMS | {"context": normal(2, 7, 9, seed=5)}, {"key_lengths": [7, 0]}, **OPTIONS)
    check(arrays, ITEMS | {"context": normal(7, 9, seed=5)}, {}, **OPTIONS)  # shared by the items
    check(arrays, {"x": normal(5, 12), "context": normal(3, 7, 9, seed=5)}, {}, **OPTIONS)


def test_keys_and_values_of_a_context():
    arrays = arrays_of(d_context=9)
    layer = MultiHeadAttention(*(arrays[f"w_{p}"] for p in "qkvo"), **OPTIONS)
    k, v = layer.keys_values(normal(7, 9))
    out, vjp = layer.vjp(ITEMS["x"], (k, v))
    dout = normal(*out.shape, seed=9)
    found = vjp(dout)
    assert found.keys() == {"x", "context", "w_q", "w_o"}

    def loss(k: Array, v: Array) -> float:
        return float((np.asarray(layer(ITEMS["x"], (k, v))) * dout).sum())

    by_differences(loss, {"k": k, "v": v}, dict(zip("kv", found["context"], strict=True)))


def test_dtypes():
    arrays = {name: array.astype(np.float16) for name, array in arrays_of().items()}
    arrays["w_o"] = arrays["w_o"].astype(np.float32)
    x, dout = ITEMS["x"].astype(np.float32), normal(2, 5, 12, seed=1)
    layer = MultiHeadAttention(*(arrays[f"w_{p}"] for p in "qkvo"), **OPTIONS)
    found = layer.vjp(x)[1](dout)
    assert {name: array.dtype for name, array in found.items()} == {"x": x.dtype} | {
        name: arrays[name].dtype for name in ("w_q", "w_k", "w_v", "w_o")
    }
    wide = MultiHeadAttention(*(arrays[f"w_{p}"].astype(np.float64) for p in "qkvo"), **OPTIONS)
    exact = wide.vjp(x.astype(np.float64))[1](dout)
    for name, array in exact.items():
        assert_allclose(found[name], array, rtol=0, atol=2e-3 * np.abs(array).max())


@pytest.mark.parametrize("shape", [(0, 3, 12), (2, 0, 12)])
def test_empty_axes(shape):
    arrays = arrays_of()
    layer = MultiHeadAttention(*(arrays[f"w_{p}"] for p in "qkvo"), **OPTIONS)
    out, vjp = layer.vjp(np.zeros(shape))
    found = vjp(out)
    assert found["x"].shape == shape
    assert not found["w_q"].any()


def test_weights_that_change_in_place():
    """As those of a training step do: the layer has not copied them."""
    arrays = arrays_of(bias=False)
    layer = MultiHeadAttention(*arrays.values(), **OPTIONS)
    first, _ = layer.vjp(ITEMS["x"])
    arrays["w_v"] *= 2
    assert_allclose(layer.vjp(ITEMS["x"])[0], 2 * first, rtol=1e-12)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "MultiHeadAttention: unknown option 'return_lse'; known are ", {"return_lse": True}),
        (ValueError, "MultiHeadAttention: x has shape", {"x": normal(5, 7)}),
        (ValueError, "MultiHeadAttention: positions are for a layer with rotary", {"positions": 3}),
        (TypeError, "attention_vjp: score_mod is given", {"score_mod": lambda s, *_: s}),
    ],
)
def test_errors(error, message, call):
    layer = MultiHeadAttention(*arrays_of(bias=False).values(), **OPTIONS)
    with pytest.raises(error, match=f"^{message}"):
        layer.vjp(**{**ITEMS, **call})
    _, vjp = layer.vjp(ITEMS["x"])
    with pytest.raises(ValueError, match=r"^MultiHeadAttention: dout has shape \(5,\); it must be \(2, 5, 12\)"):
        vjp(np.zeros(5))
    with pytest.raises(TypeError, match=r"^MultiHeadAttention: dout has dtype bool"):
        vjp(np.zeros((2, 5, 12), bool))


# ---- the textbook functions ----


@pytest.mark.parametrize("kind", ["plain", "mask", "causal"])
def test_textbook_gradients_come_from_attention(kind):
    """scale is 1 / sqrt(d_k), and where mask == 0 the key is left out; a row that is masked everywhere is another."""
    Q, K, V, dout = normal(3, 5, 4), normal(3, 5, 4, seed=1), normal(3, 5, 6, seed=2), normal(3, 5, 6, seed=3)
    mask = np.tri(5, dtype=bool)[::-1] if kind == "mask" else None
    options: dict[str, Any] = {"mask": mask} if kind == "mask" else {"causal": kind == "causal"}
    out, vjp = attention_vjp(Q, K, V, scale=1 / math.sqrt(9), **options)

    def output(Q: Array, K: Array, V: Array) -> Array:
        if kind == "causal":
            return causal_attention(Q, K, V, 9)[0]
        return self_attention(Q, K, V, 9, mask)[0]

    assert_allclose(out, output(Q, K, V), rtol=0, atol=1e-15 * 8)
    found = dict(zip("QKV", vjp(dout), strict=False))
    by_differences(lambda **given: float((output(**given) * dout).sum()), {"Q": Q, "K": K, "V": V}, found)


def test_multi_head_attention_is_a_layer():
    x, dout = normal(5, 12), normal(5, 12, seed=1)
    matrices = {f"W_{p}": normal(12, 12, seed=i) / 3 for i, p in enumerate("qkvo")}
    biases = {f"b_{p}": normal(12, seed=i + 9) for i, p in enumerate("qkvo")}
    layer = MultiHeadAttention(*matrices.values(), num_heads=3, **biases)
    out, vjp = layer.vjp(x)
    assert_allclose(out, multi_head_attention(x, 12, 3, **matrices, **biases), rtol=0, atol=1e-13)
    found = {name.replace("w", "W"): array for name, array in vjp(dout).items()}

    def loss(**given: Array) -> float:
        return float((multi_head_attention(given.pop("x"), 12, 3, **given) * dout).sum())

    by_differences(loss, {"x": x, **matrices, **biases}, found)


def test_the_same_call_twice():
    layer = MultiHeadAttention(*arrays_of(bias=False).values(), **OPTIONS)
    one, other = (layer.vjp(ITEMS["x"])[1](ITEMS["x"]) for _ in "12")
    for name, array in one.items():
        assert_array_equal(array, other[name])
