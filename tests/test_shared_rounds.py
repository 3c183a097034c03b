"""Rounds in shared memory, with real processes that are killed and paused at random instants.

The gradient of a sample has whole numbers in one row of a matrix, so that the parameters count how often each sample
was applied, and a contribution that was read while it was written shows as a row of unequal numbers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rainband.rounds.board import Asking, RoundEntry
from rainband.rounds.rounds import RoundExchange
from rainband.rounds.view import Header, Member
from rainband.runtimes.config import RunConfig, decode_job
from rainband.runtimes.processes.launcher import fence, is_stopped, run
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.training_loop.split.loop import SplitLoop
from rainband.strategy import Requirements, Strategy, Worker
from rainband.transports.shared_rounds import RoundsMemory, SharedBoard

BATCHES, BATCH, WIDTH, EPOCHS = 20, 12, 5_000, 2
SAMPLES = BATCHES * BATCH


class Counting:
    """A training loop that counts samples, and its state."""

    dies_at = -1  # the number of its steps before

    def __init__(self, fds: Sequence[int], rank: int) -> None:
        self.counts = torch.zeros(BATCH, WIDTH)
        self.applied = torch.zeros(SAMPLES)
        like = [torch.zeros(BATCH, WIDTH), torch.zeros(SAMPLES)]
        self.exchange = RoundExchange(SharedBoard(fds, rank, like), self, time.perf_counter)
        self.sums: dict[str, int] = {}

    def collect(self) -> Any:
        return {"counts": self.counts, "applied": self.applied}

    def apply(self, state: Any) -> None:
        self.counts, self.applied = state["counts"], state["applied"]

    def fingerprint(self) -> int:
        return 1 + zlib.crc32(self.counts.numpy().tobytes())

    def has_changed(self) -> bool:
        return False

    def train(self) -> None:
        exchange = self.exchange
        for epoch in range(EPOCHS):
            while (where := exchange.begin(epoch)).epoch == epoch:
                self.sums[f"{where.epoch} {where.batch} {exchange.member.count} {exchange.view.key()}"] = zlib.crc32(
                    self.counts.numpy().tobytes()
                )
                start = where.batch * BATCH
                part = exchange.cut(range(start, start + BATCH) if where.batch < BATCHES else None)
                if part.is_over:
                    break
                self.step(list(part.samples))
        exchange.leave()

    def step(self, samples: list[int]) -> None:
        if self.exchange.view.serial == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        rows, ones = torch.zeros(BATCH, WIDTH), torch.zeros(SAMPLES)
        for sample in samples:
            rows[sample % BATCH] += 1.0 / len(samples)
            ones[sample] = 1.0 / len(samples)
        tensors: list[Tensor | None] = [rows, ones]
        outcome = self.exchange.mean(tensors)
        if outcome.took_part:
            self.counts += torch.round(rows * outcome.weight)
            self.applied += torch.round(ones * outcome.weight)
        self.exchange.stepped()

    def report(self) -> dict[str, Any]:
        view = self.exchange.view
        return {
            "sums": self.sums,
            "even": bool((self.counts == self.counts[:, :1]).all()),
            "total": int(self.counts[:, 0].sum()),
            "applied": self.applied.int().tolist(),
            "view": [view.applied, sum(n for _, n in view.skipped), view.not_seen, len(view.carried), view.transfers],
        }


Train = Callable[[RoundsMemory, int], Any]


def count_samples(memory: RoundsMemory, rank: int) -> dict[str, Any]:
    loop = Counting(memory.fds, rank)
    loop.train()
    return loop.report()


@contextmanager
def workers(memory: RoundsMemory, folder: Path, train: Train = count_samples) -> Iterator[list[int]]:
    """Fork the workers of a run; each leaves a report."""
    pids = [start(memory, rank, folder, train) for rank in range(memory.num_ranks)]
    try:
        yield pids
    finally:
        for pid in pids:
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def start(memory: RoundsMemory, rank: int, folder: Path, train: Train) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        (folder / f"{rank}.json").write_text(json.dumps(train(memory, rank)))
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)


def reap(memory: RoundsMemory, pids: list[int], limit_s: float = 20.0) -> list[int]:
    """Wait for all workers, exclude each when it has ended, and return the exit codes."""
    codes = [-1] * len(pids)
    deadline = time.monotonic() + limit_s
    while any(pid > 0 for pid in pids):
        assert time.monotonic() < deadline, "the survivors wait for a dead worker"
        for rank, pid in enumerate(pids):
            if pid > 0 and os.waitpid(pid, os.WNOHANG)[0]:
                pids[rank] = 0
                codes[rank] = 0
                memory.exclude(rank)
        os.sched_yield()
    return codes


def check(folder: Path, survivors: list[int], same: bool = True) -> list[dict[str, Any]]:
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in survivors]
    for report in reports:
        applied, skipped, not_seen, carried, _ = report["view"]
        assert report["even"], "a contribution was read while it was written"
        assert report["total"] == applied == sum(report["applied"])
        assert max(report["applied"]) <= EPOCHS
        assert applied + skipped + not_seen + carried == EPOCHS * SAMPLES
        for where in report["sums"].keys() & reports[0]["sums"].keys():
            assert report["sums"][where] == reports[0]["sums"][where], f"parameters differ at {where}"
    if same:  # a worker that returns after the others have ended goes on alone
        assert all(report["applied"] == reports[0]["applied"] for report in reports)
    return reports


def state_of(pid: int) -> str:
    """Return a letter: T for a stopped process, Z for one that has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_changes(memory: RoundsMemory, rank: int, pid: int, number: int) -> None:
    """Wait until a worker has changed its position this many times, or has ended."""
    position = memory.words.of[rank]
    last, deadline = position[0], time.monotonic() + 20.0
    while number and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline, "the workers wait for each other"
        if position[0] != last:
            number, last = number - 1, position[0]


def run_with_event(folder: Path, chance: random.Random, num_workers: int, pause: bool) -> None:
    memory = RoundsMemory(num_workers)
    try:
        with workers(memory, folder) as pids:
            victim = chance.randrange(num_workers)
            await_changes(memory, victim, pids[victim], chance.randrange(1, 60))
            for _ in range(chance.randrange(2000)):
                pass
            if pause:
                os.kill(pids[victim], signal.SIGSTOP)
                while state_of(pids[victim]) not in "TZ":
                    os.sched_yield()
                memory.exclude(victim)
                os.kill(pids[victim], signal.SIGCONT)
            else:
                os.kill(pids[victim], signal.SIGKILL)
            reap(memory, pids)
        there = [rank for rank in range(num_workers) if (folder / f"{rank}.json").exists()]
        assert set(there) >= set(range(num_workers)) - {victim}
        check(folder, there, same=not pause)
    finally:
        memory.close()


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_sample_is_applied_once_in_each_epoch(num_workers: int, tmp_path: Path) -> None:
    memory = RoundsMemory(num_workers)
    with workers(memory, tmp_path) as pids:
        reap(memory, pids)
    for report in check(tmp_path, list(range(num_workers))):
        assert report["view"] == [EPOCHS * SAMPLES, 0, 0, 0, num_workers - 1]
    memory.close()


@pytest.mark.processes
@pytest.mark.parametrize("pause", [False, True], ids=["killed", "paused"])
@pytest.mark.parametrize("seed", range(4))
def test_survivors_agree(seed: int, pause: bool, tmp_path: Path) -> None:
    run_with_event(tmp_path, random.Random(seed), 2 + seed % 2, pause)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pause", [False, True], ids=["killed", "paused"])
def test_survivors_agree_at_200_instants(pause: bool, tmp_path: Path) -> None:
    for seed in range(200):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_with_event(folder, random.Random(1000 + seed), 2 + seed % 2, pause)


# ---- a custom training loop ----


def train_a_model(memory: RoundsMemory, rank: int) -> list[float]:
    """Train in a custom loop whose workers share each batch, and return the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.linspace(-1.0, 1.0, 90 * 8, dtype=torch.float64).sin().view(90, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    exchange: Callable[..., RoundExchange] = lambda state, like: RoundExchange(  # noqa: E731
        SharedBoard(memory.fds, rank, like), state, time.perf_counter
    )
    with SplitLoop(model, [optimizer], exchange, memory.num_ranks) as run_:
        for _ in run_.epochs(3):
            for x, y in run_.batches(data, batch_size=16):  # the last batch has 10
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.processes
def test_a_loop_in_several_processes_makes_the_updates_of_one(tmp_path: Path) -> None:
    results = {}
    for number in (1, 2, 3):
        memory = RoundsMemory(number)
        with workers(memory, tmp_path, train_a_model) as pids:
            reap(memory, pids)
        memory.close()
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(number)]
        assert all(one == found[0] for one in found)  # to the last bit
        results[number] = torch.tensor(found[0], dtype=torch.float64)
    assert float((results[1] - results[2]).abs().max()) < 1e-12
    assert float((results[1] - results[3]).abs().max()) < 1e-12


# ---- under the launcher ----


class SplitBatches(Strategy):
    """Workers train by themselves, and join no coordinator."""

    @property
    def requires(self) -> Requirements:
        return Requirements(servers=False, optimizer="workers", split_batches=True)

    async def run(self, worker: Worker) -> None: ...


def train_in_a_run(job: bytes, fds: list[int]) -> None:
    """Train, as the entry of a worker; worker 1 kills itself after some rounds."""
    decoded = decode_job(job)
    loop = Counting(fds[-decoded.round_files :], decoded.index)
    loop.dies_at = 7 if decoded.index == 1 else -1
    loop.train()
    (Path(decoded.config.directory) / f"{decoded.index}.json").write_text(json.dumps(loop.report()))


@pytest.mark.processes
def test_the_launcher_excludes_a_worker_that_has_died(tmp_path: Path) -> None:
    config = RunConfig(task="digits", strategy="", num_workers=3, num_servers=0, directory=str(tmp_path))
    entries = {"worker": "tests.test_shared_rounds:train_in_a_run"}
    run(config, lambda event: None, entries=entries, strategy=SplitBatches())
    reports = check(tmp_path, [0, 2])
    assert not (tmp_path / "1.json").exists()
    applied, _, _, _, transfers = reports[0]["view"]
    assert (applied, transfers) == (EPOCHS * SAMPLES, 2)


def stop_and_go(job: bytes, fds: list[int]) -> None:
    """Raise this worker's position for ever."""
    board = SharedBoard(fds, 0, [])
    board.set_life(1)
    while True:
        board.set_position(board.position(0) + 1)


@pytest.mark.processes
@pytest.mark.parametrize("was_stopped", [False, True])
def test_a_fenced_worker_goes_on_and_its_final_position_stays(was_stopped: bool) -> None:
    memory, zygote = RoundsMemory(1), Zygote.start(("torch",))
    board = SharedBoard(memory.fds, 0, [])
    try:
        token = zygote.spawn("tests.test_shared_rounds:stop_and_go", b"", "rainband worker 0", fds=memory.fds)
        board.wait(lambda: board.position(0) > 0)
        zygote.events()
        pid = zygote.pid_of(token)
        assert pid is not None
        if was_stopped:
            zygote.signal(token, signal.SIGSTOP)
            board.wait(lambda: is_stopped(pid))
        assert fence(memory, 0, zygote, token)
        assert board.excluded(0) == 1
        final = board.final(0, 1)
        if was_stopped:  # by somebody else, who may continue it
            assert (is_stopped(pid), board.position(0)) == (True, final)
        else:
            board.wait(lambda: board.position(0) > final)
        assert board.final(0, 1) == final > 0
    finally:
        zygote.close(0.0)
        memory.close()


def test_words_of_a_board_are_read_as_they_were_written() -> None:
    memory = RoundsMemory(2)
    like = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0)]
    one, other = (SharedBoard(memory.fds, rank, like) for rank in range(2))
    one.ask(Asking(2, -1, 7, electing=True))
    assert other.asking(0) == Asking(2, -1, 7, electing=True)
    one.ask(None)
    assert other.asking(0) is None
    admission = RoundEntry(1 << 50, 1, (Member(0, 2, 3), Member(1, 1, 0, active=False)))
    one.admit(admission)
    assert other.admission(0) == admission
    header = Header("mean", 5, 6, 7, 8.5, (1,), ((1, 2),), "why", 3, 4, 9.5, 10, b"\x07", (0.1,), (0.2,))
    one.tensors(0, 1)[1].fill_(4.0)
    one.publish(1, 1 << 60, header)
    assert (other.published(0, 1), other.position(0), other.header(0, 1)) == (1 << 60, 1 << 60, header)
    assert other.tensors(0, 1)[1].tolist() == [[4.0, 4.0], [4.0, 4.0]]
    one.put_state(3, {"a": torch.arange(5), "b": [1, "two", None]})
    state = other.state(0, 3)
    assert (state["a"].tolist(), state["b"], other.state(0, 4)) == ([0, 1, 2, 3, 4], [1, "two", None], None)
    one.put_state(0, {"a": torch.ones(1 << 16)})  # room for a larger one
    assert other.state(0, 3)["a"].tolist() == [0, 1, 2, 3, 4] and other.state(0, 0) is None
    one.put_state(4, {"a": torch.ones(1 << 18)})
    assert other.state(0, 4)["a"].sum() == 1 << 18 and other.state(0, 3) is None
    memory.exclude(0)
    assert (other.excluded(0), other.final(0, 1)) == (1, 1 << 60)
    memory.close()
