"""A drawing as inline SVG. Colours are classes of _static/site.css, so that the theme decides them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# The variables of the site's theme that the style sheet uses, in a light theme.
_LIGHT = {
    "font-stack": "system-ui, sans-serif",
    "font-stack--monospace": "monospace",
    "color-foreground-primary": "#1f2328",
    "color-foreground-muted": "#59636e",
    "color-foreground-border": "#d1d9e0",
    "color-background-secondary": "#f6f8fa",
    "color-background-border": "#e6e8eb",
}


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Drawing:
    """Shapes in the order they are added; y grows downwards."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 2) -> None:
        numbers = zip(("x", "y", "width", "height", "rx"), (x, y, width, height, radius), strict=True)
        attributes = " ".join(f'{name}="{_number(value)}"' for name, value in numbers)
        self._parts.append(f'<rect class="{kind}" {attributes}/>')

    def circle(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        place = f'cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"'
        self._parts.append(f'<circle class="{kind}" {place}>{inside}</circle>')

    def text(self, x: float, y: float, text: str, kind: str = "", size: float = 12, anchor: str = "start") -> None:
        """Text whose base line is at y."""
        place = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def line(self, points: Iterable[tuple[float, float]], kind: str = "line") -> None:
        joined = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{joined}"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A straight arrow along one axis."""
        self.line([(x0, y0), (x1, y1)])
        across, down = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        back, side = 6, 3.5
        corners = [
            (x1, y1),
            (x1 - back * across - side * down, y1 - back * down - side * across),
            (x1 - back * across + side * down, y1 - back * down + side * across),
        ]
        joined = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        self._parts.append(f'<polygon class="head" points="{joined}"/>')

    def boxed(self, x: float, y: float, width: float, height: float, lines: Iterable[str], kind: str = "box") -> None:
        """A box with centred lines of text."""
        self.rect(x, y, width, height, kind)
        written = list(lines)
        top = y + height / 2 - 7.5 * (len(written) - 1) + 4
        for i, line in enumerate(written):
            style = "on-fill" if kind in "abcdefg" else "" if i == 0 else "muted"
            self.text(x + width / 2, top + 15 * i, line, style, 12 if i == 0 else 11, "middle")

    def __str__(self) -> str:
        # The style sheet lets it shrink with the page (height: auto), the view box keeps its proportions.
        size = f'viewBox="0 0 {_number(self.width)} {_number(self.height)}" width="{_number(self.width)}"'
        head = f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self._parts, "</svg>"])

    def alone(self, style_sheet: str) -> str:
        """The drawing as a file of its own: with the rules that it would have on the site, on a light ground, because a
        page that shows it as an image may be light or dark and does not tell it."""
        rules = "\n".join(line for line in style_sheet.splitlines() if line.startswith(".drawing"))
        variables = "; ".join(f"--{name}: {value}" for name, value in _LIGHT.items())
        ground = f'<rect width="{_number(self.width)}" height="{_number(self.height)}" rx="6" fill="#fff"/>'
        title, end = "</title>", f"</title>\n<style>\n.drawing {{ {variables} }}\n{rules}\n</style>\n{ground}"
        return str(self).replace(title, end, 1) + "\n"
