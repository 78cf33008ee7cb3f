"""What runs: backend, instruction set and threads, and why.

Everything is decided once at import from the environment, can be changed by the functions below, and is told by
`show_config()`. Nothing here changes a setting of another library.
"""

from __future__ import annotations

import contextvars
import math
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ..arguments import index

if TYPE_CHECKING:
    from pathlib import Path

_core: ModuleType | None
try:
    from ..core import _core as _compiled
except ImportError:
    from importlib.util import find_spec

    # A core that was built and cannot be loaded is an error: falling back would be a silent slow path.
    if find_spec("attentile.core._core") is not None and os.environ.get("ATTENTILE_BACKEND") != "numpy":
        raise
    _core, _core_missing = None, "not built in this installation"
else:
    _core, _core_missing = _compiled, ""

_MAX_THREADS = 256

# Where the two versions of control groups are mounted.
_CGROUP_V2 = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_CGROUP_V1 = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu")

# The compiled module while the compiled backend is in use, else None. Read on every call.
active: ModuleType | None = _core
_why_backend = "default" if _core is not None else _core_missing
_why_isa = "best that this processor supports"
_process_threads: int | None = None  # set_num_threads
_block_threads: contextvars.ContextVar[int | None] = contextvars.ContextVar("attentile_num_threads", default=None)
_default: tuple[int, str] | None = None


def core() -> ModuleType | None:
    """The compiled module if the compiled backend is in use, else None."""
    return active


# ---- backend and instruction set ----


def _activate(name: str, isa: str | None, why: str) -> None:
    global active, _why_backend, _why_isa
    if name not in ("numpy", "compiled"):
        raise ValueError(f"use_backend: backend is {name!r}; it must be 'numpy' or 'compiled'")
    if name == "numpy":
        if isa is not None:
            raise ValueError(f"use_backend: isa={isa!r} goes with backend 'compiled' only")
        active, _why_backend = None, why
        return
    if _core is None:
        raise ValueError(f"use_backend: the compiled core is {_core_missing}; install with a C compiler present")
    if isa is not None:
        if not isinstance(isa, str):
            raise TypeError(f"use_backend: isa is {isa!r}; it must be the name of an instruction set")
        _core.set_isa(isa)
        _why_isa = why
    active, _why_backend = _core, why


class _Restoring(AbstractContextManager[None]):
    """Returned by use_backend: the change holds from the call on; as a context manager it ends with the block."""

    def __init__(self, before: tuple[ModuleType | None, str, str, str | None]) -> None:
        self._before = before

    def __exit__(self, *exc: object) -> None:
        global active, _why_backend, _why_isa
        active, _why_backend, _why_isa, isa = self._before
        if _core is not None and isa is not None:
            _core.set_isa(isa)


def use_backend(name: str, isa: str | None = None) -> AbstractContextManager[None]:
    """Choose what computes: the compiled kernels or plain NumPy.

    Parameters
    ----------
    name : {"compiled", "numpy"}
        The backend.
    isa : str, optional
        Instruction set of the compiled kernels ("avx512", "avx2", "neon", "generic"); default: no change. Those that
        can run here are ``show_config(as_dict=True)["isas_here"]``.

    Returns
    -------
    context manager
        The choice holds for the whole process from the call on. Used in a ``with`` statement it ends with the block.

    Raises
    ------
    TypeError, ValueError
        If there is no such backend, the compiled core was not built, or the instruction set is not available here.

    Examples
    --------
    >>> import attentile, numpy as np
    >>> x = np.ones((3, 4))
    >>> with attentile.use_backend("numpy"):
    ...     attentile.attention(x, x, x).shape
    (3, 4)
    """
    before = (active, _why_backend, _why_isa, _core.get_isa() if _core is not None else None)
    _activate(name, isa, "use_backend()")
    return _Restoring(before)


# ---- threads ----


def _cgroup_quota(root: str | Path = "/") -> float | None:
    """CPUs that the control groups of this process allow (quota / period), or None if unlimited or unknown.

    Version 2: cpu.max of the process's group and of each parent; version 1: cpu.cfs_quota_us of its cpu group and of
    each parent. root: where /proc and /sys are looked for. Whatever stands in these files, nothing is raised.
    """
    from pathlib import Path  # here and not above, like metadata below: import time

    root, limits = Path(root), []
    for line in _lines_of(root / "proc/self/cgroup"):
        _, found, rest = line.partition(":")
        controllers, also, name = rest.partition(":")
        if not (found and also) or (controllers and "cpu" not in controllers.split(",")):
            continue
        for base in _CGROUP_V1 if controllers else _CGROUP_V2:
            group = root / base
            limits += _quota_of(group)
            for part in name.split("/"):
                if part not in ("", ".", ".."):  # "..": a group outside of what this container sees
                    group = group / part
                    limits += _quota_of(group)
    return min(limits, default=None)


def _lines_of(file: Path) -> list[str]:
    """The lines of a file that may be missing, unreadable, or name groups in bytes that are no UTF-8."""
    try:
        return file.read_bytes().decode("utf-8", "surrogateescape").splitlines()
    except (OSError, ValueError):  # a name with a null byte is a ValueError
        return []


def _quota_of(group: Path) -> list[float]:
    """[quota / period] of one group, [] without a limit."""
    try:
        words = _lines_of(group / "cpu.max")[:1] or [
            f"{quota} {period}"
            for quota in _lines_of(group / "cpu.cfs_quota_us")[:1]
            for period in _lines_of(group / "cpu.cfs_period_us")[:1]
        ]
        quota, period = (int(word) for word in words[0].split())
    except (IndexError, ValueError):  # no such file, "max", or nothing that makes sense
        return []
    return [quota / period] if 0 < quota < 2**63 and 0 < period < 2**63 else []


def _positive(value: object, where: str) -> int:
    try:
        count = index(value)
    except TypeError:
        raise TypeError(f"{where} is {value!r}; it must be a positive integer") from None
    if count < 1:
        raise ValueError(f"{where} is {count}; it must be a positive integer")
    return min(count, _MAX_THREADS)


def _from_environment() -> tuple[int, str] | None:
    for name in ("ATTENTILE_NUM_THREADS", "OMP_NUM_THREADS"):
        # OpenMP allows a list, one number per nesting level: the first one is ours.
        text = os.environ.get(name, "").split(",")[0].strip()
        try:
            count = int(text) if text.isdecimal() else 0
        except ValueError:  # more digits than int() takes
            count = _MAX_THREADS
        if count > 0:
            return min(count, _MAX_THREADS), name
        if os.environ.get(name, "").strip() and name.startswith("ATTENTILE"):  # nonsense for OpenMP is OpenMP's matter
            raise ValueError(f"{name} is {os.environ[name]!r}; it must be a positive integer")
    return None


def _default_threads() -> tuple[int, str]:
    global _default
    found = _default or _from_environment()  # read once: another thread may reset it in between
    if found is None:
        cpus = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # either thread, the calling or the first one, may be on a CPU of its own
            cpus = len(os.sched_getaffinity(0) | os.sched_getaffinity(os.getpid()))
        source, quota = "CPUs this process may use", _cgroup_quota()
        if quota is not None and math.ceil(quota) < cpus:
            cpus, source = max(1, math.ceil(quota)), "cgroup CPU quota"
        found = min(cpus, _MAX_THREADS), source
    _default = found
    return found


def process_threads() -> tuple[int, str]:
    """(threads, where the number came from) outside of every num_threads() block."""
    n = _process_threads
    return _default_threads() if n is None else (n, "set_num_threads()")


def limit_process_threads(n: int) -> None:
    """set_num_threads() for a tool that puts back the number it found: putting back the default ends the setting."""
    set_num_threads(None if n == _default_threads()[0] else n)


def _threads_and_source() -> tuple[int, str]:
    in_block = _block_threads.get()
    return process_threads() if in_block is None else (in_block, "num_threads() block")


def threads_for(call: int | None, function: str) -> int:
    """Threads of one call: its own argument, else the first of the settings that is there."""
    if call is not None:
        return _positive(call, f"{function}: num_threads")
    return _threads_and_source()[0]


def get_num_threads() -> int:
    """Number of threads that a call without ``num_threads=`` may use here.

    The first that is there counts: a `num_threads` block, `set_num_threads`, ATTENTILE_NUM_THREADS, OMP_NUM_THREADS,
    the CPUs this process may use (its affinity, on Linux) capped by its cgroup quota. Small calls use fewer threads.
    Where threadpoolctl is installed, its ``threadpool_limits`` calls `set_num_threads`, as for other libraries.

    Returns
    -------
    int
        At least 1, at most 256. `show_config` tells where it came from.

    Examples
    --------
    >>> from attentile import get_num_threads
    >>> get_num_threads() >= 1
    True
    """
    return _threads_and_source()[0]


def set_num_threads(n: int | None) -> None:
    """Set the number of threads for the whole process.

    Parameters
    ----------
    n : int or None
        Threads, at least 1; more than 256 count as 256. None goes back to the default of `get_num_threads`, for which
        environment, affinity and quota are read anew.

    Raises
    ------
    TypeError, ValueError
        If n is neither a positive integer nor None.

    Examples
    --------
    >>> from attentile import get_num_threads, set_num_threads
    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    >>> set_num_threads(None)
    """
    global _process_threads, _default
    _process_threads = None if n is None else _positive(n, "set_num_threads: n")
    if n is None:
        _default = None


@contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Context manager: calls in the block use n threads, in this Python thread or asyncio task only.

    Parameters
    ----------
    n : int
        Threads, at least 1. The argument ``num_threads=`` of a call still goes first. Threads that are started within
        the block are others, unless Python hands them its context (``sys.flags.thread_inherit_context``, the default of
        free-threaded builds).

    Returns
    -------
    context manager
        To be used in a ``with`` statement.

    Raises
    ------
    TypeError, ValueError
        If n is not a positive integer.

    Examples
    --------
    >>> import attentile
    >>> with attentile.num_threads(1):
    ...     attentile.get_num_threads()
    1
    """
    token = _block_threads.set(_positive(n, "num_threads: n"))
    try:
        yield
    finally:
        _block_threads.reset(token)


# ---- what runs ----


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
    """Print what runs and why: version, backend, instruction set, threads and where their number came from, build.

    Parameters
    ----------
    as_dict : bool
        Return the same as a dictionary and print nothing.

    Returns
    -------
    dict or None
        With as_dict: version, backend, backend_why, isa, isa_why, isas_here (those that can run here), isas_built,
        threads, threads_why, pool_workers (threads that were started so far), compiler, machine, python, numpy.

    Examples
    --------
    >>> from attentile import show_config, use_backend
    >>> with use_backend("numpy"):
    ...     config = show_config(as_dict=True)
    >>> config["backend"], config["backend_why"]
    ('numpy', 'use_backend()')
    """
    threads, source = _threads_and_source()
    core = active
    config: dict[str, Any] = {
        "version": version(),
        "backend": "compiled" if core is not None else "numpy",
        "backend_why": _why_backend,
        "isa": core.get_isa() if core is not None else "none (NumPy)",
        "isa_why": _why_isa if core is not None else _why_backend,
        "isas_here": [isa for isa, there in _core.isas().items() if there] if _core is not None else [],
        "isas_built": list(_core.isas()) if _core is not None else [],
        "threads": threads,
        "threads_why": source,
        "pool_workers": _core.pool_workers() if _core is not None else 0,
        "compiler": _core.compiler() if _core is not None else "none",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if as_dict:
        return config
    for key, value in config.items():
        print(f"{key:13} {', '.join(value) if isinstance(value, list) else value}")
    return None


def _read_environment() -> None:
    """The variables ATTENTILE_...; what is forced and not there is an error, never a silent other choice."""
    backend, isa, name = os.environ.get("ATTENTILE_BACKEND"), os.environ.get("ATTENTILE_ISA"), "ATTENTILE_BACKEND"
    try:
        if backend:
            _activate(backend, None, name)
        if isa:
            name = "ATTENTILE_ISA"
            _activate(backend or "compiled", isa, name)
        name = "ATTENTILE_NUM_THREADS"
        _from_environment()
    except ValueError as error:
        raise ImportError(f"attentile: {name} can't be met: {error}") from None


_read_environment()
