"""Reports about layouts: strides of every kind, alignment, byte order, read-only and mapped memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_array_equal
from report_helpers import Array, assert_same_row, check, qkv

from attentile import attention, rotary_embedding

NAMES = ("q", "k", "v", "mask", "bias")


def arrays(length: int = 20, width: int = 20) -> dict[str, Array]:
    """One call's arguments; with the same length and width every axis pair can be swapped."""
    q, k, v = qkv((2, 3, length, width))
    mask = np.random.default_rng(51).random((2, 3, length, length)) < 0.8
    return {"q": q, "k": k, "v": v, "mask": mask, "bias": normal(2, 3, length, length, seed=52)}


def assert_layout_is_irrelevant(impl: str, given: dict[str, Array]) -> None:
    """The same bits (or numbers) as from contiguous copies, and no input is written to."""
    copies = {name: np.array(x, dtype=x.dtype.newbyteorder("="), order="C") for name, x in given.items()}
    assert_same_row(impl, attention(**given), attention(**copies), atol=1e-6)
    for name, x in given.items():
        assert_array_equal(x, copies[name])


# ---- B51, B56: strides ----


def stored_transposed(x: Array) -> Array:
    """Equal to x, as a swapaxes view of an array stored (B, H, D, L)."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def every_second(x: Array) -> Array:
    """Equal to x, with another number between neighbours of the last axis."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), 99, x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def stored_backwards(x: Array, axis: int) -> Array:
    return np.flip(np.flip(x, axis).copy(), axis)


@pytest.mark.parametrize("relaid", [stored_transposed, every_second])
def test_b51_last_axis_not_contiguous(impl, relaid):
    check(**arrays())
    for some in itertools.product((False, True), repeat=4):
        given = arrays()
        for name, chosen in zip(("q", "k", "v", "mask"), some, strict=True):
            if chosen:
                given[name] = relaid(given[name])
                assert given[name].strides[-1] != given[name].itemsize
        assert_layout_is_irrelevant(impl, given)
    assert_layout_is_irrelevant(impl, {**given, "bias": relaid(given["bias"])})


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_b56_negative_strides(impl, name, axis):
    given = arrays()
    for one in NAMES if name == "all" else (name,):
        given[one] = stored_backwards(given[one], axis)
        assert given[one].strides[axis] < 0
    assert_layout_is_irrelevant(impl, given)


def test_b56_the_reports_own_slices(impl):
    given = arrays()
    given |= {"q": given["q"][..., ::-1, :], "k": given["k"][:, ::-1], "v": given["v"][..., ::-1]}
    given |= {"mask": given["mask"][..., ::-1]}
    assert_layout_is_irrelevant(impl, given)


# ---- B55: alignment ----


def at_odd_address(x: Array) -> Array:
    view = np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)
    assert x.itemsize == 1 or not view.flags.aligned
    return view


def off_vector(x: Array) -> Array:
    """Equal to x, every row starting one element after a multiple of 64 bytes or close to one."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + 1), 99, x.dtype)
    wide[..., 1:] = x
    return wide[..., 1:]


@pytest.mark.parametrize("relaid", [at_odd_address, off_vector])
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_b55_unaligned(impl, name, relaid):
    given = arrays()
    for one in NAMES if name == "all" else (name,):
        given[one] = relaid(given[one])
    assert_layout_is_irrelevant(impl, given)
    assert_layout_is_irrelevant(impl, {one: given[one] for one in "qkv"})


def mapped(path: Path, x: Array, offset: int) -> Array:
    """x in a read-only mapping of a file, after `offset` bytes."""
    path.write_bytes(b"\0" * offset + x.tobytes())
    return np.memmap(path, x.dtype, "r", offset, x.shape)


@pytest.mark.parametrize("offset", [0, 3, 64])
def test_b55_b57_memory_map(impl, offset, tmp_path):
    given = {name: mapped(tmp_path / name, x, offset) for name, x in arrays().items()}
    assert given["q"].flags.aligned == (offset != 3)
    assert_layout_is_irrelevant(impl, given)


def test_b55_output_at_an_odd_address(impl):
    given = arrays()
    memory = np.zeros(given["q"].nbytes + 1, np.uint8)
    out = memory[1:].view(np.float32).reshape(given["q"].shape)
    assert not out.flags.aligned
    assert attention(**given, out=out) is out
    assert_array_equal(out, attention(**given))
    assert memory[0] == 0


# ---- B57: read-only ----


def test_b57_read_only_arrays(impl):
    given = {**arrays(), "key_lengths": np.array([20, 7]), "q_start": np.array([0, 3])}
    expected = attention(**given, causal=True)
    copies = {name: x.copy() for name, x in given.items()}
    for x in given.values():
        x.setflags(write=False)
    assert_array_equal(attention(**given, causal=True), expected)
    for name, x in copies.items():
        assert_array_equal(given[name], x)


def test_b57_broadcast_arrays(impl):
    """np.broadcast_to gives read-only views with strides of 0."""
    given = {name: np.broadcast_to(x[:1, :1], x.shape) for name, x in arrays().items()}
    assert not any(x.flags.writeable for x in given.values())
    assert_layout_is_irrelevant(impl, given)


def test_b57_read_only_positions_and_tables(impl):
    x, positions = normal(2, 3, 5, 8), np.arange(10).reshape(2, 5) % 7
    cos, sin = normal(7, 4, seed=1), normal(7, 4, seed=2)
    for tables in ({}, {"cos": cos, "sin": sin}):
        expected = rotary_embedding(x, positions, **tables)
        given = [array.copy() for array in (x, positions, *tables.values())]
        for array in given:
            array.setflags(write=False)
        frozen = dict(zip(tables, given[2:], strict=True))
        assert_array_equal(rotary_embedding(*given[:2], **frozen), expected)
        for array, before in zip(given, (x, positions, *tables.values()), strict=True):
            assert_array_equal(array, before)


# ---- B58: byte order ----


def swapped(x: Array) -> Array:
    return x.astype(x.dtype.newbyteorder("S"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "all"])
def test_b58_swapped_bytes(impl, name, dtype):
    given = arrays()
    given |= {one: given[one].astype(dtype) for one in "qkv"}
    expected = attention(**given)
    for one in ("q", "k", "v", "bias") if name == "all" else (name,):
        given[one] = swapped(given[one])
        assert not given[one].dtype.isnative
    out = attention(**given)
    assert out.dtype == dtype
    assert out.dtype.isnative
    assert_array_equal(out, expected)


def test_b58_the_reports_own_dtypes(impl):
    q, k, v = qkv((2, 3, 9, 8))
    bias, lengths = normal(9, 9, dtype=np.float64), np.array([9, 4], np.int32)
    big = {"bias": bias.astype(">f8"), "key_lengths": lengths.astype(">i4")}
    out = attention(q.astype(">f4"), k, v, **big)
    assert_array_equal(out, attention(q, k, v, bias=bias, key_lengths=lengths))
    start = np.array([0, 5])
    assert_array_equal(
        attention(q, k, v, causal=True, q_start=start.astype(">i8")), attention(q, k, v, causal=True, q_start=start)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_b58_swapped_bytes_of_positions_and_tables(impl, dtype):
    x, positions = normal(2, 3, 5, 8, dtype=dtype), np.arange(10).reshape(2, 5) % 7
    cos, sin = normal(7, 4, dtype=dtype, seed=1), normal(7, 4, dtype=dtype, seed=2)
    for tables in ({}, {"cos": cos, "sin": sin}):
        turned = rotary_embedding(swapped(x), swapped(positions), **{name: swapped(t) for name, t in tables.items()})
        assert turned.dtype == dtype
        assert turned.dtype.isnative
        assert_array_equal(turned, rotary_embedding(x, positions, **tables))


# ---- B60: strides of 0 ----


def test_b60_broadcast_batch(impl):
    q = normal(16, 4, 32, 64)
    k, v = (np.broadcast_to(normal(4, 32, 64, seed=x), (16, 4, 32, 64)) for x in (1, 2))
    mask = np.broadcast_to(normal(32, 32) > 0, (16, 4, 32, 32))
    assert k.strides[0] == 0
    assert_layout_is_irrelevant(impl, {"q": q, "k": k, "v": v, "mask": mask})
    assert_layout_is_irrelevant(impl, {"q": q, "k": k, "v": v})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_b60_with_one_key_the_output_is_the_value(impl, dtype):
    q = np.ones((16, 4, 32, 64), dtype)
    k, v = (np.broadcast_to(normal(4, 1, 64, dtype=dtype, seed=x), (16, 4, 1, 64)) for x in (1, 2))
    assert_array_equal(attention(q, k, v), np.broadcast_to(v, q.shape))
    assert_array_equal(attention(q, k, v, mask=np.ones((1, 1), bool)), np.broadcast_to(v, q.shape))


# ---- B124: the layout of most models, (B, L, H, D) ----


@pytest.mark.parametrize(("queries", "keys"), [(384, 384), (1, 8192)])
def test_b124_heads_inside_rows(impl, queries, keys):
    q, k, v = (normal(1, n, 4, 64, seed=n + x).swapaxes(1, 2) for x, n in enumerate((queries, keys, keys)))
    assert_layout_is_irrelevant(impl, {"q": q, "k": k, "v": v})
