"""Backend, instruction set and threads: who decides, what is told, what is refused."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import HERE, ISAS

import attentile
from attentile.runtime import threads
from attentile.runtime.threads import threads_for


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter, with the thread settings of this one removed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS",) and not k.startswith("ATTENTILE_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SHOW = "import attentile, json; print(json.dumps(attentile.show_config(as_dict=True)))"


def config_of(**environment: str) -> dict:
    done = python(SHOW, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_show_config_prints_what_the_dictionary_holds(impl, capsys):
    shown = attentile.show_config(as_dict=True)
    assert attentile.show_config() is None
    printed = capsys.readouterr().out
    for key, value in shown.items():
        assert key in printed
        assert isinstance(value, list) or str(value) in printed
    assert shown["backend"] == ("numpy" if impl == "reference" else "compiled")
    assert shown["isa"] == ("none (NumPy)" if impl == "reference" else impl)


@pytest.mark.parametrize("isa", ISAS)
def test_forced_isa(isa):
    """A forced instruction set runs, or the import fails and says which ones there are."""
    done = python(SHOW, ATTENTILE_ISA=isa)
    if isa in HERE:
        shown = json.loads(done.stdout)
        assert shown["isa"] == isa
        assert shown["isa_why"] == "ATTENTILE_ISA"
    else:
        assert done.returncode != 0
        assert "ImportError" in done.stderr
        assert all(name in done.stderr for name in HERE)


def test_forced_backend():
    assert config_of(ATTENTILE_BACKEND="numpy")["backend"] == "numpy"
    assert "must be 'numpy' or 'compiled'" in python(SHOW, ATTENTILE_BACKEND="cuda").stderr
    assert "ImportError" in python(SHOW, ATTENTILE_ISA="sse9").stderr


@pytest.mark.parametrize(
    ("environment", "threads", "why"),
    [
        ({"ATTENTILE_NUM_THREADS": "3"}, 3, "ATTENTILE_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "5"}, 5, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "4,2"}, 4, "OMP_NUM_THREADS"),
        ({"ATTENTILE_NUM_THREADS": "2", "OMP_NUM_THREADS": "5"}, 2, "ATTENTILE_NUM_THREADS"),
        ({"ATTENTILE_NUM_THREADS": "100000"}, 256, "ATTENTILE_NUM_THREADS"),
    ],
)
def test_threads_from_the_environment(environment, threads, why):
    shown = config_of(**environment)
    assert (shown["threads"], shown["threads_why"]) == (threads, why)


def test_a_wrong_number_for_openmp_counts_as_absent():
    assert config_of(OMP_NUM_THREADS="0")["threads"] == config_of(OMP_NUM_THREADS="many")["threads"]
    assert config_of(OMP_NUM_THREADS="many")["threads_why"] != "OMP_NUM_THREADS"
    assert config_of(ATTENTILE_NUM_THREADS=" ", OMP_NUM_THREADS="3")["threads"] == 3


def test_order_of_thread_settings():
    try:
        attentile.set_num_threads(3)
        assert attentile.get_num_threads() == 3
        with attentile.num_threads(2):
            assert attentile.get_num_threads() == 2
            with attentile.num_threads(5):
                assert attentile.get_num_threads() == 5
            assert attentile.get_num_threads() == 2
            assert threads_for(7, "f") == 7
            seen = []
            other = threading.Thread(target=lambda: seen.append(attentile.get_num_threads()))
            other.start()
            other.join()
            # A block holds for its own thread only, unless Python lets threads inherit the context.
            assert seen == [2 if getattr(sys.flags, "thread_inherit_context", False) else 3]
    finally:
        attentile.set_num_threads(None)
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises((ValueError, TypeError), match="must be a positive integer"):
            attentile.set_num_threads(bad)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/y\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "garbage\n"}, None),
    ],
)
def test_cgroup_quota(tmp_path, files, want):
    for name, text in files.items():
        write(tmp_path / name, text)
    assert threads._cgroup_quota(tmp_path) == want


def test_use_backend_restores_and_refuses():
    before = attentile.show_config(as_dict=True)
    with attentile.use_backend("numpy"):
        assert attentile.show_config(as_dict=True)["backend"] == "numpy"
    assert attentile.show_config(as_dict=True) == before
    for arguments in (("cuda",), ("numpy", "avx2"), ("compiled", "sse9")):
        with pytest.raises(ValueError, match=r"use_backend|not available|not built"):
            attentile.use_backend(*arguments)
        assert attentile.show_config(as_dict=True) == before


def test_backends_agree(compiled):
    rng = np.random.default_rng(40)
    q, k, v = rng.standard_normal((3, 2, 30, 8))
    fast = attentile.attention(q, k, v)
    with attentile.use_backend("numpy"):
        slow = attentile.attention(q, k, v)
    np.testing.assert_allclose(fast, slow, atol=1e-14)


def test_a_core_that_cannot_be_loaded_is_an_error(tmp_path):
    """Not built: plain NumPy that says so. Built and broken: no silent slow path, unless NumPy is asked for."""
    package = tmp_path / "attentile"
    compiled_suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    shutil.copytree(
        Path(attentile.__file__).parent, package,
        ignore=lambda _, names: [name for name in names if name.endswith(compiled_suffixes) or name == "__pycache__"],
    )  # fmt: skip
    path = {"PYTHONPATH": str(tmp_path)}
    assert config_of(**path)["backend_why"] == "not built in this installation"
    (package / "core" / f"_core{compiled_suffixes[0]}").write_bytes(b"not a library")
    assert "ImportError" in python(SHOW, **path).stderr
    assert config_of(ATTENTILE_BACKEND="numpy", **path)["backend"] == "numpy"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ATTENTILE_BACKEND": "numpy", "ATTENTILE_ISA": "avx2"}, "ATTENTILE_ISA can't be met: .*goes with backend"),
        ({"ATTENTILE_BACKEND": "numpy", "ATTENTILE_ISA": "junk"}, "ATTENTILE_ISA can't be met: .*goes with backend"),
        ({"ATTENTILE_BACKEND": "junk", "ATTENTILE_ISA": "avx2"}, "ATTENTILE_BACKEND can't be met: .*'junk'"),
        (
            {"ATTENTILE_NUM_THREADS": "abc"},
            "ATTENTILE_NUM_THREADS can't be met: .*'abc'; it must be a positive",
        ),
        ({"ATTENTILE_NUM_THREADS": "0"}, "ATTENTILE_NUM_THREADS can't be met: .*'0'"),
        ({"ATTENTILE_NUM_THREADS": "-2"}, "ATTENTILE_NUM_THREADS can't be met: .*'-2'"),
        ({"ATTENTILE_NUM_THREADS": "1.5", "OMP_NUM_THREADS": "2"}, "ATTENTILE_NUM_THREADS can't be met"),
    ],
)
def test_a_forced_setting_that_makes_no_sense_is_an_error(environment, message):
    done = python("import attentile", **environment)
    assert done.returncode != 0
    assert re.search(f"ImportError: attentile: {message}", done.stderr)


def test_version():
    assert attentile.__version__ == attentile.show_config(as_dict=True)["version"]
    with pytest.raises(AttributeError, match="module 'attentile' has no attribute 'nothing'"):
        attentile.nothing  # noqa: B018


@pytest.mark.parametrize("text", ["²", "9" * 5000, "٣"])
def test_numbers_that_python_cannot_read(text):
    """str.isdigit() is true for more than int() takes."""
    shown = config_of(OMP_NUM_THREADS=text)
    want = {"²": config_of()["threads"], "٣": 3}.get(text, 256)
    assert shown["threads"] == want


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (b"", None),
        (b"\n\n0::/a\n", 0.5),
        (b"nothing like it\n:\n0::/a\n", 0.5),
        (b"0::/../a\n", 0.5),
        (b"0::/\xff\xfe/a\n", None),
        (b"0::/a\0b\n", None),
        (b"1:cpu:/../../a\n", 2.0),
        (b"1:cpuacct,cpu:/b\n0::/a\n", 0.25),
        (b"3:memory:/a\n", None),
    ],
)
def test_cgroup_files_of_every_kind(tmp_path, content, want):
    """Names in bytes that are no UTF-8, lines that are none, groups beyond the container's root."""
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", "50000 100000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "sys/fs/cgroup/cpuacct,cpu/b/cpu.cfs_quota_us", "25000\n")
    write(tmp_path / "sys/fs/cgroup/cpuacct,cpu/b/cpu.cfs_period_us", "100000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(content)
    assert threads._cgroup_quota(tmp_path) == want


@pytest.mark.parametrize(
    "text", ["-1 100000", "0 100000", "5 0", "5 -5", "1e5 100000", "max", "", "1 2 3", "5 " + "9" * 400]
)
def test_a_quota_that_makes_no_sense_is_none(tmp_path, text):
    write(tmp_path / "proc/self/cgroup", "0::/a\n")
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", text)
    assert threads._cgroup_quota(tmp_path) is None


def test_a_hybrid_mount_of_version_2(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/a\n")
    write(tmp_path / "sys/fs/cgroup/unified/a/cpu.max", "150000 100000")
    assert threads._cgroup_quota(tmp_path) == 1.5
