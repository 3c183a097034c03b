"""Error messages and exit codes of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rainband.errors import BadCheckpoint
from rainband.options import OptionError, on_command_line

FAILED, USAGE = 1, 2

# The mark keeps the lines apart in the help.
EXIT_CODES = """\b
Exit codes:
  0    success
  1    the run or command failed
  2    usage error; nothing was started
  75   stopped by Ctrl-C, SIGTERM or SIGHUP; rainband resume RUN continues
  130  stopped by Ctrl-C without a checkpoint (129: by SIGHUP, 143: by SIGTERM)"""


@contextmanager
def report_errors() -> Iterator[None]:
    """Report a ValueError (the user's mistake) or an OSError (the machine's) in one line, without a traceback."""
    try:
        yield
    except OptionError as error:
        give_up(error.written(on_command_line), USAGE)
    except ValueError as error:
        give_up(str(error), USAGE)
    except BadCheckpoint as error:
        give_up(str(error), FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        give_up(f"{where}{error.strerror or error}.", FAILED)


def give_up(message: str, exit_code: int) -> NoReturn:
    typer.echo(f"rainband: {message}", err=True)
    raise typer.Exit(exit_code)
