"""KVCache: files, and bad input: a clear message before any work, and the cache as it was."""

from __future__ import annotations

import io
import json
import os
from typing import Any

import numpy as np
import pytest
from cache_helpers import Model, pages_made, pair_of, poison, state_of
from helpers import normal
from numpy.testing import assert_array_equal

from attentile import KVCache
from attentile.positions.items import kept_options

K, V = pair_of(2, 2, 20, 4, 3)
Q = normal(2, 4, 3, 4)


def made(**options: Any) -> KVCache:
    """20 and 13 tokens, then one more each; with window=(4, 0) held from 16 and 9."""
    cache = KVCache(2, 2, 4, value_dim=3, **options)
    cache.append(K, V, lengths=[20, 13])
    cache.append(K[:, :, :1], V[:, :, :1])
    return cache


# ---- errors ----

CONSTRUCTOR = [
    (dict(batch=1.5), TypeError, "batch is 1.5; it must be an integer"),
    (dict(batch=-1), ValueError, "batch is -1; it must be at least 0"),
    (dict(kv_heads=0), ValueError, "kv_heads is 0; it must be at least 1"),
    (dict(head_dim=0), ValueError, "head_dim is 0"),
    (dict(value_dim=0), ValueError, "value_dim is 0"),
    (dict(capacity=0), ValueError, "capacity is 0"),
    (dict(capacity="many"), TypeError, "capacity is 'many'"),
    (dict(dtype="int8"), TypeError, "dtype is 'int8'; the storage can be float32, float64, float16 or bfloat16"),
    (dict(dtype=">f2"), TypeError, "dtype is '>f2'"),
    (dict(dtype=">f4"), TypeError, "dtype is '>f4'"),
    (dict(dtype="nonsense"), TypeError, "dtype is 'nonsense'"),
    (dict(window=8), TypeError, r"window is 8; it must be a pair \(left, 0\) or None.*\(W - 1, 0\)"),
    (dict(window=(8, 1)), ValueError, r"window is \(8, 1\); it must be \(left, 0\)"),
    (dict(window=(-1, 0)), ValueError, "left >= 0"),
    (dict(window=(None, 0)), TypeError, "without a limit, give None"),
    (dict(window=(1.5, 0)), TypeError, "left must be an integer"),
    (dict(sink_tokens=2), ValueError, "sink_tokens=2 keeps first tokens beside a window"),
    (dict(sink_tokens=-1, window=(2, 0)), ValueError, "sink_tokens is -1"),
    (dict(rotary=True), TypeError, "rotary is True; it must be a dict"),
    (dict(rotary={"positions": 3, "base": 2.0}), TypeError, "rotary has the unknown key 'positions'; known are base,"),
    *(
        ({name: 2**62}, ValueError, f"{name} {2**62}.* larger than all memory")
        for name in ("batch", "kv_heads", "head_dim", "value_dim", "capacity")
    ),
    (dict(head_dim=2**62, rotary={}), ValueError, "larger than all memory"),
    (dict(capacity=2**62, window=(3, 0), sink_tokens=2), ValueError, "larger than all memory"),
]


@pytest.mark.parametrize(("options", "error", "match"), CONSTRUCTOR)
def test_constructor(options, error, match):
    with pytest.raises(error, match=match) as caught:
        KVCache(**{"batch": 1, "kv_heads": 1, "head_dim": 4, **options})
    assert str(caught.value).startswith("KVCache: ")


def test_rotary_options_are_copied():
    given = {"cos": np.ones(3), "scaling": {"factor": 2.0}}
    kept = kept_options("KVCache", given)
    given["cos"][:], given["scaling"]["factor"], given["base"] = 0, 3.0, 1.0
    assert (kept["cos"] == 1).all()
    assert (kept["scaling"], "base" in kept) == ({"factor": 2.0}, False)


APPEND = [
    (dict(k=K[0]), ValueError, r"k has shape \(2, 20, 4\); it must be \(2, 2, n, 4\)"),
    (dict(k=K[:1]), ValueError, r"k has shape \(1, 2, 20, 4\)"),
    (dict(k=K[:, :1]), ValueError, "k has shape"),
    (dict(k=K[..., :3]), ValueError, "k has shape"),
    (dict(v=K), ValueError, r"v has shape .* it must be \(2, 2, n, 3\)"),
    (dict(v=V[:, :, :9]), ValueError, "k has 20 tokens and v has 9; they must be equal"),
    (dict(k=K.astype(complex)), TypeError, "k has dtype complex128; it must be real numbers, which become float32"),
    (dict(v=V.astype(object)), TypeError, "v has dtype object"),
    (dict(v=V.astype("U8")), TypeError, "v has dtype <U8"),
    (dict(k=K.astype("m8[s]")), TypeError, "k has dtype timedelta64"),
    (dict(lengths=21), ValueError, r"lengths is 21 for item 0; it must lie between 0 and 20 \(the tokens of k\)"),
    (dict(lengths=[3, -1]), ValueError, "lengths is -1 for item 1"),
    (dict(lengths=[1, 2, 3]), ValueError, r"lengths has shape \(3,\); give one integer, or 2, one per item"),
    (dict(lengths=[[1, 2]]), ValueError, "lengths has shape"),
    (dict(lengths=[1.0, 2.0]), TypeError, "lengths has dtype float64"),
    (dict(lengths=[True, False]), TypeError, "lengths has dtype bool"),
    (dict(lengths=np.array([2**64 - 1, 1], np.uint64)), ValueError, "18446744073709551615 for item 0"),
]


@pytest.mark.parametrize("options", [{}, {"window": (4, 0), "sink_tokens": 2}, {"capacity": 300}])
@pytest.mark.parametrize(("given", "error", "match"), APPEND)
def test_append(given, error, match, options):
    cache = made(**options)
    before = state_of(cache)
    with pytest.raises(error, match=match) as caught:
        cache.append(**{"k": K, "v": V, **given})
    assert str(caught.value).startswith("KVCache.append: ")
    assert state_of(cache) == before


def test_append_beyond_the_capacity():
    cache = made(capacity=30)
    before = state_of(cache)
    with pytest.raises(ValueError, match=r"KVCache\.append: item 0 would hold 31 tokens and the capacity is 30"):
        cache.append(K, V, lengths=[10, 17])
    assert state_of(cache) == before
    cache.append(K, V, lengths=[9, 16])  # to the last token
    assert cache.lengths.tolist() == [30, 30]
    with pytest.raises(ValueError, match="item 0 would hold 31 tokens"):
        cache.append(K[:, :, :1], V[:, :, :1])


@pytest.mark.parametrize("way", ["append", "attend"])
def test_numbers_beyond_the_range_become_inf_whatever_the_settings(way):
    cache = made()
    with np.errstate(all="raise"):
        if way == "append":
            cache.append(np.full((2, 2, 1, 4), 1.0), np.full((2, 2, 1, 3), 1e300))
            assert (cache.values()[0, :, -1] == np.inf).all()
        else:
            assert np.isnan(cache.attend(np.full((2, 2, 1, 4), 1e300))).all()


ATTEND = [
    (dict(q=Q[0]), ValueError, r"q has shape \(4, 3, 4\); it must be \(2, heads, rows, 4\)"),
    (dict(q=Q[:1]), ValueError, "q has shape"),
    (dict(q=Q[..., :3]), ValueError, "q has shape"),
    (dict(q=Q[:, :3]), ValueError, "q has 3 heads and k has 2"),
    (dict(q=Q.astype(complex)), TypeError, "complex128; supported are"),
    (dict(k=K), TypeError, "no option is named k; use alibi_slopes, before, bias, causal"),
    (dict(casual=True), TypeError, "no option is named casual"),
    (dict(key_lengths=[22, 3]), ValueError, "key_lengths is 22 for item 0; it must lie between 0 and 21"),
    (dict(key_lengths=15), ValueError, "key_lengths is 15 for item 1; it must lie between 0 and 14 .the lengths of"),
    (dict(key_lengths=[1.5, 1]), TypeError, "key_lengths has dtype float64"),
    (dict(causal=True), ValueError, "causal=True with 3 queries and 21 tokens is ambiguous; leave causal out"),
    (dict(causal="lower"), ValueError, "causal is 'lower'"),
    (dict(causal="lower_right", q_start=3), ValueError, "both place the queries"),
    (dict(q_start=[1, 2, 3]), ValueError, "q_start has shape"),
    (dict(q_start=1.5), TypeError, "q_start has dtype float64"),
    (dict(mask=np.ones((3, 20), bool)), ValueError, r"mask has shape \(3, 20\), which does not broadcast to"),
    (dict(mask=np.ones((3, 21))), TypeError, "mask has dtype float64"),
    (dict(bias=np.ones((3, 21), int)), TypeError, "bias has dtype int64"),
    (dict(scale=np.nan), ValueError, "scale is nan"),
    (dict(sinks=[1.0]), ValueError, "sinks has shape"),
    (dict(num_threads=0), ValueError, "num_threads is 0"),
    (dict(out=np.ones((2, 4, 3, 3))), ValueError, "out has shape .* and dtype float64"),
]


@pytest.mark.parametrize("options", [{}, {"window": (30, 0)}, {"window": (30, 0), "sink_tokens": 2}])
@pytest.mark.parametrize(("given", "error", "match"), ATTEND)
def test_attend(given, error, match, options):
    cache = made(**options)
    before = state_of(cache)
    with pytest.raises(error, match=match) as caught:
        cache.attend(**{"q": Q, "causal": "lower_right" if "q_start" not in given else True, **given})
    assert str(caught.value).startswith("KVCache.attend: ")
    assert state_of(cache) == before


def test_attend_with_two_windows_or_a_position_that_says_nothing():
    with pytest.raises(ValueError, match=r"KVCache.attend: window= was given and the cache has window=\(4, 0\)"):
        made(window=(4, 0)).attend(Q[:, :, :1], window=(2, 0))
    with pytest.raises(ValueError, match=r"KVCache\.attend: q_start= places the queries for"):
        made().attend(Q, causal=False, q_start=2)


def test_errors_of_a_score_mod_keep_their_text():
    def fails(*_):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        made().attend(Q, score_mod=fails)


OTHERS = [
    (
        "truncate",
        [22, 3],
        ValueError,
        "length is 22 for item 0; it must lie between 0 and 21 .the lengths of the items",
    ),
    ("truncate", 20, ValueError, "length is 20 for item 1; it must lie between 0 and 14"),
    ("truncate", -1, ValueError, "length is -1"),
    ("truncate", 1.5, TypeError, "length has dtype float64"),
    ("truncate", [1, 2, 3], ValueError, "length has shape"),
    ("reorder", [0, 2], ValueError, "beam_index has values from 0 to 2; they must lie between 0 and 1, the last item"),
    ("reorder", [-1], ValueError, "from -1 to -1"),
    ("reorder", [0.0], TypeError, r"beam_index has shape \(1,\) and dtype float64; it must be integers"),
    ("reorder", [True, False], TypeError, "dtype bool"),
    ("reorder", [[0, 1]], TypeError, r"beam_index has shape \(1, 2\)"),
    ("reorder", 0, TypeError, r"beam_index has shape \(\)"),
    ("save", 3, TypeError, "file is a int; it must be a path or a binary file"),
    ("load", 3.5, TypeError, "file is a float; it must be a path or a binary file"),
]


@pytest.mark.parametrize("options", [{}, {"window": (30, 0)}])
@pytest.mark.parametrize(("method", "argument", "error", "match"), OTHERS)
def test_other_methods(method, argument, error, match, options):
    cache = made(**options)
    before = state_of(cache)
    with pytest.raises(error, match=match) as caught:
        getattr(cache, method)(argument)
    assert str(caught.value).startswith(f"KVCache.{method}: ")
    assert state_of(cache) == before


# ---- files ----

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "double": {"dtype": "float64"},
    "capacity": {"capacity": 40},
    "window": {"window": (4, 0)},
    "sink tokens": {"window": (4, 0), "sink_tokens": 3, "capacity": 40},
}


def saved(cache: KVCache) -> bytes:
    file = io.BytesIO()
    cache.save(file)
    return file.getvalue()


@pytest.mark.parametrize("longer", [0, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, longer, tmp_path):
    cache, model = made(**KINDS[kind]), Model(2, 2, 4, 3, KINDS[kind].get("dtype", "float32"), None, 0)
    model.append(K, V, [20, 13])
    model.append(K[:, :, :1], V[:, :, :1])
    model.window, model.sink_tokens, model.held_from = cache.window, cache.sink_tokens, cache.held.held_from.tolist()
    for _ in range(longer if KINDS[kind].get("capacity") is None or cache.window else 0):
        for each in (cache, model):
            each.append(K[:, :, :1], V[:, :, :1])
    poison(cache)
    path = tmp_path / "cache"
    path.write_bytes(b"older content")
    cache.save(path)
    assert os.listdir(tmp_path) == ["cache"]  # no suffix, nothing left over
    for file in (path, str(path), io.BytesIO(saved(cache))):
        twin = KVCache.load(file)
        assert repr(twin) == repr(cache)
        assert (twin.lengths == cache.lengths).all()
        assert (twin.held.held_from == cache.held.held_from).all()
        assert_array_equal(twin.keys(), cache.keys())
        assert_array_equal(twin.values(), cache.values())
        own = model.copy()
        for seed in range(3):
            k, v = pair_of(2, 2, 2, 4, 3, seed=seed)
            q = normal(2, 4, 2, 4, dtype=cache.dtype, seed=seed)
            for each in (twin, own):
                each.append(k, v)
            poison(twin)
            np.testing.assert_allclose(twin.attend(q), own.attend(q), rtol=1e-5, atol=2e-6)


def test_a_file_holds_only_what_is_held():
    short, long = made(window=(4, 0)), made(window=(4, 0))
    for _ in range(1000):
        long.append(K[:, :, :1], V[:, :, :1])
    assert len(saved(long)) < len(saved(short)) + 100


def test_a_failed_save_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "cache.npz"
    cache = made()
    cache.save(path)
    before = path.read_bytes()

    def broken(target, **arrays):
        target.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        made(window=(4, 0)).save(path)
    assert os.listdir(tmp_path) == ["cache.npz"]
    assert path.read_bytes() == before


def test_a_link_stays_a_link_and_the_mode_is_usual(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    try:
        link.symlink_to(tmp_path / "folder" / "target")
    except OSError:  # Windows asks for a privilege
        pytest.skip("no links can be made here")
    made().save(link)
    assert link.is_symlink()
    assert KVCache.load(link).length == 21
    (tmp_path / "usual").write_bytes(b"")
    assert (tmp_path / "folder" / "target").stat().st_mode == (tmp_path / "usual").stat().st_mode


def archive(**changes: Any) -> io.BytesIO:
    """The file of made(window=(4, 0)) with some arrays replaced, None = left out; `config` changes the text."""
    arrays = dict(np.load(io.BytesIO(saved(made(window=(4, 0))))))
    config = {**json.loads(str(arrays["config"])), **changes.pop("config", {})}
    arrays = {**arrays, "config": np.array(json.dumps(config)), **changes}
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    file.seek(0)
    return file


DAMAGED = [
    dict(format=None),
    dict(format=np.array("attentile.KVCache 3")),
    dict(keys=None),
    dict(config={"batch": 3}),
    dict(config={"batch": "x"}),
    dict(config={"window": None}),
    dict(config={"surprise": 1}),
    dict(config={"dtype": "float64"}),
    dict(config={"capacity": 4}),
    dict(config={"sink_tokens": 1}),
    dict(config={"head_dim": 5}),
    dict(lengths=np.array([21, -1])),
    dict(lengths=np.array([21, 15])),
    dict(lengths=np.array([10, -1]), held_from=np.array([0, 0]), config={"window": None}),
    dict(lengths=np.array([21.0, 14.0])),
    dict(held_from=np.array([22, 0])),
    dict(held_from=np.array([-1, 0])),
    dict(held_from=np.array([16])),
    dict(values=np.zeros((9, 2, 3), np.float32)),
    dict(keys=np.zeros((10, 2, 4), np.float64)),
    dict(keys=np.array([None, 1], object)),
    dict(rotary_cos=np.ones(3)),
]


@pytest.mark.parametrize("changes", DAMAGED)
def test_damaged_files_are_refused(changes):
    with pytest.raises(ValueError, match=r"^KVCache\.load: "):
        KVCache.load(archive(**changes))


def test_the_changed_file_is_fine_without_a_change():
    assert KVCache.load(archive()).lengths.tolist() == [21, 14]


def test_a_file_with_the_former_name_of_sink_tokens_loads():
    cache, file = made(window=(4, 0), sink_tokens=3), io.BytesIO()
    arrays = dict(np.load(io.BytesIO(saved(cache))))
    np.savez(file, **{**arrays, "config": np.array(str(arrays["config"]).replace("sink_tokens", "sinks"))})
    file.seek(0)
    assert repr(KVCache.load(file)) == repr(cache)


def test_files_that_are_no_cache(tmp_path):
    other = io.BytesIO()
    np.save(other, K)
    for content in (b"", b"text", other.getvalue(), b"PK\x03\x04" + bytes(40)):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^KVCache\.load: .*file is no cache, or damaged"):
            KVCache.load(path)
    np.savez(tmp_path / "other.npz", x=K)
    with pytest.raises(ValueError, match=r"is 'another kind of archive'; it must be 'attentile.KVCache 1'"):
        KVCache.load(tmp_path / "other.npz")
    with pytest.raises(FileNotFoundError):
        KVCache.load(tmp_path / "missing")


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def test_pickles_are_never_loaded():
    file = archive(format=np.array([Trap()], object))
    with pytest.raises(ValueError, match=r"^KVCache\.load: .*no cache, or damaged"):
        KVCache.load(file)
    assert not Trap.sprung


def test_every_cut_and_flipped_byte_is_refused_or_harmless():
    content, expected, refused = saved(made()), made(), []
    for cut in range(0, len(content), 101):
        with pytest.raises(ValueError, match=r"^KVCache\.load: "):
            KVCache.load(io.BytesIO(content[:cut]))
    for at in range(0, len(content), 37):
        changed = bytearray(content)
        changed[at] ^= 0x41
        try:
            found = KVCache.load(io.BytesIO(bytes(changed)))
        except ValueError as error:
            refused.append(str(error))
        else:
            assert_array_equal(found.keys(), expected.keys())
            assert_array_equal(found.values(), expected.values())
    assert len(refused) > 20
    assert all(text.startswith("KVCache.load: ") for text in refused)


def test_loading_does_not_reach_for_more_memory_than_the_file_needs():
    cache = KVCache.load(io.BytesIO(saved(made(window=(4, 0)))))
    assert pages_made(cache) == 2
    assert_array_equal(cache.attend(Q[:, :, :1]), made(window=(4, 0)).attend(Q[:, :, :1]))


@pytest.mark.parametrize(
    "dtype", ["float32", "float64"]
)  # the second is not the cache's own, so the general way decides
def test_num_threads_is_checked_on_every_way(dtype):
    cache = made()
    cache.append(K, V)
    q = normal(2, 4, 1, 4, dtype=dtype)
    with pytest.raises(ValueError, match=r"^KVCache.attend: num_threads is 0"):
        cache.attend(q, num_threads=0)
    assert_array_equal(cache.attend(q, num_threads=2), cache.attend(q, num_threads=1))
