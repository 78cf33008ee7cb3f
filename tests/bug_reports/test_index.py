"""INDEX.md against the tests: every report is answered, and no test or answer is missing from either side."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
REPORTS = 85
ROW = re.compile(r"^\| B(\d{2,3}) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAME = re.compile(r"test(?P<numbers>(?:_b\d{2,3})+)_\w+")


class Row(NamedTuple):
    fault: str
    files: set[str]
    source: str


def rows(text: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for match in ROW.finditer(text):
        number, fault, tests, source = match.groups()
        assert number not in found, f"B{number} is there twice"
        found[number] = Row(fault, set(re.findall(r"`([^`]+)`", tests)), source)
    return found


def numbers_in(source: str) -> list[str]:
    """The numbers in the names of the test functions in this Python text, with repetitions."""
    names = [x.name for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    matches = filter(None, map(NAME.fullmatch, names))
    return [number for match in matches for number in re.findall(r"\d+", match["numbers"])]


def files_by_number() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in HERE.parent.rglob("test_*.py"):
        inside = path.parent == HERE
        for number in numbers_in(path.read_text(encoding="utf-8")):
            found.setdefault(number, set()).add(path.name if inside else f"../{path.relative_to(HERE.parent)}")
    return found


INDEX = rows((HERE / "INDEX.md").read_text(encoding="utf-8"))


def test_index_has_all_reports_once():
    assert len(INDEX) == REPORTS
    assert len({row.source for row in INDEX.values()}) == REPORTS
    lines = (HERE / "INDEX.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| B") for line in lines) == REPORTS  # no row that the pattern skips


def test_index_names_the_files_of_each_report_and_no_other():
    tests = files_by_number()
    assert {number: row.files for number, row in INDEX.items()} == tests


def test_index_understands_names_and_rows():
    source = "def test_b01_x(): ...\nasync def test_b02_b103_y(): ...\nclass A:\n    def test_b04_z(self): ...\n"
    assert numbers_in(source + "def test_base(): ...\ndef b05_x(): ...\n'def test_b06_x'") == ["01", "02", "103", "04"]
    row = rows("| B07 | a fault | `a.py` `../b.py` | o/r#1 |")["07"]
    assert row == Row("a fault", {"a.py", "../b.py"}, "o/r#1")
