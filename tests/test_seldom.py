"""Inputs that no other test has: each was found as a line of the package that no test reached."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from layer_oracle import normal
from numpy.testing import assert_allclose, assert_array_equal

from attentile import KVCache, MultiHeadAttention, __main__, attention, explain, rotary_embedding, self_attention


def arrays(*shape: int, n: int = 3) -> list[np.ndarray]:
    return [*np.random.default_rng(0).standard_normal((n, *shape)).astype(np.float32)]


# ---- the command ----


def test_bench_without_json(capsys):
    assert __main__.main(["bench", "--shape", "1,1,1,8,8,4", "--seconds", "0.01"]) == 0
    assert "1x1 heads, 8x8, d=4" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["1,2,3", "1,2,x,4,5,6", "1,4,3,8,8,4", "1,1,1,0,8,4"])
def test_bench_refuses_what_is_no_shape(capsys, shape):
    with pytest.raises(SystemExit):
        __main__.main(["bench", "--shape", shape])
    assert f"'{shape}' is not B,Hq,Hkv,L,S,D" in capsys.readouterr().err


def test_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "attentile", "info"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("version ")
    assert not done.stderr


# ---- caches ----


@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_cache_gives_all_results(impl, rows):
    result = KVCache(2, 1, 4).attend(np.ones((2, 3, rows, 4), np.float32), return_lse=True, return_weights=True)
    assert_array_equal(result.out, np.zeros((2, 3, rows, 4), np.float32))
    assert_array_equal(result.lse, np.full((2, 3, rows), -np.inf, np.float32))
    assert result.weights.shape == (2, 3, rows, 0)


def test_numbers_of_numpy_in_a_stored_cache(tmp_path):
    q, k, v = arrays(1, 2, 5, 8)
    cache = KVCache(1, 2, 8, rotary={"base": np.float32(500), "rotary_dim": np.int64(4)})
    cache.append(k, v)
    cache.save(tmp_path / "cache.npz")
    assert_array_equal(KVCache.load(tmp_path / "cache.npz").attend(q), cache.attend(q))


def test_a_stored_cache_of_what_json_does_not_know(tmp_path):
    cache = KVCache(1, 1, 8, rotary={"base": Fraction(500)})
    with pytest.raises(TypeError, match=r"^KVCache\.save: rotary has a Fraction in it; it must be numbers"):
        cache.save(tmp_path / "cache.npz")


def test_a_file_that_cannot_be_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        KVCache(1, 1, 8).save(tmp_path / "missing" / "cache.npz")
    assert not list(tmp_path.iterdir())


# ---- the layer ----


def test_a_layer_of_one_value_width_shows_it():
    layer = MultiHeadAttention(normal(6, 8), normal(6, 8), normal(6, 4), normal(4, 5), num_heads=2)
    assert repr(layer) == "MultiHeadAttention(d_in=6, d_out=5, num_heads=2, head_dim=4, value_dim=2)"


def test_positions_for_a_layer_that_turns_beside_a_cache(impl):
    """The layer's rotary, the cache has none, and the caller places the rows."""
    x = normal(2, 5, 8)
    layer = MultiHeadAttention(*(normal(8, 8, seed=n) for n in range(4)), num_heads=2, rotary={})
    whole, cache = layer(x, causal=True, positions=np.arange(40, 45)), KVCache(2, 2, 4, dtype="float64")
    rows = [layer(x[:, i : i + 1], cache=cache, positions=np.full((2, 1), 40 + i)) for i in range(5)]
    assert_allclose(np.concatenate(rows, axis=1), whole, rtol=0, atol=1e-12)


# ---- arguments ----


@pytest.mark.parametrize("d_k", ["eight", None, [1, 2]], ids=repr)
def test_d_k_that_is_no_number(d_k):
    with pytest.raises(TypeError, match=r"^self_attention: d_k is .*; it must be a positive number$"):
        self_attention(*arrays(3, 8), d_k)


def test_segments_whose_batch_axes_do_not_fit():
    q = np.ones((2, 1, 4, 8), np.float32)
    with pytest.raises(ValueError, match=r"segments \(query ids\) has shape \(3, 4\); it must broadcast to \(2, 4\)"):
        attention(q, q, q, segments=np.zeros((3, 4), int))


def test_segments_without_any_key(impl):
    q, k, v = np.ones((2, 1, 4, 8), np.float32), *np.ones((2, 2, 1, 0, 8), np.float32)
    out = attention(q, k, v, segments=(np.zeros((2, 4), int), np.zeros((2, 0), int)))
    assert_array_equal(out, np.zeros_like(q))


# ---- explain ----


def test_explain_of_a_mask_of_one_column(compiled):
    q, k, v = arrays(1, 2, 4, 8)
    mask = np.ones((4, 1), bool)
    assert any("mask is True everywhere" in note for note in explain(q, k, v, mask=mask).notes)
    mask[2] = False  # whole rows are excluded, which no structural option says
    assert not any("mask" in note for note in explain(q, k, v, mask=mask).notes)


def test_explain_of_a_mask_beside_scattered_segments(compiled):
    q, k, v = arrays(1, 2, 4, 8)
    given = explain(q, k, v, mask=np.ones((4, 4), bool), segments=np.array([0, 1, 0, 1]))
    assert given.copies["mask"] == "combined with the segments, 16 bytes"


def test_explain_of_outputs_that_are_filled_by_a_copy(compiled):
    q, k, v = arrays(1, 2, 4, 8)
    odd = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(q.shape)
    assert explain(q, k, v, out=odd).copies["out"].startswith("not aligned; a new array of 256 bytes")
    changed = explain(q, k, v, out=np.empty_like(q), score_mod=lambda s, b, h, i, j: s)
    assert changed.copies["out"].startswith("score_mod= given; a new array")


def test_explain_of_very_large_calls(compiled):
    x = np.broadcast_to(np.float32(0), (1, 1, 2**16, 64))
    text = str(explain(x, x, x, return_weights=True))
    assert "useful 1.1 TFLOP" in text  # 2 * 2**32 * (64 + 64)
    assert "output  16.02 GiB" in text  # 2**16 * (2**16 + 64) * 4 bytes


def test_rotary_without_rows(impl):
    assert rotary_embedding(np.ones((2, 0, 8), np.float32)).shape == (2, 0, 8)
