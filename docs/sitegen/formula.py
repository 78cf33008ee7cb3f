"""The drawings of the guide from the formula to attention(): its shapes, and the weights of five words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attentile import attention

from .svg import Drawing

# The words of docs/guide/formula.md, and what they are: an animal, something done, a thing.
WORDS = {"cat": (2, 0, 0), "sat": (0, 2, 0), "mat": (0, 0, 2), "dog": (2, 0, 0), "ran": (0, 2, 0)}
SHOWN: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True, "window": (1, None)})
CELL = 26


def shapes() -> str:
    """The matrices of the formula, drawn to scale."""
    d = Drawing(680, 200, "Q times K transposed gives the L x S scores, softmax the L x S weights, times V the output")
    rows, keys, width = 84, 112, 34
    x = 28
    for name, shape, wide, high, kind, sign in (
        ("Q", "L × D", width, rows, "a", "·"),
        ("Kᵀ", "D × S", keys, width, "c", "→"),
        ("scores", "L × S", keys, rows, "b soft", "→"),
        ("weights", "L × S", keys, rows, "b soft", "·"),
        ("V", "S × Dv", width, keys, "c", "→"),
        ("out", "L × Dv", width, rows, "a", ""),
    ):
        d.rect(x, 80 - high / 2, wide, high, kind)
        d.text(x + wide / 2, 84, name, "on-fill" if "soft" not in kind else "", 12, "middle")
        d.text(x + wide / 2, 156, shape, "muted", 11, "middle")
        d.text(x + wide + 19, 85, sign, "", 15, "middle")
        x += wide + 38
    d.text(404, 20, "softmax of each row", "muted", 11, "middle")
    d.text(340, 188, "The two L × S matrices are what attention() never stores.", "muted", 11.5, "middle")
    return str(d)


def weights() -> str:
    """The weights of five words under three masks; the area of a square is the weight."""
    vectors = np.array(list(WORDS.values()), dtype=np.float64)
    d = Drawing(680, 208, "Weights of five words: without a mask, causal, and causal with a window of two tokens")
    for panel, options in enumerate(SHOWN):
        found = attention(vectors, vectors, vectors, return_weights=True, **options).weights
        left, top = 46 + 220 * panel, 30
        for i, word in enumerate(WORDS):
            d.text(left + (i + 0.5) * CELL, top - 8, word, "muted", 11, "middle")
            d.text(left - 8, top + (i + 0.5) * CELL + 4, word, "muted", 11, "end")
            for j in range(len(WORDS)):
                d.rect(left + j * CELL + 1, top + i * CELL + 1, CELL - 2, CELL - 2, "off")
                side = (CELL - 2) * float(found[i, j]) ** 0.5
                centre_x, centre_y = left + (j + 0.5) * CELL, top + (i + 0.5) * CELL
                if side:
                    d.rect(centre_x - side / 2, centre_y - side / 2, side, side, "a", 1)
        call = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no mask"
        d.text(left + 2.5 * CELL, top + 5 * CELL + 20, call, "code", 10, "middle")
    below = "Rows are queries, columns keys; the area of a blue square is the weight."
    d.text(340, 202, below, "muted", 11.5, "middle")
    return str(d)


ALL: dict[str, Callable[[], str]] = {"formula-shapes": shapes, "formula-weights": weights}
