"""Reports about sizes: remainders of tiles, empty axes, head counts, widths, ranks, offsets beyond 32 bits."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_allclose, assert_array_equal
from oracle import Expected, oracle, tolerance
from report_helpers import Array, assert_same_row, check, output_of, qkv

from attentile import MultiHeadAttention, attention, multi_head_attention

# ---- B16: nothing beyond the last key is read ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_b16_one_query_at_every_number_of_keys(impl, dtype):
    """The keys end inside a larger array, and NaN follows them."""
    q, k, v = qkv((1, 1, 1, 64), keys=131, dtype=dtype)
    for keys in range(1, 131):
        poisoned_k, poisoned_v = k.copy(), v.copy()
        poisoned_k[..., keys:, :] = poisoned_v[..., keys:, :] = np.nan
        check(q, poisoned_k[..., :keys, :], poisoned_v[..., :keys, :])


# Every array ends with the last byte before a page that may not be touched; a stray read ends the process.
GUARDED_CALLS = """
import ctypes, mmap
import numpy as np
import attentile

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE

def guarded(array):
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(page), 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy

rng = np.random.default_rng(16)
for isa in attentile.show_config(as_dict=True)["isas_here"]:
    for dtype, rows, keys in [(d, n, s) for d in (np.float32, np.float64) for n in (1, 3) for s in range(1, 131)]:
        with attentile.use_backend("compiled", isa):
            q, k, v = (guarded(rng.standard_normal((1, 1, n, 7)).astype(dtype)) for n in (rows, keys, keys))
            mask, bias = guarded(np.ones((rows, keys), bool)), guarded(np.zeros((rows, keys), dtype))
            out = guarded(np.zeros_like(q))
            attentile.attention(q, k, v, out=out)
            assert np.array_equal(attentile.attention(q, k, v, mask=mask), out)
            attentile.attention(q, k, v, bias=bias, key_lengths=keys, return_weights=True)
print("done")
"""


def test_b16_nothing_behind_an_array_is_touched(compiled):
    if os.name != "posix":
        pytest.skip("guard pages are made with mprotect")
    assert output_of(GUARDED_CALLS) == "done"


# ---- B32: more queries than keys, causal ----


def test_b32_causal_with_more_queries_than_keys(impl):
    q, k, v = qkv((1, 1, 4, 4), keys=2)
    v = abs(v)
    out = check(q, k, v, causal="lower_right").out[0, 0]
    assert_array_equal(out[:2], 0)
    assert_array_equal(out[2], v[0, 0, 0])


def test_b32_causal_with_many_more_queries_than_keys(impl):
    q, k, v = qkv((1, 1, 2048, 4), keys=1024)
    allowed = np.tri(2048, 1024, -1024, dtype=bool)[None, None]
    out = check(q, k, abs(v), allowed=allowed, causal="lower_right").out[0, 0]
    assert_array_equal(out[:1024], 0)


# ---- B39: empty axes ----

EMPTY = {
    "no rows at all": ((7, 9, 0, 7), (7, 9, 0, 7), 7),
    "no batch": ((0, 2, 5, 4), (0, 2, 5, 4), 4),
    "no heads": ((2, 0, 5, 4), (2, 0, 5, 4), 4),
    "no queries": ((2, 2, 0, 4), (2, 2, 5, 4), 4),
    "no keys": ((2, 2, 5, 4), (2, 2, 0, 4), 4),
    "no values": ((2, 2, 5, 4), (2, 2, 5, 4), 0),
}


@pytest.mark.parametrize("causal", [False, "upper_left", "lower_right"])
@pytest.mark.parametrize("kind", EMPTY)
def test_b39_empty_axes(impl, kind, causal):
    q_shape, k_shape, value_width = EMPTY[kind]
    q, k, v = (np.ones(shape, np.float32) for shape in (q_shape, k_shape, (*k_shape[:-1], value_width)))
    result = attention(q, k, v, causal=causal, return_lse=True, return_weights=True)
    assert_array_equal(result.out, np.zeros((*q_shape[:-1], value_width), np.float32))
    assert result.weights.shape == (*q_shape[:-1], k_shape[-2])
    assert result.lse.shape == q_shape[:-1]
    if kind == "no keys":
        assert_array_equal(result.lse, -np.inf)
    assert_array_equal(attention(q, k, v, causal=causal), result.out)


def test_b39_width_zero_is_refused(either):
    empty = np.ones((2, 2, 5, 0), np.float32)
    with pytest.raises(ValueError, match="width 0; it must be at least 1"):
        attention(empty, empty, np.ones((2, 2, 5, 4), np.float32))


@pytest.mark.parametrize("causal", [False, "lower_right"])
@pytest.mark.parametrize(("queries", "keys", "lengths"), [(0, 5, None), (5, 0, None), (5, 5, [5, 0, 3]), (5, 5, 0)])
def test_b101_nothing_is_left_unwritten(impl, queries, keys, lengths, causal):
    """Of the forward pass: memory that holds NaN is written where there is no key, too."""
    q, k, v = qkv((3, 2, queries, 4), keys=keys)
    out = np.full((3, 2, queries, 4), np.nan, np.float32)
    attention(q, k, v, key_lengths=lengths, causal=causal, out=out)
    empty = keys == 0 or lengths == 0
    assert_array_equal(out, 0 * out if empty else check(q, k, v, key_lengths=lengths, causal=causal).out)
    assert np.isfinite(out).all()


# ---- B40, B44: widths ----

WIDTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 80, 96, 127, 129, 256, 320)


@functools.cache
def widest(length: int, width: int) -> tuple[Array, Array, Array, Expected, float]:
    """Inputs with the largest value width, what is right, and its tolerance: fewer value columns only drop columns."""
    q, k, v = qkv((1, 1, length, width), value_width=max(WIDTHS), seed=width)
    allowed = np.ones((1, 1, length, length), bool)
    expected = oracle(q, k, v, allowed)
    return q, k, v, expected, tolerance(q, k, v, allowed, expected)


@pytest.mark.parametrize("length", [1, 7, 64, 65, 100])
def test_b40_every_width_with_every_value_width(impl, length):
    for width, value_width in itertools.product(WIDTHS, WIDTHS):
        q, k, v, expected, bound = widest(length, width)
        out = attention(q, k, v[..., :value_width].copy())
        assert out.shape == (1, 1, length, value_width)
        np.testing.assert_allclose(
            out, expected.out[..., :value_width], rtol=0, atol=bound, err_msg=f"D={width}, Dv={value_width}"
        )


@pytest.mark.parametrize(("width", "value_width"), [(128, 64), (8, 33), (64, 1)])
@pytest.mark.parametrize(
    "options", [{}, {"mask": normal(9, 17) > 0}, {"causal": "lower_right"}, {"key_lengths": [17, 3]}], ids=str
)
def test_b44_value_width_differs_from_key_width(impl, width, value_width, options):
    q, k, v = qkv((2, 4, 9, width), kv_heads=2, keys=17, value_width=value_width)
    assert check(q, k, v, **options).out.shape == (2, 4, 9, value_width)
    if "mask" not in options:  # a decode step
        check(q[..., -1:, :], k, v, **options)


# ---- B41, B42: heads ----


@pytest.mark.parametrize(("q_heads", "heads"), [(4, 2), (6, 3), (4, 1), (6, 1)])
def test_b41_query_head_uses_the_head_of_its_group(impl, q_heads, heads):
    q, k, _ = qkv((2, q_heads, 5, 8), kv_heads=heads)
    v = np.broadcast_to(10 * np.arange(heads, dtype=np.float32)[:, None, None], (2, heads, 5, 8))
    expected = 10 * (np.arange(q_heads) // (q_heads // heads))
    out = attention(q, k, v)
    assert_allclose(out, np.broadcast_to(expected[:, None, None], out.shape), rtol=1e-6)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape", "message"),
    [
        ((1, 6, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8), "q has 6 heads and k has 4"),
        ((1, 2, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8), "q has 2 heads and k has 4"),
        ((1, 4, 5, 8), (1, 4, 5, 8), (1, 2, 5, 8), "k has 4 heads and v has 2"),
        ((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 7, 8), "k has 6 keys and v has 7"),
        ((1, 2, 5, 8), (1, 2, 5, 9), (1, 2, 5, 9), "q has width 8 and k has 9"),
        ((2, 2, 5, 8), (3, 2, 5, 8), (3, 2, 5, 8), "batch axes .* do not broadcast"),
    ],
)
def test_b42_shapes_that_do_not_fit(either, q_shape, k_shape, v_shape, message):
    """Refused before any work: `out` still holds what it held."""
    out = np.full(q_shape, 7, np.float32)
    with pytest.raises(ValueError, match=f"^attention: .*{message}"):
        attention(*(np.ones(shape, np.float32) for shape in (q_shape, k_shape, v_shape)), out=out)
    assert_array_equal(out, 7)


# ---- B47: offsets beyond 32 bits ----


@pytest.mark.skipif(
    os.environ.get("ATTENTILE_TEST_LARGE") != "1", reason="takes 9 GB of addresses: ATTENTILE_TEST_LARGE=1"
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "out"])
def test_b47_rows_more_than_2_to_31_elements_apart(impl, name, dtype):
    """One array at a time lies scattered over addresses of which only its few pages are ever backed by memory."""
    arrays: dict[str, Any] = dict(zip("qkv", qkv((1, 1, 9, 8), dtype=dtype), strict=True))
    arrays |= {"bias": normal(1, 1, 9, 9).astype(dtype), "out": np.zeros((1, 1, 9, 8), dtype)}
    compact = attention(**arrays).copy()
    rows = arrays[name]
    step = 2**28 + 32  # elements: eight steps are more than 2**31
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    buffer = np.frombuffer(mmap.mmap(-1, (8 * step + rows.shape[-1]) * rows.itemsize, flags=flags), dtype)
    scattered = np.lib.stride_tricks.as_strided(
        buffer, rows.shape, (rows.itemsize, rows.itemsize, step * rows.itemsize, rows.itemsize)
    )
    scattered[...] = rows
    assert 8 * scattered.strides[2] > 2**31 * rows.itemsize
    arrays[name] = scattered
    assert_same_row(impl, attention(**arrays).copy(), compact)


SOURCES = Path(__file__).parents[2] / "src" / "attentile" / "core"
# Sizes and offsets that the caller's arrays decide; what a tile bounds (vectors, lanes, its columns) may be int.
UNBOUNDED = (
    r"(batch|heads?|queries|keys|width|value_width|rows?|n_rows|pitch|group|chunks?|blocks?|tasks|tasks_per_head|"
    r"parts?|start|stop|offset|bytes|n?bytes|\w*_bytes|strides?|\w*_stride|size|length)"
)
# `const int` marks the compile-time size of a tile.
NARROW_SIZE = re.compile(
    rf"(?<!const )\b(?:unsigned|int|short|u?int32_t) (?:\*?\w+(?: = [^,;\n]+)?, )*{UNBOUNDED}\b(?!\()"
)
INT_LOOP = re.compile(r"for \(int \w+ = [^;]+; \w+ < (?P<bound>[\w.>-]+);")


def narrow_products(source: str) -> list[str]:
    """What in this C or Cython text could make an index product of 32 bits: sizes and loops that are int."""
    found = [match.group() for match in NARROW_SIZE.finditer(source)]
    for function in re.split(r"^\}", source, flags=re.MULTILINE):
        for loop in INT_LOOP.finditer(function):
            bound = loop["bound"]
            tile_sized = bound.isdigit() or bound.isupper() or re.search(rf"\bint {bound}\b", function)
            if not tile_sized:
                found.append(loop.group())
    return found


def test_b47_no_size_or_index_is_narrow():
    files = [
        path
        for ending in ("*.pyx", "*.pxi", "*.pxd", "kernels/*.[ch]", "kernels/*.inc")
        for path in SOURCES.glob(ending)
    ]
    files = [path for path in files if path.name != "_core.c"]
    if not files:
        pytest.skip("the sources are not beside the tests")
    assert {"tiles.inc", "kernels.h", "_core.pyx"} <= {path.name for path in files}
    narrow = {path.name: narrow_products(path.read_text(encoding="utf-8")) for path in files}
    assert not {name: found for name, found in narrow.items() if found}


@pytest.mark.parametrize(
    "source",
    [
        "static void f(const char *k, int keys, ptrdiff_t width) {",
        "    cdef int pitch = 3",
        "    cdef int r, row",
        "    const char *p; int32_t k_stride = 4;",
        "void f(ptrdiff_t keys) {\n    for (int j = 0; j < keys; j++) k[j * stride] = 0;\n}",
        "void f(job *job) {\n    for (int i = 0; i < job->n; i++) g(i * 8);\n}",
    ],
)
def test_b47_the_check_finds_a_narrow_index(source):
    assert narrow_products(source)


# ---- B48: ranks ----


def test_b48_more_batch_axes(impl):
    q, k, v = qkv((2, 3, 4, 196, 32))
    flat = attention(*(x.reshape(6, 4, 196, 32) for x in (q, k, v)))
    assert_same_row(impl, attention(q, k, v), flat.reshape(q.shape), atol=1e-6)
    # Batch axes whose strides do not fold into one.
    swapped = attention(*(x.swapaxes(0, 1) for x in (q, k, v)))
    assert_same_row(impl, swapped, flat.reshape(q.shape).swapaxes(0, 1), atol=1e-6)


@pytest.mark.parametrize("shape", [(196, 32), (4, 196, 32)], ids=str)
def test_b48_fewer_axes(impl, shape):
    q, k, v = qkv((1,) * (4 - len(shape)) + shape)
    expected = check(q, k, v).out
    out = attention(*(x.reshape(shape) for x in (q, k, v)))
    assert out.shape == shape
    assert_same_row(impl, out, expected.reshape(shape), atol=1e-6)


@pytest.mark.parametrize("shape", [(), (32,)], ids=str)
def test_b48_rank_without_rows_is_refused(either, shape):
    with pytest.raises(ValueError, match=r"q has shape .*at least two axes"):
        attention(*(np.ones(shape, np.float32) for _ in range(3)))


# ---- B50: a whole layer, with an odd number of heads ----


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_b50_layer_with_three_heads(impl, biases, padding):
    batch, length, width, heads = 4, 10, 15, 3
    x, weights = normal(batch, length, width, dtype=np.float64), 0.3 * normal(4, width, width, dtype=np.float64, seed=1)
    b_q, b_k, b_v, b_o = normal(4, width, dtype=np.float64, seed=2) * biases
    valid = np.arange(length) < (np.array([10, 7, 1, 4]) if padding else np.full(4, 10))[:, None, None]

    def projected(weight: Array, bias: Array) -> Array:
        return (x @ weight + bias).reshape(batch, length, heads, width // heads).swapaxes(1, 2)

    q, k, v = (projected(w, b) for w, b in zip(weights[:3], (b_q, b_k, b_v), strict=True))
    allowed = np.broadcast_to(valid[:, None], (batch, heads, length, length))
    attended = oracle(q, k, v, allowed).out.swapaxes(1, 2).reshape(x.shape)
    given = {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o} if biases else {}
    expected = attended @ weights[3] + b_o
    out = multi_head_attention(x, width, heads, *weights, mask=valid if padding else None, **given)
    assert_allclose(out, expected, rtol=0, atol=1e-12)
    layer = MultiHeadAttention(*weights, num_heads=heads, **given)
    mask = np.broadcast_to(valid[:, None], (batch, 1, 1, length)) if padding else None
    assert_allclose(layer(x, mask=mask), expected, rtol=0, atol=1e-12)
    with_weights = layer(x, mask=mask, return_weights=True)
    assert_array_equal(with_weights.out, layer(x, mask=mask))
    assert_array_equal(with_weights.weights[~allowed], 0)
    assert_allclose(with_weights.weights.sum(axis=-1), 1, rtol=0, atol=1e-12)
