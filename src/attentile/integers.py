"""Whole numbers among the arguments: one rule for all functions."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def index(value: Any) -> int:
    """operator.index(value), with NumPy's booleans refused on every NumPy: 1.26 lets them pass and warns.

    Raises
    ------
    TypeError
        If value is no integer; without a message worth showing, as the caller knows the argument's name.
    """
    if isinstance(value, np.bool_):
        raise TypeError(f"{value!r} is no integer")
    return operator.index(value)
