"""The performance page: a table and a plot for each file of results in docs/data; what is missing is said."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any

from .results import Report
from .svg import Drawing

# Of benchmarks/peer_calls.py: title and colour. A name that is not here is shown as it is.
OURS = {"ours": ("attentile", "g"), "cache": ("attentile, KVCache", "g soft")}
PEERS = {
    "torch": ("PyTorch", "b"), "flex": ("PyTorch, flex_attention", "hollow b"), "ort": ("ONNX Runtime", "a"),
    "ort-mha": ("ONNX Runtime, MultiHeadAttention", "hollow a"),
    "ort-gqa": ("ONNX Runtime, GroupQueryAttention", "a soft"), "openvino": ("OpenVINO", "d"), "jax": ("JAX", "c"),
    "numpy": ("NumPy", "f"),
}  # fmt: skip

KINDS = {
    "peers": (
        "Against other libraries",
        "python benchmarks/peers.py --json FILE",
        "Each library runs in a process of its own, the processes take turns, and a ratio is taken within each turn: "
        "see `benchmarks/README.md`. A ratio above 1 means that attentile is faster.",
    ),
    "bench": (
        "Share of the machine's peak",
        "python -m attentile bench --json FILE",
        "The peak is that of independent multiply-adds, measured in the same run. It carries over to other machines "
        "better than milliseconds do. The speed-up is over the faster of the formula in NumPy and the NumPy twin.",
    ),
    "suite": (
        "Against NumPy",
        "python -m pytest benchmarks --benchmark-json=FILE",
        "The compiled kernels alongside the formula as people write it in NumPy and the NumPy twin, which stands in "
        "for the kernels without a compiler. The speed-up is over the faster of these two; a dash means that it "
        "was not timed.",
    ),
}


def page(reports: list[Report]) -> str:
    """The whole page as Markdown."""
    parts = [
        "# Performance\n",
        "The tables and plots of the first three sections are made from the JSON files in `docs/data`, which the "
        "benchmarks wrote; those below name the program that measured them. Times belong to one machine on one day: "
        "compare ratios and shares.\n",
    ]
    sections = {"peers": _peers, "bench": _bench, "suite": _suite}
    for kind, (title, command, words) in KINDS.items():
        parts += [f"## {title}\n", f"{words}\n"]
        found = [report for report in reports if report.kind == kind]
        for report in found:
            parts += [f"### {report.name}\n", *sections[kind](report.results)]
        if not found:
            missing = "Not measured yet for this site: no results of this kind are in `docs/data`."
            way = f"`{command}` writes them, `python docs/add_results.py FILE NAME` puts them here."
            parts.append(f":::{{note}}\n{missing} {way}\n:::\n")
    return "\n".join(parts)


def _raw(drawing: Drawing) -> str:
    return f'```{{raw}} html\n<div class="wide">{drawing}</div>\n```\n'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], text_columns: Container[int] = (0,)) -> str:
    names = list(head)
    lines = [names, ["---" if i in text_columns else "--:" for i in range(len(names))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    if value <= 0:
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


# ---- against other libraries ----


def _peers(results: dict[str, Any]) -> list[str]:
    machine, cases = results["machine"], results["cases"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    about = (
        f"{machine['processor']}, {machine['threads']} threads, {machine['system']}, Python {machine['python']}, "
        f"{machine['date']}; {versions or 'no versions were found'}.\n"
    )
    rows = []
    for name, one in cases.items():
        ours, best = one["candidates"].get("ours", {}).get("milliseconds"), one["best_peer"]
        ratio = one["ratios"].get(best)
        rows.append([
            f"`{name}`", shape_of(one["case"]), _number(ours) if ours else "–",
            PEERS.get(best, (best or "–",))[0],
            _number(one["candidates"][best]["milliseconds"]) if best else "–",
            f"**{ratio['median']:.2f}** ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else "–",
        ])  # fmt: skip
    head = ("case", "shape", "ours, ms", "best peer", "its ms", "ratio (extremes)")
    parts = [about, _table(head, rows, (0, 1, 3))]
    if any(one["ratios"] for one in cases.values()):
        parts += [_raw(_peer_plot(cases))]
        wrong = [f"`{name}`: {_titles(one)}" for name, one in cases.items() if _titles(one)]
        if wrong:
            text = "; ".join(wrong)
            parts.append(f"Timed, but left out of the plot because the result was off by more than rounding: {text}.\n")
    else:
        parts.append("No other library was timed in this run.\n")
    return parts


def _titles(one: dict[str, Any]) -> str:
    wrong = [name for name, found in one["candidates"].items() if found["status"] == "wrong"]
    return ", ".join(PEERS.get(name, (name,))[0] for name in wrong)


def _heads(queries: int, keys: int) -> str:
    return f"{queries}/{keys} heads" if queries != keys else f"{queries} head{'s' * (queries > 1)}"


def shape_of(case: dict[str, Any]) -> str:
    """A case of benchmarks/cases.py in words."""
    batch = f"{case['B']} × " if case["B"] > 1 else ""
    extras = [case["dtype"]] if case["dtype"] != "float32" else []
    extras += [name for name in ("causal",) if case.get(name)] + ([f"{case['mask']} mask"] if case.get("mask") else [])
    extras += [f"{name} {case[name]:g}" for name in ("window", "segments", "softcap") if case.get(name)]
    extras += [f"queries × {case['peak']:g}"] if case.get("peak", 1) != 1 else []
    extras += ["ALiBi"] if case.get("alibi") else []
    extras += ["and gradients"] if case.get("train") else []
    return ", ".join(
        [f"{batch}{_heads(case['Hq'], case['Hkv'])}", f"{case['L']} × {case['S']}", f"d = {case['D']}", *extras]
    )


def _peer_plot(cases: dict[str, Any]) -> Drawing:
    """A row per case, a dot per peer at its time over ours, on a logarithmic scale."""
    points = {
        name: {
            peer: ratio["median"] for peer, ratio in one["ratios"].items()
            if peer not in OURS and one["candidates"][peer]["status"] == "ready"
        }
        for name, one in cases.items()
    }  # fmt: skip
    used = [peer for peer in [*PEERS, *sorted(_all(points) - PEERS.keys())] if peer in _all(points)]
    values = [value for row in points.values() for value in row.values()] or [1.0]
    axis = _Log(105, 655, min(0.8, *values) / 1.1 if len(values) > 1 else 0.5, max(2.0, *values) * 1.1)
    legend = 18 * -(-len(used) // 2)
    drawing = Drawing(680, legend + 24 * len(points) + 70, "Time of each peer over that of attentile, by case")
    for i, peer in enumerate(used):
        title, colour = PEERS.get(peer, (peer, "g"))
        drawing.circle(14 + i % 2 * 340, 12 + i // 2 * 18, 5, colour)
        drawing.text(25 + i % 2 * 340, 16 + i // 2 * 18, title, "", 11.5)
    top, bottom = legend + 14, legend + 24 * len(points) + 22
    axis.draw(drawing, top, bottom, "time of the peer / time of attentile")
    for i, (name, row) in enumerate(points.items()):
        y = top + 18 + 24 * i
        drawing.text(96, y + 4, name, "code", 11.5, "end")
        drawing.line([(105, y), (655, y)], "line faint")
        for peer in used:
            if peer in row:
                title, colour = PEERS.get(peer, (peer, "g"))
                drawing.circle(axis(row[peer]), y, 5, colour, f"{title}: {row[peer]:.2f}")
    return drawing


def _all(points: dict[str, dict[str, float]]) -> set[str]:
    return {peer for row in points.values() for peer in row}


class _Log:
    """A logarithmic axis from left to right."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self._left, self._low = left, math.log(low)
        self._scale = (right - left) / (math.log(high) - self._low)
        self._range = low, high

    def __call__(self, value: float) -> float:
        return self._left + (math.log(value) - self._low) * self._scale

    def draw(self, drawing: Drawing, top: float, bottom: float, label: str) -> None:
        ticks = [digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5)]
        for tick in ticks:
            if self._range[0] <= tick <= self._range[1]:
                drawing.line([(self(tick), top), (self(tick), bottom)], "line" if tick == 1 else "line faint")
                drawing.text(self(tick), bottom + 14, f"{tick:g}", "muted", 11, "middle")
        drawing.text(380, bottom + 32, label, "muted", 11.5, "middle")


# ---- share of the peak, and against NumPy ----


def _bars(rows: list[tuple[str, float, str]], high: float, title: str) -> Drawing:
    """Named bars with their values written behind them."""
    drawing = Drawing(680, 24 * len(rows) + 12, title)
    for i, (name, value, text) in enumerate(rows):
        y, width = 6 + 24 * i, max(1.0, 300 * value / high)
        drawing.text(300, y + 14, name, "", 11, "end")
        drawing.rect(308, y + 2, width, 16, "a")
        drawing.text(314 + width, y + 14, text, "muted", 11)
    return drawing


def _bench_name(shape: dict[str, Any]) -> str:
    heads = _heads(shape["heads"], shape["kv_heads"])
    extras = (["causal"] if shape["causal"] else []) + (["float64"] if shape["dtype"] == "float64" else [])
    parts = [f"{shape['batch']} × {heads}", f"{shape['queries']} × {shape['keys']}", f"d = {shape['width']}"]
    return ", ".join(parts + extras)


def _bench(results: dict[str, Any]) -> list[str]:
    config, rows = results["config"], results["rows"]
    about = (
        f"{results.get('processor', config['machine'])}, {config['isa']}, Python {config['python']}, "
        f"NumPy {config['numpy']}, {results.get('date', 'date not recorded')}.\n"
    )
    table = []
    for row in rows:
        peak = "–" if row["peak_percent"] is None else f"{row['peak_percent']:.0f}"
        table.append([
            _bench_name(row["shape"]), str(row["threads"]), _number(row["ms"]), f"{row['gflops']:.0f}", peak,
            f"{row['gbytes_per_second']:.1f}" if row["shape"]["queries"] == 1 else "–",
            _number(row.get("formula_ms", row.get("numpy_ms"))),  # older files call it so, and have no twin
            _number(row["twin_ms"]) if "twin_ms" in row else "–", f"{row['speedup']:.2f}",
        ])  # fmt: skip
    head = ("problem", "threads", "ms", "GFLOP/s", "% of peak", "GB/s (one row)", "formula, ms", "twin, ms", "speed-up")
    parts = [about, _table(head, table)]
    known = [row for row in rows if row["peak_percent"] is not None]
    bars = [(_bench_name(row["shape"]), row["peak_percent"], f"{row['peak_percent']:.0f} %") for row in known]
    return parts + ([_raw(_bars(bars, 100, "Share of the FMA peak"))] if bars else [])


def _suite(results: dict[str, Any]) -> list[str]:
    machine = results["machine_info"]
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in results["benchmarks"]:
        groups[one["group"] or one["name"]][one["extra_info"].get("backend", one["name"])] = one
    isas = sorted({one["extra_info"].get("isa", "") for one in results["benchmarks"]} - {"", "none (NumPy)"})
    about = (
        f"{machine['processor']}, {', '.join(isas) or 'no compiled kernels'}, {machine.get('system', '')}, "
        f"Python {machine.get('python_version', '')}, {results['datetime'].replace('T', ' ')}.\n"
    )
    rows, bars = [], []
    for group, sides in groups.items():
        medians = {side: one["stats"]["median"] for side, one in sides.items()}
        candidates = ("compiled", "formula", "numpy")
        cells = [_number(medians[side] * 1e3) if side in medians else "–" for side in candidates]
        others = [medians[side] for side in candidates[1:] if side in medians]
        speedup = min(others) / medians["compiled"] if "compiled" in medians and others else None
        rows.append([group, *cells, f"{speedup:.2f}" if speedup else "–"])
        if speedup:
            bars.append((group if len(group) < 46 else group[:45] + "…", speedup, f"{speedup:.2f} ×"))
    parts = [about, _table(("shape", "compiled, ms", "formula, ms", "twin, ms", "speed-up"), rows)]
    if bars:
        highest = max(value for _, value, _ in bars)
        parts.append(_raw(_bars(bars, highest, "Compiled kernels against the faster of formula and twin")))
    return parts
