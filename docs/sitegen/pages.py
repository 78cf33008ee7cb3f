"""Pages and parts of pages that come from elsewhere: CONTRIBUTING.md, CHANGELOG.md, the command line."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from attentile.__main__ import _parser

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def of_the_repository(text: str) -> str:
    """Markdown whose links into the repository, which is not part of the site, become names of files."""
    return _LINK.sub(lambda link: f"{link[1]} (`{link[2]}`)", text)


def sections(text: str, begin: str) -> str:
    """The second-level sections whose titles begin so."""
    found = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return "".join(section.rstrip() + "\n\n" for section in found if section.startswith(f"## {begin}"))


def without_title(text: str) -> str:
    """Markdown from behind its first heading."""
    return text.split("\n", 1)[1] if text.startswith("# ") else text


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """An action's help with its % forms filled in, as argparse prints it."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def options(parser: argparse.ArgumentParser) -> str:
    """A table of the options of a parser, or nothing if it has none."""
    lines = []
    for action in parser._actions:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or ("" if action.nargs == 0 else "|".join(action.choices or [action.dest.upper()]))
        name = " ".join(filter(None, [action.option_strings[-1], value]))
        lines.append(f"| `{name.replace('|', chr(92) + '|')}` | {_help(parser, action)} |")
    return "\n".join(["| option | |", "|---|---|", *lines]) + "\n" if lines else ""


def command_line() -> str:
    """A section for each command of `python -m attentile`, from its parser."""
    parser = _parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: _help(parser, choice) for choice in commands._choices_actions}
    parts = []
    for name, command in commands.choices.items():
        told = helps[name][:1].upper() + helps[name][1:]
        parts.append(f"## `python -m attentile {name}`\n\n{told}.\n\n{options(command)}")
    return "\n".join(parts)


def write(root: Path, out: Path) -> None:
    """The generated Markdown of the site, but for the performance page."""
    contributing = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    guides = sections(contributing, "Adding")
    if not guides:
        raise ValueError('CONTRIBUTING.md has no section "## Adding …", which the page of guides is made of')
    rest = without_title(contributing).replace(guides.rstrip(), "")
    (out / "adding.md").write_text(of_the_repository(guides), encoding="utf-8")
    (out / "working.md").write_text(of_the_repository(rest), encoding="utf-8")
    (out / "changes.md").write_text(of_the_repository(without_title(changes)), encoding="utf-8")
    (out / "command_line.md").write_text(command_line(), encoding="utf-8")
