"""The server of a run whose parameters are in shared memory: answers the coordinator from the tables there.

No gradients arrive here, because workers update the parameters in place. It is a state machine like other servers,
and runs beside the coordinator.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rainband.coordinator.coordinator import Coordinator, CoordinatorOutput
from rainband.errors import BadCheckpoint
from rainband.protocol import messages
from rainband.protocol.accounting import NOT_FINITE
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import Message, Peer
from rainband.runtimes.checkpoints.place import opened
from rainband.runtimes.hogwild.memory import SharedParameters, offsets_of
from rainband.runtimes.hogwild.saving import restore_memory

HOGWILD_SERVER = Peer("server", 0)
FROM_WORKERS = (messages.ReportRequest, messages.BlockReady)  # over their connection to the coordinator


class HogwildServer:
    """Makes the shared memory when its size is known, and reports what its tables say."""

    def __init__(self, make_room: Callable[[int], Any], in_pairs: bool = False, resume_from: str = "") -> None:
        """`make_room(num_bytes)` returns writable memory that is zero. `in_pairs`: each worker has its own model.

        `resume_from`: the checkpoint from which the run continues.
        """
        self.resume_from = resume_from
        self.wanted: messages.TakeSnapshot | None = None  # a checkpoint that is to be written
        self.applied_before = 0  # batches, before the run continued
        self.left_words: dict[int, int] = {}  # what lost workers have left in their words
        self.make_room = make_room
        self.in_pairs = in_pairs
        self.memory: SharedParameters | None = None
        self.blocks: tuple[BlockSpec, ...] = ()
        self.tuned = 0  # the number of the last adjustment
        self.cut_short: set[int] = set()  # workers that were lost during an update

    def join(self, coordinator: Coordinator) -> None:
        """Join as the only server, before any worker does."""
        coordinator.receive(HOGWILD_SERVER, messages.ServerJoin(messages.Address("", 0)), 0.0)
        coordinator.state.events.clear()  # this is not worth an event

    def answered(
        self, coordinator: Coordinator, outs: Sequence[CoordinatorOutput], now: float
    ) -> list[CoordinatorOutput]:
        """Answer the messages for this server, and return the others."""
        waiting, left = deque(outs), list[CoordinatorOutput]()
        while waiting:
            out = waiting.popleft()
            if out.to != HOGWILD_SERVER:
                left.append(out)
                continue
            if isinstance(out.message, messages.Pull):
                for params, values in self.read(out.message):
                    waiting += coordinator.receive(HOGWILD_SERVER, params, now, values)
            for reply in self.receive(out.message):
                waiting += coordinator.receive(HOGWILD_SERVER, reply, now)
        return left

    def receive(self, message: Message) -> list[Message]:
        """Take one message, and return the answers to the coordinator."""
        if isinstance(message, messages.Assign):
            num_models = message.num_replicas if self.in_pairs else 1
            sizes = message.blocks, message.plan, message.num_replicas, num_models
            self.blocks = message.blocks
            self.memory = SharedParameters(self.make_room(offsets_of(*sizes).num_bytes), *sizes)
            return self._restored(self.memory) if message.restores else []
        memory = self.memory
        if memory is None:
            return []
        match message:
            case messages.BlockReady():
                return [messages.Ready()]
            case messages.ReportRequest():
                return [self.report()]
            case messages.Flush():
                return [self.report(flushed=True)]
            case messages.Revoke():
                memory.fence(message.portion, message.lease)
                masks = (memory.accepted_set(message.portion),)
                return [messages.AcceptedBatches(message.portion, message.lease, masks)]
            case messages.Forget() if memory.is_writing(message.worker):
                self.cut_short.add(message.worker)
                self.left_words[message.worker] = memory.word(message.worker)
            case messages.TakeSnapshot():
                self.wanted = message
            case messages.AdjustRule() if message.number > self.tuned:
                self.tuned = message.number
                memory.lower(message.lr_factor)
        return []

    def _restored(self, memory: SharedParameters) -> list[Message]:
        try:
            self.applied_before = restore_memory(memory, self.blocks, opened(self.resume_from))
        except (BadCheckpoint, ValueError, OSError) as error:
            return [messages.Failed(0, f"the run cannot continue: {error}", "")]
        return [self.report(), messages.Ready()]

    def read(self, pull: messages.Pull) -> Iterator[tuple[messages.Params, bytes]]:
        """Yield the parameters block by block."""
        assert self.memory is not None, "parameters are requested at the end of a run"
        vectors = dict(zip(sorted({block.vector for block in self.blocks}), self.memory.mean(), strict=True))
        for block in self.blocks:
            values = vectors[block.vector][block.start : block.stop].view(torch.uint8).numpy().tobytes()
            yield messages.Params(block.index, pull.sequence, term=0, version=0), values

    def report(self, flushed: bool = False) -> messages.Report:
        """Return a server's report: accepted batches and measurements."""
        assert self.memory is not None, "reports begin with the run"
        memory, accepted_set = self.memory, self.memory.accepted_sets()
        full = accepted_set == memory.all_batches
        first_open = int(np.argmin(full)) if not full.all() else len(full)
        begun = np.flatnonzero(accepted_set).tolist()
        num_skipped = sum(memory.skipped_in(portion).bit_count() for portion in begun)
        accepted = int(np.unpackbits(accepted_set.view(np.uint8)).sum())
        staleness = memory.staleness()
        total: Counter[int] = sum(staleness.values(), Counter())
        updates = total.total() + self.applied_before
        return messages.Report(
            first_open=first_open,
            full=tuple((first_open + np.flatnonzero(full[first_open:])).tolist()),
            accepted=accepted,
            updates=updates,
            blocks=(messages.Tally(accepted, updates, num_skipped, 0),),
            skipped={NOT_FINITE: num_skipped} if num_skipped else {},
            refused={"revoked": refused} if (refused := memory.refused()) else {},
            staleness={worker: dict(counts) for worker, counts in staleness.items()},
            flushed=flushed,
            missed=(messages.Missed(0, updates, sum(n * times for n, times in total.items()), max(total, default=0)),),
            lock_free=not self.in_pairs,
            in_pairs=self.in_pairs,
            cut_short=len(self.cut_short),
        )
