"""What a call of attention() will do and why, without computing it.

The arguments go through the checks and conversions of attention() itself, and then, in the core, through the pass's own
division of the work and its own way over the keys (core/_count.pxi). So what is told is what happens.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import dispatch
from ..arguments import check_out
from ..attention import OPTIONS
from ..core.constants import CHUNK
from ..outputs import Outputs, why_indirect
from ..runtime import backend
from ..runtime.threads import threads_for
from ..scores import Scores, checked
from .structures import as_structure

Array = NDArray[Any]


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

    def __init__(self, q: ArrayLike, k: ArrayLike, v: ArrayLike, options: dict[str, Any]) -> None:
        self.given: dict[str, Any] = {"q": q, "k": k, "v": v, **options}
        self.wanted = {**OPTIONS, **options}
        self.threads = threads_for(self.wanted["num_threads"], "attention")
        self.scores, self.v = checked(q, k, v, options)
        self.shape = Outputs(self.scores, self.v.shape[-1]).shape
        self.out, self.why_out_copied = self.wanted["out"], ""
        if self.out is not None:
            scores = self.scores
            check_out("attention", self.out, self.shape, scores.dtype)
            read = (scores.q, scores.k, self.v, scores.mask, scores.bias, *(scores.before or ()))
            self.why_out_copied = why_indirect(self.out, scores, read)
        self.on = dispatch.chosen(self.scores)
        self.compiled = self.on is backend.compiled
        beside = self.wanted["return_lse"] or self.wanted["return_weights"]
        self.idle = self.scores.empty or (self.v.shape[-1] == 0 and not beside)

    def converted(self) -> list[str]:
        """The arguments that the core does not take as they are: each is tried among those that it takes."""
        settled = {"q": self.scores.q, "k": self.scores.k, "v": self.v, **self.scores.options}
        found = []
        for name, value in self.given.items():
            tried = {**settled, name: value}
            if not self.on.takes(tried.pop("q"), tried.pop("k"), tried.pop("v"), tried):
                found.append(name)
        return found

    def count(self) -> Counter[str]:
        """Counts of core/_count.pxi; what a backend does not have is 0."""
        if self.idle:
            return Counter(threads=1)
        v, out = self.v, None if self.why_out_copied else self.out
        self.scores.before = None  # what rows know already does not change their way over these keys
        if v.shape[-1] == 0:
            v, out = self.scores.without_values(v), None
        return Counter(self.on.explain(self.scores, v, out, bool(self.wanted["return_weights"]), self.threads))


def explain(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Any) -> Explanation:
    """Tell what `attention(q, k, v, **options)` will do and why, without computing it.

    The arguments are checked, and converted where attention() would convert them; a mask and a bias are read as
    the call itself reads them.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`, shapes (..., Hq, L, D), (..., Hkv, S, D), (..., Hkv, S, Dv).
    **options
        Every option of `attention`. An `out` is not written.

    Returns
    -------
    Explanation
        Its text (``print`` it) and fields: path, instruction set, dtypes, threads, blocks of rows, chunks of 256 keys
        that are visited and skipped, FLOPs, bytes of the output, copies and notes. A chunk is visited for a block of
        rows if intervals and mask let some row see some key of it; the -inf of a bias exclude keys but skip nothing.
        FLOPs are 2 (D + Dv) for a pair of a query and a key: `Explanation.useful_flops` counts the pairs that are
        allowed, `Explanation.executed_flops` what the kernels run (without exp and masks, and without a rare second
        visit on NaN).

    Raises
    ------
    TypeError, ValueError
        Whatever `attention` refuses, with its message, and an option that it does not have.

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
        threads=count["threads"],
        core_calls=count["core_calls"],
        lanes=count["lanes"],
        few=bool(count["few"]),
        block_rows=count["block_rows"],
        blocks=count["blocks"],
        tasks=count["tasks"],
        lane_use=count["rows"] / max(count["pitches"], 1),
        chunks=count["chunks"],
        chunks_visited=count["chunks_visited"],
        useful_flops=2 * count["pairs"] * (scores.width + call.v.shape[-1]),
        executed_flops=count["executed_flops"],
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
    names = call.converted()
    if not names:
        return "compiled", "every argument is taken as it is"
    copied = [name for name in names if name in copies]
    whys = [f"{', '.join(copied)}: copied first"] if copied else []
    for name in names:
        kind = type(call.given[name])
        if name == "segments":
            made = "intervals" if call.scores.structure.same_segment is None else "a mask"
            whys.append(f"segments: Python makes {made} of the ids")
        elif name not in copies:
            whys.append(f"{name}: {kind.__module__}.{kind.__name__}, which Python converts".replace("builtins.", ""))
    return "compiled, after conversion", "; ".join(whys)


def _copies(call: _Call) -> dict[str, str]:
    """Which arguments are copied before any work, or after it, and why."""
    scores = call.scores
    settled = {"q": scores.q, "k": scores.k, "v": call.v, "mask": scores.mask, "bias": scores.bias}
    found = {}
    for name, used in settled.items():
        value = call.given.get(name)
        if value is not None and used is not None and used.size and (reasons := _why_copied(name, value, used, scores)):
            found[name] = "; ".join(reasons)
    if call.why_out_copied and call.out.size:
        size = _bytes(call.out.size * scores.compute.itemsize)
        found["out"] = f"{call.why_out_copied}; a new array of {size} is copied into it"
    return found


def _why_copied(name: str, value: Any, used: Array, scores: Scores) -> list[str]:
    array = np.asarray(value)
    reasons = []
    if not isinstance(value, np.ndarray) and not np.may_share_memory(array, np.asarray(value)):
        reasons.append(f"an array is made from a {type(value).__name__}")
    if name == "mask":
        if scores.structure.same_segment is not None:
            reasons.append(f"combined with the segments, {_bytes(used.nbytes)}")
    elif array.dtype != scores.compute:
        swapped = array.dtype.newbyteorder("=") == scores.compute
        what = "its bytes are swapped" if swapped else f"{array.dtype} is converted to {scores.compute}"
        reasons.append(f"{what} as a whole, {_bytes(array.size * scores.compute.itemsize)}")
    elif not array.flags.aligned:
        reasons.append(f"not aligned, {_bytes(array.nbytes)}")
    elif name != "bias" and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        reasons.append(f"last axis not contiguous, {_bytes(array.nbytes)}")
    return reasons


def _output_bytes(call: _Call) -> int:
    total: int = math.prod(call.shape) * call.scores.dtype.itemsize
    if call.wanted["return_lse"]:
        total += math.prod(call.shape[:-1]) * call.scores.compute.itemsize
    if call.wanted["return_weights"]:
        total += math.prod(call.scores.shape) * call.scores.dtype.itemsize
    return total


# ---- notes ----


def _notes(call: _Call, count: Counter[str]) -> list[str]:
    """What keeps the call from being faster, and the way out."""
    if call.idle:
        return ["an axis is empty: nothing is computed"]
    scores = call.scores
    notes = _notes_on_masks(call, count)
    if scores.dtype.itemsize < 4:
        notes.append(f"{scores.dtype} is converted to {scores.compute} as a whole, and the result rounded once")
    if count["lanes"] and count["rows"] * 2 <= count["pitches"]:
        lanes = scores.queries * (scores.heads // scores.kv_heads)
        used = "one lane is" if lanes == 1 else f"{lanes} lanes are"
        notes.append(f"L = {scores.queries}: {used} used of a vector of {count['lanes']}")
    if count["core_calls"] > 1:
        notes.append(
            f"the batch axes do not fold into one: {count['core_calls']} calls of the core, one after the other"
        )
    if count["lanes"] and count["threads"] < call.threads:
        why = "too little work for another" if count["threads"] < count["tasks"] else f"{count['tasks']} tasks"
        notes.append(f"{count['threads']} of {call.threads} threads: {why}")
    if call.wanted["return_weights"]:
        notes.append("weights are an (L, S) array: attention_stats() gives their statistics without it")
    if not count["lanes"]:
        notes.append("NumPy computes every score, the masked ones too, a head and a tile of rows at a time")
    return notes


def _notes_on_masks(call: _Call, count: Counter[str]) -> list[str]:
    notes = []
    scores = call.scores
    same_segment = scores.structure.same_segment
    if same_segment is not None:
        notes.append(
            f"segments: the keys of an id are not neighbours, so an (L, S) mask is made "
            f"({_bytes(same_segment.nbytes)}); sort the keys by id to have intervals"
        )
    elif scores.mask is not None:
        mask = np.broadcast_to(scores.mask, (*scores.lead, scores.heads, scores.queries, scores.keys))
        form = as_structure(mask, scores.queries, scores.keys)
        if form == "":
            notes.append("mask is True everywhere: leave it out")
        elif form == "key_lengths=" and call.compiled and set(scores.mask.shape[-3:-1]) <= {1}:
            notes.append("mask is the same for all rows and says key_lengths=, as which it is taken")
        elif form is not None:
            notes.append(f"mask is dense and says {form}: give that instead, and no (L, S) array is read")
    if count["bias_excludes"] and not count["bias_adds"]:
        notes.append("bias holds nothing but 0 and -inf: mask=(bias == 0) is the same and skips chunks of keys")
    elif count["chunks_idle"]:
        share = 100 * count["chunks_idle"] / count["chunks_visited"]
        notes.append(
            f"bias is -inf in the whole of {share:.1f} % of the visited chunks: "
            "-inf skips nothing; exclude those keys by mask= or a structural option"
        )
    return notes


def _bytes(n: float) -> str:
    return _scaled(n, 1024, ("bytes", "KiB", "MiB", "GiB"))


def _flops(n: float) -> str:
    return _scaled(n, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(n: float, step: int, units: tuple[str, ...]) -> str:
    power = 0
    while n >= step and power < len(units) - 1:
        n /= step
        power += 1
    return f"{n:.4g} {units[power]}"
