"""Drive a coroutine in a process: perform its work, block while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rainband.errors import CoordinatorLost, Stop
from rainband.protocol.steps import Handle, Look, Steps, Work
from rainband.rounds.membership import RoundMembership, Waiting
from rainband.worker.session import Dismissed
from rainband.worker.shared_batches import OthersInRound

if TYPE_CHECKING:
    from rainband.worker.session import Session

MESSAGES_EVERY_S = 0.05  # while a worker waits for others in shared memory

Result = TypeVar("Result")
Wait = Callable[..., object]  # blocks until messages have arrived, or for some seconds, and delivers them


class Deadline(Handle):
    """Ready after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.at_s = time.monotonic() + seconds

    def left_s(self) -> float:
        return max(0.0, self.at_s - time.monotonic())

    def ready(self) -> bool:
        return self.left_s() == 0.0


def drive(coroutine: Coroutine[Any, None, Result], wait: Wait, session: Session | None = None) -> Result:
    """Run a coroutine to its end and return its result. With a session, measure computing and waiting in training."""
    steps = Steps(coroutine)
    drive_until(steps, wait, session)
    return steps.result  # type: ignore[return-value]


def drive_until(steps: Steps[Any], wait: Wait, session: Session | None = None, until: tuple[type, ...] = ()) -> Any:
    """Advance a coroutine until it needs something of these types, and return that; None if it has ended.

    Errors of its work, and of messages that arrive while it waits, are raised inside it.
    """
    needed = steps.go_on()
    while not steps.over and not isinstance(needed, until):
        error: Exception | None
        try:
            error = _provide(needed, wait, session if session is not None and session.training else None)
        except (Dismissed, CoordinatorLost):
            raise
        except Exception as raised:
            error = raised
        needed = steps.go_on(error)
    return needed


def _provide(needed: object, wait: Wait, training: Session | None) -> Stop | None:
    """Perform the work, or wait until the handle is ready; Stop if the run stops and it may never be."""
    if isinstance(needed, Work):
        _perform(needed, training)
    elif isinstance(needed, Look):
        wait(0.0)
        needed.looked = True
    elif training is not None:
        return _wait_in_training(needed, wait, training)
    else:
        assert isinstance(needed, Handle)
        while not needed.ready():
            if isinstance(needed, Deadline):
                wait(needed.left_s())
            else:
                _wait_for(needed, wait)
    return None


def drive_round(member: RoundMembership, wait: Wait, waiting: Waiting) -> Any:
    """Go through a part of the protocol of rounds within the computing of a gradient, and return its result."""
    try:
        while True:
            until = next(waiting)
            while until is not None and not until():
                _wait_for(OthersInRound(until, member), wait)
    except StopIteration as end:
        return end.value


def _wait_for(needed: Handle, wait: Wait) -> None:
    """Wait for messages, or for what other workers write into shared memory, with a look at messages now and then."""
    if not isinstance(needed, OthersInRound):
        wait()
        return
    look_at = time.monotonic() + MESSAGES_EVERY_S
    needed.board.wait(lambda: needed.ready() or time.monotonic() >= look_at)
    wait(0.0)


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


def _wait_in_training(needed: object, wait: Wait, session: Session) -> Stop | None:
    assert isinstance(needed, Handle), f"a strategy may only await what its worker returned, not {needed!r}"
    started, stats = time.monotonic(), session.stats
    while not (ready := needed.ready()) and not session.must_stop(needed):
        stats.waiting = True
        _wait_for(needed, wait)
        if (holder := needed.holder()) is not None:
            stats.held_by = holder
    stats.waiting = False
    ended = time.monotonic()
    stats.waited(ended - started)
    if not ready:
        session.stopped = True
        return Stop()
    if session.observer is not None:
        session.observer.spent("wait", started, ended)
    return None
