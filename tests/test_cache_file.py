"""Caches in files: numbers of every kind, and files that cannot be made."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from helpers import normal
from numpy.testing import assert_array_equal

from attentile import KVCache


def test_numbers_of_numpy_in_a_stored_cache(tmp_path):
    q, k, v = normal(3, 1, 2, 5, 8)
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
