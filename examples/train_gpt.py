"""A small GPT, trained from scratch in NumPy and attentile on the documentation that Python ships with.

    python examples/train_gpt.py                      two trainings, compared bit by bit; then it writes
    python examples/train_gpt.py --steps 3000         a better one
    python examples/train_gpt.py --prompt "The for"   what the text begins with

The model reads characters: 2 layers of 4 heads, 64 numbers per token, 256 tokens of context. The text is
pydoc_data.topics, what help("for") prints, so nothing is fetched. Every function here returns its result and the
function that takes gradients back through it, as attentile.attention_vjp does, and a training step is nothing but
these functions called in order and then in reverse.

Both trainings end with the same bits: attention and its gradients do not depend on threads, and NumPy's products
of the same matrices on one machine are the same. With matplotlib, the losses are drawn (--plot FILE).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

# Before NumPy is loaded: its products here are small, and threads that wait for each other by spinning lose time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

import attentile
from attentile import KVCache, MultiHeadAttention

Array = NDArray[Any]
Params = dict[str, Array]

WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 256
UNSEEN = 0.05  # of the text, at its end, to measure what was learnt


# ---- functions and their gradients ----


def linear(x: Array, w: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """x @ w; back(dy) gives (dx, dw)."""

    def back(dy: Array) -> tuple[Array, Array]:
        return dy @ w.T, x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])

    return x @ w, back


def normalise(x: Array, gain: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """x / sqrt(mean(x^2)) * gain, over each token; back(dy) gives (dx, dgain). Zhang and Sennrich, 2019."""
    size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    scaled = x / size

    def back(dy: Array) -> tuple[Array, Array]:
        dscaled = dy * gain
        dx = (dscaled - scaled * np.mean(dscaled * scaled, axis=-1, keepdims=True)) / size
        return dx, np.sum(dy * scaled, axis=tuple(range(dy.ndim - 1)))

    return scaled * gain, back


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """The mean of -log softmax(logits)[target], and its gradient by the logits."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(weights, targets[..., None], axis=-1)
    loss = float(-np.log(chosen).mean())
    np.put_along_axis(weights, targets[..., None], chosen - 1, axis=-1)
    return loss, weights / weights.dtype.type(targets.size)


# ---- the model ----


class Gpt:
    """Parameters by name, and the layers of attention around some of them."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
            found: Array = rng.standard_normal((rows, columns), dtype=np.float32)
            return found * np.float32(scale / math.sqrt(rows))

        gain, residual = np.ones(WIDTH, np.float32), 1 / math.sqrt(2 * LAYERS)
        self.params: Params = {"tokens": matrix(vocabulary, WIDTH), "gain": gain.copy()}
        for i in range(LAYERS):
            self.params |= {
                f"{i}.gain_attention": gain.copy(),
                f"{i}.w_q": matrix(WIDTH, 3 * WIDTH),  # of queries, keys and values side by side
                f"{i}.w_o": matrix(WIDTH, WIDTH, residual),
                f"{i}.gain_mlp": gain.copy(),
                f"{i}.up": matrix(WIDTH, 4 * WIDTH),
                f"{i}.down": matrix(4 * WIDTH, WIDTH, residual),
            }
        # A layer keeps the arrays that it is given: what an optimiser changes in place is changed there too.
        self.attention = [
            MultiHeadAttention(self.params[f"{i}.w_q"], None, None, self.params[f"{i}.w_o"], num_heads=HEADS, rotary={})
            for i in range(LAYERS)
        ]

    def loss(self, tokens: Array) -> tuple[float, Callable[[], Params]]:
        """That of tokens (items, L + 1), each from those before it; back() gives the gradients of the parameters."""
        p, inputs = self.params, tokens[:, :-1]
        x = p["tokens"][inputs]
        steps: list[Callable[..., Any]] = []
        for i, layer in enumerate(self.attention):
            rows, back_gain = normalise(x, p[f"{i}.gain_attention"])
            change, back_layer = layer.vjp(rows, causal=True)
            x = x + change
            rows, back_gain_mlp = normalise(x, p[f"{i}.gain_mlp"])
            hidden, back_up = linear(rows, p[f"{i}.up"])
            change, back_down = linear(np.maximum(hidden, 0), p[f"{i}.down"])
            x = x + change
            steps += [back_gain, back_layer, back_gain_mlp, back_up, lambda d, h=hidden: d * (h > 0), back_down]
        x, back_gain = normalise(x, p["gain"])
        logits, back_logits = linear(x, p["tokens"].T)
        loss, dlogits = cross_entropy(logits, tokens[:, 1:])

        def back() -> Params:
            grads: Params = {}
            dx, dtokens = back_logits(dlogits)
            dx, grads["gain"] = back_gain(dx)
            for i in reversed(range(LAYERS)):
                of_gain, of_layer, of_gain_mlp, of_up, of_relu, of_down = steps[6 * i : 6 * i + 6]
                d, grads[f"{i}.down"] = of_down(dx)
                d, grads[f"{i}.up"] = of_up(of_relu(d))
                d, grads[f"{i}.gain_mlp"] = of_gain_mlp(d)
                dx = dx + d
                of_weights = of_layer(dx)
                grads |= {f"{i}.{name}": of_weights[name] for name in ("w_q", "w_o")}
                d, grads[f"{i}.gain_attention"] = of_gain(of_weights["x"])
                dx = dx + d
            grads["tokens"] = np.ascontiguousarray(dtokens.T)
            np.add.at(grads["tokens"], inputs, dx)
            return grads

        return loss, back

    def next_logits(self, tokens: Array, caches: Sequence[KVCache]) -> Array:
        """Of the token that follows, from those that the caches do not have yet."""
        p = self.params
        x = p["tokens"][tokens]
        for i, (layer, cache) in enumerate(zip(self.attention, caches, strict=True)):
            x = x + np.asarray(layer(normalise(x, p[f"{i}.gain_attention"])[0], cache=cache))
            hidden = normalise(x, p[f"{i}.gain_mlp"])[0] @ p[f"{i}.up"]
            x = x + np.maximum(hidden, 0) @ p[f"{i}.down"]
        last: Array = normalise(x[-1:], p["gain"])[0] @ p["tokens"].T
        return last[0]

    def write(self, tokens: Sequence[int], count: int, temperature: float, seed: int) -> list[int]:
        """`count` tokens that follow these."""
        rng = np.random.default_rng(seed)
        caches = [KVCache(1, HEADS, WIDTH // HEADS) for _ in range(LAYERS)]
        found, new = list(tokens), list(tokens)
        for _ in range(count):
            logits = self.next_logits(np.array(new), caches).astype(np.float64) / temperature
            weights = np.exp(logits - logits.max())
            new = [int(rng.choice(weights.size, p=weights / weights.sum()))]
            found += new
        return found


# ---- training ----


class Adam:
    """Kingma and Ba, 2015; the step follows half a cosine to 0 after a short start, long gradients are shortened."""

    def __init__(self, params: Params, steps: int, rate: float = 4e-3) -> None:
        self.params, self.steps = params, steps
        self.rate, self.done = rate, 0
        self.first = {name: np.zeros_like(array) for name, array in params.items()}
        self.second = {name: np.zeros_like(array) for name, array in params.items()}

    def step(self, grads: Params) -> None:
        self.done += 1
        length = math.sqrt(sum(float(np.vdot(grad, grad)) for grad in grads.values()))
        rate = self.rate * min(1, self.done / 50) * (1 + math.cos(math.pi * self.done / self.steps)) / 2
        for name, array in self.params.items():
            grad = grads[name] * np.float32(min(1, 1 / length))
            self.first[name] += (grad - self.first[name]) * np.float32(0.1)
            self.second[name] += (grad * grad - self.second[name]) * np.float32(0.01)
            first = self.first[name] / np.float32(1 - 0.9**self.done)
            second = self.second[name] / np.float32(1 - 0.99**self.done)
            array -= np.float32(rate) * first / (np.sqrt(second) + np.float32(1e-8))


def batches(text: Array, items: int, context: int, seed: int, count: int) -> Iterator[Array]:
    """`count` times (items, context + 1) tokens from random places of the text."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(0, text.size - context, items)
        yield text[starts[:, None] + np.arange(context + 1)]


def train(name: str, text: Array, vocabulary: int, options: argparse.Namespace) -> tuple[Gpt, list[float], float]:
    """(the model, the loss of each step, the median of a step's seconds)."""
    model = Gpt(vocabulary, options.seed)
    adam, losses, seconds = Adam(model.params, options.steps), [], []
    drawn = batches(text, options.batch, options.context, options.seed, options.steps)
    for step, tokens in enumerate(drawn, start=1):
        start = time.perf_counter()
        loss, back = model.loss(tokens)
        adam.step(back())
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
        if sys.stderr.isatty():
            bar = "#" * (20 * step // options.steps)
            print(f"\r{name} [{bar:20}] {step}/{options.steps}, loss {loss:.3f} ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{name}: loss {losses[-1]:.3f} after {options.steps} steps")
    return model, losses, statistics.median(seconds)


def draw(losses: Sequence[float], file: str) -> None:
    """The loss of each step, and the mean of the last 20."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per character)")
    axes.plot(losses, color="#c8d4e0")
    axes.plot([statistics.fmean(losses[max(0, i - 19) : i + 1]) for i in range(len(losses))], color="#1f4e79")
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if the two trainings differ."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's documentation, twice; then it writes.")
    parser.add_argument("--steps", type=int, default=800, help="of each training (800)")
    parser.add_argument("--batch", type=int, default=8, help="stretches of text in a step (8)")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"characters in each ({CONTEXT})")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and text (0)")
    parser.add_argument("--prompt", default='The "while" statement', help="what the text begins with")
    parser.add_argument("--write", type=int, default=400, help="how many characters follow (400)")
    parser.add_argument("--plot", metavar="FILE", help="where the losses are drawn; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")

    document = "\n\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(document))
    number = {character: i for i, character in enumerate(characters)}
    text = np.array([number[character] for character in document])
    seen, unseen = np.split(text, [int(text.size * (1 - UNSEEN))])
    unknown = set(options.prompt) - set(number)
    if unknown or not options.prompt:
        parser.error(f"--prompt needs characters of the text; it has none of {sorted(unknown)}")
    print(f"{text.size} characters, {len(characters)} different ones")

    model, losses, seconds = train("first training", seen, len(characters), options)
    again, *_ = train("second training", seen, len(characters), options)
    same = all(np.array_equal(array, again.params[name]) for name, array in model.params.items())
    print(f"both trainings end with {'the same bits' if same else 'OTHER BITS'}")
    with attentile.use_backend("numpy"):
        few = argparse.Namespace(**{**vars(options), "steps": min(10, options.steps)})
        *_, plain = train("the same in NumPy", seen, len(characters), few)
    print(f"a step takes {seconds * 1e3:.0f} ms, with attention in plain NumPy {plain * 1e3:.0f} ms")
    test = [model.loss(tokens)[0] for tokens in batches(unseen, 8, options.context, seed=1, count=8)]
    print(f"loss {statistics.fmean(losses[-20:]):.2f}, of text that it has not seen {statistics.fmean(test):.2f}")
    if options.plot:
        draw(losses, options.plot)
    written = model.write([number[c] for c in options.prompt], options.write, 0.7, options.seed)
    print("\n" + "".join(characters[token] for token in written))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
