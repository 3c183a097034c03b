"""The lifecycle of a worker whose steps are those of a user's loop: it returns to the loop when it needs the user."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from rainband.protocol.steps import Steps
from rainband.runtimes.processes.drive import drive_until
from rainband.worker.lifecycle import join_train_and_save

if TYPE_CHECKING:
    from rainband.worker.session import Session


class UsersTurn:
    """Something that only the user's loop can supply."""

    given = False
    result: Any = None

    def give(self, result: Any) -> None:
        self.given, self.result = True, result

    def __await__(self) -> Generator[UsersTurn, None, Any]:
        while not self.given:
            yield self
        return self.result


class LoopEnd(UsersTurn):
    """The end of the user's loop."""


class LoopLifecycle:
    """Advances the worker's coroutine until it needs the user's loop: it has joined, or a step is done, or it has left.

    Errors of the coroutine are raised in the loop.
    """

    def __init__(self, session: Session, wait: Callable[..., object]) -> None:
        self.session = session
        self.wait = wait
        self.steps = Steps(join_train_and_save(session))
        self.needed: UsersTurn | None = None
        self.error: Exception | None = None  # that has ended it
        self._go_on()

    def _go_on(self) -> None:
        """Advance it; raise the error that has ended it each time, because loops may have `except Exception`."""
        if self.error is not None:
            raise self.error
        try:
            self.needed = drive_until(self.steps, self.wait, self.session, (UsersTurn,))
        except Exception as error:
            self.error = error
            raise

    def end(self) -> None:
        """Leave the run: the user's loop has ended."""
        assert isinstance(self.needed, LoopEnd), "a strategy must return when there are no more work items"
        self.needed.give(None)
        self._go_on()
