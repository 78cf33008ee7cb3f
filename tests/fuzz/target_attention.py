"""Fuzz target: attention() against a float64 oracle of its own, and every promise of equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from source import Source, expect_text

from attentile import attention, use_backend
from attentile.runtime import backend

FMA_ISAS = ("avx512", "avx2", "neon")
SCORES = 60_000  # of a case, so that one takes milliseconds


def allowed_keys(shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """(allowed (B, Hq, L, S), distance of a key from its query), from the rules of the documentation."""
    batch, _, queries, keys = shape
    i, j = np.arange(queries)[:, None], np.arange(keys)
    lengths = np.broadcast_to(options.get("key_lengths", keys), batch)[:, None, None, None]
    first = np.zeros((batch, 1, 1, 1), np.int64)
    if options.get("q_start") is not None:
        first = np.broadcast_to(options["q_start"], batch)[:, None, None, None]
    elif options["causal"] == "lower_right":
        first = lengths - queries
    at = first + i
    allowed = np.broadcast_to(j < lengths, shape).copy()
    if options["causal"] is not False:
        prefix = np.broadcast_to(options.get("prefix_lengths", 0), batch)[:, None, None, None]
        allowed &= (j <= at) | (j < prefix)
    left, right = options.get("window") or (None, None)
    allowed &= True if left is None else j >= at - left
    allowed &= True if right is None else j <= at + right
    if "segments" in options:
        q_ids, k_ids = options["segments"]
        allowed &= q_ids[:, None, :, None] == k_ids[:, None, None, :]
    if "mask" in options:
        allowed &= np.asarray(options["mask"])
    if "bias" in options:
        allowed &= np.asarray(options["bias"], np.float64) != -np.inf
    return allowed, np.abs(at - j)


def expected(q: Any, k: Any, v: Any, allowed: Any, distance: Any, options: dict[str, Any]) -> tuple[Any, Any, float]:
    """(output, logsumexp, bound of the error of working in the dtype of q) in float64."""
    eps = float(np.finfo(q.dtype).eps)
    group, width = q.shape[1] // k.shape[1], q.shape[3]
    q, k, v = q.astype(np.float64), np.repeat(k, group, 1).astype(np.float64), np.repeat(v, group, 1).astype(np.float64)
    scale = 1 / np.sqrt(width) if options.get("scale") is None else options["scale"]
    s = (q @ k.swapaxes(2, 3)) * scale
    error = eps * (width + 8) * (np.abs(q) @ np.abs(k).swapaxes(2, 3)).max(initial=0) * abs(scale)
    if "softcap" in options:
        s = options["softcap"] * np.tanh(s / options["softcap"])
        error += 8 * eps * options["softcap"]
    if "bias" in options:
        bias = np.broadcast_to(np.asarray(options["bias"], np.float64), s.shape)
        s = s + np.where(allowed, bias, 0)
        error += 4 * eps * np.abs(np.where(allowed, bias, 0)).max(initial=0)
    if "alibi_slopes" in options:
        s = s - options["alibi_slopes"][:, None, None] * distance
        error += 4 * eps * float(np.abs(options["alibi_slopes"]).max() * distance.max(initial=0))
    s = np.where(allowed, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-1e300)
    p = np.where(allowed, np.exp(s - top), 0)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        lse = (top + np.log(total))[..., 0]
        if "sinks" in options:
            total = total + np.where(total > 0, np.exp(options["sinks"][:, None, None] - top), 0)
    out = p @ v / np.where(total == 0, 1, total)
    error += 4 * eps * float(np.abs(s[allowed]).max(initial=0))
    return out, lse, 2 * error + (k.shape[2] + 16) * eps


def drawn_options(source: Source, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    batch, heads, queries, keys = shape
    rng = source.rng()
    causal = source.choice([False, "upper_left", "lower_right", True])
    options: dict[str, Any] = {"causal": causal}
    if causal is True:
        options["q_start"] = rng.integers(-3, keys + 3, batch) if source.boolean() else source.integer(-2, keys)
    if source.boolean():
        options["key_lengths"] = rng.integers(0, keys + 1, batch) if source.boolean() else source.integer(0, keys)
    if source.boolean():
        last = source.choice(
            [(batch, heads, queries, keys), (queries, keys), (batch, 1, 1, keys), (heads, queries, 1), ()]
        )
        options["mask"] = source.laid_out(rng.random(last) < source.choice([0.5, 0.02, 0.98, 0, 1]))
    if source.boolean():
        last = source.choice([(batch, heads, queries, keys), (queries, keys), (keys,), (batch, heads, queries, 1)])
        bias = rng.standard_normal(last).astype(source.choice([dtype, np.float64, np.float16]))
        bias[rng.random(last) < source.choice([0, 0.3, 1])] = -np.inf
        options["bias"] = source.laid_out(bias)
    if source.boolean():
        options["softcap"] = source.choice([5.0, 0.5, 50.0])
    if source.boolean():
        options["sinks"] = rng.standard_normal(heads)
    if source.boolean():
        options["scale"] = source.choice([1.0, 0.0, -0.3])
    if source.boolean():
        options["segments"] = tuple(
            source.choice([np.sort, np.asarray])(rng.integers(0, 4, (batch, n))) for n in (queries, keys)
        )
    if causal is not False:
        if source.boolean():
            options["window"] = source.choice([(0, 0), (7, 0), (40, 3), (None, 2), (33, None), (2**62, 0)])
        if source.boolean():
            options["prefix_lengths"] = rng.integers(0, keys + 1, batch)
        if source.boolean():
            options["alibi_slopes"] = rng.random(heads)
    return options


def result_of(q: Any, k: Any, v: Any, options: dict[str, Any], **more: Any) -> Any:
    return attention(q, k, v, **options, **more)


def check_bits(q: Any, k: Any, v: Any, options: dict[str, Any], want: Any, source: Source) -> None:
    """The same on other threads, instruction sets, for one row alone, and with poison where nothing is seen."""
    np.testing.assert_array_equal(result_of(q, k, v, options, num_threads=source.integer(1, 9)), want)
    here = backend.active
    if here is not None and here.get_isa() in FMA_ISAS:
        for isa in FMA_ISAS:
            if here.isas().get(isa):
                with use_backend("compiled", isa):
                    np.testing.assert_array_equal(result_of(q, k, v, options, num_threads=1), want)
        if options.keys() <= {"causal", "scale", "softcap", "sinks", "key_lengths"} and options["causal"] is False:
            row = source.integer(0, q.shape[2] - 1)
            alone = result_of(q[:, :, row : row + 1], k, v, options)
            np.testing.assert_array_equal(alone, want[:, :, row : row + 1])


def check_poison(q: Any, k: Any, v: Any, allowed: Any, options: dict[str, Any], want: Any) -> None:
    seen = allowed.reshape(len(allowed), k.shape[1], -1, *allowed.shape[2:]).any(axis=(2, 3))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[~seen], bad_v[~seen] = np.nan, np.inf
    np.testing.assert_array_equal(result_of(q, bad_k, bad_v, options), want)


def valid_call(source: Source) -> None:
    dtype = source.choice([np.float32, np.float64])
    batch, heads, group = source.integer(1, 3), source.integer(1, 3), source.integer(1, 4)
    keys = source.size(600)
    queries = source.size(max(1, min(130, SCORES // (batch * heads * group * keys))))
    width, value_width = source.size(70), source.size(70)
    q = source.normal((batch, heads * group, queries, width), dtype)
    k, v = source.normal((batch, heads, keys, width), dtype), source.normal((batch, heads, keys, value_width), dtype)
    options = drawn_options(source, (*q.shape[:3], keys), dtype)
    allowed, distance = allowed_keys((*q.shape[:3], keys), options)
    out = source.laid_out(np.empty((*q.shape[:3], value_width), dtype)) if source.boolean() else None
    if out is not None and (not out.flags.writeable or out.dtype != dtype):
        out = None
    weights = source.boolean()
    found = result_of(
        q, k, v, options, return_lse=True, return_weights=weights, num_threads=source.integer(1, 4), out=out
    )
    native = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    want, lse, bound = expected(*native, allowed, distance, options)
    largest = float(np.abs(native[2]).max(initial=1))
    np.testing.assert_allclose(found.out, want, rtol=0, atol=bound * largest)
    np.testing.assert_allclose(found.lse, lse, rtol=float(np.finfo(dtype).eps) * 8, atol=bound)
    assert out is None or found.out is out
    if weights:
        assert (found.weights[~allowed] == 0).all()
        if "sinks" not in options:
            np.testing.assert_allclose(found.weights.sum(-1), allowed.any(-1), rtol=0, atol=bound)
    check_bits(q, k, v, options, found.out, source)
    check_poison(*native, allowed, options, found.out)


JUNK = (
    None, 0, 1, -1, 2**63, -(2**70), 1.5, float("nan"), "x", b"", (), (1,), (1, 2), [], [[]], {}, True, object(), 1j,
    np.float32(2), np.zeros(0), np.zeros((2, 2), bool), np.zeros((1, 2, 3)), np.array(3), np.zeros((2, 3), np.int8),
    np.zeros(2, "M8[s]"), np.zeros((2, 3), np.complex64), np.array(["a", "b"]), np.array([None, 1]),
    np.zeros((2, 3), np.longdouble),
)  # fmt: skip
NAMES = (
    "mask", "bias", "causal", "q_start", "window", "key_lengths", "prefix_lengths", "segments", "scale", "softcap",
    "sinks", "alibi_slopes", "num_threads", "out",
)  # fmt: skip


def any_call(source: Source) -> None:
    """Whatever comes in: a result, or TypeError or ValueError with the function's name, and nothing else."""
    arrays = []
    for _ in range(3):
        shape = tuple(source.integer(0, 3) for _ in range(source.integer(0, 5)))
        arrays.append(source.choice(JUNK) if source.byte() % 8 == 7 else source.normal(shape, source.choice("fdef?bQ")))
    options = {source.choice(NAMES): source.choice(JUNK) for _ in range(source.integer(0, 3))}
    try:
        attention(*arrays, **options)
    except (TypeError, ValueError) as error:
        expect_text(error, "attention: ")


def run(data: bytes) -> None:
    source = Source(data)
    (valid_call if source.byte() % 4 else any_call)(source)
