"""A drawing of which keys each query sees, as text or as a picture."""

from __future__ import annotations

import importlib
import math
import os
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, named_in_errors, positive_index
from ..masks import Structure, structure
from ..scores import Causal, Segments, Window

Array = NDArray[Any]

_TEXT_CELLS, _PICTURE_CELLS = 64, 1024  # a side, at most


class _Cells(NamedTuple):
    shares: Array  # of the pairs in each cell that may attend, 0 to 1
    down: int  # queries per cell
    across: int  # keys per cell


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
        L, at least 1. Above 64, a character stands for several queries; ``+`` means that some of their pairs with keys
        are allowed, ``#`` that all are.
    keys : int
        S, likewise.
    causal, q_start, window, key_lengths, prefix_lengths, segments
        As in `attention`, for one batch item.
    mask : array_like of bool, optional
        Broadcasts to (L, S).
    file : path, optional
        Also write a picture there, .png or .svg, with up to 1024 cells a side; needs matplotlib.

    Returns
    -------
    str
        A line per query, which starts with its index, below a line of the keys' last digits (and one of their tens).

    Raises
    ------
    TypeError, ValueError, ImportError
        Whatever `attention` refuses; a file of another kind; a file without matplotlib installed.

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
        _picture(file, _cells(found, seen, n_queries, n_keys, _PICTURE_CELLS), n_queries, n_keys)
    return _text(_cells(found, seen, n_queries, n_keys, _TEXT_CELLS))


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


def _cells(found: Structure, mask: Array | None, queries: int, keys: int, cells: int) -> _Cells:
    """The visible share of each cell, at most `cells` of them a side."""
    down, across = -(-queries // cells), -(-keys // cells)
    rows, columns = _edges(queries, down), _edges(keys, across)
    sides = found.intervals(queries, keys) or (np.zeros(queries, np.intp), np.full(queries, keys))
    lo, hi = np.where(sides[0] < sides[1], sides, 0)
    dense = [also for also in (found.same_segment, mask) if also is not None]
    if all(also.strides[0] == 0 for also in dense):
        seen = np.logical_and.reduce([also[0] for also in dense]) if dense else np.ones(keys, bool)
        counts = _counts_of_intervals(lo, hi, seen, down, columns)
    else:
        counts = np.array([_counts_of_band(lo, hi, dense, slice(*band), columns) for band in pairwise(rows)])
    return _Cells(counts / np.outer(np.diff(rows), np.diff(columns)), down, across)


def _edges(n: int, step: int) -> Array:
    """0, step, 2 * step ... and n."""
    return np.append(np.arange(0, n, step), n)


def _counts_of_intervals(lo: Array, hi: Array, seen: Array, down: int, columns: Array) -> Array:
    """Pairs seen in each cell, if query i sees the keys lo[i] <= j < hi[i] for which seen[j]; in O(L + S).

    Of row i, cell c .. d holds f(hi, d) - f(hi, c) - f(lo, d) + f(lo, c) such keys, with f(end, c) those below both
    end and c. A band's sum of f needs of its ends only how many lie at or below c, and the keys below these.
    """
    band, across = np.arange(len(lo)) // down, columns[1]
    shape = int(band[-1]) + 1, len(columns)
    before = np.append(0, np.cumsum(seen))  # keys seen below each index

    def f(ends: Array) -> Array:
        place = band * shape[1] + -(-ends // across)
        number = np.bincount(place, minlength=math.prod(shape)).reshape(shape)
        below = np.bincount(place, before[ends], minlength=math.prod(shape)).reshape(shape)
        beyond = number.sum(axis=1, keepdims=True) - number.cumsum(axis=1)
        found: Array = below.cumsum(axis=1) + before[columns] * beyond
        return found

    counts: Array = np.diff(f(hi) - f(lo), axis=1)
    return counts


def _counts_of_band(lo: Array, hi: Array, dense: list[Array], band: slice, columns: Array) -> Array:
    """The same for the cells of a band of rows, which also need every mask in `dense`."""
    counts, j = np.zeros(columns[-1], np.intp), np.arange(columns[-1])
    for first in range(band.start, band.stop, 255):  # so many bytes of 0 or 1 have a sum that fits into one
        rows = slice(first, min(first + 255, band.stop))
        seen = (j >= lo[rows, None]) & (j < hi[rows, None])
        for also in dense:
            seen &= also[rows]
        counts += np.add.reduce(seen.view(np.uint8), axis=0, dtype=np.uint8)
    return np.add.reduceat(counts, columns[:-1])


def _text(found: _Cells) -> str:
    shares, down, across = found
    cells = np.where(shares == 1, "#", np.where(shares > 0, "+", "."))
    columns, width = range(cells.shape[1]), len(str((len(cells) - 1) * down))
    lines = []
    if down > 1 or across > 1:
        lines.append(f"one character: {down} queries x {across} keys; + some of them (file= draws finer)")
    if len(columns) > 10:
        lines.append((" " * (width + 1) + "".join(str(x // 10) if x % 10 == 0 else " " for x in columns)).rstrip())
    lines.append(" " * (width + 1) + "".join(str(x % 10) for x in columns))
    lines += [f"{row * down:>{width}} {''.join(cells[row])}" for row in range(len(cells))]
    return "\n".join(lines)


def _picture(file: str | os.PathLike[str], found: _Cells, queries: int, keys: int) -> None:
    shares, down, across = found
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
