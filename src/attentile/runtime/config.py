"""show_config(): what runs and why."""

from __future__ import annotations

import platform
from typing import Any, Literal, overload

import numpy as np

from . import backend, threads


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("attentile")
    except metadata.PackageNotFoundError:
        return "not installed"


@overload
def show_config(as_dict: Literal[False] = ...) -> None: ...


@overload
def show_config(as_dict: Literal[True]) -> dict[str, Any]: ...


@overload
def show_config(as_dict: bool) -> dict[str, Any] | None: ...


def show_config(as_dict: bool = False) -> dict[str, Any] | None:
    """Print what runs and why: version, backend, instruction set, number of threads and its source, build.

    Parameters
    ----------
    as_dict : bool
        Return the same as a dictionary and print nothing.

    Returns
    -------
    dict or None
        With as_dict: version, backend, backend_why, isa, isa_why, isas_here (those that can run here), isas_built,
        threads, threads_why, pool_workers (threads started so far), compiler, machine, python, numpy.

    Examples
    --------
    >>> from attentile import show_config, use_backend
    >>> with use_backend("numpy"):
    ...     config = show_config(as_dict=True)
    >>> config["backend"], config["backend_why"]
    ('numpy', 'use_backend()')
    """
    compiled, core = backend.compiled, backend.active
    number, source = threads.threads_and_source()
    isas = compiled.isas() if compiled is not None else {}
    config: dict[str, Any] = {
        "version": version(),
        "backend": "compiled" if core is not None else "numpy",
        "backend_why": backend.why_active,
        "isa": core.get_isa() if core is not None else "none (NumPy)",
        "isa_why": backend.why_isa if core is not None else backend.why_active,
        "isas_here": [isa for isa, there in isas.items() if there],
        "isas_built": list(isas),
        "threads": number,
        "threads_why": source,
        "pool_workers": compiled.pool_workers() if compiled is not None else 0,
        "compiler": compiled.compiler() if compiled is not None else "none",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if as_dict:
        return config
    for key, value in config.items():
        print(f"{key:13} {', '.join(value) if isinstance(value, list) else value}")
    return None
