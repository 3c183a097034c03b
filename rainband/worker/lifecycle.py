"""The lifecycle of a worker in every runtime: join, train, leave, save.

It is one coroutine that awaits handles; the runtime does the waiting: a process blocks, the simulator plans an event.
It has no end of its own: when the coordinator ends the worker (`Dismissed`), the runtime stops advancing it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from rainband.errors import CoordinatorLost, LoaderProcessLost, NotSaved, RainbandError, ServerLost, Stop
from rainband.model.save import save_model, saving
from rainband.protocol.messages import Concluded, Ended, Failed, Welcome
from rainband.protocol.steps import Until
from rainband.worker.client import Client
from rainband.worker.session import Dismissed, Session
from rainband.worker.worker import buffers_of, set_buffers
from rainband.worker.worker_model import RunningWorker

PACKAGE = Path(__file__).parents[1]  # rainband itself


async def run_worker(session: Session, prepare: Callable[[], None] | None = None) -> None:
    """Run one worker, and report to the coordinator if it fails.

    `prepare` loads what the session needs; its errors are reported like those of the training.
    """
    try:
        if prepare is not None:
            prepare()
        await join_train_and_save(session)
    except (Dismissed, CoordinatorLost):
        raise
    except Exception as error:
        await report_failure(session, error)


async def join_train_and_save(session: Session) -> None:
    """Join the run, train and report the end; then save on request, until the coordinator ends the worker."""
    client = await enter(session)
    worker = session.worker = session.model.worker(session.me.index, client)
    session.runtime.before_training(worker)
    await train(session, worker)
    await leave(session, worker)
    concluded = False
    while session.model.stays or not concluded:
        await Until("the others to end", partial(_is_needed, session, worker))
        if session.conclusion is None:
            await session.model.follow_order(worker)
        else:
            await conclude(session, worker)
            concluded = True


async def enter(session: Session) -> Client:
    """Join, connect to the servers, and send their first values if asked to; return when all servers are ready."""
    module = session.model.own_module()
    session.runtime.tell(session.join, buffers_of(module) or None if module is not None else None)
    await Until("the coordinator to welcome it", lambda: session.is_welcome)
    welcome = session.welcome
    client = session.open(welcome, session.runtime.open_links(welcome, session.model.part))
    loaded = False
    while not session.go:
        welcome = session.welcome  # a second one asks for the first values
        if welcome.load and not loaded:
            loaded = True
            session.model.load(client)
        await Until("the servers to be loaded", partial(_has_news, session, welcome))
    if module is not None and session.first_buffers is not None:
        set_buffers(module, session.first_buffers)
    await session.model.started(client)
    return client


def _has_news(session: Session, welcome: Welcome) -> bool:
    return session.go or session.welcome is not welcome


async def train(session: Session, worker: RunningWorker) -> None:
    """Run the strategy until it returns, or until `Stop` is raised in it because the run stops."""
    session.training = True
    with suppress(Stop):
        await session.model.train(session.strategy, worker)
    session.training = False


async def leave(session: Session, worker: RunningWorker) -> None:
    """After the strategy: wait for the last answers, return the leases, report statistics and buffers."""
    client, runtime = worker.client, session.runtime
    await session.model.ended(worker)
    if client.pushes.compressed is not None:  # what a refused push has sent is kept again
        await Until("answers to its pushes", lambda: not client.pushes.in_flight)
        client.pushes.send_unsent()
    await Until("answers to its last pushes", lambda: not client.pushes.in_flight)
    session.model.return_leases(worker)
    runtime.flush_output()
    runtime.tell(session.stats.heartbeat())
    runtime.tell(Ended(worker.seen), worker.buffers())


def _is_needed(session: Session, worker: RunningWorker) -> bool:
    return session.conclusion is not None or session.model.has_order(worker)


async def conclude(session: Session, worker: RunningWorker) -> None:
    """Save and evaluate the model, and report the metrics."""
    assert session.conclusion is not None
    (message, buffers), session.conclusion = session.conclusion, None
    metrics = await session.model.conclude(worker, message, buffers)
    await session.runtime.saved()
    session.runtime.flush_output()
    if metrics is not None:
        session.runtime.tell(Concluded(metrics))


async def report_failure(session: Session, error: Exception) -> None:
    """Report an error of the user's code, with its traceback, and wait for the end; or one between the nodes."""
    runtime = session.runtime
    session.training, session.failure = False, error
    runtime.flush_output()
    of_user = not isinstance(error, RainbandError)
    if not of_user and not isinstance(error, NotSaved | LoaderProcessLost):
        # When a server is lost, the coordinator notices it too, and knows more.
        await runtime.failure_is_known()
    runtime.tell(failed(session, error))
    while of_user:
        with suppress(ServerLost):  # the coordinator ends the run
            await Until("the end of the run", lambda: session.conclusion is not None)
            await save_after_failure(session)


def failed(session: Session, error: Exception) -> Failed:
    """Return the message that reports an error to the coordinator."""
    step = session.stats.steps + 1 if session.go else 0  # the one that failed
    trace = "" if isinstance(error, RainbandError) else users_traceback(error)
    return Failed(step, f"{type(error).__name__}: {error}", trace)


async def save_after_failure(session: Session) -> None:
    """Save the model so far: this worker is the last that has the parameters, although its code has raised."""
    assert session.conclusion is not None
    (message, _), session.conclusion = session.conclusion, None
    if session.worker is None:
        session.runtime.tell(Failed(0, "NotSaved: this worker has failed before it received the parameters", ""))
        return
    session.model.return_leases(session.worker)  # and report what was done
    session.runtime.tell(session.stats.heartbeat())
    module = session.model.module_of(session.worker)
    try:
        with saving(message.path, module):
            save_model(getattr(module, "_orig_mod", module), message.path)  # names as before torch.compile
    except NotSaved as error:
        session.runtime.tell(Failed(0, f"{type(error).__name__}: {error}", ""))
        return
    await session.runtime.saved()
    session.runtime.tell(Concluded({}))


def show_error(error: Exception | None) -> None:
    """Print the traceback of an error of the user's code."""
    if error is not None and not isinstance(error, RainbandError):
        print(users_traceback(error), file=sys.stderr, end="", flush=True)


def users_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame outside this package on; all of it if there is none."""
    trace = error.__traceback__
    users = trace
    while users is not None and Path(users.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        users = users.tb_next
    return "".join(traceback.format_exception(type(error), error, users or trace))
