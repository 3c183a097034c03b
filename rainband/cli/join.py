"""`rainband join` and `rainband invite`: bring workers of another machine into a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rainband.cli.options import ExampleCommand, GroupedCommand, Run, RunsDirectory
from rainband.cli.report_errors import EXIT_CODES, FAILED, give_up, report_errors

SCRIPT_ENDING = ".py"


class JoinCommand(GroupedCommand):
    """A command whose options may follow the invitation; what follows the script is the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        script = next((number for number, word in enumerate(args) if word.endswith(SCRIPT_ENDING)), None)
        if script is not None and "--" not in args:
            args = [*args[:script], "--", *args[script:]]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    app.command("join", cls=JoinCommand, epilog=EXIT_CODES)(join)
    app.command("invite", cls=ExampleCommand)(invite)


def join(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INVITATION] [SCRIPT [ARGS]...]",
            help="File of rainband invite, or - for standard input; without it, the variable RAINBAND_INVITE is read, "
            "or, in a job of Slurm or torchrun, the file that rank 0 shares. "
            "For a run of rainband run: the script, and its own arguments.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Number of worker processes.  [default: 4]")
    ] = None,
    servers: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Number of server processes, before the run has begun.", show_default=False
        ),
    ] = 0,
    threads: Annotated[
        str,
        typer.Option(metavar="N", help="Torch threads of each worker; auto: divide the cores among the workers."),
    ] = "1",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="With --servers: where the servers listen.", show_default=False)
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]", help="With --servers: the address that workers connect to.", show_default=False
        ),
    ] = "",
) -> None:
    """Join a run of another machine with workers of this one.

    \b
    rainband join invite.txt --workers 4
    rainband join invite.txt --workers 4 train.py
    ssh lab1 rainband invite last | rainband join - --workers 4
    """
    from rainband.errors import RainbandError
    from rainband.options import num_threads
    from rainband.runtimes.configure import usable_cores
    from rainband.runtimes.machines.invitation import VARIABLE, read_invitation
    from rainband.runtimes.machines.joiner import Joiner, JoinOptions
    from rainband.runtimes.machines.launchers import launched_by

    with report_errors():
        rest = list(words or [])
        found_elsewhere = VARIABLE in os.environ or launched_by() is not None
        word = None
        if rest and not (found_elsewhere and rest[0].endswith(SCRIPT_ENDING)):
            word = rest.pop(0)
        invitation = read_invitation(word, say=lambda line: typer.echo(line, err=True))
        script = ""
        if rest:
            path = Path(rest.pop(0))
            if not path.is_file():
                raise ValueError(
                    f"there is no script {path}: give the path of the Python file that the run trains with."
                )
            script = str(path.absolute())
        if servers and not listen:
            raise ValueError("--servers requires --listen HOST:PORT, where workers of other machines reach them.")
        number = (0 if servers else 4) if workers is None else workers
        if not number and not servers:
            raise ValueError("--workers 0 brings nothing: use --workers 1 or more, or --servers.")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # for the module of the task
        options = JoinOptions(
            workers=number,
            servers=servers,
            threads=num_threads("threads", threads, number, servers or 0, usable_cores()),
            listen=listen,
            advertise=advertise,
            script=script,
            arguments=tuple(rest),
        )
        try:
            code = Joiner(invitation, options, lambda line: typer.echo(line, err=True)).run()
        except RainbandError as error:
            give_up(str(error), FAILED)
    raise typer.Exit(code)


def invite(
    run: Run = "last",
    runs: RunsDirectory = Path("runs"),
) -> None:
    """Print the invitation of a run that listens: other machines join with it.

    It is secret. Instructions go to standard error, so that it can be passed on:

    \b
    rainband invite last > invite.txt; chmod 600 invite.txt
    rainband invite last | ssh lab2 rainband join - --workers 4
    """
    from rainband.runtimes.machines.invitation import FILE_NAME
    from rainband.views.event_text import join_command
    from rainband.views.history import find_run, read_run

    with report_errors():
        directory = find_run(runs, run)
        path = directory / FILE_NAME
        if not path.is_file():
            raise ValueError(f"{directory.name} has no invitation: it is over, or was started without --listen.")
        typer.echo(f"The invitation of {directory.name} is secret. On another machine:", err=True)
        typer.echo(f"  {join_command(read_run(directory).so_far)}", err=True)
        typer.echo(path.read_text(encoding="ascii"), nl=False)
