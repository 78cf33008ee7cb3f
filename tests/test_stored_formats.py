"""Arrays read as they are stored, float16, bfloat16 and mixtures: the bits of the widened call, rounded once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import dtype_of, most_allocated, normal, same_bits

from attentile import attention, attention_partial, attention_stats, explain
from attentile.runtime import backend

BATCH, GROUP, KEY_HEADS = 2, 3, 2
STORED = ["float16", "bfloat16", "float32", "float64"]
# Few rows and many, a chunk and more, widths of whole vectors of every instruction set and of none, of keys and values.
SHAPES = [(1, 700, 64, 64), (5, 300, 80, 40), (70, 515, 33, 17), (2, 40, 7, 128), (100, 100, 96, 32)]


def qkv(shape: tuple[int, ...], dtypes: tuple[str, ...], seed: int = 0) -> list[Any]:
    rows, keys, width, value_width = shape
    sizes = ((KEY_HEADS * GROUP, rows, width), (KEY_HEADS, keys, width), (KEY_HEADS, keys, value_width))
    return [
        normal(BATCH, *size, dtype=dtype_of(name), seed=seed + i)
        for i, (size, name) in enumerate(zip(sizes, dtypes, strict=True))
    ]


def widened(arrays: Any) -> list[Any]:
    """In the dtype of the arithmetic."""
    wide = np.float64 if any(array.dtype == np.float64 for array in arrays) else np.float32
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return [array.astype(wide) for array in arrays]


def options_of(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    rows, keys = shape[:2]
    mask = np.random.default_rng(1).random((rows, keys)) > 0.3
    return [
        {},
        {"causal": True, "q_start": keys - rows, "window": (keys // 2, None), "softcap": 3.0},
        {"key_lengths": [keys, keys // 3], "return_lse": True},
        {"mask": mask, "return_weights": True},
        {"segments": (np.arange(rows)[None] // 3, np.arange(keys)[None] // 9)},  # intervals, made in Python
    ]


def outputs_of(found: Any) -> tuple[Any, ...]:
    return tuple(x for x in found if x is not None) if isinstance(found, tuple) else (found,)


MIXTURES = [m for m in itertools.product(STORED, repeat=3) if len(set(m)) > 1 and not {"float16", "bfloat16"} <= set(m)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_bits_are_those_of_the_widened_arrays_rounded_once(impl, shape, dtype):
    arrays = qkv(shape, (dtype,) * 3)
    wide = widened(arrays)
    for options in options_of(shape):
        found, wanted = (outputs_of(attention(*given, **options)) for given in (arrays, wide))
        for name, one, other in zip(("out", "second"), found, wanted, strict=False):
            rounded = other if name == "second" and "return_lse" in options else other.astype(dtype_of(dtype))
            same_bits(one, rounded)


@pytest.mark.parametrize("dtypes", MIXTURES, ids=" ".join)
def test_each_array_has_a_dtype_of_its_own(impl, dtypes):
    for shape in SHAPES[:3]:
        arrays = qkv(shape, dtypes)
        wide = widened(arrays)
        for options in options_of(shape)[1:3]:
            for one, other in zip(*(outputs_of(attention(*a, **options)) for a in (arrays, wide)), strict=True):
                same_bits(one, other)


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("third", ["float16", "float32", "float64"])
def test_float16_and_bfloat16_have_no_common_dtype(either, third, found, monkeypatch):
    """Beside others too, and in a process where NumPy has come to find one."""
    if found:
        monkeypatch.setattr(np, "result_type", lambda *_: np.dtype(np.float32))
    q, k, v = qkv(SHAPES[0], ("float16", "bfloat16", third))
    for arrays in (q, k, v), (v, k, q):
        with pytest.raises(TypeError, match=r"^attention: NumPy has no common dtype of bfloat16, float16"):
            attention(*arrays)
    monkeypatch.undo()
    bits = attention(q, k.view(np.uint16), v, dtype="bfloat16")  # of which NumPy knows nothing
    same_bits(bits, attention(*widened((q, k, v))))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_16_bits(isa, dtype):
    """As a value that has all the weight, it comes back; as a query or a key it is what float32 makes of it."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype)).reshape(-1, 1, 16)
    one = np.zeros((len(numbers), 1, 1), numbers.dtype)
    found = attention(one, one, numbers)
    with np.errstate(invalid="ignore"):
        same_bits(found, np.where(numbers == 0, 0, numbers))  # -0.0 becomes 0.0
    rows = numbers.reshape(-1, 64, 16)
    for arrays in ((rows, rows[::-1], rows), (rows, rows[::-1], np.nan_to_num(rows.astype(np.float32)))):
        some = [array[:40] for array in arrays]
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = attention(*widened(some)).astype(np.result_type(*some))
        same_bits(attention(*some), wanted)


@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_a_row_may_not_see_is_not_used(isa, dtype, rows):
    """Whatever lies in keys and values that are excluded, in both ways over the values."""
    q, k, v = qkv((rows, 600, 24, 24), (dtype,) * 3)
    mask = np.random.default_rng(2).random((BATCH, 1, 1, 600)) > 0.5
    wanted = attention(q, k, v, mask=mask, key_lengths=500)
    hidden = ~mask[:, 0, 0]
    hidden[:, 500:] = True
    for poison in (np.nan, np.inf, -np.inf):
        bad_k, bad_v = k.copy(), v.copy()
        for array in (bad_k, bad_v):
            array.swapaxes(1, 2)[hidden] = poison
        same_bits(attention(q, bad_k, bad_v, mask=mask, key_lengths=500), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layouts(isa, dtype):
    """Rows apart, heads inside, read backwards, repeated, at odd addresses, with swapped bytes."""
    for shape in SHAPES:
        q, k, v = qkv(shape, (dtype,) * 3)
        wanted = attention(q, k, v, causal="lower_right")
        inside = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v)]
        apart = [np.pad(x, [(0, 0)] * 3 + [(0, 3)])[..., : x.shape[-1]] for x in (q, k, v)]
        backwards = [x[:, :, ::-1].copy()[:, :, ::-1] for x in (q, k, v)]
        layouts = [inside, apart, backwards]
        if dtype == "float16":
            layouts.append([x.astype(x.dtype.newbyteorder()) for x in (q, k, v)])
            odd = [np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape) for x in (q, k, v)]
            assert not odd[0].flags.aligned
            layouts.append(odd)
        for arrays in layouts:
            same_bits(attention(*arrays, causal="lower_right"), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out(either, dtype):
    for shape in SHAPES:
        q, k, v = qkv(shape, (dtype,) * 3)
        wanted = attention(q, k, v)
        for segments in (None, (np.zeros((1, shape[0]), int), np.zeros((1, shape[1]), int))):
            out = np.zeros((BATCH, shape[0], KEY_HEADS * GROUP, shape[3]), q.dtype).swapaxes(1, 2)
            assert attention(q, k, v, out=out, segments=segments) is out
            same_bits(out, wanted)
        if shape[2] == shape[3]:
            own = q.copy()
            attention(own, k, v, out=own)
            same_bits(own, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_and_unfinished_rows(either, dtype):
    arrays = qkv((50, 300, 24, 8), (dtype,) * 3)
    wide = widened(arrays)
    for found, wanted in zip(attention_stats(*arrays)[1:], attention_stats(*wide)[1:], strict=True):
        if wanted is not None:
            same_bits(found, wanted)
    for found, wanted in zip(attention_partial(*arrays), attention_partial(*wide), strict=True):
        same_bits(found, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_go_on(isa, dtype):
    arrays = q, k, v = qkv((50, 300, 24, 8), (dtype,) * 3)
    start = attention_partial(q, k[..., :256, :], v[..., :256, :])
    same_bits(attention(q, k[..., 256:, :], v[..., 256:, :], before=start), attention(*arrays))


# ---- bfloat16 without a dtype ----


def bits(array: Any) -> Any:
    return array.view(np.uint16)


def test_bits_of_bfloat16(impl):
    for shape in SHAPES:
        arrays = qkv(shape, ("bfloat16",) * 3)
        bias = normal(shape[0], shape[1], dtype=arrays[0].dtype, seed=5)
        for options in ({}, *options_of(shape)):
            wanted = outputs_of(attention(*arrays, **options, bias=bias))
            found = outputs_of(attention(*map(bits, arrays), **options, bias=bits(bias), dtype="bfloat16"))
            for one, other in zip(found, wanted, strict=True):
                same_bits(one, bits(other) if other.dtype == bias.dtype else other)
        out = np.zeros((BATCH, KEY_HEADS * GROUP, shape[0], shape[3]), np.uint16)
        assert attention(*map(bits, arrays), out=out, dtype="bfloat16") is out
        same_bits(out, bits(attention(*arrays)))


def test_bits_beside_other_dtypes(either):
    q, k, v = qkv(SHAPES[1], ("float32", "bfloat16", "bfloat16"))
    same_bits(attention(q, bits(k), bits(v), dtype="bfloat16"), attention(q, k, v))
    wide = q.astype(np.float64)
    same_bits(attention(wide, bits(k), bits(v), dtype=dtype_of("bfloat16")), attention(wide, k, v))
    same_bits(attention(q, q, q, dtype="bfloat16"), attention(q, q, q))  # without effect


def test_uint16_is_an_integer_unless_told(either):
    x = np.arange(24, dtype=np.uint16).reshape(4, 6)
    same_bits(attention(x, x, x), attention(*[x.astype(np.float64)] * 3))


@pytest.mark.parametrize("dtype", ["float16", "int8", np.float32, 2])
def test_other_dtypes_of_bits_are_refused(either, dtype):
    x = normal(4, 6)
    with pytest.raises(ValueError, match=r"attention: dtype is .*; it says what arrays of uint16 hold"):
        attention(x, x, x, dtype=dtype)


# ---- memory ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"segments": np.repeat([0, 1], 2000)}], ids=["plain", "segments"])
def test_no_array_is_converted_as_a_whole(compiled, dtype, options):
    q, k, v = (normal(4, 4000, 64, dtype=dtype_of(dtype), seed=s) for s in range(3))
    assert most_allocated(lambda: attention(q, k, v, **options)) < 1.3 * q.nbytes  # the output, and no more
    assert explain(q, k, v, **options).copies == {}
    assert backend.active.takes(q, k, v, {})
