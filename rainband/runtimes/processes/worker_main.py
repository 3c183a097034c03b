"""The entry of a worker's process: be one, whatever kind it is, and tell how it ended."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from rainband.errors import CoordinatorLost, RainbandError
from rainband.runtimes.config import Job, decode_job
from rainband.runtimes.processes.stage_process import StageProcess
from rainband.runtimes.processes.worker_process import WorkerProcess
from rainband.strategy import Strategy
from rainband.tasks.task import Task
from rainband.worker.session import Dismissed

PACKAGE = Path(__file__).parents[2]  # of rainband itself


def main(job: bytes, fds: list[int]) -> None:
    """The entry of a worker's process."""
    order = decode_job(job)
    work(order, memory=fds[-1] if order.memory else None)


def work(job: Job, task: Task | None = None, strategy: Strategy | None = None, memory: int | None = None) -> None:
    """Be a worker; a task or strategy that is not handed in is the one that the configuration names.

    `memory` is a file that is to be the parameters of all workers.
    """
    process = make_process(job, task, strategy, memory)
    try:
        process.run()
    except Dismissed:
        return
    except CoordinatorLost:
        sys.exit(1)  # the launcher is gone, and with it whoever would read a message
    except RainbandError as error:
        process.fail(error, "")
        sys.exit(1)
    except Exception as error:
        process.fail(error, users_traceback(error))
        sys.exit(1)


def make_process(job: Job, task: Task | None, strategy: Strategy | None, memory: int | None) -> WorkerProcess:
    if job.config.stage_plan is None:
        return WorkerProcess(job, task, strategy, memory)
    return StageProcess(job, task, strategy)


def users_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame outside this package on; all of it if there is none."""
    trace = error.__traceback__
    users = trace
    while users is not None and Path(users.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        users = users.tb_next
    return "".join(traceback.format_exception(type(error), error, users or trace))
