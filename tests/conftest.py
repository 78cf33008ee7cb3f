"""The `impl` fixture: a test that takes it runs on the NumPy twin and on every instruction set of this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import attentile
from attentile.runtime import backend

# Every instruction set that any build may have; one that this host or build lacks shows as a skip.
ISAS = ("avx512", "avx2", "neon", "generic")
FMA_ISAS = ("avx512", "avx2", "neon")


def available_isas() -> list[str]:
    """Instruction sets that can be activated here, best first; empty for a pure-NumPy install."""
    return attentile.show_config(as_dict=True)["isas_here"]


@contextmanager
def activated(name: str) -> Iterator[str]:
    """One implementation in use, and seen to be the one that runs; a skip where it is not available."""
    if name != "reference" and name not in available_isas():
        pytest.skip(f"{name}: not available on this host or in this build")
    chosen = attentile.use_backend("numpy") if name == "reference" else attentile.use_backend("compiled", name)
    with chosen:
        running = backend.active
        assert (running is None) if name == "reference" else (running is not None and running.get_isa() == name)
        yield name


@pytest.fixture(params=("reference", *ISAS))
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """A test that takes it runs on the NumPy twin and on every instruction set of this host."""
    with activated(request.param) as name:
        yield name


@pytest.fixture(params=FMA_ISAS)
def fma_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same on the instruction sets that promise equal bits."""
    with activated(request.param) as name:
        yield name


@pytest.fixture
def compiled() -> Iterator[str]:
    """The compiled core with its best instruction set, or a skip in a pure-NumPy install."""
    if not available_isas():
        pytest.skip("no compiled core in this build")
    best = available_isas()[0]
    with attentile.use_backend("compiled", best):
        yield best
