"""python -m attentile: what it prints, and that the self-check can fail."""

from __future__ import annotations

import json

import numpy as np
import pytest

import attentile
from attentile import __main__ as command

ONE = ["--shape", "1,4,2,33,33,16", "--seconds", "0.01"]


def test_demonstration(impl, capsys, monkeypatch):
    monkeypatch.setattr(command, "SHAPES", (command.Shape(1, 2, 2, 16, 16, 8),))
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    for words in ("self_attention", "causal_attention", "multi_head_attention", "positional_encoding", "speed-up"):
        assert words in printed
    triangle = printed.split("its weights\n")[1].splitlines()[:5]
    assert [len(line.split()) for line in triangle] == [1, 2, 3, 4, 5]
    for line in triangle:
        assert sum(map(float, line.split())) == pytest.approx(1, abs=5e-4)


def test_self_check_can_fail(compiled, capsys, monkeypatch):
    assert command.self_check()
    right = attentile.attention

    def slightly_wrong(*arrays, **options):
        backend = attentile.show_config(as_dict=True)["backend"]
        return right(*arrays, **options) * np.float32(1.001 if backend == "compiled" else 1)

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


def test_plain_numpy_is_attention():
    """The yardstick of the speed-up computes the same."""
    shape = command.Shape(1, 4, 2, 20, 20, 8, "float64", causal=True)
    q, k, v = shape.arrays()
    np.testing.assert_allclose(
        command.plain_numpy(q, k, v, True), attentile.attention(q, k, v, causal=True), atol=1e-13
    )


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
