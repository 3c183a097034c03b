"""`rainband export`: copy a run's model to a file, after a check that it loads."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.options import Run, RunsDirectory
from rainband.cli.report_errors import report_errors
from rainband.views.formatting import count, size

if TYPE_CHECKING:
    from rainband.checkpoints.read import Checkpoint
    from rainband.views.history import PastRun


def command(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, such as model.safetensors.")],
    runs: RunsDirectory = Path("runs"),
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="The model of the newest checkpoint, not the one saved at the end.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.")] = False,
) -> None:
    """Copy the model of a run to a file that PyTorch loads without Rainband.

    RUN may also be one of its checkpoints, or a URL; with --checkpoint, the newest one of the run is exported. For
    from_pretrained of Hugging Face, export to model.safetensors beside the config.json of the model.

    \b
    rainband export last model.safetensors
    rainband export last model.safetensors --checkpoint
    """
    from rainband.runtimes.checkpoints.choose import checkpoint_of, names_checkpoint
    from rainband.views.history import find_run, read_run

    with report_errors():
        _check_target(out, force)
        if checkpoint or names_checkpoint(run):
            tensors, numbers = _export(checkpoint_of(run, runs, partial(typer.echo, err=True)), out)
        else:
            model = _model_of(read_run(find_run(runs, run)))
            tensors, numbers = _check_tensors(model)
            _copy(model, out)
    typer.echo(f"{out}: {count(tensors, 'tensor')}, {count(numbers, 'number')}, {size(out.stat().st_size)}")
    typer.echo("To load it into the module that was trained:")
    typer.echo("  from safetensors.torch import load_model")
    typer.echo(f"  load_model(module, {str(out)!r})")


def _export(checkpoint: Checkpoint, out: Path) -> tuple[int, int]:
    """Write the model of a checkpoint; return how many tensors it has, and how many numbers they have."""
    from rainband.model.save import save_tensors
    from rainband.runtimes.checkpoints.restore import model_of

    tensors = model_of(checkpoint)
    save_tensors(tensors, str(out))
    return len(tensors), sum(tensor.numel() for tensor in tensors.values())


def _model_of(run: PastRun) -> Path:
    if run.model is not None:
        return run.model
    if run.state == "running":
        raise ValueError(f"{run.name} is still running: its model is saved at the end.")
    reason = run.so_far.ended.reason if run.so_far.ended else ""
    why = f"{run.state}: {reason}" if reason else run.state
    raise ValueError(f"{run.name} has no model ({why}): choose another run (rainband runs).")


def _check_target(out: Path, force: bool) -> None:
    if out.is_dir():
        raise ValueError(f"{out} is a directory: give a file, such as {out / 'model.safetensors'}.")
    if not out.parent.is_dir():
        raise ValueError(f"there is no directory {out.parent}: create it first (mkdir -p {out.parent}).")
    if out.exists() and not force:
        raise ValueError(f"{out} exists: choose another name, or add --force to overwrite it.")


def _check_tensors(model: Path) -> tuple[int, int]:
    """Load every tensor; return how many there are, and how many numbers they have."""
    import safetensors
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(model))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{model} does not load ({error}): the file is damaged. Train again.") from None
    return len(tensors), sum(tensor.numel() for tensor in tensors.values())


def _copy(model: Path, out: Path) -> None:
    """Write a temporary file, then rename it: after a crash, the old or the new file is there, and complete."""
    temporary = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(model, temporary)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
