"""`rainband run`: start a script with a custom training loop on every worker, and train one model with it."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import GroupedCommand, Json, Verbose, completion, with_run_options
from rainband.cli.report_errors import EXIT_CODES, report_errors
from rainband.errors import did_you_mean
from rainband.options import DEFAULT_STRATEGY, RayOptions, RunOptions, SimulationOptions, StageOptions, declared

# Options of a run for which a script has its own code, or which it cannot have.
LEFT_OUT = {
    *StageOptions.__annotations__,
    *SimulationOptions.__annotations__,
    *RayOptions.__annotations__,
    *("epochs", "batch_size", "drop_last", "eval_every_s", "config", "record", "timeline", "from_weights"),
}
IN_THE_SCRIPT = {
    "epochs": "run.epochs(N)",
    "batch_size": "run.batches(dataset, batch_size=N)",
    "drop_last": "run.batches(dataset, drop_last=True)",
    "eval_every_s": "your evaluation function",
    "from_weights": "safetensors.torch.load_model",
}


def register(app: typer.Typer) -> None:
    # What follows the script is the script's own, whatever it looks like.
    after_the_script = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    command = with_run_options(run, LEFT_OUT, {"checkpoint_every": "5m"})
    app.command("run", cls=GroupedCommand, epilog=EXIT_CODES, context_settings=after_the_script)(command)


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... SCRIPT [ARGS]...",
            help="Settings of the strategy, then the script that calls rainband.join, then its own arguments.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel="Strategy",
            help="Algorithm: one that rainband explain lists, or module:Class.",
            autocompletion=completion.strategies,
        ),
    ] = DEFAULT_STRATEGY,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS",
            rich_help_panel="Strategy",
            help="Allow servers to import this optimizer, which is not one of torch.optim; may be repeated.",
        ),
    ] = None,
    *,
    options: RunOptions,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train one model with several copies of SCRIPT.

    The script sets the epochs, the batch size and the evaluations itself. Simulation, stages, --record
    and --timeline are for rainband train only.

    \b
    rainband run --workers 4 train.py --lr 0.1
    rainband run --strategy downpour --servers 2 n_push=2 train.py
    """
    import msgspec

    from rainband.cli.train import watch
    from rainband.optimizer_settings import OptimizerSettings
    from rainband.plugins import load_strategy
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.configure import SERVERS, WORKERS, configure
    from rainband.runtimes.run_directory import new_directory
    from rainband.settings import parse_pairs
    from rainband.views.sinks import chosen_sinks

    with report_errors():
        pairs, script, arguments = split(words or [])
        settings = parse_pairs(pairs)
        for name in optimizer or ():
            if not all(name.partition(":")):
                raise ValueError(f"--optimizer {name}: give module:Class, such as mylab:Lion.")
        for setting in (field.name for field in fields(OptimizerSettings)):
            if setting in settings:
                raise ValueError(f"{setting}={settings[setting]}: the script's own optimizer sets this. Omit it here.")
        base = RunConfig(
            task=script.name,
            script=str(script),
            arguments=tuple(arguments),
            strategy=strategy,
            strategy_settings=dict(settings),
            num_workers=WORKERS,
            num_servers=SERVERS,
            optimizers=tuple(optimizer or ()),
        )
        config = configure(base, load_strategy(strategy, settings), options)
        sinks = chosen_sinks(options)
        directory = new_directory(Path(options.get("runs") or "runs"), script.stem, strategy)
    config = msgspec.structs.replace(config, directory=str(directory))
    raise typer.Exit(watch(config, [partial(sink, directory) for sink in sinks], as_json, verbose))


def split(words: list[str]) -> tuple[list[str], Path, list[str]]:
    """Return the settings of the strategy, the script, and the script's own arguments."""
    starts = (i for i, word in enumerate(words) if "=" not in word or word.startswith("-") or Path(word).is_file())
    at = next(starts, None)
    if at is None:
        raise ValueError("a script is required, such as rainband run --workers 4 train.py --lr 0.1.")
    script = Path(words[at])
    if not script.is_file():
        if words[at].startswith("-"):
            raise ValueError(_no_such_option(words[at].partition("=")[0]))
        raise ValueError(f"there is no script {words[at]}: give the path of a Python file.")
    return words[:at], script.absolute(), words[at + 1 :]


def _no_such_option(flag: str) -> str:
    flags = {one.flag: name for name, one in declared().items()}
    if (name := flags.get(flag)) in LEFT_OUT:
        instead = f", and call {IN_THE_SCRIPT[name]} in the script" if name in IN_THE_SCRIPT else ""
        return f"{flag} works only with rainband train: omit it{instead}."
    if flag in flags:
        return f"{flag} comes after a setting: options come before the settings and the script."
    known = [known for known, name in flags.items() if name not in LEFT_OUT]
    return f"rainband run has no {flag}{did_you_mean(flag, known)}. Options come before the script."
