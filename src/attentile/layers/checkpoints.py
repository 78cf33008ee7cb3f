"""The arrays of an attention layer by the names that checkpoints give them.

A convention is a row of `CONVENTIONS`. To add one, add a row and a case in tests/test_checkpoints.py.

An array that the layer does not use may be one that changes its result: a norm, a bias of the scores, a gate, an
adapter. There are more kinds than a list can name, so inside a module that is the attention and nothing else every
array must be used or known to be harmless. Where other parts of a block may lie beside it, only known kinds are
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
    r"(^|[._])((q|k|query|key|sub)_?(norm|layernorm|ln)|bias_[kv]|[qkv]_bias|\w*sinks|distance_embedding"
    r"|relative_position_bias_table|rel_pos_\w+|gru_rel_pos\w*|rel_attn_embed|conv_kernel_layer|lora_\w+)(\.|$)"
)
# The last part of the name of a module that is an attention, as in layers.0.self_attn or SelfAttention.
_ATTENTION = r"(?i)att|mha"
# Arrays of such a module that change nothing, or that the caller gives as `rotary`.
_HARMLESS = r"(.*\.)?(\w*inv_freq|rotary_emb\w*\.\w+|_extra_state)"
_MASKS = r"(masked_)?bias"  # the causal mask and the number it writes, which older files hold
# Norms of the block before and after its attention, and the frequencies of the rotation.
_GGUF = r"attn_((post_|output_|out_)?norm(_\w+)?|rot_embd)\.\w+"


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


def _linear(models: str, *names: str, **rest: Any) -> Convention:
    return Convention(models, tuple(f"{n}.weight" for n in names), tuple(f"{n}.bias" for n in names), **rest)


Layer = tuple[Convention, str]  # and the place: the start of the names of its arrays

CONVENTIONS = (
    Convention("nn.MultiheadAttention", ("in_proj_weight", "out_proj.weight"), ("in_proj_bias", "out_proj.bias")),
    Convention(
        "nn.MultiheadAttention with kdim or vdim",
        ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"),
        ("in_proj_bias", "out_proj.bias"),
    ),
    _linear("Llama, Mistral, Qwen2", "q_proj", "k_proj", "v_proj", "o_proj"),
    _linear("OPT, CLIP, Whisper", "q_proj", "k_proj", "v_proj", "out_proj", harmless=_MASKS),  # masks: GPT-J
    _linear("Phi-3", "qkv_proj", "o_proj"),
    _linear("BERT", "self.query", "self.key", "self.value", "output.dense", harmless=r"output\.LayerNorm\.\w+"),
    _linear("ViT", "attention.query", "attention.key", "attention.value", "output.dense"),
    _linear("GPT-2", "c_attn", "c_proj", transposed=False, harmless=_MASKS),
    _linear("GPT-NeoX, BLOOM, Falcon", "query_key_value", "dense", options={"per_head": True}, harmless=_MASKS),
    _linear("T5", "q", "k", "v", "o", options={"scale": 1.0}, harmless=r"relative_attention_bias\.weight"),
    _linear("ViT of timm", "qkv", "proj"),
    _linear("GGUF", "attn_q", "attn_k", "attn_v", "attn_output", own="attn_", harmless=_GGUF),
    _linear("GGUF, fused", "attn_qkv", "attn_output", own="attn_", harmless=_GGUF),
)


def find_attention(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Arguments of the constructor for the layer below prefix, by the only convention whose weights are all there."""
    if not isinstance(prefix, str):
        raise TypeError(f"{_NAME}: prefix is {prefix!r}; it must be a string")
    if not callable(getattr(arrays, "keys", None)):
        raise TypeError(f"{_NAME}: arrays is a {type(arrays).__name__}; it must be a mapping from names to arrays")
    if prefix and not prefix.endswith("."):
        prefix += "."
    names = [name for name in arrays.keys() if name.startswith(prefix)]  # noqa: SIM118 (a lazy file may not iterate)
    candidates = _candidates(names, prefix)
    complete = [(row, place) for (row, place), found in candidates.items() if len(found) == len(row.weights)]
    if len(complete) != 1:
        raise ValueError(_not_one(names, prefix, candidates, complete))
    convention, place = complete[0]
    below = sorted(name[len(place) :] for name in names if name.startswith(place))
    found = _take(arrays, set(names), convention, place)  # before what is beside: a quantised file has scales there
    refused = [place + name for name in below if re.search(_REFUSED, name)]
    if refused:
        raise ValueError(
            f"{_NAME}: {_listed(refused)} would change the result in a way that is not supported; "
            "to go on without, leave it out of arrays (sinks can be given to the call)"
        )
    unknown = [place + name for name in below if _is_unknown(name, convention, place)]
    if unknown:
        raise ValueError(
            f"{_NAME}: {_listed(unknown)} belongs to the attention {place[:-1]!r} and may change the result in a way "
            f"that is not supported ({convention.models} has no array of this name); if it does not, leave it out of "
            "arrays"
        )
    return found


def _is_unknown(name: str, convention: Convention, place: str) -> bool:
    """Whether an array below place belongs to the attention and is neither used nor known to be harmless."""
    if convention.own is not None and not name.startswith(convention.own):
        return False
    if convention.own is None and place and not re.search(_ATTENTION, place.split(".")[-2]):
        return False
    used = name in convention.weights or name in convention.biases
    return not used and not any(re.fullmatch(harmless, name) for harmless in (_HARMLESS, convention.harmless))


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


def _take(arrays: Mapping[str, Any], names: set[str], convention: Convention, place: str) -> dict[str, Any]:
    """One complete layer, its arrays as x @ W + b takes them; no copies."""

    def array(name: str) -> Array:
        wanted = "it must be floating (dequantise the weights of a quantised file)"
        return as_floating(_NAME, place + name, arrays[place + name], wanted)

    weights = [array(name).T if convention.transposed else array(name) for name in convention.weights]
    biases = [array(name) if place + name in names else None for name in convention.biases]
    options = {**convention.options, "w_k": None, "w_v": None}
    options |= zip(("w_q", "w_k", "w_v", "w_o") if len(weights) == 4 else ("w_q", "w_o"), weights, strict=True)
    *parts, options["b_o"] = biases
    if len(biases) < len(weights) and parts[0] is not None:
        ends = np.cumsum([weight.shape[-1] for weight in weights[:3]])
        if parts[0].shape != (ends[2],):
            raise ValueError(
                f"{_NAME}: {place}{convention.biases[0]} has shape {parts[0].shape}; it must be ({ends[2]},), "
                "as long as q, k and v have rows together"
            )
        parts = [*np.split(parts[0], ends[:2])]
    return options | dict(zip(("b_q", "b_k", "b_v"), parts, strict=False))
