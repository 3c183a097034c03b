"""`rainband resume`: continue a run from its newest checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rainband.cli.options import GroupedCommand, Json, Run, Verbose, with_run_options
from rainband.cli.report_errors import EXIT_CODES, report_errors
from rainband.options import (
    NodeOptions,
    ProcessOptions,
    RayOptions,
    RunOptions,
    SharedBatchOptions,
    SimulationOptions,
    StageOptions,
)

if TYPE_CHECKING:
    from rainband.checkpoints.read import Checkpoint
    from rainband.runtimes.config import RunConfig

# Options that determine what is trained, and those that only a new run has.
LEFT_OUT = {
    *StageOptions.__annotations__,
    *SimulationOptions.__annotations__,
    *RayOptions.__annotations__,
    *("batch_size", "drop_last", "seed", "config", "record", "resume", "from_weights"),
}


# Of these, the options of the earlier run are used.
KEPT = (
    *(*NodeOptions.__annotations__, *ProcessOptions.__annotations__, *SharedBatchOptions.__annotations__),
    *("epochs", "eval_every_s", "keep", "checkpoints"),
)


def register(app: typer.Typer) -> None:
    defaults = {**dict.fromkeys(KEPT, "as before"), "checkpoint_every": "as before, or 5m"}
    command = with_run_options(resume, LEFT_OUT, defaults)
    app.command("resume", cls=GroupedCommand, epilog=EXIT_CODES)(command)


def resume(
    run: Run,
    *,
    options: RunOptions,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue RUN from its newest checkpoint, in a new directory.

    RUN may also be a checkpoint, or the folder or URL that has them. The numbers of workers and servers may differ;
    with --epochs, the run ends later.

    \b
    rainband resume last
    rainband resume last --workers 8 --servers 4
    rainband resume s3://bucket/folder/RUN --epochs 20
    """
    import msgspec

    from rainband.cli.train import watch
    from rainband.plugins import load_strategy, search_current_folder
    from rainband.runtimes.checkpoints.choose import checkpoint_of, say_if_running
    from rainband.runtimes.configure import check_task, configure
    from rainband.runtimes.run_directory import new_directory
    from rainband.views.sinks import chosen_sinks

    say = partial(typer.echo, err=True)
    with report_errors():
        runs = Path(options.get("runs") or "runs")
        say_if_running(run, runs, say)
        checkpoint = checkpoint_of(run, runs, say)
        base = _base(checkpoint)
        if base.script:
            if not Path(base.script).is_file():
                raise ValueError(
                    f"{run} is a run of the script {base.script}, which does not exist any more: restore it, or type "
                    f"rainband run --resume {run} SCRIPT."
                )
        else:
            search_current_folder()
            try:
                check_task(base.task, base.task_settings)
            except ValueError as error:
                how = f"call rainband.fit(task, ..., resume={run!r}) in the program that began it"
                raise ValueError(f"{error} If the task is not in a module, {how}.") from None
        strategy = load_strategy(base.strategy, base.strategy_settings)
        config = configure(base, strategy, {**options, "resume": checkpoint.place}, None, say)
        sinks = chosen_sinks(options)
        directory = new_directory(runs, Path(config.task).stem if base.script else config.task, config.strategy)
    config = msgspec.structs.replace(config, directory=str(directory))
    raise typer.Exit(watch(config, [partial(sink, directory) for sink in sinks], as_json, verbose))


def _base(checkpoint: Checkpoint) -> RunConfig:
    """Return the options of the run that a checkpoint is of."""
    import msgspec

    from rainband.errors import BadCheckpoint
    from rainband.runtimes.config import RunConfig

    try:
        config = msgspec.convert(checkpoint.manifest.facts.config, RunConfig, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadCheckpoint(checkpoint.place, f"the options of its run cannot be read ({error})") from None
    return msgspec.structs.replace(config, directory="")
