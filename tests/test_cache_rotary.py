"""Rotation by a cache or a layer: padding and the other items of a batch change nothing; options in, out and compared.

Every test runs on each implementation (fixture `impl`).
"""

from __future__ import annotations

import io
import pickle
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from cache_helpers import as_stored, assert_same
from helpers import normal
from layer_oracle import make
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from attentile import KVCache, MultiHeadAttention, attention, rotary_embedding

pytestmark = pytest.mark.usefixtures("impl")

Array = NDArray[Any]

TRAINED = "original_max_position_embeddings"
LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, TRAINED: 4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
}  # fmt: skip
ANGLES = np.outer(np.arange(10), [1.0, 0.3, 0.1, 0.05])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"scaling": {"rope_type": "dynamic", "factor": 2.0, TRAINED: 4}},
    "longrope": {"scaling": LONGROPE},
    "tables": {"cos": np.cos(ANGLES), "sin": np.sin(ANGLES)},  # ten rows: the longest item fills them
}
# Tokens of the items in each append; item 0 goes past the trained length, items 1 and 2 do so later or never.
STEPS = [(7, 3, 2), (2, 0, 1), (1, 6, 0), (0, 1, 0)]


@pytest.fixture(params=KINDS)
def rotary(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def three(**options: Any) -> KVCache:
    return KVCache(3, 2, 8, dtype="float64", **options)


def one(**options: Any) -> KVCache:
    return KVCache(1, 2, 8, dtype="float64", **options)


# ---- ragged items ----


@pytest.mark.parametrize("window", [None, (4, 0)])
def test_ragged_items_are_as_alone(impl, rotary, window):
    cache, alone = three(rotary=rotary, window=window), [one(rotary=rotary, window=window) for _ in range(3)]
    for seed, lengths in enumerate(STEPS):
        q, k, v = normal(3, 3, 2, max(lengths), 8, dtype=np.float64, seed=seed)
        start = cache.lengths
        cache.append(k, v, lengths=lengths)
        found = cache.attend(q, q_start=start)
        for item, n in enumerate(lengths):
            own = slice(item, item + 1), slice(None), slice(0, n)
            alone[item].append(k[own], v[own])
            assert_same(impl, found[own], alone[item].attend(q[own]))
            keys = alone[item].keys()
            assert_array_equal(cache.keys()[item, :, : keys.shape[2]], keys[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("given", ["float32", "float64", "float16", "int8"])
def test_keys_of_16_bits_are_rotated_before_they_are_rounded(impl, rotary, dtype, given):
    """In one append, token by token, or ragged: the same bits, those of the keys rotated in float32 or float64."""
    k, v = ((3 * x).astype(given) for x in normal(2, 1, 2, 9, 8))
    wide = k.astype(np.float64 if given == "float64" else np.float32)
    single, n = rotary.get("scaling", {}).get("rope_type") not in ("dynamic", "longrope"), k.shape[2]
    caches = [KVCache(1, 2, 8, dtype=dtype, rotary=rotary) for _ in range(3)]
    caches[0].append(k, v)
    caches[1].append(k, v, lengths=[n])
    for t in range(n) if single else ():
        caches[2].append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    q = normal(1, 4, 1, 8)
    placed, turned = rotary_embedding(q, n - 1, **rotary), rotary_embedding(wide, **rotary)
    for cache in caches if single else caches[:2]:
        assert_array_equal(cache.keys(), as_stored(turned, dtype))
        found = cache.attend(q)
        assert found.dtype == np.float32
        keys, values = (x.astype(np.float32) for x in (cache.keys(), cache.values()))
        assert_same(impl, found, attention(placed, keys, values, causal="lower_right"))


def test_more_rows_than_an_item_has_tokens(rotary):
    q, k, v = normal(3, 3, 2, 9, 8, dtype=np.float64)
    cache = three(rotary=rotary)
    cache.append(k, v, lengths=[9, 3, 0])
    found = cache.attend(q)  # the last three rows of item 1 are its tokens, the ones before stand below 0
    for item, n in enumerate([9, 3, 0]):
        own = one(rotary=rotary)
        own.append(k[item : item + 1, :, :n], v[item : item + 1, :, :n])
        assert_array_equal(found[item, :, 9 - n :], own.attend(q[item : item + 1, :, 9 - n :])[0])
        assert (found[item, :, : 9 - n] == 0).all()
    same = one(rotary=rotary)
    same.append(k[:1, :, :3], v[:1, :, :3])
    assert_array_equal(same.attend(q[:1])[:, :, 6:], same.attend(q[:1, :, 6:]))


@pytest.mark.parametrize("turns", ["the layer", "the cache"])
def test_ragged_items_of_a_layer_are_as_alone(rotary, turns):
    w = make(kv_heads=2, width=8)
    layer = w.layer(rotary=rotary if turns == "the layer" else None)
    given = {"rotary": rotary if turns == "the cache" else None}
    cache, alone = three(**given), [one(**given) for _ in range(3)]
    for seed, lengths in enumerate(STEPS):
        x = normal(3, max(lengths), 12, dtype=np.float64, seed=seed)
        found = layer(x, cache=cache, lengths=lengths)
        for item, n in enumerate(lengths):
            expected = layer(x[item : item + 1, :n], cache=alone[item])
            assert_allclose(found[item, :n], expected[0], rtol=0, atol=1e-13)
            keys = alone[item].keys()
            assert_allclose(cache.keys()[item, :, : keys.shape[2]], keys[0], rtol=0, atol=1e-13)


def test_positions_that_the_caller_gives_to_ragged_items(rotary):
    layer = make(kv_heads=2, width=8).layer(rotary=rotary)
    x = normal(2, 4, 12, dtype=np.float64)
    for positions in ([3, 5, 1, 50], [[3, 5, 1, 50], [0, 2, 7, 60]]):
        cache = KVCache(2, 2, 8, dtype="float64")
        found = layer(x, cache=cache, lengths=[3, 0], positions=positions)
        own = one()
        at = np.broadcast_to(positions, (2, 4))[0, :3]
        assert_allclose(found[0, :3], layer(x[0, :3], cache=own, positions=at), rtol=0, atol=1e-13)
        assert_allclose(cache.keys()[:1], own.keys(), rtol=0, atol=1e-13)
    for wrong in ([[1, 2]], [[1, 2, 3, 4]] * 3, [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises((ValueError, TypeError), match="rotary_embedding: positions has"):
            layer(x, cache=cache, lengths=[3, 1], positions=wrong)


def test_positions_of_one_item_do_not_change_another(rotary):
    layer = make(kv_heads=2, width=8).layer(rotary=rotary)
    x, positions = normal(2, 3, 12, dtype=np.float64), np.array([[0, 1, 2], [7, 8, 9]])
    found = layer(x, positions=positions)
    for item in range(2):
        expected = layer(x[item], positions=positions[item])
        assert_allclose(found[item], expected, rtol=0, atol=1e-13)


def test_rows_ahead_of_the_tokens_are_no_padding(rotary):
    """A chunk that attends before it is appended: rows and frequencies of where it stands."""
    q, k, v = normal(3, 1, 2, 3, 8, dtype=np.float64)
    cache = one(rotary=rotary)
    cache.append(k, v)
    ahead = cache.attend(q, q_start=6)
    whole = one()
    whole.append(cache.keys(), v)  # as they are stored
    turned = one(rotary=rotary)
    turned.append(np.concatenate([np.zeros((1, 2, 6, 8)), q], axis=2), np.zeros((1, 2, 9, 8)))
    assert_array_equal(ahead, whole.attend(turned.keys()[:, :, 6:], q_start=6))


def test_a_query_turns_as_the_keys_of_its_append(impl, rotary):
    """In any number of rows, the whole prompt at once or row by row, with another item that is longer."""
    q, k, v = normal(3, 2, 2, 9, 8, dtype=np.float64)
    cache, alone = KVCache(2, 2, 8, dtype="float64", rotary=rotary), one(rotary=rotary)
    cache.append(k, v, lengths=[6, 9])
    alone.append(k[:1, :, :6], v[:1, :, :6])
    whole = alone.attend(q[:1, :, :6])
    for first in range(6):
        for rows in range(1, 7 - first):
            part = slice(first, first + rows)
            found = cache.attend(q[:, :, part], q_start=[first, 3])
            assert_same(impl, found[:1], whole[:, :, part])
            assert_same(impl, alone.attend(q[:1, :, part], q_start=first), whole[:, :, part])


def test_positions_without_a_row_in_the_tables():
    tables = KINDS["tables"]
    k = normal(1, 2, 11, 8, dtype=np.float64)
    cache = one(rotary=tables)
    with pytest.raises(IndexError, match="positions run from 0 to 10 and the tables have 10 rows"):
        cache.append(k, k)
    assert cache.length == 0
    cache.append(k[:, :, :10], k[:, :, :10])
    for start in (10, 20):
        with pytest.raises(IndexError, match="the tables have 10 rows"):
            cache.attend(k[:, :, :1], q_start=start)
    with pytest.raises(IndexError, match="the tables have 10 rows"):
        cache.attend(k[:, :, :1], q_start=-1)
    with pytest.raises(IndexError, match="the tables have 0 rows"):
        one(rotary={"cos": np.ones((0, 4)), "sin": np.ones((0, 4))})


def test_growing_frequencies_turn_only_what_comes_in():
    """What the docs say of dynamic and longrope: keys stay as they were stored."""
    for kind in ("dynamic", "longrope"):
        k = normal(1, 2, 9, 8, dtype=np.float64)
        steps, whole = one(rotary=KINDS[kind]), one(rotary=KINDS[kind])
        whole.append(k, k)
        for i in range(9):
            steps.append(k[:, :, i : i + 1], k[:, :, i : i + 1])
        assert np.abs(steps.keys() - whole.keys())[:, :, 1:4].max() > 0.01
        assert_array_equal(steps.keys()[:, :, 8:], whole.keys()[:, :, 8:])


# ---- options ----

ONE_ROTATION: list[list[dict[str, Any]]] = [
    [{}, {"base": 10000.0}, {"base": 10000}, {"scaling": None}, {"rotary_dim": 8}, {"interleaved": False},
     {"scaling": {"type": "default"}}, {"scaling": {"rope_type": "default", "rope_theta": 10000.0}}],
    [{"base": 500.0}, {"scaling": {"type": "default", "rope_theta": 500.0}}],
    [{"rotary_dim": 4}, {"scaling": {"type": "default", "partial_rotary_factor": 0.5}}],
    [{"interleaved": True}],
    [{"scaling": {"type": "linear", "factor": 2}}, {"scaling": {"rope_type": "linear", "factor": 2.0}}],
    [{"scaling": {"type": "linear", "factor": 3}}],
    [{"scaling": {**LONGROPE, "short_factor": kind([1.0] * 4), "long_factor": kind([3.0] * 4)}}
     for kind in (list, tuple, np.array)],
    [{"scaling": {**LONGROPE, "short_factor": [1.0] * 4, "long_factor": [3.0, 3.0, 3.0, 4.0]}}],
    [{"cos": np.ones((9, 4)), "sin": np.zeros((9, 4))}, {"cos": np.ones((9, 4), np.float32), "sin": np.zeros((9, 4))}],
    [{"cos": np.ones((9, 4)), "sin": np.ones((9, 4))}],
]  # fmt: skip


def test_a_layer_and_a_cache_with_the_same_rotation():
    w, x = make(kv_heads=2, width=8), np.ones((1, 2, 12))
    for i, of_layer in enumerate(ONE_ROTATION):
        for j, of_cache in enumerate(ONE_ROTATION):
            for mine in of_layer:
                for other in of_cache:
                    cache = one(rotary=other)
                    if i == j:
                        assert w.layer(rotary=mine)(x, cache=cache).shape == x.shape
                    else:
                        with pytest.raises(ValueError, match="MultiHeadAttention: the layer has rotary="):
                            w.layer(rotary=mine)(x, cache=cache)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_cache_that_was_stored_still_goes_with_the_layer(kind):
    rotary = {"scaling": {**LONGROPE, "short_factor": kind([1.0] * 4), "long_factor": kind([3.0] * 4)}}
    layer, file = make(kv_heads=2, width=8).layer(rotary=rotary), io.BytesIO()
    cache = one(rotary=rotary)
    cache.save(file)
    file.seek(0)
    for stored in (KVCache.load(file), pickle.loads(pickle.dumps(cache))):
        layer(np.ones((1, 2, 12)), cache=stored)
        assert stored.length == 2


@pytest.mark.parametrize("make_one", [one, lambda rotary: make(kv_heads=2, width=8).layer(rotary=rotary)])
def test_options_are_copied_in_and_out(make_one):
    scaling = {"rope_type": "linear", "factor": 2.0}
    made = make_one(rotary={"scaling": scaling})
    scaling["factor"] = 8.0
    assert made.rotary["scaling"]["factor"] == 2.0
    made.rotary["scaling"]["factor"] = 8.0
    assert made.rotary["scaling"]["factor"] == 2.0
    frozen = make_one(rotary=MappingProxyType({"scaling": MappingProxyType(scaling)}))
    assert frozen.rotary["scaling"] == scaling


def test_an_unknown_option_is_refused_alike():
    for owner, made in (("KVCache", one), ("MultiHeadAttention", make(width=8).layer)):
        with pytest.raises(TypeError, match=rf"^{owner}: rotary has the unknown key 'theta'; known are base, rotary_d"):
            made(rotary={"theta": 1e4})
        with pytest.raises(TypeError, match=rf"^{owner}: rotary is True; it must be a dict"):
            made(rotary=True)
    assert MultiHeadAttention(*[np.eye(4)] * 4, num_heads=2).rotary is None


def test_large_tables_are_compared_once_and_not_copied_by_the_layer(monkeypatch):
    from attentile.layers import heads

    angles = np.outer(np.arange(64), 1.0 / 10 ** np.arange(4))
    options = {"cos": np.cos(angles), "sin": np.sin(angles)}
    w = np.eye(16)
    layer = MultiHeadAttention(w, w, w, w, num_heads=2, rotary=options)
    cache = KVCache(1, 2, 8, dtype="float64", rotary=options)
    assert np.shares_memory(layer.rotary["cos"], options["cos"])
    assert not np.shares_memory(cache.rotary["cos"], options["cos"])
    cosines = cache.rotary["cos"].copy()
    options["cos"] += 1  # stored keys were turned by what was given
    assert_array_equal(cache.rotary["cos"], cosines)
    options["cos"][:] = cosines
    for owner in (layer, cache):
        with pytest.raises(ValueError, match="read-only"):
            owner.rotary["cos"][0, 0] = 7
    calls, real = [], heads.same_rotation
    monkeypatch.setattr(heads, "same_rotation", lambda *arguments: calls.append(1) or real(*arguments))
    for _ in range(5):
        layer(np.ones((1, 1, 16)), cache=cache)
    layer(np.ones((1, 1, 16)), cache=cache.fork())
    assert len(calls) == 1
    with pytest.raises(ValueError, match="they must be equal"):
        layer(np.ones((1, 1, 16)), cache=KVCache(1, 2, 8, rotary={"cos": options["sin"], "sin": options["cos"]}))


@pytest.mark.parametrize("position", [np.uint64(5), np.int8(5), 5])
def test_positions_of_every_integer_kind_with_padding(position):
    w = np.eye(16)
    layer, x = MultiHeadAttention(w, w, w, w, num_heads=2, rotary={}), np.ones((1, 3, 16))
    found = layer(x, positions=position, cache=KVCache(1, 2, 8, dtype="float64"), lengths=[2])
    wanted = layer(x[:, :2], positions=5, cache=KVCache(1, 2, 8, dtype="float64"))
    assert_array_equal(found[:, :2], wanted)
