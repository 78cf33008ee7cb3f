"""The guard of a cache where there is no compiled core: calls that must not meet are refused, none of them waits."""

from __future__ import annotations

from threading import get_ident
from typing import Any


class Guard:
    """Stands in for CacheView of core/_cache.pxi, which is the guard of a cache and holds its arrays for the core.

    Each thread signs in under its own number, then looks who else is there. Of two that come at the same moment both
    may be refused. What an interrupt has left under the number of a thread is gone after its next call.
    """

    bound = False  # there is no core that could use the arrays

    def __init__(self) -> None:
        self.users: dict[int, bool] = {}  # thread: whether it changes the cache

    def bind(self, arrays: Any) -> None:
        pass

    def using(self, change: bool, refusal: str) -> _Using:
        return _Using(self.users, change, refusal)


class _Using:
    def __init__(self, users: dict[int, bool], change: bool, refusal: str) -> None:
        self._users = users
        self._change, self._refusal = change, refusal

    def __enter__(self) -> None:
        self._users[get_ident()] = self._change
        others = [change for thread, change in self._users.copy().items() if thread != get_ident()]
        if any(others) or (self._change and others):
            self.__exit__()
            raise RuntimeError(self._refusal)

    def __exit__(self, *_: object) -> None:
        self._users.pop(get_ident(), None)
