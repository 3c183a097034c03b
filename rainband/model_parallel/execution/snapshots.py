"""Checkpoints of a replica whose workers have the optimizers of their stages.

The leader decides the moment: when no batch is in the pipeline, it sends the others an order between two work items, so
that all copy their state after the same batches. Parameters and optimizer state are written by the model's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rainband.model.containers import marked, restored
from rainband.protocol.messages import TakeSnapshot
from rainband.worker.saving.snapshots import WorkerSnapshots, copied
from rainband.worker.worker import TaskOptimizer

if TYPE_CHECKING:
    from rainband.model_parallel.execution.worker import StageWorker
    from rainband.protocol.saved_state import SavedBlock


class StageSnapshots(WorkerSnapshots):
    """Copies the state of one worker of a replica, when its leader says so."""

    worker: StageWorker

    taken = 0  # number of the last one

    def request(self, snapshot: TakeSnapshot, training: bool) -> None:
        """Write now, or when the leader's order arrives: it may have arrived before."""
        if snapshot.number <= self.taken:
            return
        self.wanted = snapshot
        if not training:
            self.at_boundary()

    def take(self, wanted: TakeSnapshot) -> None:
        """Copy the state, and hand it to the runtime."""
        self.taken = wanted.number
        if self.wanted is not None and self.wanted.number <= wanted.number:
            self.wanted = None
        state, block = self._collected()
        self.write(wanted, copied(state), block)

    def _collected(self) -> tuple[dict[str, Any], SavedBlock | None]:
        worker, accounting = self.worker, self.worker.accounting
        if accounting is None:  # it has not begun to train
            return {"buffers": dict(self.buffers())}, None
        optimizer = worker.stage_optimizer
        stepped = [] if optimizer is None else [(n, p) for n, p in self._named() if p in optimizer.state]
        training = {
            "named": worker.submodel.held_parameters(),
            "optimizer": {name: marked(optimizer.state[p]) for name, p in stepped if optimizer is not None},
            "skipped": dict(accounting.skipped),
            "scheduler": self._of_scheduler(),
        }
        return {"buffers": dict(self.buffers()), "training": training}, accounting.saved()

    def _of_scheduler(self) -> Any:
        """Return the state of the task's own scheduler, and the settings that it has changed."""
        own = self.worker.local_optimizer
        if not isinstance(own, TaskOptimizer) or own.scheduler is None:
            return None
        settings = [{key: v for key, v in group.items() if key != "params"} for group in own.optimizer.param_groups]
        return marked({"state": own.scheduler.state_dict(), "groups": settings})

    def _put_scheduler(self, saved: Any) -> None:
        own = self.worker.local_optimizer
        if saved is None or not isinstance(own, TaskOptimizer) or own.scheduler is None:
            return
        own.scheduler.load_state_dict(restored(saved["state"]))
        for group, settings in zip(own.optimizer.param_groups, restored(saved["groups"]), strict=True):
            group.update(settings)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.worker.submodel.model.named_parameters()

    @torch.no_grad()
    def put_training(self) -> None:
        """Continue with the training of the checkpoint: the worker has just made its optimizer."""
        if self.restored is None or self.restored.training is None:
            return
        worker, training = self.worker, self.restored.training
        assert worker.accounting is not None and self.restored.block is not None
        used = worker.submodel.used()  # other workers have the rest
        own = {name: parameter for name, parameter in self._named() if name in used}
        optimizer = worker.stage_optimizer
        for name, parameter in own.items():
            parameter.copy_(training["named"][name])
        in_groups = {p for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else ()
        for name in training["optimizer"].keys() & own.keys():
            if optimizer is not None and own[name] in in_groups:
                optimizer.state[own[name]] = _like(restored(training["optimizer"][name]), own[name])
        self._put_scheduler(training["scheduler"])
        worker.accounting.restore(self.restored.block, training["skipped"])


def _like(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a parameter's state, its vectors on the parameter's device."""
    return {
        name: value.to(parameter.device) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for name, value in state.items()
    }
