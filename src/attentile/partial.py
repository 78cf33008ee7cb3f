"""Partial: unfinished rows of a call, of which other keys are elsewhere or come later."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .core.constants import LOG2E

Array = NDArray[Any]


class Partial(NamedTuple):
    """What rows know of the keys that they have seen, before the division: `attention_partial` returns it.

    Scores count in powers of 2: with t = score * log2(e),::

        m = max t        l = sum of 2^(t - m)        o = sum of 2^(t - m) v

    so that the output is o / l and lse = (m + log2 l) ln 2. A row that has seen no key has m = -inf, l = 0, o = 0.
    Sinks are not included.

    Attributes
    ----------
    m : ndarray, shape (..., Hq, L)
        The largest score, times log2(e).
    l : ndarray, shape (..., Hq, L)
        The sum of the weights.
    o : ndarray, shape (..., Hq, L, Dv)
        The sum of the values with these weights.

    Notes
    -----
    A row that is continued (``attention(..., before=partial)``) after a multiple of 256 keys has the bits of one call
    over all keys. Rows of any other length, and those that `merge_attention` joins, are right to rounding. A row that
    has seen nothing but scores of -inf is like one without a key: it is 0, and NaN only if the call that finishes it
    sees such keys, too. Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention, attention_partial
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 8))
    >>> first = attention_partial(q, k[:, :256], v[:, :256])
    >>> out = attention(q, k[:, 256:], v[:, 256:], before=first)
    >>> bool((out == attention(q, k, v)).all())
    True
    """

    m: Array
    l: Array  # noqa: E741 (the letter of the formula)
    o: Array

    @property
    def lse(self) -> Array:
        """Natural logarithm of the sum of exp of the scores so far, (..., Hq, L)."""
        with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
            return np.asarray((self.m + np.log2(self.l)) / self.m.dtype.type(LOG2E))

    @property
    def out(self) -> Array:
        """The output if no further key came, (..., Hq, L, Dv); 0 for a row that has seen none."""
        with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
            return np.where(self.l[..., None] == 0, 0, self.o / self.l[..., None]).astype(self.o.dtype)
