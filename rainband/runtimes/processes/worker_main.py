"""The entry of a worker process."""

from __future__ import annotations

import sys

from rainband.errors import CoordinatorLost, PeerLost
from rainband.runtimes.config import Job, decode_job
from rainband.runtimes.processes.entries import LINK_BROKEN
from rainband.runtimes.processes.stage_process import StageProcess
from rainband.runtimes.processes.worker_process import WorkerProcess
from rainband.strategy import Strategy
from rainband.tasks.task import Task
from rainband.worker.lifecycle import show_error
from rainband.worker.session import Dismissed


def main(job: bytes, fds: list[int]) -> None:
    """Run the worker that a job describes."""
    work(decode_job(job), fds)


def work(job: Job, fds: list[int], task: Task | None = None, strategy: Strategy | None = None) -> None:
    """Run a worker. By default the task and the strategy are those that the configuration names.

    `fds`: the inherited files, of which the last ones are those that the job has.
    """
    if job.config.stage_plan is None:
        process = WorkerProcess(job, task, strategy, memory=fds[-1] if job.memory else None)
        process.round_files = fds[len(fds) - job.round_files :]
        process.group_files = fds[len(fds) - job.round_files - job.group_files : len(fds) - job.round_files]
    else:
        process = StageProcess(job, task, strategy)
    try:
        process.run()
    except Dismissed as dismissed:
        failure = process.session.failure
        if failure is None and (process.session.is_welcome or not job.shows_errors):
            return
        if job.shows_errors:  # the display of the run is on another machine
            show_error(failure)
            sys.exit(str(dismissed))
    except CoordinatorLost as error:
        if job.remote:
            sys.exit(LINK_BROKEN)
        if process.control is None:
            sys.exit(f"{process.me}: {error}")  # the launcher may still be there, and does not know why
    sys.exit(LINK_BROKEN if job.remote and isinstance(process.session.failure, PeerLost) else 1)
