"""Observers see what a run does and never change it: recording, spans, calibration, the checks of `rainband fuzz`.

An object that can be observed takes an observer when it is made; `None` costs one comparison per message. Methods are
called in the process where the thing happens, so an observer has its own files and its own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.model.gradient import Gradient
    from rainband.protocol.messages import Message, Push, PushResult, RuleChange, Welcome
    from rainband.rounds.exchange import RoundId
    from rainband.server.block import Block
    from rainband.server.server import Server
    from rainband.strategy import Batch
    from rainband.worker.client import Client
    from rainband.worker.pulls import PullHandle
    from rainband.worker.pushes import PushHandle
    from rainband.worker.worker import ModuleWorker

TimedWork = Literal["push", "read", "step"]  # a worker writes a gradient, copies a block, makes its own step
Activity = Literal["compute", "wait", "apply", "push", "pull"]


class Observer:
    """The base class does nothing: override what you need."""

    # ---- on any node -----------------------------------------------------------------------------------------------

    def receiving(self, message: Message) -> None:
        """A message has arrived, and has changed nothing yet."""

    def received(self, message: Message) -> None:
        """A message has been handled."""

    def sent(self, message: Message) -> None:
        """A message was handed to a link."""

    def spent(self, activity: Activity, from_s: float, to_s: float, label: str = "") -> None:
        """The node has computed, waited or applied a push between two moments of its runtime's clock."""

    # ---- on a worker -----------------------------------------------------------------------------------------------

    def joined(self, client: Client, welcome: Welcome) -> None:
        """The worker has its client; messages follow."""

    def computing(self, worker: ModuleWorker, batch: Batch) -> None:
        """A gradient is about to be computed, at the worker's current parameters."""

    def computed(self, worker: ModuleWorker, batch: Batch) -> None:
        """The gradient is computed."""

    def averaged(self, worker: ModuleWorker, where: RoundId, gradient: Gradient) -> None:
        """The worker has the mean gradient of a batch that workers share; no optimizer has used it yet."""

    def began(self, work: TimedWork) -> None:
        """Work besides the gradient begins; `ended` follows on the same thread."""

    def ended(self, work: TimedWork) -> None:
        """The work that began last is done."""

    def pushed(self, handle: PushHandle) -> None:
        """A gradient was handed to all links."""

    def pulled(self, handle: PullHandle) -> None:
        """Parameters were requested."""

    # ---- on a server -----------------------------------------------------------------------------------------------

    def assigned(self, server: Server) -> None:
        """The server has its blocks."""

    def rules_changed(self, message: RuleChange) -> None:
        """A message is about to change the update rules of all blocks."""

    def answered(self, push: Push, result: PushResult) -> None:
        """A push was accepted or refused; the answer is not sent yet."""

    def applying(self, block: Block, gradient: Tensor | None, pushes: Sequence[Push]) -> None:
        """A block is about to get another version; without a gradient: by a command of the coordinator."""


def _calling_all(name: str) -> Callable[..., None]:
    def call_all(self: Observers, *args: object, **named: object) -> None:
        for observer in self.observers:
            getattr(observer, name)(*args, **named)

    return call_all


class Observers(Observer):
    """Several observers as one: each method of `Observer` calls that of all of them, in order."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self.observers = tuple(observers)

    vars().update({name: _calling_all(name) for name in vars(Observer) if not name.startswith("_")})


def join_observers(observers: Iterable[Observer]) -> Observer | None:
    """Return one observer for all of them, or None if there are none."""
    several = tuple(observers)
    return Observers(several) if len(several) > 1 else next(iter(several), None)
