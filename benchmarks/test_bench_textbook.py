"""The functions with the signatures of the textbooks: self-attention, causal attention, multi-head attention."""

from collections.abc import Callable
from typing import Any

import formulas
import numpy as np
import pytest

import attentile

SHAPES = [  # rows, width, dtype: an exercise, a sentence, a page
    pytest.param(5, 64, "float64", id="5x64-float64"),
    pytest.param(128, 64, "float32", id="128x64-float32"),
    pytest.param(512, 64, "float64", id="512x64-float64"),
]


def random_arrays(dtype: str, *shapes: tuple[int, ...], seed: int = 7) -> list[np.ndarray]:
    """Normally distributed arrays, the same ones in every run."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES)
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
def test_self_attention(
    rows: int,
    width: int,
    dtype: str,
    masked: bool,
    timed: Callable[..., Any],
    check_against_fallback: Callable[..., None],
) -> None:
    """Output and weights; the mask hides a random third of the keys of each row."""
    arrays = random_arrays(dtype, *[(rows, width)] * 3)
    mask = (np.random.default_rng(8).random((rows, rows)) > 1 / 3).astype(int) if masked else None

    def self_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return attentile.self_attention(query, key, value, width, mask)

    def formula(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return formulas.self_attention(query, key, value, width, mask)

    group = f"self_attention {rows} × {rows}, width {width}, {dtype}{', mask' if masked else ''}"
    result = timed(self_attention, *arrays, formula=formula, group=group, flops=4.0 * rows * rows * width)
    check_against_fallback(tuple(result), self_attention, *arrays)


@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES)
def test_causal_attention(
    rows: int, width: int, dtype: str, timed: Callable[..., Any], check_against_fallback: Callable[..., None]
) -> None:
    """Each row sees the keys up to its own."""
    arrays = random_arrays(dtype, *[(rows, width)] * 3)

    def causal_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return attentile.causal_attention(query, key, value, width)

    def formula(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return formulas.causal_attention(query, key, value, width)

    group = f"causal_attention {rows} × {rows}, width {width}, {dtype}"
    result = timed(causal_attention, *arrays, formula=formula, group=group, flops=2.0 * rows * rows * width)
    check_against_fallback(tuple(result), causal_attention, *arrays)


@pytest.mark.parametrize(
    ("rows", "width", "heads", "dtype"),
    [
        pytest.param(10, 64, 8, "float64", id="10x64-float64"),
        pytest.param(128, 768, 12, "float32", id="128x768-float32"),
        pytest.param(512, 256, 8, "float64", id="512x256-float64"),
    ],
)
def test_multi_head_attention(
    rows: int,
    width: int,
    heads: int,
    dtype: str,
    timed: Callable[..., Any],
    check_against_fallback: Callable[..., None],
) -> None:
    """A whole layer: three projections, attention of all heads, the output projection."""
    x, *matrices = random_arrays(dtype, (rows, width), *[(width, width)] * 4)
    arrays = [x, *(matrix / np.sqrt(width).astype(dtype) for matrix in matrices)]

    def multi_head_attention(x: np.ndarray, *matrices: np.ndarray) -> np.ndarray:
        return attentile.multi_head_attention(x, width, heads, *matrices)

    def formula(x: np.ndarray, *matrices: np.ndarray) -> np.ndarray:
        return formulas.multi_head_attention(x, width, heads, *matrices)

    flops = 8.0 * rows * width * width + 4.0 * rows * rows * width
    group = f"multi_head_attention {rows} rows, width {width}, {heads} heads, {dtype}"
    result = timed(multi_head_attention, *arrays, formula=formula, group=group, flops=flops)
    check_against_fallback(result, multi_head_attention, *arrays)
