"""explain() against brute-force counts and against what the library does."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
from oracle import allowed_keys

from attentile import attention, attention_partial, explain, relative_bias, use_backend
from attentile.runtime import backend

RNG = np.random.default_rng(70)
# Per vector (float32, float64), and vectors per block.
LANES, VECTORS = {"avx512": (16, 8), "avx2": (8, 4), "neon": (4, 2), "generic": (4, 2)}, 3


def arrays(queries=300, keys=700, heads=4, kv_heads=2, width=8, dtype=np.float32):
    q, k, v = (np.zeros((2, h, n, width), dtype) for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    return q, k, v


SHORT = np.zeros((2, 1, 1, 700), bool)
SHORT[0, ..., :100] = SHORT[1, ..., :513] = True
HOLES = RNG.random((4, 300, 700)) < 0.002
HOLES[:, :, 256:512] = False
CASES = {
    "plain": {},
    "causal": {"causal": "lower_right"},
    "upper left": {"causal": "upper_left"},
    "window": {"causal": "lower_right", "window": (40, None)},
    "two-sided window": {"q_start": 100, "window": (3, 70)},
    "padding": {"key_lengths": [37, 600]},
    "no keys": {"key_lengths": [0, 256]},
    "prefix": {"causal": "upper_left", "prefix_lengths": [290, 0]},
    "segments": {"segments": (np.arange(300) // 40, np.arange(700) // 90)},
    "scattered segments": {"segments": (np.arange(300) // 40, np.arange(700) % 500 // 90)},
    "dense padding": {"mask": SHORT},
    "dense holes": {"mask": HOLES},
    "mask and causal": {"mask": HOLES, "causal": "lower_right"},
    "bias": {"bias": np.where(HOLES, 0.5, -np.inf)},
    "bias and window": {"bias": np.where(HOLES, 0.5, -np.inf), "q_start": 200, "window": (100, 100)},
}


@functools.cache
def seen_keys(name):
    """Which keys of arrays() the intervals and the mask of a case allow."""
    options = {option: value for option, value in CASES[name].items() if option != "bias"}
    return allowed_keys((2, 4, 300, 700), **options)


def counted(name, block_rows):
    """(chunks, visited chunks, allowed pairs) of a case, counted the slow and obvious way."""
    seen = seen_keys(name)
    chunks = visited = 0
    for rows in seen.reshape(4, 600, 700):  # items x key heads, two query heads each
        for first in range(0, 600, block_rows):
            for key in range(0, 700, 256):
                chunks += 1
                visited += rows[first : first + block_rows, key : key + 256].any()
    pairs = seen & (CASES[name]["bias"] != -np.inf) if "bias" in CASES[name] else seen
    return chunks, visited, int(pairs.sum())


# ---- numbers ----


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_pairs_against_brute_force(impl, name):
    q, k, v = arrays()
    found = explain(q, k, v, **CASES[name])
    block_rows = found.block_rows or 48
    chunks, visited, pairs = counted(name, block_rows)
    assert found.useful_flops == 2 * pairs * (8 + 8)
    if impl == "reference":
        assert found.path == "NumPy"
        assert found.useful_flops <= found.executed_flops <= 2 * (2 * 4 * 300 * 700) * 16
        return
    assert found.block_rows == VECTORS * LANES[impl][0]
    assert (found.chunks, found.chunks_visited) == (chunks, visited)
    assert found.skipped_percent == pytest.approx(100 * (1 - visited / chunks))
    if "bias" not in CASES[name]:
        assert found.executed_flops >= found.useful_flops


def test_executed_flops_of_small_cases(compiled):
    q, k, v = (np.zeros((1, 1, n, 8), np.float32) for n in (1, 300, 300))
    per_key = 2 * 16
    assert explain(q, k, v).executed_flops == 300 * per_key
    # From the word that 40 is in, to the last key; and with a hole: values run over it, scores do not.
    assert explain(q, k, v, q_start=100, window=(60, 0), causal=True).executed_flops == (101 - 32) * per_key
    mask = np.zeros(300, bool)
    mask[[5, 100]] = True
    assert explain(q, k, v, mask=mask).executed_flops == 2 * 8 * (64 + 128)
    lanes = LANES[compiled][0]
    whole = -(-40 // lanes) * lanes
    assert explain(np.zeros((1, 1, 40, 8), np.float32), k, v).executed_flops == 300 * whole * per_key


def test_few_rows_against_brute_force(compiled):
    """Of a grid of items, heads and threads, with keys that only the bias hides."""
    q, k, v = arrays(queries=1)
    mask, dead = RNG.random((2, 4, 1, 700)) < 0.01, np.arange(700) >= 600
    mask[0, :2] = False
    bias = np.where(dead, np.float32(-np.inf), np.float32(1))
    rows = mask.reshape(4, 2, 700)
    visited = sum(head[:, key : key + 256].any() for head in rows for key in (0, 256, 512))
    for threads in (1, 8):
        found = explain(q, k, v, mask=mask, bias=bias, num_threads=threads)
        assert found.few
        assert (found.chunks, found.chunks_visited) == (4 * 3, visited)
        assert found.useful_flops == (mask & ~dead).sum() * 2 * 16


@pytest.mark.parametrize("queries", [1, 300])
def test_what_changes_scores_changes_no_count(compiled, queries):
    q, k, v = arrays(queries)
    options = {"causal": "lower_right", "mask": RNG.random((queries, 700)) < 0.01}
    before = attention_partial(q, k, v)
    changes = {
        "softcap": 2.0,
        "sinks": np.full(4, np.nan),
        "alibi_slopes": np.ones(4),
        "bias": np.ones((queries, 700), np.float32),
        "before": before._replace(l=np.full_like(before.l, np.nan)),
    }
    for extra in ({}, {"return_lse": True, "return_weights": True}):
        plain, changed = explain(q, k, v, **options, **extra), explain(q * np.nan, k, v, **options, **changes, **extra)
        for name in ("few", "tasks", "chunks", "chunks_visited", "useful_flops", "executed_flops"):
            assert getattr(plain, name) == getattr(changed, name)


def test_lanes_are_those_of_the_kernels(compiled):
    core = backend.active
    fmas = 24  # AT_PEAK_FMAS
    for isa, there in core.isas().items():
        if there:
            with use_backend("compiled", isa):
                found = [explain(*arrays(dtype=dtype)).lanes for dtype in (np.float32, np.float64)]
                assert tuple(core.fma_rounds(size, 1) / (2 * fmas) for size in (4, 8)) == LANES[isa] == tuple(found)


def test_threads_and_tasks(compiled):
    q = np.zeros((1, 4, 48, 64), np.float32)
    small = explain(q, q, q, num_threads=2)
    assert small.threads == 1
    assert "1 of 2 threads: too little work for another" in small.notes
    x = np.zeros((2, 4, 512, 64), np.float32)
    assert explain(x, x, x, num_threads=2).threads == 2
    one = explain(x[:1, :1, :1], np.zeros((1, 1, 60_000, 64), np.float32), np.zeros((1, 1, 60_000, 64), np.float32),
                  num_threads=2)  # fmt: skip
    assert (one.tasks, one.threads) == (8, 2)  # threads share the keys of the one head
    rows = explain(np.zeros((1, 1, 100, 64), np.float32), *np.zeros((2, 1, 1, 3000, 64), np.float32), num_threads=8)
    assert (rows.tasks, rows.threads) == (3, 3) or rows.lanes < 16
    assert f"{rows.threads} of 8 threads: {rows.tasks} tasks" in rows.notes


def test_one_row_has_tiles_of_its_own_but_for_weights(compiled):
    x = np.zeros((1, 2, 40, 8), np.float32)
    found = explain(x[:, :, :1], x, x)
    assert found.few
    assert found.lane_use == 1
    assert f"vectors of {found.lanes} keys" in str(found)
    found = explain(x[:, :, :1], x, x, return_weights=True)
    assert not found.few
    assert found.lane_use == 1 / found.lanes
    assert any(note == f"L = 1: one lane is used of a vector of {found.lanes}" for note in found.notes)


def test_output_bytes():
    q, k, v = (x.astype(np.float16) for x in arrays(5, 7))
    assert explain(q, k, v).output_bytes == attention(q, k, v).nbytes
    full = attention(q, k, v, return_lse=True, return_weights=True)
    assert explain(q, k, v, return_lse=True, return_weights=True).output_bytes == sum(x.nbytes for x in full)


# ---- path and copies ----


def misaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    raw[...] = x
    return raw


def variants():
    """(name, (q, k, v), options, the arguments that Python converts)."""
    q, k, v = arrays(5, 7)
    mask, seen = np.ones((5, 7), bool), np.arange(2) * 3
    yield "plain", (q, k, v), {}, ""
    yield "float64", tuple(x.astype(np.float64) for x in (q, k, v)), {"scale": 0.5}, ""
    yield "strided rows", (q[:, :, ::2], k[:, :, ::-1], v), {}, ""
    yield "scale of int", (q, k, v), {"scale": 1}, ""
    yield "scale of NumPy", (q, k, v), {"scale": np.float64(1)}, ""
    yield "scale of float32", (q, k, v), {"scale": np.float32(1)}, "scale"
    yield "batch of one", (q, k[:1], v), {}, ""
    yield "three axes", (q[0], k[0], v[0]), {}, ""
    yield "two axes", (q[0, 0], k[0, 0], v[0, 0]), {"mask": mask}, ""
    yield "structure", (q, k, v), {"causal": "lower_right", "window": (3, None), "key_lengths": [3, 7]}, ""
    yield "arrays", (q, k, v), {"mask": mask, "bias": np.zeros((5, 7), np.float32)}, ""
    yield "integers", (q, k, v), {"causal": True, "q_start": np.int64(2), "key_lengths": seen.astype(np.int32)}, ""
    yield "unsigned", (q, k, v), {"causal": True, "q_start": 1, "key_lengths": seen.astype(np.uint8)}, "key_lengths"
    yield "numbers per head", (q, k, v), {"sinks": np.zeros(4), "return_lse": True, "softcap": 1.0}, ""
    yield "list per head", (q, k, v), {"sinks": [0.0] * 4}, "sinks"
    yield "out", (q, k, v), {"out": np.zeros((2, 4, 5, 8), np.float32), "num_threads": 1}, ""
    yield "strange out", (q, k, v), {"out": np.zeros((2, 4, 8, 5), np.float32).swapaxes(2, 3)}, "out"
    yield "truth of NumPy", (q, k, v), {"causal": np.False_, "return_weights": np.True_}, "causal return_weights"
    yield "segments", (q, k, v), {"segments": (np.arange(5) // 2, np.arange(7) // 2)}, "segments"
    yield "wide bias", (q, k, v), {"bias": np.zeros((5, 7), np.longdouble), "mask": mask.tolist()}, "bias mask"
    yield "float16", tuple(x.astype(np.float16) for x in (q, k, v)), {}, ""
    yield "mixed", (q, k.astype(np.float64), v), {}, ""
    yield "swapped", (q, k.astype(">f4"), v), {}, "k"
    yield "transposed", (q, np.asfortranarray(k), v), {}, "k"
    yield "misaligned", (q, k, misaligned(v)), {}, "v"
    yield "list", (q.tolist(), k, v), {}, "q"
    yield "empty", (q[:, :, :0], k, v), {}, "an axis is empty, which Python sees to"


@pytest.mark.parametrize(
    ("name", "qkv", "options", "converted"), list(variants()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_path_is_the_one_that_runs(compiled, name, qkv, options, converted):
    ran = backend.active.takes(*qkv, options)
    found = explain(*qkv, **options)
    assert (found.path == "compiled") == ran == (not converted), found.why_path
    if converted and name != "empty":
        told = [name for why in found.why_path.split("; ") for name in why.split(":")[0].split(", ")]
        assert sorted(told) == sorted(converted.split())


def test_why_something_is_converted(compiled):
    q, k, v = arrays(5, 7)

    def why(*qkv, **options):
        return explain(*qkv, **options).why_path

    assert why(q, k, v, causal="upper_left") == "every argument is taken as it is"
    assert why(q, k.astype(">f4"), misaligned(v), sinks=(0.0,) * 4) == (
        "k, v: copied first; sinks: tuple, which Python converts"
    )
    assert why(q, k, v, scale=np.float32(1)) == "scale: numpy.float32, which Python converts"
    assert why(q, k, v, segments=(np.arange(5), np.arange(7))) == "segments: Python makes intervals of the ids"
    assert why(q, k, v, segments=(np.arange(5), np.arange(7) % 2)) == "segments: Python makes a mask of the ids"


def test_options_are_those_of_attention():
    from attentile.inspection.explain import OPTIONS

    parameters = list(inspect.signature(attention).parameters.values())[3:]
    assert {p.name: p.default for p in parameters} == OPTIONS


def test_score_mod_is_numpy(impl):
    found = explain(*arrays(5, 7), score_mod=lambda scores, b, h, i, j: scores)
    assert (found.path, found.isa) == ("NumPy", "none (NumPy)")


def test_copies():
    q, k, v = arrays(5, 7)
    assert explain(q, k[:, :, ::-1], v).copies == {}
    found = explain(q.astype(np.int16), np.asfortranarray(k), misaligned(v)).copies
    assert list(found) == ["q", "k", "v"]
    assert found["q"].startswith("int16 is converted to float32 as a whole")
    assert found["k"].startswith("last axis not contiguous")
    assert found["v"].startswith("not aligned")
    assert explain(q, k.astype(">f4"), v).copies["k"].startswith("its bytes are swapped")
    assert explain(q.tolist(), k, v).copies["q"].startswith("an array is made from a list")
    mask = np.ones((5, 7), bool)
    assert explain(q, k, v, mask=mask, bias=np.zeros((5, 7), np.float32)).copies == {}
    assert explain(q, k, v, bias=np.zeros((7, 5), np.float32).T).copies == {}
    assert explain(q, k, v, bias=np.zeros((5, 7))).copies == {}  # read as it is, by the block
    assert list(explain(q, k, v, mask=mask, bias=np.zeros((5, 7), np.longdouble)).copies) == ["bias"]


def test_copies_of_out():
    q, k, v = arrays(5, 7)
    q = np.zeros((2, 4, 5, 8), np.float32)
    out = np.full((2, 4, 5, 8), 7, np.float32)
    assert explain(q, k, v, out=out).copies == {}
    assert (out == 7).all()
    assert "overlaps an input" in explain(q, k, v, out=q).copies["out"]
    assert "not contiguous" in explain(q, k, v, out=np.asfortranarray(out)).copies["out"]
    half = [x.astype(np.float16) for x in (q, k, v)]
    assert explain(*half, out=out.astype(np.float16)).copies == {}
    with pytest.raises(ValueError, match="out has shape"):
        explain(q, k, v, out=out[:1])


# ---- notes ----


def band(queries, keys, start, left, right):
    distance = np.arange(keys) - (start + np.arange(queries)[:, None])
    return (distance >= -left) & (distance <= right)


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (band(6, 6, 0, 9, 0), "causal=True"),
        (band(4, 6, 0, 9, 0), 'causal="upper_left"'),
        (band(4, 6, 2, 9, 0), 'causal="lower_right"'),
        (band(6, 6, 0, 2, 0), "causal=True, window=(2, None)"),
        (band(6, 6, 0, 2, 1), "window=(2, 1)"),
        (band(4, 6, 2, 1, 1), "window=(1, 1), q_start=2"),
        (np.tile(np.arange(6) < 4, (6, 1)), "key_lengths="),
        (band(6, 6, 0, 9, 0) & (np.arange(6) < 4), "causal=True, key_lengths="),
    ],
)
def test_a_dense_mask_is_recognised(mask, form):
    queries, keys = (mask.shape[0], 6) if mask.ndim == 2 else (6, 6)
    x = np.zeros((2, 1, 6, 8), np.float32)
    note = explain(x[:, :, :queries], x, x, mask=mask).notes[0]
    assert note == f"mask is dense and says {form}: give that instead, and no (L, S) array is read"
    named = eval(f"dict({form.replace('key_lengths=', 'key_lengths=4')})")  # and it does say the same
    assert keys == 6
    np.testing.assert_array_equal(
        allowed_keys((2, 1, queries, 6), **named), np.broadcast_to(mask, (2, 1, queries, 6))
    )  # fmt: skip


def test_a_mask_that_the_core_takes_as_an_interval(compiled):
    q, k, v = arrays()
    assert (
        explain(q, k, v, mask=SHORT).notes[0]
        == "mask is the same for all rows and says key_lengths=, as which it is taken"
    )
    lengths = explain(q, k, v, key_lengths=[100, 513])
    assert explain(q, k, v, mask=SHORT).executed_flops == lengths.executed_flops


def test_other_masks_are_not_recognised():
    x = np.zeros((1, 2, 6, 8), np.float32)
    hole = np.tri(6, dtype=bool)
    hole[5, 2] = False
    for mask in (np.eye(6, dtype=bool)[::-1], ~np.eye(6, dtype=bool), hole):
        assert not any("mask is" in note for note in explain(x, x, x, mask=mask).notes)
    heads = np.stack([np.tri(6, dtype=bool), np.ones((6, 6), bool)])
    assert not any("mask is" in note for note in explain(x, x, x, mask=heads).notes)
    everywhere = np.ones((6, 6), bool)
    assert explain(x, x, x, mask=everywhere).notes[0] == "mask is True everywhere: leave it out"


def test_halves_are_converted_by_numpy_alone(either):
    half = np.zeros((1, 1, 6, 8), np.float16)
    notes = explain(half, half, half).notes
    assert any("float16 is converted to float32" in note for note in notes) == (backend.active is None)


def test_notes_on_bias(compiled):
    x = np.zeros((1, 1, 600, 8), np.float32)
    dead = np.where(np.arange(600) < 256, 0, -np.inf).astype(np.float32)
    assert any("nothing but 0 and -inf" in note for note in explain(x, x, x, bias=dead).notes)
    assert any("66.7 % of the visited chunks" in note for note in explain(x, x, x, bias=dead + 1).notes)
    slow = np.arange(600) % 3
    assert any("(L, S) mask is made" in note for note in explain(x, x, x, segments=slow).notes)
    view = relative_bias(np.zeros((1, 9), np.float32), 600, 600)
    assert explain(x, x, x, bias=view).copies == {}


def test_unfolded_batch_axes(compiled):
    q = np.zeros((3, 2, 1, 5, 8), np.float32)
    k = np.broadcast_to(np.zeros((2, 1, 7, 8), np.float32), (3, 2, 1, 7, 8))
    assert explain(q, k, k).core_calls == 3
    assert any("3 calls of the core" in note for note in explain(q, k, k).notes)


def test_text(compiled):
    text = str(explain(*arrays(), causal="lower_right"))
    for words in (f"compiled ({compiled})", "float32 arithmetic", "taken as it is", "% skipped", "copies  none"):
        assert words in text


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty(impl, shape):
    q, k = np.zeros((1, 1, shape[0], 4)), np.zeros((1, 1, shape[1], 4))
    found = explain(q, k, k)
    assert (found.useful_flops, found.executed_flops, found.chunks, found.skipped_percent) == (0, 0, 0, 0)
    assert "nothing is computed" in str(found)


@pytest.mark.parametrize("wanted", [None, "return_lse", "return_weights"])
def test_without_values(impl, wanted):
    """Dv = 0: nothing is computed, but for a result that depends on the scores alone."""
    q, k = np.zeros((2, 1, 3, 4)), np.zeros((2, 1, 5, 4))
    found = explain(q, k, k[..., :0], **({} if wanted is None else {wanted: True}))
    pairs = 2 * 3 * 5
    assert found.useful_flops == (0 if wanted is None else 2 * pairs * 4)
    assert found.core_calls == (0 if wanted is None else 1)
    assert (found.executed_flops == 0) == (wanted is None)
    assert found.executed_flops >= found.useful_flops
    assert ("nothing is computed" in str(found)) == (wanted is None)


def test_errors_are_those_of_attention():
    q, k, v = arrays(5, 7)
    with pytest.raises(ValueError, match="ambiguous"):
        explain(q, k, v, causal=True)
    with pytest.raises(TypeError, match=r"^explain: unexpected keyword argument 'causality'"):
        explain(q, k, v, causality=True)


@pytest.mark.parametrize("shape", [(7,), (1, 1, 7), (2, 1, 1, 7)])
def test_one_row_of_a_mask_stands_for_all(impl, shape):
    """A run of keys that does not start at the first one, the same for all rows: IndexError."""
    q, k, v = np.ones((2, 4, 5, 8)), np.ones((2, 4, 7, 8)), np.ones((2, 4, 7, 3))
    mask = np.broadcast_to((np.arange(7) >= 2) & (np.arange(7) < 4), shape)
    report = explain(q, k, v, mask=mask)
    assert report.useful_flops == 2 * 4 * 5 * 2 * 2 * (8 + 3)
