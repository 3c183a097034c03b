"""`rainband checkpoints`: list the checkpoints of a run."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import Json, RunsDirectory
from rainband.cli.report_errors import FAILED, give_up, report_errors


def command(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run: its directory or name, last, or a folder or URL with checkpoints."),
    ],
    runs: RunsDirectory = Path("runs"),
    check: Annotated[bool, typer.Option("--check", help="Read all files, and check their hashes.")] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, the newest first.

    \b
    rainband checkpoints last
    """
    import msgspec

    from rainband.checkpoints.manifest import Manifest
    from rainband.checkpoints.read import Checkpoint, all_names
    from rainband.errors import BadCheckpoint
    from rainband.protocol.data_plan import OPEN_ENDED
    from rainband.runtimes.checkpoints.choose import store_with
    from rainband.views.formatting import count, size, table

    rows: list[tuple[str, ...]] = [("step", "progress", "size", "written", "result", "folder")]
    bad: list[str] = []
    found: list[Manifest] = []
    with report_errors():
        store = store_with(run, runs)
        for name in all_names(store):
            try:
                checkpoint = Checkpoint(store, name)
                if check:
                    checkpoint.verify()
            except BadCheckpoint as error:
                bad.append(str(error))
                continue
            manifest = checkpoint.manifest
            found.append(manifest)
            results = ", ".join(f"{key} {value:.4g}" for key, value in manifest.metrics.items())
            endless = manifest.plan.coordinated or manifest.plan.epochs >= OPEN_ENDED
            known = manifest.plan.num_batches and not endless
            progress = f"{manifest.step / manifest.plan.num_batches:.0%}" if known else ""
            age = _age(manifest.created_at)
            rows.append((f"{manifest.step:,}", progress, size(manifest.num_bytes), age, results, checkpoint.place))
    if as_json:
        typer.echo(
            msgspec.json.encode(
                [
                    {"step": m.step, "num_bytes": m.num_bytes, "created_at": m.created_at, "metrics": m.metrics}
                    for m in found
                ]
            ).decode()
        )
    elif found:
        typer.echo("\n".join(table(rows)))
        typer.echo(f"{count(len(found), 'checkpoint')}; rainband resume {run} continues from the newest.")
    else:
        typer.echo(f"{store.describe()} has {'no valid checkpoint' if bad else 'no checkpoint yet'}.")
    if bad:
        give_up("\n".join(f"damaged: {text}" for text in bad), FAILED)


def _age(created_at: str) -> str:
    """Return how long ago a checkpoint was written; of a simulation, its virtual time."""
    from rainband.views.formatting import duration

    try:
        written = datetime.datetime.fromisoformat(created_at)
    except ValueError:
        return created_at
    return f"{duration((datetime.datetime.now(datetime.UTC) - written).total_seconds())} ago"
