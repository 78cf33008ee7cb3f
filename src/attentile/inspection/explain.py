"""What a call of attention() will do and why, without computing it.

The arguments go through the checks and conversions of attention() itself, and its way to the core is followed with a
recorder in the core's place, so what is told is what happens. The core itself says how it cuts rows into blocks and
tasks; which keys are skipped repeats score_chunk() of _pass.pxi, and the tests hold both sides together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..attention import OPTIONS, _target
from ..call import Call, _run, check_out, nothing_to_compute, one_column, prepare, with_lead
from ..core.constants import CHUNK, WORD
from ..runtime import config

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)  # eq: half the time of making the class, at every import
class Explanation:
    """What `explain` found. ``print`` it for a report; the fields are for programs and tests."""

    path: str  #: "plain express lane", "general" or "NumPy"
    why_path: str  #: Why no faster one.
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
        path = {"NumPy": "NumPy", "general": f"general path, {self.isa}"}.get(self.path, f"{self.path}, {self.isa}")
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        lines = [f"attention: {path}, {self.compute} arithmetic, {self.dtype} result, {threads}"]
        rows = [("path", self.why_path), ("shapes", self.shapes)]
        if self.lanes:
            rows.append(
                ("rows", f"{self.blocks} blocks of up to {self.block_rows} rows, {self.tasks} tasks, "
                 f"vectors of {self.lanes} "
                 + ("keys" if self.few else f"rows, {100 * self.lane_use:.0f} % of the lanes used"))
            )  # fmt: skip
            rows.append(
                ("keys", f"{self.chunks} chunks of {CHUNK} keys x blocks: {self.visited_percent:.1f} % visited, "
                 f"{self.skipped_percent:.1f} % skipped")
            )  # fmt: skip
        rows.append(("work", f"useful {_flops(self.useful_flops)}, executed {_flops(self.executed_flops)}"))
        rows.append(("output", _bytes(self.output_bytes)))
        rows += [("copy", f"{name}: {why}") for name, why in self.copies.items()] or [("copies", "none")]
        rows += [("note", note) for note in self.notes]
        return "\n".join(lines + [f"  {name:8}{text}" for name, text in rows])


def explain(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Any) -> Explanation:
    """Tell what `attention(q, k, v, **options)` will do and why a faster path is not taken, without computing it.

    The arguments are checked, and converted where attention() would convert them; a dense mask or bias is read once.

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
    chosen = {**OPTIONS, **options}
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "mask": chosen["mask"], "bias": chosen["bias"]}
    arrays: dict[str, Any] = {name: None if value is None else np.asarray(value) for name, value in given.items()}
    rest = {name: chosen[name] for name in OPTIONS if name not in ("out", "mask", "bias") and "return" not in name}
    call = prepare(**arrays, **rest)
    path, why = _path(given, chosen)
    count = _count(call, chosen)
    copies = _copies(given, call)
    if chosen["out"] is not None:
        copies.update(_out_copy(chosen["out"], call))
    # NumPy computes every score.
    dense = 0 if _idle(call, chosen) else 2 * math.prod(call.scores) * (call.q.shape[-1] + max(call.v.shape[-1], 1))
    return Explanation(
        path, why, _isa(call.options.get("score_mod")) or "none (NumPy)", call.compute, call.dtype,
        f"q {np.shape(q)}, k {np.shape(k)}, v {np.shape(v)} -> {call.shape[call.drop :]}", count.threads, count.calls,
        count.lanes, count.few, count.block_rows, count.blocks, count.tasks, count.rows / max(count.pitches, 1),
        count.chunks, count.visited, count.useful, count.executed if count.lanes else dense,
        _output_bytes(call, chosen), copies, tuple(_notes(call, chosen, count)),
    )  # fmt: skip


# ---- the way to the core ----


def _isa(score_mod: Any) -> str | None:
    """The instruction set whose kernels will run, None for NumPy."""
    return None if config.active is None or score_mod is not None else str(config.active.get_isa())


def _path(given: dict[str, Any], options: dict[str, Any]) -> tuple[str, str]:
    """(path, why): the conditions of attention() and of attend_plain() of the core, in their order."""
    if config.active is None:
        return "NumPy", f"{config.show_config(as_dict=True)['backend_why']}; no compiled kernels"
    if options["score_mod"] is not None:
        return "NumPy", "score_mod= is a Python function, which the compiled kernels cannot call"
    special = [name for name in OPTIONS if name not in ("scale", "num_threads")]
    special = [name for name in special if options[name] is not OPTIONS[name]]
    special = [name for name in special if "return" not in name or options[name]]
    if special:
        return "general", f"{', '.join(f'{name}=' for name in special)} given"
    why = _why_not_plain(given["q"], given["k"], given["v"], options["scale"])
    return ("general", why) if why else ("plain express lane", "three native arrays (B, H, L, D) and no option")


def _why_not_plain(q: Any, k: Any, v: Any, scale: Any) -> str:
    if any(type(array) is not np.ndarray for array in (q, k, v)):
        return "q, k, v are not all plain NumPy arrays"
    kinds = [array.dtype for array in (q, k, v)]
    if kinds[0] not in (np.float32, np.float64) or any(kind is not np.dtype(kinds[0].type) for kind in kinds):
        return f"dtypes {', '.join(map(str, kinds))}: not all float32 or all float64 in native byte order"
    if any(array.ndim != 4 for array in (q, k, v)):
        return "q, k, v do not all have four axes"
    if scale is not None and type(scale) is not float:
        return f"scale is a {type(scale).__name__}, not a float"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "the batch axes broadcast"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "an axis is empty"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.shape[3] > 1 and array.strides[3] != array.itemsize:
            return f"{name}: last axis not contiguous"
        if any(number % array.itemsize for number in (array.ctypes.data, *array.strides[:3])):
            return f"{name}: not aligned"
    return ""


def _copies(given: dict[str, Any], call: Call) -> dict[str, str]:
    """Which arguments are copied before any work, and why."""
    found = {}
    for name, value in given.items():
        used = getattr(call, name)
        if value is None or used is None or used.size == 0:
            continue
        array = np.asarray(value)
        reasons = []
        if not isinstance(value, np.ndarray) and not np.may_share_memory(array, np.asarray(value)):
            reasons.append(f"an array is made from a {type(value).__name__}")
        if name == "mask":
            if call.keys.same_segment is not None:
                reasons.append(f"combined with the segments, {_bytes(used.nbytes)}")
        elif array.dtype != call.compute:
            swapped = array.dtype.newbyteorder("=") == call.compute
            what = "its bytes are swapped" if swapped else f"{array.dtype} is converted to {call.compute}"
            reasons.append(f"{what} as a whole, {_bytes(array.size * call.compute.itemsize)}")
        elif not array.flags.aligned:
            reasons.append(f"not aligned, {_bytes(array.nbytes)}")
        elif name != "bias" and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
            reasons.append(f"last axis not contiguous, {_bytes(array.nbytes)}")
        if reasons:
            found[name] = "; ".join(reasons)
    return found


def _out_copy(out: Any, call: Call) -> dict[str, str]:
    """Whether the core cannot write into out directly, so that a new array is filled and copied."""
    check_out("attention", out, call.shape[call.drop :], call.dtype)
    if out.size == 0 or np.may_share_memory(_target(out, call), out):
        return {}
    if call.options.get("score_mod") is not None:
        why = "score_mod= given"
    elif out.dtype != call.compute:
        why = f"computed in {call.compute}"
    elif not out.flags.aligned:
        why = "not aligned"
    elif out.shape[-1] > 1 and out.strides[-1] != out.itemsize:
        why = "last axis not contiguous"
    else:
        why = "it overlaps an input"
    return {"out": f"{why}; a new array of {_bytes(math.prod(call.shape) * call.compute.itemsize)} is copied into it"}


def _output_bytes(call: Call, options: dict[str, Any]) -> int:
    total = math.prod(call.shape) * call.dtype.itemsize
    if options["return_lse"]:
        total += math.prod(call.shape[:-1]) * call.compute.itemsize
    return total + (math.prod(call.scores) * call.dtype.itemsize if options["return_weights"] else 0)


# ---- counting what the core will do ----


@dataclass(eq=False, repr=False)
class _Count:
    """Sums over the calls of the core."""

    asked: int  # threads
    weights: bool
    core: Any  # None for NumPy
    value_width: int  # as given; the core takes a column for 0
    lanes: int = 0
    few: bool = False
    block_rows: int = 0
    calls: int = 0
    threads: int = 1
    blocks: int = 0
    tasks: int = 0
    rows: int = 0
    pitches: int = 0  # rows in whole vectors
    chunks: int = 0
    visited: int = 0
    idle: int = 0  # visited chunks of which only the bias excludes every key
    useful: int = 0
    executed: int = 0
    bias_is_mask: bool = True  # nothing but 0 and -inf
    bias_excludes: bool = False


def _idle(call: Call, options: dict[str, Any]) -> bool:
    beside = options["return_lse"] or options["return_weights"]
    return nothing_to_compute(call.scores, call.v.shape[-1], beside)


def _count(call: Call, options: dict[str, Any]) -> _Count:
    """Follows call.execute() with a recorder in the place of the core."""
    core, out = config.active if _isa(call.options.get("score_mod")) is not None else None, options["out"]
    count = _Count(call.threads, options["return_weights"], core, call.v.shape[-1])
    if out is not None:
        check_out("attention", out, call.shape[call.drop :], call.dtype)
    if _idle(call, options):
        return count
    named = {**call.named(), "v": call.v if count.value_width else one_column(call.v)}
    if out is not None and count.value_width:
        named["out"] = _target(out, call)
    _run(with_lead(call.lead, named), lambda **folded: _count_call(count, **folded), {})
    return count


def _count_call(
    count: _Count, q: Array, k: Array, v: Array, mask: Array | None = None, bias: Array | None = None,
    lo: Array | None = None, hi: Array | None = None, **_: Any,
) -> None:  # fmt: skip
    """One call of the core: division as divide() and run_job() do it, then each block of rows that differs."""
    (batch, heads, queries, width), kv_heads, keys = q.shape, k.shape[1], k.shape[2]
    group, block_rows = heads // kv_heads, 48  # NumPy has no blocks: any number will do
    rows = group * queries
    count.calls += 1
    if count.core is not None:
        plan = count.core.plan(
            batch, heads, kv_heads, queries, keys, width, v.shape[3], q.itemsize, count.asked, count.weights, False
        )
        count.lanes, count.few, block_rows = plan["lanes"], plan["few"], plan["block_rows"]
        count.block_rows = max(count.block_rows, block_rows)
        count.blocks += batch * kv_heads * -(-rows // block_rows)
        count.tasks += plan["tasks"]
        count.threads = max(count.threads, plan["threads"])
    # Items and heads that share intervals, mask and bias are counted once.
    same_items = (lo is None or len(lo) == 1) and all(
        a is None or a.strides[0] == 0 or batch == 1 for a in (mask, bias)
    )
    same_heads = all(a is None or a.strides[1] == 0 for a in (mask, bias))
    times = (batch if same_items else 1) * (kv_heads if same_heads else 1)
    for b, h in np.ndindex(1 if same_items else batch, 1 if same_heads else kv_heads):
        for start in range(0, rows, block_rows):
            row = np.arange(start, min(start + block_rows, rows))
            head, i = h * group + row // queries, row % queries
            item = min(b, len(lo) - 1) if lo is not None else 0
            row_lo = np.zeros(row.size, np.intp) if lo is None else lo[item, i]
            row_hi = np.full(row.size, keys) if hi is None else hi[item, i]
            seen = None if mask is None else mask[b, head, i] != 0
            added = None if bias is None else bias[b, head, i]
            _count_block(count, times, row_lo, row_hi, seen, added, keys, width, v.shape[3])


def _count_block(
    count: _Count, times: int, lo: Array, hi: Array, seen: Array | None, added: Array | None, keys: int, width: int,
    value_width: int,
) -> None:  # fmt: skip
    """One block of rows, as score_chunk() goes over its keys: words of 32 that no row sees are left out."""
    pitch = -(-lo.size // count.lanes) * count.lanes if count.lanes and not count.few else lo.size
    count.rows += times * lo.size
    count.pitches += times * pitch
    count.chunks += times * -(-keys // CHUNK) * (count.lanes > 0)
    some = lo < hi
    if not some.any():
        return
    first, end = int(lo[some].min()) // CHUNK * CHUNK, int(hi[some].max())
    shape = -(-(end - first) // CHUNK), CHUNK // WORD
    if seen is None and added is None:
        pairs = int((hi - lo)[some].sum())
        words = _words_of_intervals(lo[some] - first, hi[some] - first, shape)
        allowed = words
    else:
        j = np.arange(first, end)
        visible = (j >= lo[:, None]) & (j < hi[:, None])
        if seen is not None:
            visible &= seen[:, first:end]
        words = allowed = _words_of_keys(visible, shape)
        if added is not None:
            finite = added[:, first:end] != -np.inf
            count.bias_is_mask &= bool(((added == 0) | np.isneginf(added)).all())
            count.bias_excludes |= not bool(finite.all())
            visible &= finite
            allowed = _words_of_keys(visible, shape)
        pairs = int(visible.sum())
    starts = np.arange(words.size).reshape(shape) * WORD
    ends = np.minimum(starts + WORD, end - first)
    visited = words.any(axis=1)
    scored = int((ends - starts)[words].sum())
    weighed = int((np.where(words, ends, 0).max(axis=1) - np.where(words, starts, end).min(axis=1))[visited].sum())
    count.visited += times * int(visited.sum()) * (count.lanes > 0)
    count.idle += times * int((visited & ~allowed.any(axis=1)).sum())
    count.useful += times * 2 * pairs * (width + count.value_width)
    count.executed += times * 2 * pitch * (scored * width + weighed * value_width)


def _words_of_intervals(lo: Array, hi: Array, shape: tuple[int, int]) -> Array:
    """Which words of 32 keys lie in some interval [lo, hi): (chunk, word)."""
    steps = np.zeros(shape[0] * shape[1] + 1, np.intp)
    np.add.at(steps, lo // WORD, 1)
    np.add.at(steps, (hi + WORD - 1) // WORD, -1)
    words: Array = (np.cumsum(steps[:-1]) > 0).reshape(shape)
    return words


def _words_of_keys(visible: Array, shape: tuple[int, int]) -> Array:
    """Which words of 32 keys have one that some row sees: (chunk, word)."""
    whole = np.zeros((*shape, WORD), bool)
    whole.reshape(-1)[: visible.shape[1]] = visible.any(axis=0)
    words: Array = np.logical_or.reduce(whole, axis=2)
    return words


# ---- notes ----


def _notes(call: Call, options: dict[str, Any], count: _Count) -> list[str]:
    """What keeps the call from being faster, and the way out."""
    notes = []
    *_, queries, keys = call.scores
    if _idle(call, options):
        return ["an axis is empty: nothing is computed"]
    if options["mask"] is not None and call.keys.same_segment is None and call.mask is not None:
        form = _as_structure(call.mask, queries, keys)
        if form == "":
            notes.append("mask is True everywhere: leave it out")
        elif form is not None:
            notes.append(f"mask is dense and says {form}: give that instead, and no (L, S) array is read")
    if call.keys.same_segment is not None:
        notes.append(
            f"segments: the keys of an id are not neighbours, so an (L, S) mask is made "
            f"({_bytes(call.keys.same_segment.nbytes)}); sort the keys by id to have intervals"
        )
    if count.bias_excludes and count.bias_is_mask:
        notes.append("bias holds nothing but 0 and -inf: mask=(bias == 0) is the same and skips chunks of keys")
    elif count.idle and count.lanes:
        notes.append(
            f"bias is -inf in the whole of {100 * count.idle / count.visited:.1f} % of the visited chunks: "
            "-inf skips nothing; exclude those keys by mask= or a structural option"
        )
    if call.dtype.itemsize < 4:
        notes.append(f"{call.dtype} is converted to {call.compute} as a whole, and the result rounded once")
    if count.lanes and count.rows * 2 <= count.pitches:
        lanes = queries * (call.q.shape[-3] // call.k.shape[-3])
        used = "one lane is" if lanes == 1 else f"{lanes} lanes are"
        notes.append(f"L = {queries}: {used} used of a vector of {count.lanes}")
    if count.calls > 1:
        notes.append(f"the batch axes do not fold into one: {count.calls} calls of the core, one after the other")
    if count.lanes and count.threads < call.threads:
        why = "too little work for another" if count.threads < count.tasks else f"{count.tasks} tasks"
        notes.append(f"{count.threads} of {call.threads} threads: {why}")
    if options["return_weights"]:
        notes.append("weights are an (L, S) array: attention_stats() gives their statistics without it")
    if not count.lanes:
        notes.append("NumPy computes every score, the masked ones too, a head and a tile of rows at a time")
    return notes


def _as_structure(mask: Array, queries: int, keys: int) -> str | None:
    """The structural options that say the same as this (..., Hq, L, S) mask, "" for all True, None for none."""
    mask = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.strides)].view(np.bool_)
    if mask.shape[-1] != keys:
        return "" if mask.all() else None
    count = mask.sum(axis=-1, dtype=np.intp)
    lo, hi = mask.argmax(axis=-1), keys - mask[..., ::-1].argmax(axis=-1)
    lo, hi = np.where(count == 0, 0, lo), np.where(count == 0, 0, hi)
    if (hi - lo != count).any() or (lo != lo[..., :1, :]).any() or (hi != hi[..., :1, :]).any():
        return None  # not intervals, or not the same ones in each head
    lo, hi = lo[..., 0, :].reshape(-1, lo.shape[-1]), hi[..., 0, :].reshape(-1, hi.shape[-1])
    if not lo.any() and (hi == hi[:, :1]).all():
        return "" if (hi == keys).all() else "key_lengths="
    forms = [form for start in (0, keys - queries) if (form := _band(lo, hi, start, queries, keys)) is not None]
    return min(forms, default=None)  # "causal" before "window"


def _band(lo: Array, hi: Array, start: int, queries: int, keys: int) -> str | None:
    """causal=, window= and key_lengths= for these intervals (some of them not empty), query i at start + i, or None."""
    position, seen = start + np.arange(queries), lo < hi
    left, right = int((position - lo)[seen].max()), int((hi - 1 - position)[seen].max())
    valid = hi.max(axis=-1, keepdims=True)
    low = np.clip(position - left if lo.any() else 0 * position, 0, keys)
    high = np.clip(np.minimum(position + right + 1, valid), 0, keys)
    if left < 0 or right < 0 or ((low < high) != seen).any() or ((low != lo) | (high != hi))[seen].any():
        return None
    cut = bool((valid < np.clip(position[-1] + right + 1, 0, keys)).any())
    words = []
    if right == 0:
        named = '"upper_left"' if start == 0 else '"lower_right"'
        words.append("causal=True" if queries == keys or cut else f"causal={named}")
    if lo.any() or right:
        ahead = right if right and position[-1] + right + 1 > 0 and (high < keys).any() else None
        words.append(f"window=({left if lo.any() else None}, {ahead})")
    if queries != keys and (right or cut):
        words.append(f"q_start={start}")
    return ", ".join(words + ["key_lengths="] * cut)


def _bytes(n: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024  # type: ignore[assignment]
    return f"{n:.4g} GiB"


def _flops(n: float) -> str:
    for unit in ("", "k", "M", "G"):
        if n < 1000:
            return f"{n:.4g} {unit}FLOP"
        n /= 1000
    return f"{n:.4g} TFLOP"
