"""Workers on threads that share each batch: one runs at a time, until it waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from rainband.rounds.board import LocalBoard, SharedMemory
from rainband.rounds.rounds import RoundExchange
from rainband.rounds.view import RoundView
from rainband.runtimes.training_loop.split.loop import SplitLoop
from rainband.runtimes.training_loop.split.state import LoopState
from rainband.transports.pytrees import as_tensor, incoming, outgoing

LIMIT_S = 60.0  # a deadlock fails the test after this time
Script = Callable[[Callable[..., Any]], nn.Module]


class Killed(BaseException):
    """Ends the thread of a worker that a test kills."""


class EncodedState:
    """A worker's state, which travels as it does between processes."""

    def __init__(self, state: LoopState) -> None:
        self.state = state

    def collect(self) -> Any:
        ready = outgoing(self.state.collect())
        return ready.structure, ready.copied()

    def apply(self, encoded: Any) -> None:
        structure, contents = encoded
        self.state.apply(incoming(structure, as_tensor(contents)))

    def fingerprint(self) -> int:
        return self.state.fingerprint()

    def has_changed(self) -> bool:
        return self.state.has_changed()


class Group:
    """The workers of a run, their shared memory, and who may run."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.memory: SharedMemory | None = None
        self.exchanges: dict[int, RoundExchange] = {}
        self.failed: BaseException | None = None
        self.trial_rounds = 0
        self.kills: dict[int, int] = {}  # worker -> the number of waits after which it is killed

    def wait_or_die(self, rank: int, until: Callable[[], bool]) -> None:
        if rank in self.kills:
            self.kills[rank] -= 1
            if self.kills[rank] < 0:
                raise Killed
        self.wait(until)

    def wait(self, until: Callable[[], bool]) -> None:
        self.changed.notify_all()
        while not until():
            if self.failed is not None:
                raise Killed
            if not self.changed.wait(LIMIT_S):
                self.failed = AssertionError("the workers wait for each other")

    def exchange(self, rank: int, state: LoopState, examples: list[Tensor], workers: int, ranks: int) -> RoundExchange:
        if self.memory is None:
            self.memory = SharedMemory(ranks, examples)
            for late in range(workers, ranks):
                self.memory.exclude(late)  # nobody waits for it at the start
        board = LocalBoard(self.memory, rank, partial(self.wait_or_die, rank))
        self.exchanges[rank] = RoundExchange(
            board, EncodedState(state), clock=lambda: 0.0, equal_parts=True, trial_rounds=self.trial_rounds
        )
        return self.exchanges[rank]

    @property
    def view(self) -> RoundView:
        """Return what the member knows that has come furthest."""
        return max((exchange.view for exchange in self.exchanges.values()), key=lambda view: view.serial)

    @property
    def is_asked(self) -> bool:
        """Return True if a worker asks to join."""
        assert self.memory is not None
        return any(words.asking is not None for words in self.memory.words)


def run_group(
    script: Script, workers: int, group: Group | None = None, joins: Sequence[threading.Event] = ()
) -> list[nn.Module]:
    """Run a script on several workers, and return their models; an error of one of them is raised."""
    group = group or Group()
    models: dict[int, nn.Module] = {}
    joined = 0

    def join(model: Any, optimizer: Any, rank: int) -> SplitLoop:
        nonlocal joined
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

        def make(state: LoopState, examples: list[Tensor]) -> RoundExchange:
            return group.exchange(rank, state, examples, workers, workers + len(joins))

        loop = SplitLoop(model, optimizers, make, max(2, workers) if joins else workers)
        joined += 1
        if rank < workers:
            group.wait(lambda: joined >= workers)
        return loop

    def work(rank: int) -> None:
        if rank >= workers:
            joins[rank - workers].wait(LIMIT_S)
        with group.changed:
            try:
                models[rank] = script(lambda model, optimizer: join(model, optimizer, rank))
            except Killed:
                pass
            except BaseException as error:
                group.failed = group.failed or error
            finally:
                if group.memory is not None:
                    group.memory.exclude(rank)  # as the launcher does when it has reaped a process
                group.changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers + len(joins))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.failed is not None:
        raise group.failed
    return [models[rank] for rank in sorted(models)]
