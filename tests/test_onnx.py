"""attentile.onnx: the node tests of the package onnx, all of them, and the operator's rules that those leave out."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from onnx_cases import check_outputs, official_cases

import attentile
from attentile import onnx as at_onnx

# Node tests of the package onnx (1.23) whose model holds an Attention node. Each also comes expanded into the other
# operators of the function body, its name ending with "_expanded": those 93 models have no Attention node to replace.
OFFICIAL_CASES = 93


def test_every_official_case_passes(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="the package onnx is not installed")
    from onnx.reference import ReferenceEvaluator

    calls = []
    fused = at_onnx._fused

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return fused(*args, **kwargs)

    monkeypatch.setattr(at_onnx, "_fused", counting)
    failures, ran, cases = {}, set(), official_cases("Attention")
    for case in cases:
        session = ReferenceEvaluator(case.model, new_ops=[at_onnx.Attention])
        assert [type(n) for n in session.rt_nodes_] == [at_onnx.Attention]
        assert len(case.data_sets) == 1
        inputs, expected = case.data_sets[0]
        feeds = {value.name: array for value, array in zip(case.model.graph.input, inputs, strict=True)}
        try:
            check_outputs(case, session.run(None, feeds), expected)
        except Exception as error:
            failures[case.name] = repr(error)
        ran.add(case.name)
    assert failures == {}
    assert len(ran) == len(cases) == len(calls) == OFFICIAL_CASES


# ---- the rules, against float64 that selects the allowed keys first ----


def expected_outputs(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, position: np.ndarray, valid: np.ndarray,
    causal: int, left: int, right: int, scale: float, softcap: float,
) -> dict[Any, np.ndarray]:  # fmt: skip
    """Y and the four modes for 4-D inputs that hold the past already; position of query 0 and valid keys per item."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    shape = (batch, heads, queries, keys)
    bias = np.zeros(shape)
    if mask is not None:
        added = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
        full = np.full((*added.shape[:-1], keys), -np.inf)
        full[..., : added.shape[-1]] = added
        bias = bias + full
    result = {name: np.zeros(shape) for name in range(4)} | {"Y": np.zeros((*shape[:3], v.shape[3]))}
    for b, h, i in np.ndindex(shape[:3]):
        group, p = h // (heads // k.shape[1]), position[b] + i
        raw = scale * k[b, group].astype(np.float64) @ q[b, h, i].astype(np.float64)
        capped = softcap * np.tanh(raw / softcap) if softcap else raw
        j = np.arange(keys)
        seen = (j < valid[b]) & (bias[b, h, i] > -np.inf)
        seen &= (j <= p) if causal else True
        seen &= (j >= p - left) if left >= 0 else True
        seen &= (j <= p + right) if right >= 0 else True
        final = np.where(seen, capped + bias[b, h, i], -np.inf)
        result[0][b, h, i], result[1][b, h, i], result[2][b, h, i] = raw, capped, final
        if seen.any():
            weights = np.exp(final[seen] - final[seen].max())
            result[3][b, h, i, seen] = weights / weights.sum()
            result["Y"][b, h, i] = result[3][b, h, i, seen] @ v[b, group, seen].astype(np.float64)
    return result


def merged(array: np.ndarray) -> np.ndarray:
    """(B, H, L, D) -> (B, L, H * D)"""
    batch, heads, rows, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, rows, heads * width)


MASKS = {
    "none": None,
    "bool": ((5, 13), bool),
    "bool short": ((2, 1, 5, 9), bool),
    "float per head": ((4, 5, 13), np.float32),
    "float short": ((5, 10), np.float32),
    "one key": ((5, 1), bool),  # padded, not broadcast
    "rank 1": ((7,), bool),
    "integer": ((5, 13), np.int32),  # added
}


def make_mask(name: str, rng: np.random.Generator) -> np.ndarray | None:
    if MASKS[name] is None:
        return None
    shape, dtype = MASKS[name]
    if dtype is bool:
        return rng.random(shape) < 0.7
    mask = rng.standard_normal(shape) * 2
    if dtype == np.float32:
        mask[rng.random(shape) < 0.3] = -np.inf
    return mask.astype(dtype)


@pytest.mark.parametrize("cache", ["none", "past", "nonpad"])
@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize(("causal", "left", "right"), [(0, -1, -1), (1, -1, -1), (1, 2, -1), (0, 3, 1), (0, -1, 0)])
@pytest.mark.usefixtures("impl")
def test_rules(cache: str, mask_name: str, causal: int, left: int, right: int) -> None:
    rng = np.random.default_rng([causal, left + 1, right + 1, len(cache), list(MASKS).index(mask_name)])
    q = rng.standard_normal((2, 4, 5, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 13, 8), np.float32), rng.standard_normal((2, 2, 13, 3), np.float32)
    mask, softcap, scale = make_mask(mask_name, rng), float(rng.choice([0.0, 1.5])), 0.4
    position, valid, call = np.zeros(2, int), np.full(2, 13), {"K": k, "V": v}
    if cache == "past":
        position = np.full(2, 6)
        call = {"K": k[:, :, 6:], "V": v[:, :, 6:], "past_key": k[:, :, :6], "past_value": v[:, :, :6]}
    elif cache == "nonpad":
        valid = np.array([11, 3])  # 3 valid keys and 5 queries: the first two rows see nothing if causal
        position, call = valid - 5, call | {"nonpad_kv_seqlen": valid}
    wanted = expected_outputs(q, k, v, mask, position, valid, causal, left, right, scale, softcap)
    options = dict(
        is_causal=causal, left_window_size=left, right_window_size=right, scale=scale, softcap=softcap, return_qk=True
    )
    for mode in range(4):
        found = at_onnx.attention(q, attn_mask=mask, qk_matmul_output_mode=mode, **call, **options)
        np.testing.assert_allclose(found.qk_matmul_output, wanted[mode], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(found.Y, wanted["Y"], rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(found.present_key, k)
        np.testing.assert_array_equal(found.present_value, v)
        assert {array.dtype for array in found} == {np.dtype(np.float32)}
    joined = call | {"K": merged(call["K"]), "V": merged(call["V"])}
    heads = dict(q_num_heads=4, kv_num_heads=2)
    three = at_onnx.attention(merged(q), attn_mask=mask, qk_matmul_output_mode=3, **joined, **heads, **options)
    np.testing.assert_array_equal(three.Y, merged(found.Y))
    np.testing.assert_array_equal(three.qk_matmul_output, found.qk_matmul_output)
    np.testing.assert_array_equal(three.present_key, k)


@pytest.fixture
def qkv() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 1, 2, 4, 8), np.float32)


@pytest.mark.usefixtures("impl")
def test_without_extras_it_is_attention(qkv: np.ndarray) -> None:
    q, k, v = qkv
    Y, present_key, present_value, qk = at_onnx.attention(q, k, v)
    np.testing.assert_array_equal(Y, attentile.attention(q, k, v))
    assert qk is None
    assert np.shares_memory(present_key, k)
    assert np.shares_memory(present_value, v)


@pytest.mark.usefixtures("impl")
def test_a_row_without_keys_is_zero(qkv: np.ndarray) -> None:
    mask = np.ones((4, 4), bool)
    mask[1] = False
    for attn_mask in (mask, np.where(mask, np.float32(0), np.float32(-np.inf))):
        found = at_onnx.attention(*qkv, attn_mask, qk_matmul_output_mode=3, return_qk=True)
        assert (found.Y[:, :, 1] == 0).all()
        assert (found.qk_matmul_output[:, :, 1] == 0).all()
        assert (found.Y[:, :, 0] != 0).all()
        assert (
            at_onnx.attention(*qkv, attn_mask, qk_matmul_output_mode=2, return_qk=True)[3][:, :, 1] == -np.inf
        ).all()


@pytest.mark.usefixtures("impl")
def test_excluded_keys_may_hold_nan(qkv: np.ndarray) -> None:
    q, k, v = qkv
    k, v = k.copy(), v.copy()
    clean = at_onnx.attention(q, k[:, :, :2], v[:, :, :2])
    k[:, :, 2:], v[:, :, 2:] = np.nan, np.inf
    hidden = np.array([0, 0, -np.inf, -np.inf], np.float32)
    for hide in ({"nonpad_kv_seqlen": [2]}, {"attn_mask": np.ones((4, 2), bool)}, {"attn_mask": hidden}):
        found = at_onnx.attention(q, k, v, **hide, qk_matmul_output_mode=2, return_qk=True)
        np.testing.assert_array_equal(found.Y, clean.Y)
        assert (found.qk_matmul_output[..., 2:] == -np.inf).all()
        assert np.isfinite(found.qk_matmul_output[..., :2]).all()


@pytest.mark.usefixtures("impl")
def test_double_precision_makes_a_float32_call_exact(qkv: np.ndarray) -> None:
    q, k, v = qkv * 4
    exact = attentile.attention(*(array.astype(np.float64) for array in (q, k, v)), return_weights=True)
    found = at_onnx.attention(q, k, v, softmax_precision=11, qk_matmul_output_mode=3, return_qk=True)
    np.testing.assert_array_equal(found.Y, exact.out.astype(np.float32))
    np.testing.assert_array_equal(found.qk_matmul_output, exact.weights.astype(np.float32))
    for precision in (1, 10, 16):
        np.testing.assert_array_equal(
            at_onnx.attention(q, k, v, softmax_precision=precision).Y, at_onnx.attention(q, k, v).Y
        )


@pytest.mark.usefixtures("impl")
def test_half_precision_is_rounded_once(qkv: np.ndarray) -> None:
    half = [array.astype(np.float16) for array in qkv]
    single = [array.astype(np.float32) for array in half]
    for mode in range(4):
        found = at_onnx.attention(*half, softcap=2.0, qk_matmul_output_mode=mode, return_qk=True)
        wanted = at_onnx.attention(*single, softcap=2.0, qk_matmul_output_mode=mode, return_qk=True)
        np.testing.assert_array_equal(found.Y, wanted.Y.astype(np.float16))
        np.testing.assert_array_equal(found.qk_matmul_output, wanted.qk_matmul_output.astype(np.float16))
    values = at_onnx.attention(single[0], single[1], half[2])  # V may have a type of its own; Y has that of Q
    assert (values.Y.dtype, values.present_value.dtype) == (np.float32, np.float16)


@pytest.mark.usefixtures("impl")
def test_empty_axes() -> None:
    for batch, heads, queries, keys in [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)]:
        q, k = np.zeros((batch, heads, queries, 8), np.float32), np.zeros((batch, heads, keys, 8), np.float32)
        for mode in range(4):
            found = at_onnx.attention(q, k, k, is_causal=1, qk_matmul_output_mode=mode, return_qk=True)
            assert found.Y.shape == q.shape
            assert not found.Y.any()
            assert found.qk_matmul_output.shape == (batch, heads, queries, keys)
    x = np.zeros((1, 2, 4, 8), np.float32)
    found = at_onnx.attention(x, x, x[..., :0], qk_matmul_output_mode=3, return_qk=True)
    np.testing.assert_array_equal(found.qk_matmul_output, np.full((1, 2, 4, 4), 0.25))


# ---- errors ----

X = np.zeros((1, 2, 4, 8), np.float32)
FLAT = np.zeros((1, 4, 16), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "match"),
    [
        ((X, X, X), {"is_causal": 2}, ValueError, "is_causal is 2"),
        ((X, X, X), {"qk_matmul_output_mode": 4}, ValueError, "qk_matmul_output_mode is 4"),
        ((X, X, X), {"softmax_precision": 7}, ValueError, "softmax_precision is 7.*DOUBLE"),
        ((X, X, X), {"softcap": -1.0}, ValueError, "softcap is -1"),
        ((X, X, X), {"scale": -1.0}, ValueError, "scale is -1.*square root"),
        ((X, X, X), {"scale": np.nan}, ValueError, "scale is nan"),
        ((X, X, X), {"left_window_size": -2}, ValueError, "left_window_size is -2"),
        ((X, X, X), {"right_window_size": -3}, ValueError, "right_window_size is -3"),
        ((X, X, X), {"q_num_heads": 3}, ValueError, "q_num_heads is 3 and Q has shape .* 2 heads"),
        ((FLAT, FLAT, FLAT), {}, ValueError, "q_num_heads is None; with 3-D inputs"),
        ((FLAT, FLAT, FLAT), {"q_num_heads": 2, "kv_num_heads": 0}, ValueError, "kv_num_heads is 0"),
        ((FLAT, FLAT, FLAT), {"q_num_heads": 3, "kv_num_heads": 2}, ValueError, "multiple of q_num_heads, 3"),
        ((X, FLAT, X), {}, ValueError, "three axes or all four"),
        ((X[0, 0], X[0, 0], X[0, 0]), {}, ValueError, "three axes or all four"),
        ((X, np.tile(X, (2, 1, 1, 1)), X), {}, ValueError, "same batch size"),
        ((X.astype(int), X, X), {}, TypeError, "Q has dtype int64"),
        ((X, X, X), {"past_key": X}, ValueError, "given together"),
        ((X, X, X), {"past_value": X}, ValueError, "given together"),
        ((X, X, X), {"past_key": X[0], "past_value": X}, ValueError, r"past_key has shape .* \(1, 2, past length, 8\)"),
        ((X, X, X), {"past_key": X, "past_value": X[:, :, :3]}, ValueError, "k has 8 keys and v has 7"),
        ((X, X, X), {"past_key": X, "past_value": X[..., :4]}, ValueError, "past_value has shape"),
        ((X, X, X), {"past_key": X, "past_value": X, "nonpad_kv_seqlen": [4]}, ValueError, "can't be combined"),
        ((X, X, X), {"nonpad_kv_seqlen": 4}, ValueError, "nonpad_kv_seqlen has shape"),
        ((X, X, X), {"nonpad_kv_seqlen": [4.0]}, ValueError, "nonpad_kv_seqlen has shape .* float64"),
        ((X, X, X), {"nonpad_kv_seqlen": [5]}, ValueError, "between 0 and the number of keys, 4"),
        ((X, X, X), {"nonpad_kv_seqlen": [-1]}, ValueError, "between 0 and the number of keys, 4"),
        ((X, X, X), {"attn_mask": np.ones((4, 5), bool)}, ValueError, "attn_mask has shape"),
        ((X, X, X), {"attn_mask": np.bool_(True)}, ValueError, "attn_mask has shape"),
        ((X, X, X), {"attn_mask": np.ones((3, 4), bool)}, ValueError, "mask has shape"),
        ((X, X[:, :1].repeat(3, 1), X[:, :1].repeat(3, 1)), {}, ValueError, "multiple of the number of k heads"),
    ],
)
def test_errors(arrays: tuple[np.ndarray, ...], options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        at_onnx.attention(*arrays, **options)


# ---- the classes ----


def test_without_the_package_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "onnx" or name.startswith("onnx.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr(at_onnx, "operators", at_onnx.operators.__wrapped__)  # not the class of an earlier test
    with pytest.raises(ImportError, match="pip install onnx"):
        at_onnx.operators()
    with pytest.raises(ImportError, match="pip install onnx"):
        _ = at_onnx.Attention
    assert at_onnx.attention(X, X, X).Y.shape == X.shape


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Attentoin'"):
        _ = at_onnx.Attentoin


def test_operators_are_the_classes() -> None:
    pytest.importorskip("onnx", reason="the package onnx is not installed")
    names = ("Attention", "RotaryEmbedding", "TensorScatter")
    assert at_onnx.operators() == tuple(getattr(at_onnx, name) for name in names)
    assert [(op.__name__, op.op_domain) for op in at_onnx.operators()] == [(name, "") for name in names]


@pytest.mark.parametrize("outputs", [["Y"], ["Y", ""], ["Y", "", "", "qk"], ["Y", "", "", ""], ["Y", "k", "v", "qk"]])
def test_qk_is_computed_only_if_named(outputs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="the package onnx is not installed")
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    calls, scores = [], at_onnx._scores
    monkeypatch.setattr(at_onnx, "_scores", lambda *args: calls.append(args) or scores(*args))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in [*"QKV", *filter(None, outputs)]]
    graph = helper.make_graph([helper.make_node("Attention", [*"QKV"], outputs)], "g", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    found = ReferenceEvaluator(model, new_ops=[at_onnx.Attention]).run(None, dict.fromkeys("QKV", X))
    assert len(found) == len(list(filter(None, outputs)))
    assert len(calls) == ("qk" in outputs)
