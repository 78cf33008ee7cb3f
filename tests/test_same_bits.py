"""Promise 2: the bits of a row depend on its query and on the keys it may see, and on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import FMA_HERE, two_fma_isas
from helpers import same_bits

from attentile import attention, num_threads, positional_encoding, self_attention, use_backend

DTYPES = (np.float32, np.float64)
ROWS, KEYS, WIDTH = 150, 700, 40


@pytest.fixture(params=DTYPES, ids=["float32", "float64"])
def qkv(request) -> tuple[Any, ...]:
    rng = np.random.default_rng(20)
    return tuple(rng.standard_normal((3, 4, n, WIDTH)).astype(request.param) for n in (ROWS, KEYS, KEYS))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_start": 500},
    "lengths": {"key_lengths": [700, 257, 31]},
    "mask": {"mask": np.random.default_rng(21).random((3, 1, ROWS, KEYS)) < 0.5},
    "bias": {"bias": np.random.default_rng(22).standard_normal((4, ROWS, KEYS)).astype(np.float32)},
    "all": {
        "causal": "lower_right",
        "key_lengths": [700, 650, 300],
        "mask": np.random.default_rng(23).random((ROWS, KEYS)) < 0.8,
        "bias": np.random.default_rng(24).standard_normal((KEYS,)).astype(np.float32),
    },
}


def row_options(options: dict[str, Any], item: int, head: int, rows: slice) -> dict[str, Any]:
    """The same options for some rows of one head of one batch item."""
    cut = {}
    for name, value in options.items():
        if name in ("mask", "bias"):
            cut[name] = np.broadcast_to(value, (3, 4, ROWS, KEYS))[item, head, rows]
        elif name == "key_lengths":
            cut[name] = value[item]
        elif name == "causal":
            start = (
                (options.get("key_lengths", [KEYS] * 3)[item] - ROWS) if value == "lower_right" else options["q_start"]
            )
            cut["causal"], cut["q_start"] = True, start + rows.start
    return cut


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_row_alone_and_in_any_group_of_rows(isa, kind, qkv):
    q, k, v = qkv
    whole = attention(q, k, v, **OPTIONS[kind])
    for item, head, rows in [
        (0, 0, slice(0, 1)),
        (1, 2, slice(77, 78)),
        (2, 3, slice(149, 150)),
        (1, 1, slice(10, 27)),
        (2, 0, slice(3, 100)),
    ]:
        cut = row_options(OPTIONS[kind], item, head, rows)
        same_bits(attention(q[item, head, rows], k[item, head], v[item, head], **cut), whole[item, head, rows])


@pytest.mark.parametrize("kind", OPTIONS)
def test_batch_heads_and_grouping(isa, kind, qkv):
    q, k, v = qkv
    whole = attention(q, k, v, **OPTIONS[kind])
    for item, head in [(0, 1), (2, 3)]:
        cut = row_options(OPTIONS[kind], item, head, slice(0, ROWS))
        same_bits(attention(q[item, head], k[item, head], v[item, head], **cut), whole[item, head])
    if kind == "plain":  # grouped heads are rows of the same keys
        shared = attention(q, k[:, :1], v[:, :1])
        repeated = attention(q, np.repeat(k[:, :1], 4, axis=1), np.repeat(v[:, :1], 4, axis=1))
        same_bits(shared, repeated)


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_padding_after_the_last_visible_key(isa, poison, qkv):
    q, k, v = qkv
    q = q[:, :, :70]  # a block and a part of one
    for n in (1, 31, 32, 33, 255, 256, 257, 600):
        alone = attention(q[0], k[0, :, :n], v[0, :, :n])
        padded_k, padded_v = k[0].copy(), v[0].copy()
        padded_k[:, n:], padded_v[:, n:] = poison, poison
        same_bits(attention(q[0], padded_k, padded_v, key_lengths=n), alone)
        same_bits(attention(q[0], padded_k, padded_v, mask=np.arange(KEYS) < n), alone)
        same_bits(attention(q[0], padded_k, padded_v, bias=np.where(np.arange(KEYS) < n, 0, -np.inf)), alone)


def spread(x: Any, apart: int) -> Any:
    """The same numbers with rows so many elements apart, NaN between them; backwards if negative."""
    wide = np.full((*x.shape[:-1], abs(apart)), np.nan, x.dtype)
    wide = wide[..., ::-1, :] if apart < 0 else wide
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("apart", [130, 300, 1024, -600])
def test_rows_that_lie_apart(isa, kind, apart, qkv):
    """Keys and values of which a task gathers chunks, both or one of them."""
    q, k, v = qkv
    expected = attention(q, k, v, **OPTIONS[kind])
    for arrays in (spread(k, apart), spread(v, apart)), (spread(k, apart), v), (k, spread(v, apart)):
        for threads in 1, 2:
            same_bits(attention(q, *arrays, num_threads=threads, **OPTIONS[kind]), expected)


@pytest.mark.parametrize("layout", ["heads side by side", "one key for all", "one value for all"])
def test_layouts_of_tokens(isa, layout, qkv):
    q, k, v = qkv
    if layout == "heads side by side":
        k, v = (np.concatenate([x, x, x, x], axis=-1)[..., :WIDTH] for x in (k, v))
        k, v = (x.swapaxes(-3, -2).copy().swapaxes(-3, -2) for x in (k, v))
    elif layout == "one key for all":
        k = np.broadcast_to(k[..., :1, :], k.shape)
    else:
        v = np.broadcast_to(v[..., :1, :], v.shape)
    same_bits(attention(q, k, v), attention(q, k.copy(), v.copy()))


@pytest.mark.parametrize("kind", OPTIONS)
def test_thread_counts(isa, kind, qkv):
    one = attention(*qkv, num_threads=1, **OPTIONS[kind])
    for threads in (2, 3, 7):
        same_bits(attention(*qkv, num_threads=threads, **OPTIONS[kind]), one)
    with num_threads(2):
        same_bits(attention(*qkv, **OPTIONS[kind]), one)


@two_fma_isas
@pytest.mark.parametrize("kind", OPTIONS)
def test_fma_instruction_sets_agree(kind, qkv):
    results = []
    for isa in FMA_HERE:
        with use_backend("compiled", isa):
            results.append(attention(*qkv, return_lse=True, return_weights=True, **OPTIONS[kind]))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            same_bits(a, b)


@two_fma_isas
@pytest.mark.parametrize("width", [1, 7, 64, 129])
def test_fma_instruction_sets_agree_elsewhere(width):
    """The textbook functions and the positional encoding keep the order of operations too."""
    rng = np.random.default_rng(25)
    q, k, v = rng.standard_normal((3, 90, width))
    mask = rng.random((90, 90)) < 0.5
    results = []
    for isa in FMA_HERE:
        with use_backend("compiled", isa):
            results.append((*self_attention(q, k, v, width, mask), positional_encoding(130, width, offset=-40)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            same_bits(a, b)


def test_extra_outputs_change_no_bit(impl, qkv):
    q, k, v = qkv
    plain = attention(q, k, v)
    full = attention(q, k, v, return_lse=True, return_weights=True, out=np.empty(q.shape, q.dtype))
    same_bits(full.out, plain)
    for _ in range(5):
        same_bits(attention(q, k, v), plain)
