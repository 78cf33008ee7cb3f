"""MultiHeadAttention.from_arrays: every naming convention, and what is refused.

Every test runs on the NumPy twin and on the compiled core (fixture `either`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checkpoint_cases import CASES, checkpoint, place_of
from layer_oracle import (
    CLOSE64,
    SHAPES,
    fused,
    gguf,
    linear,
    make,
    normal,
    oracle,
    torch_separate,
)
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from attentile import MultiHeadAttention
from attentile.layers.checkpoints import CONVENTIONS, Convention

pytestmark = pytest.mark.usefixtures("either")

Array = NDArray[Any]


@pytest.fixture(params=CONVENTIONS, ids=lambda row: row.models)
def convention(request: pytest.FixtureRequest) -> Convention:
    return request.param


def test_every_convention_has_a_case():
    assert list(CASES) == [row.models for row in CONVENTIONS]


@pytest.mark.parametrize("shape", ["plain", "no bias", "grouped"])
def test_from_arrays(convention, shape):
    if (convention.models, shape) in {("CodeGen", "grouped"), ("MPNet", "no bias")}:
        return  # no such model: its groups are those of four heads, and without biases the names are T5's
    w, arrays, options = checkpoint(convention, **SHAPES[shape])
    layer = MultiHeadAttention.from_arrays(arrays, **options)
    x = normal(2, 5, 12)
    assert_allclose(layer(x), [oracle(w, item, scale=CASES[convention.models].scale) for item in x], **CLOSE64)


def test_from_arrays_copies_no_weight(convention):
    _, arrays, options = checkpoint(convention)
    for array in arrays.values():
        array.flags.writeable = False
    layer = MultiHeadAttention.from_arrays(arrays, **options)
    used = [array for array in (*layer._heads.project.arrays, layer._w_o, layer._b_o) if array is not None]
    assert len(used) >= 3
    assert all(any(np.shares_memory(mine, given) for given in arrays.values()) for mine in used)
    assert_array_equal(layer(normal(3, 12)), layer(normal(3, 12)))


def test_other_layers_do_not_matter(convention):
    _, arrays, options = checkpoint(convention)
    place = place_of(convention, arrays)
    beyond = re.sub(r"\d+", "999", place) if re.search(r"\d", place) else f"another.{place}"
    others = {name.replace(place, beyond): np.full_like(array, np.nan) for name, array in arrays.items()}
    for prefix in (place, place[:-1]):
        layer = MultiHeadAttention.from_arrays({**others, **arrays}, prefix, **options, rotary={"base": 99.0})
        assert np.isfinite(layer(normal(3, 12))).all()
        assert layer.rotary == {"base": 99.0}
    with pytest.raises(ValueError, match=r"^MultiHeadAttention\.from_arrays: 2 attention layers lie below prefix ''"):
        MultiHeadAttention.from_arrays({**others, **arrays}, **options)


def test_a_name_begins_after_a_dot(convention):
    _, arrays, options = checkpoint(convention)
    place = place_of(convention, arrays)
    others = {f"text_{n[len(place) :]}": np.full_like(a, np.nan) for n, a in arrays.items() if n.startswith(place)}
    layer = MultiHeadAttention.from_arrays({**others, **arrays}, **options)
    assert np.isfinite(layer(normal(3, 12))).all()


def test_missing_arrays_are_named(convention):
    _, arrays, options = checkpoint(convention)
    first = place_of(convention, arrays) + convention.weights[0]
    last = place_of(convention, arrays) + convention.weights[-1]
    with pytest.raises(ValueError, match="no known attention layer") as error:
        MultiHeadAttention.from_arrays({n: a for n, a in arrays.items() if n != last}, **options)
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
        "v_norm.weight", "sub_norm.weight", "bias_k", "bias_v", "inner.sinks", "q_bias", "v_bias",
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
    for convention in CONVENTIONS:
        if convention.weights[0] == first and not convention.asks:
            _, arrays, _ = checkpoint(convention)
            place = place_of(convention, arrays)
            own = {n: a for n, a in arrays.items() if n.startswith(place)}
            for given, at in ((arrays, place), ({n[len(place) :]: a for n, a in own.items()}, "")):
                with pytest.raises(ValueError, match=rf"{re.escape(at + name)} (would|belongs .* and may) change the"):
                    MultiHeadAttention.from_arrays({**given, at + name: np.ones(6)}, num_heads=4)
            assert MultiHeadAttention.from_arrays({**arrays, f"other.{name}": np.ones(6)}, place, num_heads=4)


# Arrays that real checkpoints hold alongside the weights; the layer's result does not depend on them.
ALONGSIDE = {
    "Llama, Mistral, Qwen2": ["rotary_emb.inv_freq"],
    "Phi-3": ["rotary_emb.inv_freq", "rotary_emb.cos_cached"],
    "BERT": ["output.LayerNorm.weight", "output.LayerNorm.bias", "output.LayerNorm.gamma"],
    "GPT-2": ["bias", "masked_bias"],
    "GPT-NeoX, BLOOM, Falcon": ["bias", "masked_bias", "rotary_emb.inv_freq", "maybe_rotary.inv_freq"],
    "CodeGen": ["causal_mask"],
    "ALBERT": ["LayerNorm.weight", "LayerNorm.bias"],
    "T5": ["relative_attention_bias.weight"],
    "GGUF": [
        "attn_norm.weight", "attn_norm.bias", "attn_norm_2.weight", "attn_output_norm.weight", "attn_post_norm.weight",
        "attn_rot_embd.weight", "ffn_norm.weight", "ffn_gate.weight", "post_attention_norm.weight",
    ],
    "GGUF, fused": ["attn_norm.weight", "attn_norm_2.weight", "attn_output_norm.bias", "ffn_up.weight"],
}  # fmt: skip


@pytest.mark.parametrize("models", ALONGSIDE)
def test_harmless_arrays_are_ignored(models):
    convention = next(row for row in CONVENTIONS if row.models == models)
    (_, arrays, options), x = checkpoint(convention), normal(3, 12)
    expected = MultiHeadAttention.from_arrays(arrays, **options)(x)
    alongside = {place_of(convention, arrays) + name: np.full(6, np.nan) for name in ALONGSIDE[models]}
    assert_array_equal(MultiHeadAttention.from_arrays({**arrays, **alongside}, **options)(x), expected)


def test_a_block_may_hold_other_parts():
    arrays = linear(make(), "layers.0.", "q_proj k_proj v_proj o_proj")
    others = {f"layers.0.{name}.weight": np.ones(6) for name in ("norm", "gate_proj", "up_proj", "down_proj")}
    assert MultiHeadAttention.from_arrays({**arrays, **others}, num_heads=4).num_heads == 4
    for name in ("q_proj.lora_A.weight", "relative_position_bias_table", "v_norm.weight"):
        with pytest.raises(ValueError, match=rf"layers\.0\.{re.escape(name)} would change the result"):
            MultiHeadAttention.from_arrays({**arrays, **others, f"layers.0.{name}": np.ones(6)}, num_heads=4)


NORM = {"kind": "rms", "eps": 1e-6}


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("Llama, Mistral, Qwen2", ["q_norm.weight", "k_norm.weight"]),
        ("Phi", ["q_layernorm.weight", "k_layernorm.weight", "q_layernorm.bias", "k_layernorm.bias"]),
        ("Llama, Mistral, Qwen2", ["query_layernorm.weight", "key_layernorm.weight"]),
        ("MPT, DBRX, Nomic BERT", ["q_ln.weight", "k_ln.weight"]),
        ("GGUF", ["attn_q_norm.weight", "attn_k_norm.weight"]),
    ],
)
def test_norms_are_found(row, names):
    convention = next(one for one in CONVENTIONS if one.models == row)
    w, arrays, options = checkpoint(convention)
    place, norm = place_of(convention, arrays), {**NORM, "kind": "layer"}
    weights = {name: normal(6, seed=n) for n, name in enumerate(names)}
    arrays |= {place + name: weight for name, weight in weights.items()}
    layer = MultiHeadAttention.from_arrays(arrays, **options, norm=norm)
    given = dict(zip(("q_norm", "k_norm", "b_q_norm", "b_k_norm"), weights.values(), strict=False))
    x = normal(5, 12)
    assert_allclose(layer(x), w.layer(norm=norm, **given)(x), **CLOSE64)
    with pytest.raises(
        ValueError, match=rf"{re.escape(place)}\w+\.\w+ belongs to a norm of queries or keys, .* give norm="
    ):
        MultiHeadAttention.from_arrays(arrays, **options)
    without = {n: a for n, a in arrays.items() if n != place + names[0]}
    with pytest.raises(ValueError, match="give q_norm and k_norm"):
        MultiHeadAttention.from_arrays(without, **options, norm=norm)


def test_norms_of_each_head_are_put_together():
    w = make(kv_heads=2)
    arrays = linear(w, "self_attn.", "q_proj k_proj v_proj o_proj")
    queries, keys = normal(4, 6), normal(2, 6, seed=1)
    for part, rows in (("q", queries), ("k", keys)):
        arrays |= {f"self_attn.{part}_layernorm.norms.{h}.weight": row for h, row in enumerate(rows)}
    layer = MultiHeadAttention.from_arrays(arrays, num_heads=4, num_kv_heads=2, norm=NORM)
    x = normal(5, 12)
    assert_allclose(layer(x), w.layer(norm=NORM, q_norm=queries, k_norm=keys)(x), **CLOSE64)


@pytest.mark.parametrize("name", ["self_attn.sinks", "self_attn.attention_sink_bias"])
def test_sinks_are_taken(name):
    w, x = make(), normal(5, 12)
    arrays = linear(w, "self_attn.", "q_proj k_proj v_proj o_proj")
    sinks = normal(4, seed=3)
    layer = MultiHeadAttention.from_arrays({**arrays, name: sinks}, num_heads=4)
    assert_allclose(layer(x), w.layer()(x, sinks=sinks), **CLOSE64)
    in_gguf = MultiHeadAttention.from_arrays({**gguf(w), "blk.7.attn_sinks.weight": sinks}, num_heads=4)
    assert_allclose(in_gguf(x), layer(x), **CLOSE64)


def test_biases_of_queries_and_values_alone():
    w, x = replace(make(), b_k=None), normal(5, 12)
    biases = {"q_bias": w.b_q, "v_bias": w.b_v}
    beit = fused(replace(w, b_q=None), "blocks.0.attn.", "qkv proj") | {
        f"blocks.0.attn.{n}": b for n, b in biases.items()
    }
    videomae = linear(
        replace(w, b_q=None, b_v=None), "layer.0.attention.",
        "attention.query attention.key attention.value output.dense",
    ) | {f"layer.0.attention.attention.{n}": b for n, b in biases.items()}  # fmt: skip
    for arrays in (beit, videomae):
        assert_allclose(MultiHeadAttention.from_arrays(arrays, num_heads=4)(x), oracle(w, x), **CLOSE64)


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
