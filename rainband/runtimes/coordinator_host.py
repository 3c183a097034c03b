"""The coordinator's side of a run that is the same in every runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rainband.coordinator.coordinator import Coordinator, CoordinatorOutput
from rainband.coordinator.saving.checkpoints import Collected
from rainband.coordinator.state import FailureCause
from rainband.observer import Observer
from rainband.protocol.messages import Message, Peer
from rainband.runtimes.checkpoints.committer import Committer
from rainband.runtimes.hogwild.saving import MemoryWriter
from rainband.runtimes.hogwild.server import FROM_WORKERS, HOGWILD_SERVER, HogwildServer
from rainband.runtimes.run import Phases, View

WhyFatal = Callable[[Peer, str], str]


class CoordinatorHost:
    """Passes messages to and from the coordinator, and its events to the view.

    Where all workers share one copy of the parameters, `hogwild_server` answers in place of servers. A runtime
    supplies the clock, sends messages, and calls `tick` and, at `coordinator.due_at()`, `look`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        now: Callable[[], float],
        post: Callable[[CoordinatorOutput], None],
        view: View,
        hogwild_server: HogwildServer | None = None,
        observer: Observer | None = None,
        phase_time: Callable[[], float] | None = None,
        why_fatal: WhyFatal | None = None,
    ) -> None:
        """`why_fatal` returns why the run cannot start without a worker that is lost before it joined; "": it can."""
        self.coordinator = coordinator
        self.now = now
        self.post = post
        self.hogwild_server = hogwild_server
        self.observer = observer
        self.why_fatal = why_fatal
        self.phases = Phases(coordinator, view, phase_time or now)
        self.committer: Committer | None = None  # of checkpoints
        self.memory_writer: MemoryWriter | None = None  # of the shared parameters, for checkpoints
        if hogwild_server is not None:
            hogwild_server.join(coordinator)

    def receive(self, sender: Peer, message: Message, body: Any) -> None:
        if self.observer is not None:
            self.observer.receiving(message)
        if self.hogwild_server is not None and isinstance(message, FROM_WORKERS):
            self.send([CoordinatorOutput(HOGWILD_SERVER, message)])
        else:
            self.send(self.coordinator.receive(sender, message, self.now(), body))

    def lost(self, peer: Peer, why: str, for_good: bool = True) -> None:
        """A node's connection closed, or its process ended; `for_good`: it is not started again."""
        coordinator = self.coordinator
        self.send(coordinator.lost(peer, self.now(), why))
        state = coordinator.state
        known = (state.workers if peer.role == "worker" else state.servers).get(peer.index)
        if known is not None and known.peer.incarnation >= peer.incarnation:
            return
        forming = coordinator.state.phase == "forming"
        if forming and peer.role == "server":
            cause = FailureCause.SERVER_LOST
            self.send(coordinator.shutdown.stop("failed", f"{peer} ended before it joined ({why})", cause))
        elif fatal := self.why_fatal(peer, why) if forming and self.why_fatal is not None else "":
            self.send(coordinator.shutdown.stop("failed", fatal))
        elif peer.role == "worker" and for_good:
            self.send(coordinator.never_joins(peer, self.now(), why))

    def tick(self) -> None:
        self.send(self.coordinator.tick(self.now()))

    def observe(self) -> None:
        self.send(self.coordinator.observe(self.now()))

    def look(self) -> None:
        """A node may be overdue by now."""
        self.send(self.coordinator.look(self.now()))

    def send(self, outs: Sequence[CoordinatorOutput]) -> None:
        """Send what the coordinator has returned, and show what has happened."""
        if self.hogwild_server is not None:
            outs = self.hogwild_server.answered(self.coordinator, outs, self.now())
        post, observer, state = self.post, self.observer, self.coordinator.state
        for out in outs:
            post(out)
            if observer is not None:
                observer.sent(out.message)
        if state.events or state.phase is not self.phases.phase:
            self.phases.show()
        if self.memory_writer is not None:
            self.memory_writer.advance(self._from_memory)
        if self.committer is not None:
            self.committer.advance(self._committed)

    def _from_memory(self, message: Message) -> None:
        self.receive(HOGWILD_SERVER, message, None)

    def _committed(self, collected: Collected, name: str, error: str) -> None:
        self.send(self.coordinator.checkpoint_committed(collected, name, self.now(), error))
