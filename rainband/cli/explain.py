"""`rainband explain`: describe a strategy or a task and its settings, from its own file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rainband.cli.options import PrintJson, completion, print_lines
from rainband.cli.report_errors import report_errors
from rainband.errors import did_you_mean
from rainband.views.formatting import assignment, table

if TYPE_CHECKING:
    from rainband.settings import Setting
    from rainband.strategy import Strategy


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Strategy or task; omit it for one line about each.",
            autocompletion=completion.strategies_and_tasks,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of the strategy, to see the staleness and the warnings to expect.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of workers for which to estimate the staleness.")
    ] = 4,
    as_json: PrintJson = False,
) -> None:
    """Describe a strategy or a task, with its equations and settings."""
    from rainband.plugins import strategy_names
    from rainband.tasks.load import task_names

    with report_errors():
        state = [facts_of(one) for one in ([name] if name else [*strategy_names(), *task_names()])]
        if name and state[0]["kind"] == "strategy":
            state[0] |= _with_settings(name, settings or [], workers)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(state[0] if name else state).decode())
        return
    width = min(110, shutil.get_terminal_size().columns)
    print_lines(_one(state[0], width) if name else _all(state, width))


def facts_of(name: str) -> dict[str, Any]:
    """Return the description of a strategy or a task, from its file."""
    from rainband.plugins import strategy_names
    from rainband.tasks.load import task_names

    if name in strategy_names() or ":" in name:
        return _strategy(name)
    if name in task_names():
        return _task(name)
    near = did_you_mean(name, [*strategy_names(), *task_names()])
    raise ValueError(
        f"no strategy or task named {name!r}{near}: choose from the strategies {', '.join(strategy_names())}, "
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
    shared = {name for base in cls.__mro__[1:] for name in vars(base).get("__annotations__", ())}
    settings = sorted(fields_of(cls), key=lambda setting: setting.name in shared)  # its own first
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "").strip()
    return {
        "kind": "strategy",
        "name": name,
        "class": cls.__name__,
        "summary": text.partition("\n")[0],
        "text": text,
        "file": inspect.getsourcefile(cls) or "",
        "settings": [_setting(setting) for setting in settings],
    }


def _with_settings(name: str, pairs: list[str], workers: int) -> dict[str, Any]:
    """Return the values of the given settings, and what to expect of them."""
    from dataclasses import MISSING

    from rainband.plugins import find_strategy, load_strategy
    from rainband.settings import as_plain, fields_of, parse_pairs

    required = [field.name for field in fields_of(find_strategy(name)) if field.default is MISSING]
    given = parse_pairs(pairs)
    if not given and required:
        return {"given": {}, "expected": []}
    strategy = load_strategy(name, given)
    values = {key: value for key, value in as_plain(strategy).items() if key in given}
    return {"given": values, "expected": _expected(strategy, workers)}


def _expected(strategy: Strategy, workers: int) -> list[str]:
    """Return the expected staleness of a strategy, and warnings about its settings."""
    from rainband.runtimes.advice import expected_staleness, may_be_stale, warnings_for

    if strategy.requires.coordinated:
        return []
    missed, staleness = expected_staleness(strategy, workers), []
    if missed is not None:
        staleness = [f"staleness with {workers} workers: {missed:.3g} updates on average."]
    elif may_be_stale(strategy) and strategy.requires.servers:
        staleness = [f"staleness: unknown, because {type(strategy).__name__} does not override `staleness`."]
    return staleness + warnings_for(strategy, workers)


def _setting(setting: Setting, prefix: str = "") -> dict[str, Any]:
    """Return a setting as JSON has it; `prefix` is typed before its name."""
    from dataclasses import MISSING

    required = setting.default is MISSING
    return {
        "name": prefix + setting.name,
        "type": setting.type,
        "default": None if required else setting.default,
        "required": required,
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
    given = fact.get("given", {})
    rows = [_row(setting, given) for setting in fact["settings"]]
    example = " ".join(assignment(key, value) for key, value in given.items())
    example = example or next((_default(s) for s in fact["settings"] if s["default"] is not None), "")
    return [
        *fact["text"].splitlines(),
        "",
        "Settings:" if rows else "No settings.",
        *table(rows, indent="  ", width=width),
        "",
        *_wrapped("Expect:  ", fact.get("expected", ()), width),
        f"Use it:  rainband train {_usage(fact)} {example}".rstrip(),
        f"Read it: {fact['file']}",
    ]


def _wrapped(head: str, sentences: Iterable[str], width: int) -> list[str]:
    rows = [(head if number == 0 else "", text) for number, text in enumerate(sentences)]
    return table(rows, gap="", width=width)


def _usage(fact: dict[str, Any]) -> str:
    return f"digits {fact['name']}" if fact["kind"] == "strategy" else f"{fact['name']} downpour"


def _row(setting: dict[str, Any], given: Mapping[str, Any]) -> tuple[str, str]:
    """Return a setting as typed, with its value if it is given, and its description."""
    name, about = setting["name"], [setting["doc"], setting["type"]]
    if name in given:
        about.append("given" if setting["required"] else f"given, default {_default(setting)}")
        return assignment(name, given[name]), "; ".join(filter(None, about))
    if given:
        about.append("required" if setting["required"] else "default")
    return _default(setting), "; ".join(filter(None, about))


def _default(setting: dict[str, Any]) -> str:
    return f"{setting['name']}=..." if setting["required"] else assignment(setting["name"], setting["default"])
