"""From what was typed to the configuration of a run: what can be checked is checked here, before it starts.

Torch is not imported for it; what only the task itself can know is checked by the first worker.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rainband.plugins import find_strategy, load_strategy, strategy_names
from rainband.runtimes.config import RunConfig, check_epochs, is_one_memory
from rainband.runtimes.run_directory import read_config
from rainband.runtimes.stage_plan import check_num_workers
from rainband.settings import as_dict, parse_pairs
from rainband.strategy import Strategy
from rainband.tasks.load import task_names
from rainband.tasks.source import check_values, read_task
from rainband.views.runs_text import command_of

WORKERS, SERVERS = 4, 2  # where none are asked for
MOST_PER_CORE = 32  # processes; more only wait for each other
TRANSPORTS = ("auto", "tcp", "shm")
EXAMPLE = "rainband train digits downpour"


def configured(
    words: Sequence[str],
    config: Path | None,
    given: Mapping[str, Any],
    runtime: str | None = None,
    stages: int | None = None,
) -> RunConfig:
    """The run that `words` (task, strategy, key=value ...) or an earlier config.json describe.

    `given` holds the fields of RunConfig that were given as options; they, and the world, come before those of the
    file. `stages`: so many workers compute one copy of the model.
    """
    base = _from_file(words, config) if config else _from_words(words)
    _check_task(base.task, base.task_settings)
    if given.get("transport", "auto") not in TRANSPORTS:
        raise ValueError(f"--transport {given['transport']}: choose from {', '.join(TRANSPORTS)}.")
    strategy = _strategy(base.strategy, base.strategy_settings)
    check_epochs(strategy, base.strategy, given.get("epochs"))
    size = stages or (base.stage_plan.size if base.stage_plan else 1)
    crew = _crew(base, strategy, given, size)
    runtime = runtime or base.runtime
    if runtime == "processes":
        _check_room(crew)
    settings = {name: _plain(value) for name, value in as_dict(strategy).items() if _can_be_written(value)}
    return msgspec.structs.replace(base, **{**given, **crew, "runtime": runtime, "strategy_settings": settings})


def _from_words(words: Sequence[str]) -> RunConfig:
    if len(words) < 2 or "=" in words[0] or "=" in words[1]:
        raise ValueError(
            f"say what to train and how, such as {EXAMPLE}.\n"
            f"Tasks: {', '.join(task_names())}, or module:name of your own.\n"
            f"Strategies: {', '.join(strategy_names())}, or module:Class; rainband explain says what they do."
        )
    task, strategy, *pairs = words
    if task in strategy_names() and strategy in task_names():
        raise ValueError(f"the task comes first: type rainband train {strategy} {task}.")
    own, of_task = _split(pairs)
    return RunConfig(
        task=task,
        task_settings=of_task,
        strategy=strategy,
        strategy_settings=own,
        num_workers=WORKERS,
        num_servers=SERVERS,
    )


def _from_file(words: Sequence[str], config: Path) -> RunConfig:
    if named := [word for word in words if "=" not in word]:
        raise ValueError(
            f"{config} says already what to train and how: leave out {' '.join(named)}, or --config. "
            "Settings (key=value) and options may be changed."
        )
    base = read_config(config)
    if base.script:
        raise ValueError(f"{config} is that of a script: type {command_of(msgspec.to_builtins(base))}")
    own, of_task = _split(words)
    return msgspec.structs.replace(
        base,
        strategy_settings={**base.strategy_settings, **own},
        task_settings={**base.task_settings, **of_task},
    )


def _split(pairs: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Settings of the strategy, and those of the task, which are written task.key=value."""
    settings = parse_pairs(pairs)
    own = {name: value for name, value in settings.items() if not name.startswith("task.")}
    of_task = {name.removeprefix("task."): v for name, v in settings.items() if name.startswith("task.")}
    return own, of_task


# ---- the task ----


def _check_task(name: str, settings: Mapping[str, Any]) -> None:
    if ":" in name:
        return _check_module(name)
    if name not in task_names():
        raise ValueError(
            f"no task named '{name}'{_did_you_mean(name, task_names())}: "
            f"choose from {', '.join(task_names())}, or give module:name of your own."
        )
    task = read_task(name)
    known = [setting.name for setting in task.settings]
    for setting in settings:
        if setting not in known:
            raise ValueError(
                f"the task {name} has no setting '{setting}'{_did_you_mean(setting, known)}: it has {', '.join(known)}."
            )
    check_values(task, settings)
    return None


def _check_module(name: str) -> None:
    module, _, _ = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as the workers do
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        hint = f" Leave out the ending: {name.replace('.py:', ':')}." if module.endswith(".py") else ""
        raise ValueError(f"no module named '{module}', neither installed nor in {os.getcwd()}.{hint}")


# ---- the strategy, and how many it needs ----


def _strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    if name in task_names() and name not in strategy_names():
        raise ValueError(f"{name} is a task, not a strategy: type {EXAMPLE}, for example.")
    if not dataclasses.is_dataclass(find_strategy(name)):
        raise ValueError(f"{name} is no dataclass, so it has no settings: put @dataclass(frozen=True) above it.")
    return load_strategy(name, settings)


def _crew(base: RunConfig, strategy: Strategy, given: Mapping[str, Any], size: int) -> dict[str, int]:
    """How many there are of each; `size` workers are one copy of the model."""
    workers = given.get("num_workers", max(1, base.num_workers // size) * size)
    servers = given.get("num_servers", base.num_servers)
    check_num_workers(strategy, base.strategy, workers, size)
    if is_one_memory(strategy):
        if given.get("num_servers"):
            raise ValueError(f"{base.strategy} has no servers: leave out --servers {servers}, or choose downpour.")
        return {"num_workers": workers, "num_servers": 0}
    if strategy.requires.max_replicas == 1:
        return _alone(base, given, size)
    if servers < 1:
        raise ValueError(
            f"{base.strategy} keeps the parameters on servers, and --servers {servers} leaves it none: "
            "type --servers 1 or more, or choose single, which needs none."
        )
    return {"num_workers": workers, "num_servers": servers}


def _check_room(crew: Mapping[str, int]) -> None:
    """Processes on this machine share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for option, number in (("--workers", crew["num_workers"]), ("--servers", crew["num_servers"])):
        if number > MOST_PER_CORE * cores:
            raise ValueError(
                f"{option} {number}: on this machine with {cores} cores they would only wait for each other. "
                f"Choose at most {MOST_PER_CORE * cores}; about {cores} is fastest."
            )


def _alone(base: RunConfig, given: Mapping[str, Any], size: int) -> dict[str, int]:
    """A strategy without servers is one copy of the model: nobody else knows its parameters."""
    for field, option, right in (("num_workers", "--workers", size), ("num_servers", "--servers", 0)):
        if given.get(field, right) != right:
            raise ValueError(
                f"{base.strategy} is one process without servers, so {option} {given[field]} cannot be: "
                f"leave {option} out, or choose {_with_servers()}."
            )
    return {"num_workers": size, "num_servers": 0}


def _with_servers() -> str:
    return " or ".join(name for name in strategy_names() if find_strategy(name)().requires.servers)


# ---- small things ----


def _can_be_written(value: object) -> bool:
    """What was made in Python and is no plain value stays at its default, here and at the workers."""
    if isinstance(value, tuple | list):
        return all(map(_can_be_written, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: object) -> object:
    """JSON knows no infinity; as text it is read back as the same number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
