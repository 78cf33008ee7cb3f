from typing import Any

from numpy.typing import NDArray
from typing_extensions import disjoint_base

from .twin_angles import Turn

def attend(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], out: NDArray[Any], scale: float, threads: int, *,
    mask: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, lo: NDArray[Any] | None = None,
    hi: NDArray[Any] | None = None, lse: NDArray[Any] | None = None, weights: NDArray[Any] | None = None,
    fill: float | None = None, softcap: float = 0.0, sinks: NDArray[Any] | None = None,
    slopes: NDArray[Any] | None = None, start: NDArray[Any] | None = None, state: NDArray[Any] | None = None,
) -> None: ...  # fmt: skip
def stats(
    q: NDArray[Any], k: NDArray[Any], state: NDArray[Any], scale: float, threads: int, *,
    mask: NDArray[Any] | None = None, bias: NDArray[Any] | None = None, lo: NDArray[Any] | None = None,
    hi: NDArray[Any] | None = None, softcap: float = 0.0, slopes: NDArray[Any] | None = None,
    start: NDArray[Any] | None = None, entropy: NDArray[Any] | None = None, largest: NDArray[Any] | None = None,
    received: NDArray[Any] | None = None, top_weights: NDArray[Any] | None = None,
    top_keys: NDArray[Any] | None = None, rows: NDArray[Any] | None = None, chosen: NDArray[Any] | None = None,
) -> None: ...  # fmt: skip
def attend_plain(q: object, k: object, v: object, scale: object, threads: int) -> NDArray[Any] | None: ...
def takes(q: object, k: object, v: object, options: dict[str, Any]) -> bool: ...
def explain(
    scores: Any, v: NDArray[Any], out: NDArray[Any] | None, with_weights: bool, threads: int
) -> dict[str, int]: ...
def store_tokens(
    k: NDArray[Any], v: NDArray[Any], shape: tuple[int, int, int, int], table: NDArray[Any], starts: NDArray[Any],
    counts: NDArray[Any],
) -> None: ...  # fmt: skip
def attend_pages(
    q: NDArray[Any], shape: tuple[int, int, int, int], table: NDArray[Any], keys: int, kept: int, out: NDArray[Any],
    scale: float, threads: int, *, mask: NDArray[Any] | None = None, bias: NDArray[Any] | None = None,
    lo: NDArray[Any] | None = None, hi: NDArray[Any] | None = None, lse: NDArray[Any] | None = None,
    weights: NDArray[Any] | None = None, softcap: float = 0.0, sinks: NDArray[Any] | None = None,
    slopes: NDArray[Any] | None = None, start: NDArray[Any] | None = None,
) -> None: ...  # fmt: skip

@disjoint_base
class CacheView:
    def __init__(
        self, shape: tuple[int, int, int, int], table: NDArray[Any], lengths: NDArray[Any], held_from: NDArray[Any],
        writable: NDArray[Any], dtype: object, left: int, kept: int, capacity: int,
    ) -> None: ...  # fmt: skip
    def append(self, k: object, v: object) -> bool: ...
    def attend(self, q: object, threads: int, scale: object = None, softcap: object = None) -> NDArray[Any] | None: ...

def encode(out: NDArray[Any], first_position: float, ratio_high: float, ratio_low: float) -> None: ...
def rotate(
    x: NDArray[Any], y: NDArray[Any], turn: Turn, positions: NDArray[Any] | None, first: int, threads: int
) -> None: ...
def isas() -> dict[str, bool]: ...
def set_isa(name: str) -> None: ...
def get_isa() -> str: ...
def fma_rounds(itemsize: int, rounds: int) -> float: ...
def read_plainly(data: NDArray[Any], threads: int) -> None: ...
def constants() -> dict[str, float]: ...
def compiler() -> str: ...
def pool_workers() -> int: ...
