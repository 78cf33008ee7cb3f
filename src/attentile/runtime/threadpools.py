"""Lets threadpoolctl, where it is installed, find the core's thread pool and limit it like those of BLAS and OpenMP."""

from __future__ import annotations

from . import backend, config, threads


def introduce() -> None:
    """Registers the core with threadpoolctl, at import: threadpool_limits() sets the pools that it knows by then."""
    if backend.active is None:
        return
    try:
        from threadpoolctl import LibController, register
    except ImportError:  # not installed, or older than 3.2, which takes controllers
        return

    class Controller(LibController):  # type: ignore[misc]
        user_api = "attentile"
        internal_api = "attentile"
        filename_prefixes = ("_core.",)
        check_symbols = ("at_pool_workers",)  # other packages have a library called "_core" too

        def get_num_threads(self) -> int:
            return threads.process_threads()[0]

        def set_num_threads(self, num_threads: int) -> None:
            # threadpoolctl restores the number it found: if that was the default, the setting ends.
            threads.set_num_threads(None if num_threads == threads.default_threads()[0] else num_threads)

        def get_version(self) -> str:
            return config.version()

    register(Controller)
