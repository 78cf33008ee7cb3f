"""MultiHeadAttention.from_arrays: every naming convention, and what is refused.

Every test runs on the NumPy twin and on the compiled core (fixture `either`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from layer_oracle import (
    CLOSE64,
    SHAPES,
    Weights,
    bert,
    fused,
    gguf,
    gpt2,
    linear,
    make,
    neox,
    normal,
    oracle,
    torch_fused,
    torch_separate,
)
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from attentile import MultiHeadAttention
from attentile.layers.checkpoints import CONVENTIONS

pytestmark = pytest.mark.usefixtures("either")

Array = NDArray[Any]

# First array of the convention in CONVENTIONS -> how a checkpoint of it looks.
CHECKPOINTS: dict[tuple[str, str], Callable[[Weights], dict[str, Array]]] = {
    ("in_proj_weight", "out_proj.weight"): torch_fused,
    ("q_proj_weight", "out_proj.weight"): torch_separate,
    ("q_proj.weight", "o_proj.weight"): lambda w: linear(w, "model.layers.3.self_attn.", "q_proj k_proj v_proj o_proj"),
    ("q_proj.weight", "out_proj.weight"): lambda w: linear(w, "layers.0.self_attn.", "q_proj k_proj v_proj out_proj"),
    ("qkv_proj.weight", "o_proj.weight"): lambda w: fused(w, "model.layers.3.self_attn.", "qkv_proj o_proj"),
    ("self.query.weight", "output.dense.weight"): bert,
    ("attention.query.weight", "output.dense.weight"): lambda w: linear(
        w, "vit.encoder.layer.0.attention.", "attention.query attention.key attention.value output.dense"
    ),
    ("c_attn.weight", "c_proj.weight"): gpt2,
    ("query_key_value.weight", "dense.weight"): neox,
    ("q.weight", "o.weight"): lambda w: linear(w, "encoder.block.0.layer.0.SelfAttention.", "q k v o"),
    ("qkv.weight", "proj.weight"): lambda w: fused(w, "blocks.0.attn.", "qkv proj"),
    ("attn_q.weight", "attn_output.weight"): gguf,
    ("attn_qkv.weight", "attn_output.weight"): lambda w: fused(w, "blk.7.", "attn_qkv attn_output"),
}


@pytest.fixture(params=CONVENTIONS, ids=lambda row: row.models)
def convention(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param.weights[0], request.param.weights[-1]


def test_every_convention_has_a_case():
    assert list(CHECKPOINTS) == [(row.weights[0], row.weights[-1]) for row in CONVENTIONS]


@pytest.mark.parametrize("shape", ["plain", "no bias", "grouped"])
def test_from_arrays(convention, shape):
    w = make(**SHAPES[shape])
    layer = MultiHeadAttention.from_arrays(CHECKPOINTS[convention](w), num_heads=w.heads, num_kv_heads=w.kv_heads)
    x = normal(2, 5, 12)
    scale = 1.0 if convention[0] == "q.weight" else None
    assert_allclose(layer(x), [oracle(w, item, scale=scale) for item in x], **CLOSE64)


def test_from_arrays_copies_no_weight(convention):
    arrays = CHECKPOINTS[convention](make())
    for array in arrays.values():
        array.flags.writeable = False
    layer = MultiHeadAttention.from_arrays(arrays, num_heads=4)
    used = [*layer._project.arrays, layer._w_o, layer._b_o]
    assert len(used) >= 3
    assert all(any(np.shares_memory(mine, given) for given in arrays.values()) for mine in used)
    assert_array_equal(layer(normal(3, 12)), layer(normal(3, 12)))


def test_other_layers_do_not_matter(convention):
    w = make()
    arrays = CHECKPOINTS[convention](w)
    place = next(name for name in arrays if name.endswith(convention[0]))[: -len(convention[0])]
    others = {name.replace(place, f"{place[:-1]}1."): np.full_like(array, np.nan) for name, array in arrays.items()}
    for prefix in (place, place[:-1]):
        layer = MultiHeadAttention.from_arrays({**others, **arrays}, prefix, num_heads=4, rotary={"base": 99.0})
        assert np.isfinite(layer(normal(3, 12))).all()
        assert layer.rotary == {"base": 99.0}
    with pytest.raises(ValueError, match=r"^MultiHeadAttention\.from_arrays: 2 attention layers lie below prefix ''"):
        MultiHeadAttention.from_arrays({**others, **arrays}, num_heads=4)


def test_a_name_begins_after_a_dot(convention):
    arrays = CHECKPOINTS[convention](make())
    place = next(name for name in arrays if name.endswith(convention[0]))[: -len(convention[0])]
    others = {f"text_{n[len(place) :]}": np.full_like(a, np.nan) for n, a in arrays.items() if n.startswith(place)}
    layer = MultiHeadAttention.from_arrays({**others, **arrays}, num_heads=4)
    assert np.isfinite(layer(normal(3, 12))).all()


def test_missing_arrays_are_named(convention):
    arrays = CHECKPOINTS[convention](make())
    first = next(name for name in arrays if name.endswith(convention[0]))
    last = next(name for name in arrays if name == first[: -len(convention[0])] + convention[1])
    with pytest.raises(ValueError, match="no known attention layer") as error:
        MultiHeadAttention.from_arrays({n: a for n, a in arrays.items() if n != last}, num_heads=4)
    assert f"without {last}" in str(error.value)
    assert first in str(error.value)
    for row in CONVENTIONS:
        assert row.weights[0] in str(error.value)


class Lazy(Mapping[str, Array]):
    """A file that reads an array when it is asked for it."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays, self.read = arrays, []

    def __getitem__(self, name: str) -> Array:
        self.read.append(name)
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def test_only_what_is_used_is_read():
    arrays = gguf(make())
    lazy = Lazy({**arrays, "token_embd.weight": np.ones((2, 2))})
    MultiHeadAttention.from_arrays(lazy, "blk.7", num_heads=4)
    assert sorted(lazy.read) == sorted(name for name in arrays if "attn_norm" not in name and "ffn" not in name)


@pytest.mark.parametrize(
    "name",
    [
        "q_norm.weight", "k_norm.weight", "q_layernorm.bias", "bias_k", "bias_v", "sinks", "q_bias", "v_bias",
        "inner.distance_embedding.weight",
    ],
)  # fmt: skip
def test_an_array_that_changes_the_result_is_refused(name):
    arrays = linear(make(), "a.", "q_proj k_proj v_proj o_proj")
    with pytest.raises(ValueError, match=rf"a\.{name} would change the result"):
        MultiHeadAttention.from_arrays({**arrays, f"a.{name}": np.ones(6)}, num_heads=4)
    layer = MultiHeadAttention.from_arrays({**arrays, f"b.{name}": np.ones(6)}, num_heads=4)
    assert layer.num_heads == 4


# Arrays of the attention itself that real models have, by the convention that their weights follow.
FURTHER = [
    ("qkv.weight", "relative_position_bias_table"),  # Swin
    ("qkv.weight", "norm.weight"),  # EVA in timm
    ("self.query.weight", "self.relative_position_bias_table"),  # Swin in transformers
    ("self.query.weight", "self.conv_kernel_layer.weight"),  # ConvBERT
    ("self.query.weight", "LayerNorm.weight"),  # ESM
    ("attention.query.weight", "attention.relative_position_bias.relative_position_bias_table"),  # BEiT
    ("q_proj.weight", "gate_proj.weight"),
    ("q_proj.weight", "gru_rel_pos_linear.weight"),  # WavLM
    ("q_proj.weight", "rel_attn_embed.weight"),
    ("q_proj.weight", "q_proj.lora_A.weight"),
    ("q_proj.weight", "k_proj.lora_B.default.weight"),
    ("q_proj.weight", "vision_q_proj.weight"),
    ("in_proj_weight", "relative_attention_bias.weight"),
    ("c_attn.weight", "c_attn.scale"),
    ("query_key_value.weight", "vision_expert_query_key_value.weight"),
    ("q.weight", "global_relative_attention_bias.weight"),  # LongT5
    ("attn_q.weight", "attn_rel_b.weight"),  # T5
    ("attn_q.weight", "attn_gate.weight"),
    ("attn_qkv.weight", "attn_qkv.scale"),
]


@pytest.mark.parametrize(("first", "name"), FURTHER)
def test_an_array_of_the_attention_that_is_not_used_is_refused(first, name):
    for convention, checkpoint in CHECKPOINTS.items():
        if convention[0] == first:
            arrays = checkpoint(make())
            place = next(n for n in arrays if n.endswith(first))[: -len(first)]
            own = {n: a for n, a in arrays.items() if n.startswith(place)}
            for given, at in ((arrays, place), ({n[len(place) :]: a for n, a in own.items()}, "")):
                with pytest.raises(ValueError, match=rf"{re.escape(at + name)} (would|belongs .* and may) change the"):
                    MultiHeadAttention.from_arrays({**given, at + name: np.ones(6)}, num_heads=4)
            assert MultiHeadAttention.from_arrays({**arrays, f"other.{name}": np.ones(6)}, place, num_heads=4)


# Arrays that real checkpoints hold beside the weights; the layer's result does not depend on them.
BESIDE = {
    "q_proj.weight": ["rotary_emb.inv_freq"],
    "qkv_proj.weight": ["rotary_emb.inv_freq", "rotary_emb.cos_cached"],
    "self.query.weight": ["output.LayerNorm.weight", "output.LayerNorm.bias", "output.LayerNorm.gamma"],
    "c_attn.weight": ["bias", "masked_bias"],
    "query_key_value.weight": ["bias", "masked_bias", "rotary_emb.inv_freq", "maybe_rotary.inv_freq"],
    "q.weight": ["relative_attention_bias.weight"],
    "attn_q.weight": [
        "attn_norm.weight", "attn_norm.bias", "attn_norm_2.weight", "attn_output_norm.weight", "attn_post_norm.weight",
        "attn_rot_embd.weight", "ffn_norm.weight", "ffn_gate.weight", "post_attention_norm.weight",
    ],
    "attn_qkv.weight": ["attn_norm.weight", "attn_norm_2.weight", "attn_output_norm.bias", "ffn_up.weight"],
}  # fmt: skip


@pytest.mark.parametrize("first", BESIDE)
def test_harmless_arrays_are_ignored(first):
    for convention, checkpoint in CHECKPOINTS.items():
        if convention[0] == first:
            arrays, x = checkpoint(make()), normal(3, 12)
            expected = MultiHeadAttention.from_arrays(arrays, num_heads=4)(x)
            place = next(n for n in arrays if n.endswith(first))[: -len(first)]
            beside = {place + name: np.full(6, np.nan) for name in BESIDE[first]}
            assert_array_equal(MultiHeadAttention.from_arrays({**arrays, **beside}, num_heads=4)(x), expected)


def test_a_block_may_hold_other_parts():
    arrays = linear(make(), "layers.0.", "q_proj k_proj v_proj o_proj")
    others = {f"layers.0.{name}.weight": np.ones(6) for name in ("norm", "gate_proj", "up_proj", "down_proj")}
    assert MultiHeadAttention.from_arrays({**arrays, **others}, num_heads=4).num_heads == 4
    for name in ("q_proj.lora_A.weight", "relative_position_bias_table", "q_norm.weight"):
        with pytest.raises(ValueError, match=rf"layers\.0\.{re.escape(name)} would change the result"):
            MultiHeadAttention.from_arrays({**arrays, **others, f"layers.0.{name}": np.ones(6)}, num_heads=4)


def test_gguf_norm_of_the_queries_is_refused():
    with pytest.raises(ValueError, match=r"blk\.7\.attn_q_norm\.weight would change"):
        MultiHeadAttention.from_arrays({**gguf(make()), "blk.7.attn_q_norm.weight": np.ones(6)}, num_heads=4)


def test_two_kinds_of_names_in_one_place_are_ambiguous():
    arrays = {**linear(make(), "a.", "q_proj k_proj v_proj o_proj"), **fused(make(), "a.", "qkv_proj o_proj")}
    with pytest.raises(ValueError, match=r"2 attention layers .* a\.q_proj\.weight \(Llama.*a\.qkv_proj\.weight \(Phi"):
        MultiHeadAttention.from_arrays(arrays, "a", num_heads=4)


def test_errors_of_from_arrays():
    arrays = gguf(make())
    with pytest.raises(ValueError, match=r"found nothing; known are nn\.MultiheadAttention: in_proj_weight"):
        MultiHeadAttention.from_arrays({}, num_heads=4)
    with pytest.raises(ValueError, match=r"found other0, other1, [^;]*other15 and 4 more;"):
        MultiHeadAttention.from_arrays({f"other{i}": np.ones(1) for i in range(20)}, num_heads=4)
    with pytest.raises(ValueError, match=r"below prefix 'blk\.70\.'"):
        MultiHeadAttention.from_arrays(arrays, "blk.70", num_heads=4)
    with pytest.raises(TypeError, match=r"blk\.7\.attn_k\.weight has dtype uint8; it must be floating .dequantise"):
        MultiHeadAttention.from_arrays({**arrays, "blk.7.attn_k.weight": np.ones((24, 12), np.uint8)}, num_heads=4)
    with pytest.raises(TypeError, match="prefix is 3; it must be a string"):
        MultiHeadAttention.from_arrays(arrays, 3, num_heads=4)
    with pytest.raises(TypeError, match="arrays is a list; it must be a mapping"):
        MultiHeadAttention.from_arrays([1], num_heads=4)
    with pytest.raises(ValueError, match=r"cross.in_proj_bias has shape \(5,\); it must be \(72,\)"):
        MultiHeadAttention.from_arrays({**torch_separate(make()), "cross.in_proj_bias": np.ones(5)}, num_heads=4)


def test_torch_layer_with_other_widths_of_the_context():
    w = make(d_context=5)
    layer = MultiHeadAttention.from_arrays(torch_separate(w), num_heads=4)
    x, context = normal(4, 12), normal(3, 5, seed=1)
    assert_allclose(layer(x, context), oracle(w, x, context), **CLOSE64)


def test_scales_of_a_quantised_file_are_told_apart_from_unknown_arrays():
    arrays = {f"attn.{p}_proj.weight": np.ones((8, 8), np.int8) for p in "qkvo"}
    arrays |= {f"attn.{p}_proj.weight_scale": np.ones(8) for p in "qkvo"}
    with pytest.raises(TypeError, match="dequantise the weights"):
        MultiHeadAttention.from_arrays(arrays, "attn", num_heads=2)
