"""Shell completion. Imports wait until Tab is pressed, because --help reads this file, too."""

from __future__ import annotations

from pathlib import Path

import typer


def tasks(incomplete: str) -> list[str]:
    from rainband.tasks.load import task_names

    return _beginning(incomplete, task_names())


def strategies(incomplete: str) -> list[str]:
    from rainband.plugins import strategy_names

    return _beginning(incomplete, strategy_names())


def pipeline_schedules(incomplete: str) -> list[str]:
    from rainband.model_parallel.schedules.builders import SCHEDULES

    return _beginning(incomplete, [*SCHEDULES, "all"])


def explained_names(incomplete: str) -> list[str]:
    from rainband.codecs.find import codec_names
    from rainband.collectives.algorithm import algorithm_names

    return strategies(incomplete) + tasks(incomplete) + _beginning(incomplete, [*algorithm_names(), *codec_names()])


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the strategy's settings, each with its equals sign."""
    from rainband.plugins import find_strategy, strategy_names
    from rainband.settings import fields_of

    strategy = ctx.params.get("strategy")
    if strategy not in strategy_names():
        return []
    return _beginning(incomplete, [f"{setting.name}=" for setting in fields_of(find_strategy(strategy))])


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    from rainband.views.history import list_runs

    root = Path(ctx.params.get("runs") or "runs")
    return _beginning(incomplete, ["last", *(path.name for path in list_runs(root))])


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
