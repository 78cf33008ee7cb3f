"""0 * NaN is NaN: a key that is seen and scores -inf counts on every path, and one that is not seen on none.

Some values of such keys are NaN or Inf here. Where a row sees one, its output is NaN; everywhere else it has the bits
of the same call without them, whatever its neighbours see.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from helpers import same_bits
from numpy.testing import assert_array_equal
from oracle import allowed_keys

from attentile import KVCache, attention, attention_partial

HEADS, ROWS, KEYS, WIDTH, VALUES = 2, 70, 600, 8, 20
VANISHING = [5, 40, *range(256, 320), 599]  # keys of which every row's score is -inf
RNG = np.random.default_rng(50)
SLOPED = RNG.random((HEADS, ROWS, KEYS)) < 0.5

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True, "q_start": 540},
    "early": {"causal": True, "q_start": 0},
    "lengths": {"key_lengths": 560},
    "window": {"window": (300, 20), "q_start": 270},
    "segments": {"segments": (np.arange(ROWS) // 25, np.arange(KEYS) // 230)},
    "mask": {"mask": SLOPED},
    "a mask that is a run of keys": {"mask": (np.arange(KEYS) > 30) & (np.arange(KEYS) < 300)},
    "a mask for all rows": {"mask": SLOPED[0, 0]},
    "a bias of -inf": {"bias": np.where(SLOPED, 0.5, -np.inf)},
    "sinks": {"sinks": np.array([0.5, -1.0]), "key_lengths": 301},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1]), "causal": True, "q_start": 300},
    "only such keys": {"key_lengths": 300, "window": (30, 30), "q_start": 256},
}


def arrays(dtype: Any, finite: bool) -> tuple[Any, ...]:
    """q, k, v; the score is -inf because k is, or because the product of finite numbers overflows."""
    q, k = RNG.random((HEADS, ROWS, WIDTH)), RNG.standard_normal((HEADS, KEYS, WIDTH))
    v = RNG.standard_normal((HEADS, KEYS, VALUES)).astype(dtype)
    q[..., 0], k[..., 0] = 1, 0
    k[:, VANISHING] = 0
    if finite:
        q[..., 0] = large = 1e20 if dtype == np.float32 else 1e200
        k[:, VANISHING, 0] = -large
    else:
        k[:, VANISHING, 0] = -np.inf
    return q.astype(dtype), k.astype(dtype), v


def poisoned(v: Any) -> tuple[Any, Any]:
    """The values with NaN and Inf at such keys, and where."""
    where = np.zeros(v.shape, bool)
    where[:, VANISHING] = RNG.random((HEADS, len(VANISHING), VALUES)) < 0.1
    return np.where(where, np.where(RNG.random(v.shape) < 0.5, np.nan, np.inf), v).astype(v.dtype), where


@functools.cache
def seen_by(name: str) -> Any:
    return allowed_keys((HEADS, ROWS, KEYS), **OPTIONS[name])


def expected(clean: Any, where: Any, name: str) -> Any:
    """The clean result, NaN where a row sees a value that is not finite."""
    allowed = seen_by(name)
    return np.where((allowed[..., None] & where[:, None]).any(axis=2), np.nan, clean).astype(clean.dtype)


def cut(options: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The same options for some of the rows."""
    found = dict(options)
    for name in ("mask", "bias"):
        if name in options:
            found[name] = np.broadcast_to(options[name], (HEADS, ROWS, KEYS))[:, rows]
    if "segments" in options:
        found["segments"] = (options["segments"][0][rows], options["segments"][1])
    if "q_start" in options:
        found["q_start"] = options["q_start"] + rows.start
    return found


@pytest.fixture(params=[(np.float32, True), (np.float64, False)], ids=["finite float32", "infinite float64"])
def case(request) -> tuple[Any, ...]:
    q, k, v = arrays(*request.param)
    return q, k, v, *poisoned(v)


@pytest.mark.parametrize("name", OPTIONS)
def test_of_a_block_of_rows(impl, case, name):
    q, k, v, bad, where = case
    options = OPTIONS[name]
    want = expected(attention(q, k, v, **options), where, name)
    assert np.isnan(want).any()
    same_bits(attention(q, k, bad, **options), want)
    with_weights = attention(q, k, bad, return_weights=True, return_lse=True, **options)
    clean = attention(q, k, v, return_weights=True, return_lse=True, **options)
    same_bits(with_weights.out, want)
    same_bits(with_weights.weights, clean.weights)
    same_bits(with_weights.lse, clean.lse)


@pytest.mark.parametrize("name", OPTIONS)
def test_of_few_rows(impl, case, name):
    q, k, v, bad, where = case
    whole = expected(attention(q, k, v, **OPTIONS[name]), where, name)
    for rows in (slice(0, 1), slice(20, 21), slice(30, 33), slice(41, ROWS)):
        for threads in (1, 2, 7):
            found = attention(q[:, rows], k, bad, num_threads=threads, **cut(OPTIONS[name], rows))
            if impl == "reference":  # of other shapes NumPy's products have other bits
                assert_array_equal(np.isnan(found), np.isnan(whole[:, rows]))
            else:
                same_bits(found, whole[:, rows])


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, ROWS)], ids=str)
@pytest.mark.parametrize("name", ["nothing", "mask", "a bias of -inf", "a mask for all rows"])
def test_of_rows_that_go_on(impl, case, name, rows):
    q, k, _, bad, _ = case
    q, options = q[:, rows], cut(OPTIONS[name], rows)
    want, before = attention(q, k, bad, **options), None
    for start, end in ((0, 256), (256, 512), (512, KEYS)):
        part = {key: np.broadcast_to(value, (*q.shape[:2], KEYS))[..., start:end] for key, value in options.items()}
        if end == KEYS:
            found = attention(q, k[:, start:], bad[:, start:], before=before, **part)
        else:
            before = attention_partial(q, k[:, start:end], bad[:, start:end], before=before, **part)
    if impl == "reference":
        assert_array_equal(np.isnan(found), np.isnan(want))
    else:
        same_bits(found, want)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_of_a_cache(impl, case, rows):
    q, k, _, bad, _ = case
    cache = KVCache(1, HEADS, WIDTH, value_dim=VALUES, dtype=q.dtype)
    cache.append(k[None], bad[None])
    found = cache.attend(q[None, :, ROWS - rows :])[0]
    want = attention(q[:, ROWS - rows :], k, bad, causal="lower_right")
    assert np.isnan(want).any()
    if impl == "reference":
        assert_array_equal(np.isnan(found), np.isnan(want))
    else:
        same_bits(found, want)


def test_a_row_does_not_depend_on_its_neighbours(impl):
    q, k, v = np.ones((3, 1)), np.array([[1.0], [-np.inf], [0.0]]), np.array([[2.0], [np.nan], [7.0]])
    found = {
        "alone": attention(q[:1], k[:2], v[:2])[0, 0],
        "lengths": attention(q[:1], k, v, key_lengths=2)[0, 0],
        "causal": attention(q, k, v, causal=True)[1, 0],
        "mask": attention(q, k, v, mask=np.arange(3) < 2)[1, 0],
        "bias": attention(q, k, v, bias=np.array([0, 0, -np.inf]))[1, 0],
        "many": attention(np.ones((60, 1)), k, v, causal="upper_left")[1, 0],
    }
    assert all(np.isnan(x) for x in found.values()), found
    not_seen = attention(q, k, v, bias=np.array([0, -np.inf, 0]))
    same_bits(not_seen, attention(q, k, v, mask=np.arange(3) != 1))
    assert np.isfinite(not_seen).all()


def test_a_softcap_leaves_no_weight_of_zero(impl, case):
    q, k, v, bad, where = case
    found = attention(q, k, bad, softcap=5.0, key_lengths=560)
    seen = where[:, :560].any(axis=1)
    assert not np.isfinite(found[np.broadcast_to(seen[:, None], found.shape)]).any()
    clean = attention(q, k, v, softcap=5.0, key_lengths=560)
    same_bits(found[np.broadcast_to(~seen[:, None], found.shape)], clean[np.broadcast_to(~seen[:, None], found.shape)])


def test_a_score_that_score_mod_makes_infinite_excludes(impl, case):
    q, k, v, bad, _ = case
    found = attention(q, k, bad, score_mod=lambda s, b, h, i, j: s)  # -inf comes back, and is an exclusion then
    assert np.isfinite(found).all()
    assert_array_equal(found, attention(q, k, v, score_mod=lambda s, b, h, i, j: s))
