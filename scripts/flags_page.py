"""Prints docs/flags.md: every flag of the `asyncengine` command, as its parser has them.

python scripts/flags_page.py > docs/flags.md
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from typing import NamedTuple

from asyncengine.cli import build_parser

HEAD = """# Flags

Written by `python scripts/flags_page.py > docs/flags.md`; a test compares the two. `make serve ARGS="..."` takes those
of `serve`. A value out of bounds ends the start with a line that says what is allowed.
"""
# early versions of Python 3.11 add a second one to switches
DEFAULT = re.compile(r"\s*\(default: (.*?)\)(?: \(default: .*\))?$")


class Flag(NamedTuple):
    names: str
    value: str
    default: str
    meaning: str


def flags_page() -> str:
    commands: dict[Flag, list[str]] = defaultdict(list)
    for name, parser in subcommands().items():
        for flag in flags(parser):
            commands[flag].append(name)
    tables: dict[str, list[Flag]] = defaultdict(list)
    for flag, names in commands.items():
        tables[", ".join(f"`{name}`" for name in names)].append(flag)
    return HEAD + "".join(table(title, rows) for title, rows in tables.items())


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (group,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(group.choices)


def flags(parser: argparse.ArgumentParser) -> list[Flag]:
    """Without --help. Raises ValueError for one that lacks a text, a unit or a default."""
    formatter = parser._get_formatter()
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        text = formatter._expand_help(action) if action.help else ""
        default = DEFAULT.search(text)
        if action.choices:
            value = ", ".join(str(choice) for choice in action.choices)
        else:
            value = "switch" if action.nargs == 0 else str(action.metavar or "")
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
        if default is None or not value:
            raise ValueError(f"{names} needs a help text that ends with (default: ...), and a metavar that is its unit")
        found.append(Flag(names, value, default[1], text[: default.start()]))
    return found


def table(title: str, rows: list[Flag]) -> str:
    lines = [f"\n## {title}\n", "| flag | value or unit | default | |", "|---|---|---|---|"]
    for flag in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in flag) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_page(), end="")
