"""Which implementation a test runs on, and what is left out on this machine.

A fixture that a test takes says how much an implementation can change its result:

`impl`      the NumPy twin and every instruction set of this host: numbers
`isa`       every instruction set of this host: promises of the compiled core
`fma_isa`   those that promise equal bits
`either`    the twin, and the core with its best instruction set: whatever is decided before any arithmetic
`compiled`  the core with its best instruction set

Only what can run here is collected. A line at the end says what was left out, and why.

The whole suite is shared among processes if pytest-xdist is installed; a part of it runs in one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What one worker left out, for the last lines: each collects everything, so all left out the same."""
    if not LEFT_OUT:
        LEFT_OUT.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(LEFT_OUT)


# More than these gain little, as each collects the suite, and the threads of their calls would crowd the machine.
MOST_WORKERS = 8


def is_whole_suite(config: pytest.Config) -> bool:
    """Whether everything here is to run, with nobody looking on: no choice of tests, no debugger, no direct output."""
    options = ("keyword", "markexpr", "lf", "stepwise", "usepdb", "trace", "collectonly")
    return (
        [Path(argument).resolve() for argument in config.args] == [Path(__file__).resolve().parent]
        and not any(config.getoption(name, None) for name in options)
        and config.getoption("capture") != "no"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Share the whole suite among processes, unless the command says how (`-n 0`: in one)."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.pluginmanager.hasplugin("xdist") or not is_whole_suite(config):
        return
    if config.option.numprocesses is None and config.option.dist == "no":
        workers = min(config.hook.pytest_xdist_auto_num_workers(config=config), MOST_WORKERS)
        config.option.numprocesses = workers if workers > 1 else 0
        config.option.dist = "worksteal"
        config.option.benchmark_disable = True


def pytest_report_header() -> list[str]:
    return [
        f"attentile: instruction sets {', '.join(HERE) or 'none (NumPy)'}",
        *(f"left out: {isa}, which this host or build does not have" for isa in ISAS if isa not in HERE),
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in LEFT_OUT.most_common():
        terminalreporter.write_line(f"left out: {count} tests: {reason}")
