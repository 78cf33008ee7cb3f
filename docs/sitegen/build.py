"""Everything generated, into one folder."""

from __future__ import annotations

from pathlib import Path

from . import diagrams, masks, pages, performance, results


def generate(docs: Path, out: Path) -> None:
    """Fill `out` from the code, the results and the repository that `docs` lies in."""
    out.mkdir(parents=True, exist_ok=True)
    for name in masks.GROUPS:
        (out / f"masks-{name}.html").write_text(masks.group(name), encoding="utf-8")
    for name, draw in diagrams.ALL.items():
        (out / f"{name}.html").write_text(f'<div class="wide">{draw()}</div>\n', encoding="utf-8")
    pages.write(docs.parent, out)
    (out / "performance.md").write_text(performance.page(results.load(docs / "data")), encoding="utf-8")
