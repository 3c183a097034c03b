"""Collective operations between real processes, in shared memory and over TCP; some are killed or stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rainband.collectives.algorithm import algorithm_names
from rainband.collectives.cost import LinkCosts
from rainband.collectives.group import Group, OnLost, RankLost, elements_of
from rainband.errors import PeerLost
from rainband.protocol.messages import Address
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.collectives import shared, tcp
from rainband.transports.collectives.connect import connect_ranks
from rainband.transports.collectives.memory import GroupMemory
from rainband.transports.collectives.shared import SharedGroup
from rainband.transports.collectives.tcp import TcpGroup
from rainband.transports.connect import listen_tcp
from tests.processes import DEADLINE_S

SIZES = (0, 1, 5, 1000, 200_003)
COSTS = LinkCosts(1e-6, 1e-10, 1e-11, 2)  # so that `auto` need not measure

both_transports = pytest.mark.parametrize("transport", ["shared memory", "tcp"])
pytestmark = pytest.mark.processes

Work = Callable[[Group], Any]


class Ranks:
    """The processes of a group; each leaves a report, or its error."""

    def __init__(self, folder: Path, num_ranks: int, transport: str) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self.memory = GroupMemory(num_ranks)
        self.listeners = [listen_tcp("127.0.0.1") for _ in range(num_ranks)] if transport == "tcp" else []
        self.secret, self.run_id = new_secret(), new_run_id()
        self.pids: list[int] = []

    def start(self, work: Work, on_lost: OnLost = "error", timeout_s: float = DEADLINE_S) -> None:
        for rank in range(self.num_ranks):
            pid = os.fork()
            if not pid:
                self._be(rank, work, on_lost, timeout_s)
            self.pids.append(pid)
        for listener in self.listeners:
            listener.close()

    def _be(self, rank: int, work: Work, on_lost: OnLost, timeout_s: float) -> None:
        torch.set_num_threads(1)
        report: dict[str, Any] = {}
        try:
            report["result"] = work(self.group(rank, on_lost, timeout_s))
        except RankLost as error:
            report |= {"lost": error.rank, "error": str(error)}
        except ValueError as error:
            report["error"] = str(error)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        (self.folder / f"{rank}.json").write_text(json.dumps(report))
        os._exit(0)

    def group(self, rank: int, on_lost: OnLost, timeout_s: float) -> Group:
        if not self.listeners:
            return SharedGroup(self.memory.fds, rank, on_lost, timeout_s, COSTS)
        addresses = {
            other: Address("127.0.0.1", listener.getsockname()[1], "", "")
            for other, listener in enumerate(self.listeners)
            if other != rank
        }
        for other, listener in enumerate(self.listeners):
            if other != rank:
                listener.close()
        sockets = connect_ranks(
            rank, addresses, self.listeners[rank], role_keys(self.secret, "worker"), self.run_id, DEADLINE_S
        )
        return TcpGroup(rank, sockets, on_lost, timeout_s, COSTS)

    def reports(self, without: set[int] = frozenset()) -> dict[int, Any]:  # type: ignore[assignment]
        """Wait for all ranks but some, and return their reports."""
        deadline = time.monotonic() + DEADLINE_S
        for rank, pid in enumerate(self.pids):
            while pid and rank not in without and not os.waitpid(pid, os.WNOHANG)[0]:
                assert time.monotonic() < deadline, f"rank {rank} waits for ever"
                os.sched_yield()
            if rank not in without:
                self.pids[rank] = 0
        files = {rank: self.folder / f"{rank}.json" for rank in range(self.num_ranks) if rank not in without}
        return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    def stop(self) -> None:
        for pid in self.pids:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.memory.close()


@contextmanager
def ranks(folder: Path, num_ranks: int, transport: str) -> Iterator[Ranks]:
    started = Ranks(folder, num_ranks, transport)
    try:
        yield started
    finally:
        started.stop()


def results(reports: dict[int, Any]) -> list[Any]:
    assert not [report["error"] for report in reports.values() if "error" in report]
    return [report["result"] for report in reports.values()]


def vector_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return whole numbers that differ by rank and element."""
    return ((torch.arange(size) % 5 + 1) * (rank + 1)).to(dtype)


def expected(members: list[int], size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return vector_of(sum(members) + len(members) - 1, size, dtype)


# ---- sums ----


def reduce_by_all_algorithms(group: Group) -> int:
    everyone, checked = list(range(group.num_ranks)), 0
    for name in [*algorithm_names(), "auto"]:
        for size in SIZES:
            vector = vector_of(group.rank, size)
            assert group.all_reduce(vector, name) == tuple(everyone)
            assert torch.equal(vector, expected(everyone, size)), (name, size)
            checked += 1
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        vector = vector_of(group.rank, 1000, dtype).view(10, 100)
        group.all_reduce(vector)
        assert torch.equal(vector.view(-1), expected(everyone, 1000, dtype)), dtype
    return checked


@both_transports
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_algorithm_sums_exactly(transport: str, num_ranks: int, tmp_path: Path) -> None:
    with ranks(tmp_path, num_ranks, transport) as started:
        started.start(reduce_by_all_algorithms)
        count = (len(algorithm_names()) + 1) * len(SIZES)
        assert results(started.reports()) == [count] * num_ranks


def large_sums(group: Group) -> list[int]:
    """Sum numbers whose sum depends on the order of additions; return hashes of the bits."""
    found = []
    for name in algorithm_names():
        torch.manual_seed(group.rank)
        vector = torch.randn(700_001)  # several chunks
        before = vector.double()
        group.all_reduce(vector, name)
        group.all_reduce(before, name)
        assert (vector - before).abs().max() < 1e-5
        found.append(hash(vector.numpy().tobytes()))
    return found


@both_transports
def test_all_ranks_get_the_same_bits(transport: str, tmp_path: Path) -> None:
    with ranks(tmp_path, 4, transport) as started:
        started.start(large_sums)
        first, *others = results(started.reports())
        assert all(other == first for other in others)


def in_segment(group: Group) -> list[float]:
    assert isinstance(group, SharedGroup)
    vector = group.vector(150_000)
    for name in algorithm_names():
        for start, end in ((0, 150_000), (7, 100_007), (149_000, 150_000)):
            vector.fill_(-1.0)
            vector[start:end] = vector_of(group.rank, end - start)
            group.all_reduce(vector[start:end], name)
            assert torch.equal(vector[start:end], expected([0, 1, 2], end - start)), name
            assert (vector[:start] == -1).all() and (vector[end:] == -1).all()
    return vector[-3:].tolist()


def test_a_vector_in_the_segment_is_summed_in_place(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, "shared memory") as started:
        started.start(in_segment)
        last = expected([0, 1, 2], 1000)[-3:].tolist()
        assert results(started.reports()) == [last] * 3


def other_operations(group: Group) -> list[list[float]]:
    found = []
    for name in ("direct", "ring", "halving_doubling"):
        vector = vector_of(group.rank, 1000)
        own = group.reduce_scatter(vector, name)
        assert torch.equal(vector[own.start : own.stop], expected([0, 1, 2, 3], 1000)[own.start : own.stop])
        rest = vector.clone().fill_(-7.0)
        rest[own.start : own.stop] = vector[own.start : own.stop]
        group.all_gather(rest, name)
        assert torch.equal(rest, expected([0, 1, 2, 3], 1000))
    for root in range(4):
        vector = vector_of(group.rank, 50)
        group.broadcast(vector, root)
        assert torch.equal(vector, vector_of(root, 50))
        group.reduce(vector.copy_(vector_of(group.rank, 50)), root)
        found.append(vector[:2].tolist() if root == group.rank else [10.0, 20.0])
    group.barrier()
    return found


@both_transports
def test_the_other_operations(transport: str, tmp_path: Path) -> None:
    with ranks(tmp_path, 4, transport) as started:
        started.start(other_operations)
        assert results(started.reports()) == [[[10.0, 20.0]] * 4] * 4


def run_ahead(group: Group) -> float:
    """Broadcast many times: the root waits for nobody, except for memory that others still read."""
    total = 0.0
    for number in range(200):
        vector = torch.full((3000,), float(number) if group.rank == 0 else -1.0)
        group.broadcast(vector)
        assert (vector == number).all()
        total += float(vector[0])
    return total


@both_transports
def test_a_root_does_not_overwrite_what_is_still_read(transport: str, tmp_path: Path) -> None:
    with ranks(tmp_path, 3, transport) as started:
        started.start(run_ahead)
        assert results(started.reports()) == [19_900.0] * 3


def outlive(folder: Path) -> Work:
    """Receive broadcasts: rank 2 makes all calls and ends before rank 1 goes on, which needs nothing of it."""

    def work(group: Group) -> float:
        total = 0.0
        for number in range(20):
            if (group.rank, number) == (1, 10):
                await_file(folder / "2.json")
            vector = torch.full((16,), float(number) if group.rank == 0 else -1.0)
            group.broadcast(vector)
            total += float(vector[0])
        return total

    return work


def await_file(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is not written"
        os.sched_yield()


def test_a_rank_that_has_made_all_calls_is_not_lost_to_one_that_needs_it_no_more(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, "tcp") as started:
        started.start(outlive(tmp_path))
        assert results(started.reports()) == [190.0] * 3


def measured(group: Group) -> list[float]:
    costs = group.measure_costs(rounds=3)
    group.costs = costs
    vector = vector_of(group.rank, 2000)
    group.all_reduce(vector)
    assert torch.equal(vector, expected([0, 1, 2], 2000))
    return list(costs)


@both_transports
def test_all_ranks_measure_the_same_costs(transport: str, tmp_path: Path) -> None:
    with ranks(tmp_path, 3, transport) as started:
        started.start(measured)
        first, *others = results(started.reports())
        assert others == [first, first]
        assert first[0] > 0 and first[1] > 0


# ---- mistakes ----


def different_sizes(group: Group) -> None:
    group.all_reduce(torch.zeros(100 + group.rank), "direct")


@both_transports
def test_vectors_of_different_sizes_are_refused(transport: str, tmp_path: Path) -> None:
    with ranks(tmp_path, 2, transport) as started:
        started.start(different_sizes, timeout_s=1.0)
        errors = [report.get("error", "") for report in started.reports().values()]
        assert any("all ranks must make the same calls, with vectors of the same size and dtype" in e for e in errors)


@pytest.mark.parametrize(
    "vector", [torch.zeros(4, 4).t()[1:], torch.zeros(3, dtype=torch.bool), torch.zeros(3, device="meta")]
)
def test_a_tensor_that_cannot_be_summed_is_refused(vector: Tensor) -> None:
    memory = GroupMemory(1)
    with pytest.raises(ValueError, match="collective operations take contiguous CPU tensors of float32"):
        SharedGroup(memory.fds, 0).all_reduce(vector)
    memory.close()


@pytest.mark.parametrize("root", [-1, 1])
def test_a_root_must_be_a_rank(root: int) -> None:
    memory = GroupMemory(1)
    with pytest.raises(ValueError, match=f"root={root}: it must be a rank, from 0 to 0"):
        SharedGroup(memory.fds, 0).broadcast(torch.zeros(3), root)
    memory.close()


def test_a_missing_connection_is_refused() -> None:
    ends = socket.socketpair()
    with pytest.raises(ValueError, match=r"rank 0 has connections to \[2\]"):
        TcpGroup(0, {2: ends[0]})
    for end in ends:
        end.close()


def test_a_rank_that_does_not_connect_is_named() -> None:
    listener = listen_tcp("127.0.0.1")
    with pytest.raises(PeerLost, match="lost rank 1, rank 2 while waiting for its connection"):
        connect_ranks(0, {1: None, 2: None}, listener, role_keys(new_secret(), "worker"), new_run_id(), 0.05)  # type: ignore[dict-item]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 1000, 4097])
@pytest.mark.parametrize(("parts", "chunks"), [(1, 1), (3, 1), (4, 3), (7, 2)])
def test_slices_cover_a_vector_once(size: int, parts: int, chunks: int) -> None:
    slices = [elements_of(size, parts, chunks, p, p + 1, k) for p in range(parts) for k in range(chunks)]
    assert [element for each in slices for element in each] == list(range(size))
    assert [*elements_of(size, parts, 1, 0, parts, 0)] == list(range(size))


# ---- lost ranks ----


def die_at_addition(number: int) -> None:
    """Have this process kill itself before one of its next additions of bfloat16 vectors."""
    left = [number]
    for module in (shared, tcp):
        original = module._torch_add

        def add(*arguments: Any, original: Any = original) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            original(*arguments)

        module._torch_add = add  # type: ignore[attr-defined]


def sums_with_a_death(name: str, victim: int, at: int) -> Work:
    def work(group: Group) -> list[Any]:
        group.barrier()
        if group.rank == victim:
            die_at_addition(at)
        found = []
        for number in range(3):
            vector = vector_of(group.rank, 3000, torch.bfloat16).mul_(number + 1)
            members = list(group.all_reduce(vector, name))
            assert torch.equal(vector, expected(members, 3000, torch.bfloat16).mul_(number + 1)), members
            found.append(members)
        return found

    return work


@both_transports
@pytest.mark.parametrize("name", ["direct", "ring", "recursive_doubling", "double_tree"])
@pytest.mark.parametrize("at", [0, 2])
def test_the_others_continue_without_a_rank_that_dies_in_the_middle(
    transport: str, name: str, at: int, tmp_path: Path
) -> None:
    with ranks(tmp_path, 4, transport) as started:
        started.start(sums_with_a_death(name, victim=2, at=at), "continue")
        found = results(started.reports())
        assert len(found) == 3 and found[0] == found[1] == found[2]
        assert found[0][-1] == [0, 1, 3]


@both_transports
@pytest.mark.parametrize("name", ["direct", "ring", "halving_doubling", "double_tree"])
@pytest.mark.parametrize("at", [0, 1])
def test_the_error_names_a_rank_that_dies_in_the_middle(transport: str, name: str, at: int, tmp_path: Path) -> None:
    with ranks(tmp_path, 4, transport) as started:
        started.start(sums_with_a_death(name, victim=2, at=at), "error")
        reports = started.reports()
        assert sorted(reports) == [0, 1, 3]
        assert [report["lost"] for report in reports.values()] == [2, 2, 2]
        assert all("lost rank 2 while doing an all-reduce" in report["error"] for report in reports.values())


FOREVER = 1_000_000


def sums_of(folder: Path, rounds: int) -> Work:
    """Sum vectors whose values tell the round; return the members of each round, and write how far this rank is.

    With FOREVER, stop three rounds after a rank was lost.
    """

    def work(group: Group) -> list[Any]:
        found = []
        progress = folder / f"{group.rank}.round"
        for number in range(rounds):
            size = (16, 5000, 60_000)[number % 3]
            vector = vector_of(group.rank, size).mul_(number + 1)
            name = ("direct", "ring", "recursive_doubling", "halving_doubling", "double_tree")[number % 5]
            members = list(group.all_reduce(vector, name))
            assert torch.equal(vector, expected(members, size).mul_(number + 1)), (number, members)
            found.append(members)
            progress.write_text(str(number))
            if rounds == FOREVER and len(members) < group.num_ranks and len(found[-4]) < group.num_ranks:
                break
        return found

    return work


def await_round(folder: Path, rank: int, number: int) -> None:
    deadline, file = time.monotonic() + DEADLINE_S, folder / f"{rank}.round"
    while not file.exists() or int(file.read_text() or 0) < number:
        assert time.monotonic() < deadline, "the ranks make no progress"
        os.sched_yield()


def kill_some(started: Ranks, folder: Path, chance: random.Random, victims: list[int]) -> None:
    await_round(folder, victims[0], chance.randrange(30))
    for victim in victims:
        for _ in range(chance.randrange(20_000)):
            pass
        os.kill(started.pids[victim], signal.SIGKILL)


@both_transports
@pytest.mark.parametrize("seed", range(4))
def test_survivors_agree_on_each_round_whenever_ranks_are_killed(transport: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    num_ranks = chance.choice([2, 3, 4, 5])
    victims = chance.sample(range(num_ranks), 1 if num_ranks < 4 else 2)
    with ranks(tmp_path, num_ranks, transport) as started:
        started.start(sums_of(tmp_path, 60), "continue")
        kill_some(started, tmp_path, chance, victims)
        reports = started.reports()
        survivors = [rank for rank in range(num_ranks) if rank not in victims]
        assert set(reports) >= set(survivors)
        found = results({rank: reports[rank] for rank in survivors})
        assert all(each == found[0] for each in found)
        assert set(found[0][-1]) >= set(survivors)
        sizes = [len(members) for members in found[0]]
        assert sizes == sorted(sizes, reverse=True)


def test_a_stopped_rank_that_is_excluded_learns_of_it_when_it_goes_on(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, "shared memory") as started:
        started.start(sums_of(tmp_path, FOREVER), "continue")
        await_round(tmp_path, 1, 5)
        os.kill(started.pids[1], signal.SIGSTOP)
        await_stopped(started.pids[1])
        started.memory.exclude(1)
        found = results(started.reports(without={1}))
        assert found[0] == found[1] and found[0][-1] == [0, 2]
        os.kill(started.pids[1], signal.SIGCONT)
        report = started.reports()[1]
        assert report["lost"] == 1 and "the others went on without it" in report["error"]


@both_transports
def test_a_rank_that_hangs_is_lost_after_the_timeout(transport: str, tmp_path: Path) -> None:
    with ranks(tmp_path, 3, transport) as started:
        started.start(sums_of(tmp_path, FOREVER), "continue", timeout_s=0.3)
        await_round(tmp_path, 1, 5)
        os.kill(started.pids[1], signal.SIGSTOP)
        found = results(started.reports(without={1}))
        assert found[0] == found[1] and found[0][-1] == [0, 2]
        os.kill(started.pids[1], signal.SIGCONT)
        report = started.reports()[1]
        assert report["lost"] == 1 and "the others went on without it" in report["error"]


def await_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


def end_early(group: Group) -> int:
    """Let ranks end at once after the last round: others may still be reading."""
    vector = vector_of(group.rank, 50_000)
    group.all_reduce(vector, "ring")
    assert torch.equal(vector, expected([0, 1, 2, 3], 50_000))
    return int(vector[0])


@both_transports
@pytest.mark.parametrize("on_lost", ["error", "continue"])
def test_a_rank_may_end_as_soon_as_it_has_its_sum(transport: str, on_lost: OnLost, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            started = stack.enter_context(ranks(folder, 4, transport))
            started.start(end_early, on_lost)
            assert results(started.reports()) == [10] * 4
