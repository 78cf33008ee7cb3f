"""The example examples/train_gpt.py: its gradients, the same bits twice, what it prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
FEW = ["--steps", "3", "--batch", "2", "--context", "20", "--write", "5"]


@pytest.fixture(scope="module")
def example() -> Any:
    if not EXAMPLE.exists():
        pytest.skip("the examples are not beside the tests")
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gradients_of_every_parameter(example, either):
    model = example.Gpt(11, seed=3)
    tokens = np.random.default_rng(4).integers(0, 11, (2, 13))
    grads = model.loss(tokens)[1]()
    assert grads.keys() == model.params.keys()
    for i, (name, array) in enumerate(model.params.items()):
        direction = np.random.default_rng(i).standard_normal(array.shape).astype(np.float32)
        direction *= np.sign(grads[name]) * np.sign(direction)  # every number pulls the same way
        direction /= np.linalg.norm(direction)
        losses = []
        for step in (0.01, -0.02):
            array += np.float32(step) * direction
            losses.append(model.loss(tokens)[0])
        array += np.float32(0.01) * direction
        slope = float((grads[name] * direction).sum())
        assert abs((losses[0] - losses[1]) / 0.02 - slope) < 0.01 * slope, name


def test_it_learns_the_same_twice_and_writes(example, capsys, monkeypatch, tmp_path):
    plot = ["--plot", str(tmp_path / "loss.png")] if importlib.util.find_spec("matplotlib") else []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert example.main([*FEW, *plot, "--prompt", "The for"]) == 0
    out, err = capsys.readouterr()
    assert "both trainings end with the same bits" in out
    assert "3/3, loss" in err
    written = out.partition("\n\n")[2]
    assert written.startswith("The for")
    assert len(written) == len("The for") + 5 + 1
    assert not plot or (tmp_path / "loss.png").stat().st_size > 1000


def test_the_loss_falls(example):
    """On a text that says one thing: from log 4 to nearly nothing."""
    text = np.tile([0, 1, 2, 3], 100)
    options = type("Options", (), dict(steps=30, batch=4, context=16, seed=0))
    _, losses, _ = example.train("x", text, 4, options)
    assert losses[0] > 1
    assert losses[-1] < 0.2


def test_what_was_cached_is_what_was_computed(example):
    """The text is written with the logits that training saw."""
    model = example.Gpt(11, seed=3)
    tokens = np.random.default_rng(4).integers(0, 11, 12)
    caches = [example.KVCache(1, 4, 16) for _ in model.attention]
    model.next_logits(tokens[:7], caches)
    stepwise = model.next_logits(tokens[7:], caches)
    fresh = [example.KVCache(1, 4, 16) for _ in model.attention]
    np.testing.assert_allclose(stepwise, model.next_logits(tokens, fresh), atol=1e-4)


@pytest.mark.parametrize("prompt", ["", "✓"])
def test_a_prompt_of_other_characters_is_refused(example, capsys, prompt):
    with pytest.raises(SystemExit):
        example.main([*FEW, "--prompt", prompt])
    assert "--prompt needs characters of the text" in capsys.readouterr().err


def test_another_random_number_gives_another_model(example):
    one, other = (example.Gpt(11, seed=seed).params for seed in (0, 1))
    assert not np.array_equal(one["tokens"], other["tokens"])
    assert "pydoc_data.topics" in sys.modules
