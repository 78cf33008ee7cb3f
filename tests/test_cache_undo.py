"""A layer's call that fails leaves its cache as it was, whatever fails and whatever the window has dropped.

Every test runs on the NumPy twin and on the compiled core (fixture `either`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_helpers import pages_in_use, pages_made
from helpers import normal
from layer_oracle import make
from numpy.testing import assert_array_equal

from attentile import KVCache, MultiHeadAttention
from attentile.cache import pages
from attentile.cache.retention import Held
from attentile.layers import multi_head

pytestmark = pytest.mark.usefixtures("either")

W = make(kv_heads=2, width=4)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (4, 0)},
    "long window": {"window": (300, 0)},
    "sink tokens": {"window": (4, 0), "sink_tokens": 3},
    "many sink tokens": {"window": (40, 0), "sink_tokens": 270},
    "capacity": {"window": (4, 0), "sink_tokens": 3, "capacity": 1500},
}


def tokens(n: int, seed: int = 0) -> Any:
    return normal(2, n, 12, dtype=np.float64, seed=seed)


def held(cache: KVCache) -> tuple[Any, ...]:
    """What a failed call must leave: the tokens, which of them are held, and how many pages they take."""
    return (
        repr(cache), cache.lengths.tolist(), cache.held.held_from.tolist(), cache.held.runs(0), cache.held.runs(1),
        [array.tobytes() for array in cache.held.copies([cache.held.runs(0), cache.held.runs(1)], cache.dtype)],
        np.count_nonzero(cache.held.pages.table),
    )  # fmt: skip


class Broken(BaseException):
    pass


def raises(*_: Any, **__: Any) -> Any:
    raise Broken


def break_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "attend", raises)


def break_projection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(multi_head, "times", raises)


def break_writing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Held, "write", raises)


def break_opening(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pages.PagePool, "take", raises)
    patch.setattr(pages.PageTable, "open", raises)


BREAKS = [None, break_attention, break_projection, break_writing, break_opening]
LENGTHS = [(1, 256, 600), (3, 257, 300)]  # that fail before every other call that does not


WRONG: list[dict[str, Any]] = [
    dict(mask=np.ones((9, 9, 9), bool)),
    dict(scale=np.nan),
    dict(sinks=[1.0]),
    dict(softcap=-1),
]


def fail(layer: MultiHeadAttention, cache: KVCache, x: Any, how: Any, **options: Any) -> None:
    before = held(cache)
    if how is None:
        with pytest.raises(ValueError, match=r"^KVCache\.attend: "):
            layer(x, cache=cache, **WRONG[(cache.length + x.shape[1]) % len(WRONG)], **options)
        assert held(cache) == before
        return
    with pytest.MonkeyPatch.context() as patch:
        how(patch)
        patch.setattr(Held, "view", lambda _: None)  # which would take the quick way past what is broken
        with pytest.raises(Broken):
            layer(x, cache=cache, **options)
    assert held(cache) == before


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("how", BREAKS)
def test_a_failed_call_leaves_every_token(kind, how):
    layer = W.layer()
    cache, twin = (KVCache(2, 2, 4, value_dim=4, dtype="float64", **OPTIONS[kind]) for _ in range(2))
    for seed, n in enumerate([10, 2, 257, 1, 300, 5]):
        for failed in LENGTHS[seed % 2]:
            fail(layer, cache, tokens(failed, seed=99), how)
        x = tokens(n, seed)
        assert_array_equal(layer(x, cache=cache), layer(x, cache=twin))
        assert held(cache) == held(twin)
        if cache.window is not None:
            assert cache.held.held_from.max() <= cache.length - n


@pytest.mark.parametrize("how", BREAKS)
def test_ragged_items_and_forks(how):
    layer, cache = W.layer(), KVCache(2, 2, 4, dtype="float64", window=(4, 0), sink_tokens=2)
    layer(tokens(300), cache=cache, lengths=[300, 200])
    twin, fork = cache.fork(), cache.fork()
    fork_before = [array.tobytes() for array in (fork.keys(), fork.values())]
    for n in (1, 70, 300):
        fail(layer, cache, tokens(n), how, lengths=[n, 0])
        fail(layer, cache, tokens(n), how, lengths=[n // 2, n])
        x = tokens(n, seed=n)
        assert_array_equal(layer(x, cache=cache, lengths=[n, 1]), layer(x, cache=twin, lengths=[n, 1]))
    assert [array.tobytes() for array in (fork.keys(), fork.values())] == fork_before


def test_pages_go_when_the_call_has_succeeded():
    layer, cache = W.layer(), KVCache(2, 2, 4, dtype="float64", window=(4, 0))
    plain = KVCache(2, 2, 4, dtype="float64", window=(4, 0))
    for seed in range(600):
        layer(tokens(1, seed % 7), cache=cache)
        plain.append(*np.zeros((2, 2, 2, 1, 4)))
        assert pages_in_use(cache) == pages_in_use(plain)
    assert pages_made(cache) <= pages_made(plain) + 2  # one for each item, while both its old and its new page live


def test_a_step_copies_no_page(monkeypatch):
    layer, cache = W.layer(), KVCache(2, 2, 4, dtype="float64", window=(300, 0))
    layer(tokens(10), cache=cache)
    table = cache.held.pages.table
    for _ in range(20):
        layer(tokens(1), cache=cache)
        assert cache.held.pages.table is table
