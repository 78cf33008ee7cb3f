"""The file of a key-value cache: an .npz archive without pickles, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .retention import Held

Array = NDArray[Any]
File = str | os.PathLike[str] | BinaryIO

# The second one has tokens of 16 bits, which older readers would take for damage: bfloat16 as its bits.
FORMATS = ("attentile.KVCache 1", "attentile.KVCache 2")
_NAMES = ("config", "lengths", "held_from", "keys", "values")
_WINDOW = ("window", "sink_tokens", "sink_positions")
_SETTINGS = ("batch", "kv_heads", "head_dim", "capacity", "value_dim", "dtype", *_WINDOW, "rotary")
_TABLE = "rotary_"  # prefix of the arrays among the options of the rotary embedding


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays inside the options, for JSON."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"KVCache.save: rotary has a {type(value).__name__} in it; it must be numbers, text and arrays")


def pack(held: Held) -> dict[str, Array]:
    """All there is to store of a cache: its settings as text, and the tokens that are held, item after item."""
    import json  # here, as below: most programs that import attentile store no cache

    runs = [held.runs(item) for item in range(held.batch)]
    k, v = held.copies(runs, held.format.items)
    used = np.arange(k.shape[2]) < np.array([[sum(end - first for first, end in own)] for own in runs]).reshape(-1, 1)
    rotary, tables = held.rotary, {}
    if rotary is not None:
        for name, value in rotary.items():
            if isinstance(value, np.ndarray):  # a dtype that .npy doesn't know (bfloat16) fits into float32
                tables[_TABLE + name] = value if value.dtype.kind in "biuf" else value.astype(np.float32)
        rotary = {name: value for name, value in rotary.items() if _TABLE + name not in tables}
    config: dict[str, Any] = {name: getattr(held, name) for name in _SETTINGS}
    config |= {"dtype": str(held.dtype), "rotary": rotary}
    return {
        "format": np.array(FORMATS[held.format.halves]),
        "config": np.array(json.dumps(config, default=_plain)),
        "lengths": held.lengths.astype(np.int64),
        "held_from": held.held_from.astype(np.int64),
        "keys": k.swapaxes(1, 2)[used],
        "values": v.swapaxes(1, 2)[used],
        **tables,
    }


def restore(kind: Callable[..., Any], stored: dict[str, Array]) -> Any:
    """The cache, of this kind, of what pack() gave."""
    import json

    try:
        config = json.loads(str(stored["config"][()]))
        if "sinks" in config:  # the name of sink_tokens in older files
            config["sink_tokens"] = config.pop("sinks")
        for name, array in stored.items():
            if name.startswith(_TABLE):
                config["rotary"][name.removeprefix(_TABLE)] = array
        cache = kind(**config)
        _refill(cache.held, *(stored[name] for name in ("lengths", "held_from", "keys", "values")))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"KVCache.load: the file is damaged ({error}); save it again") from error
    return cache


def _refill(held: Held, lengths: Array, held_from: Array, keys: Array, values: Array) -> None:
    """Puts tokens (all of an item, then of the next; kv_heads; width) where they were, into a new cache."""
    if lengths.shape != (held.batch,) or lengths.dtype != np.int64 or (lengths < 0).any():
        raise ValueError("lengths make no sense")
    highest = lengths if held.window is not None else 0 * lengths
    shaped = held_from.shape == lengths.shape and held_from.dtype == np.int64
    if not shaped or ((held_from < 0) | (held_from > highest)).any():
        raise ValueError("held_from makes no sense")
    held.lengths = lengths.astype(np.intp)
    held.held_from = held_from.astype(np.intp)
    nothing = np.zeros(held.batch, np.intp)
    held.check_capacity(nothing, held.held_from)
    runs = [(item, first, end) for item in range(held.batch) for first, end in held.runs(item)]
    total = sum(end - first for _, first, end in runs)
    for name, found, width in (("keys", keys, held.head_dim), ("values", values, held.value_dim)):
        if found.shape != (total, held.kv_heads, width) or found.dtype != held.format.items:
            raise ValueError(f"{name} are {found.shape} {found.dtype} for {total} tokens")
    at = 0
    for item, first, end in runs:
        starts, counts = nothing.copy(), nothing.copy()
        starts[item], counts[item] = first, end - first
        part = slice(at, at + end - first)
        held.pages.open(starts, counts, nothing, 0)
        held.pages.write(item, first, keys[part].swapaxes(0, 1), values[part].swapaxes(0, 1))
        at = part.stop
    held.replaced()


def write(file: File, stored: dict[str, Array]) -> None:
    """To a path: into a new file in the same folder, which then takes its name."""
    content: Any = stored
    if not isinstance(file, (str, os.PathLike)):
        if not hasattr(file, "write"):
            raise TypeError(f"KVCache.save: file is a {type(file).__name__}; it must be a path or a binary file")
        np.savez(file, **content)
        return
    path = os.path.realpath(file)  # through a symbolic link, not over it
    part = f"{path}.{os.urandom(6).hex()}.part"
    try:
        with open(part, "xb") as target:
            np.savez(target, **content)
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


def read(file: File) -> dict[str, Array]:
    """The arrays of a file that write() made, else ValueError."""
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as source:
            return _read(source, os.fspath(file))
    if not hasattr(file, "read"):
        raise TypeError(f"KVCache.load: file is a {type(file).__name__}; it must be a path or a binary file")
    return _read(file, "the file")


def _read(source: BinaryIO, name: str) -> dict[str, Array]:
    try:
        archive = np.load(source, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("not an .npz archive")
        with archive:
            stored = {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive makes zipfile and NumPy raise half of the exceptions that there are
        raise ValueError(
            f"KVCache.load: {name} is no cache, or damaged ({error}); give a file of KVCache.save"
        ) from None
    found = str(stored.get("format", "another kind of archive"))
    if found not in FORMATS:
        raise ValueError(
            f"KVCache.load: {name} is {found!r}; it must be {' or '.join(map(repr, FORMATS))}, a file of KVCache.save"
        )
    missing = [key for key in _NAMES if key not in stored]
    if missing:
        raise ValueError(f"KVCache.load: {name} is damaged, it lacks {', '.join(missing)}")
    return stored
