"""MultiHeadAttention.from_arrays where names leave more than one reading: the arrays decide, or the caller does.

Every test runs on the NumPy twin and on the compiled core (fixture `either`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from checkpoint_cases import checkpoint
from layer_oracle import CLOSE64, fused, grouped, linear, make, normal, oracle
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from attentile import MultiHeadAttention
from attentile.layers.checkpoints import CONVENTIONS

pytestmark = pytest.mark.usefixtures("either")

Array = NDArray[Any]

ASKS = [row for row in CONVENTIONS if row.asks]


@pytest.mark.parametrize("row", ASKS, ids=lambda row: row.models)
def test_what_no_array_tells_is_asked_for(row):
    _, arrays, options = checkpoint(row)
    (argument,) = row.asks
    del options[argument]
    with pytest.raises(ValueError, match=rf"more than one reading, .* give {argument}= ('|1)"):
        MultiHeadAttention.from_arrays(arrays, **options)


@pytest.mark.parametrize("row", [row for row in ASKS if "layout" in row.asks], ids=lambda row: row.models)
def test_layouts_of_one_key_head_are_one(row):
    w, arrays, options = checkpoint(row, kv_heads=1)
    x = normal(5, 12)
    if "codegen" not in row.asks["layout"]:
        del options["layout"]
    assert_allclose(MultiHeadAttention.from_arrays(arrays, **options)(x), oracle(w, x), **CLOSE64)


PLACES = ("", "h.0.attn.", "h.0.attn.attention.", "gpt_neox.layers.0.attention.", "h.0.self_attention.", "a.self_attn.")


@pytest.mark.parametrize("names", sorted({row.weights for row in CONVENTIONS}), ids=" ".join)
def test_rows_with_the_same_names_leave_one_reading(names):
    """Whatever biases there are, wherever the layer is: one row, never two and never none."""
    rows = [row for row in CONVENTIONS if row.weights == names]
    biases = rows[0].biases
    options = dict(num_heads=4, scale=0.5) | ({"layout": "side_by_side"} if len(names) == 2 else {})
    shapes = [(24, 24)] * 4 if len(names) == 4 else [(72, 24), (24, 24)]
    sizes = [24] * 4 if len(biases) == 4 else [72, 24]
    for place in PLACES:
        weights = {place + name: normal(*shape) for name, shape in zip(names, shapes, strict=True)}
        for there in itertools.product([False, True], repeat=len(biases)):
            given = zip(biases, sizes, there, strict=True)
            arrays = weights | {place + name: normal(size) for name, size, is_there in given if is_there}
            assert MultiHeadAttention.from_arrays(arrays, **options).scale == 0.5


def test_a_layout_that_is_asked_for_is_used():
    w, x = make(kv_heads=2), normal(5, 12)
    arrays = grouped(w, "model.layers.0.self_attn.", "query_key_value dense", 2, "qkv")
    layer = MultiHeadAttention.from_arrays(arrays, num_heads=4, num_kv_heads=2, layout="per_head")
    assert_allclose(layer(x), oracle(w, x), **CLOSE64)


def test_gpt_neo_is_not_scaled():
    """Its names, and a bias of the output alone; EXAONE 3 has the names without that bias, and GPT-J another place."""
    w, x = replace(make(), b_q=None, b_k=None, b_v=None), normal(5, 12)
    for place, of, scale in (
        ("transformer.h.0.attn.attention.", w, 1.0),
        ("transformer.h.0.attn.attention.", replace(w, b_o=None), None),
        ("transformer.h.0.attn.", replace(w, b_o=None), None),
    ):
        layer = MultiHeadAttention.from_arrays(linear(of, place, "q_proj k_proj v_proj out_proj"), num_heads=4)
        assert_allclose(layer(x), oracle(of, x, scale=scale), **CLOSE64)
        assert layer.scale == scale


def test_scale_of_the_caller_comes_first():
    arrays = linear(replace(make(), b_q=None, b_k=None, b_v=None, b_o=None), "SelfAttention.", "q k v o")
    assert MultiHeadAttention.from_arrays(arrays, num_heads=4).scale == 1.0
    assert MultiHeadAttention.from_arrays(arrays, num_heads=4, scale=0.25).scale == 0.25


def test_c_attn_is_a_linear_layer_if_its_shape_is():
    w, x = make(width=3), normal(5, 12)
    for shape in (dict(), dict(kv_heads=1)):
        w = make(width=3, **shape)
        for transposed in (False, True):
            arrays = fused(w, "h.0.attn.", "c_attn c_proj", transposed)
            options = {"layout": "side_by_side"} if transposed else {}
            layer = MultiHeadAttention.from_arrays(arrays, num_heads=4, num_kv_heads=w.kv_heads, **options)
            assert_allclose(layer(x), oracle(w, x), **CLOSE64)


def test_llamas_own_files_have_interleaved_pairs():
    """The transformers library reorders the rows of wq and wk, so that the pairs lie in halves."""
    w, x = make(kv_heads=2), normal(5, 12)

    def halves(matrix: Array) -> Array:
        return matrix.reshape(12, -1, 3, 2).swapaxes(2, 3).reshape(matrix.shape)

    w = replace(w, b_q=None, b_k=None, b_v=None, b_o=None)
    reordered = replace(w, q=halves(w.q), k=halves(w.k))
    for of, names, rotary in (
        (w, "wq wk wv wo", {"interleaved": True}),
        (reordered, "q_proj k_proj v_proj o_proj", {}),
    ):
        arrays = linear(of, "layers.0.attention.", names)
        layer = MultiHeadAttention.from_arrays(arrays, num_heads=4, num_kv_heads=2, rotary=rotary)
        assert_allclose(layer(x), oracle(w, x, rotary={"interleaved": True}), **CLOSE64)
