"""Builds the compiled core: one Cython module, and one C object per instruction set with flags of its own.

The objects are given to the linker as `extra_objects` and to setuptools as `depends`, so an edited tile is always
rebuilt and relinked (a static library through `libraries=` would leave a stale extension behind).

ATTENTILE_PURE=1     no compiled core: the pure-NumPy package
ATTENTILE_DEBUG=1    Cython's bounds and initialisation checks on, C at -O1 with assertions of the compiler's sanitizers
                     left to CFLAGS
ATTENTILE_ANNOTATE=1 also write _core.html (cython -a)
"""

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("src/attentile")
KERNELS = PACKAGE / "kernels"
DEBUG = os.environ.get("ATTENTILE_DEBUG") == "1"

# Instruction set -> flags. One row per <isa>.c; dispatch.c has the same list. No -march=native: a wheel must run
# anywhere. -ffp-contract=off: the order of roundings is a promise, so only the FMAs that are written exist.
X86_64 = {
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
}
AARCH64: dict[str, list[str]] = {"neon": []}  # part of every such processor


def instruction_sets(platform: str) -> dict[str, list[str]]:
    """The rows of the platform that is built for (sysconfig's name of it: this machine may be another)."""
    if platform.endswith("universal2"):  # both in one go; a file is empty for the processor it is not for
        x86_64 = {name: [word for flag in flags for word in ("-Xarch_x86_64", flag)] for name, flags in X86_64.items()}
        return {"generic": [], **x86_64, **AARCH64}
    if platform.endswith(("x86_64", "amd64")):
        return {"generic": [], **X86_64}
    return {"generic": [], **(AARCH64 if platform.endswith(("aarch64", "arm64")) else {})}


ISAS = instruction_sets(sysconfig.get_platform())
PLAIN = ["pool", "dispatch", "bits", "encode", "scalar"]  # C without an instruction set of its own
OPTIMISE = ["-O1", "-g"] if DEBUG else ["-O3", "-g0"]
CFLAGS = [*OPTIMISE, "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"] if os.environ.get("ATTENTILE_WERROR") == "1" else []


class BuildCore(build_ext):
    """build_ext that first compiles the per-ISA objects; without a compiler it leaves a pure-NumPy package."""

    def build_extension(self, ext: Extension) -> None:
        headers = sorted(str(path) for path in [*KERNELS.glob("*.h"), *KERNELS.glob("*.inc")])
        objects = []
        for name, flags in [*ISAS.items(), *((name, []) for name in PLAIN)]:
            objects += self.compiler.compile(
                [str(KERNELS / f"{name}.c")],
                output_dir=self.build_temp,
                extra_postargs=[*CFLAGS, *WARNINGS, *flags],
                depends=[*headers, "setup.py"],
            )
        ext.extra_objects = objects
        super().build_extension(ext)

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # a missing compiler shows as one of several setuptools errors
            if os.environ.get("ATTENTILE_REQUIRE_COMPILED") == "1":
                raise
            print(f"\nattentile: the compiled core was not built ({error}).", file=sys.stderr)
            print("attentile: installing the pure-NumPy package, which is right but slow.\n", file=sys.stderr)
            self.extensions = []


def extensions() -> list[Extension]:
    """The one extension, or none for a pure install."""
    if os.environ.get("ATTENTILE_PURE") == "1":
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    depends = [str(path) for pattern in ("*.h", "*.inc", "*.c") for path in sorted(KERNELS.glob(pattern))]
    core = Extension(
        "attentile._core",
        [str(PACKAGE / "_core.pyx")],
        include_dirs=[str(PACKAGE)],
        depends=[*depends, *[str(path) for path in sorted(PACKAGE.glob("*.px[di]"))], "setup.py"],
        extra_compile_args=CFLAGS,
    )
    return cythonize(
        [core],
        annotate=os.environ.get("ATTENTILE_ANNOTATE") == "1",
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "freethreading_compatible": True,
        },
    )


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildCore})
