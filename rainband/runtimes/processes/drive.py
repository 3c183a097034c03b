"""Drive a coroutine in a process of its own: compute what it wants computed, block while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rainband.errors import Stop
from rainband.protocol.steps import Handle, Steps, Work
from rainband.worker.work_items import StillNeeded

if TYPE_CHECKING:
    from rainband.worker.session import Session

OracleTask = TypeVar("OracleTask")
Wait = Callable[..., object]  # blocks until messages came, or for so many seconds, and delivers them


def drive(coroutine: Coroutine[Any, None, OracleTask], wait: Wait, session: Session | None = None) -> OracleTask:
    """Run a coroutine to its end; returns its result. With a session: a worker's life, whose training is measured."""
    steps = Steps(coroutine)
    drive_until(steps, wait, session)
    return steps.result  # type: ignore[return-value]


def drive_until(steps: Steps[Any], wait: Wait, session: Session | None = None, until: tuple[type, ...] = ()) -> Any:
    """Go on until the coroutine wants something that only the owner has, and return that; None: it is over."""
    wanted = steps.go_on()
    while not steps.over and not isinstance(wanted, until):
        training = session if session is not None and session.training else None
        if isinstance(wanted, Work):
            _perform(wanted, training)
        elif isinstance(wanted, StillNeeded):
            wait(0.0)
            wanted.looked = True
        elif training is None:
            while not wanted.ready():
                wait()
        elif not _wait_for(wanted, wait, training):
            training.stopped = True
            wanted = steps.go_on(Stop())
            continue
        wanted = steps.go_on()
    return wanted


def _perform(work: Work, session: Session | None) -> None:
    if session is None:
        work.perform()
        return
    perform = work.perform if session.perform is None else partial(session.perform, work)
    started = time.monotonic()
    if session.before_step is not None:
        session.before_step()
    began = time.monotonic()
    perform()
    session.stats.computed_s += time.monotonic() - began
    if session.observer is not None:
        session.observer.spent("compute", started, time.monotonic(), work.label)


def _wait_for(wanted: object, wait: Wait, session: Session) -> bool:
    """Wait for what a strategy awaits. False: the run stops, and what others would have to do may never come."""
    assert isinstance(wanted, Handle), f"a strategy may only await what its worker gave, not {wanted!r}"
    started, stats = time.monotonic(), session.stats
    while not (ready := wanted.ready()) and not session.must_stop(wanted):
        stats.waiting = True
        wait()
    stats.waiting = False
    ended = time.monotonic()
    stats.waited(ended - started)
    if ready and session.observer is not None:
        session.observer.spent("wait", started, ended)
    return ready
