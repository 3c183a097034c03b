"""A coroutine that goes on until it needs time to pass. Its owner computes and waits; here is no clock and no I/O.

The lifecycle of a worker, a strategy, an evaluation and a strategy's coordinator part are all driven by `Steps`. They
differ in what their owner does with what comes out: a process blocks, the simulator plans an event, a user's loop
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from rainband.errors import Stop

Result = TypeVar("Result")


class Work:
    """Work is a computation that the runtime performs, or whose duration it plans."""

    share = 1.0  # of the time that a gradient of the whole model takes
    exchanged_bytes = 0  # with one other worker meanwhile, in each direction
    label = ""  # in the picture of a run: F3 and B3, a forward and a backward of microbatch 3

    def perform(self) -> None:
        raise AssertionError("each kind of work says what is to be done")


class Handle:
    """A handle is an operation that can be awaited; the runtime checks `ready()` after each message."""

    __slots__ = ()

    def ready(self) -> bool:
        raise AssertionError("each kind of handle says when it is ready")

    def may_never_complete(self, stopping: bool) -> bool:
        """Return True if the awaited event may never happen, because the run is stopping."""
        return False

    def holder(self) -> int | None:
        """Return the worker that is being waited for, if the handle knows it."""
        return None

    def __await__(self) -> Generator[Handle, None, Any]:
        while not self.ready():
            yield self


class Look(Handle):
    """A `Look` is a handle that is ready at once, after the runtime has delivered the messages that have arrived."""

    __slots__ = ("looked",)

    def __init__(self) -> None:
        self.looked = False

    def ready(self) -> bool:
        return self.looked


class Until(Handle):
    """An `Until` is a handle that is ready when a function returns True."""

    __slots__ = ("is_so", "what")

    def __init__(self, what: str, is_so: Callable[[], bool]) -> None:
        self.what = what  # in words, for the report of a deadlock
        self.is_so = is_so

    def ready(self) -> bool:
        return self.is_so()


class Steps(Generic[Result]):
    """The steps of a coroutine, advanced one by one; between two of them the runtime does what it needs."""

    __slots__ = ("coroutine", "needed", "over", "result")

    def __init__(self, coroutine: Coroutine[Any, None, Result]) -> None:
        self.coroutine = coroutine
        self.over = False
        self.needed: Any = None  # work or a handle, if `advance` has stopped there
        self.result: Result | None = None  # once it is over; none also if it was stopped

    def go_on(self, error: BaseException | None = None) -> Any:
        """Run until it needs something; returns what: work, or a handle. None: it is over."""
        try:
            return self.coroutine.send(None) if error is None else self.coroutine.throw(error)
        except StopIteration as end:
            self.result = end.value
        except Stop:
            pass
        except BaseException:
            self.over = True
            raise
        self.over = True
        return None

    def advance(self, perform: Callable[[Any], None] = lambda work: work.perform()) -> bool:
        """Run, and perform the work, until it waits for a handle that is not ready; return False if it could not."""
        advanced = False
        while not self.over and not (isinstance(self.needed, Handle) and not self.needed.ready()):
            if isinstance(self.needed, Work):
                perform(self.needed)
            self.needed = self.go_on()
            advanced = True
        return advanced

    def close(self) -> None:
        self.over = True
        self.coroutine.close()
