"""A worker's part of a checkpoint: its buffers, and where workers have the optimizer, the state of the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rainband.model.containers import marked, restored
from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.data_plan import BatchRange
from rainband.protocol.saved_state import SavedBlock
from rainband.strategy import Batch
from rainband.worker.shared_batches import WorkerRounds, batch_at

if TYPE_CHECKING:
    from rainband.protocol.messages import TakeSnapshot
    from rainband.worker.worker import ModuleWorker

NamedBuffers = Callable[[], Mapping[str, Tensor]]
Write = Callable[["TakeSnapshot", object, SavedBlock | None], None]


class SnapshotRequests:
    """Takes the requests for checkpoints, and fulfils each when the worker's state is of one moment."""

    def __init__(self, steps_itself: bool) -> None:
        """`steps_itself`: the worker has the optimizer, so its state changes between two batches only."""
        self.steps_itself = steps_itself
        self.wanted: TakeSnapshot | None = None

    def request(self, snapshot: TakeSnapshot, training: bool) -> None:
        """Write now, or between two batches."""
        self.wanted = snapshot
        if not (training and self.steps_itself):
            self.at_boundary()

    def at_boundary(self) -> None:
        """Write what is wanted."""
        if self.wanted is not None:
            wanted, self.wanted = self.wanted, None
            self.take(wanted)

    def take(self, wanted: TakeSnapshot) -> None:
        """Copy the state, and hand it to the runtime."""
        raise NotImplementedError


class WorkerSnapshots(SnapshotRequests):
    """Copies the state of a worker that trains a task."""

    def __init__(self, worker: ModuleWorker, steps_itself: bool, write: Write, buffers: NamedBuffers) -> None:
        """`buffers` returns those of the model, or of this worker's part of it, by their names in the model."""
        super().__init__(steps_itself)
        self.buffers = buffers
        self.worker = worker
        self.write = write
        self.restored: SavedWorker | None = None  # of the checkpoint from which the run continues

    def put_training(self) -> None:
        """Continue with the training of the checkpoint: the worker has just made its optimizer."""
        if self.restored is None:
            return
        if self.restored.training is not None:
            try:
                self.restored.put_training(self.worker)
            except (KeyError, TypeError, AssertionError) as error:
                raise ValueError(
                    f"the checkpoint is of workers with another kind of state ({error!r}): begin a new run with its "
                    "parameters (--from)."
                ) from None
        elif self.restored.optimizer is not None and self.worker.local_optimizer is not None:
            self.worker.local_optimizer.load_state_dict(restored(self.restored.optimizer))

    def take(self, wanted: TakeSnapshot) -> None:
        state, block = state_of(self.worker, self.buffers())
        self.write(wanted, copied(state), block)


class SavedWorker(NamedTuple):
    """The state of a worker in a checkpoint."""

    buffers: dict[str, Tensor]
    training: Any = None  # where workers have the optimizer: parameters, optimizer, and what is done
    block: SavedBlock | None = None
    optimizer: Any = None  # of a worker whose steps do not count: others hold the parameters

    @torch.no_grad()
    def put_buffers(self, own: Mapping[str, Tensor], has_whole_model: bool) -> None:
        """Copy the buffers into the worker's model, or its part of it; ValueError if they are those of another."""
        others = self.buffers.keys() if has_whole_model else self.buffers.keys() & own.keys()
        if own.keys() != others:
            differing = ", ".join(sorted(own.keys() ^ others))
            raise ValueError(f"the checkpoint has other buffers than this model: {differing}.")
        for name, buffer in own.items():
            buffer.copy_(self.buffers[name])

    @torch.no_grad()
    def put_training(self, worker: ModuleWorker) -> None:
        """Copy the parameters and the optimizer's state into the worker, which has just made its optimizer."""
        if worker.rounds is not None:
            put_rounds(worker.rounds, self.training)
            return
        assert worker.local_optimizer is not None and worker.accounting is not None and self.block is not None
        for own, values in zip(worker.flat.vectors, self.training["vectors"], strict=True):
            own.copy_(values)
        worker.local_optimizer.load_state_dict(restored(self.training["optimizer"]))
        worker.accounting.restore(self.block, self.training["skipped"])


def put_rounds(rounds: WorkerRounds, saved: Mapping[str, Any]) -> None:
    """Continue with the rounds of a checkpoint. A run that was stopped has its last one from then."""
    training = {**saved, "stops": False}
    if pending := dict(training.get("pending", {})):
        own = pending.pop(str(training.get("rank")), ())  # those of others are in models that are not saved
        lost = [*training["lost"], *chain.from_iterable(pending.values())]
        training |= {"pending": {}, "lost": lost, "done": training["done"] + len(own)}
    rounds.state.apply(training)
    rounds.tell()


def state_of(worker: ModuleWorker, buffers: Mapping[str, Tensor]) -> tuple[dict[str, Any], SavedBlock | None]:
    """Return the state that a SavedWorker is made of, and what the worker has accepted."""
    state: dict[str, Any] = {"buffers": dict(buffers)}
    if worker.rounds is not None:
        return {**state, "training": worker.rounds.state.collect()}, block_of_rounds(worker.rounds)
    if worker.local_optimizer is None:
        return state, None
    if worker.accounting is None:  # servers count what is applied
        return {**state, "optimizer": marked(worker.local_optimizer.state_dict())}, None
    training = {
        "vectors": list(worker.flat.vectors),
        "optimizer": marked(worker.local_optimizer.state_dict()),
        "skipped": dict(worker.accounting.skipped),
    }
    return {**state, "training": training}, worker.accounting.saved()


def block_of_rounds(rounds: WorkerRounds) -> SavedBlock:
    """Return the batches that are done as an accepted set."""
    plan, skipped = rounds.plan, rounds.skipped.total()
    following, left_out = rounds.open_numbers()
    over = following >= plan.num_batches
    last = Batch(plan.num_portions, 0, 0) if over else batch_at(plan, following)
    accepted = AcceptedSet.of_portions(plan, last.portion, {last.portion: (1 << last.k) - 1} if last.k else {})
    for number in left_out:
        batch = batch_at(plan, number)
        accepted.remove((BatchRange(batch.portion, batch.k, batch.k + 1, 0),))
    return SavedBlock(
        version=accepted.count, first_open=accepted.first_open, open=accepted.open, applied=accepted.count - skipped
    )


def copied(value: Any) -> Any:
    """Copy all tensors: training goes on while they are written."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value
