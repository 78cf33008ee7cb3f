"""Check a built site: python docs/check_site.py FOLDER

Every link inside the site leads to a file and to a place in it. Nothing is loaded from elsewhere: scripts, styles,
fonts and pictures all lie in the folder, so that the site works without a net. Links that a reader may click to go
elsewhere are counted, not followed.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("video", "src")}
NOT_LOADED = {"search", "index", "next", "prev", "canonical"}  # kinds of <link> that a browser does not fetch
FROM_ELSEWHERE = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])(?:https?:)?//[^'\")]*", re.IGNORECASE)


class Page(HTMLParser):
    """The identifiers of a page, its links, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        for name, value in values.items():
            if (tag, name) in LOADED and values.get("rel") not in NOT_LOADED:
                self.loaded.append(value)


def problems_of(root: Path) -> tuple[list[str], int]:
    """(what is wrong, number of links to elsewhere)."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
    found: list[str] = [] if pages else [f"{root}: no page at all"]
    elsewhere = 0
    for path, page in pages.items():
        name = path.relative_to(root)
        for target in page.loaded:
            parts = urlsplit(target)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                found.append(f"{name}: loads {target}")
            elif not (path.parent / unquote(parts.path)).is_file():
                found.append(f"{name}: {target} is not there")
        for target in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                elsewhere += 1
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not to.is_file():
                found.append(f"{name}: {target} leads nowhere")
            elif parts.fragment and to.suffix == ".html" and unquote(parts.fragment) not in pages[to].ids:
                found.append(f"{name}: {target} leads to no place in its page")
    for path in [*root.rglob("*.css"), *pages]:
        hits = FROM_ELSEWHERE.findall(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(root)}: loads {hit}" for hit in hits]
    return found, elsewhere


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    found, elsewhere = problems_of(Path(sys.argv[1]).resolve())
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} problems; {elsewhere} links to elsewhere, not followed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
