"""The picture of the README and the first page: each library's milliseconds in four cases of docs/data/peers.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .svg import Drawing

# What is drawn: a case of benchmarks/cases.py and its title in two lines.
CASES = {
    "bert512": ("BERT, 512 tokens", "12 heads of 64"),
    "gpt2-1k": ("GPT-2, 1024 tokens", "12 heads of 64, causal"),
    "window-8k": ("8192 tokens, causal", "window of 256"),
    "dec-llama": ("one new token, Llama", "32/8 heads, 4096 keys"),
}
# A library and its candidates, of which the fastest is drawn: names of benchmarks/peer_calls.py.
LIBRARIES = {
    "attentile": ("ours", "cache"),
    "PyTorch": ("torch", "flex"),
    "ONNX Runtime": ("ort", "ort-mha", "ort-gqa"),
    "OpenVINO": ("openvino",),
    "JAX": ("jax",),
    "NumPy": ("numpy",),
}
TIMES = 5  # a bar ends at this multiple of ours


def milliseconds(case: dict[str, Any], candidates: tuple[str, ...]) -> float | None:
    """The fastest of a library's candidates whose result was right."""
    found = [case["candidates"].get(name, {}) for name in candidates]
    return min((one["milliseconds"] for one in found if one.get("status") == "ready"), default=None)


def _written(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def drawing(results: dict[str, Any]) -> Drawing:
    """A panel of bars per case; lower is better."""
    machine, cases = results["machine"], results["cases"]
    d = Drawing(680, 208, "Milliseconds of attentile and of other libraries in four cases; lower is better")
    left, wide, bar, top = 100, 145, 90, 46
    for row, library in enumerate(LIBRARIES):
        d.text(left - 8, top + 22 * row + 13, library, "" if row == 0 else "muted", 11.5, "end")
    for column, (name, titles) in enumerate(CASES.items()):
        x = left + wide * column
        d.text(x, 16, titles[0], "", 12)
        d.text(x, 31, titles[1], "muted", 10.5)
        ours = milliseconds(cases[name], LIBRARIES["attentile"])
        assert ours is not None
        for row, candidates in enumerate(LIBRARIES.values()):
            found, y = milliseconds(cases[name], candidates), top + 22 * row
            if found is None:
                continue
            share = min(found / (TIMES * ours), 1.0)
            d.rect(x, y + 2, bar * share, 15, "a" if row == 0 else "bar")
            d.text(x + bar * share + 4, y + 14, _written(found) + (" »" if share == 1 else ""), "muted", 10.5)
    day = machine["date"].split(" ")[0]
    about = f"{machine['processor']}, {machine['threads']} threads, float32, {day}"
    d.text(340, 198, f"Milliseconds, lower is better; » the bar is cut short. {about}", "muted", 11, "middle")
    return d


def of(docs: Path) -> Drawing:
    """The picture of the committed results."""
    return drawing(json.loads((docs / "data" / "peers.json").read_text(encoding="utf-8")))


def picture_of_the_readme(docs: Path) -> tuple[Path, str]:
    """(file, what must be in it)."""
    style = (docs / "_static" / "site.css").read_text(encoding="utf-8")
    return docs / "_static" / "speeds.svg", of(docs).alone(style)
