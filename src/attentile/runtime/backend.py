"""What computes: the compiled core with one of its instruction sets, or plain NumPy, and why."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import ModuleType

_MISSING = "not built in this installation"
compiled: ModuleType | None = None
try:
    from ..core import _core
except ImportError:
    from importlib.util import find_spec

    # A core that was built but cannot be loaded is an error: to fall back would silently be slow.
    if find_spec("attentile.core._core") is not None and os.environ.get("ATTENTILE_BACKEND") != "numpy":
        raise
else:
    compiled = _core

# The compiled module while the compiled backend is in use, else None. Read on every call.
active: ModuleType | None = compiled
why_active = "default" if compiled is not None else _MISSING
why_isa = "best that this processor supports"


def _activate(name: str, isa: str | None, why: str) -> None:
    global active, why_active, why_isa
    if name not in ("numpy", "compiled"):
        raise ValueError(f"use_backend: backend is {name!r}; it must be 'numpy' or 'compiled'")
    if name == "numpy":
        if isa is not None:
            raise ValueError(f"use_backend: isa={isa!r} goes with backend 'compiled' only")
    elif compiled is None:
        raise ValueError(f"use_backend: the compiled core is {_MISSING}; install with a C compiler present")
    elif isa is not None:
        if not isinstance(isa, str):
            raise TypeError(f"use_backend: isa is {isa!r}; it must be the name of an instruction set")
        compiled.set_isa(isa)
        why_isa = why
    active = compiled if name == "compiled" else None
    why_active = why


class _Restoring(AbstractContextManager[None]):
    """What use_backend returns: the change holds from the call on, and in a with statement until the block ends."""

    def __init__(self) -> None:
        self._before = active, why_active, why_isa, compiled.get_isa() if compiled is not None else None

    def __exit__(self, *exc: object) -> None:
        global active, why_active, why_isa
        active, why_active, why_isa, isa = self._before
        if compiled is not None:
            compiled.set_isa(isa)


def use_backend(name: str, isa: str | None = None) -> AbstractContextManager[None]:
    """Choose what computes: the compiled kernels or plain NumPy.

    Parameters
    ----------
    name : {"compiled", "numpy"}
        The backend.
    isa : str, optional
        Instruction set of the compiled kernels ("avx512", "avx2", "neon", "generic"); default: no change.
        ``show_config(as_dict=True)["isas_here"]`` lists those that can run here.

    Returns
    -------
    context manager
        The choice holds for the whole process, from the call on, or until the block ends in a ``with`` statement.

    Raises
    ------
    TypeError, ValueError
        A backend that does not exist or was not built, an instruction set that is not available here.

    Examples
    --------
    >>> import attentile, numpy as np
    >>> x = np.ones((3, 4))
    >>> with attentile.use_backend("numpy"):
    ...     attentile.attention(x, x, x).shape
    (3, 4)
    """
    restoring = _Restoring()
    _activate(name, isa, "use_backend()")
    return restoring


def _read_environment() -> None:
    """A choice that cannot be met is an error; nothing else is chosen silently."""
    name, isa = os.environ.get("ATTENTILE_BACKEND"), os.environ.get("ATTENTILE_ISA")
    for variable, wanted in ("ATTENTILE_BACKEND", None), ("ATTENTILE_ISA", isa):
        try:
            if os.environ.get(variable):
                _activate(name or "compiled", wanted, variable)
        except ValueError as error:
            raise ImportError(f"attentile: {variable} can't be met: {error}") from None


_read_environment()
