"""`rainband explain`: what a strategy or a task does and what can be set, from its own file."""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rainband.cli.options import completion
from rainband.cli.report_errors import report_errors
from rainband.views.formatting import assignment, table

if TYPE_CHECKING:
    from rainband.settings import Setting


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A strategy or a task; none: a line about each.",
            autocompletion=completion.strategies_and_tasks,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of the strategy, to see what is to be expected of them.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="The same, with so many workers.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what a strategy or a task does, with its equations and settings."""
    from rainband.plugins import strategy_names
    from rainband.tasks.load import task_names

    with report_errors():
        state = [facts_of(one) for one in ([name] if name else [*strategy_names(), *task_names()])]
        if name and state[0]["kind"] == "strategy":
            state[0]["expected"] = _expected(name, settings or [], workers)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(state[0] if name else state).decode())
        return
    width = min(110, shutil.get_terminal_size().columns)
    for line in _one(state[0], width) if name else _all(state, width):
        typer.echo(line)


def facts_of(name: str) -> dict[str, Any]:
    """Everything the file of a strategy or a task says about it."""
    from rainband.plugins import strategy_names
    from rainband.tasks.load import task_names

    if name in strategy_names() or ":" in name:
        return _strategy(name)
    if name in task_names():
        return _task(name)
    near = difflib.get_close_matches(name, [*strategy_names(), *task_names()], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"no strategy or task named {name!r}{hint}: choose from the strategies {', '.join(strategy_names())}, "
        f"or module:Class, and the tasks {', '.join(task_names())}."
    )


def _task(name: str) -> dict[str, Any]:
    from rainband.tasks.source import read_task

    task = read_task(name)
    return {
        "kind": "task",
        "name": name,
        "class": task.class_name,
        "summary": task.text.partition("\n")[0],
        "text": task.text,
        "file": str(task.file),
        "settings": [_setting(setting, "task.") for setting in task.settings],
    }


def _strategy(name: str) -> dict[str, Any]:
    import inspect

    from rainband.plugins import find_strategy
    from rainband.settings import fields_of

    cls = find_strategy(name)
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "").strip()
    return {
        "kind": "strategy",
        "name": name,
        "class": cls.__name__,
        "summary": text.partition("\n")[0],
        "text": text,
        "file": inspect.getsourcefile(cls) or "",
        "settings": [_setting(setting) for setting in fields_of(cls)],
    }


def _expected(name: str, pairs: list[str], workers: int) -> list[str]:
    """What is known beforehand of these settings: how stale gradients will be, and what is likely to go badly."""
    from dataclasses import MISSING

    from rainband.plugins import find_strategy, load_strategy
    from rainband.runtimes.advice import foreseen, waits_for_nobody
    from rainband.settings import fields_of, parse_pairs

    needed = [field.name for field in fields_of(find_strategy(name)) if field.default is MISSING]
    given = parse_pairs(pairs)
    if not given and needed:
        return []
    strategy = load_strategy(name, given)
    if strategy.requires.coordinated:
        return []
    missed = waits_for_nobody(strategy, workers)
    known = [] if missed is None else [f"with {workers} workers a gradient misses {missed:.3g} updates in the mean."]
    return known + foreseen(strategy, workers)


def _setting(setting: Setting, before: str = "") -> dict[str, Any]:
    """A setting; `before` is what is typed before its name."""
    from dataclasses import MISSING

    needed = setting.default is MISSING
    return {
        "name": before + setting.name,
        "type": setting.type,
        "default": None if needed else setting.default,
        "needed": needed,
        "doc": setting.doc,
    }


def _all(state: list[dict[str, Any]], width: int) -> list[str]:
    kinds = {kind: [fact for fact in state if fact["kind"] == kind] for kind in ("strategy", "task")}
    examples = [some[0]["name"] for some in kinds.values()]
    return [
        "Strategies:",
        *_lines(kinds["strategy"], width),
        "",
        "Tasks:",
        *_lines(kinds["task"], width),
        "",
        f"More about one: rainband explain {' or rainband explain '.join(examples)}",
    ]


def _lines(state: Iterable[dict[str, Any]], width: int) -> list[str]:
    return table([(fact["name"], fact["summary"]) for fact in state], indent="  ", width=width)


def _one(fact: dict[str, Any], width: int) -> list[str]:
    rows = [(_assignment(s), "; ".join(filter(None, [s["doc"], s["type"]]))) for s in fact["settings"]]
    example = next((_assignment(s) for s in fact["settings"] if not s["needed"] and s["default"] is not None), "")
    return [
        *fact["text"].splitlines(),
        "",
        "Settings:" if rows else "It has no settings.",
        *table(rows, indent="  ", width=width),
        "",
        *_told("Expect:  ", fact.get("expected", ()), width),
        f"Use it:  rainband train {_usage(fact)} {example}".rstrip(),
        f"Read it: {fact['file']}",
    ]


def _told(head: str, sentences: Iterable[str], width: int) -> list[str]:
    rows = [(head if number == 0 else "", text) for number, text in enumerate(sentences)]
    return table(rows, gap="", width=width)


def _usage(fact: dict[str, Any]) -> str:
    return f"digits {fact['name']}" if fact["kind"] == "strategy" else f"{fact['name']} downpour"


def _assignment(setting: dict[str, Any]) -> str:
    return f"{setting['name']}=..." if setting["needed"] else assignment(setting["name"], setting["default"])
