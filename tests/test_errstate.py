"""Settings of NumPy around a call change nothing: neither np.errstate(all="raise") nor a filter of warnings."""

from __future__ import annotations

import inspect
import io
import warnings

import numpy as np
import pytest
from helpers import dtype_of
from numpy.testing import assert_array_equal

import attentile
from attentile import KVCache, MultiHeadAttention, onnx

DTYPES = ("float16", "bfloat16", "float32", "float64")


def numbers(kind: str, dtype, *shape: int) -> np.ndarray:
    """Arrays whose products, sums and roundings underflow, overflow or are no numbers."""
    rng, limits = np.random.default_rng(80), np.finfo(dtype if np.dtype(dtype).kind == "f" else np.float32)
    x = rng.standard_normal(shape)
    if kind == "tiny":
        x = x * float(limits.smallest_normal) * 10 ** (6 * rng.random(shape))
    elif kind == "wide":
        x = x * 10 ** (rng.random(shape) * 8 - 6)
    elif kind == "huge":
        x = np.sign(x) * float(limits.max) * rng.random(shape)
    else:
        x = np.where(rng.random(shape) < 0.2, rng.choice([np.inf, -np.inf, np.nan], shape), x)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def calls(kind: str, dtype) -> dict:
    """A call, or more, of every public function that computes with arrays."""
    return calls_of_attention(kind, dtype) | calls_of_others(kind, dtype)


def calls_of_attention(kind: str, dtype) -> dict:
    q, k, v = (numbers(kind, dtype, 1, 2, 5, 8) for _ in range(3))
    bias, lse = numbers("tiny", np.float64, 5, 5) * 1e-3, numbers(kind, np.float32, 1, 2, 5)
    some = {"softcap": 30.0, "alibi_slopes": [1.0, 1e-30], "sinks": [90.0, -800.0], "bias": bias, "causal": True}
    every = ("entropy", "max", "top_k", "received", "rows")
    wide = q.astype(np.float64), q[..., 0].astype(np.float64)

    def parts():
        return [attentile.attention(q, k, v, return_lse=True)[:2], attentile.attention(q, q, q, return_lse=True)[:2]]

    def partials():
        return [attentile.attention_partial(q, k, v), attentile.attention_partial(q, v, k, causal=True)]

    def with_gradients():
        out, back = attentile.attention_vjp(q, k, v, **some)
        return [out, *back(v, lse, wrt=("q", "k", "v", "bias", "sinks", "alibi_slopes"))]

    def cached(dtype, **options):
        cache = KVCache(1, 2, 8, dtype=dtype, **options)
        cache.append(k, v)
        cache.append(k, v)
        cache.save(io.BytesIO())
        return [cache.keys(), cache.attend(q), *cache.attend(q[:, :, :1], return_weights=True, return_lse=True)]

    def modified(scores, b, h, i, j):
        return np.full(scores.shape, 1e-300)

    return {
        "attention": lambda: [attentile.attention(q, k, v)],
        "attention, everything": lambda: attentile.attention(q, k, v, return_weights=True, return_lse=True, **some),
        "attention, one row": lambda: attentile.attention(q[:, :, :1], k, v, return_lse=True, sinks=[1.0, 1e6]),
        "attention, out": lambda: [attentile.attention(q, k, v, out=np.empty(q.shape, dtype), bias=bias)],
        "attention, score_mod": lambda: [attentile.attention(q, k, v, score_mod=modified)],
        "attention, before": lambda: [attentile.attention(q, k, v, before=attentile.attention_partial(q, v, k))],
        "attention, mixed": lambda: [attentile.attention(q, k.astype(np.float64), v.astype(np.float64))],
        "attention_partial": lambda: [x for part in partials() for x in (*part, part.out, part.lse)],
        "attention_stats": lambda: attentile.attention_stats(q, k, v, which=every, rows=[0, 3], **some),
        "attention_stats, plain": lambda: attentile.attention_stats(q, k, v),
        "attention_vjp": with_gradients,
        "attention_backward": lambda: attentile.attention_backward(k, q, k, v, v, wide[1], sinks=[1.0, 1e6])[:3],
        "merge_attention": lambda: attentile.merge_attention(parts())[:2],
        "merge_attention, partials": lambda: attentile.merge_attention(partials()),
        "merge_attention, one": lambda: attentile.merge_attention([(q, wide[1])])[:2],
        "merge_attention, of other dtypes": lambda: attentile.merge_attention([wide, (k, lse)])[:2],
        "explain": lambda: [attentile.explain(q, k, v, **some).useful_flops],
        "self_attention": lambda: attentile.self_attention(q, k, v, 8),
        "self_attention, mask": lambda: attentile.self_attention(q, k, v, 1e-30, mask=bias),
        "causal_attention": lambda: attentile.causal_attention(q, k, v, 8),
        "onnx.attention": lambda: [x for x in onnx.attention(q, k, v, bias, qk_matmul_output_mode=3) if x is not None],
        "KVCache": lambda: cached(np.float32),
        "KVCache, rotary": lambda: cached(np.float32, rotary={"base": 10.0}),
        "KVCache, float64": lambda: cached(np.float64),
    }


def calls_of_others(kind: str, dtype) -> dict:
    q, x, w = numbers(kind, dtype, 1, 2, 5, 8), numbers(kind, dtype, 5, 8), numbers(kind, dtype, 8, 8)
    b, table, rows = numbers(kind, dtype, 8), numbers(kind, dtype, 32, 9), numbers(kind, dtype, 5, 4)
    layer = MultiHeadAttention(w, w, w, w, b_q=b, b_o=b, num_heads=2)
    fused, norm = np.concatenate([w, w, w], axis=1), {"kind": "layer", "eps": 1e-6}
    norms = MultiHeadAttention(fused, None, None, w, num_heads=2, norm=norm, q_norm=b, k_norm=b)
    with_rotary = MultiHeadAttention(w, w, w, w, num_heads=2, rotary={"base": 10.0})
    return {
        "multi_head_attention": lambda: [attentile.multi_head_attention(x, 8, 2, w, w, w, w)],
        "MultiHeadAttention": lambda: [layer(x), layer(x, out=np.empty_like(x)), layer(x, causal=True)],
        "MultiHeadAttention, gradients": lambda: [*layer.vjp(x)[1](x).values(), *norms.vjp(x, x)[1](x).values()],
        "MultiHeadAttention, rotary": lambda: [with_rotary(x), *with_rotary.keys_values(x)],
        "rotary_embedding": lambda: [attentile.rotary_embedding(q, at) for at in (None, np.arange(5) * 10**6)],
        "rotary_embedding, tables": lambda: [attentile.rotary_embedding(q, cos=rows, sin=rows)],
        "positional_encoding": lambda: [attentile.positional_encoding(9, 6, dtype=np.float16, base=1e300)],
        "alibi_slopes": lambda: [attentile.alibi_slopes(12)],
        "relative_bias": lambda: [attentile.relative_bias(table[:2, :9], 5, 5)],
        "relative_bias_backward": lambda: [attentile.relative_bias_backward(q[0], 2)],
        "t5_bias_backward": lambda: [attentile.t5_bias_backward(q[0], 8)],
        "t5_bias": lambda: [attentile.t5_bias(table, 5, 5)],
        "t5_buckets": lambda: [attentile.t5_buckets(np.arange(-500, 500))],
        "segment_ids": lambda: [attentile.segment_ids([3, 4])],
        "draw_mask": lambda: [attentile.draw_mask(queries=100, keys=70, window=(9, 3), q_start=2)],
        "onnx.rotary_embedding": lambda: [onnx.rotary_embedding(q, rows[None], rows[None])],
        "onnx.tensor_scatter": lambda: [onnx.tensor_scatter(q, q[:, :, :2], np.array([1]), axis=2)],
    }


NOTHING_TO_COMPUTE = {"get_num_threads", "num_threads", "set_num_threads", "show_config", "use_backend"}


def test_every_public_function_is_here():
    computing = {name.split(",")[0] for name in calls("wide", np.float32)}
    public = {name for name in attentile.__all__ if inspect.isfunction(getattr(attentile, name))} | {
        "KVCache",
        "MultiHeadAttention",
    }
    assert public - computing == NOTHING_TO_COMPUTE
    assert {
        f"onnx.{name}" for name in vars(onnx) if name in ("attention", "rotary_embedding", "tensor_scatter")
    } <= computing


@pytest.mark.parametrize("kind", ["tiny", "wide", "huge", "nan"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", calls("wide", np.float32))
def test_settings_of_numpy_change_nothing(either, name, dtype, kind):
    call = calls(kind, dtype_of(dtype))[name]
    with np.errstate(all="ignore"):
        expected = call()
    with np.errstate(all="raise"):
        found = call()
    with np.errstate(all="warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [*found, *call()]
    for x, y in zip(found, [*expected, *expected], strict=True):
        if dtype == "bfloat16" and isinstance(x, np.ndarray):  # NumPy does not know which of its numbers are NaN
            x, y = x.astype(np.float64), y.astype(np.float64)
        assert_array_equal(x, y)
