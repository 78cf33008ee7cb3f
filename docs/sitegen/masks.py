"""Pictures of masks, from what draw_mask() draws: a page names a group, a group is a row of pictures."""

from __future__ import annotations

from typing import Any

import attentile

from .svg import Drawing

# The options are those of draw_mask and of attention. Add a picture here, then include the group in a page.
GROUPS: dict[str, tuple[dict[str, Any], ...]] = {
    "causal": (
        {"queries": 6, "keys": 6, "causal": True},
        {"queries": 3, "keys": 6, "causal": "upper_left"},
        {"queries": 3, "keys": 6, "causal": "lower_right"},
        {"queries": 3, "keys": 6, "causal": True, "q_start": 2},
    ),
    "more-queries": (
        {"queries": 6, "keys": 3, "causal": "upper_left"},
        {"queries": 6, "keys": 3, "causal": "lower_right"},
    ),
    "window": (
        {"queries": 7, "keys": 7, "window": (1, 1)},
        {"queries": 7, "keys": 7, "causal": True, "window": (2, None)},
        {"queries": 7, "keys": 7, "window": (0, 0)},
        {"queries": 3, "keys": 7, "window": (2, 1), "q_start": 3},
    ),
    "lengths": (
        {"queries": 6, "keys": 6, "key_lengths": 4},
        {"queries": 6, "keys": 6, "causal": True, "key_lengths": 4},
        {"queries": 3, "keys": 6, "causal": "lower_right", "key_lengths": 4},
        {"queries": 6, "keys": 6, "causal": True, "prefix_lengths": 3},
    ),
    "segments": (
        {"queries": 7, "keys": 7, "segments": [0, 0, 0, 1, 1, 2, 2]},
        {"queries": 7, "keys": 7, "causal": True, "segments": [0, 0, 0, 1, 1, 2, 2]},
        {"queries": 3, "keys": 7, "segments": ([1, 0, 5], [0, 0, 0, 1, 1, 2, 2])},
    ),
    "padding": ({"queries": 6, "keys": 6, "key_lengths": 4},),
    "triangle": ({"queries": 6, "keys": 6, "causal": True},),
    "decoding": (
        {"queries": 2, "keys": 6, "causal": "lower_right"},
        {"queries": 2, "keys": 6, "causal": True, "q_start": 2},
    ),
    "band": ({"queries": 7, "keys": 7, "causal": True, "window": (2, None)},),
    "local": ({"queries": 7, "keys": 7, "window": (1, 1)},),
    "prefix": ({"queries": 6, "keys": 6, "causal": True, "prefix_lengths": 3},),
    "packed": ({"queries": 7, "keys": 7, "causal": True, "segments": [0, 0, 0, 1, 1, 2, 2]},),
    "dense": ({"queries": 4, "keys": 4, "mask": [True, False, True, False]},),
    "combined": (
        {"queries": 7, "keys": 7, "mask": [True, True, False, True, True, True, True]},
        {
            "queries": 7, "keys": 7, "causal": True, "window": (3, None), "key_lengths": 6,
            "mask": [True, True, False, True, True, True, True],
        },
    ),
}  # fmt: skip

CELL = 20


def cells(options: dict[str, Any]) -> list[str]:
    """The rows of draw_mask()'s text without its labels: one character per key."""
    rows = attentile.draw_mask(**options).splitlines()[-options["queries"] :]
    return [row.split()[-1] for row in rows]


def call_of(options: dict[str, Any]) -> str:
    """The options as one writes them, without the sizes, which the picture shows."""
    given = (f"{name}={value!r}" for name, value in options.items() if name not in ("queries", "keys"))
    return ", ".join(given)


def picture(options: dict[str, Any]) -> str:
    """One mask: rows are queries, columns keys; filled may attend."""
    margin, queries, keys = 22, options["queries"], options["keys"]
    title = f"L = {queries}, S = {keys}: {call_of(options)}"
    drawing = Drawing(margin + keys * CELL + 2, margin + queries * CELL + 2, title)
    for j in range(keys):
        drawing.text(margin + (j + 0.5) * CELL, 14, str(j), "muted", 11, "middle")
    for i, row in enumerate(cells(options)):
        drawing.text(margin - 9, margin + (i + 0.5) * CELL + 4, str(i), "muted", 11, "middle")
        for j, cell in enumerate(row):
            kind = "a" if cell == "#" else "off"
            drawing.rect(margin + j * CELL + 1, margin + i * CELL + 1, CELL - 2, CELL - 2, kind)
    return str(drawing)


def group(name: str) -> str:
    """HTML of a row of pictures, each above its call."""
    figures = [
        f"<figure>{picture(options)}<figcaption>{call_of(options)}</figcaption></figure>" for options in GROUPS[name]
    ]
    return '<div class="masks">\n' + "\n".join(figures) + "\n</div>\n"
