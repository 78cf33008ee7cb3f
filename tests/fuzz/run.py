"""Runs the fuzz targets for a bounded time: `python tests/fuzz/run.py [target ...] [--seconds 30]`.

With atheris the search is guided by coverage, of the Python code and, if the core was built by clang with
`-fsanitize=fuzzer-no-link`, of the C code too; without atheris it throws random bytes, which the first line says. An
input that fails is written to a file whose name is printed; `--replay FILE` runs it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import random
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
TARGETS = ("attention", "cache", "rotary")
LONGEST = 400  # bytes of an input


def load(name: str) -> ModuleType:
    for folder in (HERE, HERE.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(f"target_{name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="default: all, one after the other")
    parser.add_argument("--seconds", type=int, default=30, help="for each target (default 30)")
    parser.add_argument("--corpus", type=Path, help="folder to keep interesting inputs in, one subfolder per target")
    parser.add_argument("--findings", type=Path, default=Path(), help="folder for failing inputs (default: here)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, help="run this input of the (one) target and nothing else")
    return parser.parse_args()


def guided(name: str, options: argparse.Namespace) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["attentile"]):
        import attentile
    module = load(name)
    print(f"{name}: guided by coverage, {attentile.show_config(as_dict=True)['isa']}", flush=True)
    words = [
        "fuzz", f"-max_total_time={options.seconds}", f"-max_len={LONGEST}", f"-seed={options.seed + 1}",
        "-timeout=300",
        "-rss_limit_mb=0", "-len_control=0", "-print_final_stats=1",
        f"-artifact_prefix={options.findings}/{name}-",
    ]  # fmt: skip
    if options.corpus is not None:
        (options.corpus / name).mkdir(parents=True, exist_ok=True)
        words.append(str(options.corpus / name))
    atheris.Setup(words, module.run, enable_python_coverage=True)
    atheris.Fuzz()


def unguided(name: str, options: argparse.Namespace) -> None:
    module, source, runs = load(name), random.Random(options.seed), 0
    print(f"{name}: atheris is not installed, so these are random bytes, not guided by coverage", flush=True)
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        data, runs = source.randbytes(source.randint(8, LONGEST)), runs + 1
        try:
            module.run(data)
        except BaseException:
            found = options.findings / f"{name}-{hashlib.sha1(data).hexdigest()[:12]}"
            found.write_bytes(data)
            traceback.print_exc()
            sys.exit(f"{name}: input {runs} failed, kept as {found}")
    print(f"{name}: {runs} inputs, no finding")


def main() -> None:
    options = arguments()
    targets = options.targets or list(TARGETS)
    options.findings.mkdir(parents=True, exist_ok=True)
    if len(targets) > 1:  # a process each: libFuzzer ends its own
        failed = [name for name in targets if subprocess.call([sys.executable, __file__, name, *words(options)])]
        sys.exit(f"findings in {', '.join(failed)}" if failed else 0)
    warnings.simplefilter("error")
    if options.replay is not None:
        load(targets[0]).run(options.replay.read_bytes())
        return
    try:
        import atheris  # noqa: F401
    except ImportError:
        unguided(targets[0], options)
    else:
        guided(targets[0], options)


def words(options: argparse.Namespace) -> list[str]:
    """The options again, for the process of one target."""
    given = ["--seconds", str(options.seconds), "--findings", str(options.findings), "--seed", str(options.seed)]
    return given if options.corpus is None else [*given, "--corpus", str(options.corpus)]


if __name__ == "__main__":
    main()
