"""Which implementation a test runs on, and what is left out on this machine.

A fixture that a test takes says how much an implementation can change its result:

`impl`      the NumPy twin and every instruction set of this host: numbers
`isa`       every instruction set of this host: promises of the compiled core
`fma_isa`   those that promise equal bits
`either`    the twin, and the core with its best instruction set: whatever is decided before any arithmetic
`compiled`  the core with its best instruction set

Only what can run here is collected. A line at the end says what was left out, and why.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Before NumPy is loaded: the products of the twin and of the oracles are small, and threads would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import attentile
from attentile.runtime import backend

# Every instruction set that any build may have.
ISAS = ("avx512", "avx2", "neon", "generic")
FMA_ISAS = ("avx512", "avx2", "neon")

# Those that can be activated here, best first; none in a pure-NumPy install.
HERE: list[str] = attentile.show_config(as_dict=True)["isas_here"]
FMA_HERE = [isa for isa in HERE if isa in FMA_ISAS]
two_fma_isas = pytest.mark.skipif(len(FMA_HERE) < 2, reason="one instruction set or none with fused multiply-add")
NONE = ["none"]  # a parameter for fixtures without any: tests that take them are left out


@contextmanager
def activated(name: str) -> Iterator[str]:
    """One implementation in use, and seen to be the one that runs."""
    chosen = attentile.use_backend("numpy") if name == "reference" else attentile.use_backend("compiled", name)
    with chosen:
        running = backend.active
        assert (running is None) if name == "reference" else (running is not None and running.get_isa() == name)
        yield name


@pytest.fixture(params=("reference", *HERE))
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """The NumPy twin and every instruction set of this host."""
    with activated(request.param) as name:
        yield name


@pytest.fixture(params=HERE or NONE)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this host."""
    with activated(request.param) as name:
        yield name


@pytest.fixture(params=FMA_HERE or NONE)
def fma_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction sets of this host that promise equal bits."""
    with activated(request.param) as name:
        yield name


@pytest.fixture(params=("reference", *HERE[:1]))
def either(request: pytest.FixtureRequest) -> Iterator[str]:
    """The NumPy twin and the compiled core, for what no instruction set can change."""
    with activated(request.param) as name:
        yield name


@pytest.fixture(params=HERE[:1] or NONE)
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """The compiled core with its best instruction set."""
    with activated(request.param) as name:
        yield name


def why_left_out(item: pytest.Item) -> str | None:
    """Why a test cannot run on this machine, known before it runs; None if it can."""
    fixtures = getattr(item, "fixturenames", ())
    if not HERE and {"compiled", "isa", "fma_isa"} & set(fixtures):
        return "no compiled core in this build"
    if not FMA_HERE and "fma_isa" in fixtures:
        return "no instruction set here has fused multiply-add"
    for mark in item.iter_markers("skipif"):
        if mark.args and mark.args[0] is True:
            return str(mark.kwargs.get("reason", "not on this machine"))
    return None


LEFT_OUT: Counter[str] = Counter()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = [why_left_out(item) for item in items]
    LEFT_OUT.update(reason for reason in reasons if reason is not None)
    left_out = [item for item, reason in zip(items, reasons, strict=True) if reason is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if reason is None]


def pytest_report_header() -> list[str]:
    return [
        f"attentile: instruction sets {', '.join(HERE) or 'none (NumPy)'}",
        *(f"left out: {isa}, which this host or build does not have" for isa in ISAS if isa not in HERE),
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in LEFT_OUT.most_common():
        terminalreporter.write_line(f"left out: {count} tests: {reason}")
