"""The arrays of an attention layer by the names that checkpoints give them.

A convention is a row of `CONVENTIONS`. To add one, add a row, a case in tests/checkpoint_cases.py, and a model in
tests/models.py.

Rows with the same names differ in the biases that are there, in the place, or in the shapes. What none of these tells,
and what changes the numbers, `asks` names: the caller must say.

An array that the layer does not use may be one that changes its result: a norm, a bias of the scores, a gate, an
adapter. There are more kinds than a list can name, so inside a module that is the attention and nothing else every
array must be used or known to be harmless. Where other parts of a block may lie alongside it, only known kinds are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import as_floating

Array = NDArray[Any]

_NAME = "MultiHeadAttention.from_arrays"
_SHOWN = 16  # names listed in an error

# Arrays that change the result in a way that MultiHeadAttention does not compute: refused anywhere below the layer.
_REFUSED = (
    r"(^|[._])((q|k|v|query|key|value|sub)_?(norm|layernorm|ln)|bias_[kv]|[qkv]_bias|\w*sinks|distance_embedding"
    r"|relative_position_bias_table|rel_pos_\w+|gru_rel_pos\w*|rel_attn_embed|conv_kernel_layer|lora_\w+)(\.|$)"
)
# The last part of the name of a module that is an attention, as in layers.0.self_attn or SelfAttention.
_ATTENTION = r"(?i)att|mha"
# Arrays of such a module that change nothing, or that the caller gives as `rotary`.
_HARMLESS = r"(.*\.)?(\w*inv_freq|rotary_emb\w*\.\w+|_extra_state)"
_MASKS = r"(causal_mask|(masked_)?bias)"  # the causal mask and the number it writes, which older files hold
# Norms of the block before and after its attention, and the frequencies of the rotation.
_GGUF = r"attn_((post_|output_|out_)?norm(_\w+)?|rot_embd)\.\w+"
# Taken wherever a layer has them: norms of queries and keys, of all heads or (the number) of one, and sinks.
_NORM = r"(?:attn_)?(q|k)(?:uery|ey)?_(?:norm|layernorm|ln)\.(?:norms\.(\d+)\.)?(weight|bias)"
_SINKS = r"(attn_)?sinks(\.weight)?|attention_sink_bias"


@dataclass(frozen=True, eq=False)
class Convention:
    """Names below the place of the layer. One weight before w_o: q, k and v are fused."""

    models: str
    weights: tuple[str, ...]  # of q, k, v (or the fused one), then of the output
    biases: tuple[str, ...]  # the same; fewer names than weights: the first is the bias of q, k and v together
    transposed: bool = True  # used as x @ W.T, as PyTorch's Linear does
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the constructor
    harmless: str = "$."  # regular expression of further arrays that may be ignored; of none, if not given
    own: str | None = None  # start of the names of the attention's arrays, if the place is a whole block
    biased: str = ".*"  # regular expression of the weights with a bias: their letters among "qkvo", "qo" if fused
    place: str = ""  # regular expression that is found in the place
    by_shape: bool = False  # whether the shapes must tell `transposed`
    asks: Mapping[str, str] = field(default_factory=dict)  # arguments that the caller must give, and their readings


def _linear(models: str, names: str, **rest: Any) -> Convention:
    split = names.split()
    return Convention(models, tuple(f"{n}.weight" for n in split), tuple(f"{n}.bias" for n in split), **rest)


Layer = tuple[Convention, str]  # and the place: the start of the names of its arrays

_PER_HEAD = {"layout": "per_head"}
_HEAD_BY_HEAD = r"(^|\.)(gpt_neox(_japanese)?\.layers\.\d+\.attention|h\.\d+\.self_attention)\.$"
_NEO = r"(^|\.)attn\.attention\.$"
_NORM_AFTER = r"output\.LayerNorm\.\w+"  # the block's, after the attention and the residual connection

CONVENTIONS = (
    Convention("nn.MultiheadAttention", ("in_proj_weight", "out_proj.weight"), ("in_proj_bias", "out_proj.bias")),
    Convention(
        "nn.MultiheadAttention with kdim or vdim",
        ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"),
        ("in_proj_bias", "out_proj.bias"),
    ),
    _linear("Llama, Mistral, Qwen2", "q_proj k_proj v_proj o_proj"),
    _linear("Llama's own files", "wq wk wv wo"),
    _linear("OPT, CLIP, Whisper", "q_proj k_proj v_proj out_proj", harmless=_MASKS, biased="(?!o$).*"),  # masks: GPT-J
    _linear(
        "GPT-Neo", "q_proj k_proj v_proj out_proj", harmless=_MASKS, biased="o", place=_NEO, options={"scale": 1.0}
    ),
    _linear(
        "a bias of out_proj alone",
        "q_proj k_proj v_proj out_proj",
        harmless=_MASKS,
        biased="o",
        place=rf"^(?!.*{_NEO})",
        asks={"scale": "1.0 (GPT-Neo) or head_dim ** -0.5 (others)"},
    ),
    _linear("Phi", "q_proj k_proj v_proj dense"),
    _linear("ModernBERT decoder", "q_proj k_proj v_proj Wo"),
    _linear("Janus, InternVL", "q_proj k_proj v_proj projection_layer"),
    _linear("ProphetNet", "query_proj key_proj value_proj out_proj"),
    _linear("DistilBERT, XLM", "q_lin k_lin v_lin out_lin"),
    _linear("CTRL", "Wq Wk Wv dense"),
    _linear("Moshi", "q_proj.linear k_proj.linear v_proj.linear o_proj.linear"),
    _linear("Phi-3", "qkv_proj o_proj"),
    _linear("Baichuan", "W_pack o_proj"),
    _linear("ModernBERT", "Wqkv Wo"),
    _linear("MPT, DBRX, Nomic BERT", "Wqkv out_proj"),
    _linear("Bark", "att_proj out_proj", harmless=_MASKS),
    _linear(
        "CodeGen",
        "qkv_proj out_proj",
        harmless=_MASKS,
        place=r"(^|\.)h\.\d+\.attn\.$",
        options={"layout": "codegen"},
    ),
    _linear(
        "qkv_proj in other places than CodeGen's",
        "qkv_proj out_proj",
        harmless=_MASKS,
        place=r"^(?!(.*\.)?h\.\d+\.attn\.$)",
        asks={"layout": "'codegen' (CodeGen) or 'side_by_side' (others)"},
    ),
    _linear("InternLM2, gpt-fast", "wqkv wo", asks={"layout": "'per_head' (InternLM2) or 'side_by_side' (gpt-fast)"}),
    _linear("BERT", "self.query self.key self.value output.dense", harmless=_NORM_AFTER),
    _linear("ViT", "attention.query attention.key attention.value output.dense", harmless=_NORM_AFTER),
    _linear("LXMERT", "att.query att.key att.value output.dense", harmless=_NORM_AFTER),
    _linear("BigBird-Pegasus", "self.query self.key self.value output"),
    _linear("ALBERT", "query key value dense", harmless=r"LayerNorm\.\w+"),
    _linear("Grounding DINO", "query key value out_proj"),
    _linear(
        "Pix2Struct, Kosmos-2.5",
        "query key value output",
        harmless=r"relative_attention_bias\.weight",
        asks={"scale": "1.0 (Pix2Struct) or head_dim ** -0.5 (Kosmos-2.5)"},
    ),
    _linear("GPT-2", "c_attn c_proj", transposed=False, by_shape=True, harmless=_MASKS),
    _linear(
        "GPT-BigCode, StarCoder, nanoGPT, Qwen",
        "c_attn c_proj",
        by_shape=True,
        harmless=_MASKS,
        asks={"layout": "'side_by_side' (nanoGPT, Qwen) or 'per_head' (GPT-BigCode with as many key heads as queries)"},
    ),
    _linear(
        "GPT-NeoX, BLOOM, Falcon", "query_key_value dense", options=_PER_HEAD, harmless=_MASKS, place=_HEAD_BY_HEAD
    ),
    _linear(
        "Persimmon, ChatGLM, Sarvam",
        "query_key_value dense",
        harmless=_MASKS,
        place=rf"^(?!.*{_HEAD_BY_HEAD})",
        asks={"layout": "'per_head' (GPT-NeoX, BLOOM, Falcon, Persimmon) or 'side_by_side' (ChatGLM, Sarvam)"},
    ),
    _linear("T5", "q k v o", options={"scale": 1.0}, harmless=r"relative_attention_bias\.weight", biased=""),
    _linear("MPNet", "q k v o", biased="qkvo"),
    _linear(
        "q, k, v, o with some biases",
        "q k v o",
        biased="(?!qkvo$).+",
        asks={"scale": "1.0 (T5, which has no biases) or head_dim ** -0.5 (MPNet, which has four)"},
    ),
    _linear("Qwen2.5-Omni's vision", "q k v proj"),
    _linear("ViT of timm", "qkv proj"),
    _linear("BLIP", "qkv projection"),
    _linear("TimeSformer", "attention.qkv output.dense"),
    _linear("GGUF", "attn_q attn_k attn_v attn_output", own="attn_", harmless=_GGUF),
    _linear("GGUF, fused", "attn_qkv attn_output", own="attn_", harmless=_GGUF),
)


def find_attention(
    arrays: Mapping[str, Any], prefix: str, heads: tuple[int, int], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of the constructor for the layer below prefix, by the only convention whose weights are all there.

    heads: numbers of query and of key heads. given: scale, norm and layout of the caller, which decide before names.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"{_NAME}: prefix is {prefix!r}; it must be a string")
    if not callable(getattr(arrays, "keys", None)):
        raise TypeError(f"{_NAME}: arrays is a {type(arrays).__name__}; it must be a mapping from names to arrays")
    if prefix and not prefix.endswith("."):
        prefix += "."
    names = [name for name in arrays.keys() if name.startswith(prefix)]  # noqa: SIM118 (a lazy file may not iterate)
    candidates = _candidates(names, prefix)
    complete = [
        (row, place)
        for (row, place), found in candidates.items()
        if len(found) == len(row.weights) and _fits(row, place, set(names), arrays, heads)
    ]
    if len(complete) != 1:
        raise ValueError(_not_one(names, prefix, candidates, complete))
    convention, place = complete[0]
    layer = _Layer(arrays, names, convention, place)
    found = layer.weights()  # before what lies alongside: a quantised file has scales there
    found |= layer.further()
    layer.refuse_others()
    if layer.norms and given["norm"] is None:
        listed = _listed([place + name for name in layer.norms])
        raise ValueError(
            f"{_NAME}: {listed} belongs to a norm of queries or keys, of which no array tells the kind and eps; give "
            "norm=, such as {'kind': 'rms', 'eps': 1e-6}, or leave it out of arrays"
        )
    for argument, readings in convention.asks.items():
        # With one key head, its columns lie in the same order in every layout but CodeGen's.
        if given[argument] is None and (argument != "layout" or heads[1] > 1 or "codegen" in readings):
            raise ValueError(
                f"{_NAME}: {place}{convention.weights[0]} has more than one reading, with other results, and no array "
                f"tells which; give {argument}= {readings}"
            )
    return found | {name: value for name, value in given.items() if value is not None}


def _fits(row: Convention, place: str, names: set[str], arrays: Mapping[str, Any], heads: tuple[int, int]) -> bool:
    """Whether the biases, the place and the shapes are those of the convention."""
    letters = "qkvo" if len(row.biases) == 4 else "qo"
    biased = "".join(p for p, name in zip(letters, row.biases, strict=True) if place + name in names)
    if not re.fullmatch(row.biased, biased) or not re.search(row.place, place):
        return False
    if not row.by_shape:
        return True
    fused, output = (np.shape(arrays[place + name]) for name in row.weights)
    columns = (heads[0] + 2 * heads[1], heads[0])  # in units of a head's width
    as_linear = fused[0] * columns[1] == columns[0] * output[-1]
    as_is = fused[-1] * columns[1] == columns[0] * output[0]
    return row.transposed == (as_linear and not as_is)


class _Layer:
    """One complete layer: its arrays as x @ W + b takes them, and what else lies at its place. No weight is copied."""

    def __init__(self, arrays: Mapping[str, Any], names: list[str], convention: Convention, place: str) -> None:
        self.arrays = arrays
        self.row, self.place = convention, place
        self.below = sorted(name[len(place) :] for name in names if name.startswith(place))
        self.used = {*convention.weights, *convention.biases}
        self.norms = [name for name in self.below if re.fullmatch(_NORM, name)]

    def array(self, name: str) -> Array:
        self.used.add(name)
        name = self.place + name
        wanted = "it must be floating (dequantise the weights of a quantised file)"
        return as_floating(_NAME, name, self.arrays[name], wanted)

    def weights(self) -> dict[str, Any]:
        """Weights, biases, and what the convention says."""
        row = self.row
        weights = [self.array(name).T if row.transposed else self.array(name) for name in row.weights]
        biases = [self.array(name) if name in self.below else None for name in row.biases]
        options = {**row.options, "w_k": None, "w_v": None}
        options |= zip(("w_q", "w_k", "w_v", "w_o") if len(weights) == 4 else ("w_q", "w_o"), weights, strict=True)
        *parts, options["b_o"] = biases
        if len(biases) < len(weights) and parts[0] is not None:
            ends = np.cumsum([weight.shape[-1] for weight in weights[:3]])
            if parts[0].shape != (ends[2],):
                raise ValueError(
                    f"{_NAME}: {self.place}{row.biases[0]} has shape {parts[0].shape}; it must be ({ends[2]},), "
                    "as long as q, k and v have rows together"
                )
            parts = [*np.split(parts[0], ends[:2])]
        return options | dict(zip(("b_q", "b_k", "b_v"), parts, strict=False)) | self._lone_biases(weights)

    def _lone_biases(self, weights: list[Array]) -> dict[str, Any]:
        """The biases of q and v where they lie alongside the weights (BEiT, VideoMAE)."""
        if any(name in self.below for name in self.row.biases[:-1]):
            return {}
        module = self.row.weights[0].removesuffix("weight").rstrip("._").rpartition(".")[0]
        names = {p: f"{module}.{p}_bias".lstrip(".") for p in "qkv"}
        found = {p: self.array(name) for p, name in names.items() if name in self.below}
        if len(weights) == 4 or not found:
            return {f"b_{p}": bias for p, bias in found.items()}
        none = np.zeros_like(next(iter(found.values())))
        return {"b_q": np.concatenate([found.get(p, none) for p in "qkv"])}

    def further(self) -> dict[str, Any]:
        """Sinks, and the norms of queries and keys."""
        sinks = [self.array(name) for name in self.below if re.fullmatch(_SINKS, name)]
        found: dict[str, Any] = {"sinks": sinks[0]} if sinks else {}
        several: dict[str, dict[int, Array]] = {}
        for name in self.norms:
            part, head, role = re.sub(_NORM, r"\1 \2 \3", name).split(" ")
            argument = f"{part}_norm" if role == "weight" else f"b_{part}_norm"
            several.setdefault(argument, {})[int(head or 0)] = self.array(name)
        for argument, heads in several.items():
            found[argument] = heads[0] if len(heads) == 1 else np.stack([heads[h] for h in sorted(heads)])
        return found

    def refuse_others(self) -> None:
        """Refuses arrays that are not used and may change the result."""
        row, place = self.row, self.place
        rest = [name for name in self.below if name not in self.used]
        refused = [place + name for name in rest if re.search(_REFUSED, name)]
        if refused:
            raise ValueError(
                f"{_NAME}: {_listed(refused)} would change the result in a way that is not supported; "
                "to go on without, leave it out of arrays"
            )
        of_attention = row.own is not None or not place or re.search(_ATTENTION, place.split(".")[-2])
        harmless = "|".join((_HARMLESS, row.harmless))
        unknown = [
            place + name
            for name in rest
            if of_attention and name.startswith(row.own or "") and not re.fullmatch(harmless, name)
        ]
        if unknown:
            raise ValueError(
                f"{_NAME}: {_listed(unknown)} belongs to the attention {place[:-1]!r} and may change the result in a "
                f"way that is not supported ({row.models} has no array of this name); if it does not, leave it out of "
                "arrays; so too a norm of the input or of the output, which is for the caller to apply"
            )


def _candidates(names: list[str], prefix: str) -> dict[Layer, list[str]]:
    """For each convention and place where some of its weights are: their names, without the place."""
    candidates: dict[Layer, list[str]] = {}
    for convention in CONVENTIONS:
        for weight in convention.weights:
            for name in names:
                place = name[: -len(weight)]
                if name.endswith(weight) and (place == prefix or (place.startswith(prefix) and place.endswith("."))):
                    candidates.setdefault((convention, place), []).append(weight)
    return candidates


def _not_one(names: list[str], prefix: str, candidates: dict[Layer, list[str]], complete: list[Layer]) -> str:
    """The message if no layer is complete, or more than one is."""
    if complete:
        layers = _listed([f"{place}{convention.weights[0]} ({convention.models})" for convention, place in complete])
        return (
            f"{_NAME}: {len(complete)} attention layers lie below prefix {prefix!r}: {layers}; give the prefix of one"
        )
    begun = [
        f"{row.models} without {', '.join(place + weight for weight in row.weights if weight not in found)}"
        for (row, place), found in candidates.items()
        if found != [row.weights[-1]]  # other parts of a model have an output of this name too
    ]
    known = "; ".join(f"{row.models}: {', '.join(row.weights)}" for row in CONVENTIONS)
    return (
        f"{_NAME}: no known attention layer lies below prefix {prefix!r}; found {_listed(names)}"
        f"{' (' + _listed(begun) + ')' if begun else ''}; known are {known}"
    )


def _listed(items: list[str]) -> str:
    if not items:
        return "nothing"
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
