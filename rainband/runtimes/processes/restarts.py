"""Decides which lost workers are started again, and when. The next incarnation of a worker takes its rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rainband.coordinator.state import BEFORE_THE_END, RunState
from rainband.protocol.messages import Peer
from rainband.runtimes.machines.joiner import pause_s
from rainband.runtimes.processes.entries import FINE

MOST_FAILED_STARTS = 5  # of one worker, one after the other, before it is given up


class Restarts:
    """The last incarnation of each worker, and those that are to be started again."""

    def __init__(self, state: RunState, causes: Mapping[Peer, str]) -> None:
        """`causes`: how processes ended."""
        self.state, self.causes = state, causes
        self.incarnations: dict[int, int] = {}  # rank -> the last one that was started
        self.failed_starts: dict[int, int] = {}  # rank -> incarnations that never joined, since the last that did
        self.start_at: dict[int, float] = {}  # rank -> when to start a lost worker again

    def next(self, rank: int) -> int:
        """Return the incarnation of a worker that is being started."""
        self.start_at.pop(rank, None)
        self.incarnations[rank] = self.incarnations.get(rank, -1) + 1
        return self.incarnations[rank]

    def is_last(self, peer: Peer) -> bool:
        return self.incarnations.get(peer.index) == peer.incarnation

    def peers(self) -> list[Peer]:
        return [Peer("worker", rank, life) for rank, life in self.incarnations.items()]

    def may_return(self, peer: Peer) -> bool:
        """Return True if a worker whose process has ended is started again, if it was not replaced before.

        A worker of a replica ends cleanly if another one is lost: it returns with that one.
        """
        state = self.state
        return (
            state.phase in BEFORE_THE_END
            and state.outcome == "finished"
            and peer.index not in state.missing
            and (self.causes.get(peer) != FINE or state.settings.workers_per_replica > 1)
            and self.failed_starts.get(peer.index, 0) < MOST_FAILED_STARTS
        )

    def due(self, now: float, is_lost: Callable[[Peer], bool], give_up: Callable[[Peer], None]) -> list[int]:
        """Return the ranks of workers to start now."""
        for peer in self.peers():
            if not self.may_return(peer):
                self.start_at.pop(peer.index, None)
            elif peer.index not in self.start_at and is_lost(peer):
                self.start_at[peer.index] = now + self._pause_s(peer)
                if not self.may_return(peer):
                    give_up(peer)
        return [rank for rank, start_at in self.start_at.items() if start_at <= now]

    def _pause_s(self, peer: Peer) -> float:
        """Return how long to wait: a worker that had joined is started at once, others later each time."""
        worker = self.state.workers.get(peer.index)
        if worker is not None and worker.peer == peer:
            self.failed_starts[peer.index] = 0
            return 0.0
        failed = self.failed_starts[peer.index] = self.failed_starts.get(peer.index, 0) + 1
        return pause_s(failed)
