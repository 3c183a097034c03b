"""`rainband run`: start a script with a training loop of its own several times, and train one model with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli import complete
from rainband.cli.report_errors import EXIT_CODES, mistakes_told

if TYPE_CHECKING:
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.processes.launcher import RunResult

OF_THE_SCRIPT = (
    "lr",
    "optimizer",
    "momentum",
    "weight_decay",
    "schedule",
    "warmup",
)  # settings its optimizer brings


def register(app: typer.Typer) -> None:
    # What follows the script is the script's own, whatever it looks like.
    after_the_script = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    app.command("run", epilog=EXIT_CODES, context_settings=after_the_script)(run)


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... SCRIPT [ARGS]...",
            help="Settings of the strategy, then the script that calls rainband.join, then its own arguments.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="How many run the script.")] = 4,
    servers: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="How many share the parameters.", show_default="2, if it needs them"),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How: see rainband explain; or module:Class.",
            autocompletion=complete.strategies,
        ),
    ] = "downpour",
    optimizer: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:CLASS", help="An optimizer, not torch's own, that servers may import."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything random.")] = 0,
    transport: Annotated[str, typer.Option(help="How parameters travel: auto, tcp or shm.", metavar="NAME")] = "auto",
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Of torch, in each worker.")] = 1,
    failure_timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="A worker not heard of for so long is no longer waited for."),
    ] = 5.0,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where the run's directory is made.")] = Path("runs"),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="End standard output with one JSON object; the rest goes to stderr."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every event and log record.")] = False,
) -> None:
    """Train one model with several copies of SCRIPT.

    \b
    rainband run --workers 4 --servers 2 train.py --lr 0.1
    rainband run --strategy downpour n_push=2 train.py
    """
    import msgspec

    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.run_directory import new_directory

    with mistakes_told():
        pairs, script, arguments = split(words or [])
        settings, num_workers, num_servers = _crew(strategy, pairs, workers, servers)
        config = RunConfig(
            task=script.name,
            script=str(script),
            arguments=tuple(arguments),
            strategy=strategy,
            strategy_settings=settings,
            num_workers=num_workers,
            num_servers=num_servers,
            optimizers=tuple(optimizer or ()),
            seed=seed,
            transport=transport,
            threads=threads,
            failure_timeout_s=failure_timeout,
        )
        config = msgspec.structs.replace(config, directory=str(new_directory(runs, script.stem, strategy)))
    raise typer.Exit(_watched(config, as_json, verbose))


def split(words: list[str]) -> tuple[list[str], Path, list[str]]:
    """Settings of the strategy, the script, and the script's own arguments."""
    at = next((i for i, word in enumerate(words) if "=" not in word or Path(word).is_file()), None)
    if at is None:
        raise ValueError("say which script to run, such as rainband run --workers 4 train.py --lr 0.1.")
    script = Path(words[at])
    if not script.is_file():
        hint = " Options come before the script." if words[at].startswith("-") else ""
        raise ValueError(f"there is no script {words[at]}: give the path of a Python file.{hint}")
    return words[:at], script.absolute(), words[at + 1 :]


def _crew(name: str, pairs: list[str], workers: int, servers: int | None) -> tuple[dict[str, object], int, int]:
    """The strategy's settings, checked, and how many there are of each role."""
    from rainband.plugins import load_strategy
    from rainband.runtimes.config import refuse_coordinated
    from rainband.settings import parse_pairs

    settings = parse_pairs(pairs)
    for setting in OF_THE_SCRIPT:
        if setting in settings:
            raise ValueError(f"{setting}={settings[setting]}: the script's own optimizer says so; leave it out here.")
    strategy = load_strategy(name, settings)
    refuse_coordinated(strategy, name)
    if not strategy.requires.servers:
        if servers:
            raise ValueError(f"{name} has no servers: leave --servers {servers} out.")
        if name == "single" and workers > 1:
            raise ValueError("single is one process: type --workers 1, or choose downpour.")
        return dict(settings), workers, 0
    if servers == 0:
        raise ValueError(f"{name} keeps the parameters on servers: type --servers 1 or more.")
    return dict(settings), workers, 2 if servers is None else servers


def _watched(config: RunConfig, as_json: bool, verbose: bool) -> int:
    """Run it, show it, say what came of it; returns the exit code."""
    import msgspec

    from rainband.runtimes.processes import launcher as local
    from rainband.views.live_display import RunWatch
    from rainband.views.summary import summary

    with RunWatch(sys.stderr if as_json else sys.stdout, verbose) as watch:
        result: RunResult = local.run(config, watch, capture=True)
    for line in summary(watch.so_far, Path(config.directory)):
        typer.echo(line, err=as_json)
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    return result.exit_code
