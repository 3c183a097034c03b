"""What is said and which exit code is given when something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

FAILED, USAGE = 1, 2

# The mark keeps the lines apart in the help.
EXIT_CODES = """\b
Exit codes:
  0    done
  1    failed: the run, or what was asked for
  2    something typed was wrong; nothing was started
  75   asked to stop (SIGTERM or SIGHUP); the run ended in good order
  130  Ctrl-C: once ends in good order, twice ends now"""


@contextmanager
def mistakes_told() -> Iterator[None]:
    """Inside, a ValueError is the user's mistake and an OSError the machine's: one line, no traceback."""
    try:
        yield
    except ValueError as error:
        give_up(str(error), USAGE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        give_up(f"{where}{error.strerror or error}.", FAILED)


def give_up(message: str, exit_code: int) -> NoReturn:
    typer.echo(f"rainband: {message}", err=True)
    raise typer.Exit(exit_code)
