"""A loop's membership in its run: it joins, reports, learns that the run stops, and leaves with the final model.

Its lifecycle is that of all workers; the user's loop takes the place of the strategy's coroutine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rainband.model.save import save_model, saving
from rainband.protocol.layout import LayoutEntry, arrange
from rainband.protocol.messages import (
    CheckpointRequest,
    Conclude,
    Dataset,
    Message,
    Paused,
    Peer,
    SampleAccount,
    StopRequest,
    Welcome,
)
from rainband.protocol.ports import Port
from rainband.rounds.encoded import EncodedExchange
from rainband.rounds.exchange import Part
from rainband.rounds.rounds import RoundExchange
from rainband.rounds.view import RoundView
from rainband.runtimes.processes.worker_link import WorkerLink
from rainband.runtimes.training_loop.loop import MAX_REASON, NOT_KNOWN_YET
from rainband.runtimes.training_loop.optimizer_checks import print_warnings
from rainband.runtimes.training_loop.split.snapshots import LoopSnapshots
from rainband.runtimes.training_loop.split.state import LoopState
from rainband.runtimes.training_loop.split.tensors import SharedTensors
from rainband.runtimes.training_loop.split.trial import TRIAL_ROUNDS
from rainband.runtimes.training_loop.users_turn import LoopEnd, LoopLifecycle
from rainband.strategy import Strategy
from rainband.transports.collectives.average import GroupAverage
from rainband.transports.collectives.shared import SharedGroup
from rainband.transports.shared_rounds import SharedBoard
from rainband.worker.client import Client
from rainband.worker.session import join_of
from rainband.worker.worker_model import Buffers, WorkerModel

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
        self.counts_samples = False  # batches come from `run`
        self.told_return = False

    def make_exchange(self, state: LoopState, like: list[Tensor]) -> RoundExchange:
        """Return the exchange with the other workers of this machine."""
        board = SharedBoard(self.link.round_files, self.link.index, like, self._idle)
        equal_parts = self.link.config.equal_parts
        on_cpu = all(tensor.device.type == "cpu" for tensor in like)  # elsewhere, whole batches may be too large
        trial_rounds = TRIAL_ROUNDS if on_cpu and self.num_workers > 1 else 0
        self.exchange = RoundExchange(board, state, time.perf_counter, equal_parts, self._waited, trial_rounds)
        if (codec := self.link.session.codec) is not None:
            self.exchange.member.encoded = EncodedExchange(codec, len(state.tensors.parameters), self.stats)
        if algorithm := self.strategy.requires.algorithm:
            timeout_s = self.link.config.failure_timeout_s
            group = SharedGroup(self.link.group_files, self.link.index, on_lost="continue", timeout_s=timeout_s)
            self.exchange.member.average = GroupAverage(group, algorithm)
        return self.exchange

    # ---- the run ----

    def join(self, tensors: SharedTensors) -> None:
        """Join the run, and return when all workers have; raise Dismissed if this one's model is another one."""
        self.link.connect()
        if self.link.index == 0:
            print_warnings(self.strategy, self.num_workers)
        entries = [_entry(name, p) for name, p in zip(tensors.names, tensors.parameters, strict=True)]
        layout = arrange(entries, [{} for optimizer in tensors.optimizers for _ in optimizer.param_groups] or [{}])
        self.snapshots = LoopSnapshots(self.link, self.exchange, tensors.model)
        join = join_of(self.strategy, layout, NOT_KNOWN_YET, custom_loop=True)
        self.link.session.prepare(self.strategy, join, SplitModel(self, tensors.model))
        self.lifecycle = LoopLifecycle(self.link.session, self.link.wait)

    @property
    def client(self) -> Client:
        assert self.link.session.client is not None
        return self.link.session.client

    @property
    def halted(self) -> str | None:
        """Return the reason for which the run ends early; None if it does not, or only this worker is to leave."""
        leases = self.client.leases
        return leases.stop_reason if leases.run_stops else None

    def checkpoint(self) -> None:
        """Ask the coordinator for a checkpoint."""
        self.link.tell(CheckpointRequest())

    def look(self) -> str | None:
        """Handle messages that have arrived; return the reason for which the run ends early, None if it does not."""
        self.link.wait(0)
        return self.halted

    def leave_if_asked(self) -> None:
        """Leave between two batches, if this worker is to, and the others go on; raise Dismissed then."""
        if not self.client.leases.leaving:
            return
        self.exchange.pause()
        self.lifecycle.end()
        while True:  # the run ends meanwhile
            self.link.wait()

    def await_stop(self) -> str:
        """Return the reason for which another worker ends the run: the coordinator is about to tell it."""
        while (reason := self.halted) is None:
            self.link.wait()
        return reason

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
        stats, member = self.stats, self.exchange.member.membership
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

    def report(self, metrics: Mapping[str, float]) -> None:
        """Report what the loop has measured."""
        self.stats.measured(metrics)
        self.link.tell(self.stats.heartbeat())

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

    def failed(self) -> None:
        """Count the open round of a loop that has raised: its mean may be in the model that is saved."""
        self.stats.account = self._account(self.exchange.last_view)

    def ended(self) -> None:
        """Count what was done: the loop has ended."""
        self.stats.account = self._account(self.exchange.view)

    def leave(self) -> None:
        """Wait for the other workers to leave, and save the model if this one is to."""
        self.lifecycle.end()
        self.link.left = True


class SplitModel(WorkerModel[Any]):
    """The module of a loop that exchanges gradients itself. Parameters and buffers come from the other workers."""

    stays = False  # the user's script continues

    def __init__(self, loop: LoopSession, module: nn.Module) -> None:
        self.loop = loop
        self.module = module

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        self.loop.link.session.snapshots = self.loop.snapshots
        return Client(me, welcome.plan, None, (), (), ports, tell)

    def worker(self, index: int, client: Client) -> SplitWorker:
        return SplitWorker(client)

    def module_of(self, worker: SplitWorker) -> nn.Module:
        return self.module

    async def train(self, strategy: Strategy, worker: SplitWorker) -> None:
        await LoopEnd()

    async def ended(self, worker: SplitWorker) -> None:
        self.loop.ended()
        self.loop.snapshots.at_boundary()  # no round follows

    async def conclude(self, worker: SplitWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float]:
        saved = getattr(self.module, "_orig_mod", self.module)  # names as before torch.compile
        with saving(conclude.path, saved):
            self.loop.exchange.take_final()
            save_model(saved, conclude.path)
        return {}


class SplitWorker:
    """A worker whose loop exchanges gradients itself, as far as the lifecycle needs one."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @property
    def seen(self) -> int:
        return self.client.stats.samples

    def buffers(self) -> bytes:
        """Return nothing: all workers have the same."""
        return b""


def _entry(name: str, parameter: nn.Parameter) -> LayoutEntry:
    shape = tuple(parameter.shape)
    if parameter.dtype in COMPLEX:
        return LayoutEntry(name, (*shape, 2), COMPLEX[parameter.dtype])
    return LayoutEntry(name, shape, str(parameter.dtype).removeprefix("torch."))
