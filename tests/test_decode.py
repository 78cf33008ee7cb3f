"""Few rows of queries take tiles of their own, with lanes over keys; they must give the very bits of a long prefill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import normal, same_bits
from numpy.testing import assert_allclose
from oracle import oracle, tolerance

from attentile import KVCache, attention, explain

ROWS, KEYS, WIDTH, HEADS, KEY_HEADS = 70, 700, 40, 6, 2
rng = np.random.default_rng(40)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_start": 600},
    "window": {"window": (90, 40), "q_start": 300},
    "window without keys": {"window": (3, 3), "q_start": 690},
    "lengths": {"key_lengths": [700, 33]},
    "no keys": {"key_lengths": [0, 700]},
    "prefix": {"causal": True, "q_start": -30, "prefix_lengths": [5, 300]},
    "segments": {"segments": (np.repeat([2, 1], 35), np.repeat([0, 1, 2, 1], 175))},
    "mask": {"mask": rng.random((2, 1, ROWS, KEYS)) < 0.5},
    "empty rows": {"mask": (rng.random((2, HEADS, ROWS, KEYS)) < 0.5) & (np.arange(ROWS) % 3 > 0)[:, None]},
    "bias": {"bias": rng.standard_normal((HEADS, ROWS, KEYS)).astype(np.float32)},
    "bias of keys": {"bias": np.where(rng.random(KEYS) < 0.3, -np.inf, 3).astype(np.float32)},
    "large bias": {"bias": (rng.uniform(-3e38, 3e38, (ROWS, KEYS))).astype(np.float32)},
    "strided bias": {"bias": rng.standard_normal((KEYS, ROWS, HEADS)).astype(np.float32).T},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": rng.standard_normal(HEADS)},
    "alibi": {"alibi_slopes": 2.0 ** -np.arange(HEADS), "q_start": 630},
    "all": {
        "causal": "lower_right",
        "window": (500, 0),
        "key_lengths": [700, 650],
        "mask": rng.random((ROWS, KEYS)) < 0.8,
        "bias": rng.standard_normal((HEADS, 1, KEYS)).astype(np.float32),
        "softcap": 4.0,
        "sinks": rng.standard_normal(HEADS),
        "alibi_slopes": 2.0 ** -np.arange(HEADS),
    },
}


def assert_same(impl: str, a: Any, b: Any) -> None:
    """The same bits from the kernels; NumPy's matmul depends on the shape."""
    if impl == "reference":
        assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    else:
        same_bits(a, b)


def of_rows(options: dict[str, Any], first: int, n: int) -> dict[str, Any]:
    """The options of rows first .. first + n alone."""
    cut = dict(options)
    for name in ("mask", "bias"):
        if name in cut and np.ndim(cut[name]) >= 2 and np.shape(cut[name])[-2] == ROWS:
            cut[name] = cut[name][..., first : first + n, :]
    if "q_start" in cut:
        cut["q_start"] = cut["q_start"] + first
    if "segments" in cut:
        cut["segments"] = (cut["segments"][0][first : first + n], cut["segments"][1])
    if cut.get("causal") == "lower_right":
        cut["causal"], cut["q_start"] = True, np.array(cut["key_lengths"]) - ROWS + first
    return cut


def assert_right(out: Any, q: Any, k: Any, v: Any, allowed: Any) -> None:
    clean_k, clean_v = np.nan_to_num(k, posinf=0), np.nan_to_num(v, posinf=0)  # the oracle's yardstick uses all keys
    expected = oracle(q, clean_k, clean_v, allowed)
    assert np.abs(out - expected.out).max() <= tolerance(q, clean_k, clean_v, allowed, expected)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def qkv(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    shapes = (2, HEADS, ROWS, WIDTH), (2, KEY_HEADS, KEYS, WIDTH), (2, KEY_HEADS, KEYS, WIDTH + 5)
    return tuple(np.random.default_rng(41).standard_normal(shape).astype(request.param) for shape in shapes)


@pytest.mark.parametrize("case", OPTIONS)
def test_few_rows_are_prefill_rows(qkv: Any, fma_isa: str, case: str) -> None:
    q, k, v = qkv
    options = OPTIONS[case]
    for threads in (1, 2):
        whole = attention(q, k, v, return_lse=True, num_threads=threads, **options)
        for first, n in ((0, 1), (34, 1), (36, 2), (69, 1), (60, 3)):
            some = attention(
                q[:, :, first : first + n], k, v, return_lse=True, num_threads=threads,
                **of_rows(options, first, n),
            )  # fmt: skip
            same_bits(some.out, whole.out[:, :, first : first + n])
            same_bits(some.lse, whole.lse[:, :, first : first + n])


@pytest.mark.parametrize("case", OPTIONS)
def test_rows_of_a_cache_are_prefill_rows(qkv: Any, fma_isa: str, case: str) -> None:
    """The same from a cache: few rows and many, tokens appended in pieces."""
    q, k, v = qkv
    options = {"causal": False, **OPTIONS[case]}
    whole = attention(q, k, v, return_lse=True, **options)
    cache = KVCache(2, KEY_HEADS, WIDTH, value_dim=WIDTH + 5, dtype=q.dtype)
    for first, end in ((0, 301), (301, 302), (302, 320), (320, KEYS)):
        cache.append(k[:, :, first:end], v[:, :, first:end])
    for threads in (1, 2):
        for first, n in ((0, 1), (34, 1), (36, 2), (69, 1), (0, ROWS)):
            some = cache.attend(
                q[:, :, first : first + n], return_lse=True, num_threads=threads, **of_rows(options, first, n)
            )
            same_bits(some.out, whole.out[:, :, first : first + n])
            same_bits(some.lse, whole.lse[:, :, first : first + n])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 12, 30, 48])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_heads_that_share_keys_and_threads_that_share_a_head(fma_isa: str, group: int, dtype: Any) -> None:
    """One head of keys: with two threads its chunks are divided, whatever the group; the bits stay."""
    rng = np.random.default_rng(group)
    q, k, v = (rng.standard_normal((1, h, n, 64)).astype(dtype) for h, n in ((group, 1), (1, 9000), (1, 9000)))
    many = np.repeat(q, 48 // group + 1, axis=2)  # more rows than AT_MAX_ROWS
    assert not explain(many, k, v, num_threads=1).few
    padding = {"key_lengths": 8500, "mask": rng.random((group, 1, 9000)) < 0.9}
    for options in ({}, padding):
        full = attention(many, k, v, num_threads=1, **options)[:, :, :1]
        for threads in (1, 2, 3, 8):
            same_bits(attention(q, k, v, num_threads=threads, **options), full)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("threads", [1, 2])
def test_poison_after_the_end_and_before_it(impl: str, value: float, threads: int) -> None:
    rng = np.random.default_rng(6)
    for n in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 300, 511, 513, 600):
        shapes = (1, 4, 1, 24), (1, 2, 700, 24), (1, 2, 700, 24)
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
        clean = attention(q, k[:, :, :n], v[:, :, :n])
        k[:, :, n:], v[:, :, n:] = value, value
        assert_same(impl, attention(q, k, v, key_lengths=n, num_threads=threads), clean)
        mask = np.arange(700) < n
        mask[: n // 3] = False
        k[:, :, : n // 3], v[:, :, : n // 3] = value, value
        masked = attention(q, k, v, mask=mask[None], num_threads=threads)
        assert_right(masked, q, k, v, np.broadcast_to(mask, (1, 4, 1, 700)))
        v[:, :, n - 1, 3] = value
        assert not np.isfinite(attention(q, k, v, key_lengths=n, num_threads=threads)[..., 3]).any()


@pytest.mark.parametrize(
    ("width", "value_width"),
    # Each with a few of the other: tests of report B40 have all pairs.
    [*zip([1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 80, 129] * 2, [1, 5, 16, 31, 64, 144, 5] * 4, strict=False)],
)
def test_odd_widths(impl: str, width: int, value_width: int) -> None:
    rng = np.random.default_rng(width)
    for keys in (1, 5, 16, 33, 300):
        q, k, v = (
            rng.standard_normal((2, heads, rows, columns), np.float32)
            for heads, rows, columns in ((6, 1, width), (2, keys, width), (2, keys, value_width))
        )
        assert_right(attention(q, k, v), q, k, v, np.ones((2, 6, 1, keys), bool))


def test_any_strides(impl: str) -> None:
    rng = np.random.default_rng(8)
    q = rng.standard_normal((2, 1, 6, 32), np.float32).swapaxes(1, 2)
    k, v = (rng.standard_normal((2, 400, 3, 32), np.float32).swapaxes(1, 2)[:, :, ::-1] for _ in range(2))
    contiguous = attention(*(np.ascontiguousarray(x) for x in (q, k, v)))
    assert_same(impl, attention(q, k, v), contiguous)
    out = np.zeros((2, 1, 6, 64), np.float32)[..., ::-1][..., 32:][..., ::-1].swapaxes(1, 2)
    assert_same(impl, attention(q, k, v, out=out), contiguous)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("keys", [2**40, 2**50])
def test_a_view_that_repeats_a_key_needs_no_memory(compiled, keys, heads, threads):
    """Scratch for partial results grew with S, seen or not: MemoryError, and sizes beyond 2^63 bytes in the end."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, heads, 1, 8)).astype("f4") for _ in range(3))
    k, v = (np.broadcast_to(x, (1, heads, keys, 8)) for x in (k, v))
    found = attention(q, k, v, key_lengths=300, num_threads=threads)
    np.testing.assert_array_equal(found, attention(q, k[:, :, :300], v[:, :, :300]))


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_of_a_token_side_by_side(isa, rows, threads):
    """Arrays (batch, tokens, heads, width), as projections give them, are read chunk after chunk for all heads."""
    for keys in (40, 700, 1100):
        q, k, v = normal(2, 6, rows, 24), normal(2, 3, keys, 24, seed=1), normal(2, 3, keys, 16, seed=2)
        inside = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v)]
        mask = np.random.default_rng(3).random((2, 6, rows, keys)) > 0.4
        mask[1, 2] = False
        for options in (
            {},
            {"mask": mask, "return_lse": True},
            {"causal": "lower_right", "window": (300, None), "sinks": np.zeros(6)},
            {"key_lengths": [keys // 2, 0]},
        ):
            found = attention(*inside, num_threads=threads, **options)
            wanted = attention(q, k, v, num_threads=1, **options)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)
        inside[2][:, :, keys // 2 :] = np.nan  # of keys that no row sees
        found = attention(*inside, key_lengths=keys // 2, num_threads=threads)
        np.testing.assert_array_equal(found, attention(q, k, v, key_lengths=keys // 2))


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_item_is_computed(isa, threads, side_by_side):
    """However many items there are for a task, and however a token's heads lie; also those of very many heads."""
    for batch, heads in ((1, 300), (3, 2), (16, 2), (37, 3), (150, 2)):
        q, k, v = (normal(batch, heads, n, 8, seed=n) for n in (1, 40, 41))
        v = v[:, :, 1:]
        if side_by_side:
            k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (k, v))
        found = attention(q, k, v, out=np.full(q.shape, np.nan, np.float32), num_threads=threads)
        for item in range(batch):
            np.testing.assert_array_equal(found[item], attention(q[item], k[item].copy(), v[item].copy()))
