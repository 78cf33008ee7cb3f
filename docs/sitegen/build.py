"""Everything generated, into one folder."""

from __future__ import annotations

from pathlib import Path

from . import diagrams, formula, masks, pages, performance, results, speeds

DRAWINGS = {**diagrams.ALL, **formula.ALL}


def generate(docs: Path, out: Path) -> None:
    """Fill `out` from the code, the results and the repository that `docs` lies in."""
    out.mkdir(parents=True, exist_ok=True)
    for name in masks.GROUPS:
        (out / f"masks-{name}.html").write_text(masks.group(name), encoding="utf-8")
    drawn = {name: draw() for name, draw in DRAWINGS.items()} | {"speeds": str(speeds.of(docs))}
    for name, drawing in drawn.items():
        (out / f"{name}.html").write_text(f'<div class="wide">{drawing}</div>\n', encoding="utf-8")
    pages.write(docs.parent, out)
    (out / "performance.md").write_text(performance.page(results.load(docs / "data")), encoding="utf-8")
