"""Write docs/reference/cli.md from the help of every command: `python docs/cli_page.py --write`."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import typer
import typer.main
from typer.testing import CliRunner

from rainband.cli.main import build_app

PAGE = Path(__file__).resolve().parent / "reference" / "cli.md"
WIDTH = 100  # characters in a line of help
INTRODUCTION = """\
# Command line

Every command of `rainband`, with its arguments and options, as `--help` prints them. For everyone who types commands.

```console
$ rainband explain
```

`rainband --install-completion` teaches your shell to complete commands, tasks, strategies, settings and names of runs.
`make docs` writes this page; a test compares it with the commands.
"""


def page() -> str:
    """Return the whole page."""
    sections = [f"## {' '.join(['rainband', *words])}\n\n```text\n{help_of(words)}\n```\n" for words in commands()]
    return "\n".join([INTRODUCTION, *sections])


def commands() -> list[list[str]]:
    """Return the words of every command, each after its group, in the order of the group's help."""
    found: list[list[str]] = [[]]
    group: Any = typer.main.get_command(app())
    for name, command in group.commands.items():
        found.append([name])
        found += [[name, inner] for inner in getattr(command, "commands", {})]
    return found


def help_of(words: list[str]) -> str:
    """Return what this command prints with --help."""
    width: dict[str, Any] = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    printed = CliRunner().invoke(app(), [*words, "--help"], prog_name="rainband", **width).output
    return "\n".join(line.rstrip() for line in printed.strip().splitlines())


@cache
def app() -> typer.Typer:
    return build_app()


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
