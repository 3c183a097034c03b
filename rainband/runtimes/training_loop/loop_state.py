"""A worker's part of a checkpoint, in a custom training loop whose batches are leased.

The servers write parameters, optimizer state and accepted batches. One worker writes the buffers of its model, the
settings of its optimizers, and the objects that the loop has registered. Where no servers hold them, it also writes its
parameters and its optimizers' state, between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rainband.checkpoints.read import Checkpoint
from rainband.errors import BadCheckpoint
from rainband.model.containers import marked, restored
from rainband.model.flat_parameters import Flat
from rainband.protocol.messages import TakeSnapshot
from rainband.protocol.saved_state import SavedBlock
from rainband.runtimes.checkpoints.place import WORKER_FILE
from rainband.runtimes.training_loop.script_random import continue_script, state_of_script
from rainband.runtimes.training_loop.split.state import HasState, check_has_state
from rainband.worker.model_rounds import ModelRounds
from rainband.worker.saving.snapshots import SnapshotRequests, Write, block_of_rounds, copied, put_rounds
from rainband.worker.worker import LocalAccounting

Group = dict[str, Any]


class LeasedLoopState(SnapshotRequests):
    """The state of one worker's loop: collected for checkpoints, and put back when the run continues."""

    def __init__(
        self, model: nn.Module, flat: Flat, optimizers: Sequence[Optimizer], served: bool, write: Write, rank: int
    ) -> None:
        """`served`: the servers run the optimizers."""
        super().__init__(steps_itself=False)
        self.model = model
        self.flat = flat
        self.optimizers = optimizers
        self.served = served
        self.write = write
        self.rank = rank
        self.registered: list[HasState] = []
        self.accounting: LocalAccounting | None = None  # where there are no servers
        self.received: dict[str, Any] | None = None  # of a checkpoint, until the loop draws its first batch
        self.end: tuple[dict[str, Any], SavedBlock | None] | None = None  # of a run that stops within a round
        self.is_open = False  # a batch was drawn, and its step may not be over

    def register(self, objects: Sequence[HasState]) -> None:
        for given in objects:
            check_has_state(given)
            self.registered.append(given)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def request(self, snapshot: TakeSnapshot, training: bool) -> None:
        """Write now, or when the next batch is drawn: schedulers step after the optimizer."""
        self.wanted = snapshot
        if not (training and self.is_open):
            self.at_boundary()

    def at_boundary(self) -> None:
        """Write what is wanted: the loop draws its next batch."""
        self.is_open = False
        super().at_boundary()

    def take(self, wanted: TakeSnapshot) -> None:
        state, block = self.end or self._collected()
        self.write(wanted, state, block)

    def note_end(self) -> None:
        """Keep the state before a round that ends without an update: the run stops, and continues with that round."""
        self.end = self._collected()

    def _collected(self) -> tuple[dict[str, Any], SavedBlock | None]:
        state: dict[str, Any] = {"buffers": dict(self.model.named_buffers()), "loop": self._of_loop()}
        if self.accounting is None:
            return copied(state), None
        state["training"] = {"vectors": list(self.flat.vectors), "skipped": dict(self.accounting.skipped)}
        return copied(state), self.accounting.saved()

    def _of_loop(self) -> dict[str, Any]:
        if self.received is not None:  # the loop has not come to its first batch
            received: dict[str, Any] = self.received
            return received
        own = None if self.served else [marked(optimizer.state_dict()) for optimizer in self.optimizers]
        return {
            "groups": marked([_settings(group) for group in self._groups()]),
            "optimizers": own,
            "registered": [marked(given.state_dict()) for given in self.registered],
            "random": state_of_script(),
        }

    def _groups(self) -> list[Group]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    # ---- continuing ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Put the state of a checkpoint into the model; the rest follows when the loop has come to its first batch."""
        try:
            state = checkpoint.state(WORKER_FILE)
            buffers, received = state["buffers"], state["loop"]
            own = dict(self.model.named_buffers())
            if own.keys() != buffers.keys() or len(received["groups"]) != len(self._groups()):
                raise ValueError("its model or its optimizers have other buffers or parameter groups")
            for name, buffer in own.items():
                buffer.copy_(buffers[name])
            if self.accounting is not None:
                training = state["training"]
                for vector, values in zip(self.flat.vectors, training["vectors"], strict=True):
                    vector.copy_(values)
                self.accounting.restore(checkpoint.manifest.blocks[0], training["skipped"])
        except (KeyError, TypeError, IndexError, ValueError, RuntimeError) as error:
            raise BadCheckpoint(checkpoint.place, f"it is not that of this training loop ({error})") from None
        self.received = received

    def begin_batch(self) -> None:
        """Note that a batch is drawn. Before the first, put back the state of what the loop's own code has made."""
        self.is_open = True
        received, self.received = self.received, None
        if received is None:
            return
        if len(received["registered"]) != len(self.registered):
            raise ValueError(
                f"this loop has registered {len(self.registered)} objects, and that of the checkpoint "
                f"{len(received['registered'])}: call run.register(...) with the same ones."
            )
        if received["optimizers"] is not None and not self.served:
            for optimizer, values in zip(self.optimizers, received["optimizers"], strict=True):
                optimizer.load_state_dict(restored(values))
        if self.registered:  # otherwise schedulers have followed the passes that were over
            for group, settings in zip(self._groups(), restored(received["groups"]), strict=True):
                group.update(settings)
        for given, values in zip(self.registered, received["registered"], strict=True):
            given.load_state_dict(restored(values))
        if "random" in received:
            continue_script(received["random"], self.rank)


class LocalLoopState(LeasedLoopState):
    """The state of a loop whose worker trains a model of its own: that of the beginning of a round.

    A round begins inside the optimizer's step that ends the one before. The objects of the loop follow when it draws
    the next batch, because schedulers step after the optimizer.
    """

    rounds: ModelRounds | None = None
    begun: tuple[dict[str, Any], SavedBlock] | None = None  # of a round, until the loop draws its first batch
    saved: dict[str, Any] | None = None  # the rounds of a checkpoint, until then

    def request(self, snapshot: TakeSnapshot, training: bool) -> None:
        """Write now, or in the next round."""
        self.wanted = snapshot
        if not training:
            super().at_boundary()

    def begin_round(self) -> None:
        """Copy the state of the round that begins, if a checkpoint is wanted."""
        if self.wanted is not None:
            self.begun = self._of_rounds()

    def at_boundary(self) -> None:
        self.is_open = False
        if self.begun is not None:
            super().at_boundary()

    def _of_rounds(self) -> tuple[dict[str, Any], SavedBlock]:
        assert self.rounds is not None, "rounds are entered before training"
        return copied(self.rounds.state.collect()), block_of_rounds(self.rounds)

    def _collected(self) -> tuple[dict[str, Any], SavedBlock | None]:
        (training, block), self.begun = self.begun or self._of_rounds(), None
        state = {"buffers": dict(self.model.named_buffers()), "loop": self._of_loop()}
        return {**copied(state), "training": training}, block

    def restore(self, checkpoint: Checkpoint) -> None:
        assert self.rounds is not None, "rounds are entered before training"
        super().restore(checkpoint)
        try:
            self.saved = checkpoint.state(WORKER_FILE)["training"]
            put_rounds(self.rounds, {**self.saved, "optimizer": None})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadCheckpoint(checkpoint.place, f"it is not that of this training loop ({error})") from None

    def begin_batch(self) -> None:
        saved, self.saved = self.saved, None
        own = None if self.rounds is None else self.rounds.worker.local_optimizer
        if saved is not None and own is not None and self.rounds is not None and self.rounds.done == saved["done"]:
            own.load_state_dict(restored(saved["optimizer"]))  # later, another worker has given this one its state
        super().begin_batch()


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name != "params"}
