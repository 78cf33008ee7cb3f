"""Figures on the documentation site and in the README: as the programs that measured them wrote them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import DOCS, ROOT

from attentile.runtime import backend

sys.path.insert(0, str(DOCS))

from add_results import add
from sitegen import performance, results, speeds


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Path]:
    """A file of each kind, written by the program that writes it."""
    folder = tmp_path_factory.mktemp("measured")
    files = {kind: folder / f"{kind}.json" for kind in ("peers", "bench", "suite")}
    peers = ["benchmarks/peers.py", "--cases", "tiny-32", "--with", "ours,numpy", "--rounds", "2", "--ms", "2"]
    bench = ["-m", "attentile", "bench", "--shape", "1,4,2,1,64,32", "--seconds", "0.01"]
    suite = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "benchmarks/test_bench_attention.py", "-k", "tiny"]
    suite += ["--benchmark-min-rounds=1", "--benchmark-max-time=0.01", "--benchmark-warmup=off"]
    # Else pytest-benchmark would time nothing.
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    for arguments in (
        [*peers, "--threads", "1", "--json", str(files["peers"])],
        [*bench, "--json", str(files["bench"])],
        [*suite, f"--benchmark-json={files['suite']}"],
    ):
        command = [sys.executable, *arguments]
        run = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
    return files


def test_performance_page_of_what_was_measured(measured, tmp_path):
    for kind, file in measured.items():
        add(file, f"a run of {kind}", tmp_path)
    text = performance.page(results.load(tmp_path))
    assert "Not measured" not in text
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == ["a run of peers", "a run of bench", "a run of suite"]
    peers = json.loads(measured["peers"].read_text())["cases"]["tiny-32"]
    row = next(line for line in text.splitlines() if line.startswith("| `tiny-32`"))
    assert f"**{peers['ratios']['numpy']['median']:.2f}**" in row
    assert f"<title>NumPy: {peers['ratios']['numpy']['median']:.2f}</title>" in text
    bench = json.loads(measured["bench"].read_text())["rows"][0]
    times = [performance._number(bench[name]) for name in ("formula_ms", "twin_ms")]
    assert f"| {bench['gbytes_per_second']:.1f} | {' | '.join(times)} | {bench['speedup']:.2f} |" in text
    benchmarks = json.loads(measured["suite"].read_text())["benchmarks"]
    medians = {one["extra_info"]["backend"]: one["stats"]["median"] for one in benchmarks if "tiny-32" in one["group"]}
    if backend.active is not None:
        times = [performance._number(medians[name] * 1e3) for name in ("compiled", "formula", "numpy")]
        speedup = min(medians["formula"], medians["numpy"]) / medians["compiled"]
        assert f"| {' | '.join(times)} | {speedup:.2f} |" in text
        told = {one["extra_info"].get("speed-up") for one in benchmarks if "tiny-32" in one["group"]}
        assert told == {None, round(speedup, 3)}


def test_performance_page_of_files_without_the_formula(measured, tmp_path):
    """As they were written before it was timed: `numpy_ms` was the formula of the speed table, the suite had none."""
    bench, suite = (json.loads(measured[kind].read_text()) for kind in ("bench", "suite"))
    row = bench["rows"][0]
    row["numpy_ms"] = row.pop("formula_ms")
    del row["twin_ms"]
    suite["benchmarks"] = [one for one in suite["benchmarks"] if one["extra_info"]["backend"] != "formula"]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    text = performance.page(results.load(tmp_path))
    assert f"| {performance._number(row['numpy_ms'])} | – | {row['speedup']:.2f} |" in text
    medians = {
        one["extra_info"]["backend"]: one["stats"]["median"] for one in suite["benchmarks"] if "tiny-32" in one["group"]
    }
    if backend.active is not None:
        twin, speedup = performance._number(medians["numpy"] * 1e3), medians["numpy"] / medians["compiled"]
        assert f"| {performance._number(medians['compiled'] * 1e3)} | – | {twin} | {speedup:.2f} |" in text


def test_shapes_in_words():
    plain = {"B": 1, "Hq": 1, "Hkv": 1, "L": 5, "S": 6, "D": 64, "dtype": "float64", "causal": False, "mask": None}
    assert performance.shape_of(plain) == "1 head, 5 × 6, d = 64, float64"
    other = {"B": 8, "Hq": 32, "Hkv": 8, "dtype": "float32", "causal": True, "mask": "padding", "window": 256}
    assert performance.shape_of(plain | other) == "8 × 32/8 heads, 5 × 6, d = 64, causal, padding mask, window 256"


def test_performance_page_says_what_is_missing(measured, tmp_path):
    empty = performance.page(results.load(tmp_path))
    assert empty.count("Not measured yet") == 3
    for _, command, _ in performance.KINDS.values():
        assert command in empty
    add(measured["bench"], "bench", tmp_path)
    assert performance.page(results.load(tmp_path)).count("Not measured yet") == 2


def test_peers_without_a_right_result_are_named_and_not_plotted(measured, tmp_path):
    found = json.loads(measured["peers"].read_text())
    found["cases"]["tiny-32"]["candidates"]["numpy"]["status"] = "wrong"
    (tmp_path / "peers.json").write_text(json.dumps(found))
    text = performance.page(results.load(tmp_path))
    assert "off by more than rounding: `tiny-32`: NumPy" in text
    assert "<circle" not in text


def test_results_keep_no_name_of_a_host_or_path(measured):
    for file in measured.values():
        raw = json.loads(file.read_text())
        small = results.shrink(raw)
        assert results.shrink(small) == small
        assert str(ROOT) not in json.dumps(small)
        for secret in (raw.get("machine_info", {}).get("node"), raw.get("commit_info", {}).get("id")):
            assert not secret or secret not in json.dumps(small)


def test_committed_results_are_small_and_known():
    for path in DOCS.glob("data/*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert results.shrink(found) == found, f"{path.name}: put it there with docs/add_results.py"
        assert path.stat().st_size < 100_000


def test_unknown_results_are_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"machine": {}}')
    with pytest.raises(results.UnknownResultsError, match=r"other\.json: neither benchmarks/peers"):
        results.load(tmp_path)


# ---- the picture of the README ----


def test_the_picture_of_the_readme_is_that_of_the_results():
    file, text = speeds.picture_of_the_readme(DOCS)
    assert file.read_text(encoding="utf-8") == text, "python docs/add_results.py draws it again"
    assert f"]({file.relative_to(ROOT).as_posix()})" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= set(re.findall(r"--([\w-]+): ", text))
    found = json.loads((DOCS / "data" / "peers.json").read_text(encoding="utf-8"))["cases"]
    for name in speeds.CASES:
        best = found[name]["candidates"][found[name]["best_peer"]]["milliseconds"]
        assert f">{speeds._written(best)}" in text


README_CASES = (
    "bert512",
    "bert-pad",
    "gpt2-1k",
    "llama-2k",
    "window-8k",
    "segments-8k",
    "dec-llama",
    "dec-b16",
)


def test_the_figures_of_the_readme_are_those_of_the_results():
    cases = json.loads((DOCS / "data" / "peers.json").read_text(encoding="utf-8"))["cases"]
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| case | attentile |")[2]
    rows = [[cell.strip("* ") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for name, (title, own, library, other, ratio) in zip(README_CASES, rows[: len(README_CASES)], strict=True):
        candidates, best = cases[name]["candidates"], cases[name]["best_peer"]
        ours = candidates["cache" if "KVCache" in title else "ours"]["milliseconds"]
        assert float(own) == pytest.approx(ours, rel=0.01), title
        assert float(other) == pytest.approx(candidates[best]["milliseconds"], rel=0.01), title
        assert float(ratio) == pytest.approx(float(other) / float(own), abs=0.06), title
        assert performance.PEERS[best][0].split(",")[0] in library.replace(" flex", ", flex"), title
    numpy = cases["gpt2-1k"]["candidates"]["numpy"]["milliseconds"]
    assert f"takes {rows[2][1][:-1]} ms instead of {numpy:.0f} " in (ROOT / "README.md").read_text(encoding="utf-8")
