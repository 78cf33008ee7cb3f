"""Put benchmark results on the performance page: python docs/add_results.py FILE NAME

FILE is what benchmarks/peers.py, pytest-benchmark or `python -m attentile bench` wrote as JSON; NAME becomes the
heading and docs/data/NAME.json. Only the numbers, the machine and the date are kept (sitegen/results.py). The
picture of the README is drawn again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

from sitegen.results import UnknownResultsError, kind_of, shrink  # noqa: E402
from sitegen.speeds import picture_of_the_readme  # noqa: E402


def processor_name() -> str:
    """The name that this machine's processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def add(file: Path, name: str, data: Path = DOCS / "data") -> Path:
    """Write to data/name.json the part of a results file that the page shows."""
    results = json.loads(file.read_text(encoding="utf-8"))
    if kind_of(results) == "bench":  # which says neither; it is added on the machine that was measured
        results.setdefault("processor", processor_name())
        results.setdefault("date", time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime)))
    target = data / f"{name}.json"
    target.write_text(json.dumps(shrink(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("name", metavar="NAME")
    arguments = parser.parse_args()
    try:
        print(add(arguments.file, arguments.name))
        picture, text = picture_of_the_readme(DOCS)
        picture.write_text(text, encoding="utf-8")
    except (OSError, json.JSONDecodeError, UnknownResultsError) as error:
        parser.error(f"{arguments.file}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
