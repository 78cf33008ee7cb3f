"""draw_mask() against drawings by hand, and large ones against the mask itself."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from helpers import most_allocated
from oracle import allowed_keys

from attentile import draw_mask

DRAWINGS = [
    ({"queries": 3, "keys": 5, "causal": "upper_left"}, "  01234\n0 #....\n1 ##...\n2 ###.."),
    ({"queries": 3, "keys": 5, "causal": "lower_right"}, "  01234\n0 ###..\n1 ####.\n2 #####"),
    ({"queries": 2, "keys": 5, "causal": True, "q_start": 1}, "  01234\n0 ##...\n1 ###.."),
    ({"queries": 4, "keys": 4, "window": (1, 1)}, "  0123\n0 ##..\n1 ###.\n2 .###\n3 ..##"),
    ({"queries": 3, "keys": 3, "segments": [0, 1, 0]}, "  012\n0 #.#\n1 .#.\n2 #.#"),
    ({"queries": 3, "keys": 3, "segments": [0, 1, 1], "key_lengths": 2}, "  012\n0 #..\n1 .#.\n2 .#."),
    ({"queries": 3, "keys": 3, "causal": True, "prefix_lengths": 2}, "  012\n0 ##.\n1 ##.\n2 ###"),
    ({"queries": 2, "keys": 3, "mask": [True, False, True]}, "  012\n0 #.#\n1 #.#"),
]


@pytest.mark.parametrize(("options", "text"), DRAWINGS)
def test_drawing(options, text):
    assert draw_mask(**options) == text


def test_drawing_with_two_digits():
    lines = draw_mask(queries=11, keys=12, causal="upper_left").splitlines()
    assert lines[:3] == ["   0         1", "   012345678901", " 0 #..........."]
    assert lines[-1] == "10 ###########."


def test_large_drawing_is_sampled_down():
    lines = draw_mask(queries=65, keys=130, causal="upper_left").splitlines()
    assert lines[0].startswith("one character: 2 queries x 3 keys")
    assert len(lines[3:]) == 33
    assert [line.split()[1][:3] for line in lines[3:6]] == ["+..", "#+.", "#+."]  # 0-1, 2-3, 4-5
    assert set(draw_mask(queries=1000, keys=999).splitlines()[-1].split()[1]) == {"#"}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"queries": 0}, ValueError, "^draw_mask: queries is 0"),
        ({"window": 3}, TypeError, "^draw_mask: window is 3"),
        ({"causal": True, "keys": 4}, ValueError, "^draw_mask: causal=True with 3 queries and 4 keys is ambiguous"),
        ({"mask": [[1, 0, 1]]}, TypeError, "^draw_mask: mask has dtype int64"),
        ({"mask": np.ones((2, 3), bool)}, ValueError, r"^draw_mask: mask has shape \(2, 3\)"),
        ({"key_lengths": [1, 2]}, ValueError, "^draw_mask: key_lengths has shape"),
        ({"file": "x.gif"}, ValueError, "^draw_mask: file is 'x.gif'; its name must end with .png or .svg"),
    ],
)
def test_drawing_errors(options, error, words):
    with pytest.raises(error, match=words):
        draw_mask(**{"queries": 3, "keys": 3, **options})


def test_a_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^draw_mask: file= needs matplotlib .*: pip install matplotlib"):
        draw_mask(queries=3, keys=3, file=tmp_path / "x.png")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture(tmp_path, kind):
    file = tmp_path / f"x.{kind}"
    assert draw_mask(queries=300, keys=2000, causal="lower_right", file=file)
    assert file.stat().st_size > 1000


RNG = np.random.default_rng(71)
LARGE = {
    "nothing": {},
    "causal": {"causal": "lower_right"},
    "window": {"causal": "upper_left", "window": (37, None)},
    "both sides": {"window": (5, 90), "q_start": -20},
    "lengths": {"causal": "lower_right", "key_lengths": 333},
    "no key": {"key_lengths": 0},
    "prefix": {"causal": "upper_left", "prefix_lengths": 77},
    "segments": {"segments": (np.arange(300) // 50, np.arange(700) // 90)},
    "scattered segments": {"segments": (np.arange(300) % 3, np.arange(700) % 3), "causal": "lower_right"},
    "mask of keys": {"mask": RNG.random(700) < 0.9, "causal": "lower_right", "window": (100, 0)},
    "mask of one row": {"mask": RNG.random((1, 700)) < 0.9},
    "mask of queries": {"mask": RNG.random((300, 1)) < 0.5},
    "mask": {"mask": RNG.random((300, 700)) < 0.95, "causal": "lower_right"},
    "two masks": {"mask": RNG.random((300, 700)) < 0.95, "segments": (np.arange(300) % 3, np.arange(700) % 3)},
}


@pytest.mark.parametrize("swapped", [False, True], ids=["more_keys", "more_queries"])
@pytest.mark.parametrize("kind", LARGE)
def test_a_character_for_many_pairs(kind, swapped):
    options, queries, keys = dict(LARGE[kind]), 300, 700
    if swapped:
        queries, keys = keys, queries
        if "segments" in options:
            options["segments"] = options["segments"][::-1]
        if "mask" in options:
            options["mask"] = np.atleast_2d(options["mask"]).T
        if "key_lengths" in options:
            options["key_lengths"] = min(options["key_lengths"], keys)
    allowed = allowed_keys((1, 1, queries, keys), **options)[0, 0]
    down, across = -(-queries // 64), -(-keys // 64)
    expected = []
    for i in range(0, queries, down):
        cells = [allowed[i : i + down, j : j + across] for j in range(0, keys, across)]
        expected.append("".join("#" if cell.all() else "+" if cell.any() else "." for cell in cells))
    lines = draw_mask(queries=queries, keys=keys, **options).splitlines()
    assert [line.split()[1] for line in lines[-len(expected) :]] == expected


@pytest.mark.parametrize("kind", ["causal", "window", "lengths", "prefix", "mask of keys", "segments"])
def test_memory_grows_with_the_sides_only(kind):
    """131072 x 131072 pairs are 16 GiB as a mask."""
    n = 131072
    options = LARGE[kind] | {
        "segments": {"segments": np.arange(n) // 1000},
        "mask of keys": {"mask": np.arange(n) < 9},
    }.get(kind, {})
    assert most_allocated(lambda: draw_mask(queries=n, keys=n, **options)) < 32 * 2**20
    assert len(draw_mask(queries=n, keys=n, **options).splitlines()) == 64 + 3


@pytest.mark.parametrize("rows", [255, 256, 1000])
def test_a_cell_of_many_rows(rows):
    """Rows are counted in bytes: 255 at a time."""
    mask = np.ones((64 * rows, 2), bool)
    mask[-1, 1] = False
    last = draw_mask(queries=64 * rows, keys=2, mask=mask).splitlines()[-1]
    assert last.endswith(" #+")
