"""Benchmark results: which kind a JSON file is, and the part of it that the page shows.

    python benchmarks/peers.py --json FILE             "peers"
    python -m pytest benchmarks --benchmark-json=FILE  "suite"
    python -m attentile bench --json FILE              "bench"

`shrink` keeps the numbers, the machine and the date, and drops the rest: names of hosts, paths and branches, every
single time. What it returns, it accepts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Results = dict[str, Any]


class UnknownResultsError(ValueError):
    """A file that none of the three programs wrote."""


@dataclass(frozen=True)
class Report:
    """One file of results."""

    name: str
    kind: str
    results: Results


def kind_of(results: Any) -> str:
    """One of peers, suite and bench."""
    keys = results.keys() if isinstance(results, dict) else set()
    for kind, needed in (("peers", {"machine", "cases"}), ("suite", {"machine_info", "benchmarks"}),
                         ("bench", {"config", "rows"})):  # fmt: skip
        if needed <= keys:
            return kind
    raise UnknownResultsError(
        "neither benchmarks/peers.py --json nor pytest --benchmark-json nor python -m attentile bench --json wrote this"
    )


def _only(whole: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: whole[name] for name in names if name in whole}


def _shrink_peers(results: Results) -> Results:
    machine = _only(results["machine"], "processor", "cpus", "threads", "load", "system", "python", "versions", "date")
    cases = {}
    for name, one in results["cases"].items():
        candidates = {
            peer: _only(found, "status", "milliseconds", "gflops") for peer, found in one["candidates"].items()
        }
        cases[name] = _only(one, "case", "ratios", "best_peer") | {"candidates": candidates}
    return {"machine": machine, "cases": cases}


def _shrink_suite(results: Results) -> Results:
    info = results["machine_info"]
    processor = info.get("cpu", {}).get("brand_raw") or info.get("processor") or info.get("machine", "")
    machine = {"processor": processor} | _only(info, "system", "machine", "python_version")
    benchmarks = []
    for one in results["benchmarks"]:
        stats = _only(one["stats"], "min", "median", "rounds")
        benchmarks.append(_only(one, "name", "group") | {"stats": stats, "extra_info": one["extra_info"]})
    return {"machine_info": machine, "datetime": results["datetime"][:16], "benchmarks": benchmarks}


def shrink(results: Results) -> Results:
    """The part that the page shows."""
    kind = kind_of(results)
    if kind == "bench":
        return {"config": results["config"], "rows": results["rows"]} | _only(results, "date", "processor")
    return _shrink_peers(results) if kind == "peers" else _shrink_suite(results)


def load(directory: Path) -> list[Report]:
    """Every results file of a directory, in the order of their names."""
    reports = []
    for path in sorted(directory.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        try:
            reports.append(Report(path.stem, kind_of(results), shrink(results)))
        except UnknownResultsError as error:
            raise UnknownResultsError(f"{path.name}: {error}") from None
    return reports
