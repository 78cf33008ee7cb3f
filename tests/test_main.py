"""python -m attentile: what it prints, and that the self-check can fail."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import attentile
from attentile import __main__ as command
from attentile import formulas, speed

ONE = ["--shape", "1,4,2,33,33,16", "--seconds", "0.01"]


def test_demonstration(either, capsys, monkeypatch):
    monkeypatch.setattr(speed, "SHAPES", (speed.Shape(1, 2, 2, 16, 16, 8),))
    monkeypatch.setattr(speed, "TEXTBOOK", (speed.Textbook(4, 8, masked=True), speed.Textbook(4, 8, heads=2)))
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    for words in ("self_attention", "causal_attention", "multi_head_attention", "positional_encoding", "speed-up"):
        assert words in printed
    triangle = printed.split("its weights\n")[1].splitlines()[:5]
    assert [len(line.split()) for line in triangle] == [1, 2, 3, 4, 5]
    for line in triangle:
        assert sum(map(float, line.split())) == pytest.approx(1, abs=5e-4)
    for problem in (
        "1x2 heads, 16x16, d=8",
        "self_attention 4x8 masked fp64",
        "multi_head_attention 4x8, 2 heads fp64",
    ):
        assert f"\n{problem} " in printed


@pytest.mark.parametrize("factor", [1.001, np.nan])
def test_self_check_can_fail(compiled, capsys, monkeypatch, factor):
    assert command.self_check()
    right = attentile.attention

    def slightly_wrong(*arrays, **options):
        backend = attentile.show_config(as_dict=True)["backend"]
        return right(*arrays, **options) * np.float32(factor if backend == "compiled" else 1)

    monkeypatch.setattr(command.at, "attention", slightly_wrong)
    assert not command.self_check()
    assert "FAILED" in capsys.readouterr().out


def test_bench_writes_json(impl, capsys, tmp_path):
    file = tmp_path / "bench.json"
    assert command.main(["bench", *ONE, "--dtype", "float64", "--causal", "--threads", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert row["shape"]["dtype"] == "float64"
    assert row["gflops"] == pytest.approx(4 * 4 * 33 * 33 * 16 / 2 / (row["ms"] * 1e-3) / 1e9)
    assert (row["peak_percent"] is None) == (impl == "reference")
    assert report["config"]["backend"] == ("numpy" if impl == "reference" else "compiled")
    assert "1x4/2 heads, 33x33, d=16 causal fp64" in capsys.readouterr().out
    command.main(["bench", *ONE, "--json", "-"])
    assert json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("problem", [speed.Shape(1, 4, 2, 9, 9, 8, causal=True), *speed.TEXTBOOK[:2]], ids=str)
def test_speedup_is_over_the_faster_of_formula_and_twin(problem, impl):
    row = speed.measure(problem, 1, 0.001)
    assert row.speedup == pytest.approx(min(row.formula_ms, row.twin_ms) / row.ms)
    assert row.gflops == pytest.approx(problem.flops() / (row.ms * 1e-3) / 1e9)
    assert row.gbytes_per_second == pytest.approx(problem.kv_bytes() / (row.ms * 1e-3) / 1e9)


@pytest.mark.parametrize("problem", [speed.Shape(2, 4, 2, 20, 20, 8, "float64", causal=True), *speed.TEXTBOOK], ids=str)
def test_candidates_compute_the_same(problem, impl):
    """And the formula stays in the dtype of the problem, which its speed depends on."""
    ours, formula = (call() for call in problem.calls())
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, formula)), strict=True):
        assert one.dtype == other.dtype == problem.dtype
        np.testing.assert_allclose(other, one, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_formula_with_every_option(kv_heads):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 4, 7, 8), np.float32)
    k, v = rng.standard_normal((2, 2, kv_heads, 9, 8), np.float32)
    mask, bias = np.tri(7, 9, dtype=bool), rng.standard_normal((4, 7, 9), np.float32)
    found = formulas.attention(q, k, v, mask, bias, 5.0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, attentile.attention(q, k, v, mask=mask, bias=bias, softcap=5.0), atol=1e-5)


def test_info(capsys):
    assert command.main(["info"]) == 0
    assert "threads_why" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--shape", "1,2"],
        ["bench", "--shape", "1,3,2,4,4,4"],
        ["bench", "--shape", "1,1,1,2,3,4", "--causal"],
        ["frobnicate"],
    ],
)
def test_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_bench_without_json(capsys):
    assert command.main(["bench", "--shape", "1,1,1,8,8,4", "--seconds", "0.01"]) == 0
    assert "1x1 heads, 8x8, d=4" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["1,2,3", "1,2,x,4,5,6", "1,4,3,8,8,4", "1,1,1,0,8,4"])
def test_bench_refuses_what_is_no_shape(capsys, shape):
    with pytest.raises(SystemExit):
        command.main(["bench", "--shape", shape])
    assert f"'{shape}' is not B,Hq,Hkv,L,S,D" in capsys.readouterr().err


def test_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "attentile", "info"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("version ")
    assert not done.stderr
