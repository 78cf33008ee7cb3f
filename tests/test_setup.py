"""Decisions of setup.py for platforms that this machine is not; skipped where the tests run without the sources."""

from __future__ import annotations

import os
import platform
import re
import runpy
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SETUP = Path(__file__).parents[1] / "setup.py"


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    if not SETUP.exists():
        pytest.skip("no setup.py here: an installed package is tested")
    pytest.importorskip("setuptools")
    return runpy.run_path(str(SETUP))


@pytest.fixture
def with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes executables at these places; PATH holds the folder "path" only. Gives their root."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))

    def make(*places: str) -> Path:
        for place in places:
            program = tmp_path / place
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text("")
            program.chmod(0o755)
        return tmp_path

    return make


STUDIO = "Studio/VC/Tools/MSVC/14.40.33807/bin/Hostx64/x64/cl"


def msvc(cl: Path) -> SimpleNamespace:
    """setuptools' compiler class for Visual Studio, as far as setup.py knows it: its members appear by initialize()."""
    compiler = SimpleNamespace(compiler_type="msvc", initialized=False)

    def initialize() -> None:
        compiler.cc, compiler.compile_options, compiler.initialized = str(cl), ["/nologo", "/O2", "/GL"], True

    compiler.initialize = initialize
    return compiler


@pytest.mark.skipif(os.name == "nt", reason="programs of Windows end in .exe")
@pytest.mark.parametrize("place", ["path/clang-cl", "Studio/VC/Tools/Llvm/x64/bin/clang-cl"])
def test_clang_cl_takes_the_place_of_cl(setup, with_tools, place):
    root = with_tools(STUDIO, place)
    compiler = msvc(root / STUDIO)
    setup["prepare"](compiler)
    assert compiler.cc == str(root / place)
    assert compiler.compile_options == ["/nologo", "/O2"]


def test_without_clang_cl_the_reason_is_told(setup, with_tools):
    root = with_tools(STUDIO)
    with pytest.raises(RuntimeError, match=r"vector extensions.*cl\.exe.*install.*clang-cl on the PATH"):
        setup["prepare"](msvc(root / STUDIO))


def test_gcc_for_windows_is_refused(setup):
    with pytest.raises(RuntimeError, match=r"not aligned.*use clang-cl"):
        setup["prepare"](SimpleNamespace(compiler_type="mingw32"))


def test_flags_are_spelled_for_the_compiler(setup):
    assert setup["spelled"](["-O3", "-mavx2"], "msvc") == ["/clang:-O3", "/clang:-mavx2"]
    assert setup["spelled"](["-O3", "-mavx2"], "unix") == ["-O3", "-mavx2", "-fvisibility=hidden"]


@pytest.mark.parametrize(
    ("system", "python", "expected"),
    [
        ("darwin", "macosx-11.0-universal2", ("-arch arm64", "macosx-11.0-arm64")),
        ("darwin", "macosx-11.0-arm64", (None, None)),
        ("linux", "linux-x86_64", (None, None)),
    ],
)
def test_macos_builds_for_one_processor(setup, monkeypatch, system, python, expected):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: python)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(os, "environ", {})
    setup["for_one_processor"]()
    assert (os.environ.get("ARCHFLAGS"), os.environ.get("_PYTHON_HOST_PLATFORM")) == expected


def test_a_choice_of_the_user_stays(setup, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "macosx-11.0-universal2")
    monkeypatch.setattr(os, "environ", {"ARCHFLAGS": "-arch x86_64"})
    setup["for_one_processor"]()
    assert os.environ == {"ARCHFLAGS": "-arch x86_64"}


def test_the_readme_of_an_index_has_no_relative_link(setup):
    readme = (SETUP.parent / "README.md").read_text(encoding="utf-8")
    relative = re.compile(r"\]\((?!https?:)")
    assert relative.search(readme)
    alone, linked = setup["for_an_index"](readme, None), setup["for_an_index"](readme, "https://example.org/attentile")
    assert relative.search(alone) is relative.search(linked) is None
    assert "![" not in alone
    picture, page = (
        "](https://example.org/attentile/raw/HEAD/docs/_static/",
        "](https://example.org/attentile/blob/HEAD/docs/",
    )
    assert picture in linked
    assert page in linked


def test_links_to_elsewhere_stay_in_the_readme_of_an_index(setup):
    text = "[a](https://example.org/b) ![c](https://example.org/d.svg) [e](#f)"
    assert setup["for_an_index"](text, None) == setup["for_an_index"](text, "https://example.org") == text
