"""`rainband dashboard`: show runs in the browser, live or finished; or save a run's page as one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import Run, RunsDirectory
from rainband.cli.report_errors import report_errors

EVERY_ADDRESS = ("0.0.0.0", "::")


def command(
    run: Run = "last",
    runs: RunsDirectory = Path("runs"),
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0: any that is free.")] = 0,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Listen at this address of this machine.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Also answer under this host name; may be repeated."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the page as one HTML file instead.")
    ] = None,
) -> None:
    """Show a run in the browser, while it runs or afterwards; the page also lists the other runs.

    \b
    rainband dashboard last
    rainband dashboard last --save run.html
    """
    from rainband.views.history import find_run

    with report_errors():
        directory = find_run(runs, run).absolute()
        if save is not None:
            from rainband.views.dashboard.saved import saved_page

            save.write_text(saved_page(directory), encoding="utf-8")
            typer.echo(str(save))
            return
        from rainband.views.dashboard.listener import LOOPBACK, address_of, listen, new_token
        from rainband.views.sinks.dashboard import check_installed

        check_installed()
        listener, token = listen(host, port), new_token()
    typer.echo(address_of(listener, token))
    if host not in LOOPBACK:
        warning = f"Everyone who reaches {host} and has this address can read these runs; nothing is encrypted."
        typer.echo(warning, err=True)
    sys.stdout.flush()
    from rainband.views.dashboard.serve import serve

    names = (*(allow_host or []), *([] if host in EVERY_ADDRESS else [host]))
    serve(listener, directory.parent, directory.name, token, hosts=names)
