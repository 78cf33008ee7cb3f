"""The diagrams of the page about the kernel. Numbers in them are the code's: see the imports and tests/test_docs.py."""

from __future__ import annotations

from collections.abc import Callable

from attentile.core.constants import CHUNK, PANEL

from .svg import Drawing

LANES, VECTORS = 16, 3  # of float32 with AVX-512: kernels/avx512.c
BLOCK = LANES * VECTORS


def overview() -> str:
    """One block of rows through a call."""
    d = Drawing(680, 190, "A block of query rows is packed, meets the keys and values chunk by chunk, and is unpacked")
    d.boxed(5, 70, 92, 50, ["Q", "48 rows"])
    d.boxed(125, 70, 92, 50, ["pack", "transposed"], "a")
    d.boxed(245, 70, 112, 50, ["scores", "Sᵀ = K Qᵀ"], "a")
    d.boxed(385, 70, 102, 50, ["softmax", "exp2(S − max)"], "a")
    d.boxed(515, 70, 75, 50, ["values", "O += V P"], "a")
    d.boxed(618, 70, 57, 50, ["out", "÷ sum"])
    for x0, x1 in ((97, 125), (217, 245), (357, 385), (487, 515), (590, 618)):
        d.arrow(x0, 95, x1, 95)
    d.boxed(258, 8, 86, 34, ["K, in place"], "c")
    d.arrow(301, 42, 301, 70)
    d.boxed(509, 8, 87, 34, ["V, in place"], "c")
    d.arrow(552, 42, 552, 70)
    d.line([(552, 120), (552, 150), (301, 150), (301, 126)])
    d.arrow(301, 130, 301, 120)
    d.text(426, 168, f"the next {CHUNK} keys that some row of the block may see", "muted", 12, "middle")
    return str(d)


def lanes() -> str:
    """One step of the scores: lanes are rows."""
    d = Drawing(680, 250, "One number of a key is broadcast and multiplied with the same width of 16 query rows")
    cell, left = 23, 125
    d.text(5, 40, "Qᵀ[d]", "code", 13)
    d.text(5, 57, "packed once", "muted", 11)
    d.text(5, 112, "K[j][d]", "code", 13)
    d.text(5, 129, "read in place", "muted", 11)
    d.text(5, 202, "Sᵀ[j]", "code", 13)
    d.text(5, 219, "stays in registers", "muted", 11)
    for r in range(LANES):
        x = left + r * cell
        d.rect(x, 28, cell - 3, 28, "a")
        d.text(x + cell / 2 - 1.5, 20, str(r), "muted", 10, "middle")
        d.rect(x, 100, cell - 3, 28, "c")
        d.rect(x, 188, cell - 3, 28, "b")
        d.text(x + cell / 2 - 1.5, 82, "×", "", 13, "middle")
        d.text(x + cell / 2 - 1.5, 163, "+", "", 13, "middle")
    right = left + LANES * cell + 14
    d.text(right, 46, "d of 16 rows", "muted", 12)
    d.text(right, 118, "one number, 16 times", "muted", 12)
    d.text(right, 206, "+= for d = 0, 1, 2, …", "muted", 12)
    return str(d)


def visited() -> list[list[str]]:
    """What a block of rows does with a chunk of keys, for 768 causal rows: "all", "edge" or "none" of them seen."""
    grid = []
    for first in range(0, 768, BLOCK):
        last = first + BLOCK - 1
        keys = range(0, 768, CHUNK)
        grid.append(["none" if key > last else "all" if key + CHUNK - 1 <= first else "edge" for key in keys])
    return grid


def chunks() -> str:
    """Blocks of rows against chunks of keys under a causal mask."""
    d = Drawing(680, 330, "768 x 768 causal scores: chunks that run plain, chunks at the edge, chunks never visited")
    left, top, wide, high = 120, 40, 110, 16
    kinds = {"all": "a", "edge": "a soft", "none": "off"}
    for c in range(3):
        label = f"keys {c * CHUNK}–{(c + 1) * CHUNK - 1}"
        d.text(left + (c + 0.5) * wide, 30, label, "muted", 11, "middle")
    for b, row in enumerate(visited()):
        for c, kind in enumerate(row):
            d.rect(left + c * wide, top + b * (high + 1), wide - 2, high, kinds[kind])
        if b % 5 == 0:
            d.text(left - 8, top + b * (high + 1) + 12, f"rows {b * BLOCK}–{(b + 1) * BLOCK - 1}", "muted", 11, "end")
    d.line([(left, top), (left + 3 * wide, top + 16 * (high + 1))], "line")
    legend = (
        ("all", "every row sees every key:", "plain tiles"),
        ("edge", "the edge: lanes are tested", "where rows differ"),
        ("none", "no row sees any key:", "never read"),
    )
    for i, (kind, one, two) in enumerate(legend):
        d.rect(480, 60 + i * 70, 22, 22, kinds[kind])
        d.text(512, 68 + i * 70, one, "", 11.5)
        d.text(512, 84 + i * 70, two, "", 11.5)
    return str(d)


def online() -> str:
    """Chunks merged from the left."""
    d = Drawing(680, 200, "Each chunk gives a maximum, a sum and values; they merge into the running ones")
    for i, x in enumerate((5, 235, 465)):
        d.boxed(x, 8, 130, 52, [f"chunk {i}", "m, l, O of 256 keys"], "c")
        d.arrow(x + 65, 60, x + 65, 112)
        d.boxed(x, 112, 130, 52, ["m, l, O", "of all keys so far"], "a")
        if i:
            d.arrow(x - 100, 138, x, 138)
            d.text(x - 50, 128, "× 2^(m − m′)", "muted", 11, "middle")
            d.text(x + 74, 90, "× 2^(mᵢ − m′)", "muted", 11)
    d.arrow(595, 138, 628, 138)
    d.text(633, 142, "O / l", "code", 13)
    below = "m: largest score · l: sum of 2^(s − m) · O: the values with these weights · m′: the new m"
    d.text(340, 188, below, "muted", 11.5, "middle")
    return str(d)


def panels() -> str:
    """Few rows: lanes are keys, stored as panels."""
    d = Drawing(680, 262, "A page of the cache: keys as panels of 16, transposed, so that 16 keys are one vector")
    cell, left, top = 18, 40, 44
    d.text(left, 18, "one panel: 16 keys, stored width by width", "", 12)
    for r in range(PANEL):
        d.text(left + r * cell + 8, 36, str(r), "muted", 9.5, "middle")
    for w in range(5):
        for r in range(PANEL):
            d.rect(left + r * cell, top + w * cell, cell - 2, cell - 2, "a" if w == 0 else "a soft")
        d.text(left - 8, top + w * cell + 12, f"d {w}" if w == 0 else str(w), "muted", 10.5, "end")
    d.text(left + 8 * cell, top + 5 * cell + 12, "⋮", "muted", 12, "middle")
    d.text(left, top + 5 * cell + 34, "a row of the panel is one aligned vector: no shuffle", "muted", 11.5)
    d.text(400, 18, f"one page: {CHUNK} tokens of every key head", "", 12)
    for h, y in ((0, 36), (1, 58)):
        d.text(400, y + 14, f"keys, head {h}", "muted", 11)
        for p in range(CHUNK // PANEL):
            d.rect(490 + p * 11.4, y, 9.8, 18, "a")
    for h, y in ((0, 84), (1, 106)):
        d.text(400, y + 14, f"values, head {h}", "muted", 11)
        d.rect(490, y, 181, 18, "c")
    d.text(490, 142, "values lie row after row", "muted", 11.5)
    d.text(5, 212, "q", "code", 13)
    d.boxed(30, 196, 95, 24, ["one number"], "c")
    d.text(140, 213, "×  16 keys of that width  →  16 scores at once; then lanes are the columns of V", "", 12)
    below = "Every row of K and V is read once for all query rows of its group; the next ones are fetched meanwhile."
    d.text(5, 246, below, "muted", 11.5)
    return str(d)


def pages() -> str:
    """The tables of a cache and of its fork."""
    d = Drawing(680, 262, "Two caches whose tables point to the same pages, except for the one that was written to")
    left, step, wide = 170, 130, 90
    for y, name, tokens, letters in ((14, "cache", "600 tokens", "ABC"), (204, "its fork", "620 tokens", "ABD")):
        d.text(5, y + 13, name, "", 12)
        d.text(5, y + 28, tokens, "muted", 11)
        for i, letter in enumerate(letters):
            d.rect(left + i * step, y, wide, 30)
            d.text(left + i * step + wide / 2, y + 20, letter, "code", 13, "middle")
        d.rect(left + 3 * step, y, wide, 30, "off")
    d.text(5, 132, "pages", "", 12)
    for i, (letter, tokens) in enumerate((("A", "tokens 0–255"), ("B", "256–511"))):
        x = left + i * step
        d.boxed(x, 100, wide, 48, [f"page {letter}", tokens], "a")
        d.arrow(x + wide / 2, 44, x + wide / 2, 100)
        d.arrow(x + wide / 2, 204, x + wide / 2, 148)
    x = left + 2 * step
    d.boxed(x, 76, wide, 44, ["page C", "512–599"], "b")
    d.arrow(x + wide / 2, 44, x + wide / 2, 76)
    d.boxed(x, 128, wide, 44, ["page D", "512–619"], "c")
    d.arrow(x + wide / 2, 204, x + wide / 2, 172)
    d.text(x + wide + 14, 145, "copied from C when", "muted", 11)
    d.text(x + wide + 14, 160, "the fork first wrote", "muted", 11)
    d.text(5, 255, "A fork copies no token. A longer cache is one more page, never a larger copy of it.", "muted", 11.5)
    return str(d)


def pool() -> str:
    """Who runs which task when a worker comes late."""
    d = Drawing(680, 190, "The caller and a worker take tasks by one ticket; a worker that comes late costs nothing")
    starts, tasks = {"caller": 0, "worker 1": 150, "worker 2": 480}, 9
    places = {"caller": (28, "a"), "worker 1": (74, "c"), "worker 2": (120, "b")}
    for name, (y, _) in places.items():
        d.text(5, y + 20, name, "", 12)
        d.line([(90, y + 30), (660, y + 30)], "line faint")
    end = 0
    for number in range(tasks):  # the ticket: whoever is free first takes the next task
        name = min(starts, key=lambda thread: starts[thread])
        y, kind = places[name]
        d.boxed(95 + starts[name], y, 58, 28, [str(number)], kind)
        starts[name] += 60
        end = max(end, starts[name])
    assert starts["worker 2"] == 480, "the drawing is about a worker that comes too late for any task"
    d.line([(95 + end, 20), (95 + end, 150)])
    d.text(101 + end, 32, "the caller returns: all tasks", "muted", 11)
    d.text(101 + end, 47, "that were taken are done", "muted", 11)
    d.text(575, 142, "wakes: no task", "muted", 11)
    d.text(575, 156, "left, no harm", "muted", 11)
    d.text(5, 180, "Numbers are tasks in the order in which the ticket handed them out.", "muted", 11.5)
    return str(d)


ALL: dict[str, Callable[[], str]] = {
    "overview": overview, "lanes": lanes, "chunks": chunks, "online": online, "panels": panels, "pages": pages,
    "pool": pool,
}  # fmt: skip
