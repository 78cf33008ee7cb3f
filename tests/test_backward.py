"""Gradients: every option and pair of options against central differences and the plain formula in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import FMA_HERE, two_fma_isas
from helpers import normal, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from oracle import allowed_keys, gradients

from attentile import (
    attention,
    attention_backward,
    attention_vjp,
    merge_attention,
    relative_bias,
    relative_bias_backward,
    rotary_embedding,
    t5_bias,
    t5_bias_backward,
    use_backend,
)

Array = np.ndarray[Any, Any]
Options = dict[str, Any]

HEADS, KEY_HEADS, ROWS, KEYS = 4, 2, 6, 6
rng = np.random.default_rng(130)


def one_keyless_row(shape: tuple[int, ...]) -> Array:
    mask = rng.random(shape) < 0.6
    mask[..., 2, :] = False
    return mask


# Options of a call with 2 items, 4 heads, 6 queries and 6 keys, by name.
OPTIONS: dict[str, Options] = {
    "mask": {"mask": one_keyless_row((2, 1, ROWS, KEYS))},
    "mask of keys": {"mask": np.array([1, 0, 1, 1, 0, 1], bool)},
    "bias": {"bias": rng.standard_normal((HEADS, ROWS, KEYS))},
    "bias of keys": {"bias": np.where(np.arange(KEYS) == 3, -np.inf, rng.standard_normal((2, 1, 1, KEYS)))},
    "causal": {"causal": True},
    "lower right": {"causal": "lower_right"},
    "start": {"q_start": np.array([1, -2])},
    "window": {"window": (2, 1)},
    "lengths": {"key_lengths": [5, 0]},
    "prefix": {"prefix_lengths": [2, 4]},
    "segments": {"segments": np.array([0, 0, 1, 1, 1, 3])},
    "interrupted segments": {"segments": np.array([0, 1, 0, 1, 1, 0])},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": rng.standard_normal(HEADS)},
    "slopes": {"alibi_slopes": rng.random(HEADS)},
}


def together(*names: str) -> Options | None:
    """Their options in one call, with the causal form that they need; None: they exclude each other."""
    found: Options = {}
    for name in names:
        if found.keys() & OPTIONS[name]:
            return None
        found |= OPTIONS[name]
    if "causal" not in found and ({"q_start", "prefix_lengths"} & found.keys()):
        found["causal"] = True
    return None if "q_start" in found and found["causal"] == "lower_right" else found


def combinations() -> Iterator[Any]:
    for names in [(), *((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2)]:
        options = together(*names)
        if options is not None:
            yield pytest.param(options, id=" and ".join(names) or "plain")


def random_call(
    dtype: Any = np.float64, rows: int = ROWS, keys: int = KEYS, width: int = 5, value_width: int = 3
) -> tuple[Array, ...]:
    """(dout, dlse, q, k, v) of 2 items, 4 heads and 2 key heads."""
    shapes = [(HEADS, rows, value_width), (HEADS, rows), (HEADS, rows, width), (KEY_HEADS, keys, width)]
    shapes.append((KEY_HEADS, keys, value_width))
    return tuple(normal(2, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def given_of(q: Array, k: Array, v: Array, options: Options) -> dict[str, Array]:
    """The arguments that have a gradient, by name."""
    arguments = {"q": q, "k": k, "v": v} | {n: options.get(n) for n in ("bias", "sinks", "alibi_slopes")}
    return {name: array for name, array in arguments.items() if array is not None}


def found_by_name(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, options: Options, **more: Any
) -> dict[str, Array]:
    """attention_backward() by everything, by the names of the arguments."""
    names = list(given_of(q, k, v, options))
    out, lse, _ = attention(q, k, v, return_lse=True, **options)
    found = attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=names, **options, **more)
    return {name: getattr(found, "d" + name) for name in names}


def expected_by_name(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, options: Options
) -> dict[str, Array]:
    """Those of the oracle, with bias summed to its own shape."""
    allowed = allowed_keys((*q.shape[:-1], k.shape[-2]), **options)
    found = gradients(dout, dlse, q, k, v, allowed, **options)
    if "bias" in options:
        found = found | {"bias": summed(found["bias"], np.shape(options["bias"]))}
    return {name: found[name] for name in given_of(q, k, v, options)}


def summed(array: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes that broadcasting has added or stretched."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    return array.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True) if 1 in shape else array


def assert_near(found: dict[str, Array], expected: dict[str, Array], rtol: float) -> None:
    """Relative to the largest number of each gradient."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        bound = rtol * max(1.0, float(np.abs(array).max(initial=0)))
        assert_allclose(found[name], array, rtol=0, atol=bound, err_msg=name)


def differences(loss: Any, arguments: dict[str, Array], name: str, direction: Array, step: float = 1e-5) -> float:
    up, down = (loss(**{**arguments, name: arguments[name] + e * direction}) for e in (step, -step))
    return (up - down) / (2 * step)


@pytest.mark.parametrize("options", [*combinations()])
def test_every_pair_of_options(impl, options):
    """Central differences along a random direction of each argument; the formula, number by number."""
    dout, dlse, q, k, v = random_call()
    found = found_by_name(dout, dlse, q, k, v, options)
    assert_near(found, expected_by_name(dout, dlse, q, k, v, options), rtol=1e-13)
    seen = allowed_keys((*q.shape[:-1], k.shape[-2]), **options).any(axis=-1)
    rest = {name: value for name, value in options.items() if name not in found}

    def loss(**arguments: Array) -> float:
        out, lse, _ = attention(**arguments, **rest, return_lse=True)
        return float((out * dout).sum() + np.where(seen, lse * dlse, 0).sum(where=seen))

    arguments = given_of(q, k, v, options)
    for i, (name, gradient) in enumerate(found.items()):
        direction = normal(*gradient.shape, dtype=np.float64, seed=50 + i)
        slope = differences(loss, arguments, name, direction)
        assert abs(slope - (gradient * direction).sum()) <= 1e-7 * max(1, np.abs(gradient).sum()), name


def test_every_number_by_central_differences(impl):
    """One call with nearly everything, and each number of each argument moved."""
    options = {"causal": True, "softcap": 1.5, "mask": OPTIONS["mask"]["mask"], "bias": normal(HEADS, 1, KEYS) * 1.0}
    options |= OPTIONS["sinks"] | OPTIONS["slopes"]
    dout, dlse, q, k, v = random_call()
    found = found_by_name(dout, dlse, q, k, v, options)
    rest = {name: value for name, value in options.items() if name not in found}

    def loss(**arguments: Array) -> float:
        out, lse, _ = attention(**arguments, **rest, return_lse=True)
        return float((out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())

    arguments = given_of(q, k, v, options)
    arguments["bias"] = arguments["bias"].astype(np.float64)
    for name, gradient in found.items():
        slopes = np.empty(gradient.shape)
        for at in np.ndindex(gradient.shape):
            direction = np.zeros(gradient.shape)
            direction[at] = 1
            slopes[at] = differences(loss, arguments, name, direction)
        assert_allclose(gradient, slopes, rtol=0, atol=1e-7 * np.abs(slopes).max(), err_msg=name)


LONG: dict[str, Options] = {
    "plain": {},
    "causal": {"causal": "lower_right"},
    "window": {"window": (40, 10), "q_start": [100, 290]},
    "lengths": {"key_lengths": [257, 31]},
    "mask": {"mask": rng.random((2, 1, 70, 530)) < 0.4},
    "bias": {"bias": rng.standard_normal((1, 70, 530)).astype(np.float32)},
    "softcap": {"softcap": 2.0},
    "sinks and slopes": {"sinks": np.arange(4.0), "alibi_slopes": 2.0 ** -np.arange(1, 5), "q_start": 460},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", LONG)
def test_several_chunks(impl, kind, dtype):
    """No worse than twice the error of the plain formula in the same dtype, and a few units in the last place."""
    dout, dlse, q, k, v = (x.astype(dtype) for x in random_call(np.float64, 70, 530, 33, 20))
    options = dict(LONG[kind])
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    found = found_by_name(dout, dlse, q, k, v, options)
    same = expected_by_name(dout, dlse, q, k, v, options)
    exact = expected_by_name(*(x.astype(np.float64) for x in (dout, dlse, q, k, v)), options)
    for name, array in exact.items():
        error = np.abs(same[name] - array).max()
        bound = 2 * error + 16 * np.finfo(dtype).eps * np.abs(array).max()
        assert np.abs(found[name] - array).max() <= bound, name


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 300), (300, 1), (17, 16), (49, 257), (193, 40)])
@pytest.mark.parametrize(("width", "value_width"), [(1, 1), (7, 16), (64, 3), (80, 33)])
def test_sizes(impl, rows, keys, width, value_width):
    call = random_call(np.float64, rows, keys, width, value_width)
    assert_near(found_by_name(*call, {}), expected_by_name(*call, {}), rtol=1e-13)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_poison_stays_outside(impl, data):
    """NaN and Inf in keys that no row sees and in rows without keys change no bit; their gradients are 0."""
    draw = data.draw
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, keys = draw(st.integers(1, 70)), draw(st.integers(1, 300))
    mask = random.random((2, 1, rows, keys)) < draw(st.sampled_from((0.1, 0.9)))
    mask[:, :, random.random(rows) < 0.3] = False
    mask[..., random.random(keys) < 0.3] = False
    options: Options = {"mask": mask}
    for name in draw(st.sets(st.sampled_from(("softcap", "sinks", "slopes")))):
        options |= OPTIONS[name]
    if "alibi_slopes" in options:
        options["q_start"] = 3
    if draw(st.booleans()):
        options["bias"] = np.where(mask, random.standard_normal(mask.shape), -np.inf)
        if draw(st.booleans()):
            del options["mask"]
    dout, dlse, q, k, v = random_call(draw(st.sampled_from((np.float32, np.float64))), rows, keys, 8, 9)
    clean = found_by_name(dout, dlse, q, k, v, options)
    poison = draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    blind, unseen = ~mask.any(axis=-1), ~mask.any(axis=-2)
    for rows_of in (dout, dlse, q):
        rows_of[np.broadcast_to(blind, (2, HEADS, rows))] = poison
    for keys_of in (k, v):
        keys_of[np.broadcast_to(unseen, (2, KEY_HEADS, keys))] = poison
    found = found_by_name(dout, dlse, q, k, v, options)
    for name, array in clean.items():
        assert_array_equal(found[name], array, err_msg=name)
    assert not found["q"][np.broadcast_to(blind, (2, HEADS, rows))].any()
    assert not found["k"][np.broadcast_to(unseen, (2, KEY_HEADS, keys))].any()
    assert not found["v"][np.broadcast_to(unseen, (2, KEY_HEADS, keys))].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["dout", "q", "k", "v"])
def test_poison_reaches_only_pairs_that_see_it(impl, place, poison):
    """One row or key holds it; under a causal mask the others differ from the clean call only where they meet it."""
    dout, _, q, k, v = random_call(np.float64, 20, 20, 6, 7)
    clean = found_by_name(dout, None, q, k, v, {"causal": True})
    arrays = {"dout": dout, "q": q, "k": k, "v": v}
    arrays[place][:, :, 12, 3] = poison
    found = found_by_name(dout, None, q, k, v, {"causal": True})
    kept = {"q": slice(0, 12), "k": slice(13, None), "v": slice(13, None)}
    for name, rows in kept.items():
        if place in ("dout", "q"):  # row 12 meets the keys 0 to 12, and no other row changes
            rows = slice(13, None) if name != "q" else np.arange(20) != 12
            assert_allclose(found[name][:, :, rows], clean[name][:, :, rows], rtol=1e-12, err_msg=name)
        elif name == "q":
            assert_allclose(found[name][:, :, rows], clean[name][:, :, rows], rtol=1e-12)
    assert not all(np.isfinite(array).all() for array in found.values())


@pytest.mark.parametrize("kind", ["no items", "no queries", "no keys", "no values"])
def test_empty(impl, kind):
    items, rows, keys, width = (0 if kind == f"no {name}" else 3 for name in ("items", "queries", "keys", "values"))
    q, k, v = normal(items, 2, rows, 4), normal(items, 2, keys, 4), normal(items, 2, keys, width)
    options = {"bias": np.zeros((rows, keys), np.float32), "sinks": [0.0, 1.0], "alibi_slopes": [0.5, 1], "q_start": 0}
    out, lse, _ = attention(q, k, v, return_lse=True, **options)
    dlse = normal(*lse.shape)
    places = {"dq": np.full_like(q, np.nan), "dk": np.full_like(k, np.nan), "dv": np.full_like(v, np.nan)}
    names = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
    found = attention_backward(out, q, k, v, out, lse, dlse=dlse, wrt=names, **places, **options)
    if kind == "no values":  # lse depends on the scores all the same
        expected = gradients(np.zeros((3, 2, 3, 1)), dlse, q, k, k[..., :1], np.ones((3, 2, 3, 3), bool),
                             bias=options["bias"], alibi_slopes=[0.5, 1], q_start=0)  # fmt: skip
        assert_allclose(found.dq, expected["q"], rtol=1e-4, atol=1e-6)
        assert_allclose(found.dbias, expected["bias"].sum(axis=(0, 1)), rtol=1e-4, atol=1e-6)
    else:
        assert not any(array.any() for array in found)
    assert [array.shape for array in found] == [q.shape, k.shape, v.shape, (rows, keys), (2,), (2,)]


def test_sinks_that_take_nothing_or_all(impl):
    dout, dlse, q, k, v = random_call()
    sinks = np.array([-np.inf, np.inf, 1e300, 0.0])
    found = found_by_name(dout, dlse, q, k, v, {"sinks": sinks})
    plain = found_by_name(dout, dlse, q, k, v, {})
    nothing = found_by_name(np.zeros_like(dout), dlse, q, k, v, {})
    assert_allclose(found["q"][:, 0], plain["q"][:, 0], rtol=1e-12)
    assert_allclose(found["q"][:, 1:3], nothing["q"][:, 1:3], rtol=1e-12)  # lse leaves sinks out
    assert_array_equal(found["sinks"][:3], 0)
    assert found["sinks"][3] != 0


# ---- promises of bits ----


def assert_same(impl: str, found: Array, expected: Array) -> None:
    """The same bits where the core computes."""
    if impl == "reference":
        assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        same_bits(found, expected)


@pytest.mark.parametrize("kind", ["plain", "causal", "lengths", "mask", "softcap"])
def test_batch_padding_and_threads_change_no_bit(impl, kind):
    dout, dlse, q, k, v = random_call(np.float32, 70, 530, 33, 20)
    whole = found_by_name(dout, dlse, q, k, v, LONG[kind])
    threads = found_by_name(dout, dlse, q, k, v, {**LONG[kind], "num_threads": 7})
    alone: Options = dict(LONG[kind])
    if "mask" in alone:
        alone["mask"] = alone["mask"][1:]
    if "key_lengths" in alone:
        alone["key_lengths"] = alone["key_lengths"][1:]
    second = found_by_name(dout[1:], dlse[1:], q[1:], k[1:], v[1:], alone)
    padded = [np.concatenate([x, np.full_like(x[..., :90, :], np.nan)], axis=2) for x in (k, v)]
    longer = {"key_lengths": 530, **LONG[kind]}
    if "mask" in longer:
        longer["mask"] = np.concatenate([longer["mask"], np.ones((2, 1, 70, 90), bool)], axis=-1)
    behind = found_by_name(dout, dlse, q, *padded, longer)
    for name, array in whole.items():
        assert_same(impl, threads[name], array)
        assert_same(impl, second[name], array[1:])
        assert_same(impl, behind[name][:, :, : array.shape[2]], array)
        assert not behind[name][:, :, array.shape[2] :].any()


SEVERAL = {
    "plain": {},
    "causal": {"causal": "lower_right"},
    "window": {"q_start": 0, "window": (30, 250)},
    "bias of all": {"bias": np.random.default_rng(5).standard_normal((1, 1, 400, 530)).astype(np.float32)},
    "bias of a key": {"bias": np.random.default_rng(5).standard_normal((2, 1, 1, 530)).astype(np.float32)},
    "bias of a row": {"bias": np.random.default_rng(5).standard_normal((400, 1)).astype(np.float32)},
    "bias of a head": {"bias": np.random.default_rng(5).standard_normal((HEADS, 1, 1)).astype(np.float32)},
    "slopes": {"q_start": 0, "alibi_slopes": np.linspace(0.1, 1, HEADS)},
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_tasks_that_wait_for_each_other(impl, kind):
    """Several chunks of rows and of keys per head: whichever thread has which, sums keep their order."""
    call = random_call(np.float32, 400, 530, 24, 20)
    alone = found_by_name(*call, {**SEVERAL[kind], "num_threads": 1})
    for threads in (2, 3, 7) * 3:
        found = found_by_name(*call, {**SEVERAL[kind], "num_threads": threads})
        for name, array in alone.items():
            assert_same(impl, found[name], array)
    expected = expected_by_name(*(x.astype(np.float64) for x in call), SEVERAL[kind])
    assert_near(alone, expected, rtol=3e-5)


def test_rows_behind_the_others_change_no_bit(impl):
    """Padding of queries: rows whose dout is 0, and rows that see nothing."""
    dout, _, q, k, v = random_call(np.float32, 250, 300, 24, 20)
    plain = found_by_name(dout, None, q, k, v, {})
    mask = np.ones((700, 1), bool)
    mask[500:] = False
    longer = [np.concatenate([x, np.ones_like(x), np.full_like(x[:, :, :200], np.nan)], axis=2) for x in (dout, q)]
    longer[0][:, :, 250:500] = 0
    found = found_by_name(longer[0], None, longer[1], k, v, {"mask": mask})
    for name in "qkv":
        assert_same(impl, found[name][:, :, : plain[name].shape[2]], plain[name])


@two_fma_isas
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "softcap", "sinks and slopes"])
def test_fma_instruction_sets_agree(kind):
    call = random_call(np.float32, 70, 530, 33, 20)
    results = []
    for isa in FMA_HERE:
        with use_backend("compiled", isa):
            results.append(found_by_name(*call, LONG[kind]))
    for other in results[1:]:
        for name, array in results[0].items():
            same_bits(other[name], array)


def test_a_head_alone(impl):
    """Further heads beside it, and heads that share its key head, change no bit of its rows."""
    dout, dlse, q, k, v = random_call(np.float32, 70, 530, 33, 20)
    whole = found_by_name(dout, dlse, q, k, v, {"causal": "lower_right"})
    rows, keys = slice(2, 4), slice(1, 2)
    alone = found_by_name(dout[:, rows], dlse[:, rows], q[:, rows], k[:, keys], v[:, keys], {"causal": "lower_right"})
    assert_same(impl, alone["q"], whole["q"][:, rows])
    assert_same(impl, alone["k"], whole["k"][:, keys])
    assert_same(impl, alone["v"], whole["v"][:, keys])
    one = found_by_name(dout[:, :1], dlse[:, :1], q[:, :1], k[:, :1], v[:, :1], {"causal": "lower_right"})
    assert_same(impl, one["q"], whole["q"][:, :1])


def test_the_same_call_twice(impl):
    call = random_call(np.float32, 70, 530, 33, 20)
    for one, other in zip(*(found_by_name(*call, {"causal": "lower_right"}).values() for _ in "12"), strict=True):
        same_bits(one, other)


# ---- what belongs to it ----


def test_vjp(impl):
    """The output of attention() and the gradients of attention_backward(), as often as it is called."""
    dout, dlse, q, k, v = random_call(np.float32)
    options = OPTIONS["bias"] | OPTIONS["sinks"] | OPTIONS["causal"]
    expected = attention(q, k, v, return_lse=True, **options)
    out, vjp = attention_vjp(q, k, v, **options)
    same_bits(out, expected.out)
    result, again = attention_vjp(q, k, v, return_lse=True, **options)
    same_bits(result.lse, expected.lse)
    assert result.weights is None
    for call in (vjp, again, vjp):
        backward = attention_backward(dout, q, k, v, expected.out, expected.lse, dlse=dlse, **options)
        assert backward.dbias is not None
        assert backward.dsinks is None
        for one, other in zip(call(dout, dlse), backward, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                same_bits(one, other)
    for array in (out, result.out, result.lse):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_merged_parts(impl):
    """Each part with the merged output and logsumexp; and through the formula of merge_attention."""
    dout, dlse, q, k, v = random_call()
    keys = [slice(0, 2), slice(2, 3), slice(3, None)]
    expected = found_by_name(dout, dlse, q, k, v, {})
    parts = [attention_vjp(q, k[..., some, :], v[..., some, :], return_lse=True) for some in keys]
    merged = merge_attention([part for part, _ in parts])
    whole = [
        attention_backward(dout, q, k[..., some, :], v[..., some, :], merged.out, merged.lse, dlse=dlse)
        for some in keys
    ]
    through = []
    for (out, lse, _), vjp in parts:
        share = np.exp(lse - merged.lse)
        own = (dout * (out - merged.out)).sum(axis=-1) + dlse
        through.append(vjp(share[..., None] * dout, share * own))
    for found in (whole, through):
        assert_allclose(sum(part.dq for part in found), expected["q"], rtol=1e-11, atol=1e-12)
        for name in "kv":
            joined = np.concatenate([getattr(part, "d" + name) for part in found], axis=-2)
            assert_allclose(joined, expected[name], rtol=1e-11, atol=1e-12)


def test_a_row_of_lse_minus_infinity_has_no_gradient(impl):
    """Whatever it may see here: a Partial that has met nothing but scores of -inf says so."""
    dout, _, q, k, v = random_call()
    out, lse, _ = attention(q, k, v, return_lse=True)
    out, lse = out.copy(), lse.copy()
    out[:, :, 2], lse[:, :, 2] = 0, -np.inf
    found = attention_backward(dout, q, k, v, out, lse)
    rest = np.arange(ROWS) != 2
    expected = found_by_name(dout[:, :, rest], None, q[:, :, rest], k, v, {})
    assert found.dq is not None
    assert_array_equal(found.dq[:, :, 2], 0)
    for name in "kv":
        assert_allclose(getattr(found, "d" + name), expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("start", [0, -3, 40])
def test_tables_of_biases(impl, start):
    """The gradient of a table is the transpose of what makes the bias."""
    by_bias, table = normal(3, 5, 9, dtype=np.float64), normal(3, 7, dtype=np.float64, seed=1)
    found = relative_bias_backward(by_bias, 3, q_start=start)
    assert found.shape == table.shape
    assert_allclose((relative_bias(table, 5, 9, q_start=start) * by_bias).sum(), (table * found).sum(), rtol=1e-12)
    for options in ({}, {"bidirectional": False, "max_distance": 20}):
        table = normal(8, 3, dtype=np.float64, seed=2)
        found = t5_bias_backward(by_bias, 8, q_start=start, **options)
        assert found.shape == table.shape
        bias = t5_bias(table, 5, 9, q_start=start, **options)
        assert_allclose((bias * by_bias).sum(), (table * found).sum(), rtol=1e-12)
    assert relative_bias_backward(by_bias.astype(np.float32), 3).dtype == np.float32


def test_a_rotation_backwards_is_its_gradient(impl):
    for options in ({}, {"interleaved": True, "rotary_dim": 4}, {"positions": np.array([3, 9, 0])}):
        x, by_result = normal(2, 3, 8, dtype=np.float64), normal(2, 3, 8, dtype=np.float64, seed=1)
        rotated = rotary_embedding(x, **options)
        found = rotary_embedding(by_result, inverse=True, **options)
        assert_allclose((rotated * by_result).sum(), (x * found).sum(), rtol=1e-13)
        direction = normal(2, 3, 8, dtype=np.float64, seed=2)
        slope = (rotary_embedding(direction, **options) * by_result).sum()  # the rotation is linear
        assert_allclose(slope, (found * direction).sum(), rtol=1e-12)
