"""Structural options that say the same as a dense mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def as_structure(mask: Array, queries: int, keys: int) -> str | None:
    """The structural options that say the same as this (..., Hq, L, S) mask, "" for all True, None for none."""
    mask = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.strides)].view(np.bool_)
    if mask.shape[-1] != keys:
        return "" if mask.all() else None
    count = mask.sum(axis=-1, dtype=np.intp)
    lo, hi = mask.argmax(axis=-1), np.where(count == 0, 0, keys - mask[..., ::-1].argmax(axis=-1))
    if (hi - lo != count).any() or (lo != lo[..., :1, :]).any() or (hi != hi[..., :1, :]).any():
        return None  # not intervals, or not the same ones for each head
    # One row may stand for all.
    lo, hi = (np.broadcast_to(x, (*x.shape[:-1], queries))[..., 0, :].reshape(-1, queries) for x in (lo, hi))
    if not lo.any() and (hi == hi[:, :1]).all():
        return "" if (hi == keys).all() else "key_lengths="
    forms = [form for start in (0, keys - queries) if (form := _band(lo, hi, start, queries, keys)) is not None]
    return min(forms, default=None)  # "causal" before "window"


def _band(lo: Array, hi: Array, start: int, queries: int, keys: int) -> str | None:
    """causal=, window= and key_lengths= for these intervals (some of them not empty), query i at start + i, or None."""
    position, seen = start + np.arange(queries), lo < hi
    left, right = int((position - lo)[seen].max()), int((hi - 1 - position)[seen].max())
    valid = hi.max(axis=-1, keepdims=True)
    low = np.clip(position - left if lo.any() else 0 * position, 0, keys)
    high = np.clip(np.minimum(position + right + 1, valid), 0, keys)
    if left < 0 or right < 0 or ((low < high) != seen).any() or ((low != lo) | (high != hi))[seen].any():
        return None
    cut = bool((valid < np.clip(position[-1] + right + 1, 0, keys)).any())
    words = []
    if right == 0:
        named = '"upper_left"' if start == 0 else '"lower_right"'
        words.append("causal=True" if queries == keys or cut else f"causal={named}")
    if lo.any() or right:
        ahead = right if right and position[-1] + right + 1 > 0 and (high < keys).any() else None
        words.append(f"window=({left if lo.any() else None}, {ahead})")
    if queries != keys and (right or cut):
        words.append(f"q_start={start}")
    return ", ".join(words + ["key_lengths="] * cut)
