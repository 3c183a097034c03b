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
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Write the optimizer's state, not the model; of a checkpoint.")
    ] = False,
    huggingface: Annotated[
        bool,
        typer.Option(
            "--huggingface", help="OUT is a folder for from_pretrained: weights and config.json; of a checkpoint."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.")] = False,
) -> None:
    """Copy the model of a run to a file that PyTorch loads without Rainband.

    RUN may also be one of its checkpoints, or a URL; with --checkpoint, the newest one of the run is exported.

    \b
    rainband export last model.safetensors
    rainband export last model.safetensors --checkpoint
    rainband export last optimizer.safetensors --optimizer
    rainband export last folder --huggingface
    """
    from rainband.runtimes.checkpoints.choose import checkpoint_of, names_checkpoint
    from rainband.views.history import find_run, read_run

    with report_errors():
        if optimizer and huggingface:
            raise ValueError("--optimizer writes one file and --huggingface a folder: type two commands.")
        _check_target(out / "model.safetensors" if huggingface else out, force, is_folder=huggingface)
        if checkpoint or optimizer or huggingface or names_checkpoint(run):
            found = checkpoint_of(run, runs, partial(typer.echo, err=True))
            if huggingface:
                return _export_pretrained(found, out)
            if optimizer:
                return _export_optimizer(found, out)
            tensors, numbers = _export(found, out)
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


def _export_optimizer(checkpoint: Checkpoint, out: Path) -> None:
    """Write the optimizer's state, and print how plain PyTorch loads it."""
    from rainband.model.save import save_tensors
    from rainband.runtimes.checkpoints.export import optimizer_of

    tensors = optimizer_of(checkpoint)
    save_tensors(tensors, str(out))
    typer.echo(
        f"{out}: {count(len(tensors), 'tensor')}, {size(out.stat().st_size)}, of step {checkpoint.manifest.step:,}"
    )
    typer.echo("To load it into an optimizer of the same class for the same module:")
    typer.echo("  from safetensors.torch import load_file")
    typer.echo("  parameters = dict(module.named_parameters())")
    typer.echo(f"  for name, value in load_file({str(out)!r}).items():")
    typer.echo('      parameter, _, key = name.rpartition("/")')
    typer.echo("      optimizer.state[parameters[parameter]][key] = value")


def _export_pretrained(checkpoint: Checkpoint, out: Path) -> None:
    """Write a folder for Hugging Face, and print how it is loaded."""
    from rainband.plugins import search_current_folder
    from rainband.runtimes.checkpoints.export import save_pretrained

    search_current_folder()
    tensors, has_config = save_pretrained(checkpoint, out)
    typer.echo(f"{out}: {count(len(tensors), 'tensor')}, of step {checkpoint.manifest.step:,}")
    if not has_config:
        typer.echo(
            f"The model is made by a script: write its configuration there, model.config.save_pretrained({str(out)!r})."
        )
    typer.echo("To load it:")
    typer.echo(f"  model = AutoModel.from_pretrained({str(out)!r})")


def _model_of(run: PastRun) -> Path:
    if run.model is not None:
        return run.model
    if run.state == "running":
        raise ValueError(f"{run.name} is still running: its model is saved at the end.")
    reason = run.so_far.ended.reason if run.so_far.ended else ""
    why = f"{run.state}: {reason}" if reason else run.state
    raise ValueError(f"{run.name} has no model ({why}): choose another run (rainband runs).")


def _check_target(out: Path, force: bool, is_folder: bool) -> None:
    if is_folder and out.parent.is_file():
        raise ValueError(f"{out.parent} is a file: --huggingface writes a folder.")
    if out.is_dir():
        raise ValueError(f"{out} is a directory: give a file, such as {out / 'model.safetensors'}.")
    if not out.parent.is_dir() and not is_folder:
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
