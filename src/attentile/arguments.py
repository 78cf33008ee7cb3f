"""Numbers among the arguments: one rule for all functions. Text and truth values are no numbers."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np


def index(value: Any) -> int:
    """operator.index(value), with booleans refused, Python's and NumPy's.

    Raises
    ------
    TypeError
        If value is no integer; without a message worth showing, as the caller knows the argument's name.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{value!r} is no integer")
    return operator.index(value)


def real(value: Any) -> float:
    """float(value) of a real number, Python's or NumPy's; float() itself reads text and truth values too.

    Raises
    ------
    TypeError, ValueError
        As `index` does.
    """
    if isinstance(value, (str, bytes, bytearray, bool, np.bool_)) or getattr(value, "dtype", None) in (bool, object):
        raise TypeError(f"{value!r} is no number")
    if isinstance(value, np.ndarray) and value.dtype.kind in "USV":
        raise TypeError(f"{value!r} is no number")
    try:
        return float(value)
    except OverflowError:  # a Python integer
        return math.inf if value > 0 else -math.inf
