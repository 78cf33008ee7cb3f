"""The NumPy twin: its blocks, and the values that a masked key must not let through."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from helpers import most_allocated
from oracle import allowed_keys, oracle

from attentile import Partial, attention, attention_partial, attention_stats, use_backend
from attentile.core import twin
from attentile.inspection.stats import KINDS


@pytest.fixture(autouse=True)
def numpy_backend():
    with use_backend("numpy"):
        yield


@pytest.mark.parametrize(
    ("shape", "keys", "group"),
    [((4, 8), 8, 1), ((3000, 2, 6), 60, 2), ((2, 8, 300), 700, 4), ((3, 5000), 4096, 1), ((1, 6, 1), 300_000, 3)],
)
def test_blocks_cover_every_row_once(shape, keys, group):
    seen = np.zeros(shape, int)
    for place in twin.places(shape, keys, group):
        twin.cut(seen[..., None], place)[...] += 1
        if place is not None:
            heads, rows = place[-2:]
            assert heads.start % group == heads.stop % group == 0
            assert rows.stop - rows.start <= 64 or math.prod(s.stop - s.start for s in place) * keys <= 2**19
    assert (seen == 1).all()


def test_small_items_and_heads_share_a_block():
    """What a call costs is then NumPy's arithmetic, not Python's loop."""
    assert list(twin.places((4, 8), 8)) == [None]
    assert list(twin.places((12, 64), 64)) == [None]
    assert len(list(twin.places((3 * 4096, 8), 8))) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, "both", "all"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("group", [1, 2])
def test_values_that_are_not_finite(value, dtype, group):
    """They show in the rows that see them, 0 * Inf too, and in no other row."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 2 * group, 7, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 2, 9, 8)).astype(dtype)
    bad = {"both": [np.inf, -np.inf, 1.0], "all": [np.nan, np.inf, -np.inf]}.get(value, [value, value, 2.0])
    v[..., [1, 4, 6], 2] = bad
    v[..., [1, 4, 6], 5] = bad[::-1]
    k[0, 0, 4] = -np.inf  # scores of -inf and inf, or NaN: weights of 0
    mask = rng.random((2, 1, 7, 9)) < 0.5
    mask[..., 0] = True
    for options in ({"mask": mask}, {"mask": mask, "causal": "upper_left"}, {"key_lengths": [5, 2]}):
        allowed = allowed_keys((*q.shape[:-1], 9), **options)
        with np.errstate(all="ignore"):
            wanted = oracle(q, k, v, allowed)
        got = attention(q, k, v, return_lse=True, return_weights=True, **options)
        np.testing.assert_allclose(got.out, wanted.out, rtol=1e-4)
        np.testing.assert_allclose(got.weights, wanted.weights, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(got.lse, wanted.lse, rtol=1e-4)


def test_options_with_batch_axes_that_queries_and_keys_lack():
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((2, 3, 4, 5))
    v, mask = rng.standard_normal((6, 3, 4, 2)), rng.random((6, 1, 4, 4)) < 0.6
    bias, lengths = rng.standard_normal((6, 3, 4, 4)), [4, 3, 2, 1, 0, 4]
    for options in ({}, {"mask": mask}, {"bias": bias}, {"key_lengths": lengths}, {"q_start": lengths, "causal": True}):
        got = attention(q, k, v, **options)
        for i in range(6):
            own = {name: x if x is True else x[i] for name, x in options.items()}
            np.testing.assert_allclose(got[i], attention(q, k, v[i], **own), atol=1e-12)


def test_arrays_with_and_without_an_axis_of_heads():
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 4, 5))
    want = attention(q, k, v, causal=True, sinks=[0.5], bias=np.ones((1, 4, 4)), alibi_slopes=[0.1])
    assert want.shape == (4, 5)
    for shapes in itertools.product([(4, 5), (1, 4, 5)], repeat=3):
        arrays = [x.reshape(shape) for x, shape in zip((q, k, v), shapes, strict=True)]
        mask = np.ones((1, 4, 4), bool)
        got = attention(*arrays, causal=True, sinks=[0.5], bias=np.ones((4, 4)), alibi_slopes=[0.1], mask=mask)
        np.testing.assert_allclose(got.reshape(4, 5), want, atol=1e-14)


def test_rows_go_on_over_blocks():
    rng = np.random.default_rng(6)
    q, k, v = rng.standard_normal((3, 2, 4, 300, 8)).astype(np.float32)
    parts = [attention_partial(q, k[:, :, at], v[:, :, at]) for at in (slice(0, 256), slice(256, 300))]
    assert isinstance(parts[0], Partial)
    rest = k[:, :, 256:], v[:, :, 256:]
    got = attention(q, *rest, before=parts[0], sinks=np.zeros(4), return_weights=True, return_lse=True)
    want = attention(q, k, v, sinks=np.zeros(4), return_weights=True, return_lse=True)
    np.testing.assert_allclose(got.out, want.out, atol=1e-6)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-6)
    np.testing.assert_allclose(got.weights, want.weights[..., 256:], atol=1e-6)


OPTIONS = {
    "plain": {},
    "causal": {"causal": "lower_right", "key_lengths": [150, 40]},
    "window": {"window": (9, 3), "causal": "upper_left", "alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    "mask": {"mask": np.random.default_rng(8).random((2, 4, 90, 150)) < 0.3, "sinks": [0.0, 1.0, -1.0, 2.0]},
    "bias": {"bias": np.where(np.random.default_rng(9).random((4, 90, 150)) < 0.3, -np.inf, 0.5), "softcap": 3.0},
    "segments": {"segments": (np.arange(90)[None] // 20, np.arange(150)[None] // 30)},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s + b - h + 0.01 * (i - j)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("block", [2**8, 2**12, 2**15])
def test_blocks_change_nothing_but_rounding(monkeypatch, name, block):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, heads, n, 8)) for heads, n in ((4, 90), (2, 150), (2, 150)))
    options = {**OPTIONS[name], "return_lse": True, "return_weights": True}
    before = attention_partial(q, k[:, :, :5], v[:, :, :5])
    want = attention(q, k, v, **options), attention(q, k, v, before=before, **options)
    stats = None if name == "score_mod" else attention_stats(q, k, v, rows=[3, 80], which=KINDS, **OPTIONS[name])
    monkeypatch.setattr(twin, "_BLOCK", block)
    monkeypatch.setattr(twin, "_LEAST_ROWS", 7)
    assert len(list(twin.places((2, 4, 90), 150, 2))) > 3
    got = attention(q, k, v, **options), attention(q, k, v, before=before, **options)
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-13)
    if stats is not None:
        found = attention_stats(q, k, v, rows=[3, 80], which=KINDS, **OPTIONS[name])
        for x, y in zip(found, stats, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": np.tri(2048, dtype=bool)}])
def test_memory_is_bounded(options):
    """Of a block of 256 rows by 2,048 keys, not of 4 x 2,048 x 2,048 scores in 64 MiB."""
    q = np.zeros((4, 2048, 4), np.float32)
    assert most_allocated(lambda: attention(q, q, q, **options)) < 2**24


def test_score_mod_runs_under_the_callers_handling_of_errors():
    seen = []
    x = np.ones((3, 4))
    with np.errstate(over="raise", invalid="warn"):
        attention(x, x, x, score_mod=lambda s, *_: seen.append(np.geterr()) or s)
    assert (seen[0]["over"], seen[0]["invalid"]) == ("raise", "warn")
