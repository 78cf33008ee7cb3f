"""Calls of every public function as a strict type checker sees them.

No test imports this file: `mypy` reads it with the package, and a call here that it refuses is a call that it would
refuse in the code of a user. test_quality.py sees to it that no public name is missing.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import attentile as at

Array = NDArray[Any]
x = np.ones((1, 2, 4, 8), np.float32)
plain: NDArray[np.float32] = x


def attention_calls() -> None:
    assert_type(at.attention(x, x, x), Array)
    assert_type(at.attention(x.tolist(), x, x, mask=np.tri(4, dtype=bool), bias=[0.0] * 4, window=(3, None)), Array)
    assert_type(at.attention(x, x, x, return_lse=True), at.AttentionResult)
    assert_type(at.attention(x, x, x, return_weights=True, causal="lower_right"), at.AttentionResult)
    assert_type(at.attention(x, x, x, return_lse=True, return_weights=True, q_start=[0]).weights, Array | None)
    flag = bool(x.any())
    assert_type(at.attention(x, x, x, return_lse=flag), Array | at.AttentionResult)
    out, lse, weights = at.attention(x, x, x, return_lse=True)
    assert_type((out, lse, weights), tuple[Array, Array | None, Array | None])
    at.attention(x, x, x, score_mod=lambda s, b, h, i, j: s - abs(i - j), out=out, num_threads=1, scale=0.5)
    at.attention(x, x, x, segments=(np.zeros(4, int), np.zeros(4, int)), sinks=[0.0, 1.0], softcap=30.0)
    parts = [at.attention(x, x, x, return_lse=True)] * 2
    assert_type(at.merge_attention(parts), at.AttentionResult)
    partial: at.Partial = at.attention_partial(x, x, x, key_lengths=3)
    assert_type(at.merge_attention([partial, partial]), at.Partial)
    assert_type(at.attention(x, x, x, before=partial), Array)
    out, vjp = at.attention_vjp(x, x, x, causal=True)
    assert_type(at.attention_vjp(x, x, x, return_lse=True)[0], at.AttentionResult)
    gradients: at.AttentionGradients = vjp(x, wrt="q", dq=np.empty_like(x))
    assert_type(gradients.dq, Array | None)
    assert_type(at.attention_backward(x, x, x, x, x, x[..., 0], wrt=("q", "v"), dv=plain), at.AttentionGradients)
    stats: at.AttentionStats = at.attention_stats(x, x, x)
    explained: at.Explanation = at.explain(x, x, x, causal=True)
    print(stats, explained.notes, at.draw_mask(queries=3, keys=3, causal=True))


def textbook_calls() -> None:
    q = x[0, 0]
    output, weights = at.self_attention(q, q, q, 8, np.tri(4))
    assert_type((output, weights), tuple[Array, Array])
    output, weights = at.causal_attention(q, q, q, 8)
    w = np.eye(8, dtype=np.float32)
    assert_type(at.multi_head_attention(q, 8, 2, w, w, w, w), Array)
    assert_type(at.positional_encoding(4, 8, dtype=np.float32), Array)


def position_calls() -> None:
    at.rotary_embedding(x, [0, 1, 2, 3], scaling={"rope_type": "linear", "factor": 2.0})
    at.attention(x, x, x, alibi_slopes=at.alibi_slopes(2), bias=at.relative_bias(np.zeros((2, 9)), 4, 4))
    at.attention(x, x, x, bias=at.t5_bias(np.zeros((32, 2)), 4, 4), segments=at.segment_ids([3, 1]))
    assert_type(at.relative_bias_backward(x[0], 4), Array)
    assert_type(at.t5_bias_backward(x[0], 32, bidirectional=False), Array)
    print(at.t5_buckets([-1, 0, 1]))


def cache_and_layer_calls() -> None:
    cache = at.KVCache(1, 2, 8, window=(3, 0), sink_tokens=1, rotary={"base": 500.0})
    cache.append(x, x)
    twin: at.KVCache = cache.fork()
    twin.truncate(3)
    twin.reorder([0])
    assert_type(cache.keys(), Array)
    result = cache.attend(x, return_lse=True)
    print(result[0], cache.length, cache.lengths)
    w = np.eye(16, dtype=np.float32)
    layer = at.MultiHeadAttention(w, w, w, w, num_heads=2)
    assert_type(layer.vjp(np.ones((4, 16)), causal=True)[0], Array)
    print(layer(np.ones((4, 16), np.float32), causal=True), layer.head_dim)


def setting_calls() -> None:
    with at.num_threads(2), at.use_backend("numpy"):
        count: int = at.get_num_threads()
    at.set_num_threads(None)
    at.show_config()
    assert_type(at.show_config(as_dict=True), dict[str, Any])
    print(count, at.show_config(as_dict=True)["isa"])
