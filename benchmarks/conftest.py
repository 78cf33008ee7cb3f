"""Fixtures of the pytest-benchmark suite: the compiled kernels against the formula in NumPy and against the NumPy twin.

The formula is what people write (`formulas.py`), the twin what stands in for the kernels without a compiler. Each
benchmark runs once per candidate and is grouped by shape, so that the three stand beside each other in the report.
After the timing the result is checked once against the NumPy backend, evaluated in float64.
"""

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `cases` and `formulas`, in every import mode of pytest

from cases import Judge

import attentile


@pytest.fixture(params=["formula", "numpy", "compiled"])
def candidate(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each in turn, with the backend that it needs; without a compiled core, `compiled` is skipped."""
    if request.param == "compiled" and importlib.util.find_spec("attentile.core._core") is None:
        pytest.skip("attentile is installed without its compiled core")
    with attentile.use_backend("compiled" if request.param == "compiled" else "numpy"):
        yield request.param


@pytest.fixture(scope="session")
def medians() -> dict[str, dict[str, float]]:
    """Seconds by group and candidate, of what has been timed so far."""
    return defaultdict(dict)


@pytest.fixture
def timed(candidate: str, benchmark: Any, medians: dict[str, dict[str, float]]) -> Callable[..., Any]:
    """`timed(function, *arguments, formula=…, group=…, flops=…)`: time a call, record what ran and how fast, return its
    result. The candidate `formula` calls that instead of the function, with the same arguments.

    Instead of `flops`, `values` counts the numbers computed, for functions whose work is not multiply and add.
    """

    def run(
        function: Callable[..., Any],
        *arguments: Any,
        formula: Callable[..., Any],
        group: str,
        flops: float = 0,
        values: float = 0,
    ) -> Any:
        config = attentile.show_config(as_dict=True)
        benchmark.group = group
        benchmark.extra_info.update({name: config[name] for name in ("isa", "threads", "version")}, backend=candidate)
        result = benchmark(formula if candidate == "formula" else function, *arguments)
        if benchmark.stats is not None:  # None with --benchmark-disable
            seconds = benchmark.stats.stats.median
            if flops:
                benchmark.extra_info["GFLOP/s"] = round(flops / seconds / 1e9, 3)
            if values:
                benchmark.extra_info["values/µs"] = round(values / seconds / 1e6, 3)
            medians[group][candidate] = seconds
            others = [medians[group].get(other) for other in ("formula", "numpy")]
            if candidate == "compiled" and None not in others:
                benchmark.extra_info["speed-up"] = round(min(others) / seconds, 3)
        return result

    return run


@pytest.fixture
def check_against_fallback() -> Callable[..., None]:
    """`check_against_fallback(result, function, *arrays)`: fail if the result is off by more than rounding.

    How much rounding is allowed is measured: the NumPy backend computes the function of the same arrays in the
    precision of the benchmark (for float64 in float32, scaled) and in float64.
    """

    def check(result: Any, function: Callable[..., Any], *arrays: np.ndarray) -> None:
        dtype = arrays[0].dtype
        rounded_dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
        with attentile.use_backend("numpy"):
            exact = function(*(array.astype(np.float64) for array in arrays))
            rounded = function(*(array.astype(rounded_dtype) for array in arrays))
        parts = zip(*(one if isinstance(one, tuple) else (one,) for one in (result, exact, rounded)), strict=True)
        for found, wanted, wanted_rounded in parts:
            judge = Judge.from_rounding(wanted, wanted_rounded, rounded_dtype.name, dtype.name)
            error = judge.error(found)
            assert found.dtype == dtype
            assert judge.accepts(error), f"error {error:.1e}, allowed {judge.allowed:.1e}"

    return check
