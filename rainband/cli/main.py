"""The command `rainband`. Importing this file imports neither torch nor rich: --help must come at once."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from rainband import __version__
from rainband.cli.report_errors import EXIT_CODES

# Every command is a file of this folder with a function `register(app)`. To add one, write its name here.
COMMANDS = (
    "train",
    "run",
    "explain",
    "runs",
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
    """The entry of the console script."""
    try:
        build_app()(prog_name="rainband")
    finally:
        _flush_stdout()


def _flush_stdout() -> None:
    """Output that cannot be written (to `| head`, to a closed terminal) is no reason for another exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_app() -> typer.Typer:
    app = typer.Typer(
        help="Train one PyTorch model on machines you do not fully control.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help: rich alone would take longer than all the rest
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options_of_all)
    for name in COMMANDS:
        if find_spec(f"rainband.cli.{name}") is not None:
            importlib.import_module(f"rainband.cli.{name}").register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rainband {__version__}")
        raise typer.Exit


def _options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
