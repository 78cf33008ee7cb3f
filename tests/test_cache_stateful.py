"""Random lives of KVCaches and their forks, side by side with models that keep every token in plain lists."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from cache_helpers import Model, assert_same, pages_in_use, poison, state_of
from helpers import normal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.testing import assert_array_equal

from attentile import KVCache, use_backend
from attentile.runtime import backend

HEADS, Q_HEADS, WIDTH, VALUE_WIDTH = 2, 4, 3, 2
# Around a panel, the smallest page and a page.
SOME = st.sampled_from([0, 1, 1, 1, 2, 3, 15, 16, 17, 31, 255, 256, 257])
KINDS = ["plain", "mask", "bias", "all", "weights", "past"]


class CacheMachine(RuleBasedStateMachine):
    """self.lives: pairs (cache, model); the forks of one cache share pages."""

    backend: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.restore = use_backend(self.backend) if self.backend else None
        self.impl = backend.active.get_isa() if backend.active is not None else "reference"
        self.seed = 0
        self.lives: list[tuple[KVCache, Model]] = []

    def teardown(self) -> None:
        if self.restore is not None:
            self.restore.__exit__()

    @initialize(
        batch=st.integers(1, 3),
        capacity=st.sampled_from([None, None, 40, 600]),
        dtype=st.sampled_from(["f4", "f8", "f2", "bfloat16"]),
        window=st.sampled_from([None, (0, 0), (4, 0), (20, 0), (256, 0)]),
        sink_tokens=st.sampled_from([0, 0, 2, 17, 300]),
    )
    def start(self, batch, capacity, dtype, window, sink_tokens):
        cache = KVCache(
            batch, HEADS, WIDTH, capacity, value_dim=VALUE_WIDTH, dtype=dtype, window=window,
            sink_tokens=sink_tokens if window else 0,
        )  # fmt: skip
        self.lives = [(cache, Model.of(cache))]

    def chosen(self, data: Any) -> tuple[KVCache, Model]:
        return self.lives[data.draw(st.integers(0, len(self.lives) - 1), label="life")]

    def numbers(self, *shape: int) -> Any:
        self.seed += 1
        return normal(*shape, dtype=np.float64, seed=self.seed)

    @rule(data=st.data(), n=SOME, ragged=st.booleans())
    def append(self, data, n, ragged):
        cache, model = self.chosen(data)
        counts = None
        if ragged:
            counts = data.draw(st.lists(st.integers(0, n), min_size=cache.batch, max_size=cache.batch), label="counts")
        k, v = self.numbers(cache.batch, HEADS, n, WIDTH), self.numbers(cache.batch, HEADS, n, VALUE_WIDTH)
        later = model.copy()
        later.append(k, v, counts)
        gone = [max(held - later.sink_tokens, 0) for held in later.held_from]
        held = [length - lost for length, lost in zip(later.lengths, gone, strict=True)]
        before = state_of(cache)
        if cache.capacity is not None and max(held) > cache.capacity:
            with pytest.raises(ValueError, match="the capacity is"):
                cache.append(k, v, lengths=counts)
            assert state_of(cache) == before
            return
        cache.append(k, v, lengths=counts)
        model.__dict__.update(later.__dict__)
        if n:  # every row that was just appended can attend
            q, start = self.numbers(cache.batch, Q_HEADS, n, WIDTH), np.array(before[1])
            found, expected = cache.attend(q, q_start=start), model.attend(q, causal=True, q_start=start)
            for b in range(cache.batch):
                own = n if counts is None else counts[b]
                assert_same(self.impl, found[b, :, :own], expected[b, :, :own])

    @rule(data=st.data(), rows=st.integers(1, 5), kind=st.sampled_from(KINDS))
    def attend(self, data, rows, kind):
        cache, model = self.chosen(data)
        q, options = self.numbers(cache.batch, Q_HEADS, rows, WIDTH), {}
        if kind == "mask":
            options["mask"] = self.numbers(rows, model.length) > 0
        elif kind == "bias":
            options["bias"] = self.numbers(Q_HEADS, 1, model.length)
        elif kind == "all" and cache.window is None:
            options["causal"] = False
        elif kind == "weights":
            options |= {"return_weights": True, "return_lse": True, "sinks": np.linspace(-1, 1, Q_HEADS)}
        elif kind == "past":
            options["key_lengths"] = [data.draw(st.integers(0, n), label="key_lengths") for n in model.lengths]
        valid = np.array(options.get("key_lengths", model.lengths))
        before = state_of(cache)
        if model.lacks(rows, valid):
            with pytest.raises(ValueError, match="the window has dropped"):
                cache.attend(q, **options)
        else:
            assert_same(self.impl, cache.attend(q, **options), model.attend(q, **options))
        assert state_of(cache) == before

    @rule(data=st.data())
    def truncate(self, data):
        cache, model = self.chosen(data)
        back = st.one_of(st.integers(0, 6), st.integers(0, 600))
        ends = [max(n - data.draw(back, label="back"), 0) for n in model.lengths]
        before = state_of(cache)
        if model.can_truncate(ends):
            cache.truncate(ends)
            model.truncate(ends)
        else:
            with pytest.raises(ValueError, match="cannot go back to"):
                cache.truncate(ends)
            assert state_of(cache) == before

    @precondition(lambda self: len(self.lives) < 3)
    @rule(data=st.data())
    def fork(self, data):
        cache, model = self.chosen(data)
        self.lives.append((cache.fork(), model.copy()))

    @precondition(lambda self: len(self.lives) > 1)
    @rule(data=st.data())
    def forget(self, data):
        del self.lives[data.draw(st.integers(0, len(self.lives) - 1), label="life")]

    @rule(data=st.data())
    def reorder(self, data):
        cache, model = self.chosen(data)
        beams = data.draw(st.lists(st.integers(0, cache.batch - 1), min_size=1, max_size=4), label="beams")
        cache.reorder(beams)
        model.reorder(beams)

    @rule(data=st.data(), way=st.sampled_from(["file", "pickle"]))
    def store(self, data, way):
        at = data.draw(st.integers(0, len(self.lives) - 1), label="life")
        cache, model = self.lives[at]
        if way == "pickle":
            twin = pickle.loads(pickle.dumps(cache))
        else:
            file = io.BytesIO()
            cache.save(file)
            file.seek(0)
            twin = KVCache.load(file)
        self.lives[at] = (twin, model)

    @invariant()
    def tokens_and_pages_are_right(self):
        pools: dict[int, set[int]] = {}
        for cache, _ in self.lives:
            poison(cache)
        for cache, model in self.lives:
            assert cache.lengths.tolist() == model.lengths
            assert cache.length == model.length
            assert cache.held.held_from.tolist() == model.held_from
            for found, expected in zip((cache.keys(), cache.values()), model.visible(), strict=True):
                assert_array_equal(found, expected)
            self.check_pages(cache, model)
            used = {int(a) for a in cache.held.pages.table.ravel() if a}
            pools.setdefault(id(cache.held.pages.pool), set()).update(used)
        for cache, _ in self.lives:
            assert pages_in_use(cache) == len(pools[id(cache.held.pages.pool)])

    def check_pages(self, cache: KVCache, model: Model) -> None:
        """A page stands where a token is held, and nowhere else."""
        size, table = cache.held.pages.pool.page_keys, cache.held.pages.table
        for b, (n, held) in enumerate(zip(model.lengths, model.held_from, strict=True)):
            wanted = {t // size for t in range(n) if t < model.sink_tokens or t >= held}
            assert set(np.flatnonzero(table[b]).tolist()) == wanted


class ReferenceMachine(CacheMachine):
    backend = "numpy"


LIMITS = settings(
    deadline=None, max_examples=100, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)  # fmt: skip
TestOnTheDefaultBackend = CacheMachine.TestCase
TestOnTheDefaultBackend.settings = LIMITS
TestOnTheReference = ReferenceMachine.TestCase
TestOnTheReference.settings = settings(LIMITS, max_examples=40)
