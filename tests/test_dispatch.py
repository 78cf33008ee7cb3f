"""Which instruction sets are built, which of them run here, and what a request for another one is told."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from conftest import HERE, ISAS

import attentile

BUILT = {
    "x86_64": ["avx512", "avx2", "generic"],
    "amd64": ["avx512", "avx2", "generic"],
    "aarch64": ["neon", "generic"],
    "arm64": ["neon", "generic"],
}


def config() -> dict:
    return attentile.show_config(as_dict=True)


def test_a_build_has_what_its_processor_may_have(compiled):
    assert config()["isas_built"] == BUILT.get(platform.machine().lower(), ["generic"])
    assert all(isa in ISAS for isa in config()["isas_built"])


def test_those_that_run_here_are_best_first_and_end_with_generic(compiled):
    assert [isa for isa in config()["isas_built"] if isa in HERE] == HERE
    assert HERE[-1] == "generic"
    if platform.machine().lower() in ("aarch64", "arm64"):
        assert HERE[0] == "neon"  # part of the architecture


@pytest.mark.parametrize("isa", [*(name for name in ISAS if name not in HERE), "sse9", "AVX2", ""])
def test_what_is_not_there_is_refused_with_the_list_of_what_is(compiled, isa):
    before = config()
    with pytest.raises(ValueError, match="instruction set") as refused:
        attentile.use_backend("compiled", isa)
    assert repr(isa) in str(refused.value)
    assert str(refused.value).endswith(", ".join(HERE))
    assert config() == before


@pytest.mark.parametrize("isa", ISAS)
def test_a_forced_one_computes_or_fails_at_import(compiled, isa):
    """In a fresh process: the environment decides at import, before anything is computed."""
    code = (
        "import numpy, attentile; x = numpy.arange(12.0).reshape(3, 4) / 8; "
        "print(attentile.show_config(as_dict=True)['isa'], attentile.attention(x, x, x).sum())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ATTENTILE_ISA": isa}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    if isa in HERE:
        name, total = done.stdout.split()
        x = np.arange(12.0).reshape(3, 4) / 8
        with attentile.use_backend("numpy"):
            assert (name, float(total)) == (isa, pytest.approx(attentile.attention(x, x, x).sum(), rel=1e-13))
    else:
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: attentile: ATTENTILE_ISA can't be met: ")
        assert last.endswith(", ".join(HERE))
