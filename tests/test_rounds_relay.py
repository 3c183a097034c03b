"""Rounds of split batches whose workers are on several machines: real processes, and a network inside this one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rainband.protocol.messages import Message, Peer, RoundAudience, RoundData, RoundWords, decode, encode
from rainband.rounds.board import Asking
from rainband.rounds.view import Header
from rainband.runtimes.machines import rounds_relay
from rainband.runtimes.machines.rounds_relay import MachineRelay, RunRelay, put, taken
from rainband.transports.shared_rounds import AREA_BYTES, EXCLUDED, FINAL, LIFE, POSITION, RoundsMemory, SharedBoard
from tests.test_shared_rounds import EPOCHS, SAMPLES, Train, check, count_samples, start

RUN = Peer("coordinator", 0)
LIMIT_S = 40.0


class Network:
    """The memories of some machines, the first of which is that of the run, and messages between them, in order."""

    def __init__(self, machines: list[list[int]]) -> None:
        self.machines = machines  # the workers of each
        self.num_ranks = sum(map(len, machines))
        self.memories = [RoundsMemory(self.num_ranks, is_mirror=number > 0) for number in range(len(machines))]
        self.peers = [Peer("machine", number) for number in range(len(machines))]
        self.to_run: deque[tuple[int, bytes, bytes | None]] = deque()
        self.to_machine: list[deque[tuple[bytes, bytes | None]]] = [deque() for _ in machines]
        self.cut: set[int] = set()  # machines whose messages do not arrive
        self.run = RunRelay(self.memories[0], machines[0], self._from_run, lambda peer: self._backlog(peer.index))
        self.relays = [
            MachineRelay(self.memories[number], machines[number], self._sender(number), RUN)
            for number in range(1, len(machines))
        ]
        for number in range(1, len(machines)):
            self.run.joined(self.peers[number], machines[number])
        self.run.pump()
        for relay in self.relays:
            relay.connected()
        self.num_data = 0  # messages with tensors or states that the run's machine has received
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.failed: Exception | None = None

    def _from_run(self, to: Peer, message: Message, body: bytes | None) -> None:
        self.to_machine[to.index].append((encode(message), body))

    def _sender(self, number: int) -> object:
        def send(to: Peer, message: Message, body: bytes | None) -> None:
            self.to_run.append((number, encode(message), body))

        return send

    def _backlog(self, number: int) -> int:
        return sum(len(body or b"") for _, body in self.to_machine[number])

    def machine_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.machines) if rank in ranks)

    def exclude(self, rank: int) -> None:
        with self.lock:
            self.memories[0].exclude(rank)
            self.run.look()

    def reconnect(self, number: int) -> None:
        """Lose what is on its way, and connect a machine again."""
        with self.lock:
            self.cut.discard(number)
            self.to_machine[number].clear()
            self.to_run = deque(one for one in self.to_run if one[0] != number)
            self.run.joined(self.peers[number], self.machines[number])
            self.relays[number - 1].connected()

    def turn(self) -> bool:
        """Deliver some messages; return True if there were any."""
        self.run.look()
        for relay in self.relays:
            relay.look()
        busy = False
        for _ in range(len(self.to_run)):
            number, head, body = self.to_run.popleft()
            if number in self.cut:
                self.to_run.append((number, head, body))
                continue
            busy = True
            message = decode(head)
            assert isinstance(message, RoundData | RoundWords)
            self.num_data += isinstance(message, RoundData)
            self.run.receive(self.peers[number], message, None if body is None else memoryview(body))
        for number, relay in enumerate(self.relays, 1):
            while self.to_machine[number] and number not in self.cut:
                busy = True
                head, body = self.to_machine[number].popleft()
                message = decode(head)
                assert isinstance(message, RoundData | RoundWords | RoundAudience)
                relay.receive(message, None if body is None else memoryview(body))
        self.run.pump()
        return busy

    def _carry(self) -> None:
        try:
            while not self.over.is_set():
                with self.lock:
                    busy = self.turn()
                if not busy:
                    os.sched_yield()
        except Exception as error:
            self.failed = error

    @contextmanager
    def carrying(self) -> Iterator[None]:
        thread = threading.Thread(target=self._carry)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()
            for memory in self.memories:
                memory.close()
        assert self.failed is None, self.failed


@contextmanager
def workers(network: Network, folder: Path, train: Train = count_samples) -> Iterator[dict[int, int]]:
    """Fork the workers of all machines."""
    pids = {
        rank: start(network.memories[number], rank, folder, train)
        for number, ranks in enumerate(network.machines)
        for rank in ranks
    }
    with network.carrying():
        try:
            yield pids
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def reap(network: Network, pids: dict[int, int]) -> None:
    """Wait for all workers, and exclude each when it has ended."""
    deadline = time.monotonic() + LIMIT_S
    while pids:
        assert network.failed is None, network.failed
        assert time.monotonic() < deadline, "the survivors wait for a worker that is gone"
        for rank, pid in list(pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del pids[rank]
                network.exclude(rank)
        os.sched_yield()


def await_changes(network: Network, rank: int, number: int) -> None:
    """Wait until the run's machine has seen this number of changes of a worker's position."""
    words = network.memories[0].words.of[rank]
    last, deadline = words[POSITION], time.monotonic() + LIMIT_S
    while number and not words[EXCLUDED]:
        assert time.monotonic() < deadline, "the workers wait for each other"
        if words[POSITION] != last:
            number, last = number - 1, words[POSITION]


# ---- words ----------------------------------------------------------------------------------------------------------


def test_words_of_a_worker_arrive_as_they_were_written_and_return_to_it() -> None:
    network = Network([[0], [1], [2]])
    with network.carrying():
        one, two, three = (SharedBoard(memory.fds, rank, []) for rank, memory in enumerate(network.memories))
        two.set_life(3)
        two.publish(1, 77, Header("skip", 1, 2, 3, reason="why"))  # returns when its words have come back
        assert (two.position(1), two.life(1), two.published(1, 1)) == (77, 3, 77)
        assert (one.position(1), one.header(1, 1).reason) == (77, "why")
        three.wait(lambda: three.position(1) == 77)
        assert three.header(1, 1).reason == "why"


def test_a_worker_is_excluded_where_the_run_is_and_its_later_words_are_dropped() -> None:
    network = Network([[0], [1], [2]])
    with network.carrying():
        boards = [SharedBoard(memory.fds, rank, []) for rank, memory in enumerate(network.memories)]
        late = boards[1]
        late.set_life(1)
        late.publish(0, 5, Header("skip", 1, 2, 3))
        with network.lock:
            network.cut.add(1)
        network.exclude(1)
        late.set_position(9)  # it does not know
        with network.lock:
            network.cut.discard(1)
        for board in boards:
            board.wait(lambda board=board: board.excluded(1) == 1)  # type: ignore[misc]
            assert (board.final(1, 1), board.position(1)) == (5, 5)
        late.publish(1, 9, Header("skip", 1, 2, 3))  # returns, because its life is excluded
        late.set_life(2)
        late.publish(1, 12, Header("skip", 1, 2, 3))
        assert (boards[0].position(1), boards[0].excluded(1)) == (12, 1)


def test_a_worker_that_excludes_itself_is_excluded_everywhere() -> None:
    network = Network([[0], [1]])
    with network.carrying():
        one, two = (SharedBoard(memory.fds, rank, []) for rank, memory in enumerate(network.memories))
        two.set_life(1)
        two.set_position(8)
        two.exclude()
        assert (one.excluded(1), one.final(1, 1), two.excluded(1), two.final(1, 1)) == (1, 8, 1, 8)


def test_a_worker_that_has_moved_leaves_its_earlier_machine_behind() -> None:
    """A process may still run there, and its memory is not what the others see: nothing more is taken from it."""
    network = Network([[], [0, 1], [2]])
    with network.carrying():
        moved, beside, other = (SharedBoard(network.memories[n].fds, rank, []) for n, rank in ((1, 0), (1, 1), (2, 2)))
        moved.set_life(1)
        beside.set_life(1)
        moved.publish(0, 5, Header("skip", 1, 2, 3))
        with network.lock:
            network.run.memory.exclude(0)
            network.run.joined(network.peers[2], [0, 2])
            network.relays[1].ranks.add(0)
        other.wait(lambda: other.excluded(1) == 1)  # it was on the same machine
        again = SharedBoard(network.memories[2].fds, 0, [])
        again.set_life(2)
        again.publish(0, 6, Header("skip", 1, 2, 3))
        moved.set_life(3)  # a ghost
        moved.set_position(9)
        beside.set_life(2)
        again.publish(1, 7, Header("skip", 1, 2, 3))
        other.wait(lambda: other.position(0) == 7)
        assert (other.life(0), other.life(1)) == (2, 1)


def test_a_machine_that_had_all_workers_sends_their_tensors_when_another_one_joins() -> None:
    network = Network([[], [0], [1]])
    tensors = [torch.arange(4.0)]
    network.run.left(network.peers[2])
    network.run.is_spread = False
    with network.carrying():
        one, two = (SharedBoard(network.memories[n].fds, n - 1, tensors) for n in (1, 2))
        one.set_life(1)
        one.publish(1, 5, Header("mean", 1, 2, 3))
        assert network.num_data == 0
        with network.lock:
            network.run.joined(network.peers[2], [1])
        two.set_life(1)
        two.ask(Asking(life=1, steps=0, since=0))
        one.wait(lambda: one.asking(1) is not None)
        one.tensors(0, 0)[0].copy_(tensors[0])
        one.publish(0, 6, Header("mean", 1, 2, 3))
        two.wait(lambda: two.position(0) == 6)
        assert network.num_data == 2  # of both slots
        assert torch.equal(two.tensors(0, 0)[0], tensors[0])


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4])
def test_tensors_are_passed_on_as_they_arrive_and_each_byte_once(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Without room on the way to the other machine, the rest follows with the words."""
    monkeypatch.setattr(rounds_relay, "CHUNK_BYTES", 4)
    monkeypatch.setattr(rounds_relay, "AHEAD_BYTES", 1)
    sent: list[tuple[Message, bytes | None]] = []
    memory = RoundsMemory(2)
    source, reader = Peer("machine", 1), Peer("machine", 2)
    there = iter([0] * room + [1] * 20)
    relay = RunRelay(memory, (), lambda to, message, body: sent.append((message, body)), lambda to: next(there))
    relay.joined(source, [0])
    relay.joined(reader, [1])
    elsewhere = RoundsMemory(2)
    board = SharedBoard(elsewhere.fds, 0, [])
    board.set_life(1)
    elsewhere.words.of[0][AREA_BYTES] = 16
    content = bytes(range(16))
    for slot, position in ((1, 5), (0, 6), (1, 7)):  # the same slot again
        there = iter([0] * 20)
        for at in range(0, 16, 4):  # once more, as after a lost connection, and without new words
            relay.receive(source, RoundData(0, 1, slot, at, 16), memoryview(content)[at : at + 4])
        content = bytes(reversed(content))
        there = iter([0] * room + [1] * (4 - room) + [0] * 20)
        del sent[:]
        for at in range(0, 16, 4):
            relay.receive(source, RoundData(0, 1, slot, at, 16), memoryview(content)[at : at + 4])
        assert [message.offset for message, _ in sent if isinstance(message, RoundData)] == list(range(0, 4 * room, 4))
        board.publish(slot, position, Header("mean", 1, 2, 3))
        relay.receive(source, taken(elsewhere.words.bytes[0]).message(0), None)
        to_reader = [(message, body) for message, body in sent if getattr(message, "rank", 0) == 0]
        parts = [body for message, body in to_reader if isinstance(message, RoundData)]
        assert b"".join(part or b"" for part in parts) == content
        assert isinstance(to_reader[-1][0], RoundWords)
    memory.close()
    elsewhere.close()


def test_words_are_copied_as_they_were_at_one_instant() -> None:
    """The same words again change nothing; those of an excluded life keep what was decided."""
    memory = RoundsMemory(2)
    board = SharedBoard(memory.fds, 0, [])
    board.set_life(1)
    board.publish(0, 5, Header("skip", 1, 2, 3))
    words = taken(memory.words.bytes[0])
    put(memory.words.bytes[1], words)
    assert taken(memory.words.bytes[1]) == words
    assert (memory.words.of[1][LIFE], memory.words.of[1][POSITION], memory.words.of[1][FINAL]) == (1, 5, 0)
    memory.close()


# ---- training -------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "two": [[0], [1]],
    "three": [[0], [1], [2]],
    "pairs": [[0, 1], [2, 3]],
    "elsewhere": [[], [0, 1]],
    "apart": [[], [0], [1]],
}


@pytest.mark.processes
@pytest.mark.parametrize("machines", LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_sample_is_applied_once_on_all_machines(machines: list[list[int]], tmp_path: Path) -> None:
    network = Network(machines)
    with workers(network, tmp_path) as pids:
        reap(network, pids)
    for report in check(tmp_path, list(range(network.num_ranks))):
        assert report["view"] == [EPOCHS * SAMPLES, 0, 0, 0, network.num_ranks - 1]
    # A machine that has all workers sends their words, which must be put in order, but not their tensors.
    assert (network.num_data == 0) == (machines == LAYOUTS["elsewhere"])


def _has_reported(folder: Path, rank: int) -> bool:
    file = folder / f"{rank}.json"
    return file.exists() and file.stat().st_size > 0  # empty: it was killed at its end


def run_with_event(folder: Path, seed: int, machines: list[list[int]]) -> None:
    """Kill a worker, or cut its machine off and exclude its workers; either may also lose what is on its way."""
    chance = random.Random(seed)
    network = Network(machines)
    with workers(network, folder) as pids:
        victim = chance.randrange(network.num_ranks)
        number = network.machine_of(victim)
        await_changes(network, victim, chance.randrange(1, 60))
        lost = {victim}
        if number and seed % 2:
            with network.lock:
                network.cut.add(number)
            lost = set(network.machines[number])
            for rank in lost:
                network.exclude(rank)
            await_changes(network, next(rank for rank in pids if rank not in lost), chance.randrange(1, 40))
            if seed % 4 == 1:
                network.reconnect(number)
            else:
                with network.lock:
                    network.cut.discard(number)
        else:
            os.kill(pids[victim], signal.SIGKILL)
        reap(network, pids)
    there = [rank for rank in range(network.num_ranks) if _has_reported(folder, rank)]
    assert set(there) >= set(range(network.num_ranks)) - lost
    check(folder, there, same=False)


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(4))
def test_machines_that_were_cut_off_and_workers_that_died_change_no_sum(seed: int, tmp_path: Path) -> None:
    run_with_event(tmp_path, seed, LAYOUTS["pairs"])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["two", "three", "pairs"])
def test_machines_may_be_cut_off_at_many_instants(name: str, tmp_path: Path) -> None:
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_with_event(folder, 100 + seed, LAYOUTS[name])
