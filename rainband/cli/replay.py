"""`rainband replay`: repeat a recorded or simulated run, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.options import Run, RunsDirectory
from rainband.cli.report_errors import FAILED, report_errors
from rainband.views.formatting import count
from rainband.views.formatting import table as as_table

if TYPE_CHECKING:
    from rainband.record.replay import Replayed, ReplayedUpdate


def command(
    run: Run = "last",
    runs: RunsDirectory = Path("runs"),
    until: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Recorded runs: stop after N updates of every block.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recorded runs: save the parameters at the end, or at N.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Show every update of the first block; of a simulated run, every message.")
    ] = False,
) -> None:
    """Repeat a run bit for bit: a simulated run from its seed, a real run if it was started with --record.

    \b
    rainband replay last --until 120 --table --model at_120.safetensors
    """
    from rainband.record.replay import replay
    from rainband.views.history import find_run

    updates: list[ReplayedUpdate] = []
    with report_errors():
        directory = find_run(runs, run)
        if (directory / "simulation.json").exists():
            if until is not None or model is not None:
                raise ValueError("--until and --model are for recorded runs; this run was simulated.")
            raise typer.Exit(_repeat_simulation(directory, table))
        result = replay(directory, updates.append if table else None, until, model)
    if table:
        typer.echo("\n".join(_rows(updates)))
    typer.echo(f"{directory.name}: {count(result.pushes, 'update')} of blocks repeated")
    if model is not None:
        typer.echo(f"the parameters are in {model}")
    raise typer.Exit(_compared(result, until))


def _rows(updates: Sequence[ReplayedUpdate]) -> list[str]:
    """Return a row for each update of the first block, in order."""
    head = ("update", "worker", "batches", "read", "staleness", "loss", "gradient norm")
    rows = [
        (f"{u.number}", f"{u.worker}", u.batches, f"v{u.read}", f"{u.staleness}", f"{u.loss:.6g}", f"{u.norm:.6g}")
        for u in updates
    ]
    return as_table([head, *rows])


def _compared(result: Replayed, until: int | None) -> int:
    if result.warning:
        typer.echo(f"The bits may differ: {result.warning}.", err=True)
    if not result.saved_hash:
        none = "The run has no saved model to compare with."
        if until is not None:
            none = "With --until, the model is not compared with the saved one."
        typer.echo(f"{none} The hash of the repeated one is {result.repeated_hash}.")
        return 0
    numbers = count(result.numbers, "number")
    if result.different:
        hashes = f"hash {result.saved_hash} as saved, {result.repeated_hash} now"
        typer.echo(f"{result.different} of {numbers} differ: {hashes}.")
        return FAILED
    typer.echo(f"The model equals the saved one bit for bit: {numbers}, hash {result.saved_hash}.")
    return 0


def _repeat_simulation(directory: Path, table: bool) -> int:
    import tempfile

    from rainband.record.replay import replay_simulated, why_bits_may_differ
    from rainband.runtimes.simulation.models.trace import read_lines
    from rainband.runtimes.simulation.models.trace import table as trace_table

    with tempfile.TemporaryDirectory() as folder:
        before, now = replay_simulated(directory, Path(folder))
        if table:
            typer.echo(trace_table(read_lines(Path(folder))))
    if warning := "" if before.time_only else why_bits_may_differ(before):
        typer.echo(f"The bits may differ: {warning}.", err=True)
    if before.trace_hash == now.trace_hash:
        typer.echo(f"{directory.name}: equal bit for bit (trace {now.trace_hash}).")
        return 0
    typer.echo(f"{directory.name}: its trace was {before.trace_hash} and is {now.trace_hash}.")
    return FAILED
