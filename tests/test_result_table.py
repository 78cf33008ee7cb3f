"""Promise 2 across machines: 200 fixed cases have the bits that tests/same_bits.txt stores on FMA instruction sets.

Inputs come from integer arithmetic, so that they are the same everywhere. `generic` and the NumPy twin are outside the
promise, and so is what NumPy computes: merge_attention, projections, slopes that are no powers of two. NaN counts as
NaN: its sign and payload are the processor's.

After a change that is meant to change bits, the table is made anew with

    python tests/test_result_table.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from conftest import FMA_HERE

from attentile import (
    KVCache,
    attention,
    causal_attention,
    positional_encoding,
    rotary_embedding,
    self_attention,
    use_backend,
)

Array = Any
Case = Callable[[], Any]
TABLE = Path(__file__).with_name("same_bits.txt")
DTYPES = (np.float32, np.float64)


def numbers(seed: int, *shape: int, dtype: Any = np.float64) -> Array:
    """Numbers in [-2, 2) that fill the mantissa: bits of products of whole numbers, each step exact."""
    x = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    for odd in (0x9E6D62D06F6A9A9B, 0xD1B54A32D192ED03):
        x *= np.uint64(odd)  # wraps around
        x ^= x >> np.uint64(31)
    bits = 24 if dtype == np.float32 else 52
    return ((x >> np.uint64(64 - bits)).astype(np.float64) / 2.0 ** (bits - 2) - 2).astype(dtype).reshape(shape)


def chosen(seed: int, *shape: int, among: int = 2) -> Array:
    """True for one in `among`, by the same means."""
    return numbers(seed, *shape) < 4 / among - 2


def qkv(dtype: Any, rows: int, keys: int, width: int = 20, value_width: int = 13, group: int = 2) -> tuple[Array, ...]:
    return (
        3 * numbers(1, 2, 2 * group, rows, width, dtype=dtype),
        numbers(2, 2, 2, keys, width, dtype=dtype),
        numbers(3, 2, 2, keys, value_width, dtype=dtype),
    )


def poisoned(dtype: Any, rows: int, keys: int) -> dict[str, Any]:
    """Excluded keys and values that hold NaN and Inf, and one allowed value that is NaN."""
    q, k, v = qkv(dtype, rows, keys)
    allowed = chosen(7, keys)
    k[:, :, ~allowed], v[:, :, ~allowed] = np.nan, np.inf
    v[1, 1, np.flatnonzero(allowed)[3]] = np.nan
    return {"q": q, "k": k, "v": v, "mask": allowed}


def option_cases(rows: int, keys: int) -> dict[str, Callable[[Any], dict[str, Any]]]:
    """Name -> options for a dtype. Few rows and many take different tiles."""
    last = keys - rows
    return {
        "upper left": lambda t: {"causal": "upper_left"},
        "lower right": lambda t: {"causal": "lower_right", "key_lengths": [keys, keys - 77]},
        "q_start": lambda t: {"causal": True, "q_start": [last, 30]},
        "window": lambda t: {"window": (90, 5), "q_start": last},
        "segments": lambda t: {"segments": (np.arange(rows) // 9 % 3, np.arange(keys) // 50 % 3)},
        "mask": lambda t: {"mask": chosen(4, 2, 1, rows, keys)},
        "sparse mask": lambda t: {"mask": chosen(5, rows, keys, among=40)},
        "bias": lambda t: {"bias": numbers(6, 4, rows, keys, dtype=t)},
        "huge bias": lambda t: {"bias": numbers(6, rows, keys, dtype=t) * (np.finfo(t).max * t(0.49))},
        "bias, -inf": lambda t: {"bias": np.where(chosen(8, rows, keys), t(-np.inf), numbers(9, rows, keys, dtype=t))},
        "softcap": lambda t: {"softcap": 3.7},
        "alibi": lambda t: {"alibi_slopes": [0.5, 0.25, 0.1875, 0.001], "q_start": last, "causal": True},
        "sinks, lse": lambda t: {"sinks": [-3.0, 0.1, 4.7, 60.0], "return_lse": True},
        "weights, lse": lambda t: {"return_weights": True, "return_lse": True, "mask": chosen(4, rows, keys)},
        "large scale": lambda t: {"scale": 37.3, "return_lse": True},
        "everything": lambda t: {
            "mask": chosen(4, rows, keys), "bias": numbers(6, keys, dtype=t), "softcap": 8.0, "causal": "lower_right",
            "key_lengths": [keys, keys - 100], "sinks": [0.3, -0.2, 5.0, 1.0], "return_lse": True, "scale": 0.7,
        },
    }  # fmt: skip


def attention_cases(dtype: Any) -> Iterator[tuple[str, Case]]:
    for shape in (
        (1, 1, 1, 1, 1), (2, 3, 1, 5, 1), (5, 9, 3, 1, 1), (6, 256, 16, 16, 1), (7, 257, 33, 8, 1), (12, 31, 64, 64, 2),
        (13, 512, 5, 7, 2), (24, 513, 8, 24, 2), (25, 100, 128, 3, 1), (48, 600, 31, 31, 1), (49, 50, 80, 65, 1),
        (97, 300, 12, 10, 2), (150, 255, 64, 17, 2),
    ):  # fmt: skip
        yield f"shape {shape}", lambda shape=shape: attention(*qkv(dtype, *shape), return_lse=True)
    for rows, keys in ((1, 300), (3, 700), (70, 430)):
        for name, options in option_cases(rows, keys).items():
            yield f"{rows} rows, {name}", lambda r=rows, n=keys, o=options: attention(*qkv(dtype, r, n), **o(dtype))
        yield f"{rows} rows, poison", lambda r=rows, n=keys: attention(**poisoned(dtype, r, n))
    for rows, keys, width, group in ((1, 1, 8, 1), (1, 15, 3, 1), (1, 257, 64, 1), (1, 1100, 40, 4), (2, 300, 128, 2),
                                     (3, 64, 33, 1), (4, 513, 16, 1)):  # fmt: skip
        yield (
            f"decode {rows, keys, width, group}",
            lambda r=rows, n=keys, w=width, g=group: attention(
                *qkv(dtype, r, n, w, w + 3, g), causal="lower_right", return_lse=True
            ),
        )


def rotary_cases(dtype: Any) -> Iterator[tuple[str, Case]]:
    for width, options in (
        (2, {}), (16, {}), (64, {"interleaved": True}), (66, {"base": 500000.0}), (40, {"rotary_dim": 14}),
        (40, {"rotary_dim": 6, "interleaved": True}), (24, {"positions": 1_000_000}), (24, {"inverse": True}),
        (32, {"positions": [5, -3, 2**40, 0, 77, 4096, 1, 2, 100_003]}),
        (32, {"scaling": {"rope_type": "linear", "factor": 4.0}}),
    ):  # fmt: skip
        yield (
            f"rotary {width} {options}",
            lambda w=width, o=options: rotary_embedding(numbers(10, 2, 3, 9, w, dtype=dtype), **o),
        )


def decoded(dtype: Any, steps: tuple[int, ...], turned: bool = False, reordered: bool = False, **options: Any) -> Array:
    """What a cache attends to, step after step; keys and values come in pieces of the given sizes."""
    cache = KVCache(2, 2, 20, value_dim=13, dtype=dtype, rotary={"base": 10000.0} if turned else None, **options)
    q, k, v = qkv(dtype, sum(steps), sum(steps))
    seen, end = [], 0
    for step in steps:
        rows = slice(end, end := end + step)
        cache.append(k[:, :, rows], v[:, :, rows])
        if reordered:
            cache.reorder([1, 0])
        seen.append(cache.attend(q[:, :, rows]))
    return np.concatenate(seen, axis=2)


def cache_cases(dtype: Any) -> Iterator[tuple[str, Case]]:
    for name, steps, options in (
        ("one by one", (1,) * 40, {}), ("a prompt and tokens", (255, 1, 1, 1, 1, 30), {}),
        ("window", (200, 1, 1, 90, 1), {"window": (60, 0)}),
        ("window and kept tokens", (200, 1, 1, 90, 1), {"window": (60, 0), "sink_tokens": 4}),
        ("rotary", (100, 1, 1, 200, 1), {"turned": True}),
        ("pieces", (7, 250, 300), {}), ("a prompt longer than the window", (300, 1), {"window": (20, 0)}),
        ("reordered", (40, 1, 1, 5), {"reordered": True}),
    ):  # fmt: skip
        yield f"cache, {name}", lambda s=steps, o=options: decoded(dtype, s, **o)


def encoding_cases(dtype: Any) -> Iterator[tuple[str, Case]]:
    for rows, width, options in ((1, 1, {}), (70, 8, {}), (130, 33, {"offset": -40}), (5, 600, {"offset": 2**40}),
                                 (9, 64, {"base": 100.0, "offset": 12_345_678}),
                                 (64, 512, {"offset": 64}), (200, 6, {"base": 1e6})):  # fmt: skip
        yield (
            f"encoding {rows, width, options}",
            lambda r=rows, w=width, o=options: positional_encoding(r, w, dtype=dtype, **o),
        )


def textbook_cases(dtype: Any) -> Iterator[tuple[str, Case]]:
    q, k, v = (numbers(seed, 40, 9, dtype=dtype) for seed in (11, 12, 13))
    yield "self attention", lambda: self_attention(q, k, v, 9)
    yield "self attention, mask", lambda: self_attention(q, k, v, 9, chosen(14, 40, 40, among=40))
    yield "self attention, a divisor of its own", lambda: self_attention(q, k, v, 50)
    yield "causal attention", lambda: causal_attention(q, k, v, 9)


def cases() -> dict[str, Case]:
    """The 200 cases by name."""
    found: dict[str, Case] = {}
    for dtype in DTYPES:
        for kind in (attention_cases, rotary_cases, cache_cases, encoding_cases, textbook_cases):
            for name, case in kind(dtype):
                found[f"{dtype.__name__}: {name}"] = case
    return found


def digest(result: Any) -> str:
    """Of dtypes, shapes and bits; None is a part that was not asked for."""
    total = hashlib.sha256()
    for part in result if isinstance(result, tuple) else (result,):
        if part is not None:
            x = np.ascontiguousarray(part)
            x = np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
            total.update(f"{x.dtype.name} {x.shape} ".encode() + x.astype(x.dtype.newbyteorder("<")).tobytes())
    return total.hexdigest()[:16]


def computed() -> dict[str, str]:
    return {name: digest(case()) for name, case in cases().items()}


def stored() -> dict[str, str]:
    lines = TABLE.read_text().splitlines()
    return {name: value for value, _, name in (line.partition(" ") for line in lines)}


def test_the_table_has_200_cases_that_differ():
    table = stored()
    assert list(table) == list(cases())
    assert len(table) == 200
    assert len(set(table.values())) == 200


def test_bits_of_the_table(fma_isa):
    found, table = computed(), stored()
    assert [name for name in table if found[name] != table[name]] == []


def test_a_digest_sees_every_bit():
    x = numbers(1, 3, 5)
    other = x.copy()
    other[2, 4] = np.nextafter(other[2, 4], 9)
    same_nan, minus_zero = np.array([np.nan]), np.array([-0.0])
    assert digest(x) == digest(x.T.copy().T) != digest(other)
    assert digest(same_nan) == digest(-same_nan)
    assert digest(minus_zero) != digest(-minus_zero)
    assert len({digest(x), digest(x.ravel()), digest(x.astype(np.float32))}) == 3
    assert digest((x, None)) == digest((x,)) != digest((x, other))


def test_inputs_are_the_same_everywhere():
    assert digest(numbers(1, 1000)) == "b2acfc350255293a"
    assert digest(numbers(2, 1000, dtype=np.float32)) == "4a56c7ab2f8de5e3"


def write_table() -> None:
    """From every FMA instruction set of this machine, which have to agree."""
    tables = []
    for isa in FMA_HERE:
        with use_backend("compiled", isa):
            tables.append(computed())
    if not tables or any(table != tables[0] for table in tables):
        raise SystemExit("the FMA instruction sets of this machine do not agree, or there is none")
    TABLE.write_text("".join(f"{value} {name}\n" for name, value in tables[0].items()))


if __name__ == "__main__":
    write_table()
