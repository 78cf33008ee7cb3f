"""attentile.onnx beside Attention: RotaryEmbedding and TensorScatter, official node tests and the rules beyond them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_cases import check_outputs, official_cases
from rotary_oracle import multiplied

import attentile
from attentile import KVCache
from attentile import onnx as at_onnx

# Node tests of the package onnx (1.23); expanded into other operators, the 8 of RotaryEmbedding come a second time.
OFFICIAL_CASES = {"RotaryEmbedding": 8, "TensorScatter": 3}


@pytest.mark.parametrize("operator", OFFICIAL_CASES)
def test_every_official_case_passes(impl: str, operator: str) -> None:
    pytest.importorskip("onnx", reason="the package onnx is not installed")
    from onnx.reference import ReferenceEvaluator

    ours, ran = getattr(at_onnx, operator), set()
    for case in official_cases(operator):
        session = ReferenceEvaluator(case.model, new_ops=[ours])
        assert [type(n) for n in session.rt_nodes_] == [ours]
        assert len(case.data_sets) == 1
        inputs, expected = case.data_sets[0]
        before = [array.copy() for array in inputs]
        feeds = {value.name: array for value, array in zip(case.model.graph.input, inputs, strict=True)}
        check_outputs(case, session.run(None, feeds), expected)
        for array, kept in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, kept)
        ran.add(case.name)
    assert len(ran) == OFFICIAL_CASES[operator]


# ---- RotaryEmbedding ----


def inputs(dim: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X (2, 3, 5, 10), caches (20, dim / 2) that are no rotation, position_ids (2, 5)."""
    rng = np.random.default_rng(dim)
    cos, sin = rng.uniform(-2, 2, (2, 20, dim // 2)).astype(dtype)
    return rng.uniform(-1, 1, (2, 3, 5, 10)).astype(dtype), cos, sin, rng.integers(0, 20, (2, 5))


@pytest.mark.parametrize("dim", [0, 4, 10])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.usefixtures("impl")
def test_rotary_embedding(dim: int, interleaved: int) -> None:
    x, cos, sin, ids = inputs(dim or 10)
    wanted = multiplied(x, cos[ids].astype(float) + 1j * sin[ids], bool(interleaved))
    options = dict(interleaved=interleaved, rotary_embedding_dim=dim)
    found = at_onnx.rotary_embedding(x, cos, sin, ids, **options)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2.0**-23, atol=0)
    np.testing.assert_array_equal(at_onnx.rotary_embedding(x, cos[ids], sin[ids], **options), found)
    np.testing.assert_array_equal(at_onnx.rotary_embedding(x, cos, sin, ids, num_heads=3, **options), found)
    joined = x.swapaxes(1, 2).reshape(2, 5, 30)
    flat = at_onnx.rotary_embedding(joined, cos, sin, ids, num_heads=3, **options)
    np.testing.assert_array_equal(flat, found.swapaxes(1, 2).reshape(2, 5, 30))


@pytest.mark.usefixtures("impl")
def test_rotary_embedding_dtypes_and_empty_axes() -> None:
    for dtype in (np.float16, np.float64):
        x, cos, sin, ids = inputs(10, dtype)
        found = at_onnx.rotary_embedding(x, cos, sin, ids)
        assert found.dtype == dtype
        wanted = attentile.rotary_embedding(x.astype(float), ids, cos=cos.astype(float), sin=sin.astype(float))
        np.testing.assert_array_equal(found, wanted.astype(dtype))
    for batch, heads, rows in [(0, 3, 5), (2, 0, 5), (2, 3, 0)]:
        empty, ids = np.zeros((batch, heads, rows, 8), np.float32), np.zeros((batch, rows), int)
        assert at_onnx.rotary_embedding(empty, cos[:, :4], sin[:, :4], ids).shape == empty.shape
        table = np.zeros((batch, rows, 4))
        assert at_onnx.rotary_embedding(empty, table, table).shape == empty.shape


X, CACHE, IDS = np.zeros((2, 3, 5, 10), np.float32), np.zeros((20, 5), np.float32), np.zeros((2, 5), int)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((X.astype(int), CACHE, CACHE, IDS), {}, TypeError, "X has dtype int64"),
        ((X, CACHE.astype(int), CACHE, IDS), {}, TypeError, "cos_cache has dtype int64"),
        ((X, CACHE, CACHE.astype(int), IDS), {}, TypeError, "sin_cache has dtype int64"),
        ((X, CACHE, CACHE, IDS), {"interleaved": 2}, ValueError, "interleaved is 2; it must be 0 or 1"),
        ((X, CACHE, CACHE, IDS), {"num_heads": 2}, ValueError, "num_heads is 2 and X has shape .* 3 heads"),
        ((X[0, 0], CACHE, CACHE, IDS), {}, ValueError, r"X has shape \(5, 10\)"),
        ((X[0], CACHE, CACHE, IDS), {}, ValueError, "num_heads is None; with a 3-D X"),
        ((X[0], CACHE, CACHE, IDS), {"num_heads": 0}, ValueError, "num_heads is 0; with a 3-D X"),
        ((X[0], CACHE, CACHE, IDS), {"num_heads": 3}, ValueError, "last axis must be a multiple of num_heads, 3"),
        ((X[..., :9], CACHE, CACHE, IDS), {}, ValueError, "the head size is 9; the rotated part must be even"),
        ((X, CACHE, CACHE, IDS), {"rotary_embedding_dim": 3}, ValueError, "rotary_embedding_dim is 3"),
        ((X, CACHE, CACHE, IDS), {"rotary_embedding_dim": 12}, ValueError, "rotary_embedding_dim is 12; .* at most 10"),
        ((X, CACHE, CACHE, IDS), {"rotary_embedding_dim": -2}, ValueError, "rotary_embedding_dim is -2"),
        (
            (X, CACHE, CACHE, IDS),
            {"rotary_embedding_dim": 4},
            ValueError,
            r"with position_ids both .* \(positions, 2\)",
        ),
        ((X, CACHE, CACHE[:9], IDS), {}, ValueError, r"cos_cache has shape \(20, 5\) and sin_cache \(9, 5\)"),
        ((X, CACHE[0], CACHE[0], IDS), {}, ValueError, r"cos_cache has shape \(5,\)"),
        ((X, CACHE, CACHE), {}, ValueError, r"without position_ids both must be \(2, 5, 5\)"),
        ((X, np.zeros((1, 5, 5)), np.zeros((1, 5, 5))), {}, ValueError, r"cos_cache has shape \(1, 5, 5\)"),
        ((X, CACHE, CACHE, IDS[0]), {}, ValueError, r"position_ids has shape \(5,\) .* \(2, 5\), one per token"),
        ((X, CACHE, CACHE, IDS * 1.0), {}, ValueError, "position_ids has shape .* dtype float64"),
        ((X, CACHE, CACHE, IDS + 20), {}, IndexError, "position_ids run from 20 to 20; .* between 0 and 19"),
        ((X, CACHE, CACHE, IDS - 1), {}, IndexError, "position_ids run from -1 to -1"),
    ],
)
def test_errors_of_rotary_embedding(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"^onnx.rotary_embedding: .*{match}"):
        at_onnx.rotary_embedding(*arguments, **options)


# ---- TensorScatter ----


@pytest.mark.parametrize("axis", [-3, -2, -1, 1, 2, 3])
@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_tensor_scatter(axis: int, mode: str, length: int) -> None:
    rng = np.random.default_rng([axis % 4, length])
    past = rng.standard_normal((3, 6, 6, 6))
    shape = [3, 6, 6, 6]
    shape[axis] = length
    update, starts = rng.standard_normal(shape), [0, 6 - length, (6 - length) // 2]
    if mode == "circular":
        starts = [5, 17, -1]
    wanted, along = past.copy(), np.moveaxis(update, axis, 1)
    for item, start in enumerate(starts):
        for x in range(length):
            np.moveaxis(wanted, axis, 1)[item, (start + x) % 6] = along[item, x]
    kept = past.copy()
    past.flags.writeable = update.flags.writeable = False
    found = at_onnx.tensor_scatter(past, update, np.array(starts), axis=axis, mode=mode)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(past, kept)
    assert found.flags.writeable
    assert not np.shares_memory(found, past)
    first = at_onnx.tensor_scatter(past, update, axis=axis, mode=mode)
    np.testing.assert_array_equal(first, at_onnx.tensor_scatter(past, update, [0, 0, 0], axis=axis))


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.bool_, np.complex64, "U3", object])
def test_tensor_scatter_takes_any_dtype(dtype: Any) -> None:
    past, update = np.zeros((2, 4, 1), dtype), np.ones((2, 1, 1), dtype)
    found = at_onnx.tensor_scatter(past, update, [3, 1])
    assert found.dtype == past.dtype
    assert (found == update).tolist() == [[[False], [False], [False], [True]], [[False], [True], [False], [False]]]


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter_with_empty_axes(mode: str) -> None:
    for past, update in [((0, 4, 2), (0, 1, 2)), ((2, 0, 2), (2, 0, 2)), ((2, 4, 0), (2, 3, 0))]:
        found = at_onnx.tensor_scatter(np.zeros(past), np.zeros(update), np.zeros(past[0], int), mode=mode)
        assert found.shape == past


P, U = np.zeros((2, 3, 4, 5)), np.zeros((2, 3, 2, 5))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((P, U), {"mode": "round"}, ValueError, "mode is 'round'; it must be 'linear' or 'circular'"),
        ((P, U.astype(np.float32)), {}, TypeError, "past_cache has dtype float64 and update float32"),
        ((P, U[0]), {}, ValueError, "need the same number of axes"),
        ((P[0, 0, 0], U[0, 0, 0]), {}, ValueError, "at least two"),
        ((P, U), {"axis": 0}, ValueError, "axis is 0; it must name one of the 4 axes but not the first"),
        ((P, U), {"axis": -4}, ValueError, "axis is -4"),
        ((P, U), {"axis": 4}, ValueError, "axis is 4"),
        ((P, U), {"axis": 1}, ValueError, "they must agree but for axis 1"),
        ((P, np.zeros((2, 3, 5, 5))), {}, ValueError, "axis 2, where update must not be the longer"),
        ((P, U, [0]), {}, ValueError, r"write_indices has shape \(1,\) .* \(2,\), one per batch item"),
        ((P, U, [0.0, 1.0]), {}, ValueError, "write_indices has shape .* float64"),
        ((P, U, [0, 3]), {}, ValueError, "write_indices run from 0 to 3; .* between 0 and 2"),
        ((P, U, [-1, 0]), {}, ValueError, "write_indices run from -1 to 0"),
    ],
)
def test_errors_of_tensor_scatter(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"^onnx.tensor_scatter: .*{match}"):
        at_onnx.tensor_scatter(*arguments, **options)


@pytest.mark.usefixtures("impl")
def test_a_decoding_step_of_a_model() -> None:
    """RotaryEmbedding, TensorScatter and Attention as they follow each other in an exported decoder."""
    pytest.importorskip("onnx", reason="the package onnx is not installed")
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    nodes = [
        helper.make_node("RotaryEmbedding", ["k", "cos", "sin", "ids"], ["turned"]),
        helper.make_node("TensorScatter", ["past", "turned", "at"], ["keys"]),
        helper.make_node("Attention", ["k", "keys", "keys", "", "", "", "lengths"], ["Y"], is_causal=1),
    ]
    rng = np.random.default_rng(0)
    angles = np.arange(16)[:, None] * 100.0 ** (-np.arange(4) / 4)
    feeds = {
        "k": rng.standard_normal((2, 2, 1, 8), np.float32), "past": rng.standard_normal((2, 2, 16, 8), np.float32),
        "cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32),
        "ids": np.array([[4], [9]]), "at": np.array([4, 9]), "lengths": np.array([5, 10]),
    }  # fmt: skip
    kinds = {name: TensorProto.INT64 if array.dtype == np.int64 else TensorProto.FLOAT for name, array in feeds.items()}
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    graph = helper.make_graph(nodes, "g", values, [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    (found,) = ReferenceEvaluator(model, new_ops=[*at_onnx.operators()]).run(None, feeds)
    keys = feeds["past"].copy()
    for item, position in enumerate((4, 9)):
        keys[item, :, position] = attentile.rotary_embedding(feeds["k"][item], position, base=100.0)[:, 0]
    wanted = attentile.attention(feeds["k"], keys, keys, causal="lower_right", key_lengths=[5, 10])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


# ---- the same writes by KVCache ----


@pytest.mark.parametrize("n", [1, 3])
def test_linear_writes_are_appends_of_a_cache(n: int) -> None:
    """TensorScatter at write_indices = the lengths of the items is what KVCache.append does."""
    rng = np.random.default_rng(n)
    lengths, room = [5, 0, 21], 40
    past = rng.standard_normal((3, 2, room, 4)).astype(np.float32)
    cache = KVCache(3, 2, 4, room)
    cache.append(past[:, :, : max(lengths)], -past[:, :, : max(lengths)], lengths=lengths)
    for _ in range(4):
        update = rng.standard_normal((3, 2, n, 4)).astype(np.float32)
        past = at_onnx.tensor_scatter(past, update, np.array(cache.lengths), axis=2)
        cache.append(update, -update)
        for b, length in enumerate(cache.lengths):
            np.testing.assert_array_equal(cache.keys()[b, :, :length], past[b, :, :length])
            np.testing.assert_array_equal(cache.values()[b, :, :length], -past[b, :, :length])


@pytest.mark.parametrize("n", [1, 3, 8])
def test_circular_writes_are_appends_of_a_cache_with_a_window(n: int) -> None:
    """A circular cache of W slots holds what KVCache(window=(W - 1, 0)) holds, in another order."""
    rng, slots = np.random.default_rng(n), 8
    past, cache = np.zeros((2, 1, slots, 4), np.float32), KVCache(2, 1, 4, window=(slots - 1, 0))
    for step in range(12):
        update = rng.standard_normal((2, 1, n, 4)).astype(np.float32)
        past = at_onnx.tensor_scatter(past, update, np.full(2, step * n % slots), axis=2, mode="circular")
        cache.append(update, update)
        order = np.arange(max(cache.length - slots, 0), cache.length) % slots
        np.testing.assert_array_equal(cache.keys(), past[:, :, order])


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.int64])
def test_tensor_scatter_counts_indices_of_any_integer_type(dtype: Any) -> None:
    """Modulo the size before anything is added: no sum wraps."""
    past, update = np.zeros((300, 200, 1)), np.arange(600.0).reshape(300, 2, 1)
    starts = np.full(300, np.iinfo(dtype).max, dtype)
    starts[1] = 3
    found = at_onnx.tensor_scatter(past, update, starts, mode="circular")
    places = [[(int(start) + x) % 200 for x in range(2)] for start in starts]
    np.testing.assert_array_equal(np.take_along_axis(found[..., 0], np.array(places), axis=1), update[..., 0])
    assert np.count_nonzero(found) == 599
