"""How many threads a call uses, and why. No setting of another library is changed."""

from __future__ import annotations

import contextvars
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from ..arguments import positive_index

_MAX_THREADS = 256

# Where version 2 and version 1 of control groups are mounted.
_CGROUP_V2 = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_CGROUP_V1 = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu")

_process_threads: int | None = None  # set_num_threads
_block_threads: contextvars.ContextVar[int | None] = contextvars.ContextVar("attentile_num_threads", default=None)
_default: tuple[int, str] | None = None


# ---- the default ----


def _cgroup_quota(root: str = "/") -> float | None:
    """CPUs that the control groups of this process and their parents allow, None if unlimited or unknown.

    root is where /proc and /sys are looked for. Nothing is raised, whatever these files hold.
    """
    limits = []
    for line in _text_of(root, "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)  # number, controllers (none in version 2), group
        if len(fields) < 3 or (fields[1] and "cpu" not in fields[1].split(",")):
            continue
        groups = [part for part in fields[2].split("/") if part not in ("", ".", "..")]  # "..": not of this container
        for base in _CGROUP_V1 if fields[1] else _CGROUP_V2:
            for group in accumulate([os.path.join(root, base), *groups], os.path.join):
                limits += _quota_of(group)
    return min(limits, default=None)


def _text_of(*path: str) -> str:
    """The text of a file that may be missing, unreadable, or hold bytes that are not UTF-8; "" if it cannot be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (OSError, ValueError):  # a name with a null byte is a ValueError
        return ""


def _quota_of(group: str) -> list[float]:
    """[quota / period] of one group, [] without a limit."""
    files_of_version_1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    text = _text_of(group, "cpu.max") or " ".join(_text_of(group, name) for name in files_of_version_1)
    try:
        quota, period = map(int, text.split())
    except ValueError:  # no such file, "max", or nonsense
        return []
    return [quota / period] if 0 < quota < 2**63 and 0 < period < 2**63 else []


def _from_environment() -> tuple[int, str] | None:
    for name in ("ATTENTILE_NUM_THREADS", "OMP_NUM_THREADS"):
        given = os.environ.get(name, "")
        text = given.split(",")[0].strip()  # OpenMP allows one number per nesting level: the first one is ours
        try:
            count = int(text) if text.isdecimal() else 0
        except ValueError:  # more digits than int() takes
            count = _MAX_THREADS
        if count > 0:
            return min(count, _MAX_THREADS), name
        if given.strip() and name.startswith("ATTENTILE"):  # a bad OMP_NUM_THREADS is for OpenMP to report
            raise ValueError(f"{name} is {given!r}; it must be a positive integer")
    return None


try:
    _from_environment()  # a value that makes no sense is an error; it is not silently ignored
except ValueError as _error:
    raise ImportError(f"attentile: ATTENTILE_NUM_THREADS can't be met: {_error}") from None


def default_threads() -> tuple[int, str]:
    """(threads, where the number came from) without any setting; found once."""
    global _default
    found = _default or _from_environment()  # one reading of _default: another thread may reset it meanwhile
    if found is None:
        cpus, source = os.cpu_count() or 1, "CPUs this process may use"
        if hasattr(os, "sched_getaffinity"):  # the calling thread or the first one may be pinned to one CPU
            cpus = len(os.sched_getaffinity(0) | os.sched_getaffinity(os.getpid()))
        quota = _cgroup_quota()
        if quota is not None and math.ceil(quota) < cpus:
            cpus, source = max(1, math.ceil(quota)), "cgroup CPU quota"
        found = min(cpus, _MAX_THREADS), source
    _default = found
    return found


# ---- settings ----


def process_threads() -> tuple[int, str]:
    """(threads, where the number came from) outside any num_threads() block."""
    n = _process_threads
    return default_threads() if n is None else (n, "set_num_threads()")


def threads_and_source() -> tuple[int, str]:
    """(threads, where the number came from) of a call made here without num_threads=."""
    in_block = _block_threads.get()
    return process_threads() if in_block is None else (in_block, "num_threads() block")


def threads_for(call: int | None, function: str) -> int:
    """Threads of one call: its own argument if given, else the setting that applies here."""
    return get_num_threads() if call is None else _count(function, "num_threads", call)


def _count(function: str, name: str, n: int) -> int:
    return min(positive_index(function, name, n), _MAX_THREADS)


def get_num_threads() -> int:
    """Number of threads that a call without ``num_threads=`` may use here.

    The first of these that is set: a `num_threads` block, `set_num_threads`, ATTENTILE_NUM_THREADS, OMP_NUM_THREADS;
    otherwise the CPUs this process may use (its affinity, on Linux), capped by its cgroup quota. Small calls use fewer
    threads. ``threadpool_limits`` of threadpoolctl, where that is installed, calls `set_num_threads`.

    Returns
    -------
    int
        At least 1, at most 256. `show_config` says where the number came from.

    Examples
    --------
    >>> from attentile import get_num_threads
    >>> get_num_threads() >= 1
    True
    """
    return threads_and_source()[0]


def set_num_threads(n: int | None) -> None:
    """Set the number of threads for the whole process.

    Parameters
    ----------
    n : int or None
        At least 1; above 256 it counts as 256. None restores the default of `get_num_threads`, for which environment,
        affinity and quota are read again.

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
    _process_threads = None if n is None else _count("set_num_threads", "n", n)
    if n is None:
        _default = None


@contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Context manager: calls in the block use n threads. It affects this Python thread or asyncio task only.

    Parameters
    ----------
    n : int
        As in `set_num_threads`. The argument ``num_threads=`` of a call takes precedence. Threads started in the block
        are not affected, unless Python gives them its context (``sys.flags.thread_inherit_context``, the default of
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
    token = _block_threads.set(_count("num_threads", "n", n))
    try:
        yield
    finally:
        _block_threads.reset(token)
