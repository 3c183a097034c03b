"""Checkpoints of a loop whose workers share each batch: the state at the beginning of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rainband.errors import BadCheckpoint
from rainband.rounds.rounds import RoundExchange
from rainband.runtimes.checkpoints.place import WORKER_FILE
from rainband.runtimes.processes.worker_link import WorkerLink
from rainband.runtimes.training_loop.script_random import RandomState, continue_script, state_of_script
from rainband.worker.saving.snapshots import SnapshotRequests, copied

if TYPE_CHECKING:
    from torch import nn

    from rainband.protocol.messages import TakeSnapshot


class LoopSnapshots(SnapshotRequests):
    """Copies what a worker that joins would receive."""

    def __init__(self, link: WorkerLink, exchange: RoundExchange, module: nn.Module) -> None:
        super().__init__(steps_itself=True)
        self.link = link
        self.exchange = exchange
        self.buffer_names = [name for name, _ in module.named_buffers()]
        self.random: RandomState | None = None  # of the script, in the checkpoint from which the run continues
        self.end_state: tuple[dict[str, Any], int] | None = None  # of a run that was stopped

    def restore(self) -> None:
        """Begin with the state of the checkpoint from which the run continues, if it does."""
        checkpoint = self.link.source()
        if checkpoint is None:
            return
        state = checkpoint.state(WORKER_FILE)
        try:
            state["training"]["stopped"] = None
            self.random = state.get("random")
            self.exchange.restore(state)
        except (KeyError, TypeError, msgspec.MsgspecError) as error:
            raise BadCheckpoint(checkpoint.place, f"it is not that of a training loop ({error!r})") from None

    def continue_script(self) -> None:
        """Continue with the random numbers of the checkpoint, if there is one."""
        if self.random is not None:
            continue_script(self.random, self.link.index)

    def request(self, snapshot: TakeSnapshot, training: bool) -> None:
        """Wait for the beginning of a round: before the first one, there is nothing to write."""
        super().request(snapshot, training or not self.exchange.members)

    def take(self, wanted: TakeSnapshot) -> None:
        state, step = self.end_state or self._collected()
        self.link.save_state(wanted, state, None, step)

    def note_end(self) -> None:
        """Keep the state of the round that would be next: leaving ends the pass, and the run continues within it."""
        if self.end_state is None:
            self.end_state = self._collected()

    def _collected(self) -> tuple[dict[str, Any], int]:
        """Return a copy of the state at the beginning of a round, and the number of batches in it."""
        view = self.exchange.view
        state = {**copied(self.exchange.collect()), "buffer_names": self.buffer_names, "random": state_of_script()}
        return state, view.serial - view.epoch
