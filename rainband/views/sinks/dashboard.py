"""`--dashboard`: a process beside the run that shows it in the browser, and ends with it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rainband.options import OptionError, opt
from rainband.protocol.events import AnyEvent

CLOSE_WITHIN_S = 5.0  # for pages to receive the end of the run
CODE = "from rainband.views.dashboard.serve import serve_beside; serve_beside()"


def check_installed() -> None:
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        raise OptionError(
            f"{opt('dashboard', True)} needs starlette and uvicorn: pip install 'rainband[dashboard]', or omit it."
        )


class DashboardProcess:
    """Starts the dashboard of a run. It reads the run's directory, so that watching does not slow the run."""

    def __init__(self, directory: Path) -> None:
        from rainband.views.dashboard.listener import address_of, listen, new_token

        self.directory = directory
        listener, token = listen("127.0.0.1", 0), new_token()
        with listener:
            number = listener.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", CODE, str(number), str(directory.absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,  # Ctrl-C is for the run; the page then shows how it ends
                text=True,
            )
            print(f"dashboard: {address_of(listener, token)}", file=sys.stderr, flush=True)
        assert self.process.stdin is not None
        self.process.stdin.write(token + "\n")  # arguments can be read by other users of the machine
        self.process.stdin.flush()

    def write(self, event: AnyEvent) -> None:
        """Do nothing: the process reads the events from the run's directory."""

    def close(self) -> None:
        """End the process, which has seen the end of its input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(CLOSE_WITHIN_S)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        print(f"dashboard: ended with the run; rainband dashboard {self.directory} shows it again", file=sys.stderr)
