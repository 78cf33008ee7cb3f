"""Fuzz target: rotary_embedding() against complex numbers, and positional_encoding() against sines and cosines."""

from __future__ import annotations

from typing import Any

import numpy as np
from rotary_oracle import multiplied
from source import Source, expect_text

from attentile import positional_encoding, rotary_embedding, use_backend
from attentile.runtime import backend

try:
    import ml_dtypes
except ImportError:
    HALVES: tuple[Any, ...] = (np.float16,)
else:
    HALVES = (np.float16, ml_dtypes.bfloat16)

FMA_ISAS = ("avx512", "avx2", "neon")


def drawn_positions(source: Source, lead: tuple[int, ...], rows: int, lowest: int) -> tuple[Any, Any]:
    """(argument, positions (..., L)); some beyond what float32 could count."""
    kind = source.choice(["none", "int", "rows", "items"])
    if kind == "none":
        return None, np.arange(rows)
    far = source.choice([70, 4000, 2**20])
    if kind == "int":
        first = source.integer(max(lowest, -far), far)
        return source.choice([int, np.int64, np.int32])(first), first + np.arange(rows)
    shape = (rows,) if kind == "rows" else (*lead, rows)
    positions = source.rng().integers(max(lowest, -far), far, shape)
    return source.laid_out(positions.astype(source.choice([np.int64, np.int32]))), positions


def drawn_out(source: Source, x: Any, dtype: Any) -> Any:
    """None, an array in some layout, x itself, or one that overlaps x."""
    kind = source.choice(["none", "new", "same"])
    if kind == "new":
        out = source.laid_out(np.empty(x.shape, dtype))
        return out if out.flags.writeable and out.dtype == dtype else None
    return x if kind == "same" and x.flags.writeable and x.dtype == dtype else None


def rotary_call(source: Source) -> None:
    dtype = source.choice([np.float32, np.float64, *HALVES])
    lead = tuple(source.integer(1, 3) for _ in range(source.integer(0, 2)))
    heads, rows, width = source.integer(1, 4), source.size(140), source.size(600, 2)
    shape = (*lead, heads, rows, width) if lead or source.boolean() else (rows, width)
    lead = shape[:-3]
    x = source.normal(shape, dtype)
    dim = 2 * source.integer(1, width // 2)
    options: dict[str, Any] = {"interleaved": source.boolean(), "rotary_dim": dim}
    tables = source.boolean()
    argument, positions = drawn_positions(source, lead, rows, 0 if tables else -(2**40))
    if tables:
        n = int(positions.max()) + 1
        if n > 5000:
            return
        kind = source.choice([np.float32, np.float64, np.float16])
        cos, sin = source.normal((n, dim // 2), kind), source.normal((n, dim // 2), kind)
        options |= {"cos": cos, "sin": sin}
        factors = (cos.astype(np.float64) + 1j * sin.astype(np.float64))[positions]
    else:
        base = options["base"] = source.choice([10000.0, 500000.0, 2.0])
        factors = np.exp(1j * positions[..., None] * base ** (-2 * np.arange(dim // 2) / dim))
    native = np.array(x, dtype)
    want = multiplied(native, factors, options["interleaved"])
    out = drawn_out(source, x, dtype)
    found = rotary_embedding(x, argument, **options, out=out)
    assert out is None or found is out
    assert found.dtype == dtype
    eps = float(np.finfo(np.float32 if dtype in HALVES else dtype).eps) if dtype not in HALVES else 2.0**-8
    bound = 4 * eps + 1e-15 * float(np.abs(positions).max()) * (not tables)
    size = np.abs(want).max(initial=1) + np.abs(native.astype(np.float64)).max(initial=1)
    np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=0, atol=bound * size)
    check_bits(source, native, argument, positions, options, np.array(found))


def check_bits(source: Source, x: Any, argument: Any, positions: Any, options: dict[str, Any], want: Any) -> None:
    """The same on other instruction sets, and for one row alone."""
    here = backend.active
    if here is None or here.get_isa() not in FMA_ISAS:
        return
    for isa in FMA_ISAS:
        if here.isas().get(isa):
            with use_backend("compiled", isa):
                np.testing.assert_array_equal(rotary_embedding(x, argument, **options), want)
    row = source.integer(0, x.shape[-2] - 1)
    alone = rotary_embedding(x[..., row : row + 1, :], positions[..., row : row + 1], **options)
    np.testing.assert_array_equal(alone, want[..., row : row + 1, :])


def encoding_call(source: Source) -> None:
    rows, width = source.size(140, 0), source.size(1100)
    first, dtype = source.integer(-1000, 10**6), source.choice([np.float64, np.float32])
    found = positional_encoding(rows, width, offset=first, dtype=dtype)
    pairs = np.arange(width) // 2
    angles = (first + np.arange(rows))[:, None] * 10000.0 ** (-2 * pairs / width)
    want = np.where(np.arange(width) % 2 == 0, np.sin(angles), np.cos(angles))
    np.testing.assert_allclose(found, want, rtol=0, atol=float(np.finfo(dtype).eps) + 4e-16 * (abs(first) + rows))


JUNK = (
    None, 0, 1, -1, 2**63, -(2**70), 2**50, 1.5, float("nan"), float("inf"), "x", (), (1,), [], [[]], {},
    {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 1e300}, True, object(),
    1j, np.zeros(0), np.zeros((2, 2), bool), np.zeros((3, 1)), np.ones((2, 1)), np.array(3), np.zeros((2, 3), np.int8),
    np.full(3, 2**62),
)  # fmt: skip
NAMES = ("positions", "base", "rotary_dim", "interleaved", "scaling", "cos", "sin", "inverse", "out")


def any_call(source: Source) -> None:
    """Whatever comes in: a result, or one of the documented errors with the function's name, and nothing else."""
    shape = tuple(source.integer(0, 4) for _ in range(source.integer(0, 5)))
    x = source.choice(JUNK) if source.byte() % 8 == 7 else source.normal(shape, source.choice("fdef?bQ"))
    options = {source.choice(NAMES): source.choice(JUNK) for _ in range(source.integer(0, 3))}
    try:
        rotary_embedding(x, **options)
    except (TypeError, ValueError, IndexError) as error:
        expect_text(error, "rotary_embedding: ")


def run(data: bytes) -> None:
    source = Source(data)
    (rotary_call, rotary_call, any_call, encoding_call)[source.byte() % 4](source)
