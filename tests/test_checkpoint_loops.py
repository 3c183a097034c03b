"""Custom training loops continue from a checkpoint as if nothing had happened: shared batches, leased ones, rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from rainband.checkpoints import tree
from rainband.checkpoints.read import all_names
from rainband.checkpoints.store import LocalStore
from rainband.checkpoints.tensor_file import TensorFile
from rainband.checkpoints.write import write_file
from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.protocol.messages import COORDINATOR, Assign, Message, Peer, TakeSnapshot
from rainband.rounds.board import LocalBoard, SharedMemory
from rainband.rounds.rounds import RoundExchange
from rainband.rounds.view import RoundView
from rainband.runtimes.checkpoints.background import AtOnce
from rainband.runtimes.checkpoints.committer import Committer
from rainband.runtimes.checkpoints.place import facts_of, opened, restore_of
from rainband.runtimes.checkpoints.restore import restore_server
from rainband.runtimes.checkpoints.write import ServerWriter, write_worker
from rainband.runtimes.config import RunConfig
from rainband.runtimes.training_loop.local_steps import LocalStepsLoop
from rainband.runtimes.training_loop.loop import TrainingLoop
from rainband.runtimes.training_loop.script_random import seed_by_rank, seed_equally
from rainband.runtimes.training_loop.split.snapshots import LoopSnapshots
from rainband.runtimes.training_loop.split.state import LoopState
from rainband.strategies.averaging.averaging import Averaging
from rainband.strategies.averaging.diloco import Diloco
from rainband.strategies.single import Single
from rainband.strategy import Strategy
from rainband.transports.shared_rounds import RoundsMemory
from rainband.worker.saving.snapshots import copied
from tests.one_process import OneProcess
from tests.split_group import Group, run_group

EPOCHS, BATCHES = 4, 5
DATA = [(torch.full((6,), i / 7.0), torch.tensor(i % 3)) for i in range(12 * BATCHES - 6)]  # the last batch is short


class Run:
    """One run of the loop below: it may begin with a state, and notes the state at the beginning of each round."""

    def __init__(
        self, workers: int, begin: Any = None, norm: Callable[[int], nn.Module] = nn.BatchNorm1d, loads: bool = False
    ) -> None:
        self.begin = begin
        self.norm = norm
        self.loads = loads  # with a DataLoader, whose order comes from the script's random numbers
        self.states: list[Any] = []
        self.steps: list[int] = []  # of the first worker: the epoch of each step
        self.rates: list[float] = []
        self.averages: list[Tensor] = []
        self.models = run_group(self.script, workers, Direct())

    def script(self, join: Callable[..., Any]) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), self.norm(8), nn.Linear(8, 3))
        make = torch.optim.AdamW if self.norm is nn.BatchNorm1d else torch.optim.SGD  # Adam enlarges rounding errors
        optimizer = make(model.parameters(), lr=0.05)
        every_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        every_batch = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=7)
        average = AveragedModel(model, multi_avg_fn=None)
        loop = join(model, optimizer)
        if self.begin is not None:
            loop.exchange.restore(self.begin)
        with loop as run:
            run.register(every_epoch, every_batch, average)
            data: Any = run.batches(DATA, batch_size=12)
            if self.loads:
                data = run.loader(DataLoader(DATA, batch_size=12, shuffle=True))  # type: ignore[arg-type]
            for epoch in range(EPOCHS):
                for x, y in data:
                    if run.rank == 0:
                        self.states.append(copied(run.exchange.collect()))
                        self.steps.append(epoch)
                        self.rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    every_batch.step()
                    average.update_parameters(model)
                every_epoch.step()
        self.averages.append(next(average.module.parameters()).detach().clone())
        return model


class Direct(Group):
    """Workers that give each other their state as it is, without the encoding between processes."""

    def exchange(self, rank: int, state: LoopState, examples: list[Tensor], workers: int, ranks: int) -> RoundExchange:
        if self.memory is None:
            self.memory = SharedMemory(ranks, examples)
        board = LocalBoard(self.memory, rank, lambda until: self.wait_or_die(rank, until))
        self.exchanges[rank] = RoundExchange(board, state, clock=lambda: 0.0, equal_parts=True)
        return self.exchanges[rank]


def through_a_file(state: Any, folder: Path) -> Any:
    """Write a state as a checkpoint has it, and read it."""
    store = LocalStore(folder)
    file = write_file(store, ".", "worker.safetensors", state)
    read = TensorFile(file.name, file.num_bytes, lambda first, number: store.read(file.name, first, number))
    return tree.joined(read.state, read.tensor)


@pytest.fixture(scope="module")
def whole() -> dict[tuple[int, bool], Run]:
    return {(workers, loads): Run(workers, loads=loads) for workers in (1, 2) for loads in (False, True)}


@pytest.mark.parametrize("at", [1, 4, 5, 13, 19], ids=lambda at: f"after {at} batches")
@pytest.mark.parametrize(("workers", "loads"), [(1, False), (2, False), (1, True), (2, True)])
def test_a_loop_continues_bit_for_bit(
    whole: dict[tuple[int, bool], Run], tmp_path: Path, workers: int, loads: bool, at: int
) -> None:
    before = whole[workers, loads]
    assert len(before.steps) == EPOCHS * BATCHES
    after = Run(workers, through_a_file(before.states[at], tmp_path), loads=loads)
    assert after.steps == before.steps[at:] and after.rates == before.rates[at:]
    for model in after.models:
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.state_dict().values(), before.models[0].state_dict().values(), strict=True)
        )
    assert all(torch.equal(average, before.averages[0]) for average in after.averages)


def test_a_loop_continues_with_another_number_of_workers_up_to_rounding(tmp_path: Path) -> None:
    before = Run(2, norm=nn.LayerNorm)  # not the statistics of a part
    state = through_a_file(before.states[7], tmp_path)
    for workers in (1, 3):
        after = Run(workers, state, norm=nn.LayerNorm)
        assert after.steps == before.steps[7:] and after.rates == before.rates[7:]
        first, again = (dict(models[0].named_parameters()) for models in (before.models, after.models))
        assert all(torch.allclose(first[name], again[name], atol=1e-4) for name in first)


class SavingState:
    """The link of a worker that writes one checkpoint, or continues from it, and its exchange."""

    place = "memory"
    view = RoundView(epoch=0, batch=0, members=())

    def __init__(self, index: int, state: Any = None) -> None:
        self.index = index
        self.saved = state

    def collect(self) -> Any:
        return {"training": {}}

    def restore(self, state: Any) -> None:
        assert state is self.saved

    def source(self) -> Any:
        return None if self.saved is None else self

    def state(self, name: str) -> Any:
        return self.saved

    def save_state(self, wanted: Any, state: Any, block: Any, step: int) -> None:
        self.saved = state


def drawn(index: int, state: Any) -> Tensor:
    """Return random numbers of a worker's script, which begins with a seed as its earlier run did."""
    seed_equally(0)
    link: Any = SavingState(index, state)
    snapshots = LoopSnapshots(link, link, nn.Linear(1, 1))
    snapshots.restore()
    seed_by_rank(index)
    snapshots.continue_script()
    return torch.rand(4)


def test_dropout_masks_of_shared_batches_are_not_repeated() -> None:
    first: Any = SavingState(0)
    begin = drawn(0, None)
    LoopSnapshots(first, first, nn.Linear(1, 1)).take(TakeSnapshot(1, "step-0000000001"))
    following = torch.rand(4)
    assert torch.equal(drawn(0, first.saved), following)
    others = [following, begin, *(drawn(index, state) for index in (1, 2) for state in (None, first.saved))]
    assert len({tuple(numbers.tolist()) for numbers in others}) == len(others)


# ---- batches of one worker: leased, or in rounds of models ----


class Saving(OneProcess):
    """A membership in a run that writes checkpoints, and continues from one if there is one."""

    def __init__(self, strategy: Strategy, folder: Path) -> None:
        super().__init__(strategy, num_servers=2)
        self.store = LocalStore(folder)
        names = all_names(self.store)
        self.resume_from = str(folder / names[0]) if names else ""
        config = RunConfig(task="loop", strategy="", num_workers=1, num_servers=len(self.servers), directory="run")
        config = msgspec.structs.replace(config, resume_from=self.resume_from)
        settings = RunSettings(num_workers=1, num_servers=len(self.servers), restore=restore_of(config))
        self.coordinator = Coordinator(settings, strategy)
        self.committer = Committer(self.coordinator, self.store, facts_of(config), 9, AtOnce(), lambda: "2026-01-01")
        self.writers = {
            peer: ServerWriter(f"server-{peer.index}", server, lambda: self.store, AtOnce())
            for peer, server in self.servers.items()
        }
        self.memory = RoundsMemory(1)
        self.round_files = self.memory.fds

    def source(self) -> Any:
        return opened(self.resume_from) if self.resume_from else None

    def save_state(self, snapshot: Any, state: Any, block: Any, step: int = 0) -> None:
        self.tell(write_worker(self.store, snapshot, state, block, step))

    def _deliver(self, sender: Peer, to: Peer, data: bytes, payload: Any) -> None:
        super()._deliver(sender, to, data, payload)
        for peer, writer in self.writers.items():
            writer.advance(partial(self.bus, peer, COORDINATOR))
        self.committer.advance(self._committed)

    def _to_server(self, sender: Peer, to: Peer, message: Message, payload: Tensor | None) -> None:
        super()._to_server(sender, to, message, payload)
        if isinstance(message, Assign) and message.restores:
            restore_server(self.servers[to], opened(self.resume_from))
            for out in self.servers[to].restored():
                self.bus(to, out.to, out.message)

    def _committed(self, collected: Any, name: str, error: str) -> None:
        assert not error, error
        for out in self.coordinator.checkpoint_committed(collected, name, self.now, error):
            self.bus(COORDINATOR, out.to, out.message, out.body)


def looped(
    strategy: Strategy, folder: Path, save_at: int = -1, batch_size: int = 12
) -> tuple[nn.Module, list[tuple[int, float]], list[Tensor]]:
    """Train for three passes; return the model, the epoch and learning rate of each step, and averaged parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = AveragedModel(model)
    member = Saving(strategy, folder)
    kind = LocalStepsLoop if strategy.requires.local_steps else TrainingLoop
    steps: list[tuple[int, float]] = []
    try:
        with kind(model, [optimizer], member) as run:
            run.register(schedule, average)
            for epoch in run.epochs(3):
                for x, y in run.batches(DATA, batch_size=batch_size):
                    steps.append((epoch, optimizer.param_groups[0]["lr"]))
                    if len(steps) == save_at:
                        run.checkpoint()
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    schedule.step()
                    average.update_parameters(model)
    finally:
        member.memory.close()
    return model, steps, list(average.module.parameters())


@pytest.mark.parametrize("strategy", [Single(), Averaging(period=2), Diloco(period=2)], ids=lambda s: type(s).__name__)
def test_a_loop_that_asked_for_a_checkpoint_continues_bit_for_bit(tmp_path: Path, strategy: Strategy) -> None:
    whole, steps, average = looped(strategy, tmp_path, save_at=7)
    [name] = all_names(LocalStore(tmp_path))
    done = opened(str(tmp_path / name)).manifest.step
    assert 7 <= done <= 9 and len(steps) == 15
    again, rest, of_rest = looped(strategy, tmp_path)
    assert rest == steps[done:]
    for (key, one), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    assert all(torch.equal(one, other) for one, other in zip(average, of_rest, strict=True))


class WithBytes:
    def state_dict(self) -> dict[str, Any]:
        return {"key": b"1234"}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    member = Saving(Single(), tmp_path)
    loop = TrainingLoop(model, [torch.optim.SGD(model.parameters(), lr=0.05)], member)
    with pytest.raises(ValueError, match=r"run.register\(WithBytes\): .* type bytes"), loop as run:
        run.register(WithBytes())
    member.memory.close()


def test_a_loop_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    looped(Single(), tmp_path, save_at=7)
    with pytest.raises(AssertionError, match="dismissed: .* the batch size is 9, there it was 12"):
        looped(Single(), tmp_path, batch_size=9)
