"""What the tests of this folder share: inputs, comparison with the oracle, Python in a process of its own.

The folder holds faults that were reported in public about other attention libraries, each with the input of its
report and the answer that is right here. A test is named after its report: test_b07_... and its siblings in other
files of this folder belong to report B07.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from conftest import FMA_ISAS
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from oracle import allowed_keys, oracle, tolerance

import attentile
from attentile import AttentionResult, attention

Array = NDArray[Any]


def qkv(
    shape: tuple[int, ...], *, kv_heads: int | None = None, keys: int | None = None, value_width: int | None = None,
    dtype: Any = np.float32, seed: int = 0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Normal q of this shape (..., Hq, L, D), and k and v that differ from it in what is given."""
    *lead, heads, queries, width = shape
    tail = (*lead, heads if kv_heads is None else kv_heads, queries if keys is None else keys)
    rng = np.random.default_rng(seed)
    shapes = (shape, (*tail, width), (*tail, width if value_width is None else value_width))
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in shapes)
    return q, k, v


def check(
    q: Array, k: Array, v: Array, *, allowed: Array | None = None, scale: Any = None, atol: float | None = None,
    **options: Any,
) -> AttentionResult:  # fmt: skip
    """The call with all its outputs, compared with the oracle; `allowed` spares its slow derivation from options."""
    bias = options.get("bias")
    if allowed is None:
        allowed = allowed_keys((*q.shape[:-1], k.shape[-2]), **options)
    expected = oracle(q, k, v, allowed, bias=bias, scale=scale)
    if atol is None:
        atol = _bound(q, k, v, allowed, expected, bias, scale)
    result = attention(q, k, v, scale=scale, return_lse=True, return_weights=True, **options)
    assert isinstance(result, AttentionResult)
    assert result.out.dtype == result.weights.dtype == np.result_type(q, k, v)
    assert_allclose(result.out, expected.out, rtol=0, atol=atol)
    assert_allclose(result.weights, expected.weights, rtol=0, atol=atol)
    assert (result.weights[~allowed] == 0).all()
    assert_allclose(result.lse, expected.lse, rtol=8 * np.finfo(result.lse.dtype).eps, atol=atol)
    return result


def _bound(q: Array, k: Array, v: Array, allowed: Array, expected: Any, bias: Any, scale: Any) -> float:
    """The oracle's tolerance; a half-precision call is computed in float32 and rounded once at the end."""
    dtype = np.result_type(q, k, v)
    work = np.result_type(dtype, np.float32)
    bound = tolerance(*(x.astype(work) for x in (q, k, v)), allowed, expected, bias=bias, scale=scale)
    return bound if work == dtype else bound + float(np.finfo(dtype).eps) * float(np.abs(v).max(initial=1))


def assert_same_row(impl: str, actual: Array, expected: Array, atol: float = 2e-6) -> None:
    """The same logical rows by two ways: equal in bits where FMA tiles run, else (no such promise) close."""
    assert actual.dtype == expected.dtype
    if impl in FMA_ISAS:
        assert_array_equal(actual, expected)
    else:
        assert_allclose(actual, expected, rtol=1e-5, atol=atol)


def run_python(code: str, *arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh Python that imports the same attentile and has no setting of ours except `environment`."""
    inherited = {name: x for name, x in os.environ.items() if not name.startswith(("ATTENTILE_", "OMP_"))}
    search = os.pathsep.join(filter(None, [str(Path(attentile.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**inherited, "PYTHONPATH": search, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )


def output_of(code: str, *arguments: str, timeout: float = 60, **environment: str) -> str:
    """What the code prints; it must end well, and within the time limit."""
    done = run_python(code, *arguments, timeout=timeout, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()
