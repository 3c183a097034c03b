"""The command `rainband`. Importing this module imports neither torch nor rich, so that --help is fast."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from rainband import __version__
from rainband.cli.options import CommandGroup, ExampleCommand
from rainband.cli.report_errors import EXIT_CODES

# Modules of this package, in the order of --help, with a function `command`; or `register(app)`, if that needs more.
COMMANDS = (
    "train",
    "run",
    "checkpoints.resume",
    "checkpoints.checkpoints",
    "join",
    "explain",
    "runs",
    "running.ps",
    "running.top",
    "running.stop",
    "running.chaos",
    "reports.dashboard",
    "reports.compare",
    "reports.analyze",
    "export",
    "replay",
    "timeline",
    "calibrate",
    "fuzz",
    "placement",
    "bench",
    "doctor",
)


def main() -> None:
    """Run the command line: the entry point of the console script."""
    try:
        build_app()(prog_name="rainband")
    finally:
        _flush_stdout()


def _flush_stdout() -> None:
    """Flush, and keep the exit code if the reader of the output has ended (`| head`, a closed terminal)."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_app() -> typer.Typer:
    app = typer.Typer(
        cls=CommandGroup,
        help="Train one PyTorch model with several workers, which share each batch or use parameter servers; tolerates "
        "slow and lost workers.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help: importing rich would take longer than everything else
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name in COMMANDS:
        if find_spec(f"rainband.cli.{name}") is None:
            continue
        module = importlib.import_module(f"rainband.cli.{name}")
        if hasattr(module, "register"):
            module.register(app)
        else:
            app.command(name.rpartition(".")[2], cls=ExampleCommand)(module.command)
    return app


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"rainband {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
