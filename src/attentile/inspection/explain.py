"""What a call of attention() will do and why, without computing it.

The report cannot differ from what happens: the checks and conversions are those of attention() itself, and the core
divides the work and walks over the keys with the code of the pass (core/_count.pxi).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import dispatch
from ..arguments import check_out
from ..attention import OPTIONS, AllOptions
from ..core.constants import CHUNK
from ..outputs import why_indirect
from ..runtime import backend
from ..runtime.threads import threads_for
from ..scores import Scores, checked
from .structures import as_structure

Array = NDArray[Any]

# Fields that have the name of a count, see core/_count.pxi.
_COUNTED = ("threads", "core_calls", "lanes", "block_rows", "blocks", "tasks", "chunks", "chunks_visited")


@dataclass(frozen=True, eq=False)  # eq: half the time of making the class, at every import
class Explanation:
    """What `explain` found. ``print`` it for a report; the fields are for programs and tests."""

    path: str  #: "compiled" (the arguments as they are), "compiled, after conversion" or "NumPy".
    why_path: str  #: Which arguments are converted first, or why the kernels do not run.
    isa: str  #: Instruction set of the kernels, or "none (NumPy)".
    compute: np.dtype[Any]  #: dtype of the arithmetic.
    dtype: np.dtype[Any]  #: dtype of the result.
    shapes: str  #: Of q, k, v and the result, in words.
    threads: int  #: Threads that will work, at most.
    core_calls: int  #: Calls of the core, more than one if the batch axes do not fold into one.
    lanes: int  #: Rows per vector; 0 with NumPy, as block_rows, blocks, tasks and chunks.
    few: bool  #: Whether the tiles for few rows run, whose lanes are keys.
    block_rows: int  #: Rows per block, at most.
    blocks: int  #: Blocks of rows.
    tasks: int  #: What threads take one of at a time.
    lane_use: float  #: Rows / lanes that are computed, 0 to 1.
    chunks: int  #: Pairs of a block of rows and a chunk of 256 keys.
    chunks_visited: int  #: Those that are not skipped.
    useful_flops: int  #: FLOPs of the pairs of a query and a key that it sees.
    executed_flops: int  #: FLOPs of the keys that are computed, in whole vectors of rows.
    output_bytes: int  #: Bytes of the arrays that are returned.
    copies: dict[str, str]  #: Why, for each argument that is copied.
    notes: tuple[str, ...]  #: What to do better, and what may surprise.

    @property
    def visited_percent(self) -> float:
        """Share of the chunks that are visited, in per cent."""
        return 100 * self.chunks_visited / max(self.chunks, 1)

    @property
    def skipped_percent(self) -> float:
        """Share of the chunks that are skipped, in per cent."""
        return 100 * (self.chunks - self.chunks_visited) / max(self.chunks, 1)

    def __str__(self) -> str:
        path = self.path if self.path == "NumPy" else f"{self.path} ({self.isa})"
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        lines = [f"attention: {path}, {self.compute} arithmetic, {self.dtype} result, {threads}"]
        rows = [("path", self.why_path), ("shapes", self.shapes)]
        if self.lanes:
            used = "keys" if self.few else f"rows, {100 * self.lane_use:.0f} % of the lanes used"
            blocks = f"{self.blocks} blocks of up to {self.block_rows} rows, {self.tasks} tasks"
            rows.append(("rows", f"{blocks}, vectors of {self.lanes} {used}"))
            visited = f"{self.visited_percent:.1f} % visited, {self.skipped_percent:.1f} % skipped"
            rows.append(("keys", f"{self.chunks} chunks of {CHUNK} keys x blocks: {visited}"))
        rows.append(("work", f"useful {_flops(self.useful_flops)}, executed {_flops(self.executed_flops)}"))
        rows.append(("output", _bytes(self.output_bytes)))
        rows += [("copy", f"{name}: {why}") for name, why in self.copies.items()] or [("copies", "none")]
        rows += [("note", note) for note in self.notes]
        return "\n".join(lines + [f"  {name:8}{text}" for name, text in rows])


class _Call:
    """A call as attention() sees it: what was given, and what it was converted to."""

    def __init__(self, q: ArrayLike, k: ArrayLike, v: ArrayLike, options: Mapping[str, Any]) -> None:
        self.given: dict[str, Any] = {"q": q, "k": k, "v": v, **options}
        self.threads = threads_for(options.get("num_threads"), "attention")
        self.scores, self.v = checked(q, k, v, options)
        self.shape = (*self.scores.shape[:-1], self.v.shape[-1])
        self.on = dispatch.chosen(self.scores)
        self.compiled = self.on is backend.compiled
        self.out, self.why_out_copied = options.get("out"), ""
        if self.out is not None:
            check_out("attention", self.out, self.shape, self.scores.dtype)
            self.why_out_copied = why_indirect(self.out, self.scores, self.v)
        beside = options.get("return_lse") or options.get("return_weights")
        self.idle = self.scores.empty or (self.v.shape[-1] == 0 and not beside)

    def takes(self, **argument: Any) -> bool:
        """Whether the core takes this argument as it is, among others that it takes."""
        arguments = {"q": self.scores.q, "k": self.scores.k, "v": self.v, **self.scores.options, **argument}
        q, k, v = (arguments.pop(name) for name in "qkv")
        return bool(self.on.takes(q, k, v, arguments))

    def count(self) -> Counter[str]:
        """Counts of core/_count.pxi; what a backend does not have is 0."""
        if self.idle:
            return Counter(threads=1)
        v, out = self.v, None if self.why_out_copied else self.out
        self.scores.before = None  # what rows know already does not change their way over these keys
        if v.shape[-1] == 0:
            v, out = self.scores.without_values(v), None
        return Counter(self.on.explain(self.scores, v, out, bool(self.given.get("return_weights")), self.threads))


def explain(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[AllOptions]) -> Explanation:
    """Tell what `attention(q, k, v, **options)` will do and why, without computing it.

    The arguments are checked, converted and read as attention() would do it.

    Parameters
    ----------
    q, k, v, **options
        As in `attention`. Nothing is written to an `out`.

    Returns
    -------
    Explanation
        A report to ``print``, and its fields. A chunk of 256 keys is visited for a block of rows if intervals and mask
        let some row see some key in it; a bias of -inf excludes keys, but skips nothing. A pair of a query and a key
        costs 2 (D + Dv) FLOPs: `Explanation.useful_flops` counts the pairs that are allowed,
        `Explanation.executed_flops` what the kernels run (without exp, masks, and a rare second visit after NaN).

    Raises
    ------
    TypeError, ValueError
        Whatever `attention` refuses, with the same message; an option that it does not have.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import explain
    >>> x = np.zeros((1, 2, 1024, 64), np.float32)
    >>> report = explain(x, x, x, mask=np.tri(1024, dtype=bool))
    >>> report.useful_flops == 2 * (1024 * 1025 // 2) * 2 * (64 + 64)  # heads, pairs, width
    True
    >>> print(report.notes[0])
    mask is dense and says causal=True: give that instead, and no (L, S) array is read
    """
    unknown = options.keys() - OPTIONS.keys()
    if unknown:
        raise TypeError(f"explain: unexpected keyword argument {min(unknown)!r}; attention() has {', '.join(OPTIONS)}")
    call = _Call(q, k, v, options)
    copies = _copies(call)
    path, why = _path(call, copies)
    scores, count = call.scores, call.count()
    return Explanation(
        path=path,
        why_path=why,
        isa=call.on.get_isa() if call.compiled else "none (NumPy)",
        compute=scores.compute,
        dtype=scores.dtype,
        shapes=f"q {np.shape(q)}, k {np.shape(k)}, v {np.shape(v)} -> {call.shape}",
        few=bool(count["few"]),
        lane_use=count["rows"] / max(count["pitches"], 1),
        useful_flops=2 * count["pairs"] * (scores.width + call.v.shape[-1]),
        executed_flops=count["executed_flops"],
        **{name: count[name] for name in _COUNTED},
        output_bytes=_output_bytes(call),
        copies=copies,
        notes=tuple(_notes(call, count)),
    )


# ---- the way to the core ----


def _path(call: _Call, copies: dict[str, str]) -> tuple[str, str]:
    """(path, why)."""
    if call.scores.score_mod is not None and backend.active is not None:
        return "NumPy", "score_mod= is a Python function, which the compiled kernels cannot call"
    if not call.compiled:
        return "NumPy", f"{backend.why_active}; no compiled kernels"
    if call.scores.empty or call.v.shape[-1] == 0:
        return "compiled, after conversion", "an axis is empty, which Python sees to"
    names = [name for name, value in call.given.items() if not call.takes(**{name: value})]
    if not names:
        return "compiled", "every argument is taken as it is"
    copied = ", ".join(name for name in names if name in copies)
    whys = [f"{copied}: copied first"] if copied else []
    for name in names:
        if name == "segments":
            made = "intervals" if call.scores.structure.same_segment is None else "a mask"
            whys.append(f"segments: Python makes {made} of the ids")
        elif name not in copies:
            kind = type(call.given[name])
            whys.append(f"{name}: {kind.__module__}.{kind.__name__}, which Python converts".replace("builtins.", ""))
    return "compiled, after conversion", "; ".join(whys)


def _copies(call: _Call) -> dict[str, str]:
    """Which arguments are copied before any work, or after it, and why."""
    scores = call.scores
    settled = {"q": scores.q, "k": scores.k, "v": call.v, "mask": scores.mask, "bias": scores.bias}
    found = {}
    for name, used in settled.items():
        value = call.given.get(name)
        if value is not None and used is not None and used.size:
            found[name] = "; ".join(_why_copied(name, value, used, scores))
    if call.why_out_copied and (size := math.prod(call.shape)):
        made = _bytes(size * scores.compute.itemsize)
        found["out"] = f"{call.why_out_copied}; a new array of {made} is copied into it"
    return {name: why for name, why in found.items() if why}


def _why_copied(name: str, value: Any, used: Array, scores: Scores) -> Iterator[str]:
    array = np.asarray(value)
    if not isinstance(value, np.ndarray) and not np.may_share_memory(array, np.asarray(value)):
        yield f"an array is made from a {type(value).__name__}"
    if name == "mask":
        if scores.structure.same_segment is not None:
            yield f"combined with the segments, {_bytes(used.nbytes)}"
    elif array.dtype != used.dtype:
        swapped = array.dtype.newbyteorder("=") == used.dtype
        what = "its bytes are swapped" if swapped else f"{array.dtype} is converted to {used.dtype}"
        yield f"{what} as a whole, {_bytes(array.size * used.dtype.itemsize)}"
    elif not array.flags.aligned:
        yield f"not aligned, {_bytes(array.nbytes)}"
    elif name != "bias" and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        yield f"last axis not contiguous, {_bytes(array.nbytes)}"


def _output_bytes(call: _Call) -> int:
    scores = call.scores
    lse = math.prod(call.shape[:-1]) if call.given.get("return_lse") else 0
    weights = math.prod(scores.shape) if call.given.get("return_weights") else 0
    return int((math.prod(call.shape) + weights) * scores.dtype.itemsize + lse * scores.compute.itemsize)


# ---- notes ----


def _notes(call: _Call, count: Counter[str]) -> Iterator[str]:
    """What keeps the call from being faster, and the way out."""
    if call.idle:
        yield "an axis is empty: nothing is computed"
        return
    scores = call.scores
    yield from _notes_on_masks(call, count)
    if scores.dtype.itemsize < 4 and not call.compiled:
        yield f"{scores.dtype} is converted to {scores.compute} as a whole, and the result rounded once"
    if count["lanes"] and count["rows"] * 2 <= count["pitches"]:
        lanes = scores.queries * (scores.heads // scores.kv_heads)
        used = "one lane is" if lanes == 1 else f"{lanes} lanes are"
        yield f"L = {scores.queries}: {used} used of a vector of {count['lanes']}"
    if count["core_calls"] > 1:
        yield f"the batch axes do not fold into one: {count['core_calls']} calls of the core, one after the other"
    if count["lanes"] and count["threads"] < call.threads:
        why = "too little work for another" if count["threads"] < count["tasks"] else f"{count['tasks']} tasks"
        yield f"{count['threads']} of {call.threads} threads: {why}"
    if call.given.get("return_weights"):
        yield "weights are an (L, S) array: attention_stats() gives their statistics without it"
    if not count["lanes"]:
        yield "NumPy computes a block of rows at a time, over every key that structure lets any of them see"


def _notes_on_masks(call: _Call, count: Counter[str]) -> Iterator[str]:
    scores = call.scores
    same_segment = scores.structure.same_segment
    if same_segment is not None:
        size = _bytes(same_segment.nbytes)
        yield (
            f"segments: the keys of an id are not contiguous, so an (L, S) mask is made ({size}); "
            "sort the keys by id to have intervals"
        )
    elif scores.mask is not None:
        mask = np.broadcast_to(scores.mask, (*scores.lead, scores.heads, scores.queries, scores.keys))
        form = as_structure(mask, scores.queries, scores.keys)
        if form == "":
            yield "mask is True everywhere: leave it out"
        elif form == "key_lengths=" and call.compiled and set(scores.mask.shape[-3:-1]) <= {1}:
            yield "mask is the same for all rows and says key_lengths=, as which it is taken"
        elif form is not None:
            yield f"mask is dense and says {form}: give that instead, and no (L, S) array is read"
    if count["bias_excludes"] and not count["bias_adds"]:
        yield "bias holds nothing but 0 and -inf: mask=(bias == 0) is the same and skips chunks of keys"
    elif count["chunks_idle"]:
        yield (
            f"bias is -inf in the whole of {100 * count['chunks_idle'] / count['chunks_visited']:.1f} % of the visited "
            "chunks: -inf skips nothing; exclude those keys by mask= or a structural option"
        )


def _bytes(n: float) -> str:
    return _scaled(n, 1024, "bytes", "KiB", "MiB", "GiB")


def _flops(n: float) -> str:
    return _scaled(n, 1000, "FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP")


def _scaled(n: float, step: int, *units: str) -> str:
    power = sum(n >= step**i for i in range(1, len(units)))
    return f"{n / step**power:.4g} {units[power]}"
