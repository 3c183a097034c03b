"""A loop's membership in its run: it joins, reports, learns that the run stops, and leaves with the final model."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from rainband.errors import BadCheckpoint
from rainband.model.save import save_model, saving
from rainband.protocol.layout import LayoutEntry, arrange
from rainband.protocol.messages import (
    CheckpointRequest,
    Concluded,
    Dataset,
    Ended,
    Halt,
    Message,
    Paused,
    SampleAccount,
    StopRequest,
    TakeSnapshot,
)
from rainband.rounds.exchange import Part
from rainband.rounds.rounds import RoundExchange
from rainband.rounds.view import RoundView
from rainband.runtimes.checkpoints.place import WORKER_FILE, opened
from rainband.runtimes.processes.worker_link import WorkerLink, flush_output
from rainband.runtimes.training_loop.loop import MAX_REASON, NOT_KNOWN_YET
from rainband.runtimes.training_loop.optimizer_checks import print_warnings
from rainband.runtimes.training_loop.split.state import LoopState
from rainband.runtimes.training_loop.split.tensors import SharedTensors
from rainband.runtimes.training_loop.split.trial import TRIAL_ROUNDS
from rainband.strategy import Strategy
from rainband.transports.shared_rounds import SharedBoard
from rainband.worker.saving.snapshots import copied
from rainband.worker.session import join_of
from rainband.worker.worker_model import WorkerModel

COMPLEX = {torch.complex64: "float32", torch.complex128: "float64"}


class LoopSession:
    """One worker of a run whose loops share each batch: its link to the coordinator, and its exchange."""

    def __init__(self, link: WorkerLink, strategy: Strategy) -> None:
        self.link = link
        self.strategy = strategy
        # Others may join at any time where the run listens.
        self.num_workers = max(2, link.num_workers) if link.config.listen else link.num_workers
        self.seed = link.config.seed
        self.stats = link.session.stats
        self.halted: str | None = None  # the reason for which the run ends early
        self.leaving = False  # only this worker ends
        self.counts_samples = False  # batches come from `run`
        self.told_return = False
        link.session.follower = self
        self.wanted: TakeSnapshot | None = None  # a checkpoint, at the beginning of the next round
        self.ended = False  # no round follows
        self.end_state: tuple[dict[str, Any], int] | None = None  # of a run that was stopped
        self.buffer_names: list[str] = []

    def make_exchange(self, state: LoopState, like: list[Tensor]) -> RoundExchange:
        """Return the exchange with the other workers of this machine."""
        board = SharedBoard(self.link.round_files, self.link.index, like, self._idle)
        equal_parts = self.link.config.equal_parts
        on_cpu = all(tensor.device.type == "cpu" for tensor in like)  # elsewhere, whole batches may be too large
        trial_rounds = TRIAL_ROUNDS if on_cpu and self.num_workers > 1 else 0
        self.exchange = RoundExchange(board, state, time.perf_counter, equal_parts, self._waited, trial_rounds)
        return self.exchange

    # ---- messages ----

    def join(self, tensors: SharedTensors) -> None:
        """Join the run, and return when all workers have; raise Dismissed if this one's model is another one."""
        self.link.connect()
        if self.link.index == 0:
            print_warnings(self.strategy, self.num_workers)
        self.buffer_names = [name for name, _ in tensors.model.named_buffers()]
        entries = [_entry(name, p) for name, p in zip(tensors.names, tensors.parameters, strict=True)]
        layout = arrange(entries, [{} for optimizer in tensors.optimizers for _ in optimizer.param_groups] or [{}])
        self.link.session.model = LoopModule(tensors.model)
        self.link.tell(join_of(self.strategy, layout, NOT_KNOWN_YET, custom_loop=True))
        while not self.link.session.go:
            self.link.wait()
        self.link.report_links(())

    def receive(self, message: Message) -> None:
        """Take a message of the coordinator; what concerns leases is for other strategies."""
        if isinstance(message, Halt):
            self.leaving = message.leave
            self.halted = None if message.leave else message.reason
        elif isinstance(message, TakeSnapshot):
            self.wanted = message
            if self.ended:
                self.at_boundary()

    # ---- checkpoints ----

    def restore(self) -> None:
        """Begin with the state of the checkpoint from which the run continues, if it does."""
        if not self.link.config.resume_from:
            return
        checkpoint = opened(self.link.config.resume_from)
        state = checkpoint.state(WORKER_FILE)
        try:
            state["training"]["stopped"] = None
            self.exchange.restore(state)
        except (KeyError, TypeError, msgspec.MsgspecError) as error:
            raise BadCheckpoint(checkpoint.place, f"it is not that of a training loop ({error!r})") from None

    def at_boundary(self) -> None:
        """Write a checkpoint if one is wanted: a round begins."""
        if self.wanted is None:
            return
        wanted, self.wanted = self.wanted, None
        state, step = self.end_state or self._collected()
        self.link.save_state(wanted, state, None, step)

    def note_end(self) -> None:
        """Keep the state of the round that would be next: leaving ends the pass, and the run continues within it."""
        if self.end_state is None:
            self.end_state = self._collected()

    def _collected(self) -> tuple[dict[str, Any], int]:
        """Return a copy of the state at the beginning of a round, and the number of batches in it."""
        view = self.exchange.view
        state = {**copied(self.exchange.collect()), "buffer_names": self.buffer_names}
        return state, view.serial - view.epoch

    def checkpoint(self) -> None:
        """Ask the coordinator for a checkpoint."""
        self.link.tell(CheckpointRequest())

    def look(self) -> str | None:
        """Handle messages that have arrived; return the reason for which the run ends early, None if it does not."""
        self.link.wait(0)
        return self.halted

    def leave_if_asked(self) -> None:
        """Leave between two batches, if this worker is to, and the others go on; raise Dismissed then."""
        if not self.leaving:
            return
        self.exchange.pause()
        self.link.tell(Ended(self.stats.samples))
        while True:
            self.link.wait()

    def await_stop(self) -> str:
        """Return the reason for which another worker ends the run: the coordinator is about to tell it."""
        while self.halted is None:
            self.link.wait()
        return self.halted

    def stop(self, reason: str) -> None:
        self.link.tell(StopRequest(reason[:MAX_REASON]))

    def describe(self, data: Dataset) -> None:
        """Tell the coordinator what one pass over the data is, so that it knows the length of the run."""
        self.link.tell(data)

    def pause(self) -> None:
        self.link.tell(Paused())

    # ---- waiting and counting ----

    def _idle(self) -> None:
        """Handle messages while this worker waits for others, and note for whom."""
        stats, member = self.stats, self.exchange.member
        stats.waiting, stats.held_by = True, member.lagging()
        if member.is_in:
            self.told_return = False
        elif not self.told_return:
            self.told_return = True
            self.link.tell(stats.heartbeat())  # at once: the coordinator counts a worker that was away as active
        self.link.wait(0)

    def _waited(self, seconds: float) -> None:
        self.stats.waited(seconds)
        self.stats.waiting = False

    def exchanged(self, part: Part) -> None:
        """Count a batch, at the first exchange of its gradients."""
        stats = self.stats
        stats.steps += 1
        stats.acked = stats.steps
        stats.account = self._account(self.exchange.view)
        stats.samples += part.weight if self.counts_samples else 0
        if stats.steps == 1:
            self.link.tell(stats.heartbeat())  # at once, so that views show that training has begun

    def log(self, loss: float, samples: int) -> None:
        self.stats.loss_sum += loss * samples
        self.stats.loss_samples += samples

    def failed(self) -> None:
        """Count the open round of a loop that has raised: its mean may be in the model that is saved."""
        self.stats.account = self._account(self.exchange.last_view)

    def _account(self, view: RoundView) -> SampleAccount:
        if not self.counts_samples:
            return SampleAccount(rounds=view.batches)
        return SampleAccount(
            rounds=view.batches,
            applied=view.applied,
            skipped=dict(view.skipped),
            carried_over=view.carried_over,
            not_seen=view.not_seen,
            transfers=view.transfers,
            drifted=view.drifted,
        )

    # ---- the end ----

    def leave(self, model: nn.Module) -> None:
        """Wait for the other workers to leave, and save the model if this one is to."""
        flush_output()
        self.stats.account = self._account(self.exchange.view)
        self.link.tell(self.stats.heartbeat())
        self.link.tell(Ended(self.stats.samples))
        session, self.ended = self.link.session, True
        self.at_boundary()
        while session.conclusion is None:
            self.link.wait()
        conclude, _ = session.conclusion
        saved = getattr(model, "_orig_mod", model)  # names as before torch.compile
        with saving(conclude.path, saved):
            self.exchange.take_final()
            save_model(saved, conclude.path)
        self.link.background.finish()  # the script may end before a checkpoint is written
        self.link.tell(Concluded({}))
        self.link.left = True


class LoopModule(WorkerModel[Any]):
    """The module of a loop that has its own life: it is saved if the loop of the last worker raises."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def own_module(self) -> nn.Module:
        return self.module


def _entry(name: str, parameter: nn.Parameter) -> LayoutEntry:
    shape = tuple(parameter.shape)
    if parameter.dtype in COMPLEX:
        return LayoutEntry(name, (*shape, 2), COMPLEX[parameter.dtype])
    return LayoutEntry(name, shape, str(parameter.dtype).removeprefix("torch."))
