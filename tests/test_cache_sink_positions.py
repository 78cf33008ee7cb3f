"""Kept first tokens with a rotation: seen from positions of the text, or of the cache, as StreamingLLM counts.

The oracle goes row by row: which tokens are seen, where each stands, one softmax. Most run on each implementation.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from cache_helpers import poison
from helpers import normal
from layer_oracle import make
from numpy.testing import assert_allclose, assert_array_equal

from attentile import KVCache, rotary_embedding

Array = Any

WIDTH, HEADS, GROUP = 8, 2, 2
ROTARY: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"interleaved": True, "rotary_dim": 4, "base": 500.0},
    "yarn": {"scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


class Text:
    """The tokens of one batch item, all of them and not rotated."""

    def __init__(self, left: int, kept: int, positions: str, rotary: dict[str, Any]) -> None:
        self.k, self.v = np.zeros((HEADS, 0, WIDTH)), np.zeros((HEADS, 0, WIDTH))
        self.left, self.kept, self.positions, self.rotary = left, kept, positions, rotary

    def append(self, k: Array, v: Array) -> None:
        self.k, self.v = np.concatenate([self.k, k], axis=1), np.concatenate([self.v, v], axis=1)

    def row(self, q: Array, at: int, h: int, allowed: Array) -> tuple[Array, Array, float]:
        """(output, weights of all tokens, logsumexp) of the query q of head h that stands at a position."""
        n = self.k.shape[1]
        seen = [j for j in range(min(at + 1, n)) if (j < self.kept or j >= at - self.left) and allowed[j]]
        # Where a token stands: in the text, or among those that the row may see (itself the last one).
        visible = [j for j in range(at + 1) if j < self.kept or j >= at - self.left]
        place = {j: j if self.positions == "text" else i for i, j in enumerate(visible)}
        turned = rotary_embedding(q[None], place[at], **self.rotary)[0]
        weights = np.zeros(n)
        if not seen:
            return np.zeros(WIDTH), weights, -np.inf
        keys = rotary_embedding(self.k[h // GROUP, seen], [place[j] for j in seen], **self.rotary)
        scores = keys @ turned / np.sqrt(WIDTH)
        lse = np.log(np.exp(scores).sum())
        weights[seen] = np.exp(scores - lse)
        return weights @ self.v[h // GROUP], weights, lse


def grown(positions: str, rotary: dict[str, Any], left: int, kept: int) -> tuple[KVCache, list[Text]]:
    """Two items of different lengths, appended in pieces."""
    window = {"window": (left, 0), "sink_tokens": kept}
    cache = KVCache(2, HEADS, WIDTH, dtype="float64", rotary=rotary, sink_positions=positions, **window)
    texts = [Text(left, kept, positions, rotary) for _ in range(2)]
    for seed, counts in enumerate([(2, 1), (5, 3), (1, 1), (9, 0), (3, 3)]):
        k, v = normal(2, 2, HEADS, max(counts), WIDTH, dtype=np.float64, seed=seed)
        cache.append(k, v, lengths=counts)
        for b, n in enumerate(counts):
            texts[b].append(k[b, :, :n], v[b, :, :n])
        poison(cache)
        check(cache, texts)
    return cache, texts


def check(cache: KVCache, texts: list[Text], rows: int = 1, mask: Array = None, **options: Any) -> None:
    """The last rows of each item against the oracle."""
    q = normal(2, HEADS * GROUP, rows, WIDTH, dtype=np.float64, seed=99)
    given = options if mask is None else {**options, "mask": mask}
    out, lse, weights = cache.attend(q, return_lse=True, return_weights=True, **given)
    assert_array_equal(cache.attend(q, **given), out)
    allowed = np.broadcast_to(True if mask is None else mask, (*q.shape[:3], cache.length))
    for b, h, i in np.ndindex(q.shape[:3]):
        at = texts[b].k.shape[1] - rows + i
        if at < 0:
            continue
        wanted = texts[b].row(q[b, h, i], at, h, allowed[b, h, i])
        padding = np.zeros(cache.length - texts[b].k.shape[1])
        assert_allclose(out[b, h, i], wanted[0], rtol=1e-10, atol=1e-13)
        assert_allclose(weights[b, h, i], np.append(wanted[1], padding), rtol=1e-10, atol=1e-13)
        assert_allclose(lse[b, h, i], wanted[2], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "left", "kept"),
    [
        *(("plain", *window) for window in ((4, 2), (0, 1), (6, 9), (2, 30))),
        *(("interleaved", 4, 2), ("interleaved", 6, 9), ("yarn", 0, 1), ("yarn", 2, 30)),
    ],
)
@pytest.mark.parametrize("positions", ["text", "cache"])
def test_against_row_by_row(impl, positions, kind, left, kept):
    cache, texts = grown(positions, ROTARY[kind], left, kept)
    check(cache, texts, rows=3)
    for end in ([19, 7], [18, 7]):
        cache.truncate(end)
        for text, n in zip(texts, end, strict=True):
            text.k, text.v = text.k[:, :n], text.v[:, :n]
        check(cache, texts)
    cache.reorder([1, 1])
    check(cache, [texts[1]] * 2)


@pytest.mark.parametrize("kept", [3, 270])
def test_over_several_pages(impl, kept):
    text, cache = (
        Text(300, kept, "cache", {}),
        KVCache(1, HEADS, WIDTH, dtype="float64", window=(300, 0), sink_tokens=kept, sink_positions="cache", rotary={}),
    )
    for seed, n in enumerate([400, 300, 1]):
        k, v = normal(2, 1, HEADS, n, WIDTH, dtype=np.float64, seed=seed)
        cache.append(k, v)
        text.append(k[0], v[0])
    poison(cache)
    q = normal(1, HEADS * GROUP, 1, WIDTH, dtype=np.float64)
    found = cache.attend(q)
    for h in range(HEADS * GROUP):
        assert_allclose(found[0, h, 0], text.row(q[0, h, 0], 700, h, np.ones(701, bool))[0], rtol=1e-10)


def test_masks_of_every_shape(impl):
    cache, texts = grown("cache", {}, 4, 2)
    rng, n = np.random.default_rng(0), cache.length
    for shape in [(), (1, 1), (n,), (3, n), (3, 1), (HEADS * GROUP, 3, n), (2, 1, 1, n)]:
        check(cache, texts, rows=3, mask=rng.random(shape) < 0.6 if shape else np.bool_(True))


def test_other_options_are_those_of_both_parts(impl):
    """Each against the same call with the option written as a bias, or as a function on the scores."""
    cache, _ = grown("cache", {}, 4, 2)
    q, n = normal(2, HEADS * GROUP, 2, WIDTH, dtype=np.float64), cache.length
    rng = np.random.default_rng(1)
    bias, slopes, ids = rng.standard_normal((2, n)), rng.random(HEADS * GROUP), rng.integers(0, 2, n)
    position = cache.lengths[:, None, None, None] - 2 + np.arange(2)[:, None]
    options: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"bias": bias}, {"score_mod": lambda s, b, h, i, j: s + bias[i, j]}),
        ({"scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "score_mod": lambda s, *_: 2 * np.tanh(s / 2)}),
        ({"alibi_slopes": slopes}, {"bias": -slopes[:, None, None] * np.abs(position - np.arange(n))}),
        ({"segments": (np.array([0, 1]), ids)}, {"mask": np.array([[0], [1]]) == ids}),
        ({"segments": (np.array([0, 1]), np.sort(ids))}, {"mask": np.array([[0], [1]]) == np.sort(ids)}),
        ({"q_start": cache.lengths - 2}, {}),
        ({"causal": False}, {}),
        ({"num_threads": 2}, {"num_threads": 1}),
    ]
    for given, other in options:
        for more in ({"return_lse": True}, {"return_weights": True, "sinks": np.linspace(-1, 1, HEADS * GROUP)}):
            found, wanted = cache.attend(q, **given, **more), cache.attend(q, **other, **more)
            for one, two in zip(found, wanted, strict=True):
                assert (one is None) == (two is None)
                if one is not None:
                    assert_allclose(one, two, rtol=1e-10, atol=1e-13)
    sunk = cache.attend(q, return_weights=True, return_lse=True, sinks=np.ones(HEADS * GROUP))
    plain = cache.attend(q, return_weights=True, return_lse=True)
    share = 1 / (1 + np.exp(1 - plain.lse))[..., None]
    assert_allclose(sunk.weights, plain.weights * share, rtol=1e-10)
    assert_allclose(sunk.out, plain.out * share, rtol=1e-10)


def test_a_row_has_the_bits_of_its_own_call(fma_isa):
    cache, _ = grown("cache", {}, 4, 2)
    q = normal(2, HEADS * GROUP, 3, WIDTH, dtype=np.float64)
    whole = cache.attend(q)
    for i in range(3):
        assert_array_equal(cache.attend(q[:, :, i : i + 1], q_start=cache.lengths - 3 + i), whole[:, :, i : i + 1])
    alone = cache.fork()
    alone.reorder([1])
    assert_array_equal(alone.attend(q[1:]), whole[1:])


def test_errors_say_what_they_say_without_it(impl):
    cache, _ = grown("cache", {}, 4, 2)
    q = normal(2, HEADS * GROUP, 2, WIDTH, dtype=np.float64)
    n = cache.length
    for options, match in [
        ({"mask": np.ones((3, n), bool)}, rf"mask has shape \(3, {n}\), which does not broadcast to \(2, 4, 2, {n}\)"),
        ({"bias": np.ones((2, n - 1))}, rf"bias has shape \(2, {n - 1}\)"),
        ({"q_start": 7}, "the window has dropped"),
        ({"out": np.ones(3)}, "out has shape"),
    ]:
        with pytest.raises(ValueError, match=rf"^KVCache\.attend: .*{match}"):
            cache.attend(q, **options)


def test_copies_and_files_know_it(impl):
    cache, texts = grown("cache", {"base": 500.0}, 4, 2)
    file = io.BytesIO()
    cache.save(file)
    file.seek(0)
    for twin in (cache.fork(), pickle.loads(pickle.dumps(cache)), KVCache.load(file)):
        assert repr(twin) == repr(cache)
        assert twin.sink_positions == "cache"
        check(twin, texts)
    assert "sink_tokens=2, sink_positions=cache, rotary=" in repr(cache)


def test_in_a_layer(impl):
    layer, x = make(kv_heads=2, width=WIDTH).layer(), normal(1, 12, 12, dtype=np.float64)
    window = {"window": (3, 0), "sink_tokens": 2, "rotary": {}, "sink_positions": "cache"}
    steps, whole = (KVCache(1, 2, WIDTH, dtype="float64", **window) for _ in range(2))
    wanted = layer(x, cache=whole)
    for i in range(12):
        assert_allclose(layer(x[:, i : i + 1], cache=steps), wanted[:, i : i + 1], rtol=1e-12, atol=1e-14)
    assert_allclose(steps.keys(), whole.keys(), rtol=1e-12, atol=1e-14)


TABLE = np.ones((9, 4))
LENGTH = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sink_positions": "here"}, "sink_positions is 'here'; it must be 'text' or 'cache'"),
        ({"sink_positions": 3}, "sink_positions is 3; it must be"),
        ({"sink_positions": "cache"}, "give window=, sink_tokens= and rotary= too"),
        ({"sink_positions": "cache", "rotary": {}, "window": (3, 0)}, "give window=, sink_tokens= and rotary= too"),
        ({"sink_positions": "cache", "window": (3, 0), "sink_tokens": 1}, "give window=, sink_tokens= and rotary= too"),
        *(
            ({"sink_positions": "cache", "window": (3, 0), "sink_tokens": 1, "rotary": rotary}, "go with .*'text'")
            for rotary in ({"cos": TABLE, "sin": TABLE}, {"scaling": LENGTH})
        ),
    ],
)
def test_what_the_constructor_refuses(options, match):
    with pytest.raises(ValueError, match=rf"^KVCache: .*{match}"):
        KVCache(1, 1, 8, **options)
