"""The numbers that Python repeats from the header of the kernels."""

from __future__ import annotations

from attentile.core import constants
from attentile.runtime import backend


def test_they_are_those_that_the_core_was_compiled_with(compiled):
    repeated = {name: value for name, value in vars(constants).items() if name.isupper()}
    assert repeated == backend.active.constants()
