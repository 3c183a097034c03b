"""The words before the options: the task, the strategy, and settings as key=value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rainband.options import DEFAULT_STRATEGY, OptionError, RunOptions, opt
from rainband.plugins import find_strategy, load_strategy, search_current_folder, strategy_names
from rainband.runtimes.config import RunConfig
from rainband.runtimes.configure import SERVERS, WORKERS, check_task, configure
from rainband.runtimes.run_directory import read_config
from rainband.settings import as_plain, parse_pairs
from rainband.strategy import Strategy
from rainband.tasks.load import load_task, task_names
from rainband.views.runs_text import command_of

if TYPE_CHECKING:
    from rainband.tasks.task import Task

EXAMPLE = "rainband train digits downpour"
COMPUTE, TASK = "compute.", "task."  # before the names of settings that are not the strategy's


def configured(words: Sequence[str], options: RunOptions, say: Callable[[str], None] = lambda line: None) -> RunConfig:
    """Return the configuration of the run that was typed; `words` are the task, the strategy and key=value."""
    config = options.get("config")
    base, options = _from_file(words, Path(config), options) if config else _from_words(words, options)
    check_task(base.task, base.task_settings)
    strategy = _strategy(base.strategy, base.strategy_settings)

    def make_task() -> Task:
        search_current_folder()
        return load_task(base.task, base.task_settings)

    base = msgspec.structs.replace(base, strategy_settings=as_plain(strategy))
    return configure(base, strategy, options, make_task, say)


def _from_words(words: Sequence[str], options: RunOptions) -> tuple[RunConfig, RunOptions]:
    if not words or "=" in words[0] or (len(words) == 1 and words[0] in strategy_names()):
        raise ValueError(
            f"a task is required, such as {EXAMPLE}; without a strategy, it is trained with {DEFAULT_STRATEGY}.\n"
            f"Tasks: {', '.join(task_names())}, or module:name of your own.\n"
            f"Strategies: {', '.join(strategy_names())}, or module:Class; rainband explain describes them."
        )
    if len(words) == 1 or "=" in words[1]:
        words = [words[0], DEFAULT_STRATEGY, *words[1:]]
    task, strategy, *pairs = words
    if task in strategy_names() and strategy in task_names():
        raise ValueError(f"the task comes first: type rainband train {strategy} {task}.")
    settings = parse_pairs(pairs)
    _check_set_once(options, settings)
    base = RunConfig(
        task=task,
        task_settings=_those(settings, TASK),
        strategy=strategy,
        strategy_settings=_own(settings),
        num_workers=WORKERS,
        num_servers=SERVERS,
    )
    return base, with_compute(options, settings)


def _from_file(words: Sequence[str], config: Path, options: RunOptions) -> tuple[RunConfig, RunOptions]:
    base = read_config(config)
    if named := [word for word in words if "=" not in word]:
        raise ValueError(
            f"{config} already has a task and a strategy: omit {' '.join(named)}, or --config. "
            "Settings (key=value) and options may be changed."
        )
    if base.script:
        raise ValueError(f"{config} is that of a script: type {command_of(msgspec.to_builtins(base))}")
    settings = parse_pairs(words)
    _check_set_once(options, settings)
    base = msgspec.structs.replace(
        base,
        strategy_settings={**base.strategy_settings, **_own(settings)},
        task_settings={**base.task_settings, **_those(settings, TASK)},
    )
    return base, with_compute(options, settings)


def _check_set_once(options: RunOptions, settings: Mapping[str, str]) -> None:
    for name in ("batch_size", "epochs"):
        if (value := options.get(name)) is not None and TASK + name in settings:
            raise OptionError(f"{TASK}{name}={settings[TASK + name]} and {opt(name, value)}: omit one of them.")


def with_compute(options: RunOptions, settings: Mapping[str, str]) -> RunOptions:
    compute = _those(settings, COMPUTE)
    return {**options, "compute": compute} if compute else options


def _own(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if not name.startswith((TASK, COMPUTE))}


def _those(settings: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


def _strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    if name in task_names() and name not in strategy_names():
        raise ValueError(f"{name} is a task, not a strategy: type {EXAMPLE}, for example.")
    if not dataclasses.is_dataclass(find_strategy(name)):
        raise ValueError(f"{name} is not a dataclass, so it has no settings: put @dataclass(frozen=True) above it.")
    return load_strategy(name, settings)
