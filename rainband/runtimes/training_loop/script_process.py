"""A worker process that runs a user's script as `python train.py` does; `rainband.join` finds its link to the run."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from importlib.machinery import SourceFileLoader
from types import ModuleType

from rainband.errors import LoaderProcessLost, PeerLost, RainbandError
from rainband.plugins import load_strategy
from rainband.runtimes.config import decode_job
from rainband.runtimes.processes.entries import LINK_BROKEN
from rainband.runtimes.processes.worker_link import WorkerLink
from rainband.runtimes.training_loop import loop as custom_loop  # noqa: F401  imported in the zygote, for all scripts at once
from rainband.runtimes.training_loop.script_random import seed_equally
from rainband.runtimes.training_loop.split import loop as split_loop  # noqa: F401
from rainband.worker.lifecycle import show_error
from rainband.worker.session import Dismissed


def main(job: bytes, fds: list[int]) -> None:
    """Run the script of the worker that a job describes."""
    decoded = decode_job(job)
    config = decoded.config
    member = WorkerLink(decoded, load_strategy(config.strategy, config.strategy_settings))
    member.round_files = fds[len(fds) - decoded.round_files :]
    member.group_files = fds[len(fds) - decoded.round_files - decoded.group_files : len(fds) - decoded.round_files]
    seed_equally(config.seed)
    try:
        run_script(config.script, config.arguments, member)
    except Dismissed:
        sys.exit(1)  # the launcher reports the reason
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a loader's process was killed
        if member.left and not isinstance(error, RainbandError):
            raise  # the run is over, so only Python can show it
        member.report(_of_killed_loader(error) or error)
        show_error(error if decoded.shows_errors else None)
        sys.exit(LINK_BROKEN if decoded.remote and isinstance(error, PeerLost) else 1)


def _of_killed_loader(error: Exception) -> LoaderProcessLost | None:
    """Return what to report if a process of a DataLoader was killed, for example because memory ran out.

    Errors of the dataset itself pass through other functions of the DataLoader, and are the script's.
    """
    text = str(error)
    told = isinstance(error, RuntimeError) and text.startswith("DataLoader worker (pid")
    killed = told and ("killed by signal" in text or text.endswith("exited unexpectedly"))
    frames = traceback.extract_tb(error.__traceback__)
    reading = any(frame.name == "_try_get_data" and frame.filename.endswith("dataloader.py") for frame in frames)
    if not killed and not (reading and isinstance(error, OSError | EOFError)):
        return None
    return LoaderProcessLost(f"a process of its data loader was killed ({type(error).__name__}: {text})")


def run_script(path: str, arguments: tuple[str, ...], member: object) -> None:
    """Execute a file as __main__, whose names stay until the process ends (for atexit functions)."""
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    main_module.__loader__ = SourceFileLoader("__main__", path)
    main_module.__spec__ = None
    vars(main_module)["__builtins__"] = __builtins__
    vars(main_module)["__rainband__"] = member
    sys.modules["__main__"] = main_module
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, vars(main_module))
