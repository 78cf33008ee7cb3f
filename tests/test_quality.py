"""The house rules that no linter holds: sizes of files and functions in every language, complete docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attentile

ROOT = Path(__file__).parents[1]
WIDTH, FILE_LINES, FUNCTION_LINES = 120, 500, 60
CYTHON, C = {".pyx", ".pxi", ".pxd"}, {".c", ".h", ".inc"}
FOLDERS = ("src", "tests", "benchmarks", "examples")


def sources() -> list[Path]:
    """Everything that is written by hand; a skip where the repository is not around the tests."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("the sources are not beside the tests")
    found = [ROOT / "setup.py"]
    for folder in FOLDERS:
        found += (p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".pyi", *CYTHON, *C})
    found = [p for p in found if p.name not in ("_core.c", "_core.cpp") and not p.name.startswith(".")]
    assert {"_pass.pxi", "tiles.inc", "kernels.h", "pool.c", "_core.pyi", "oracle.py"} <= {p.name for p in found}
    return found


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# ---- sizes ----


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring and without literal text) of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            for part in ast.walk(node):  # programs and tables of text in a test are no code of the function
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.end_lineno is not None:
                    lines -= part.end_lineno - part.lineno
            yield node.name, lines


CYTHON_START = re.compile(
    r"^(?P<indent> *)(?:cdef|cpdef|def)\b(?! class| struct| extern| object \w+ =)[^=]*?(?P<name>\w+)\("
)


def cython_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of each function, which ends where a line is indented no deeper."""
    text = re.sub(r'"""[^"]*?"""', lambda doc: '"""' + "#" * doc[0].count("\n") + '"""', text)
    lines = text.splitlines()
    for first, line in enumerate(lines):
        if not (start := CYTHON_START.match(line)):
            continue
        indent, depth, last = len(start["indent"]), 0, first
        for n in range(first, len(lines)):
            inside = depth > 0 or n == first
            depth += lines[n].count("(") - lines[n].count(")")
            code = lines[n].strip()
            if code and not inside and len(lines[n]) - len(lines[n].lstrip()) <= indent:
                break
            last = n if code else last
        yield start["name"], last - first + 1


def c_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function; it ends with a brace in column 0, and macros that define some have none there."""
    lines, start = text.splitlines(), None
    for n, line in enumerate(lines):
        if line.startswith("}") and start is not None:
            if line.rstrip() == "}":  # not the end of a table or of a type
                name = re.search(r"(\w+)\(", " ".join(lines[start : start + 3]))
                yield (name[1] if name else lines[start]), n - start + 1
            start = None
        elif start is None and re.match(r"[A-Za-z_]", line) and not line.rstrip().endswith(";"):
            start = n
        elif start is not None and line.rstrip().endswith(");") and not line.startswith(" "):
            start = None


def functions(path: Path) -> Iterator[tuple[str, int]]:
    find = cython_functions if path.suffix in CYTHON else c_functions if path.suffix in C else python_functions
    yield from find(text_of(path))


def test_files_are_short():
    too_long = {path.name: n for path in sources() if (n := text_of(path).count("\n")) >= FILE_LINES}
    assert not too_long


def test_lines_are_short():
    """Of Python (text and comments too) and Cython; C has its own formatter, whose style says so."""
    files = [path for path in sources() if path.suffix not in C]
    long = [f"{p.name}:{n}" for p in files for n, x in enumerate(text_of(p).splitlines(), 1) if len(x) > WIDTH]
    assert not long


def test_functions_are_short():
    found = [(path, name, n) for path in sources() for name, n in functions(path)]
    for suffixes, least in (({".py"}, 900), (CYTHON, 60), (C, 80)):
        assert sum(path.suffix in suffixes for path, *_ in found) >= least  # they are found
    too_long = [f"{path.name}: {name} has {n} lines" for path, name, n in found if n >= FUNCTION_LINES]
    assert not too_long


def test_lengths_of_functions_are_found():
    """Each language with one function of three lines before one of five."""
    python = 'def f():\n    """x\n    y\n    """\n    return 1\n\n\n'
    python += "class A:\n    async def g(\n        x,\n    ):\n\n        pass\n"
    assert [*python_functions(python)] == [("f", 3), ("g", 5)]
    cython = 'cdef int f(a,\nb):\n    """x\n    y"""\n\ncdef object t = g(\n\n\n\n)\n'
    cython += "cdef class A:\n    def g(\n        x\n    ):\n\n        pass\n\n\nX = 1\n"
    assert [*cython_functions(cython)] == [("f", 3), ("g", 5)]
    c = "int a;\nint f(void) {\n    return 1;\n}\nstatic const int t[] = {\n1,\n};\nvoid\ng(int x,\n  int y) {\n}\n"
    assert [*c_functions(c)] == [("f", 3), ("g", 4)]


# ---- docstrings and types ----


def test_every_public_name_is_in_the_typed_calls():
    text = text_of(Path(__file__).with_name("typed_calls.py"))
    used = {x.attr for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Attribute)}
    assert not set(attentile.__all__) - used


def sections(doc: str) -> dict[str, str]:
    """The text below each underlined heading."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(text: str) -> set[str]:
    """Names of a section's entries: "q : array", "b_q, b_k : array", "**options"."""
    heads = re.findall(r"^([*\w]+(?:, [*\w]+)*)(?: : .*)?$", text, re.MULTILINE)
    return {name.strip(" *") for head in heads for name in head.split(",")}


def public_objects() -> dict[str, Any]:
    found = {name: getattr(attentile, name) for name in attentile.__all__}
    onnx = importlib.import_module("attentile.onnx")
    found |= {f"onnx.{name}": getattr(onnx, name) for name in onnx.__all__}
    for name, thing in [*found.items()]:
        if inspect.isclass(thing):
            own = {f: x for f, x in vars(thing).items() if not f.startswith("_")}
            plain = {f: x for f, x in own.items() if isinstance(x, classmethod | staticmethod) or inspect.isfunction(x)}
            found |= {f"{name}.{f}": getattr(thing, f) for f in plain}
    return found


def missing_documentation(thing: Any) -> list[str]:
    """What a public function, method or class should say and does not.

    Results (tuples, Explanation) are made by functions, whose documentation tells them. A method's example may be the
    one of its class, and a sentence may tell its only parameter, in `backquotes`, and what it returns.
    """
    doc = inspect.getdoc(thing)
    if not doc or not doc.splitlines()[0].endswith((".", ":")):
        return ["a first line that is a sentence"]
    if inspect.isclass(thing) and (issubclass(thing, tuple) or dataclasses.is_dataclass(thing)):
        return []
    found, signature, missing = sections(doc), inspect.signature(thing), []
    method = not inspect.isclass(thing) and "." in thing.__qualname__ and "<" not in thing.__qualname__
    parameters = {name for name in signature.parameters if name != "self"}
    brief = method and "Parameters" not in found and len(parameters) <= 1
    if brief:
        missing += [f"parameter {name}" for name in parameters if f"`{name}`" not in doc]
    elif parameters:
        missing += [f"parameter {name}" for name in sorted(parameters - documented(found.get("Parameters", "")))]
    unknown = documented(found.get("Parameters", "")) - parameters
    missing += [f"no parameter {name}" for name in sorted(unknown)] if parameters else []
    if not inspect.isclass(thing):
        returns = inspect.unwrap(thing).__annotations__.get("return")
        if returns not in (None, "None") and "Returns" not in found and not brief:
            missing.append("Returns")
        if "raise " in inspect.getsource(inspect.unwrap(thing)) and "Raises" not in found:
            missing.append("Raises")
    if not method and ">>> " not in found.get("Examples", ""):
        missing.append("Examples")
    return missing


@pytest.mark.parametrize("name", public_objects())
def test_docstring_is_complete(name):
    assert not missing_documentation(public_objects()[name])


def test_what_is_missing_in_a_docstring_is_found():
    def bare(x: int, *, y: int = 0) -> int:
        raise NotImplementedError

    assert missing_documentation(bare) == ["a first line that is a sentence"]
    bare.__doc__ = "Adds.\n\nParameters\n----------\nx, z : int\n    One.\n"
    assert missing_documentation(bare) == ["parameter y", "no parameter z", "Returns", "Raises", "Examples"]
    text = "Parameters\n----------\nx : int\ny : int\n\nReturns\n-------\nint\n\nRaises\n------\nE\n\n"
    bare.__doc__ = f"Adds.\n\n{text}Examples\n--------\n>>> 1\n1\n"
    assert not missing_documentation(bare)
