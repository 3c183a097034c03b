"""`rainband explain`: what a strategy does and what can be set, from its own file."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rainband.cli import complete
from rainband.cli.mistakes import mistakes_told
from rainband.cli.words import assignment, table

if TYPE_CHECKING:
    from rainband.settings import Setting


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    strategy: Annotated[
        str | None,
        typer.Argument(
            metavar="STRATEGY",
            help="Which one; none: a line about each.",
            autocompletion=complete.strategies,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what a strategy does, with its equations and settings."""
    from rainband.catalogue import strategy_names

    with mistakes_told():
        facts = [facts_of(name) for name in ([strategy] if strategy else strategy_names())]
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(facts[0] if strategy else facts).decode())
        return
    width = min(110, shutil.get_terminal_size().columns)
    for line in _one(facts[0], width) if strategy else _all(facts, width):
        typer.echo(line)


def facts_of(name: str) -> dict[str, Any]:
    """Everything the strategy's file says about it."""
    import inspect

    from rainband.catalogue import find_strategy
    from rainband.settings import fields_of

    cls = find_strategy(name)
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "").strip()
    return {
        "name": name,
        "class": cls.__name__,
        "summary": text.partition("\n")[0],
        "text": text,
        "file": inspect.getsourcefile(cls) or "",
        "settings": [_setting(setting) for setting in fields_of(cls)],
    }


def _setting(setting: Setting) -> dict[str, Any]:
    from dataclasses import MISSING

    needed = setting.default is MISSING
    return {
        "name": setting.name,
        "type": setting.type,
        "default": None if needed else setting.default,
        "needed": needed,
        "doc": setting.doc,
    }


def _all(facts: list[dict[str, Any]], width: int) -> list[str]:
    rows = [(fact["name"], fact["summary"]) for fact in facts]
    hint = f"More about one: rainband explain {facts[0]['name']}"
    return [*table(rows, width=width), "", hint]


def _one(fact: dict[str, Any], width: int) -> list[str]:
    rows = [(_assignment(s), "; ".join(filter(None, [s["doc"], s["type"]]))) for s in fact["settings"]]
    example = next((_assignment(s) for s in fact["settings"] if not s["needed"] and s["default"] is not None), "")
    return [
        *fact["text"].splitlines(),
        "",
        "Settings:" if rows else "It has no settings.",
        *table(rows, indent="  ", width=width),
        "",
        f"Use it:  rainband train digits {fact['name']} {example}".rstrip(),
        f"Read it: {fact['file']}",
    ]


def _assignment(setting: dict[str, Any]) -> str:
    return f"{setting['name']}=..." if setting["needed"] else assignment(setting["name"], setting["default"])
