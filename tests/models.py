"""The attention layers of the transformers library: how to build each, and what our layer must be told.

`heads`, `arguments` and `call` are the source of what a caller writes: the tests evaluate it, with `config` for the
model's configuration and `arrays` for its arrays, and docs/checkpoints.md shows it. Nothing here needs the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

# What every tiny model is made with, where its configuration has these names.
SIZES = dict(
    hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=24, vocab_size=40,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2)
WIDE = dict(num_key_value_heads=2, head_dim=24)
SEQ2SEQ = dict(
    d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=24, decoder_ffn_dim=24
)  # fmt: skip
EXPERTS = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
)  # fmt: skip
PICTURE = dict(image_size=16, patch_size=8)
PIXELS = dict(pixel_values=(2, 3, 16, 16))

HEADS = "num_heads=config.num_attention_heads"
KV_HEADS = "num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads"
ENCODER_HEADS = "num_heads=config.encoder_attention_heads"
ROTARY = 'rotary={"scaling": config.rope_parameters}'
INTERLEAVED = 'rotary={"scaling": config.rope_parameters, "interleaved": True}'
LOCAL = 'rotary={"scaling": config.rope_parameters["sliding_attention"]}'
GLOBAL = 'rotary={"scaling": config.rope_parameters["full_attention"]}'
RMS = 'norm={"kind": "rms", "eps": config.rms_norm_eps}'
RMS_AFTER = 'norm={"kind": "rms", "eps": config.rms_norm_eps, "after_rotary": True}'
RMS_VALUES = 'norm={"kind": "rms", "eps": config.rms_norm_eps, "values": True}'
RMS_PLUS_ONE = 'norm={"kind": "rms_plus_one", "eps": config.rms_norm_eps}'
LAYER_NORM = 'norm={"kind": "layer", "eps": config.layer_norm_eps}'
CAUSAL = "causal=True"
T5_BIAS = 'bias=t5_bias(arrays[f"{place}.relative_attention_bias.weight"], 7, 7)'


@dataclass(frozen=True)
class Model:
    """A model type of the library, and the attention of its first layer."""

    name: str
    kind: str
    place: str  # of the attention module
    config: dict[str, Any] = field(default_factory=dict)
    heads: str = HEADS
    arguments: str = ""
    call: str = ""
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes, instead of token ids
    of: str = ""  # module and class of the model, if it is not that of AutoModel
    enter: str = ""  # module below the place whose input is x, if that of the place is not
    leave: str = ""  # module below the place whose output is the layer's, if that of the place is more than that
    close: float = 1e-12  # to the library's result in float64, relative
    without: str = ""  # regular expression of arrays to leave out
    message: str = ""  # of the refusal, if it is refused


def alike(form: Model, plain: str = "", more: dict[str, tuple[str, dict[str, Any]]] | None = None) -> list[Model]:
    """Models of one form. plain: "name: model type; ..."; more: name -> model type and what is not the form's.

    `config` of these is added to that of the form.
    """
    members = {name: (kind, {}) for name, kind in (pair.split(": ") for pair in plain.split("; ") if pair)}
    rows = []
    for name, (kind, changes) in {**members, **(more or {})}.items():
        changes = {**changes, "config": {**form.config, **changes.get("config", {})}}
        rows.append(replace(form, name=name, kind=kind, **changes))
    return rows


LLAMA = Model("", "", "layers.0.self_attn", GROUPED, KV_HEADS, ROTARY, CAUSAL)
MIXTURE = {"config": EXPERTS}
SECTIONS = {"config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}}
CONVOLUTIONS = {"config": {"conv_dim": (16,) * 7}}
BERT = Model("", "", "encoder.layer.0.attention", leave="output.dense")
BART = Model("", "", "encoder.layers.0.self_attn", SEQ2SEQ, ENCODER_HEADS)
VIT = Model("", "", "layers.0.attention", PICTURE, inputs=PIXELS)

ANY = {"config": {}, "heads": HEADS}
NORMED = replace(LLAMA, config=WIDE, arguments=f"{ROTARY}, {RMS}")
GPT = Model("", "", "h.0.attn", call=CAUSAL)
PARTIAL = 'rotary={"rotary_dim": config.rotary_dim, "interleaved": True}'
WHISPER = dict(SEQ2SEQ, num_mel_bins=16, max_source_positions=8)
T5 = Model(
    "", "", "encoder.block.0.layer.0.SelfAttention", dict(d_model=64, d_kv=16, num_heads=4, num_layers=1, d_ff=24),
    call=T5_BIAS
)  # fmt: skip

MODELS = [
    # Decoders with Llama's names, or the like.
    *alike(
        LLAMA,
        "Llama: llama; Mistral: mistral; Qwen2: qwen2; OLMo: olmo; Arcee: arcee; CWM: cwm; InternLM3: "
        "internlm3; EXAONE 3: exaone; SmolLM3: smollm3; Seed-OSS: seed_oss; StarCoder2: starcoder2; Nemotron: "
        "nemotron; Falcon-H1: falcon_h1; Phi-3: phi3; Phi-2: phi; StableLM: stablelm; Jais 2: jais2; "
        "HyperCLOVA X: hyperclovax",
        {
            "Gemma": ("gemma", {"config": WIDE}),
            "Moshi": ("moshi", {"config": {"ffn_dim": 24}}),
            "Qwen2-VL": ("qwen2_vl_text", SECTIONS),
            "Qwen2.5-VL": ("qwen2_5_vl_text", SECTIONS),
            "Higgs Audio": ("higgs_audio_v2", {"place": "model.layers.0.self_attn"}),
        },
    ),
    *alike(
        replace(LLAMA, config={**GROUPED, **EXPERTS}),
        "Mixtral: mixtral; Qwen2-MoE: qwen2_moe; Aria: aria_text; Phi-3.5-MoE: phimoe; GLM-4.5: glm4_moe; "
        "GPT-OSS: gpt_oss; MiniMax: minimax; Solar Open: solar_open",
    ),
    *alike(
        replace(LLAMA, config={**GROUPED, **EXPERTS}, arguments=f"{ROTARY}, scale=config.attention_multiplier"),
        "Granite: granite; Granite with sinks: granite_swa; GraniteMoE: granitemoe",
    ),
    *alike(
        replace(LLAMA, arguments=f"{ROTARY}, scale=1.0"),
        more={
            "Dia": (
                "dia_encoder",
                {"of": "dia.DiaEncoder", "place": "layers.0.self_attention", "config": WIDE, "call": ""},
            )
        },
    ),
    *alike(
        replace(LLAMA, arguments="scale=(config.head_dim / 2) ** -0.5"),
        more={
            "Zamba": (
                "zamba",
                {
                    "place": "layers.0.shared_transf.self_attn",
                    "config": {
                        "num_key_value_heads": 4,
                        "layers_block_type": ["hybrid", "hybrid"],
                        "mamba_d_state": 4,
                        "use_mamba_kernels": False,
                    },
                },
            )
        },
    ),
    *alike(
        replace(
            LLAMA,
            call="causal=True, softcap=config.attn_logit_softcapping",
            config=WIDE,
            arguments=f"{ROTARY}, scale=config.query_pre_attn_scalar ** -0.5",
        ),
        "Gemma 2: gemma2",
    ),
    *alike(
        replace(LLAMA, config={**GROUPED, **EXPERTS, "head_dim": 16}, arguments=INTERLEAVED),
        "Cohere: cohere; Cohere 2: cohere2; ERNIE 4.5: ernie4_5; ERNIE 4.5 MoE: ernie4_5_moe; Helium: helium; "
        "GLM: glm; GLM-4: glm4",
    ),
    # With norms of queries and keys.
    *alike(
        NORMED,
        "Qwen3: qwen3; Qwen3-VL: qwen3_vl_text; Apertus: apertus; EXAONE 4: exaone4; OLMo 2: olmo2; Molmo 2: "
        "molmo2_text",
        {
            "OLMoE": ("olmoe", {"config": {**EXPERTS, "head_dim": 16}}),
            "GLM-4.5 with norms": ("glm4_moe", {"config": {**EXPERTS, "use_qk_norm": True}}),
        },
    ),
    *alike(
        replace(NORMED, config={**WIDE, **EXPERTS}),
        "Qwen3-MoE: qwen3_moe; EXAONE MoE: exaone_moe; FlexOlmo: flex_olmo; MiniMax-M2: minimax_m2; Hunyuan "
        "3: hy_v3; Sarvam MoE: sarvam_moe",
    ),
    *alike(replace(NORMED, arguments=f"{LOCAL}, {RMS}"), "OLMo 3: olmo3"),
    *alike(replace(NORMED, arguments=f"{GLOBAL}, {RMS}"), more={"Mellum": ("mellum", MIXTURE)}),
    *alike(replace(NORMED, arguments=f"{ROTARY}, {RMS.replace('rms_norm_eps', 'norm_eps')}"), "LFM2: lfm2"),
    *alike(
        replace(NORMED, config={**WIDE, **EXPERTS}, arguments=f"{ROTARY}, {RMS_AFTER}"),
        "HunYuan: hunyuan_v1_dense; HunYuan MoE: hunyuan_v1_moe",
    ),
    *alike(
        replace(NORMED, arguments=f"{LOCAL}, scale=config.query_pre_attn_scalar ** -0.5, {RMS_PLUS_ONE}"),
        "Gemma 3: gemma3_text",
    ),
    *alike(
        replace(NORMED, arguments=f"{LOCAL}, scale=1.0, {RMS_VALUES}"),
        "Gemma 4 unified: gemma4_unified_text",
        {"Gemma 4": ("gemma4_text", {"config": {"vocab_size_per_layer_input": 40}})},
    ),
    *alike(
        replace(NORMED, arguments=f"{ROTARY}, {RMS_PLUS_ONE}"), more={"MiniMax-M3": ("minimax_m3_vl_text", MIXTURE)}
    ),
    *alike(
        replace(NORMED, arguments=f"{INTERLEAVED}, {LAYER_NORM}"),
        more={"Cohere with norms": ("cohere", {"config": {"use_qk_norm": True}})},
    ),
    *alike(
        replace(NORMED, arguments=f"{ROTARY}, {LAYER_NORM}"),
        more={
            "StableLM with norms": ("stablelm", {"config": {"qk_layernorm": True, "head_dim": 16}}),
            "Phi-2 with norms": ("phi", {"config": {"qk_layernorm": True, "head_dim": 16}}),
        },
    ),
    *alike(
        replace(NORMED, config={}, heads=HEADS, arguments=f'{ROTARY}, {LAYER_NORM}, layout="per_head"'),
        "Persimmon: persimmon",
    ),
    *alike(
        replace(NORMED, call="causal=True, positions=-np.arange(7)", arguments=f"{ROTARY}, {RMS_AFTER}"),
        "nanochat: nanochat",
    ),
    *alike(replace(NORMED, arguments=f"{INTERLEAVED}, {RMS_AFTER}"), more={"Llama 4 Scout": ("llama4_text", MIXTURE)}),
    # Decoders with names of their own.
    *alike(
        GPT,
        "GPT-2: gpt2; ImageGPT: imagegpt; OpenAI GPT: openai-gpt",
        {
            "CTRL": ("ctrl", {"place": "h.0.multi_head_attention"}),
            "OPT": ("opt", {"place": "decoder.layers.0.self_attn"}),
            "GPT-Neo": (
                "gpt_neo",
                {"place": "h.0.attn.attention", "config": {"num_layers": 2, "attention_types": [[["global"], 2]]}},
            ),
            "BioGPT": ("biogpt", {"place": "layers.0.self_attn"}),
            "XGLM": (
                "xglm",
                {"place": "layers.0.self_attn", "config": {"d_model": 64, "attention_heads": 4, "num_layers": 1}},
            ),
        },
    ),
    *alike(
        replace(GPT, arguments=PARTIAL),
        more={"GPT-J": ("gptj", {"config": {"rotary_dim": 8}}), "CodeGen": ("codegen", {"config": {"rotary_dim": 8}})},
    ),
    *alike(
        replace(GPT, arguments='layout="per_head"'),
        more={"GPT-BigCode with all heads": ("gpt_bigcode", {"config": {"multi_query": False}})},
    ),
    *alike(replace(GPT, heads=f"{HEADS}, num_kv_heads=1"), "GPT-BigCode, StarCoder: gpt_bigcode"),
    *alike(
        Model("", "", "layers.0.attention", arguments=f'{ROTARY}, layout="per_head"', call=CAUSAL),
        "GPT-NeoX, Pythia: gpt_neox; GPT-NeoX Japanese: gpt_neox_japanese",
    ),
    *alike(
        Model("", "", "h.0.self_attention", heads=f"{HEADS}, num_kv_heads=1", arguments=ROTARY, call=CAUSAL),
        more={"Falcon 7B": ("falcon", {"leave": "dense"})},
    ),
    *alike(
        Model(
            "",
            "",
            "h.0.self_attention",
            heads=f"{HEADS}, num_kv_heads=config.num_kv_heads",
            arguments=ROTARY,
            call=CAUSAL,
        ),
        more={
            "Falcon 40B": (
                "falcon",
                {"config": {"num_kv_heads": 2, "new_decoder_architecture": True}, "leave": "dense"},
            )
        },
    ),
    *alike(
        Model("", "", "h.0.self_attention", call="causal=True, alibi_slopes=alibi_slopes(4)"),
        more={"BLOOM": ("bloom", {"leave": "dense"}), "MPT": ("mpt", {"place": "blocks.0.attn"})},
    ),
    # Encoders.
    *alike(
        BERT,
        "BERT: bert; RoBERTa: roberta; XLM-RoBERTa: xlm-roberta; VisualBERT: visual_bert; CamemBERT: "
        "camembert; ELECTRA: electra; ERNIE: ernie; data2vec: data2vec-text; RemBERT: rembert; Splinter: "
        "splinter; TAPAS: tapas; MarkupLM: markuplm; LayoutLM: layoutlm; BERT generation: bert-generation",
        {
            "CANINE": ("canine", {"place": "initial_char_encoder.layer.0.attention"}),
            "BigBird (full)": ("big_bird", {"config": {"attention_type": "original_full"}}),
            "DPR": ("dpr", {"place": "question_encoder.bert_model.encoder.layer.0.attention"}),
            "ALBERT": (
                "albert",
                {"place": "encoder.albert_layer_groups.0.albert_layers.0.attention", "leave": "dense"},
            ),
        },
    ),
    *alike(
        Model("", "", ""),
        more={
            "DistilBERT": (
                "distilbert",
                {
                    "place": "transformer.layer.0.attention",
                    "config": {"dim": 64, "hidden_dim": 24, "n_heads": 4, "n_layers": 1},
                },
            ),
            "XLM": ("xlm", {"place": "attentions.0", "config": {"emb_dim": 64, "n_heads": 4, "n_layers": 1}}),
            "FlauBERT": ("flaubert", {"place": "attentions.0", "config": {"emb_dim": 64, "n_heads": 4, "n_layers": 1}}),
        },
    ),
    *alike(
        replace(BERT, enter="self", without=r"attention\.(LayerNorm|ln)\."), "ESM: esm; Megatron-BERT: megatron-bert"
    ),
    *alike(
        Model(
            "",
            "",
            "encoder.layer.0.attention",
            call='bias=t5_bias(arrays["encoder.relative_attention_bias.weight"], 7, 7)',
        ),
        more={"MPNet": ("mpnet", {"leave": "attn.o"})},
    ),
    *alike(
        Model("", "", "layers.0.attn", arguments=GLOBAL),
        "ModernBERT: modernbert",
        {"ModernBERT decoder": ("modernbert-decoder", {"call": CAUSAL})},
    ),
    *alike(
        replace(LLAMA, config={}, heads=HEADS, call=""),
        "Nomic BERT: nomic_bert; Jina v3: jina_embeddings_v3; GTE: gte",
        {"EuroBERT": ("eurobert", {"config": GROUPED, "heads": KV_HEADS})},
    ),
    *alike(
        replace(LLAMA, config={}, heads=HEADS, call="", arguments=f'{ROTARY}, norm={{"kind": "layer", "eps": 1e-5}}'),
        "ESM C: esmc",
    ),
    *alike(replace(BERT, arguments='rotary={"interleaved": True}'), more={"RoFormer": ("roformer", {"close": 1e-7})}),
    # Encoders and decoders.
    *alike(
        BART,
        "BART: bart; mBART: mbart; Blenderbot: blenderbot; Blenderbot small: blenderbot-small; Marian: "
        "marian; Pegasus: pegasus; PLBART: plbart; M2M-100, NLLB: m2m_100; MVP: mvp",
        {
            "BigBird-Pegasus (full)": ("bigbird_pegasus", {"config": {"attention_type": "original_full"}}),
            "LED decoder": ("led", {"place": "decoder.layers.0.self_attn", "call": CAUSAL}),
            "Whisper": (
                "whisper",
                {"config": WHISPER, "inputs": {"input_features": (1, 16, 16), "decoder_input_ids": (1, 5)}},
            ),
            "BART's cross attention": ("bart", {"place": "decoder.layers.0.encoder_attn"}),
        },
    ),
    *alike(
        replace(
            BART,
            config={
                "hidden_size": 64,
                "num_hidden_layers": None,
                "num_encoder_layers": 1,
                "num_decoder_layers": 1,
                "num_encoder_attention_heads": 4,
                "num_decoder_attention_heads": 4,
            },
            heads="num_heads=config.num_encoder_attention_heads",
        ),
        "ProphetNet: prophetnet",
    ),
    *alike(T5, "T5: t5; mT5: mt5; UMT5: umt5; Switch: switch_transformers"),
    *alike(replace(T5, place="decoder.block.0.layer.1.EncDecAttention", call=""), "T5's cross attention: t5"),
    # Names with two readings of the scale.
    *alike(
        Model("", "", "encoder.layer.0.attention", arguments="scale=1.0", inputs={"flattened_patches": (2, 7, 50)}),
        more={
            "Pix2Struct vision": (
                "pix2struct_vision_model",
                {
                    "of": "pix2struct.Pix2StructVisionModel",
                    "config": {"d_kv": 16, "patch_embed_hidden_size": 48, "d_ff": 24},
                },
            )
        },
    ),
    *alike(
        Model(
            "",
            "",
            "layer.0.self_attention.attention",
            dict(num_heads=4, d_kv=16, d_ff=24, num_layers=1, initializer_range=0.1),
            arguments="scale=1.0",
            call=f"{CAUSAL}, {T5_BIAS[:-1]}, bidirectional=False)",
        ),
        more={"Pix2Struct text": ("pix2struct_text_model", {"of": "pix2struct.Pix2StructTextModel"})},
    ),
    *alike(
        Model(
            "",
            "",
            "encoder.layer.0.attention",
            arguments="scale=config.head_dim ** -0.5",
            inputs={"flattened_patches": (2, 7, 50)},
        ),
        more={
            "Kosmos-2.5 vision": (
                "kosmos_2_5_vision_model",
                {"of": "kosmos2_5.Kosmos2_5VisionModel", "config": {"head_dim": 16, "patch_embed_hidden_size": 48}},
            )
        },
    ),
    *alike(
        Model(
            "",
            "",
            "layers.0.attn",
            dict(num_heads=4, num_layers=1, input_vocab_size=40, output_vocab_size=40, block_size=16),
            call=CAUSAL,
        ),
        more={"Bark": ("semantic", {"of": "bark.BarkSemanticModel"})},
    ),
    *alike(
        Model(
            "",
            "",
            "blocks.0.norm_attn_norm.attn",
            dict(
                d_model=64,
                n_heads=4,
                n_layers=1,
                attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 100},
                ffn_config={"ffn_hidden_size": 16},
            ),
            heads=f"{HEADS}, num_kv_heads=2",
            arguments="rotary={}",
            call=CAUSAL,
        ),
        "DBRX: dbrx",
    ),
    # Pictures and sound.
    *alike(
        VIT,
        "ViT: vit; DeiT: deit; I-JEPA: ijepa; Pixio: pixio; BEiT: beit; ViT-MAE: vit_mae; ViT-MSN: vit_msn",
        {
            "DINOv2": ("dinov2", {"place": "encoder.layer.0.attention"}),
            "DPT": ("dpt", {"place": "encoder.layer.0.attention"}),
            "data2vec vision": ("data2vec-vision", {"place": "encoder.layer.0.attention"}),
            "InternVL": ("internvl_vision", {"place": "encoder.layer.0.attention"}),
            "CLIP vision": ("clip_vision_model", {"place": "encoder.layers.0.self_attn"}),
            "SigLIP vision": ("siglip_vision_model", {"place": "encoder.layers.0.self_attn"}),
            "BLIP vision": ("blip_vision_model", {"of": "blip.BlipVisionModel", "place": "encoder.layers.0.self_attn"}),
        },
    ),
    *alike(
        Model("", "", "encoder.layers.0.self_attn"),
        more={
            "CLIP text": ("clip_text_model", {"call": CAUSAL}),
            "SigLIP text": ("siglip_text_model", {"of": "siglip.SiglipTextModel"}),
        },
    ),
    *alike(
        Model("", "", "encoder.layers.0.attention", inputs={"input_values": (1, 3000)}),
        "SEW: sew",
        {
            "wav2vec 2.0": ("wav2vec2", CONVOLUTIONS),
            "HuBERT": ("hubert", CONVOLUTIONS),
            "UniSpeech": ("unispeech", CONVOLUTIONS),
            "data2vec audio": ("data2vec-audio", CONVOLUTIONS),
        },
    ),
]

# Layers that compute what ours does not, and what the error says.
REFUSED = [
    replace(LLAMA, name="BitNet", kind="bitnet", message="attn_sub_norm.weight would change the result"),
    replace(LLAMA, name="DiffLlama", kind="diffllama", message="lambda_k1, .* belongs to the attention"),
    replace(LLAMA, name="Doge", kind="doge", message=r"\.A, .* belongs to the attention"),
    replace(LLAMA, name="AFMoE", kind="afmoe", config=EXPERTS, message="gate_proj.weight belongs"),
    replace(BERT, name="ConvBERT", kind="convbert", message="conv_kernel_layer.bias, .* would change the result"),
    replace(BERT, name="Nystromformer", kind="nystromformer", message="self.conv.weight belongs to the attention"),
    replace(BERT, name="ESM", kind="esm", message="LayerNorm.bias, .* belongs to the attention"),
    replace(BERT, name="Megatron-BERT", kind="megatron-bert", message="ln.bias, .* belongs to the attention"),
    replace(BERT, name="DeBERTa", kind="deberta", message="no known attention layer"),
    replace(BERT, name="DeBERTa v2", kind="deberta-v2", message="no known attention layer"),
    replace(
        LLAMA, name="Qwen3", kind="qwen3", config=WIDE, message="k_norm.weight, .*q_norm.weight belongs .* give norm="
    ),
    Model("GPT-NeoX", "gpt_neox", "layers.0.attention", message="more than one reading, .* give layout="),
    Model("GPT-BigCode", "gpt_bigcode", "h.0.attn", {"multi_query": False}, message="more than one .* give layout="),
]


def table() -> list[str]:
    """The table of docs/checkpoints.md: models whose layers are told the same, in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for model in MODELS:
        told = [part for part in (model.heads, model.arguments) if part and part not in (HEADS, KV_HEADS)]
        further = "leave out the norm of the input" if model.without else ""
        rows.setdefault((", ".join(told), model.call, further), []).append(model.name)
    lines = ["| models | arguments of `from_arrays` | of the call |", "|---|---|---|"]
    for (told, call, further), names in rows.items():
        cells = [f"`{text}`" if text else "" for text in (told, call)]
        cells[0] += f"{'; ' if told else ''}{further}" if further else ""
        lines.append(f"| {', '.join(names)} | {cells[0]} | {cells[1]} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
