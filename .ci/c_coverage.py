"""Line coverage of the C and Cython sources from gcov's counters: python .ci/c_coverage.py BUILD_FOLDER [--missing].

A source file that several objects include (tiles.inc in each instruction set) counts as run where any of them ran; a
line that no object has code for counts for nothing. A statement of Cython ran if some line of its C did. With
--missing also the lines that never ran.
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
import sys
from pathlib import Path

GENERATED = Path("src/attentile/core/_core.c")
MARK = re.compile(r'^ *\/\* "(?:src/)?attentile/core/(\w+\.p[xy][xid])":(\d+)$')
KINDS = {"Cython": {".pyx", ".pxi", ".pxd"}, "C": {".c", ".h", ".inc"}}


def origins(generated: Path) -> dict[int, tuple[str, int]]:
    """{line of the generated C: (source, line)}: from a comment that names its statement up to the next, or the end."""
    found, current = {}, None
    for number, text in enumerate(generated.read_text(encoding="utf-8").splitlines(), 1):
        if mark := MARK.match(text):
            current = mark[1], int(mark[2])
        elif text.startswith("}"):
            current = None
        if current is not None:
            found[number] = current
    return found


def hits(folder: Path) -> dict[str, dict[int, int]]:
    """{source file: {line: how often it ran}} over all objects below this folder."""
    found: dict[str, dict[int, int]] = collections.defaultdict(dict)
    origin = origins(GENERATED)
    counters = sorted(folder.rglob("*.gcda"))
    if not counters:
        sys.exit(f"no counters (*.gcda) below {folder}: was it built with CFLAGS=--coverage, and did anything run?")
    for counter in counters:
        command = ["gcov", "--json-format", "--stdout", str(counter)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for file in (file for line in report.splitlines() for file in json.loads(line)["files"]):
            name = Path(file["file"]).name
            for line in file["lines"]:
                at = name, line["line_number"]
                source, number = origin.get(at[1], at) if name == GENERATED.name else at
                found[source][number] = max(found[source].get(number, 0), line["count"])
    return found


def ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] as "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)


def main() -> None:
    found, missing = hits(Path(sys.argv[1])), "--missing" in sys.argv
    ours = {path.name for path in Path("src/attentile").rglob("*") if path.name != "_core.c"}
    for kind, endings in KINDS.items():
        files = {name: lines for name, lines in found.items() if name in ours and Path(name).suffix in endings}
        if not files:
            sys.exit(f"no counters of {kind} sources")
        ran = sum(count > 0 for lines in files.values() for count in lines.values())
        total = sum(map(len, files.values()))
        print(f"{kind}: {ran} of {total} lines ran, {100 * ran / total:.1f} %")
        for name, lines in sorted(files.items()):
            never = sorted(number for number, count in lines.items() if not count)
            print(f"  {name:16} {100 - 100 * len(never) / len(lines):5.1f} %" + f"  {ranges(never)}" * missing)


if __name__ == "__main__":
    main()
