"""Each way through the core once, for valgrind: everything small, nothing random but numbers, no test framework.

Valgrind sees what no assertion does: a decision that depends on memory that nobody wrote. Results are checked against
plain NumPy all the same.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import attentile
from attentile import KVCache, attention, attention_stats, positional_encoding, rotary_embedding


def plain(q: Any, k: Any, v: Any, allowed: Any) -> Any:
    s = np.where(allowed, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


def attend(rng: Any, dtype: Any, rows: int, value_width: int, threads: int) -> None:
    keys = 300
    q, k = rng.standard_normal((1, 2, rows, 9)).astype(dtype), rng.standard_normal((1, 2, keys, 9)).astype(dtype)
    v = rng.standard_normal((1, 2, keys, value_width)).astype(dtype)
    mask = rng.random((rows, keys)) < 0.7
    bias = rng.standard_normal((rows, keys)).astype(dtype)
    bound = 1e-4 if dtype == np.float32 else 1e-12
    for allowed in (np.ones((rows, keys), bool), mask):
        found = attention(q, k, v, mask=allowed, num_threads=threads, return_lse=True)
        assert np.abs(found.out - plain(q, k, v, allowed)).max() < bound
        assert np.isfinite(found.lse).all()
    v[:, :, 7] = np.nan
    mask[:, 7] = False
    options = {"softcap": 5.0, "sinks": np.zeros(2), "alibi_slopes": np.ones(2), "window": (250, 0)}
    found = attention(q, k, v, mask=mask, bias=bias, causal="lower_right", num_threads=threads, **options)
    assert np.isfinite(found).all()
    result = attention(q, k, v, mask=mask, return_weights=True)
    assert np.abs(result.weights.sum(-1) - 1).max() < bound
    stats = attention_stats(q, k, v, mask=mask, top_k=3)
    assert (stats.top_keys >= 0).all()


def cache(rng: Any, dtype: str, window: Any) -> None:
    held = KVCache(2, 2, 8, value_dim=5, dtype=dtype, window=window, sink_tokens=2 if window else 0, rotary={})
    for n in (270, 1, 1, 3):
        k, v = rng.standard_normal((2, 2, n, 8)).astype(dtype), rng.standard_normal((2, 2, n, 5)).astype(dtype)
        held.append(k, v, lengths=[n, max(n - 1, 0)] if n == 3 else None)
        q = rng.standard_normal((2, 4, 1, 8)).astype(dtype)
        assert np.isfinite(held.attend(q, num_threads=2)).all()
        assert np.isfinite(held.attend(q, return_lse=True).lse).all()
    twin = held.fork()
    held.truncate(held.lengths - 2)
    twin.reorder([1, 1, 0])
    assert np.isfinite(twin.attend(rng.standard_normal((3, 2, 1, 8)))).all()


def positions(rng: Any, dtype: Any, width: int) -> None:
    x = rng.standard_normal((1, 2, 70, width)).astype(dtype)
    for interleaved in (False, True):
        turned = rotary_embedding(x, 5, interleaved=interleaved, rotary_dim=width // 2 * 2)
        back = rotary_embedding(turned, 5, interleaved=interleaved, rotary_dim=width // 2 * 2, inverse=True)
        assert np.abs(back - x).max() < 1e-5
    cosines, sines = np.ones((80, 2), np.float32), np.zeros((80, 2), np.float32)
    assert (rotary_embedding(x, np.arange(70), rotary_dim=4, cos=cosines, sin=sines) == x).all()
    assert np.abs(positional_encoding(70, width, dtype=dtype)).max() <= 1


def main() -> None:
    rng = np.random.default_rng(0)
    for dtype, rows, value_width in itertools.product((np.float32, np.float64), (1, 5, 50), (3, 8, 33)):
        attend(rng, dtype, rows, value_width, 2)
    for dtype, window in itertools.product(("f4", "f8"), (None, (260, 0))):
        cache(rng, dtype, window)
    for dtype, width in itertools.product((np.float32, np.float64), (7, 64)):
        positions(rng, dtype, width)
    print(f"short suite on {attentile.show_config(as_dict=True)['isa']}: all right")


if __name__ == "__main__":
    main()
