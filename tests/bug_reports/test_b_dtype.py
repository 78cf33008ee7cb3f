"""Reports about dtypes: what comes out, half precision, how the scale is rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import dtype_of, normal
from numpy.testing import assert_allclose, assert_array_equal
from oracle import oracle, same_formula
from report_helpers import Array, check, qkv

from attentile import attention, rotary_embedding, self_attention

# ---- B74: the output dtype ----


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_b74_output_dtype_is_the_input_dtype(impl, name):
    dtype = dtype_of(name)
    q, k, v = qkv((1, 2, 9, 16), dtype=dtype)
    extras: list[dict[str, Any]] = [{}, {"mask": np.tri(9, dtype=bool)}, {"scale": np.float64(0.3)}, {"key_lengths": 4}]
    extras += [{"bias": normal(9, 9, dtype=wide)} for wide in (np.float64, np.float16)]
    for extra in extras:
        result = attention(q, k, v, return_lse=True, return_weights=True, **extra)
        assert result.out.dtype == result.weights.dtype == attention(q, k, v, **extra).dtype == dtype
        assert result.lse.dtype == (np.float64 if name == "float64" else np.float32)


def test_b74_wide_bias_is_really_used(impl):
    q, k, v = qkv((1, 2, 9, 16))
    bias = normal(9, 9, dtype=np.float64, seed=1)
    check(q, k, v, bias=bias)
    assert_array_equal(attention(q, k, v, bias=bias), attention(q, k, v, bias=bias.astype(np.float32)))


@pytest.mark.parametrize(
    ("q_dtype", "k_dtype", "v_dtype", "promoted"),
    [
        ("float32", "float32", "float16", "float32"),
        ("float16", "float32", "float32", "float32"),
        ("float32", "float64", "float32", "float64"),
        ("float16", "float16", "float64", "float64"),
        ("int64", "float32", "float32", "float64"),
        ("int32", "int32", "int32", "float64"),
        ("bool", "float32", "float32", "float32"),
    ],
)
def test_b74_mixed_dtypes_promote(impl, q_dtype, k_dtype, v_dtype, promoted):
    q, k, v = ((3 * x).astype(dtype) for x, dtype in zip(qkv((1, 2, 9, 16)), (q_dtype, k_dtype, v_dtype), strict=True))
    out = attention(q, k, v)
    assert out.dtype == promoted
    assert_array_equal(out, attention(*(x.astype(promoted) for x in (q, k, v))))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_b74_textbook_output_dtype(either, dtype):
    q, k, v = normal(3, 9, 16, dtype=dtype)
    for mask in (None, np.tri(9), np.tri(9, dtype=int)):
        output, weights = self_attention(q, k, v, 16, mask)
        assert output.dtype == weights.dtype == dtype


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("table", [None, np.float32, np.float64])
def test_b74_rotation_keeps_the_dtype(impl, name, table):
    """Neither the width of the angles nor that of given tables shows, so that turned and other arrays go together."""
    dtype = dtype_of(name)
    q, k, v = qkv((1, 2, 9, 16), dtype=dtype)
    tables = {} if table is None else {"cos": normal(9, 8, dtype=table), "sin": normal(9, 8, dtype=table, seed=1)}
    turned = [rotary_embedding(x, **tables) for x in (q, k)]
    assert [x.dtype for x in turned] == [dtype, dtype]
    assert attention(*turned, v, causal=True).dtype == dtype


# ---- B75: masks in half precision ----


def half_precision_masks() -> dict[str, dict[str, Any]]:
    allowed = np.random.default_rng(75).random((9, 9)) < 0.5
    empty_row = allowed.copy()
    empty_row[4] = False
    allowed[np.arange(9), np.arange(9)] = True
    lowest = np.float16(-65504)
    return {
        "mask": {"mask": allowed},
        "mask with an empty row": {"mask": empty_row},
        "lowest number": {"bias": np.where(allowed, np.float16(0), lowest)},
        "lowest number and -inf": {"bias": np.where(allowed, lowest, np.float16(-np.inf))},
        "a row of the lowest number": {"bias": np.where(np.arange(9)[:, None] == 4, lowest, np.float16(0))},
    }


@pytest.mark.parametrize("kind", half_precision_masks())
def test_b75_masks_in_half_precision(impl, kind):
    options = half_precision_masks()[kind]
    q, k, v = qkv((1, 2, 9, 16), dtype=np.float16)
    wide = {name: x.astype(np.float32) if name == "bias" else x for name, x in options.items()}
    # Where all scores of a row lie near -65504, float32 rounds them to 1/128 too; elsewhere the report's bound holds.
    coarse = kind in ("lowest number and -inf", "a row of the lowest number")
    out = check(q, k, v, atol=1e-2 if coarse else 2e-3, **wide).out
    assert_array_equal(out, attention(q, k, v, **options))
    assert np.isfinite(out).all()
    if kind == "mask with an empty row":
        assert_array_equal(out[..., 4, :], 0)


# ---- B77: the scale ----

SCALES = [0.1117923, np.float32(0.1117923), np.float16(0.1117923), None]


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("scale", SCALES, ids=["float", "float32", "float16", "default"])
def test_b77_scale_is_not_rounded(impl, dtype, scale):
    """As accurate as the formula in float32 with the scale as given, rounded once at the end; logits of up to 30."""
    q, k, v = qkv((1, 2, 40, 80), dtype=dtype)
    number = 1 / np.sqrt(80) if scale is None else float(scale)
    q = (q * (30 / np.abs(q.astype(np.float64) @ k.swapaxes(-1, -2) * number).max())).astype(dtype)
    allowed = np.ones((1, 2, 40, 40), bool)
    expected = oracle(q, k, v, allowed, scale=number).out
    yardstick = same_formula(*(x.astype(np.float32) for x in (q, k, v)), allowed, scale=number).astype(dtype)
    # The mean error: the largest of a few thousand varies by a factor of two from one formula (and input) to the next.
    assert rms(attention(q, k, v, scale=scale) - expected) <= 1.5 * rms(yardstick - expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [0.1117923, -0.4, 0.0, 3, np.float16(0.7)], ids=str)
def test_b77_scale_is_used_in_every_path(impl, dtype, scale):
    q, k, v = qkv((2, 4, 9, 80), kv_heads=2, dtype=dtype)
    paths: list[dict[str, Any]] = [
        {}, {"causal": True}, {"mask": np.tri(9, dtype=bool)}, {"bias": normal(9, 9)}, {"key_lengths": [9, 4]},
    ]  # fmt: skip
    for path in paths:
        out = check(q, k, v, scale=float(scale), **path).out
        assert_array_equal(attention(q, k, v, scale=scale, **path), out)
        decoded = {"causal": True, "q_start": 4} if "causal" in path else path
        if "mask" not in path and "bias" not in path:
            check(q[..., 4:5, :], k, v, scale=float(scale), **decoded)


def test_b77_textbook_scale_is_d_k(impl):
    """d_k is the number given, whatever the width of Q."""
    q, k, v = normal(3, 9, 80, dtype=np.float64)
    output, weights = self_attention(q, k, v, 5)
    result = check(q[None, None], k[None, None], v[None, None], scale=1 / np.sqrt(5))
    assert_allclose(output, result.out[0, 0], rtol=0, atol=1e-14)
    assert_allclose(weights, result.weights[0, 0], rtol=0, atol=1e-14)
