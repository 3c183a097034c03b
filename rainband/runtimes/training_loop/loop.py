"""A user's own training loop as a worker: their optimizer.step() drives the strategy's coroutine.

    with rainband.join(model, optimizer) as run:
        for x, y in run.batches(dataset, batch_size=64):
            ...                                            their zero_grad, forward, backward, step

Entering sends the optimizer's class, settings and state to the servers and fetches the common parameters. Each step
hands its gradient, named by the batches drawn since the step before, to the strategy, and goes on with it until it
wants the next one. Leaving waits for the others, and brings the final parameters and the optimizer's state back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.model.optimizer_state import put_state, settings_of, spec_of, state_of
from rainband.model.save import save_model
from rainband.protocol.messages import Conclude, Dataset, LeaseEnd, Message, Paused, Peer, Welcome
from rainband.protocol.optimizer_spec import changed_numbers, plain
from rainband.protocol.ports import Port
from rainband.runtimes.training_loop.batches import LoopBatches, described, loader
from rainband.runtimes.training_loop.coroutine import LoopCoroutine, LoopEnd, LoopParameters, LoopWorker
from rainband.runtimes.training_loop.optimizer_checks import check, following, takes_any_optimizer
from rainband.runtimes.training_loop.script_random import own_random_numbers
from rainband.runtimes.training_loop.step_hooks import StepHooks, unwrapped
from rainband.strategy import Batch, Strategy, WorkItem
from rainband.worker.client import Client
from rainband.worker.session import Session, join_of
from rainband.worker.worker import set_buffers
from rainband.worker.worker_model import Buffers, WorkerModel, pull_final, pull_latest

NOT_KNOWN_YET = Dataset(fingerprint="", num_samples=0, batch_size=1, epochs=1)  # until run.batches(...) is called


class Membership(Protocol):
    """This process's place in a run."""

    index: int
    num_workers: int
    strategy: Strategy
    optimizers: Sequence[str]  # module:Class of those that servers may import besides torch's own
    session: Session
    left: bool
    asked_rank: bool

    def connect(self) -> None: ...

    def tell(self, message: Message, body: bytes | None = None) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...


class TrainingLoop:
    """One training loop among several: what `with rainband.join(...) as run` gives."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], member: Membership) -> None:
        self.model = model
        self.optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        self.member = member
        self.index = member.index
        self.num_workers = member.num_workers
        self.strategy = following(member.strategy, self.optimizers)
        self.rounds = self.strategy.requires.waits == "rounds"
        self.served = not takes_any_optimizer(self.strategy)  # the servers run the user's optimizer
        self.num_epochs = 0  # 0: as many as the loop goes on for
        self.planned = False
        check(self.model, self.optimizers, member.strategy, member.optimizers)

    # ---- in and out ------------------------------------------------------------------------------------------------

    def __enter__(self) -> TrainingLoop:
        self.settings = settings_of(self.optimizers)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        pairs = zip(groups, self.settings, strict=True)
        self.flat = Flat(self.model, [{"params": group["params"], **settings} for group, settings in pairs])
        self.hooks = StepHooks(self.optimizers, self._step, self._infinite_step)
        self.member.connect()
        optimizer = spec_of(self.optimizers) if self.served else None
        join = join_of(self.strategy, self.flat.layout, NOT_KNOWN_YET, custom_loop=True, optimizer=optimizer)
        self.member.session.prepare(self.strategy, join, LoopModel(self))
        self.suspended = LoopCoroutine(self.member.session, self.member.wait)
        own_random_numbers(self.index)
        self.draws = LoopBatches(self.client, self.member.wait, lambda: self.suspended.end_item())
        self.state_hooks = self._guard_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hooks.remove()
        for hook in self.state_hooks:
            hook.remove()
        try:
            if kind is None or (kind is KeyboardInterrupt and self.client.stopping):
                self._leave()
        finally:
            self.flat.release()

    def _leave(self) -> None:
        """Settle what is open, wait until everyone has, and take the results home."""
        self.skip("never stepped on")
        self.suspended.finish()
        self.member.left = True

    @property
    def client(self) -> Client:
        assert self.member.session.client is not None
        return self.member.session.client

    def _wait(self) -> None:
        self.member.wait()

    # ---- data ------------------------------------------------------------------------------------------------------

    def epochs(self, number: int) -> Iterator[int]:
        """Say how many passes over the data there will be: `for epoch in run.epochs(10):`."""
        if number < 1:
            raise ValueError(f"run.epochs({number}): give 1 or more.")
        if self.planned:
            raise ValueError("run.epochs(...) comes before the first run.batches(...): it is part of the plan.")
        self.num_epochs = number
        return self._epochs()

    def _epochs(self) -> Iterator[int]:
        for epoch in range(self.num_epochs):
            if self.client.stopping:
                return
            yield epoch

    def batches(self, dataset: Any, batch_size: int = 1, **loader_arguments: Any) -> Iterator[Any]:
        """One pass over the data, shared with the other workers: this one's part of it, batch by batch.

        Arguments are those of a DataLoader, such as collate_fn and num_workers. Who is fast gets more batches. All
        together a pass takes every sample once.
        """
        self._plan(dataset, batch_size, loader_arguments)
        # A round's next batch is known when the round begins: fetching ahead could only fetch the wrong one.
        return self._one_pass(loader(dataset, self.draws, loader_arguments, ahead=not self.rounds))

    def _plan(self, dataset: Any, batch_size: int, arguments: dict[str, Any]) -> None:
        if self.num_epochs and self.draws.passes >= self.num_epochs:
            raise ValueError(f"all {self.num_epochs} passes are over: say how many there are with run.epochs(...).")
        if self.planned:
            plan = self.client.plan
            if (len(dataset), batch_size) != (plan.num_samples, plan.batch_size):
                raise ValueError(
                    f"run.batches(...) drew batches of {plan.batch_size} from {plan.num_samples} samples, and now "
                    f"{batch_size} from {len(dataset)}: a run has one data set; use a DataLoader for any other."
                )
            return
        before = self.client.plan
        self.member.tell(described(dataset, batch_size, self.num_epochs, arguments))
        while self.client.plan is before:
            self._wait()
        self.planned = True

    def _one_pass(self, batches: Any) -> Iterator[Any]:
        draws = self.draws
        draws.begin_pass()
        try:
            while not draws.pass_is_over:
                for samples in batches:
                    batch = draws.hand_over()
                    if batch is not None and self._begin(batch):
                        self.hooks.be_last()
                        yield samples
                        self._refuse_to_accumulate()
        finally:
            draws.put_back()

    def _begin(self, batch: Batch) -> bool:
        if not self.rounds:
            return True
        if self.suspended.begin(WorkItem((batch,), self._round(batch))):
            return True
        self.draws.take()  # the others have done it
        return False

    def _refuse_to_accumulate(self) -> None:
        if self.rounds and self.draws.unstepped:
            raise ValueError(
                f"{self._name} works in rounds of one step per batch, and this batch was not stepped on: call "
                "run.skip() for a batch you leave out; instead of accumulating gradients give a larger batch_size."
            )

    def _round(self, batch: Batch) -> int:
        return self.client.plan.round_of(batch.portion, batch.k)

    @property
    def progress(self) -> float:
        """Return the progress of the run from 0 to 1, equal on every worker at the same batch, for schedules."""
        if not self.num_epochs:
            raise ValueError("how far the run is can be said when its length is: write `for epoch in run.epochs(10):`.")
        if self.client.finished:
            return 1.0
        last = self.draws.last
        return 0.0 if last is None else self.client.plan.progress(last.portion, last.k)

    def skip(self, reason: str = "skipped by the loop") -> None:
        """Leave out the batches drawn since the last step, so that the next one is not named after them."""
        batches = self.draws.take()
        if not batches:
            return
        self.suspended.worker.skip(batches, reason)
        if self.rounds:
            self.suspended.end_round()
            self._see_through(batches)

    def log(self, *, loss: float | Tensor) -> None:
        """Tell the loss of the batches at hand, for those who watch. Nothing depends on it, so it may be left out."""
        stats, plan, batch = self.client.stats, self.client.plan, self.draws.last
        samples = plan.samples_in(batch.portion, batch.k) if self.planned and batch is not None else 1
        stats.loss_sum += (loss.item() if isinstance(loss, Tensor) else float(loss)) * samples
        stats.loss_samples += samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nobody waits for this worker: for an evaluation that takes long. Its batches go to others."""
        if self.draws.unstepped:
            raise ValueError("run.paused() while a batch is open: step on it, or call run.skip(), before.")
        self.suspended.end_item()
        while self.client.pushes.in_flight:
            self._wait()
        self.draws.forget()
        self.member.tell(Paused())
        yield

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _step(self, optimizer: Optimizer, unscale: float) -> None:
        """The user has called step(): the strategy gets the gradient, and goes on until it wants the next."""
        self.member.wait(0)  # what has come meanwhile
        self._heed_stop()
        self.flat.check()
        batches = self.draws.take()
        if self.rounds and not batches:
            raise ValueError(
                f"{self._name} works in rounds of one step per batch of run.batches(...), and there is no new one: use "
                "downpour for steps without a batch and for a loader of your own."
            )
        self._note_own_loader()
        self._note_settings()
        gradient = self._gradient(optimizer, unscale, batches)
        self._check_identity(gradient)
        self.suspended.step(gradient)
        if self.draws.end_an_item(batches):
            self.suspended.end_item()
        self._see_through(batches)

    def _check_identity(self, gradient: Gradient) -> None:
        """Raise an error if the module's parameters are not those of the join; checked rarely."""
        steps = self.client.stats.steps
        if steps & (steps - 1) == 0 or all(tensor is None for tensor in gradient.tensors):
            self.flat.check_identity()

    def _note_own_loader(self) -> None:
        """Said once, by one of them: each may be going over the same data."""
        if self.planned or self.client.stats.steps or self.index or self.num_workers == 1:
            return
        if not self.member.asked_rank:
            print(
                "rainband: this loop uses its own data loader, so every worker iterates over all of the data. To "
                "divide it among the workers, use run.batches(...), or rainband.rank() and rainband.num_workers().",
                file=sys.stderr,
            )

    def _infinite_step(self) -> None:
        self.skip("not finite")

    def _gradient(self, optimizer: Optimizer, unscale: float, batches: tuple[Batch, ...]) -> Gradient:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        pairs = zip(self.flat.parameters, self.flat.gradients(), strict=True)
        tensors = [gradient if id(parameter) in own else None for parameter, gradient in pairs]
        if unscale != 1.0:
            tensors = [None if tensor is None else tensor * unscale for tensor in tensors]
        elif self.suspended.worker.steps_per_item > 1:  # the strategy keeps it, and the next backward writes there
            tensors = [None if tensor is None else tensor.clone() for tensor in tensors]
        samples = sum(self.client.plan.samples_in(batch.portion, batch.k) for batch in batches)
        stats = self.client.stats
        stats.steps += 1
        stats.samples += samples
        if stats.steps == 1:
            self.member.tell(stats.heartbeat())  # at once: people watch for the first sign of life
        return Gradient(tensors, batches, max(1, samples), 0.0)

    def _step_now(self, gradients: Sequence[Tensor | None]) -> None:
        self.hooks.step_now(self.flat.parameters, gradients)

    def _note_settings(self) -> None:
        """Send settings that a scheduler has changed with the next push."""
        now = settings_of(self.optimizers)
        if now == self.settings:
            return
        if len(now) != len(self.settings):
            raise ValueError("the optimizer has other parameter groups than at join: add them before rainband.join.")
        if self.served:
            kind = type(self.optimizers[0]).__name__
            for number, (old, new) in enumerate(zip(self.settings, now, strict=True)):
                changed_numbers(kind, number, plain(old), new)
            self.client.pushes.groups = tuple(now)
        self.settings = now

    def _see_through(self, batches: tuple[Batch, ...]) -> None:
        """Wait, in rounds, until the step has its new parameters, which need the other workers' batches."""
        if not self.rounds or not batches:
            return
        round_, stats = self._round(batches[-1]), self.client.stats
        while not self.client.is_through(round_) and not self.client.stopping:
            stats.waiting = True
            self._wait()
        stats.waiting = False

    def _heed_stop(self) -> None:
        """A loop over run.batches(...) ends by itself; one over a loader of its own must be interrupted."""
        if self.client.stopping and not self.planned:
            raise KeyboardInterrupt("the run is being stopped")

    # ---- the optimizer's state, which is on the servers --------------------------------------------------------------

    def _fetch_state(self) -> None:
        fetched = self.client.fetch_state()
        while not fetched.ready():
            self._wait()
        put_state(self.optimizers, self.flat.parameters, fetched.gathered.state)

    def _guard_state(self) -> list[Any]:
        """Saving the optimizer inside the loop fetches its state first; loading it there would change nothing."""
        if not self.served:
            return []

        def fetch(optimizer: Optimizer) -> None:
            self._fetch_state()

        def refuse(optimizer: Optimizer, state: Any) -> None:
            raise ValueError("the optimizer's state is on the servers now: load it before rainband.join.")

        saving = [optimizer.register_state_dict_pre_hook(fetch) for optimizer in self.optimizers]
        return saving + [optimizer.register_load_state_dict_pre_hook(refuse) for optimizer in self.optimizers]

    @property
    def _name(self) -> str:
        return type(self.strategy).__name__


class LoopModel(WorkerModel[LoopWorker]):
    """The user's module and optimizers in a worker's life."""

    stays = False  # the user's script goes on

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.state = state_of(loop.optimizers, loop.flat.parameters) if loop.served else None

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        return Client(me, welcome.plan, self.loop.flat, welcome.blocks, welcome.owners, ports, tell)

    def load(self, client: Client) -> None:
        client.load(self.state)

    async def started(self, client: Client) -> None:
        self.state = None
        if self.loop.served:
            for optimizer in self.loop.optimizers:
                optimizer.state.clear()  # the servers have it now, it comes back at the end
        await pull_latest(client)

    def worker(self, index: int, client: Client) -> LoopWorker:
        loop = self.loop
        params = LoopParameters(client, lambda: [settings["lr"] for settings in loop.settings])
        return LoopWorker(index, loop.num_workers, client, params, loop._step_now, loop.strategy)

    async def ended(self, worker: LoopWorker) -> None:
        await LoopEnd()

    def return_leases(self, worker: LoopWorker) -> None:
        client = worker.client
        for portion, lease in list(client.leases.held.items()):
            untouched = len(lease.unsettled) == client.plan.batches_in(portion)
            client.leases.give_back(portion, LeaseEnd.UNUSED if untouched else LeaseEnd.STOPPED)
        if worker.accounting is not None:
            client.tell(worker.accounting.report())

    async def conclude(self, worker: LoopWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float]:
        loop = self.loop
        await pull_final(worker.client)
        if buffers is not None:
            set_buffers(loop.model, buffers)
        if loop.served:
            fetched = worker.client.fetch_state()
            await fetched
            put_state(loop.optimizers, loop.flat.parameters, fetched.gathered.state)
        save_model(getattr(loop.model, "_orig_mod", loop.model), conclude.path)  # names as before torch.compile
        return {}
