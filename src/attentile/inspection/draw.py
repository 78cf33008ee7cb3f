"""A drawing of which keys each query sees, as text or as a picture."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, named_in_errors, positive_index
from ..masks import Structure, structure
from ..scores import Causal, Segments, Window

Array = NDArray[Any]

_TEXT_CELLS, _PICTURE_CELLS = 64, 1024  # a side, at most


def draw_mask(
    *,
    queries: int,
    keys: int,
    causal: Causal = False,
    q_start: int | None = None,
    window: Window = None,
    key_lengths: int | None = None,
    prefix_lengths: int | None = None,
    segments: Segments = None,
    mask: ArrayLike | None = None,
    file: str | os.PathLike[str] | None = None,
) -> str:
    """Draw which keys (columns) each query (row) of one batch item sees: ``#`` may attend, ``.`` may not.

    Parameters
    ----------
    queries : int
        L, at least 1. Above 64, a character stands for several queries: ``+`` means that some of them may attend.
    keys : int
        S, likewise.
    causal, q_start, window, key_lengths, prefix_lengths, segments
        As in `attention`, for one batch item.
    mask : array_like of bool, optional
        Broadcasts to (L, S).
    file : path, optional
        Also write a picture, .png or .svg; needs matplotlib.

    Returns
    -------
    str
        A line per query with its index, under the last digits of the keys' indices (and their tens from 10 on).

    Raises
    ------
    TypeError, ValueError, ImportError
        Whatever `attention` refuses; a file of another kind, or without matplotlib installed.

    Examples
    --------
    >>> from attentile import draw_mask
    >>> print(draw_mask(queries=3, keys=5, causal="lower_right"))
      01234
    0 ###..
    1 ####.
    2 #####
    """
    n_queries, n_keys = positive_index("draw_mask", "queries", queries), positive_index("draw_mask", "keys", keys)
    if file is not None and os.path.splitext(file)[1].lower() not in (".png", ".svg"):
        raise ValueError(f"draw_mask: file is {os.fspath(file)!r}; its name must end with .png or .svg")
    options = dict(causal=causal, q_start=q_start, window=window, segments=segments)
    options |= dict(key_lengths=key_lengths, prefix_lengths=prefix_lengths)
    with named_in_errors("draw_mask"):
        found = structure((), n_queries, n_keys, options)
    seen = None if mask is None else _drawn_mask(mask, (n_queries, n_keys))
    if file is not None:
        _picture(file, *_shares(found, seen, n_queries, n_keys, _PICTURE_CELLS), n_queries, n_keys)
    return _text(*_shares(found, seen, n_queries, n_keys, _TEXT_CELLS))


def _drawn_mask(mask: ArrayLike, shape: tuple[int, int]) -> Array:
    array = as_array("draw_mask", "mask", mask)
    if array.dtype != np.bool_:
        raise TypeError(f"draw_mask: mask has dtype {array.dtype}; it must be bool, True = may attend (mask != 0?)")
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"draw_mask: mask has shape {array.shape}; it must broadcast to (queries, keys) = {shape}, one batch item"
        ) from None


def _shares(found: Structure, mask: Array | None, queries: int, keys: int, cells: int) -> tuple[Array, int, int]:
    """(visible share of each cell, queries per cell, keys per cell), at most `cells` a side."""
    down, across = -(-queries // cells), -(-keys // cells)
    columns, j = np.arange(0, keys, across), np.arange(keys)
    lo, hi = found.intervals(queries, keys) or (np.zeros(queries, np.intp), np.full(queries, keys))
    shares = []
    for first in range(0, queries, down):
        band = slice(first, first + down)
        seen = (j >= lo[band, None]) & (j < hi[band, None])
        for also in (found.same_segment, mask):
            if also is not None:
                seen &= also[band]
        shares.append(np.add.reduceat(seen.mean(axis=0), columns) / np.diff(np.r_[columns, keys]))
    return np.array(shares), down, across


def _text(shares: Array, down: int, across: int) -> str:
    cells = np.where(shares >= 1 - 1e-9, "#", np.where(shares > 0, "+", "."))  # shares are sums of fractions
    columns, width = range(cells.shape[1]), len(str((len(cells) - 1) * down))
    lines = []
    if down > 1 or across > 1:
        lines.append(f"one character: {down} queries x {across} keys; + some of them (file= draws finer)")
    if len(columns) > 10:
        lines.append((" " * (width + 1) + "".join(str(x // 10) if x % 10 == 0 else " " for x in columns)).rstrip())
    lines.append(" " * (width + 1) + "".join(str(x % 10) for x in columns))
    lines += [f"{row * down:>{width}} {''.join(cells[row])}" for row in range(len(cells))]
    return "\n".join(lines)


def _picture(file: str | os.PathLike[str], shares: Array, down: int, across: int, queries: int, keys: int) -> None:
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(5, 5), layout="constrained")
    except ImportError as error:
        raise ImportError(f"draw_mask: file= needs matplotlib ({error}): pip install matplotlib") from None
    axes = figure.add_subplot()
    # The last cell of a side may stand for fewer keys; its edge is cut by the limits.
    edges = (-0.5, shares.shape[1] * across - 0.5, shares.shape[0] * down - 0.5, -0.5)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.4, extent=edges, interpolation="nearest", aspect="auto")
    axes.set(xlabel="key", ylabel="query", xlim=(-0.5, keys - 0.5), ylim=(queries - 0.5, -0.5))
    figure.savefig(file)
