"""Builds the compiled core: one Cython module, and one C object per instruction set with flags of its own.

The objects are given to the linker as `extra_objects` and to setuptools as `depends`, so an edited tile is always
rebuilt and relinked (a static library through `libraries=` would leave a stale extension behind).

ATTENTILE_PURE=1     no compiled core: the pure-NumPy package
ATTENTILE_ABI3=1     the core on the stable ABI of Python 3.11: one wheel (cp311-abi3) for it and all later versions
ATTENTILE_REQUIRE_COMPILED=1  a core that cannot be built is an error instead of a pure-NumPy package
ATTENTILE_WERROR=1   C warnings are errors
ATTENTILE_DEBUG=1    Cython's bounds and initialisation checks on, C at -O1 with assertions of the compiler's sanitizers
                     left to CFLAGS
ATTENTILE_ANNOTATE=1 also write _core.html (cython -a)
"""

import os
import platform
import re
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("src/attentile/core")
KERNELS = CORE / "kernels"
DEBUG = os.environ.get("ATTENTILE_DEBUG") == "1"
ABI3 = os.environ.get("ATTENTILE_ABI3") == "1"
REQUIRE_COMPILED = os.environ.get("ATTENTILE_REQUIRE_COMPILED") == "1"
NOT_BUILT = """
attentile: the compiled core was not built ({}).
attentile: installing the pure-NumPy package, which is right but slow. When what is missing is there, reinstall with
attentile: pip install --no-cache-dir --force-reinstall --no-deps, because pip keeps the package that it built now.
"""

# Instruction set -> flags. One row per <isa>.c; dispatch.c has the same list. No -march=native: a wheel must run
# anywhere. -ffp-contract=off: the order of roundings is a promise, so only the FMAs that are written exist.
X86_64 = {
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
AARCH64: dict[str, list[str]] = {"neon": []}  # part of every such processor


def instruction_sets(target: str) -> dict[str, list[str]]:
    """The rows of the platform that is built for (sysconfig's name of it: this machine may be another)."""
    if target.endswith("universal2"):  # both in one go; a file is empty for the processor it is not for
        unused = "-Wno-unused-command-line-argument"  # by the other processor
        x86_64 = {name: [w for f in flags for w in ("-Xarch_x86_64", f)] + [unused] for name, flags in X86_64.items()}
        return {"generic": [], **x86_64, **AARCH64}
    if target.endswith(("x86_64", "amd64")):
        return {"generic": [], **X86_64}
    return {"generic": [], **(AARCH64 if target.endswith(("aarch64", "arm64")) else {})}


ISAS = instruction_sets(sysconfig.get_platform())
PLAIN = ["pool", "dispatch", "bits", "scalar", "idle"]  # C without an instruction set of its own
OPTIMISE = ["-O1", "-g"] if DEBUG else ["-O3", "-g0"]
CFLAGS = [*OPTIMISE, "-std=c11", "-ffp-contract=off", "-fno-math-errno"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"] if os.environ.get("ATTENTILE_WERROR") == "1" else []


# ---- what differs between platforms ----


def for_one_processor() -> None:
    """macOS: python.org's Python builds for two processors at once, but kernels have the flags of one."""
    kind = sysconfig.get_platform()
    if sys.platform == "darwin" and kind.endswith("universal2") and "ARCHFLAGS" not in os.environ:
        machine = platform.machine()
        os.environ["ARCHFLAGS"] = f"-arch {machine}"
        os.environ.setdefault("_PYTHON_HOST_PLATFORM", kind.replace("universal2", machine))


def spelled(flags: list[str], compiler_type: str) -> list[str]:
    """The flags as the compiler's command line takes them; clang-cl takes those of clang behind a prefix."""
    if compiler_type == "msvc":
        return [f"/clang:{flag}" for flag in flags]
    return [*flags, "-fvisibility=hidden"]


def find_clang_cl(cl: str) -> str:
    """clang-cl from the PATH, or from the Visual Studio that holds `cl` (VC/Tools/MSVC/<version>/bin/...)."""
    machine = "ARM64" if sysconfig.get_platform() == "win-arm64" else "x64"
    beside = [parent / "Llvm" / machine / "bin" for parent in Path(cl).parents if parent.name == "Tools"]
    found = shutil.which("clang-cl") or shutil.which("clang-cl", path=os.pathsep.join(map(str, beside)) or None)
    if found is None:
        raise RuntimeError(
            "the kernels need the vector extensions of gcc and clang, which cl.exe lacks, and no clang-cl was found; "
            "install 'C++ Clang tools for Windows' with Visual Studio, or LLVM, and have clang-cl on the PATH"
        )
    return found


def prepare(compiler: object) -> None:
    """Windows: clang-cl in the place of cl.exe. gcc there does not align the stack for wide vectors: refused."""
    if compiler.compiler_type == "mingw32":
        raise RuntimeError("gcc for Windows keeps wide vectors on a stack that is not aligned for them; use clang-cl")
    if compiler.compiler_type == "msvc":
        if not compiler.initialized:
            compiler.initialize()
        compiler.cc = find_clang_cl(compiler.cc)
        compiler.compile_options = [option for option in compiler.compile_options if option != "/GL"]  # cl.exe's own


# ---- the description ----


def for_an_index(readme: str, repository: str | None) -> str:
    """The README as a package index shows it, which has none of the files that the repository's README links to.

    They are linked at the repository's address. Without one, links become their text and pictures are left out.
    """
    target = r"\((?!https?:|#)([^)]+)\)"
    picture, link = rf"!\[([^\]]*)\]{target}", rf"(?<!!)\[([^\]]+)\]{target}"
    if repository is None:
        return re.sub(link, r"\1", re.sub(rf"{picture}\n*", "", readme))
    linked = re.sub(link, rf"[\1]({repository}/blob/HEAD/\2)", readme)
    return re.sub(picture, rf"![\1]({repository}/raw/HEAD/\2)", linked)


def description() -> str:
    """README.md for an index, with the address that pyproject.toml gives."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return for_an_index(Path("README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Repository"))


# ---- the build ----


class BuildCore(build_ext):
    """build_ext that first compiles the per-ISA objects; without a compiler it leaves a pure-NumPy package."""

    def build_extension(self, ext: Extension) -> None:
        prepare(self.compiler)
        kind = self.compiler.compiler_type
        headers = sorted(str(path) for path in [*KERNELS.glob("*.h"), *KERNELS.glob("*.inc")])
        objects = []
        for name, flags in [*ISAS.items(), *((name, []) for name in PLAIN)]:
            objects += self.compiler.compile(
                [str(KERNELS / f"{name}.c")],
                output_dir=self.build_temp,
                extra_postargs=spelled([*CFLAGS, *WARNINGS, *flags], kind),
                depends=[*headers, "setup.py"],
            )
        ext.extra_objects = objects
        ext.extra_compile_args = spelled(CFLAGS, kind)
        super().build_extension(ext)

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # a missing compiler shows as one of several setuptools errors
            if REQUIRE_COMPILED:
                raise
            print(NOT_BUILT.format(error), file=sys.stderr)
            self.extensions = []


def extensions() -> list[Extension]:
    """The one extension, or none for a pure install."""
    if os.environ.get("ATTENTILE_PURE") == "1":
        return []
    if ABI3 and sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise SystemExit(
            "attentile: ATTENTILE_ABI3=1 needs a Python with a GIL; the free-threaded one has no stable ABI"
        )
    try:
        from Cython.Build import cythonize
    except ImportError:
        if REQUIRE_COMPILED:
            raise
        print(NOT_BUILT.format("Cython >= 3.2 is not installed"), file=sys.stderr)
        return []
    depends = [str(path) for pattern in ("*.h", "*.inc", "*.c") for path in sorted(KERNELS.glob(pattern))]
    core = Extension(
        "attentile.core._core",
        [str(CORE / "_core.pyx")],
        include_dirs=[str(CORE)],
        depends=[*depends, *[str(path) for path in sorted(CORE.glob("*.px[di]"))], "setup.py"],
        py_limited_api=ABI3,
        define_macros=[("Py_LIMITED_API", "0x030b0000")] if ABI3 else [],
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


if __name__ == "__main__":
    # The times in a wheel come from here: the same sources give the same bytes.
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(int(Path(__file__).stat().st_mtime)))
    for_one_processor()
    core = extensions()
    options = {"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 and core else {}
    setup(
        ext_modules=core,
        cmdclass={"build_ext": BuildCore},
        options=options,
        long_description=description(),
        long_description_content_type="text/markdown",
    )
