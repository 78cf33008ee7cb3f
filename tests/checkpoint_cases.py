"""How checkpoints of every naming convention look, for the tests of MultiHeadAttention.from_arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from layer_oracle import (
    Weights,
    bert,
    fused,
    gguf,
    gpt2,
    grouped,
    linear,
    make,
    neox,
    torch_fused,
    torch_separate,
)
from numpy.typing import NDArray

from attentile.layers.checkpoints import Convention

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """How a checkpoint of a convention looks, and what from_arrays must be told."""

    arrays: Callable[[Weights], dict[str, Array]]
    options: dict[str, Any] = field(default_factory=dict)
    biases: str = "qkvo"  # those that the convention has, if it has any
    scale: float | None = None  # that of the result


def four(place: str, names: str, **rest: Any) -> Case:
    return Case(lambda w: linear(w, place, names), **rest)


def two(place: str, names: str, **rest: Any) -> Case:
    return Case(lambda w: fused(w, place, names), **rest)


SIDE = {"layout": "side_by_side"}
# By the name of the convention.
CASES = {
    "nn.MultiheadAttention": Case(torch_fused),
    "nn.MultiheadAttention with kdim or vdim": Case(torch_separate),
    "Llama, Mistral, Qwen2": four("model.layers.3.self_attn.", "q_proj k_proj v_proj o_proj"),
    "Llama's own files": four("layers.3.attention.", "wq wk wv wo"),
    "OPT, CLIP, Whisper": four("layers.0.self_attn.", "q_proj k_proj v_proj out_proj"),
    "GPT-Neo": four("transformer.h.0.attn.attention.", "q_proj k_proj v_proj out_proj", biases="o", scale=1.0),
    "a bias of out_proj alone": four("h.0.attn.", "q_proj k_proj v_proj out_proj", biases="o", options={"scale": 0.3},
                                     scale=0.3),
    "Phi": four("model.layers.0.self_attn.", "q_proj k_proj v_proj dense"),
    "ModernBERT decoder": four("layers.0.attn.", "q_proj k_proj v_proj Wo"),
    "Janus, InternVL": four("encoder.layers.0.self_attn.", "q_proj k_proj v_proj projection_layer"),
    "ProphetNet": four("decoder.layers.0.self_attn.", "query_proj key_proj value_proj out_proj"),
    "DistilBERT, XLM": four("transformer.layer.0.attention.", "q_lin k_lin v_lin out_lin"),
    "CTRL": four("h.0.multi_head_attention.", "Wq Wk Wv dense"),
    "Moshi": four("layers.0.self_attn.", "q_proj.linear k_proj.linear v_proj.linear o_proj.linear"),
    "Phi-3": two("model.layers.3.self_attn.", "qkv_proj o_proj"),
    "Baichuan": two("model.layers.3.self_attn.", "W_pack o_proj"),
    "ModernBERT": two("layers.0.attn.", "Wqkv Wo"),
    "MPT, DBRX, Nomic BERT": two("transformer.blocks.0.attn.", "Wqkv out_proj"),
    "Bark": two("layers.0.attn.", "att_proj out_proj"),
    "CodeGen": Case(lambda w: grouped(w, "transformer.h.0.attn.", "qkv_proj out_proj", 4, "qvk")),
    "qkv_proj in other places than CodeGen's": two("layers.0.attn.", "qkv_proj out_proj", options=SIDE),
    "InternLM2, gpt-fast": two("layers.0.attention.", "wqkv wo", options=SIDE),
    "BERT": Case(bert),
    "ViT": four(
        "vit.encoder.layer.0.attention.", "attention.query attention.key attention.value output.dense"
    ),
    "LXMERT": four("encoder.x_layers.0.visual_attention.", "att.query att.key att.value output.dense"),
    "BigBird-Pegasus": four("encoder.layers.0.self_attn.", "self.query self.key self.value output"),
    "ALBERT": four("albert_layers.0.attention.", "query key value dense"),
    "Grounding DINO": four("decoder.layers.0.self_attn.", "query key value out_proj"),
    "Pix2Struct, Kosmos-2.5": four("layers.0.attention.", "query key value output", options={"scale": 1.0}, scale=1.0),
    "GPT-2": Case(gpt2),
    "GPT-BigCode, StarCoder, nanoGPT, Qwen": two("transformer.h.0.attn.", "c_attn c_proj", options=SIDE),
    "GPT-NeoX, BLOOM, Falcon": Case(neox),
    "Persimmon, ChatGLM, Sarvam": two("model.layers.0.self_attn.", "query_key_value dense", options=SIDE),
    "T5": four("encoder.block.0.layer.0.SelfAttention.", "q k v o", biases="", scale=1.0),
    "MPNet": four("encoder.layer.0.attention.attn.", "q k v o"),
    "q, k, v, o with some biases": four("h.0.attention.", "q k v o", biases="qo", options={"scale": 0.3}, scale=0.3),
    "Qwen2.5-Omni's vision": four("blocks.0.attn.", "q k v proj"),
    "ViT of timm": two("blocks.0.attn.", "qkv proj"),
    "BLIP": two("encoder.layers.0.self_attn.", "qkv projection"),
    "TimeSformer": two("encoder.layer.0.attention.", "attention.qkv output.dense"),
    "GGUF": Case(gguf),
    "GGUF, fused": two("blk.7.", "attn_qkv attn_output"),
}  # fmt: skip


def checkpoint(row: Convention, **shape: Any) -> tuple[Weights, dict[str, Array], dict[str, Any]]:
    """Weights, the arrays that a checkpoint of them has, arguments of from_arrays."""
    case, w = CASES[row.models], make(**shape)
    if case.biases == "o" or "with some" in row.models:
        w = make(**{**shape, "bias": True})
    if w.b_q is not None:
        w = replace(w, **{f"b_{p}": None for p in "qkvo" if p not in case.biases})
    return w, case.arrays(w), {"num_heads": w.heads, "num_kv_heads": w.kv_heads, **case.options}


def place_of(row: Convention, arrays: dict[str, Array]) -> str:
    return next(name for name in arrays if name.endswith(row.weights[0]))[: -len(row.weights[0])]
