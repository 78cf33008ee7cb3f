"""`KVCache`: the steps of token generation, near the core and far from it."""

from collections.abc import Callable
from typing import Any

import formulas
import numpy as np
import pytest
from cases import SEED, Case, find_cases

import attentile


def filled(case: Case) -> tuple[attentile.KVCache, np.ndarray, np.ndarray, np.ndarray]:
    """A cache with the keys of a case, its queries, and one token of keys and values."""
    rng = np.random.default_rng(SEED)
    cache = attentile.KVCache(case.B, case.Hkv, case.D, dtype=case.dtype)
    k, v = (rng.uniform(-1, 1, (case.B, case.Hkv, case.S, case.D)).astype(case.dtype) for _ in range(2))
    cache.append(k, v)
    q = rng.uniform(-1, 1, (case.B, case.Hq, 1, case.D)).astype(case.dtype)
    return cache, q, k[:, :, :1].copy(), v[:, :, :1].copy()


def right(result: np.ndarray, cache: attentile.KVCache, q: np.ndarray) -> None:
    """The same rows from arrays, by the same backend."""
    expected = attentile.attention(q, cache.keys(), cache.values())
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["dec-gpt2", "dec-llama", "dec-b16"])
def test_attend_warm(name: str, timed: Callable[..., Any]) -> None:
    """The same step again and again: what the caches of the processor hold of the keys comes from there."""
    (case,) = find_cases(name)
    cache, q, _, _ = filled(case)
    keys, values = cache.keys(), cache.values()

    def formula(q: np.ndarray) -> np.ndarray:
        return formulas.attention(q, keys, values)

    group = f"KVCache {name}: {case.description}"
    right(timed(cache.attend, q, formula=formula, group=group, flops=case.flops), cache, q)


def test_attend_cold(timed: Callable[..., Any]) -> None:
    """32 caches in turn, as the layers of a model: 256 MiB that no cache of a processor holds."""
    (case,) = find_cases("dec-gpt2")
    layers = [filled(case) for _ in range(32)]
    arrays = [(q, cache.keys(), cache.values()) for cache, q, _, _ in layers]

    def step() -> list[np.ndarray]:
        return [cache.attend(q) for cache, q, _, _ in layers]

    def formula() -> list[np.ndarray]:
        return [formulas.attention(q, keys, values) for q, keys, values in arrays]

    group = f"KVCache, 32 layers: {case.description}"
    results = timed(step, formula=formula, group=group, flops=32 * case.flops)
    right(results[-1], *layers[-1][:2])


def test_append_and_attend(timed: Callable[..., Any]) -> None:
    """One token of a small model: 8 heads, 64 keys of width 64, and the way back to 64 keys."""
    case = Case("token", 1, 8, 8, 1, 64, 64, "float32", False, None)
    cache, q, k, v = filled(case)
    keys, values = cache.keys(), cache.values()

    def step() -> np.ndarray:
        cache.append(k, v)
        result = cache.attend(q)
        cache.truncate(64)
        return result

    def formula() -> np.ndarray:
        return formulas.decode_step(q, keys, values, k, v)[0]

    group = f"KVCache, append + attend + truncate: {case.description}"
    result = timed(step, formula=formula, group=group, flops=case.flops)
    cache.append(k, v)
    right(result, cache, q)
