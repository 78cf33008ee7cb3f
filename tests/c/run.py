"""Compiles pool and tiles without Python and runs the checks: with the C compiler of this machine, and as Windows
programs where clang, MinGW-w64 and Wine are there. Needs setuptools, because setup.py has the flags.

    python tests/c/run.py <folder for the programs>

What this machine cannot do is printed as "SKIPPED: ..." and does not fail.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINGW = "x86_64-w64-mingw32-gcc"
# clang, because gcc for Windows does not align the stack for wide vectors.
WINDOWS_COMPILER = ["clang", "--target=x86_64-w64-windows-gnu"]


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"failed ({done.returncode}): {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path, compiler: list[str], linker: list[str], suffix: str, last: list[str]) -> list[Path]:
    """The programs, made of the kernels' sources with the flags of setup.py."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    folder.mkdir(parents=True)
    flags = [*setup["CFLAGS"], "-Wall", "-Wextra", "-Werror", "-I", str(setup["KERNELS"])]
    objects = []
    for name, own in [*setup["ISAS"].items(), *((name, []) for name in setup["PLAIN"])]:
        objects.append(str(folder / f"{name}.o"))
        run([*compiler, *flags, *own, "-c", str(setup["KERNELS"] / f"{name}.c"), "-o", objects[-1]])
    programs = []
    for source in sorted((ROOT / "tests" / "c").glob("check_*.c")):
        programs.append(folder / f"{source.stem}{suffix}")
        run([*compiler, *flags, "-c", str(source), "-o", f"{programs[-1]}.o"])
        run([*linker, f"{programs[-1]}.o", *objects, "-o", str(programs[-1]), *last])
    return programs


def check(programs: list[Path], starter: list[str], **environment: str) -> list[str]:
    """Runs each program, which must end with "ok"; returns what they printed before."""
    lines: list[str] = []
    for program in programs:
        printed = run([*starter, str(program)], env={**os.environ, **environment}).split("\n")
        printed = [line.strip() for line in printed if line.strip()]
        if not printed or printed.pop() != "ok":
            sys.exit(f"{program.name} did not end with ok: {printed}")
        print(f"  {program.name}: ok {printed}")
        lines += printed
    return lines


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    compiler = [os.environ.get("CC", "cc")]
    print("here:")
    here = check(build(folder / "here", compiler, compiler, "", ["-lm", "-lpthread"]), [])
    missing = [tool for tool in (WINDOWS_COMPILER[0], MINGW, "wine") if shutil.which(tool) is None]
    if platform.machine() not in ("x86_64", "AMD64"):
        missing.append("an x86-64 processor")
    if missing:
        print(f"SKIPPED: Windows programs under Wine ({', '.join(missing)} not found)")
        return
    print("for Windows:")
    programs = build(folder / "windows", WINDOWS_COMPILER, [MINGW], ".exe", ["-static"])
    there = check(programs, ["wine"], WINEPREFIX=str(folder / "wine"), WINEDEBUG="-all")
    if here != there:
        sys.exit(f"the bits differ: {here} here, {there} on Windows")


if __name__ == "__main__":
    main()
