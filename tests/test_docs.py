"""The documentation site: code on its pages runs, what it names is there, what it draws and tabulates is true.

The pages themselves are built by .ci/docs, with warnings as errors.
"""

from __future__ import annotations

import argparse
import doctest
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from oracle import allowed_keys

import attentile
import attentile.onnx
from attentile.runtime import backend

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("docs/ does not lie beside the tests", allow_module_level=True)
sys.path.insert(0, str(DOCS))

from check_site import problems_of  # noqa: E402
from sitegen import build, diagrams, formula, masks, pages, speeds  # noqa: E402

README = ROOT / "README.md"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("api/*.md"), *DOCS.glob("guide/*.md")])
FENCE = re.compile(r"^```(\{?[\w-]*\}?).*\n((?:.*\n)*?)^```$", re.MULTILINE)
DIRECTIVES = {"{eval-rst}", "{include}", "{raw}", "{toctree}"}


def page_id(page: Path) -> str:
    return page.relative_to(ROOT if page == README else DOCS).as_posix()


def code(text: str, language: str) -> str:
    """The page with nothing but the code of one language, on its own lines."""
    kept = [""] * (text.count("\n") + 1)
    for fence in FENCE.finditer(text):
        if fence[1] == language:
            first = text.count("\n", 0, fence.start(2))
            kept[first : first + fence[2].count("\n")] = fence[2].splitlines()
    return "\n".join(kept) + "\n"


# ---- code on the pages ----


def test_pages_are_there():
    names = {page_id(page) for page in PAGES}
    assert {"index.md", "start.md", "semantics.md", "kernel.md", "api/cache.md", "guide/chat.md"} <= names
    linked = set(re.findall(r"\]\((guide/\w+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert linked == {name for name in names if name.startswith("guide/")}


@pytest.mark.parametrize("page", [README, *PAGES], ids=page_id)
def test_code_runs(page):
    """Sessions with >>>, run as one; a page's other blocks must be commands or directives of the site."""
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    assert text.count("\n```") + text.startswith("```") == 2 * len(fences), "a fence is not closed"
    assert {fence[1] for fence in fences} <= {"python", "console", *DIRECTIVES}
    if any(fence[1] == "python" for fence in fences) and backend.active is None:
        pytest.skip("the pages show the compiled kernels, and they are not in use")
    session = doctest.DocTestParser().get_doctest(code(text, "python"), {}, page_id(page), str(page), 0)
    written = [line for line in code(text, "python").splitlines() if line]
    assert not written or len(session.examples) > 0, "Python that is no session with >>> would not be run"
    report: list[str] = []
    outcome = doctest.DocTestRunner().run(session, out=report.append)
    assert outcome.failed == 0, "".join(report)


def test_the_readme_says_first_what_it_is_and_then_how_to_start():
    first, _, rest = README.read_text(encoding="utf-8").partition("\n## Two commands\n")
    assert first.count("\n") <= 40
    assert "attention(q, k, v" in first
    assert "**Use something else**" in first
    commands = re.findall(r"^    (python .*)$", rest, re.MULTILINE)
    assert len(commands) == 2
    assert all(part in (ROOT / ".ci" / "run").read_text(encoding="utf-8") for part in commands[0].split(" && "))


COMMANDS = sorted({
    line.removeprefix("$ ")
    for page in PAGES
    for line in code(page.read_text(encoding="utf-8"), "console").splitlines()
    if line
})  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command):
    program, *arguments = command.split()
    assert program == "python", "a console block holds nothing but lines that begin with $ python"
    if re.search(rf"\b{re.escape(command)}(?! *[\w-])", (ROOT / ".ci" / "run").read_text(encoding="utf-8")):
        return  # it does what the pages tell, in a fresh environment
    assert arguments[:2] != ["-m", "pip"], "a test must not install anything; .ci/run should"
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout


# ---- what the pages name ----


def test_every_public_name_is_in_the_reference_once():
    named = [
        name
        for page in DOCS.glob("api/*.md")
        for name in re.findall(
            r"^\.\. auto(?:function|class):: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    public = [f"attentile.{name}" for name in attentile.__all__]
    public += [f"attentile.onnx.{name}" for name in attentile.onnx.__all__]
    assert sorted(named) == sorted(public)


def test_the_table_of_the_reference_is_complete():
    listed = set(re.findall(r"`~attentile\.(\w+)`", (DOCS / "api" / "index.md").read_text(encoding="utf-8")))
    results_of_calls = {"AttentionResult", "AttentionStats", "Explanation"}
    assert listed == set(attentile.__all__) - results_of_calls


def test_tests_that_are_named_are_there():
    named = [
        pair
        for page in PAGES
        for pair in re.findall(r"`((?:bug_reports/)?test_\w+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 60
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_files_that_are_named_are_there():
    pattern = re.compile(r"`((?:src|tests|docs|benchmarks|examples|\.ci)/[\w./-]*)`")
    named = {name for page in PAGES for name in pattern.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


# ---- docstrings ----


def documented() -> dict[str, Any]:
    """Every public function, class and method."""
    found: dict[str, Any] = {}
    for module in (attentile, attentile.onnx):
        for name in module.__all__:
            thing = getattr(module, name)
            found[f"{module.__name__}.{name}"] = thing
            if inspect.isclass(thing) and not hasattr(thing, "_fields"):
                methods = {key: getattr(thing, key) for key in vars(thing)}
                found |= {
                    f"{module.__name__}.{name}.{key}": method
                    for key, method in methods.items()
                    if isinstance(inspect.unwrap(getattr(method, "__func__", method)), FunctionType)
                    and (not key.startswith("_") or key == "__call__")
                }
    return found


DOCUMENTED = documented()
# and never called
RETURNED = ("AttentionGradients", "AttentionResult", "AttentionStats", "AttentionOutputs", "Explanation", "Partial")


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if not name.endswith(RETURNED)])
def test_docstring_has_every_parameter_in_order(name):
    thing = DOCUMENTED[name]
    text = inspect.getdoc(thing) or ""
    section = re.search(r"^Parameters\n-+\n((?:.*\n)*?)(?=\w+\n---|\Z)", text + "\n", re.MULTILINE)
    heads = re.findall(r"^([\w*][\w*, ]*?)(?: : |$)", section[1], re.MULTILINE) if section else []
    told = [part.strip().lstrip("*") for head in heads if head.strip() for part in head.split(",")]
    taken = [one for one in inspect.signature(thing).parameters if one != "self"]
    if "options" in taken or "structural" in taken:  # they stand for arguments of attention(), explained there
        assert set(taken) == set(told)
    else:
        assert set(told) == set(taken), name
    positional = [
        one for one, parameter in inspect.signature(thing).parameters.items()
        if one != "self" and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    assert [one for one in told if one in positional] == positional


@pytest.mark.parametrize("name", [name for name, thing in DOCUMENTED.items() if name.count(".") == 1])
def test_docstring_of_a_function_has_what_a_stranger_needs(name):
    thing, text = DOCUMENTED[name], inspect.getdoc(DOCUMENTED[name]) or ""
    if inspect.isfunction(thing):
        assert "\nExamples\n---" in text
        returns = inspect.signature(thing).return_annotation
        assert ("\nReturns\n---" in text) == (returns != "None")
    elif hasattr(thing, "_fields"):
        text = text.partition("\nAttributes\n---")[2]
        fields = re.findall(r"^([\w, ]+) : ndarray", text, re.MULTILINE)
        assert tuple(itertools.chain(*(line.split(", ") for line in fields))) == thing._fields


@pytest.mark.parametrize("name", DOCUMENTED)
def test_names_in_a_docstring_are_there(name):
    """A name in single backticks becomes a link: to an argument, or to something public."""
    thing = DOCUMENTED[name]
    owner = DOCUMENTED.get(name.rpartition(".")[0], thing)
    known = {*inspect.signature(thing).parameters, *inspect.signature(owner).parameters, *dir(owner)}
    if known & {"options", "structural"}:
        known |= {*inspect.signature(attentile.attention).parameters}
    known |= {*attentile.__all__, *attentile.onnx.__all__, "Attention", "RotaryEmbedding", "TensorScatter"}
    text = re.sub(r"``.*?``", "", inspect.getdoc(thing) or "", flags=re.DOTALL)
    for written in re.findall(r"`([^`]*)`", text):
        first, *rest = written.removeprefix("attentile.").split("(")[0].split(".")
        assert first in known, written
        if rest:
            members = {*dir(getattr(attentile, first)), *getattr(attentile, first).__annotations__}
            assert rest[0] in members, written


def drawings(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """(titles, rows of each) of the masks drawn side by side in a docstring."""
    found = []
    for block in re.findall(r"::\n\n((?: +\S.*\n)+)", text):
        title, *rows = block.splitlines()
        if not re.fullmatch(r"[01 ]+", rows[0]):
            continue
        titles = [part.strip() for part in re.split(r" {2,}", title.strip())]
        cells = [re.split(r" {2,}", row.strip()) for row in rows]
        found.append((titles, [[row[i].replace(" ", "") for row in cells] for i in range(len(titles))]))
    return found


def test_drawings_in_the_docstring_are_true():
    found = drawings(inspect.getdoc(attentile.attention) + "\n")
    assert [titles for titles, _ in found] == [
        ['"upper_left"', '"lower_right"'],
        ["window=(1, 1)", "causal=True, window=(1, None)"],
    ]
    for titles, pictures in found:
        for title, rows in zip(titles, pictures, strict=True):
            text = title if "=" in title else f"causal={title}"
            options = eval(f"dict({text})", {})
            drawn = attentile.draw_mask(queries=len(rows), keys=len(rows[0]), **options).splitlines()[1:]
            assert [row.replace("1", "#").replace("0", ".") for row in rows] == [line.split()[1] for line in drawn]


# ---- pictures ----


@pytest.mark.parametrize("name", masks.GROUPS)
def test_pictures_show_what_the_oracle_allows(name):
    for options in masks.GROUPS[name]:
        queries, keys = options["queries"], options["keys"]
        rest = {key: value for key, value in options.items() if key not in ("queries", "keys")}
        mask = np.broadcast_to(np.asarray(rest.pop("mask", True)), (queries, keys))
        allowed = (allowed_keys((1, 1, queries, keys), **rest) & mask)[0, 0]
        filled = re.findall(r'<rect class="(a|off)"', masks.picture(options))
        assert np.array_equal(np.array(filled).reshape(queries, keys) == "a", allowed)


def test_the_diagram_of_chunks_is_what_a_call_visits():
    grid = diagrams.visited()
    x = np.zeros((1, 1, 768, 64), np.float32)
    report = attentile.explain(x, x, x, causal=True)
    if report.block_rows != diagrams.BLOCK:
        pytest.skip(f"the diagram shows blocks of 48 rows, here they have {report.block_rows}")
    kinds = list(itertools.chain(*grid))
    assert (len(kinds), len(kinds) - kinds.count("none")) == (report.chunks, report.chunks_visited)
    for b, c in itertools.product(range(16), range(3)):
        rows, keys = np.arange(b * 48, b * 48 + 48)[:, None], np.arange(c * 256, c * 256 + 256)
        seen = keys <= rows
        assert grid[b][c] == ("all" if seen.all() else "edge" if seen.any() else "none")


DRAWN = {**build.DRAWINGS, "speeds": lambda: str(speeds.of(DOCS))}


@pytest.mark.parametrize("name", DRAWN)
def test_diagrams_stay_inside_their_frame(name):
    drawing = DRAWN[name]()
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', drawing).groups())
    for x, y, size, anchor, text in re.findall(
        r'<text class="[^"]*" x="(\S+)" y="(\S+)" font-size="(\S+)" text-anchor="(\w+)">([^<]*)', drawing
    ):
        length = 0.56 * float(size) * len(text)  # of a sans-serif font, about
        left = float(x) - {"start": 0, "middle": length / 2, "end": length}[anchor]
        assert left >= -1, text
        assert left + length <= width + 6, text
        assert float(y) <= height, text


def test_weights_of_the_formula_are_drawn_to_scale():
    """The areas of the squares over the area of a cell are the rows of a softmax."""
    sides = re.findall(r'<rect class="a" x="\S+" y="\S+" width="(\S+)" height="(\S+)"', formula.weights())
    areas = sum(float(width) * float(height) for width, height in sides) / (formula.CELL - 2) ** 2
    assert areas == pytest.approx(len(formula.SHOWN) * len(formula.WORDS), rel=0.01)
    page = (DOCS / "guide" / "formula.md").read_text(encoding="utf-8")
    assert f">>> words = {list(formula.WORDS)}".replace("'", '"') in page
    assert f"np.array({[list(vector) for vector in formula.WORDS.values()]}" in page


def test_every_generated_file_is_used_and_there(tmp_path):
    build.generate(DOCS, tmp_path)
    used = set()
    for page in PAGES:
        used |= set(re.findall(r"_generated/([\w.-]+)", page.read_text(encoding="utf-8")))
    assert used == {path.name for path in tmp_path.iterdir()}


# ---- pages made from other files ----


def test_guides_are_those_of_the_repository(tmp_path):
    pages.write(ROOT, tmp_path)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (Adding .*)$", contributing, re.MULTILINE)
    assert "Adding a structural mask" in titles
    adding, working = ((tmp_path / name).read_text(encoding="utf-8") for name in ("adding.md", "working.md"))
    assert re.findall(r"^## (.*)$", adding, re.MULTILINE) == titles
    assert "## Adding" not in working
    assert re.findall(r"^## (.*)$", adding + working, re.MULTILINE) == [
        *titles,
        *[title for title in re.findall(r"^## (.*)$", contributing, re.MULTILINE) if title not in titles],
    ]
    own = re.findall(r"^## (.*)$", (DOCS / "extending.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(own).isdisjoint(titles), "a guide is told twice"


def test_links_into_the_repository_become_names():
    text = "see [the masks](tests/test_masks.py), [there](https://example.org) and ![a picture](x.svg)"
    wanted = "see the masks (`tests/test_masks.py`), [there](https://example.org) and ![a picture](x.svg)"
    assert pages.of_the_repository(text) == wanted


def test_command_line_tells_every_option():
    text = pages.command_line()
    for option in (
        "--shape B,Hq,Hkv,L,S,D",
        "--dtype float32\\|float64",
        "--causal",
        "--threads THREADS",
        "--json FILE",
    ):
        assert f"`{option}`" in text
    assert "%%" not in text
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["`python -m attentile bench`", "`python -m attentile info`"]


def test_help_of_options_is_filled_in():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--number", type=int, default=7, help="50 %% of %(default)s")
    assert pages.options(parser).splitlines()[2:] == ["| `--number NUMBER` | 50 % of 7 |"]
    assert pages.options(argparse.ArgumentParser()) == ""


# ---- the check of the built site ----


def test_a_broken_site_is_noticed(tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "site.css").write_text("a { background: url(there.png) }")
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="_static/site.css"><h1 id="top">A</h1><a href="b.html#here">B</a><a href="#top">'
        '</a><a href="https://example.org/x">elsewhere</a><img src="data:image/png;base64,">'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p><a href="a.html">A</a>')
    assert problems_of(tmp_path) == ([], 1)
    (tmp_path / "b.html").write_text(
        '<script src="https://example.org/x.js"></script><link rel="stylesheet" href="//example.org/x.css">'
        '<a href="c.html">C</a><a href="a.html#nowhere">A</a><img src="gone.png">'
        '<style>@import "https://e.org/f"</style>'
    )
    (tmp_path / "_static" / "site.css").write_text("@font-face { src: url('https://example.org/font.woff2') }")
    problems, _ = problems_of(tmp_path)
    for text in (
        "a.html: b.html#here leads to no place", "b.html: loads https://example.org/x.js",
        "b.html: loads //example.org/x.css", "b.html: c.html leads nowhere", "b.html: a.html#nowhere leads to no place",
        "b.html: gone.png is not there", 'b.html: loads @import "https://e.org/f',
        "site.css: loads url('https://example",
    ):  # fmt: skip
        assert any(text in problem for problem in problems), text
    assert len(problems) == 8


def test_a_folder_without_pages_is_a_problem(tmp_path):
    assert problems_of(tmp_path)[0]
