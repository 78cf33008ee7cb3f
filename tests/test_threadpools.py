"""threadpoolctl sees the pool of the core and limits it, whatever the order of imports, and puts back what it found."""

from __future__ import annotations

from typing import Any

import pytest

import attentile
from attentile.runtime import threads

threadpoolctl = pytest.importorskip("threadpoolctl")


def ours() -> list[dict[str, Any]]:
    return [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "attentile"]


@pytest.fixture(autouse=True)
def default_threads():
    attentile.set_num_threads(None)
    yield
    attentile.set_num_threads(None)


def test_the_pool_is_found_once(compiled):
    (pool,) = ours()
    assert pool["num_threads"] == attentile.get_num_threads()
    assert pool["version"] == attentile.show_config(as_dict=True)["version"]
    assert "_core" in pool["filepath"]


@pytest.mark.parametrize("limits", [1, 3, {"attentile": 3}])
def test_limits_hold_in_the_block_and_end_with_it(compiled, limits):
    limit = limits if isinstance(limits, int) else limits["attentile"]
    before = attentile.show_config(as_dict=True)
    with threadpoolctl.threadpool_limits(limits=limits):
        assert attentile.get_num_threads() == limit
        with attentile.num_threads(2):
            assert attentile.get_num_threads() == 2
            assert ours()[0]["num_threads"] == limit
    after = attentile.show_config(as_dict=True)
    assert (after["threads"], after["threads_why"]) == (before["threads"], before["threads_why"])


def test_a_setting_is_put_back(compiled):
    attentile.set_num_threads(5)
    with threadpoolctl.threadpool_limits(limits=1):
        assert attentile.get_num_threads() == 1
    assert attentile.get_num_threads() == 5


def test_a_block_is_no_setting_of_the_process(compiled):
    with attentile.num_threads(7):
        with threadpoolctl.threadpool_limits(limits=2):
            assert attentile.get_num_threads() == 7  # the block is nearer to the call
        assert threads.process_threads()[0] == threads.default_threads()[0]
    assert attentile.get_num_threads() == threads.default_threads()[0]


def test_limits_of_others_are_not_ours(compiled):
    with threadpoolctl.threadpool_limits(limits={"blas": 1}):
        assert attentile.show_config(as_dict=True)["threads_why"] != "set_num_threads()"
