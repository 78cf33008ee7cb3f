"""When the tests are shared among processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import is_whole_suite

HERE = str(Path(__file__).parent)


@pytest.mark.parametrize(
    ("arguments", "options", "whole"),
    [
        ([HERE], {}, True),
        ([HERE + "/"], {"maxfail": 1}, True),
        ([HERE], {"keyword": "avx2"}, False),
        ([HERE], {"lf": True}, False),
        ([HERE], {"usepdb": True}, False),
        ([HERE], {"capture": "no"}, False),
        ([HERE + "/test_conftest.py"], {}, False),
        ([HERE, HERE + "/../benchmarks"], {}, False),
        ([HERE + "/../benchmarks"], {}, False),
    ],
)
def test_only_the_whole_suite_is_shared(arguments: list[str], options: dict[str, Any], whole: bool) -> None:
    def getoption(name: str, default: Any = None) -> Any:
        return options.get(name, {"capture": "fd"}.get(name, default))

    config: Any = SimpleNamespace(args=arguments, getoption=getoption)
    assert is_whole_suite(config) == whole
