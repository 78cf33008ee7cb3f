"""threadpoolctl finds the pool of the core and limits it like those of BLAS and OpenMP, where it is installed."""

from __future__ import annotations

from . import backend, config, threads


def introduce() -> None:
    """Registers a controller for the compiled core with threadpoolctl (3.2 or later), if there are both.

    At import, because threadpool_limits() sets only the pools that it knows when its block begins. threadpoolctl goes
    through the libraries of the process by their names, and asks for a symbol where a name like "_core" may be
    another's.
    """
    if backend.active is None:
        return
    try:
        from threadpoolctl import LibController, register
    except ImportError:  # not installed, or too old to take controllers
        return

    class Controller(LibController):  # type: ignore[misc]
        user_api = "attentile"
        internal_api = "attentile"
        filename_prefixes = ("_core.",)
        check_symbols = ("at_pool_workers",)

        def get_num_threads(self) -> int:
            return threads.process_threads()[0]

        def set_num_threads(self, num_threads: int) -> None:
            # Putting back the number that was found as the default ends the setting.
            threads.set_num_threads(None if num_threads == threads.default_threads()[0] else num_threads)

        def get_version(self) -> str:
            return config.version()

    register(Controller)
