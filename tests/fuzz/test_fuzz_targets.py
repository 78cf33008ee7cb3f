"""The fuzz targets keep working: a few inputs of each, the same every time, on whatever computes by default."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
TARGETS = ("attention", "cache", "rotary")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent))
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs(name, seed):
    source = random.Random(seed)
    importlib.import_module(f"target_{name}").run(source.randbytes(40 * seed))


def test_the_runner_reports_a_finding_and_replays_it(tmp_path):
    """A target that fails: exit code, the input in a file, and the same failure from that file."""
    for name in ("run.py", "source.py"):
        (tmp_path / name).write_bytes((HERE / name).read_bytes())
    (tmp_path / "target_rotary.py").write_text("def run(data):\n    assert len(data) < 40, 'too long'\n")
    hide_atheris = (
        "import sys; sys.modules['atheris'] = None; import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )

    def runner(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", hide_atheris, str(tmp_path / "run.py"), "rotary", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    found = runner("--seconds", "20", "--findings", str(tmp_path / "found"))
    assert found.returncode == 1
    assert "not guided by coverage" in found.stdout
    (kept,) = (tmp_path / "found").iterdir()
    assert len(kept.read_bytes()) >= 40
    assert "too long" in runner("--replay", str(kept)).stderr


def test_bytes_become_every_layout():
    from source import LAYOUTS, Source

    array, seen = np.arange(24.0).reshape(2, 3, 4), set()
    for how in range(len(LAYOUTS)):
        found = Source(bytes([how, 1])).laid_out(array)
        np.testing.assert_array_equal(found, array)
        seen.add((found.strides, found.flags.aligned, found.flags.writeable, found.dtype.isnative))
    assert len(seen) == len(LAYOUTS)
