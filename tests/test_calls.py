"""One door: the core's own check of a call against the checks that explain, in Python, and what is converted between.

The two say the same of every call: what the core takes, Python accepts, and gives the same bits when it brings it
there; what Python accepts, the core takes after its conversion.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from helpers import dtype_of, normal
from numpy.testing import assert_array_equal

from attentile import KVCache, alibi_slopes, attention, causal_attention, dispatch, self_attention
from attentile.outputs import Outputs
from attentile.runtime import backend
from attentile.scores import Scores, checked

QUERIES, KEYS, HEADS, KEY_HEADS, WIDTH = 5, 7, 4, 2, 3


def by_python(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """The call as scores.py takes it, converts it and brings it to the core."""
    scores, v = checked(q, k, v, options)
    outputs = Outputs(scores, v, {})
    dispatch.attend(scores, v, outputs, 1)
    return outputs.finished()


def arrays(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Queries, keys and values that mostly fit: batch axes that broadcast, grouped heads, strides, dtypes."""
    lead = [(), (2,), (2, 3), (1, 3), (2, 1)][rng.integers(5)]
    kinds = [np.float32, np.float32, np.float32, np.float64, np.float16, np.int64]
    queries = QUERIES if rng.random() < 0.5 else KEYS
    shapes = [(HEADS, queries, WIDTH), (KEY_HEADS, KEYS, WIDTH), (KEY_HEADS, KEYS, WIDTH + 1)]
    if rng.random() < 0.2:  # no axis of heads
        lead, shapes = (), [shape[1:] for shape in shapes]
    kind = kinds[rng.integers(len(kinds))]
    found = []
    for shape in shapes:
        own = tuple(1 if rng.random() < 0.2 else n for n in lead)[rng.integers(2) if lead else 0 :]
        shape = [*own, *shape]
        if rng.random() < 0.03:
            shape[rng.integers(len(shape))] += 1
        if rng.random() < 0.02:
            shape[rng.integers(len(shape))] = 0
        array = (3 * rng.standard_normal(shape)).astype(kind if rng.random() < 0.95 else np.float64)
        turn = rng.integers(8)
        if turn == 0:
            array = np.asfortranarray(array)
        elif turn == 1:
            array = array[..., ::-1]
        elif turn == 2 and array.ndim > 2:
            array = array.swapaxes(-2, -3).copy().swapaxes(-2, -3)
        elif turn == 3:
            array = np.broadcast_to(array, (2, *array.shape)) if array.ndim == 4 else array
        found.append(array)
    return tuple(found)  # type: ignore[return-value]


def some_integers(rng: np.random.Generator, most: int) -> Any:
    one = int(rng.integers(-1, most + 2)) if rng.random() < 0.2 else int(rng.integers(0, most + 1))
    pair = rng.integers(0, most + 1, 2)
    forms = [one, one, np.int64(one), np.int32(one), [one], pair, pair.tolist(), pair.astype(np.int32), pair[:, None]]
    forms += [pair.astype(np.uint8), float(one), True, "3", pair.astype(float), 2**70, [], None]
    return forms[rng.integers(len(forms)) if rng.random() < 0.3 else rng.integers(2)]


DRAWN = np.random.default_rng(17)
NUMBERS = [0.5, 2, np.float32(0.5), np.float64(0.25), -1.0, 0.0, np.inf, np.nan, 1e39, True, "1", [1.0], None]
MASKS = [DRAWN.random((1, KEYS)) < 0.6, np.arange(KEYS) < 4, np.bool_(True), np.ones(KEYS), [True] * KEYS]
MASKS += [
    DRAWN.random(shape) < 0.6
    for shape in ((QUERIES, KEYS), (KEYS, KEYS), (2, 1, 1, KEYS), (HEADS, 1, 1), (KEYS, 2), (1, QUERIES, KEYS))
]
BIASES = [DRAWN.standard_normal((HEADS, 1, KEYS)).astype("f4"), DRAWN.standard_normal(KEYS).astype("f4")]
BIASES += [np.where(MASKS[1], -np.inf, 0).astype("f4"), DRAWN.standard_normal((2, KEYS))[:, ::-1], np.float32(1)]
BIASES += [DRAWN.standard_normal((QUERIES, KEYS)), np.ones(KEYS, "f2"), np.ones(KEYS, int), [0.0] * KEYS, np.ones(3)]
WINDOWS = [(1, 1), (2, None), (None, 0), (None, None), [1, 2], (0, 0), (1,), 3, (-1, 0), (1.0, 1), (2**70, 0)]
PER_HEAD = [np.linspace(0, 1, HEADS), np.ones(HEADS, "f4"), np.ones(HEADS, int), [0.5] * HEADS, np.ones(3), "ab", 1.0]
PER_HEAD += [np.full(HEADS, np.nan), np.full(HEADS, 1e300), np.ones((1, HEADS)), np.ones(1)]
SEGMENTS = [[0, 0, 1, 1, 1, 2, 2], (np.arange(QUERIES), np.arange(KEYS))]
CHOICES: dict[str, Any] = {
    "scale": NUMBERS,
    "softcap": NUMBERS,
    "mask": MASKS,
    "bias": BIASES,
    "window": WINDOWS,
    "sinks": PER_HEAD,
    "alibi_slopes": PER_HEAD,
    "num_threads": [1, 2, None, 0, 1.5, True, np.int64(2), 1000, "1"],
    "causal": [True, True, False, "upper_left", "lower_right", "middle", 1, None, np.True_],
    "return_lse": [False, True, 1, None],
    "segments": SEGMENTS,
    "dtype": ["bfloat16", None, "bfloat16", "float16", 1],
}


def some_options(rng: np.random.Generator) -> dict[str, Any]:
    """Options as people give them, the first two of each mostly, and nonsense."""
    found: dict[str, Any] = {}
    for name, values in CHOICES.items():
        if rng.random() < 0.14:
            found[name] = values[rng.integers(len(values)) if rng.random() < 0.3 else rng.integers(2)]
    for name, most in (("key_lengths", KEYS), ("prefix_lengths", KEYS), ("q_start", 4)):
        if rng.random() < 0.1:
            found[name] = some_integers(rng, most)
    if rng.random() < 0.01:
        found["casual"] = True
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_core_and_python_agree_on_every_call(compiled, seed):
    rng = np.random.default_rng(seed)
    taken = converted = refused = 0
    for _ in range(500):
        (q, k, v), options = arrays(rng), some_options(rng)
        with np.errstate(all="ignore"):
            found = backend.active.attention(q, k, v, options, 1)
            try:
                result = attention(q, k, v, **options)
            except (TypeError, ValueError):
                assert found is None, f"refused, but taken by the core: {options}"
                refused += 1
                continue
            settled = by_python(q, k, v, options)
        out = result.out if isinstance(result, tuple) else result
        assert_array_equal(out, settled)
        if found is None:
            converted += 1
            continue
        taken += 1
        out = found[0] if isinstance(found, tuple) else found
        assert (out.shape, out.dtype) == (settled.shape, settled.dtype)
        assert_array_equal(out, settled)
    assert min(taken, converted, refused) > 30


def test_everyday_calls_are_taken_as_they_are(compiled):
    """A call that Python had to convert would take ten times as long."""
    q, k, v = normal(2, 4, 6, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)
    everyday: list[dict[str, Any]] = [
        {},
        {"scale": 0.5},
        {"scale": 1},
        {"scale": 1 / np.sqrt(8)},
        {"softcap": 20.0},
        {"causal": True},
        {"causal": "upper_left"},
        {"causal": "lower_right"},
        {"causal": True, "q_start": 3},
        {"window": (2, 0)},
        {"causal": True, "q_start": [1, 2]},
        {"causal": True, "q_start": np.array([1, 2])},
        {"key_lengths": 3},
        {"key_lengths": [6, 2]},
        {"key_lengths": np.array([6, 2])},
        {"key_lengths": np.array([6, 2], np.int32)},
        {"key_lengths": np.int64(4)},
        {"causal": True, "prefix_lengths": [2, 3]},
        {"mask": np.tri(6, dtype=bool)},
        {"mask": np.ones((2, 1, 1, 6), bool)},
        {"bias": np.zeros((4, 6, 6), np.float32)},
        {"sinks": np.zeros(4)},
        {"alibi_slopes": alibi_slopes(4)},
        {"out": np.empty_like(q)},
        {"return_lse": True},
        {"return_weights": True},
        {"out": np.empty((2, 6, 4, 8), np.float32).swapaxes(1, 2)},
        {"num_threads": 2},
        {"mask": None, "window": None},
    ]
    for options in everyday:
        assert backend.active.takes(q, k, v, options), options
    for shape in ((0, 0), (0,), (slice(None), None)):
        assert backend.active.takes(q[shape], k[shape], v[shape], {"causal": True})
    strided = normal(2, 6, 4, 8).swapaxes(1, 2)
    assert backend.active.takes(strided, k, v, {})


def test_batch_axes_that_do_not_fold_are_run_through(impl):
    """Strides of every kind against the call over copies: many small axes, repeated and reversed ones."""
    rng = np.random.default_rng(3)
    base = rng.standard_normal((3, 5, 4, 2, 6, 8)).astype(np.float32)
    q, k = base.transpose(2, 0, 1, 3, 4, 5), base[::-1].transpose(2, 0, 1, 3, 4, 5)
    v = np.broadcast_to(base[:, :, :1].transpose(2, 0, 1, 3, 4, 5), q.shape)
    mask = rng.random((3, 1, 1, 6, 6)) < 0.7
    lengths = rng.integers(0, 7, (4, 1, 5))
    options: dict[str, Any] = {"mask": mask, "causal": True, "key_lengths": np.broadcast_to(lengths, (4, 3, 5))}
    found = attention(q, k, v, return_lse=True, return_weights=True, **options)
    copied = attention(*(x.copy() for x in (q, k, v)), return_lse=True, return_weights=True, **options)
    for one, other in zip(found, copied, strict=True):
        assert_array_equal(one, other)
    assert ((found.weights > 0).sum(axis=-1) <= lengths[..., None, None]).all()


def test_what_the_pass_reads_is_its_own(compiled):
    """Small arrays of numbers are copied, so that nothing changes them while it runs: not even the result."""
    q, k, v = normal(2, 2, 4, 8), normal(2, 2, 4, 8), normal(2, 2, 4, 8)
    sinks = np.zeros(2)
    wanted = attention(q, k, v, sinks=sinks.copy())
    # The output lies over the sinks: they are read as they were.
    memory = np.zeros(2 * 2 * 4 * 8 + 4, np.float32)
    over = memory[:-4].reshape(q.shape)
    assert_array_equal(attention(q, k, v, sinks=memory[:4].view(np.float64), out=over), wanted)


@pytest.mark.parametrize("mask", [None, np.tri(6), np.tri(6, dtype=bool), np.tri(6, dtype=np.int8), np.zeros((6, 6))])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, int])
def test_textbook_calls_in_any_memory(impl, mask, dtype):
    """Taken as they are or converted: one result."""
    x = (4 * normal(3, 6, 8, seed=1)).astype(dtype)
    wanted = self_attention(x, x, x, 8, mask)
    for other in (np.asfortranarray(x), x[..., ::-1].copy()[..., ::-1], x.tolist() if dtype in (float, int) else x):
        for one, same in zip(self_attention(other, x, x, 8, mask), wanted, strict=True):
            assert_array_equal(one, same)
    if mask is not None and mask[0, 1] == 0 and mask[0, 0]:
        for one, same in zip(causal_attention(x, x, x, 8), wanted, strict=True):
            assert_array_equal(one, same)


def test_a_cache_and_python_agree_on_every_call(compiled):
    rng = np.random.default_rng(11)
    names = CHOICES.keys() - {"segments"} | {"key_lengths"}
    taken = refused = 0
    for n in range(600):
        kept: dict[str, Any] = {} if n % 2 else {"window": (4, 0), "sink_tokens": n % 3}
        cache = KVCache(2, KEY_HEADS, WIDTH, **kept)
        x = normal(2, KEY_HEADS, KEYS, WIDTH, seed=n)
        cache.append(x, x, lengths=[KEYS, KEYS - n % 4] if n % 5 else None)
        q = normal(2, HEADS, [1, QUERIES, KEYS][n % 3], WIDTH, seed=n)
        options = {name: value for name, value in some_options(rng).items() if name in names}
        with np.errstate(all="ignore"):
            found = cache.held.view().attend(q, options, 1)
            view, cache.held.view = cache.held.view, lambda: None  # type: ignore[method-assign]
            try:
                settled = cache.attend(q, **options)
            except (TypeError, ValueError):
                cache.held.view = view  # type: ignore[method-assign]
                assert found is None, f"refused, but taken by the core: {options}, {cache}"
                with pytest.raises((TypeError, ValueError)):
                    cache.attend(q, **options)
                refused += 1
                continue
            cache.held.view = view  # type: ignore[method-assign]
            result = cache.attend(q, **options)
        out, wanted = (x.out if isinstance(x, tuple) else x for x in (result, settled))
        assert_array_equal(out, wanted)
        taken += found is not None
    assert taken > 150
    assert refused > 50


@pytest.mark.parametrize("window", [(None, None), None])
def test_an_unlimited_window_places_the_rows_of_a_cache(impl, window):
    """It limits nothing, and q_start goes with it all the same: in every way that a call can take."""
    x = normal(2, 1, 6, 4)
    cache = KVCache(2, 1, 4)
    cache.append(x, x)
    q, options = x[:, :, :2], {"causal": False, "window": window}
    wanted = attention(q, x, x)
    assert_array_equal(cache.attend(q, **options), wanted)
    ids = (np.zeros((2, 2), int), np.zeros((2, 6), int))
    assert_array_equal(cache.attend(q, segments=ids, **options), wanted)
    half = q.astype(np.float16)
    assert_array_equal(cache.attend(half, **options), attention(half.astype(np.float32), x, x))
    if window is not None:
        assert_array_equal(cache.attend(q, q_start=0, **options), wanted)


def test_an_axis_of_one_may_have_any_stride(impl):
    """NumPy calls such an array aligned, whatever lies between the items that are not there."""
    records = np.zeros(1, [("q", "f8", (3, 8)), ("odd", "i1")])
    q, k = records["q"][:, :, :4], normal(1, 3, 4, dtype=np.float64)
    assert q.flags.aligned
    q[:] = normal(1, 3, 4, dtype=np.float64, seed=1)
    plain = q.copy()
    assert_array_equal(attention(q, k, k), attention(plain, k, k))
    assert_array_equal(attention(k, q, q), attention(k, plain, plain))
    assert_array_equal(attention(k, k, k, bias=q[:, :, :3]), attention(k, k, k, bias=plain[:, :, :3]))
    assert_array_equal(self_attention(q, k, k, 4)[0], self_attention(plain, k, k, 4)[0])
    wanted = attention(k, k, k)
    assert_array_equal(attention(k, k, k, out=q), wanted)
    assert_array_equal(q, wanted)


@pytest.mark.parametrize("form", ["upper_left", "lower_right"])
def test_an_alignment_may_be_text_of_any_kind(either, form):
    kind = enum.Enum("kind", {"form": form}, type=str)
    q, k, v = normal(2, 4, 6, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)
    for causal in (np.str_(form), kind.form):
        assert_array_equal(attention(q, k, v, causal=causal), attention(q, k, v, causal=form))


def test_checked_values_are_taken_by_the_core(compiled):
    """Options as scores.py settles them pass the check again."""
    q, k, v = normal(2, 4, 6, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)
    options = {"causal": "lower_right", "window": [2, None], "key_lengths": [6, 2], "sinks": [0.0] * 4, "scale": 1}
    scores = Scores(q, k, v, options)
    assert backend.active.takes(scores.q, scores.k, v, scores.options)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once_to_nearest_even(impl, name):
    """Every number of the format comes back, and the mean of two neighbours, a tie, goes to the even one."""
    dtype = dtype_of(name)
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    one = np.ones((1, 1, 1, 1), dtype)
    with np.errstate(all="ignore"):
        same = attention(one, one, numbers[None, None, None]).ravel()
        finite = np.isfinite(numbers.astype(np.float32))
        assert_array_equal(same.astype(np.float32), numbers.astype(np.float32))
        below, above = numbers[:-1][finite[:-1] & finite[1:]], numbers[1:][finite[:-1] & finite[1:]]
        pairs = np.stack([below, above])[None, None]
        found = attention(one, np.ones((1, 1, 2, 1), dtype), pairs, return_weights=True)
        wanted = pairs.astype(np.float32).mean(axis=2, keepdims=True).astype(dtype)
    assert found.out.dtype == found.weights.dtype == dtype
    ordinary = np.abs(wanted.astype(np.float32)) >= 2.0**-120  # below, halves of bfloat16 are subnormal in float32
    assert_array_equal(found.out.astype(np.float32)[ordinary], wanted.astype(np.float32)[ordinary])


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_half_precision_in_any_order_of_axes(compiled, axes):
    x = normal(2, 4, 6, 8).astype(np.float16)
    turned = x.transpose(axes).copy().transpose(np.argsort(axes))
    assert backend.active.attention(turned, turned, turned, {}, 1) is not None
    assert_array_equal(attention(turned, turned, turned, causal=True), attention(x, x, x, causal=True))
    reversed_ = x[:, :, ::-1]
    assert_array_equal(attention(reversed_, x, x), attention(reversed_.copy(), x, x))
