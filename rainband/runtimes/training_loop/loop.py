"""A custom training loop as a worker: its optimizer.step() advances the strategy's coroutine.

    with rainband.join(model, optimizer) as run:
        for x, y in run.batches(dataset, batch_size=64):
            ...                                            the user's zero_grad, forward, backward, step

Entering sends the optimizer's class, settings and state to the servers, and fetches the common parameters. Each step
passes its gradient, with the batches drawn since the last step, to the strategy, and runs it until it needs the next
gradient. Leaving waits for the other workers, and fetches the final parameters and the optimizer's state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from rainband.checkpoints.read import Checkpoint
from rainband.errors import NOT_IN_BLOCK
from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.model.optimizer_state import put_state, settings_of, spec_of, state_of
from rainband.model.save import save_model, saving
from rainband.plugins import typed_name
from rainband.protocol.accounting import NOT_FINITE
from rainband.protocol.messages import (
    CheckpointRequest,
    Conclude,
    Dataset,
    LeaseEnd,
    Message,
    Paused,
    Peer,
    StopRequest,
    TakeSnapshot,
    Welcome,
)
from rainband.protocol.optimizer_spec import changed_numbers, plain
from rainband.protocol.ports import Port
from rainband.protocol.saved_state import SavedBlock
from rainband.runtimes.training_loop.batches import LoopBatches, described, fetched_ahead, loader
from rainband.runtimes.training_loop.coroutine import LoopCoroutine, LoopParameters, LoopWorker
from rainband.runtimes.training_loop.loop_state import LeasedLoopState
from rainband.runtimes.training_loop.of_shared_batches import OfSharedBatches
from rainband.runtimes.training_loop.optimizer_checks import check, following, print_warnings, takes_any_optimizer
from rainband.runtimes.training_loop.passes import Passes
from rainband.runtimes.training_loop.script_random import seed_by_rank
from rainband.runtimes.training_loop.split.state import HasState
from rainband.runtimes.training_loop.step_hooks import StepHooks, unwrapped
from rainband.runtimes.training_loop.users_turn import LoopEnd
from rainband.runtimes.training_loop.watches import NEVER_STEPPED_ON, GradientWatch, ParameterWatch
from rainband.strategy import Batch, Strategy, WorkItem
from rainband.worker.client import Client
from rainband.worker.session import Session, join_of
from rainband.worker.worker import set_buffers
from rainband.worker.worker_model import Buffers, WorkerModel, pull_final, pull_latest

NOT_KNOWN_YET = Dataset(fingerprint="", num_samples=0, batch_size=1, epochs=1)  # until run.batches(...) is called
MAX_REASON = 1000  # characters of the reason for which a loop stops the run


class Membership(Protocol):
    """The link of a script's process to its run."""

    index: int
    num_workers: int
    strategy: Strategy
    optimizers: Sequence[str]  # module:Class of those that servers may import besides torch's
    session: Session
    round_files: Sequence[int]  # of the memory in which workers meet in rounds
    left: bool
    asked_rank: bool

    def connect(self) -> None: ...

    def tell(self, message: Message, body: bytes | None = None) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...

    def source(self) -> Checkpoint | None:
        """Return the checkpoint from which the run continues; None: it begins anew."""

    def save_state(self, snapshot: TakeSnapshot, state: object, block: SavedBlock | None, step: int = 0) -> None: ...

    def finish_saving(self) -> None:
        """Wait until what `save_state` got is written."""


# size: users call half of its methods on `run`; the others share the state of the current step
class TrainingLoop(OfSharedBatches):
    """The training loop of one worker: the `run` of `with rainband.join(...) as run`."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], optimizers: Sequence[Any], member: Membership) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        self.optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        self.member = member
        self.rank = member.index
        self.num_workers = member.num_workers
        self.strategy = following(member.strategy, self.optimizers)
        self.rounds = self.strategy.requires.waits == "rounds"
        self.served_in_rounds = self.rounds and not self.strategy.requires.local_steps  # by leases of rounds
        self.served = not takes_any_optimizer(self.strategy)  # the servers run the user's optimizer
        self.num_epochs = 0  # 0: not known
        self.planned = False
        check(self.model, self.optimizers, member.strategy, member.optimizers)

    def __enter__(self) -> TrainingLoop:
        self.settings = self._current_settings()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        pairs = zip(groups, self.settings, strict=True)
        self.flat = Flat(self.model, [{"params": group["params"], **settings} for group, settings in pairs])
        self.hooks = StepHooks(self.optimizers, self._step, lambda: self.skip(NOT_FINITE))
        self.state = self._make_state()
        self.member.connect()
        if self.rank == 0:
            print_warnings(self.strategy, self.num_workers)
        optimizer = spec_of(self.optimizers) if self.served else None
        join = join_of(self.strategy, self.flat.layout, NOT_KNOWN_YET, custom_loop=True, optimizer=optimizer)
        self.member.session.prepare(self.strategy, join, self._make_model())
        self.coroutine = LoopCoroutine(self.member.session, self.member.wait)
        seed_by_rank(self.rank)
        self.gradients = GradientWatch(self.optimizers)
        self.drawn = self._make_batches()
        self.state_hooks = self._guard_state()
        self.parameters = ParameterWatch(self.flat)
        self.parameters.note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.hooks.remove()
        for hook in self.state_hooks:
            hook.remove()
        stopped = kind is KeyboardInterrupt and self.client.stopping  # see _check_stop
        try:
            if kind is None or stopped or is_normal_exit(error):
                self._leave()
        finally:
            self.flat.release()
        return stopped

    def _make_state(self) -> LeasedLoopState:
        return LeasedLoopState(self.model, self.flat, self.optimizers, self.served, self.member.save_state, self.rank)

    def begin_checkpoints(self) -> None:
        """Let this worker take part in checkpoints; if the run continues from one, put back its state."""
        if (source := self.member.source()) is not None:
            self.state.restore(source)
        self.member.session.snapshots = self.state

    def _make_model(self) -> LoopModel:
        return LoopModel(self)

    def _make_batches(self) -> LoopBatches:
        return LoopBatches(self.client, self.member.wait, lambda: self.coroutine.end_item())

    def _leave(self) -> None:
        """Skip open batches, wait for the other workers, and fetch the results."""
        if self.served and (name := self.parameters.changed()):
            print(f"rainband: {self._overwritten(name)}", file=sys.stderr)
        self._settle_open_batches()
        if batches := self.drawn.take():
            self._skip(batches, NEVER_STEPPED_ON)
        self.state.at_boundary()
        self.coroutine.finish()
        self.member.finish_saving()
        self.member.left = True

    @property
    def client(self) -> Client:
        self._require_block()
        assert self.member.session.client is not None
        return self.member.session.client

    def _require_block(self) -> None:
        """Raise ValueError if the loop has not joined the run."""
        if self.member.session.client is None:
            raise ValueError(NOT_IN_BLOCK)

    def _wait(self) -> None:
        self.member.wait()

    def epochs(self, number: int) -> Iterator[int]:
        """Iterate over this many passes over the data: `for epoch in run.epochs(10):`."""
        if number < 1:
            raise ValueError(f"run.epochs({number}) must be 1 or more.")
        if self.planned:
            raise ValueError(
                "run.epochs(...) must be called before the first run.batches(...), because the data plan depends on it."
            )
        self.num_epochs = number
        return iter(range(number))

    def batches(self, dataset: Any, batch_size: int = 1, **loader_arguments: Any) -> Passes:
        """Return what stands in the place of a DataLoader: each iteration yields this worker's batches of a pass.

        Other arguments are those of a DataLoader, such as collate_fn and num_workers. Faster workers get more batches;
        together the workers use every sample once per pass.
        """

        def begin() -> Iterator[Any]:
            self._plan(dataset, batch_size, loader_arguments)
            if self.served_in_rounds and loader_arguments.get("num_workers"):
                return self._one_pass(fetched_ahead(dataset, self.drawn, loader_arguments))
            return self._one_pass(loader(dataset, self.drawn, loader_arguments))

        self._plan(dataset, batch_size, loader_arguments)
        return Passes(begin, dataset, batch_size, self.client.plan.batches_per_epoch, self.num_workers)

    def _plan(self, dataset: Any, batch_size: int, arguments: dict[str, Any]) -> None:
        before = self.client.plan
        if self.num_epochs and self.drawn.passes >= self.num_epochs:
            raise ValueError(f"all {self.num_epochs} passes are over: set their number with run.epochs(...).")
        if self.planned:
            plan = self.client.plan
            if (len(dataset), batch_size) != (plan.num_samples, plan.batch_size):
                raise ValueError(
                    f"run.batches(...) was called for batches of {plan.batch_size} of {plan.num_samples} samples, and "
                    f"now for {batch_size} of {len(dataset)}: a run has one dataset; use a DataLoader for any other."
                )
            if bool(arguments.get("drop_last")) != plan.drop_last:
                raise ValueError(
                    f"run.batches(...) was called with drop_last={plan.drop_last}: use the same each time."
                )
            return
        self.member.tell(described(dataset, batch_size, self.num_epochs, arguments))
        while self.client.plan is before:
            self._wait()
        self.planned = True

    def _one_pass(self, batches: Any) -> Iterator[Any]:
        drawn = self.drawn
        self._check_stop()
        self._before_draw()  # a loop over the last pass may have been left with an open batch
        number = drawn.begin_pass()
        try:
            while not drawn.pass_is_over:
                for samples in batches:
                    batch = drawn.hand_over()
                    if batch is not None and self._begin(batch):
                        self.hooks.be_last()
                        self.gradients.note_draw()
                        self.parameters.note()
                        self.state.begin_batch()
                        yield samples
                        self._check_stop()
                        self._refuse_an_earlier_pass(number)
                        self._before_draw()
            self.parameters.note()  # new ones may have arrived since the last batch
        finally:
            if drawn.passes == number:
                drawn.put_back()
        self._check_stop()

    def _begin(self, batch: Batch) -> bool:
        if not self.rounds:
            return True
        if self.coroutine.begin(WorkItem((batch,), self._round(batch))):
            return True
        self.drawn.take()  # other workers have delivered it
        return False

    def _before_draw(self) -> None:
        """Settle open batches; in rounds, refuse to accumulate the gradients of several."""
        self._refuse_own_changes()
        self._settle_open_batches()
        self.state.at_boundary()
        if self.rounds and self.drawn.unstepped:
            raise ValueError(
                f"{self._name} requires one step per batch, and this batch had none: call run.skip() to leave "
                "a batch out; instead of accumulating gradients, use a larger batch_size."
            )

    def _refuse_an_earlier_pass(self, number: int) -> None:
        if self.drawn.passes != number:
            raise ValueError(
                "this pass ended when a later run.batches(...) began, because each batch is drawn once: "
                "iterate over one pass at a time."
            )

    @contextmanager
    def _in_the_run(self) -> Iterator[None]:
        """Receive parameters only in here, and check before whether the loop has changed them."""
        self._refuse_own_changes()
        yield
        self.parameters.note()

    def _refuse_own_changes(self) -> None:
        if self.served and (name := self.parameters.changed()):
            raise ValueError(
                f"{self._overwritten(name)} Change parameters before rainband.join or after its with block, or train "
                "in one process, which keeps the change: rainband run --strategy single."
            )

    def _overwritten(self, name: str) -> str:
        return (
            f"the training loop has changed the parameter {name} itself (outside optimizer.step()). With "
            f"{self._name} the servers hold the parameters, and their values overwrite the change."
        )

    def _settle_open_batches(self) -> None:
        """Skip open batches that no later step can contain: the loop left them out, or a GradScaler their step."""
        if not self.drawn.unstepped:
            return
        if not self.gradients.has_changed():
            self._skip(self.drawn.take_last(), NEVER_STEPPED_ON)  # earlier ones are in the gradients
        if self.drawn.unstepped and (reason := self.gradients.useless()):
            self._skip(self.drawn.take(), reason)

    def _round(self, batch: Batch) -> int:
        return self.client.plan.round_of(batch.portion, batch.k)

    @property
    def progress(self) -> float:
        """Return the fraction of the run, from 0 to 1, at the current batch: for learning-rate schedules."""
        if not self.num_epochs:
            raise ValueError("run.progress needs the number of epochs: write `for epoch in run.epochs(10):`.")
        if self.client.finished:
            return 1.0
        last = self.drawn.last
        return 0.0 if last is None else self.client.plan.progress(last.portion, last.k)

    def skip(self, reason: str = "skipped by the loop") -> None:
        """Skip the batches drawn since the last step, so that they do not count as part of the next one."""
        self._require_block()
        if batches := self.drawn.take():
            with self._in_the_run():
                self._skip(batches, reason)

    def _skip(self, batches: tuple[Batch, ...], reason: str) -> None:
        self.coroutine.worker.skip(batches, reason)
        if self.rounds:
            self.coroutine.end_round()
            self._await_round(batches)

    def log(self, *, loss: float | Tensor | None = None, **metrics: float) -> None:
        """Report the loss of the current batches, or metrics, for progress views; --target ends the run at a metric."""
        stats, plan, batch = self.client.stats, self.client.plan, self.drawn.last
        if metrics:
            stats.measured(metrics)
            self.member.tell(stats.heartbeat())
        if loss is None:
            return
        samples = plan.samples_in(batch.portion, batch.k) if self.planned and batch is not None else 1
        stats.loss_sum += (loss.item() if isinstance(loss, Tensor) else float(loss)) * samples
        stats.loss_samples += samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no worker wait for this one inside, for example during a long evaluation; its batches are reassigned."""
        self._require_block()
        if self.drawn.unstepped and self.gradients.useless() == NOT_FINITE:
            self.skip(NOT_FINITE)  # a GradScaler has left out the step
        if self.drawn.unstepped:
            raise ValueError("run.paused() was called with an open batch: call optimizer.step() or run.skip() first.")
        with self._in_the_run():
            self.coroutine.end_item()
            while self.client.pushes.in_flight:
                self._wait()
        self.drawn.forget()
        self.member.tell(Paused())
        yield

    def _step(self, optimizer: Optimizer, unscale: float) -> None:
        """Give the strategy the gradient of a user's step, and run it until it needs the next one."""
        self.flat.check()
        self._refuse_own_changes()
        self.member.wait(0)  # handle messages that have arrived
        if not self.planned:  # run.batches(...) checks it after the step
            self._check_stop()
        batches = self._stepped_on()
        if self.rounds and not batches:
            raise ValueError(
                f"{self._name} requires a new batch of run.batches(...) for each step: use downpour for steps without "
                "a batch and for your own data loader."
            )
        self._note_own_loader()
        self._note_settings()
        gradient = self._gradient(optimizer, unscale, batches)
        self._check_identity(gradient)
        self.coroutine.step(gradient)
        if self.drawn.end_an_item(batches):
            self.coroutine.end_item()
        self._await_round(batches)
        self.parameters.note()

    def _stepped_on(self) -> tuple[Batch, ...]:
        """Return the batches of a step: all open ones, except a last one that has added nothing to earlier ones."""
        if len(self.drawn.unstepped) < 2 or self.gradients.has_changed():
            return self.drawn.take()
        last = self.drawn.take_last()
        earlier = self.drawn.take()
        self.drawn.unstepped.extend(last)
        return earlier

    def _check_identity(self, gradient: Gradient) -> None:
        """Check that the module still has the parameters that joined: after 2^n steps, and if none has a gradient."""
        steps = self.client.stats.steps
        if steps & (steps - 1) == 0 or all(tensor is None for tensor in gradient.tensors):
            self.flat.check_identity()

    def _note_own_loader(self) -> None:
        """Warn once, on one worker, that all workers may be training on the same data."""
        if self.planned or self.client.stats.steps or self.rank or self.num_workers == 1:
            return
        if not self.member.asked_rank:
            print(
                "rainband: this loop uses its own data loader, so every worker iterates over all of the data. To "
                "divide it among the workers, use run.batches(...), or rainband.rank() and rainband.num_workers().",
                file=sys.stderr,
            )

    def _gradient(self, optimizer: Optimizer, unscale: float, batches: tuple[Batch, ...]) -> Gradient:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        pairs = zip(self.flat.parameters, self.flat.gradients(), strict=True)
        tensors = [gradient if id(parameter) in own else None for parameter, gradient in pairs]
        if unscale != 1.0:
            tensors = [None if tensor is None else tensor * unscale for tensor in tensors]
        elif self.coroutine.worker.steps_per_item > 1:  # the strategy keeps it, and the next backward overwrites it
            tensors = [None if tensor is None else tensor.clone() for tensor in tensors]
        samples = sum(self.client.plan.samples_in(batch.portion, batch.k) for batch in batches)
        stats = self.client.stats
        stats.steps += 1
        stats.samples += samples
        if stats.steps == 1:
            self.member.tell(stats.heartbeat())  # at once, so that views show that training has begun
        return Gradient(tensors, batches, max(1, samples), 0.0)

    def _step_now(self, gradients: Sequence[Tensor | None]) -> None:
        self.hooks.step_now(self.flat.parameters, gradients)

    def _current_settings(self) -> list[dict[str, Any]]:
        """Return the settings of all parameter groups, with the learning rates as the strategy scales them."""
        factor = self.strategy.lr_factor(self.num_workers)
        return [{**group, "lr": factor * group["lr"]} for group in settings_of(self.optimizers)]

    def _note_settings(self) -> None:
        """Send settings that a schedule has changed with the next push."""
        now = self._current_settings()
        if now == self.settings:
            return
        if len(now) != len(self.settings):
            raise ValueError("the optimizer's parameter groups have changed since rainband.join: add groups before it.")
        if self.served:
            kind = type(self.optimizers[0]).__name__
            for number, (old, new) in enumerate(zip(self.settings, now, strict=True)):
                changed_numbers(kind, number, plain(old), new)
            self.client.pushes.groups = tuple(now)
        self.settings = now

    def _await_round(self, batches: tuple[Batch, ...]) -> None:
        """In rounds: wait for the other workers, so that the parameters are new after a step, as in plain PyTorch."""
        if not self.rounds or not batches:
            return
        round_, stats = self._round(batches[-1]), self.client.stats
        while not self.client.is_through(round_) and not self.client.stopping:
            stats.waiting = True
            self._wait()
        stats.waiting = False
        if not self.client.is_through(round_):
            self.state.note_end()

    def stop(self, reason: str = "stopped by the loop") -> None:
        """End the run of all workers after their current batches: the code after their `with` blocks runs.

        `run.stopped` is then the reason. A loop over its own data loader is left at once.
        """
        self._require_block()
        with self._in_the_run():
            self.member.tell(StopRequest(str(reason)[:MAX_REASON]))
            while not self.client.stopping and not self.client.finished:
                self._wait()
        if not self.planned:
            self._check_stop()

    def register(self, *objects: HasState) -> None:
        """Write the state of these (a scheduler, a GradScaler, averaged parameters) into checkpoints.

        Every worker keeps the state of its own objects until the run continues from one.
        """
        self.state.register(objects)

    def checkpoint(self) -> None:
        """Write a checkpoint now, besides those of --checkpoint-every."""
        self._require_block()
        if self.is_first:
            self.member.tell(CheckpointRequest())

    @property
    def stopped(self) -> str | None:
        """Return why the run ends early: the reason given to run.stop(...), or "interrupted"; None if it does not."""
        return self.client.leases.stop_reason

    def _check_stop(self) -> None:
        """Leave the `with` block if the run ends early: raise what no loop catches by mistake; __exit__ takes it."""
        if self.client.stopping:
            raise KeyboardInterrupt(self.stopped)

    def _fetch_state(self, optimizer: Optimizer) -> None:
        with self._in_the_run():
            fetched = self.client.fetch_state()
            while not fetched.ready():
                self._wait()
        put_state(self.optimizers, self.flat.parameters, fetched.gathered.state)

    def _guard_state(self) -> list[Any]:
        """Fetch the optimizer's state when the user saves it, and refuse to load it, which would have no effect."""
        if not self.served:
            return []

        def refuse(optimizer: Optimizer, state: Any) -> None:
            raise ValueError("the servers have the optimizer's state now: load it before rainband.join.")

        saving = [optimizer.register_state_dict_pre_hook(self._fetch_state) for optimizer in self.optimizers]
        return saving + [optimizer.register_load_state_dict_pre_hook(refuse) for optimizer in self.optimizers]

    @property
    def _name(self) -> str:
        return typed_name(self.strategy)


def is_normal_exit(error: BaseException | None) -> bool:
    """Return True for `sys.exit()` and `sys.exit(0)`, with which a script ends normally."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


class LoopModel(WorkerModel[LoopWorker]):
    """The user's module and optimizers, as the model of a worker."""

    stays = False  # the user's script continues

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.state = state_of(loop.optimizers, loop.flat.parameters) if loop.served else None

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        client = Client(me, welcome.plan, self.loop.flat, welcome.blocks, welcome.owners, ports, tell)
        if self.loop.served:  # the servers know only those of the worker that joined first
            client.pushes.groups = tuple(self.loop.settings)
        return client

    def own_module(self) -> nn.Module:
        return self.loop.model

    def load(self, client: Client) -> None:
        client.load(self.state)

    async def started(self, client: Client) -> None:
        self.state = None
        if self.loop.served:
            for optimizer in self.loop.optimizers:
                optimizer.state.clear()  # the servers have it until the end
        await pull_latest(client)

    def worker(self, index: int, client: Client) -> LoopWorker:
        loop = self.loop
        params = LoopParameters(client, lambda: [settings["lr"] for settings in loop.settings])
        worker = LoopWorker(index, loop.num_workers, client, params, loop._step_now, loop.strategy)
        loop.state.accounting = worker.accounting
        loop.begin_checkpoints()
        return worker

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
        saved = getattr(loop.model, "_orig_mod", loop.model)  # names as before torch.compile
        with saving(conclude.path, None if worker.client.servers.ports else saved):
            await pull_final(worker.client)
            if buffers is not None:
                set_buffers(loop.model, buffers)
            if loop.served:
                fetched = worker.client.fetch_state()
                await fetched
                put_state(loop.optimizers, loop.flat.parameters, fetched.gathered.state)
            save_model(saved, conclude.path)
        return {}
