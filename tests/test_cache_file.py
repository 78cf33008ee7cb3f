"""Caches in files: numbers of every kind, and files that cannot be made."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from cache_helpers import BATCH, Q_HEADS, WIDTH, ragged
from helpers import normal
from numpy.testing import assert_array_equal

from attentile import KVCache


def test_numbers_of_numpy_in_a_stored_cache(tmp_path):
    q, k, v = normal(3, 1, 2, 5, 8)
    cache = KVCache(1, 2, 8, rotary={"base": np.float32(500), "rotary_dim": np.int64(4)})
    cache.append(k, v)
    cache.save(tmp_path / "cache.npz")
    assert_array_equal(KVCache.load(tmp_path / "cache.npz").attend(q), cache.attend(q))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_file_holds_the_numbers_as_they_are_stored(tmp_path, either, dtype):
    """Of 16 bits, a file of its own format, which older versions refuse by name instead of calling it damaged."""
    cache, model = ragged(dtype, window=(30, 0), sink_tokens=2, rotary={})
    path = tmp_path / "cache.npz"
    cache.save(path)
    with np.load(path) as stored:
        assert str(stored["format"]) == f"attentile.KVCache {2 if dtype in ('float16', 'bfloat16') else 1}"
        assert stored["keys"].dtype == ("uint16" if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16":
            bits = stored["keys"].astype(np.uint32) << 16
            everything = [cache.held.runs(item) for item in range(BATCH)]
            assert np.isin(bits.view(np.float32), cache.held.copies(everything, np.dtype(np.float32))[0]).all()
    twin = KVCache.load(path)
    assert twin.dtype == cache.dtype
    q = normal(BATCH, Q_HEADS, 2, WIDTH)
    assert_array_equal(twin.attend(q), cache.attend(q))
    assert_array_equal(twin.keys(), cache.keys())
    assert_array_equal(twin.values(), model.visible()[1])


def test_a_stored_cache_of_what_json_does_not_know(tmp_path):
    cache = KVCache(1, 1, 8, rotary={"base": Fraction(500)})
    with pytest.raises(TypeError, match=r"^KVCache\.save: rotary has a Fraction in it; it must be numbers"):
        cache.save(tmp_path / "cache.npz")


def test_a_file_that_cannot_be_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        KVCache(1, 1, 8).save(tmp_path / "missing" / "cache.npz")
    assert not list(tmp_path.iterdir())
