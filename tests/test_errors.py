"""Bad input: a clear message (function, argument, found, wanted, way out) before any work, and nothing written."""

from __future__ import annotations

import numpy as np
import pytest

import attentile
from attentile import attention

Q = np.ones((2, 4, 3, 8), np.float32)


def k_of(*shape):
    return np.ones(shape, np.float32)


def overlapping(*strides):
    return np.lib.stride_tricks.as_strided(np.zeros(500, np.float32)[100:], Q.shape, strides)


CASES = [
    (dict(q=np.ones(3)), ValueError, r"q has shape \(3,\); it needs at least two axes"),
    (
        dict(k=k_of(2, 3, 5, 8), v=k_of(2, 3, 5, 8)),
        ValueError,
        "q has 4 heads and k has 3; the number of q heads must be a multiple",
    ),
    (dict(k=k_of(2, 8, 5, 8), v=k_of(2, 8, 5, 8)), ValueError, "q has 4 heads and k has 8"),
    (dict(v=k_of(2, 2, 3, 8)), ValueError, "k has 4 heads and v has 2"),
    (dict(v=k_of(2, 4, 5, 8)), ValueError, "k has 3 keys and v has 5"),
    (dict(k=k_of(2, 4, 3, 7)), ValueError, "q has width 8 and k has 7"),
    (dict(q=k_of(2, 4, 3, 0), k=k_of(2, 4, 3, 0)), ValueError, "width 0"),
    (dict(q=k_of(3, 4, 3, 8)), ValueError, "batch axes of q, k and v do not broadcast"),
    (dict(q=Q.astype(complex)), TypeError, "complex128; supported are"),
    (dict(k=Q.astype(object)), TypeError, "object"),
    (dict(v=np.full(Q.shape, "x")), TypeError, "<U1"),
    *((dict(q=Q.astype(x)), TypeError, "supported are") for x in [np.longdouble] if np.dtype(x) != np.float64),
    (dict(mask=np.ones((3, 3), int)), TypeError, "int64; it must be bool, True = may attend .pass mask != 0"),
    (dict(mask=np.ones((3, 3))), TypeError, "float64; it must be bool.*bias="),
    (
        dict(mask=np.ones((3, 4), bool)),
        ValueError,
        r"mask has shape \(3, 4\), which does not broadcast to \(2, 4, 3, 3\)",
    ),
    (dict(mask=np.ones((5, 2, 4, 3, 3), bool)), ValueError, "does not broadcast"),
    (dict(bias=np.ones((3, 3), int)), TypeError, "bias has dtype int64; it must be floating"),
    (dict(bias=np.ones((3, 3), bool)), TypeError, "bias has dtype bool.*mask="),
    (dict(bias=np.ones((2, 3))), ValueError, "bias has shape"),
    (
        dict(causal=True, k=k_of(2, 4, 5, 8), v=k_of(2, 4, 5, 8)),
        ValueError,
        "3 queries and 5 keys is ambiguous.*upper_left.*lower_right.*q_start",
    ),
    (dict(causal="lower"), ValueError, "causal is 'lower'"),
    (dict(causal=2), ValueError, "causal is 2"),
    (dict(causal=None), ValueError, "causal is None"),
    (dict(q_start=3), ValueError, "q_start= places the queries for causal=True, window= or alibi_slopes="),
    (dict(q_start=3, causal="upper_left"), ValueError, "both place the queries"),
    (dict(q_start=1.5, causal=True), TypeError, "q_start has dtype float64"),
    (dict(q_start=[1, 2, 3], causal=True), ValueError, r"q_start has shape \(3,\) and the batch axes are \(2,\)"),
    (dict(key_lengths=4), ValueError, "from 4 to 4; they must lie between 0 and the number of keys, 3"),
    (dict(key_lengths=[-1, 2]), ValueError, "from -1 to 2"),
    (dict(key_lengths=[1.0, 2.0]), TypeError, "key_lengths has dtype float64"),
    (dict(key_lengths=[True, False]), TypeError, "key_lengths has dtype bool"),
    (dict(key_lengths=[1, 2, 3]), ValueError, "key_lengths has shape"),
    (dict(scale=np.inf), ValueError, "scale is inf; it must be finite"),
    (dict(scale=np.nan), ValueError, "scale is nan"),
    (dict(scale="big"), TypeError, "scale is 'big'"),
    (dict(num_threads=0), ValueError, "attention: num_threads is 0"),
    (dict(num_threads=1.5), TypeError, "num_threads is 1.5"),
    (dict(out=np.ones((2, 4, 3, 8))), ValueError, "out has shape .* and dtype float64; they must be .* and float32"),
    (dict(out=np.ones((2, 4, 3, 9), np.float32)), ValueError, "out has shape"),
    (dict(out=[1.0]), TypeError, "out is a list"),
    (dict(out=overlapping(0, 96, 32, 4)), ValueError, "out has shape .* so that elements share memory"),
    (dict(out=overlapping(384, 96, 4, 4)), ValueError, "out has shape .* so that elements share memory"),
    (dict(out=overlapping(384, 96, -28, 4)), ValueError, "out has shape .* so that elements share memory"),
    (dict(window=4), TypeError, r"window is 4; it must be a pair.*\(W - 1, 0\)"),
    (dict(window=(1, 2, 3)), TypeError, "must be a pair"),
    (dict(window=(1.5, 0)), TypeError, "each side must be an integer or None"),
    (dict(window=(-1, 0)), ValueError, "no side may be negative"),
    (
        dict(window=(1, 0), k=k_of(2, 4, 5, 8), v=k_of(2, 4, 5, 8)),
        ValueError,
        "window= or alibi_slopes= with 3 queries",
    ),
    (dict(prefix_lengths=2), ValueError, "needs a causal form"),
    (dict(prefix_lengths=-1, causal=True), ValueError, "no prefix may have a negative length"),
    (dict(prefix_lengths=[1, 2, 3], causal=True), ValueError, "prefix_lengths has shape"),
    (dict(segments=[0, 0, 1.0]), TypeError, "segments .query ids. has dtype float64"),
    (dict(segments=[0, 0]), ValueError, r"segments .query ids. has shape \(2,\)"),
    (dict(segments=[0] * 5, k=k_of(2, 4, 5, 8), v=k_of(2, 4, 5, 8)), ValueError, "must be a pair"),
    (dict(softcap=0), ValueError, "softcap is 0.0; it must be positive"),
    (dict(softcap="x"), TypeError, "softcap is 'x'"),
    (dict(sinks=[1.0]), ValueError, r"sinks has shape \(1,\); it must be \(4,\), one per query head"),
    (dict(sinks=[True] * 4), TypeError, "sinks has dtype bool"),
    (dict(alibi_slopes=np.ones((2, 4))), ValueError, "alibi_slopes has shape"),
    (dict(windows=(1, 0)), TypeError, "windows"),
]


@pytest.mark.parametrize(("change", "error", "words"), CASES, ids=[str(n) for n in range(len(CASES))])
def test_message(either, change, error, words):
    arguments = {"q": Q, "k": Q, "v": Q, **change}
    with pytest.raises(error, match=words):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    "change", [dict(key_lengths=9), dict(scale=np.nan), dict(mask=np.ones((9, 9), bool)), dict(num_threads=0)]
)
def test_nothing_is_written(either, change):
    out = np.full(Q.shape, 7, np.float32)
    with pytest.raises(ValueError, match="attention: "):
        attention(Q, Q, Q, out=out, **change)
    assert (out == 7).all()


def test_read_only_out(either):
    out = np.full(Q.shape, 7, np.float32)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        attention(Q, Q, Q, out=out)


def test_unknown_and_positional_options(either):
    with pytest.raises(TypeError):
        attention(Q, Q, Q, np.ones((3, 3), bool))  # mask is keyword-only
    with pytest.raises(TypeError):
        attention(Q, Q)


@pytest.mark.parametrize(
    "call",
    [
        lambda true: attention(Q, Q, Q, num_threads=true),
        lambda true: attention(Q, Q, Q, window=(true, 0)),
        lambda true: attentile.set_num_threads(true),
        lambda true: attentile.num_threads(true).__enter__(),
        lambda true: attentile.positional_encoding(true, 4),
        lambda true: attentile.positional_encoding(4, 4, offset=true),
        lambda true: attentile.rotary_embedding(Q, true),
        lambda true: attentile.rotary_embedding(Q, np.array(true)),
        lambda true: attentile.attention_stats(Q, Q, Q, top_k=true),
        lambda true: attentile.KVCache(true, 1, 4, 16),
        lambda true: attentile.KVCache(1, 1, 4, 16, window=(true, 0)),
    ],
)
def test_a_boolean_of_numpy_is_no_integer(call):
    """NumPy 1.26 lets operator.index() take it, with a warning only."""
    with pytest.raises(TypeError, match="integer"):
        call(np.True_)
