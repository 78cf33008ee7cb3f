"""Prints requirements of pyproject.toml, one a line: python .ci/requirements.py NAME ...

A name is an extra (test, dev), "build", what builds the package, or "run", what it needs itself.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(names: list[str]) -> list[str]:
    """The requirements of these names; an extra may contain others, as `attentile[other]`."""
    stated = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    project = stated["project"]
    own = {"build": stated["build-system"]["requires"], "run": project["dependencies"]}
    lists = {**project["optional-dependencies"], **own}
    found = []
    for name in names:
        for requirement in lists[name]:
            inner = requirement.removeprefix(f"{project['name']}[")
            found += [requirement] if inner == requirement else requirements([inner.removesuffix("]")])
    return found


if __name__ == "__main__":
    print(*requirements(sys.argv[1:]), sep="\n")
