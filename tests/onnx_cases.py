"""The node tests of the package onnx, and the comparison of its own runner."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import numpy as np


def official_cases(operator: str) -> list[Any]:
    """The cases whose model holds a node of this operator.

    onnx has a module for each operator, which computes the expected outputs and puts its cases into one list when it is
    imported. `collect_testcases` would import them all, which takes seconds.
    """
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module(f"{node.__name__}.{operator.lower()}")
    return [case for case in node._NodeTestCases if any(n.op_type == operator for n in case.model.graph.node)]


def check_outputs(case: Any, outputs: list[Any], expected: list[Any]) -> None:
    """dtype, shape, rtol and atol of the case, two ULPs for bfloat16."""
    assert len(outputs) == len(expected)
    for found, wanted in zip(outputs, expected, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        rtol = case.rtol
        if found.dtype.name == "bfloat16":
            rtol, found, wanted = max(rtol, 2**-6), found.astype(np.float32), wanted.astype(np.float32)
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=case.atol)
