"""`rainband explain`: describe a strategy, a task, an all-reduce algorithm or a codec, from its own file."""

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

MAX_CHECKED = 33  # workers, in tables of all-reduce algorithms

if TYPE_CHECKING:
    from rainband.settings import Setting
    from rainband.strategy import Strategy


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Strategy, task, all-reduce algorithm or codec; omit it for one line about each.",
            autocompletion=completion.explained_names,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings, to see the staleness and the warnings to expect, or the cost of the algorithm.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of workers: for the staleness, or the cost of an algorithm.")
    ] = 4,
    as_json: PrintJson = False,
) -> None:
    """Describe a strategy, a task, an all-reduce algorithm or a codec, with its equations and settings."""
    from rainband.codecs.find import codec_names
    from rainband.collectives.algorithm import algorithm_names
    from rainband.plugins import strategy_names
    from rainband.tasks.load import task_names

    with report_errors():
        known = [*strategy_names(), *task_names(), *algorithm_names(), *codec_names()]
        describe = facts_of if name or as_json else _brief
        state = [describe(one) for one in ([name] if name else known)]
        if name and state[0]["kind"] == "strategy":
            state[0] |= _with_settings(name, settings or [], workers)
        if name and state[0]["kind"] == "algorithm":
            state[0] |= _costs_of_algorithms(name, settings or [], workers)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(state[0] if name else state).decode())
        return
    width = min(110, shutil.get_terminal_size().columns)
    print_lines(_one(state[0], width) if name else _all(state, width))


def facts_of(name: str) -> dict[str, Any]:
    """Return the description of a strategy, a task, an algorithm or a codec, from its file."""
    from rainband.codecs.find import codec_names
    from rainband.collectives.algorithm import algorithm_names
    from rainband.plugins import strategy_names
    from rainband.tasks.load import task_names

    if name in strategy_names() or ":" in name:
        return _strategy(name)
    if name in task_names():
        return _task(name)
    if name in algorithm_names():
        return _algorithm(name)
    if name in codec_names():
        return _codec(name)
    near = did_you_mean(name, [*strategy_names(), *task_names(), *algorithm_names(), *codec_names()])
    raise ValueError(
        f"no strategy, task, algorithm or codec named {name!r}{near}: choose from the strategies "
        f"{', '.join(strategy_names())}, or module:Class, the tasks {', '.join(task_names())}, the all-reduce "
        f"algorithms {', '.join(algorithm_names())}, and the codecs {', '.join(codec_names())}."
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
        "options": _required_options(cls),
    }


def _required_options(cls: type[Strategy]) -> str:
    """Return the options without which a strategy cannot run."""
    try:
        return "--stages 2" if cls().requires.stages is not None else ""
    except (TypeError, ValueError):  # it requires settings
        return ""


def _algorithm(name: str) -> dict[str, Any]:
    from rainband.collectives.algorithm import load_algorithm

    return _plugin("algorithm", name, type(load_algorithm(name)))


def _codec(name: str) -> dict[str, Any]:
    from rainband.codecs.find import load_codec

    codec = load_codec(name)
    properties = codec.properties
    facts = [
        "unbiased" if properties.unbiased else "",
        "linear: an all-reduce can sum what it sends" if properties.linear else "",
        "near each value: models can be sent, too" if properties.of_values else "",
        f"keeps {properties.keeps}" if properties.keeps else "keeps nothing",
        f"a million values take about {codec.num_bytes(10**6):,} bytes in place of 4,000,000",
    ]
    return {**_plugin("codec", name, type(codec)), "properties": [fact for fact in facts if fact]}


def _brief(name: str) -> dict[str, Any]:
    """Return what the list of all shows; codecs import torch, so their first lines are read from their files."""
    from rainband.codecs.find import codec_names, codec_summary

    if name not in codec_names():
        return facts_of(name)
    return {"kind": "codec", "name": name, "summary": codec_summary(name)}


def _plugin(kind: str, name: str, cls: type) -> dict[str, Any]:
    """Return the description of a class, from its file."""
    import inspect

    from rainband.settings import fields_of

    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "").strip()
    return {
        "kind": kind,
        "name": name,
        "class": cls.__name__,
        "summary": text.partition("\n")[0],
        "text": text,
        "file": inspect.getsourcefile(cls) or "",
        "settings": [_setting(setting) for setting in fields_of(cls)],
    }


def _costs_of_algorithms(name: str, pairs: list[str], workers: int) -> dict[str, Any]:
    """Check the tables of all algorithms, and return what each costs, next to the textbook's formulas."""
    from rainband.collectives.algorithm import algorithm_names, load_algorithm
    from rainband.collectives.check import check
    from rainband.settings import as_plain, parse_pairs

    if workers > MAX_CHECKED:
        raise ValueError(
            f"--workers {workers}: the tables of algorithms are checked for at most {MAX_CHECKED} workers."
        )
    given, typed = parse_pairs(pairs), dict[str, object]()
    rows = []
    for one in algorithm_names():
        algorithm = load_algorithm(one, given if one == name else {})
        found, textbook = check(algorithm.table(workers), chunks=1), algorithm.textbook(workers)
        if one == name:
            typed = {key: value for key, value in as_plain(algorithm).items() if key in given}
        numbers = {"found": found._asdict(), "textbook": textbook._asdict(), "formulas": algorithm.formulas._asdict()}
        rows.append({"name": one, **numbers})
    return {"given": typed, "workers": workers, "algorithms": rows}


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
    from rainband.advice import missed_updates
    from rainband.runtimes.advice import expected_staleness, may_be_stale, warnings_for

    if strategy.requires.coordinated:
        return []
    missed, staleness = expected_staleness(strategy, workers), []
    if missed is not None:
        staleness = [f"staleness with {workers} workers: {missed_updates(missed)} on average."]
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
    kinds = {
        kind: [fact for fact in state if fact["kind"] == kind] for kind in ("strategy", "task", "algorithm", "codec")
    }
    examples = [some[0]["name"] for some in kinds.values()]
    return [
        "Strategies:",
        *_lines(kinds["strategy"], width),
        "",
        "Tasks:",
        *_lines(kinds["task"], width),
        "",
        "All-reduce algorithms:",
        *_lines(kinds["algorithm"], width),
        "",
        "Codecs:",
        *_lines(kinds["codec"], width),
        "",
        f"More about one: rainband explain {' or rainband explain '.join(examples)}",
    ]


def _lines(state: Iterable[dict[str, Any]], width: int) -> list[str]:
    return table([(fact["name"], fact["summary"]) for fact in state], indent="  ", width=width)


def _cost_lines(fact: dict[str, Any], width: int) -> list[str]:
    """Return one row for each algorithm: the textbook's formulas, and the numbers of the checked table."""
    rows, totals = [("", "steps", "fan-in", "bytes that one rank sends")], dict[str, list[str]]()
    for each in fact["algorithms"]:
        texts = {
            key: f"{each['formulas'][key]}: {number:.3g}" + (" N" if key.endswith("sent") else "")
            for key, number in each["found"].items()
        }
        totals.setdefault(texts["total_sent"], []).append(each["name"])
        mark = "> " if each["name"] == fact["name"] else "  "
        rows.append((mark + each["name"], texts["steps"], texts["fan_in"], texts["max_sent"]))
    (most, _), *others = sorted(totals.items(), key=lambda total: -len(total[1]))
    except_ = "".join(f"; {' and '.join(names)} {total}" for total, names in others)
    return [
        f"With {fact['workers']} workers. Each table was checked (sums, races, deadlock); values follow the formulas.",
        *table(rows, indent="", width=width),
        f"Bytes sent in all: {most}{except_}.",
        *_wrapped(
            "P ranks, ", ["Q the largest power of two up to P, N bytes; M machines; R rows and C columns."], width
        ),
    ]


def _one(fact: dict[str, Any], width: int) -> list[str]:
    given = fact.get("given", {})
    rows = [_row(setting, given) for setting in fact["settings"]]
    example = " ".join(assignment(key, value) for key, value in given.items())
    example = example or next((_default(s) for s in fact["settings"] if s["default"] is not None), "")
    about = [
        *fact["text"].splitlines(),
        "",
        "Settings:" if rows else "No settings.",
        *table(rows, indent="  ", width=width),
        "",
    ]
    if fact["kind"] == "codec":
        about += [
            f"Facts:   {'; '.join(fact['properties'])}.",
            "",
            f"Use it:  rainband train digits downpour --codec {fact['name']}",
        ]
        return [*about, f"Read it: {fact['file']}"]
    if fact["kind"] == "algorithm":
        return [*about, *_cost_lines(fact, width), "", f"Read it: {fact['file']}"]
    return [
        *about,
        *_wrapped("Expect:  ", fact.get("expected", ()), width),
        "Use it:  " + " ".join(filter(None, ("rainband train", _usage(fact), example, fact.get("options")))),
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
