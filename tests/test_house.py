"""How the package is built: floors that import downward only, no circles, and functions of a size that can be read.

Every rule is a function over sources, which the tests run over the package and over sources that break it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from test_quality import CYTHON_START, ROOT, text_of

import attentile

PACKAGE = ROOT / "src" / "attentile"

# From the top. A room is a folder or a module beside them; a module may import what is in its own room or on a lower
# floor. "attentile" is the package's own __init__.
FLOORS = (
    {"__main__"},
    {"speed"},
    {"attentile", "onnx"},
    {"layers"},
    {"attention", "backward", "cache", "inspection", "merge", "positions", "textbook"},
    {"dispatch"},
    {"outputs"},
    {"scores"},
    {"masks", "partial"},
    {"runtime"},
    {"core"},
    {"arguments", "formulas", "storage"},
)
# What a room may take from another one of its floor.
NEIGHBOURS = {
    ("arguments", "storage"),
    ("cache", "attention"),
    ("cache", "positions"),
    ("inspection", "attention"),
}
FUNCTION_LINES, PARAMETERS, PYTHON_LINES = 60, 8, 10000

# What breaks a rule today. An entry that is not true any more fails as an exception that is not listed does.
KNOWN_PRIVATE: set[str] = set()
KNOWN_PARAMETERS: set[str] = set()
KNOWN_SKIPS: set[str] = set()


def python_sources() -> dict[str, str]:
    """Text of each module by its name below attentile; a package, whose name ends in a dot, is its __init__."""
    if not PACKAGE.exists():
        pytest.skip("the sources are not beside the tests")
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix("__init__") if path.stem == "__init__" else name] = text_of(path)
    assert {"", "attention", "cache.", "cache.kv_cache", "core.twin"} <= found.keys()
    return found


def room_of(module: str) -> str:
    return module.split(".")[0] or "attentile"


# ---- imports ----


@functools.cache
def import_statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(sources: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(module, module it imports from, name) of each import within the package, wherever it stands; "" for a module.

    Compiled modules have no source here: who is imported from core as _core is one.
    """
    modules = {name.removesuffix(".") for name in sources} | {"core._core"}
    for importer, text in sources.items():
        place = importer.split(".")[:-1]
        for node in import_statements(text):
            if isinstance(node, ast.Import):
                own = [x.name for x in node.names if x.name.split(".")[0] == "attentile"]
                yield from ((importer, name.partition(".")[2], "") for name in own)
            else:
                start = place[: len(place) - node.level + 1]
                if node.level == 0 and (node.module or "").split(".")[0] != "attentile":
                    continue
                target = ".".join([*(start if node.level else []), *filter(None, [node.module])])
                target = target.removeprefix("attentile").removeprefix(".") if node.level == 0 else target
                for alias in node.names:
                    below = f"{target}.{alias.name}".removeprefix(".")
                    yield (importer, below, "") if below in modules else (importer, target, alias.name)


def upward(sources: dict[str, str]) -> set[str]:
    """Imports that go up, or to a room of the same floor that is not among its neighbours."""
    floor_of = {room: n for n, floor in enumerate(FLOORS) for room in floor}
    found = set()
    for importer, target, _ in imports(sources):
        one, other = room_of(importer), room_of(target)
        if one != other and floor_of[other] <= floor_of[one] and (one, other) not in NEIGHBOURS:
            found.add(f"{importer} imports {target}")
    return found


def test_every_room_has_a_floor():
    rooms = [room for floor in FLOORS for room in floor]
    assert sorted(rooms) == sorted({room_of(module) for module in python_sources()})


def test_imports_go_downward():
    assert upward(python_sources()) == set()


def test_no_neighbour_is_listed_for_nothing():
    used = {(room_of(importer), room_of(target)) for importer, target, _ in imports(python_sources())}
    assert used >= NEIGHBOURS


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core.twin", "from ..runtime import backend"),
        ("runtime.threads", "def f():\n    from ..masks import structure"),
        ("storage", "from .arguments import index"),
        ("textbook", "from .attention import attention"),
        ("positions.rotary", "from ..cache.pages import PAGE_KEYS"),
        ("scores", "import attentile.cache"),
        ("layers.projections", "from attentile.onnx import attention"),
        ("onnx.", "from ..__main__ import main"),
        ("masks", "from . import call"),
        ("cache.pages", "from .. import textbook"),
    ],
)
def test_an_import_that_goes_upward_is_found(module, line):
    sources = python_sources()
    sources[module] += "\n" + line + "\n"
    assert len(upward(sources)) == 1


def circle(sources: dict[str, str]) -> list[str]:
    """The modules of one circle of imports, [] without any. To import a module runs the packages it is in as well."""
    packages = {name for name in sources if name.endswith(".")}
    edges: dict[str, set[str]] = {}
    for importer, target, _ in imports(sources):
        parts = target.split(".")
        around = {".".join(parts[:n]) + "." for n in range(1, len(parts) + 1)} & packages
        around = {package for package in around if not importer.startswith(package)}
        own = {target} if target in sources else {f"{target}."} & packages
        edges.setdefault(importer, set()).update((around | own) - {importer})
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_imports_go_round():
    assert circle(python_sources()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("storage", "from .arguments import index"),
        ("core.twin_angles", "def f():\n    from ..positions.rotary import rotary_embedding"),
        ("positions.scaling", "if TYPE_CHECKING:\n    from .rotary import Places"),
        ("masks", "from .scores import checked"),
        ("runtime.backend", "from . import config"),
        ("positions.biases", "from . import rotary_embedding"),
    ],
)
def test_a_circle_is_found(module, line):
    sources = python_sources()
    sources[module] += "\n" + line + "\n"
    assert circle(sources)


def private_imports(sources: dict[str, str]) -> set[str]:
    """Names with a leading underscore that a module takes from another room."""
    return {
        f"{importer} imports {target}.{name}"
        for importer, target, name in imports(sources)
        if name.startswith("_") and not name.startswith("__") and room_of(importer) != room_of(target)
    }


def test_private_names_stay_in_their_room():
    assert private_imports(python_sources()) == KNOWN_PRIVATE


def test_an_import_of_a_private_name_is_found():
    sources = {"": "", "a": "from .b import _x, y\nfrom .core import _core", "b": "", "core.": "", "core.twin": ""}
    assert private_imports(sources) == {"a imports b._x"}


# ---- functions ----


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: neither empty nor only a comment."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {n for token in tokens if token.type not in skipped for n in range(token.start[0], token.end[0] + 1)}


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name with those of the classes and functions around it, parameters but for self and cls, lines of code)."""
    code = code_lines(text)

    def below(node: ast.AST, names: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from below(child, names)
                continue
            if not isinstance(child, ast.ClassDef):
                lines = code & set(range(child.lineno, (child.end_lineno or 0) + 1))
                if ast.get_docstring(child) is not None:
                    lines -= set(range(child.body[0].lineno, (child.body[0].end_lineno or 0) + 1))
                given = child.args
                arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                parameters = [x for x in arguments if x is not None and x.arg not in ("self", "cls")]
                yield names + child.name, len(parameters), len(lines)
            yield from below(child, f"{names}{child.name}.")

    yield from below(ast.parse(text), "")


def cython_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, parameters but for self, lines of code) of each; one ends where a line is indented no deeper."""
    lines = text.splitlines()
    for first, line in enumerate(lines):
        start = CYTHON_START.match(line)
        if start is None:
            continue
        depth, commas, header, last = 0, 0, "", first
        for last in range(first, len(lines)):
            part = lines[last][start.end() - 1 if last == first else 0 :].partition("#")[0]
            for character in part:
                depth += (character in "([") - (character in ")]")
                commas += character == "," and depth == 1
                header += character
                if depth == 0:
                    break
            if depth == 0:
                break
        inside = header[1:-1].strip()
        parameters = (
            commas + bool(inside) - inside.endswith(",") - inside.split(",")[0].split(" ")[-1].startswith("self")
        )
        count, quoted = last - first + 1, False
        for line_below in lines[last + 1 :]:
            code = line_below.strip()
            if not quoted and code and len(line_below) - len(line_below.lstrip()) <= len(start["indent"]):
                break
            if code.startswith('"""') or (quoted and '"""' in code):
                quoted = code.count('"""') == 1 and not quoted
            elif code and not quoted and not code.startswith("#"):
                count += 1
        yield start["name"], parameters, count


def public_functions() -> set[str]:
    """What the caller calls: exported functions, the methods and constructors of exported classes."""
    found = set()
    for module in (attentile, importlib.import_module("attentile.onnx")):
        for name in module.__all__:
            thing = inspect.unwrap(getattr(module, name))
            where = f"{thing.__module__.removeprefix('attentile.')}:{thing.__qualname__}"
            methods = vars(thing) if inspect.isclass(thing) else {}
            own = (method for method in methods if not method.startswith("_") or method.startswith("__"))
            found |= {where, *(f"{where}.{method}" for method in own)}
    return found


@functools.cache
def functions_by_module() -> dict[str, list[tuple[str, int, int]]]:
    """(name, parameters, lines) of each function in Python and Cython."""
    functions = {name.removesuffix("."): [*python_functions(text)] for name, text in python_sources().items()}
    assert sum(map(len, functions.values())) > 250
    for path in [*PACKAGE.glob("core/*.pyx"), *PACKAGE.glob("core/*.pxi")]:
        functions[f"core/{path.name}"] = [*cython_functions(text_of(path))]
        assert functions[f"core/{path.name}"]
    return functions


def too_large(public: set[str]) -> tuple[set[str], set[str]]:
    """(functions with too many parameters, functions with too many lines)."""
    wide, long = set(), set()
    for module, found in functions_by_module().items():
        for name, parameters, lines in found:
            function = f"{module}:{name}"
            if parameters > PARAMETERS and function not in public:
                wide.add(function)
            if lines > FUNCTION_LINES:
                long.add(function)
    return wide, long


def test_functions_can_be_read():
    wide, long = too_large(public_functions())
    assert wide == KNOWN_PARAMETERS
    assert long == set()


def test_public_functions_are_known():
    wide, _ = too_large(set())
    public = public_functions()
    assert {
        "onnx:attention",
        "positions.rotary:rotary_embedding",
        "layers.multi_head:MultiHeadAttention.__init__",
    } <= wide
    assert {"cache.kv_cache:KVCache.attend", "onnx:operators", "runtime.threads:num_threads"} <= public


def test_parameters_and_lines_are_counted():
    python = "class A:\n    @x\n    def f(self, a, /, b, *c, d=(1, 2), **e):\n"
    python += '        """x\n\n        y"""\n        # z\n\n        def g(): pass\n        return """1\n\n2"""\n'
    assert [*python_functions(python)] == [("A.f", 5, 5), ("A.f.g", 0, 1)]
    cython = "cdef int f(int[:, :] a, b=g(1, 2),\n           c) except -1:  # d, e\n"
    cython += '    """x\n\n    y"""\n    pass\n\n    # z\n    if a:\n        pass\nX = 1\n'
    cython += "cdef class A:\n    def g(self):\n        pass\n    def h():\n        pass\n"
    assert [*cython_functions(cython)] == [("f", 3, 5), ("g", 0, 2), ("h", 0, 2)]


# ---- text ----


def test_the_formatter_lays_out_every_file():
    assert python_sources()
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
    skips = {path.relative_to(PACKAGE).as_posix() for path in files if "fmt: skip" in text_of(path)}
    assert skips == KNOWN_SKIPS


def packed(text: str, python: bool) -> list[int]:
    """Lines that pack three assignments or more into one."""
    if not python:
        line = re.compile(r"\s+[\w.\[\]]+(?:, [\w.\[\]]+){2,} = [^,]+,[^,]+,")
        return [n for n, code in enumerate(text.splitlines(), 1) if line.match(code)]
    found = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            found += [node.lineno] * (len(node.value.elts) > 2)
    return found


def test_lines_hold_one_assignment_or_two():
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyx", ".pxi")]
    assert len(files) > 40
    assert not [f"{path.name}:{n}" for path in files for n in packed(text_of(path), path.suffix == ".py")]
    assert packed("a, b, c = 1, 2, 3\nd, e = 1, 2\nf, g, h = i\n", True) == [1]
    assert packed("    a, b.c, d[0] = 1, 2, 3\n    a, b, c = d\n    a, b = 1, 2\n", False) == [1]


def test_the_package_stays_small():
    assert 5000 < sum(text.count("\n") for text in python_sources().values()) <= PYTHON_LINES
