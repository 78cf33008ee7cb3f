"""Attention layers of the transformers library, on random weights, against ours from their arrays.

What the library computes is the judge of what names of arrays mean. Its layers cast to float32 in places; here every
such cast is one to float64, so that results agree to rounding errors of float64. Tiny models, nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import models
import numpy as np
import pytest
from models import MODELS, REFUSED, SIZES, Model
from numpy.typing import NDArray

import attentile
from attentile import MultiHeadAttention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        torch = None

Array = NDArray[Any]

CLOSE32 = 2e-5  # relative; in float64 see Model.close


def test_the_page_shows_what_is_tested():
    page = Path(__file__).parents[1] / "docs" / "checkpoints.md"
    if not page.exists():
        pytest.skip("the documentation is not beside the tests")
    table = "\n".join(models.table())
    assert f"\n\n{table}\n\n" in page.read_text(encoding="utf-8"), "python tests/models.py prints the table"


def test_enough_models_are_compared():
    assert len({model.name for model in MODELS}) == len(MODELS) >= 118


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(torch, "float32", torch.float64),
            mock.patch.object(torch, "float", torch.float64),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def built(model: Model) -> tuple[Any, Any]:
    """Configuration and network with random weights; norms too, whose usual weight of 1 would hide much."""
    options = {name: value for name, value in {**SIZES, **model.config}.items() if value is not None}
    if model.of:
        module, name = model.of.split(".")
        kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
        config = kind.config_class(**options)
        net = kind._from_config(config, attn_implementation="eager")
    else:
        config = CONFIG_MAPPING[model.kind](**options)
        net = transformers.AutoModel.from_config(config, attn_implementation="eager")
    net = net.double().eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.requires_grad:  # a table of sinusoids
                continue
            drawn = torch.randn(parameter.shape, generator=random)
            parameter.copy_(drawn / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5 + drawn / 2)
    return config, net


def inputs(model: Model, config: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    shapes = model.inputs or {"input_ids": (2, 7)}
    if not model.inputs and getattr(config, "is_encoder_decoder", False):
        shapes = {**shapes, "decoder_input_ids": (2, 5)}
    return {
        name: torch.randint(3, 30, shape, generator=random) if "ids" in name else torch.rand(shape, generator=random)
        for name, shape in shapes.items()
    }


class _SeenError(Exception):
    """Ends a run of the network when its attention layer is done."""


def watched(model: Model, net: Any, given: dict[str, Any]) -> dict[str, Array]:
    """x, y and perhaps the context of the layer in a run of the network."""
    place = net.get_submodule(model.place)
    seen: dict[str, Any] = {}

    def enters(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen["x"] = arguments[0] if arguments else named["hidden_states"]
        if named.get("key_value_states") is not None:
            seen["context"] = named["key_value_states"]

    def leaves(_: Any, arguments: tuple[Any, ...], result: Any) -> None:
        seen["y"] = result[0] if isinstance(result, (tuple, list)) else result
        raise _SeenError

    place.get_submodule(model.enter).register_forward_pre_hook(enters, with_kwargs=True)
    place.get_submodule(model.leave).register_forward_hook(leaves)
    with torch.no_grad(), contextlib.suppress(_SeenError):
        net(**given)
    return {name: value.numpy() for name, value in seen.items()}


def compared(model: Model) -> tuple[Any, dict[str, Array], dict[str, Array]]:
    """Configuration, arrays, and what was seen of the layer."""
    transformers.logging.set_verbosity_error()
    with in_float64():
        config, net = built(model)
        seen = watched(model, net, inputs(model, config))
        arrays = {name: value.numpy() for name, value in net.state_dict().items() if value.dtype == torch.float64}
    return config, arrays, seen


def result(model: Model, config: Any, arrays: dict[str, Array], seen: dict[str, Array], dtype: Any) -> Array:
    names = {**vars(attentile), "np": np, "config": config, "arrays": arrays, "place": model.place}
    told = eval(f"dict({model.heads}, {model.arguments})", names)  # what the page shows
    call = eval(f"dict({model.call})", names)
    if "context" in seen:
        call["context"] = seen["context"].astype(dtype)
    kept = {name: array.astype(dtype) for name, array in arrays.items() if not re.search(model.without or "$.", name)}
    return MultiHeadAttention.from_arrays(kept, model.place, **told)(seen["x"].astype(dtype), **call)


if torch is not None:

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
    def test_model(model):
        config, arrays, seen = compared(model)
        want = seen["y"]
        assert 0.05 < np.abs(want).max() < 100
        for dtype, close in ((np.float64, model.close), (np.float32, CLOSE32)):
            found = result(model, config, arrays, seen, dtype)
            assert np.abs(found.reshape(want.shape) - want).max() <= close * max(1.0, np.abs(want).max())

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.name)
    def test_refused_model(model):
        with in_float64():
            config, net = built(model)
        arrays = {name: value.numpy() for name, value in net.state_dict().items() if value.dtype == torch.float64}
        heads = eval(f"dict({model.heads})", {"config": config})
        with pytest.raises(ValueError, match=model.message):
            MultiHeadAttention.from_arrays(arrays, model.place, **heads)
