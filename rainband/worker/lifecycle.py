"""A worker's life, from its join to the last goodbye: one coroutine for all runtimes.

It awaits handles, and its runtime waits: a process blocks, the simulator plans an event. It has no end of its own:
the coordinator says goodbye (`Dismissed`), and then nobody goes on with it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from rainband.errors import Stop
from rainband.protocol.messages import Concluded, Ended, Welcome
from rainband.protocol.steps import Until
from rainband.worker.client import Client
from rainband.worker.session import Session
from rainband.worker.worker_model import RunningWorker


async def run_worker(session: Session) -> None:
    """Join the run, train, report the end; then save when asked to, until the coordinator says goodbye."""
    client = await enter(session)
    worker = session.worker = session.model.worker(session.me.index, client)
    session.runtime.before_training(worker)
    await train(session, worker)
    await leave(session, worker)
    concluded = False
    while session.model.stays or not concluded:
        await Until("the others to end", partial(_is_called, session, worker))
        if session.conclusion is None:
            await session.model.follow_order(worker)
        else:
            await conclude(session, worker)
            concluded = True


async def enter(session: Session) -> Client:
    """Join, connect to the servers, and send them their first values if asked to; returns when all are ready."""
    session.runtime.tell(session.join)
    await Until("the coordinator to welcome it", lambda: session.is_welcome)
    welcome = session.welcome
    client = session.open(welcome, session.runtime.open_links(welcome, session.model.part))
    loaded = False
    while not session.go:
        welcome = session.welcome  # a second one asks for the first values
        if welcome.load and not loaded:
            loaded = True
            session.model.load(client)
        await Until("the servers to be loaded", partial(_is_told_more, session, welcome))
    await session.model.started(client)
    return client


def _is_told_more(session: Session, welcome: Welcome) -> bool:
    return session.go or session.welcome is not welcome


async def train(session: Session, worker: RunningWorker) -> None:
    """Run the strategy to its end, or until it is told to stop."""
    session.training = True
    with suppress(Stop):
        await session.strategy.run(worker)
    session.training = False


async def leave(session: Session, worker: RunningWorker) -> None:
    """The strategy has ended: wait for the last answers, return the leases, report the numbers and the buffers."""
    client, runtime = worker.client, session.runtime
    await session.model.ended(worker)
    await Until("answers to its last pushes", lambda: not client.pushes.in_flight)
    session.model.return_leases(worker)
    runtime.flush_output()
    runtime.tell(session.stats.heartbeat())
    runtime.tell(Ended(worker.seen), worker.buffers())


def _is_called(session: Session, worker: RunningWorker) -> bool:
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
