"""A real server behind its hub, in a thread: what arrives through shared memory and TCP, and who is turned away."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from rainband.errors import HandshakeFailed, ServerLost
from rainband.protocol.data_plan import BatchRange, DataPlan
from rainband.protocol.layout import LayoutEntry, arrange, cut
from rainband.protocol.messages import (
    COORDINATOR,
    Ack,
    Address,
    Assign,
    BlockReady,
    Flush,
    Forget,
    Hello,
    InitBlock,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    PushResult,
    Revoke,
    Shutdown,
    encode,
)
from rainband.protocol.worker_stats import Stats
from rainband.runtimes.config import Job, RunConfig
from rainband.runtimes.processes.server_process import ServerProcess
from rainband.transports import frames
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.collectives.memory import GroupMemory, GroupWords
from rainband.transports.connect import connect, listen_tcp, listen_unix, this_machine
from rainband.transports.event_loop import EventLoop
from rainband.transports.hub import MAX_UNKNOWN
from rainband.transports.server_links import SharedPort, TcpPort
from rainband.transports.shared_memory import PAGE, READ_TRIES, Mailbox, Published, SharedSegment
from rainband.transports.shared_rounds import RoundsMemory, SharedBoard
from tests.processes import DEADLINE_S, RunLauncher, exact, wait_for

PLAN = DataPlan(fingerprint="", layout="", num_samples=64, batch_size=1, epochs=1, seed=0, portion_batches=64)
KEYS, RUN_ID = role_keys(new_secret()), new_run_id()
SERVER = Peer("server", 0)
SMALL = (16,)  # one block of 16 elements


class Served:
    """A server with blocks of its own, whose loop a thread drives, or the test itself, step by step."""

    def __init__(self, sizes: tuple[int, ...] = SMALL, dtype: str = "float32", timeout_s: float = 5.0) -> None:
        config = RunConfig(
            task="",
            strategy="downpour",
            strategy_settings={"optimizer": "sgd", "lr": 0.5},
            num_workers=2,
            num_servers=1,
            failure_timeout_s=timeout_s,
        )
        job = Job(role="server", index=0, run_id=RUN_ID, keys=KEYS, coordinator=Address("", 0), config=config)
        tcp = listen_tcp("127.0.0.1")
        self.process = ServerProcess(job, tcp)
        self.server = self.process.server
        self.hub = self.process.hub
        layout = arrange([LayoutEntry(f"p{i}", (size,), dtype) for i, size in enumerate(sizes)])
        self.specs = cut(layout, 1, block_bytes=1 << 18)
        self.process.receive(_FromCoordinator(), Assign(PLAN, self.specs, layout.groups, 2), None)  # type: ignore[arg-type]
        unix = listen_unix(f"rainband-test-{os.getpid()}-{id(self)}")
        self.hub.listen(unix)
        self.hub.listen(tcp)
        self.address = Address("127.0.0.1", tcp.getsockname()[1], unix.getsockname()[1:].decode(), this_machine())
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        self.going = True
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while self.going:
            self.hub.run_once(0.01)

    def stop(self) -> None:
        if self.thread is not None:
            self.going = False
            self.thread.join()
            self.thread = None

    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class _FromCoordinator:
    peer = COORDINATOR
    mailbox = None


@contextmanager
def served(*args: Any, **kwargs: Any) -> Iterator[Served]:
    server = Served(*args, **kwargs)
    server.start()
    try:
        yield server
    finally:
        assert server.is_alive() or server.thread is None, "an error ended the server"
        server.stop()
        server.hub.close()


class Worker:
    """A worker's end: a port, and what came through it."""

    def __init__(self, server: Served, transport: str, index: int = 0) -> None:
        self.server = server
        self.me = Peer("worker", index)
        self.event_loop = EventLoop()
        self.came: list[tuple[Message, Tensor | None]] = []
        self.sequence = 0
        sock, _, key = connect(server.address, transport == "shm", KEYS, RUN_ID, self.me, DEADLINE_S)
        self.sock = sock
        self.port: SharedPort | TcpPort
        if transport == "shm":
            self.port = SharedPort(SERVER, sock, key, server.specs, self.event_loop, self._deliver, Stats())
        else:
            self.port = TcpPort(SERVER, sock, key, server.specs, self.event_loop, self._deliver, Stats())

    def _deliver(self, message: Message, payload: Tensor | None) -> None:
        self.came.append((message, None if payload is None else payload.clone()))

    def wait(self, kind: type[Message], number: int) -> list[tuple[Any, Tensor | None]]:
        """Wait until `number` messages of a kind have arrived."""
        until = time.monotonic() + DEADLINE_S
        while len(found := [(m, p) for m, p in self.came if isinstance(m, kind)]) < number:
            assert time.monotonic() < until, f"{number} x {kind.__name__} expected, {self.came} came"
            self.event_loop.wait(0.1)
        return found

    def load_zeros(self) -> None:
        for spec in self.server.specs:
            self.port.push(InitBlock(spec.index, spec.dtype, spec.numel), Written(Tensor.zero_))
        self.wait(BlockReady, len(self.server.specs))

    def push(self, batch: int, fill: Callable[[Tensor, int], object], **changed: Any) -> None:
        """Push one batch to every block; `fill` is given the memory and the block's number."""
        self.sequence += 1
        for spec in self.server.specs:
            fields = {
                "block": spec.index,
                "worker": self.me.index,
                "sequence": self.sequence,
                "push_id": (BatchRange(0, batch, batch + 1, 1),),
                "samples": 1,
                "clock": 1,
                "term": 1,
                "version": 0,
                "dtype": spec.dtype,
                "numel": spec.numel,
            }

            def write(out: Tensor, index: int = spec.index) -> None:
                fill(out, index)

            self.port.push(Push(**{**fields, **changed}), Written(write))

    def push_ones(self, batch: int) -> str:
        """Push, wait, and say what became of it on the last block."""
        before = len([m for m, _ in self.came if isinstance(m, Ack)])
        self.push(batch, lambda out, index: out.fill_(1.0))
        result: str = self.wait(Ack, before + len(self.server.specs))[-1][0].result
        return result

    def read_all(self) -> list[Tensor]:
        """The parameters of every block, as the server has them."""
        specs = self.server.specs
        if isinstance(self.port, SharedPort):
            blocks = [torch.empty(spec.numel, dtype=getattr(torch, spec.dtype)) for spec in specs]
            for spec, out in zip(specs, blocks, strict=True):
                self.port.read(spec, -1, out)
            return blocks
        self.sequence += 1
        self.port.send(Pull(self.sequence))
        answers = [(m, p) for m, p in self.wait(Params, len(specs)) if m.sequence == self.sequence]
        return [p for _, p in sorted(answers, key=lambda answer: answer[0].block) if p is not None]


class Written:
    """Values that a function writes."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        self._write = write

    def write(self, out: Tensor) -> None:
        self._write(out)

    def contiguous(self) -> Tensor | None:
        return None


def connect_raw(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.address.port), timeout=DEADLINE_S)


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side closes; what it says before does not matter."""
    with suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    sock.close()
    return True


# ---- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_pushes_arrive_and_parameters_come_back_to_the_last_bit(transport: str, dtype: str) -> None:
    """Odd sizes on purpose. From zeros, one step with the learning rate 1/2 gives exactly minus half the gradient."""
    with served((1, 17, 300_001), dtype) as server:
        worker = Worker(server, transport)
        worker.load_zeros()
        generator = torch.Generator().manual_seed(1)
        gradients = [torch.randn(spec.numel, generator=generator).to(getattr(torch, dtype)) for spec in server.specs]
        worker.push(0, lambda out, index: out.copy_(gradients[index]))
        assert {ack.result for ack, _ in worker.wait(Ack, len(server.specs))} == {PushResult.ACCEPTED}
        for spec, gradient, found in zip(server.specs, gradients, worker.read_all(), strict=True):
            wanted = -0.5 * gradient
            for segment in spec.segments:  # what lies between segments belongs to nobody
                assert torch.equal(
                    found.view(wanted.dtype)[segment.start : segment.stop], wanted[segment.start : segment.stop]
                )


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_push_that_comes_twice_is_acknowledged_twice_and_applied_once(transport: str) -> None:
    with served() as server:
        worker = Worker(server, transport)
        worker.load_zeros()
        assert [worker.push_ones(batch) for batch in (3, 3, 4)] == [
            PushResult.ACCEPTED,
            PushResult.DUPLICATE,
            PushResult.ACCEPTED,
        ]
        assert worker.read_all()[0].view(torch.float32).tolist() == [-1.0] * 16


def test_a_mailbox_slot_is_free_again_when_it_is_acknowledged_and_not_before() -> None:
    with served((16, 1 << 16, 1 << 16)) as server:
        worker = Worker(server, "shm")
        worker.load_zeros()
        port = worker.port
        assert isinstance(port, SharedPort)
        server.stop()
        slots = port.mailbox.slots
        assert len(port.free) == slots == len(server.specs)
        worker.push(0, lambda out, index: out.fill_(1.0 + index))
        assert not port.free
        assert not worker.event_loop.wait(0.0)
        kept = [port.mailbox.tensor(slot, "float32", 16)[0].item() for slot in range(slots)]
        assert sorted(kept) == [1.0 + index for index in range(slots)]
        server.hub.run_once(DEADLINE_S)
        assert not port.free  # it has answered, but we have not heard it
        worker.wait(Ack, slots)
        assert sorted(port.free) == list(range(slots))


def test_who_waits_for_room_in_its_mailbox_waits_for_nobody_by_name() -> None:
    with served((16, 1 << 16, 1 << 16)) as server:
        worker = Worker(server, "shm")
        worker.load_zeros()
        port = worker.port
        assert isinstance(port, SharedPort)
        server.stop()
        worker.push(0, lambda out, index: out.fill_(1.0))
        assert port.stats.waited_s == 0.0  # there was room for all of it
        port.stats.held_by = 3  # a pull is under way, which another worker holds up
        server.start()
        worker.push(1, lambda out, index: out.fill_(1.0))
        assert port.stats.waited_s > 0.0 and not port.stats.waiting
        assert (port.stats.held_by, dict(port.stats.waited_for)) == (3, {})


def test_a_slot_is_freed_by_a_refusal_too() -> None:
    with served() as server:
        worker = Worker(server, "shm")
        worker.load_zeros()
        assert isinstance(worker.port, SharedPort)
        for _ in range(2 * worker.port.mailbox.slots):
            worker.push(0, lambda out, index: out, dtype="float16")
        acks = worker.wait(Ack, 2 * worker.port.mailbox.slots)
        assert {ack.result for ack, _ in acks} == {PushResult.BAD}
        assert len(worker.port.free) == worker.port.mailbox.slots


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_that_goes_away_is_noticed_by_waiting_workers(transport: str) -> None:
    with served() as server:
        worker = Worker(server, transport)
        worker.load_zeros()
        server.stop()
        server.hub.close()
        with pytest.raises(ServerLost, match="lost server 0 while"):
            for _ in range(3):
                worker.event_loop.wait(DEADLINE_S)


def test_what_one_callback_raises_does_not_swallow_what_others_posted() -> None:
    event_loop, done = EventLoop(), []

    def fail() -> None:
        raise ServerLost("server 0", "waiting")

    event_loop.post(fail)
    event_loop.post(lambda: done.append(1))
    with pytest.raises(ServerLost):
        event_loop.wait(DEADLINE_S)
    assert event_loop.wait(DEADLINE_S)
    assert done == [1]


# ---- reading what is being written ---------------------------------------------------------------------------------


def published(buffers: int = 1, numel: int = 1 << 16) -> Published:
    return Published.create(cut(arrange([LayoutEntry("w", (numel,))]), 1), buffers)


class Meddling:
    """Memory to read into, whose owner writes the block once more in the middle of the first copy."""

    def __init__(self, numel: int, write: Callable[[], None]) -> None:
        self.values = torch.empty(numel)
        self.write: Callable[[], None] | None = write

    def copy_(self, values: Tensor) -> None:
        self.values.copy_(values)
        write, self.write = self.write, None
        if write is not None:
            write()


def test_a_read_that_was_disturbed_is_done_again() -> None:
    shared = published(numel=16)
    buffer = shared.buffer(shared_spec(16))

    def write() -> None:
        buffer.begin_write()
        buffer.tensors[0].fill_(1.0)
        buffer.end_write()

    out = Meddling(16, write)
    assert shared.read(0, out) == (1, 1)  # type: ignore[arg-type]  # version 1, torn once
    assert out.values.tolist() == [1.0] * 16


def test_a_block_that_never_stands_still_is_read_as_it_is_at_its_older_version_and_counted() -> None:
    shared = published(numel=16)
    buffer = shared.buffer(shared_spec(16))
    for _ in range(3):
        buffer.begin_write()
        buffer.end_write()
    buffer.begin_write()
    assert shared.read(0, torch.empty(16)) == (3, READ_TRIES)


def shared_spec(numel: int) -> Any:
    return cut(arrange([LayoutEntry("w", (numel,))]), 1)[0]


def test_no_clean_read_is_torn_while_another_thread_writes() -> None:
    numel = 1 << 16
    shared = published(numel=numel)
    buffer, over = shared.buffer(shared_spec(numel)), threading.Event()

    def keep_writing() -> None:
        version = 0
        while not over.wait(0.0002):  # a block that is written all the time is never read clean
            version += 1
            buffer.begin_write()
            buffer.tensors[0].fill_(float(version))
            buffer.end_write()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    out, clean = torch.empty(numel), 0
    try:
        for _ in range(300):
            version, torn = shared.read(0, out)
            if torn < READ_TRIES:
                clean += 1
                assert out.min().item() == out.max().item() == float(version)
    finally:
        over.set()
        writer.join()
    assert clean > 0


def test_a_round_is_read_exactly_or_not_at_all() -> None:
    shared = published(buffers=2, numel=16)
    buffer, out = shared.buffer(shared_spec(16)), torch.empty(16)

    def write(version: int) -> None:
        buffer.begin_write()
        buffer.at(version).fill_(float(version))
        buffer.end_write()

    for version in (1, 2, 3):
        write(version)
    assert [shared.read_round(0, version, out) for version in (1, 2, 3, 4)] == [False, True, True, False]
    assert shared.read_round(0, 2, out) and out.tolist() == [2.0] * 16
    assert not shared.read_round(0, 2, Meddling(16, lambda: write(4)))  # type: ignore[arg-type]
    assert shared.read_round(0, 4, Meddling(16, lambda: write(5)))  # type: ignore[arg-type]  # 4 is kept beside 5


def test_where_there_is_one_buffer_a_version_is_gone_when_the_next_is_begun() -> None:
    shared = published(buffers=1, numel=16)
    buffer, out = shared.buffer(shared_spec(16)), torch.empty(16)

    def write() -> None:
        buffer.begin_write()
        buffer.end_write()

    write()
    assert [shared.read_round(0, version, out) for version in (0, 1, 2)] == [False, True, False]
    assert not shared.read_round(0, 1, Meddling(16, buffer.begin_write))  # type: ignore[arg-type]


# ---- who is turned away --------------------------------------------------------------------------------------------

HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
TLS = bytes.fromhex("16030100c8010000c40303") + bytes(200)


@pytest.mark.parametrize("greeting", [HTTP, TLS, b"\0" * 512, b"RBHI\x63" + bytes(300), os.urandom(300)])
def test_a_stranger_is_closed_and_a_worker_goes_on(greeting: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with served() as server:
        worker = Worker(server, "tcp")
        worker.load_zeros()
        started = time.monotonic()
        for _ in range(20):
            stranger = connect_raw(server)
            stranger.sendall(greeting)
            assert is_closed(stranger)
        assert worker.push_ones(0) == PushResult.ACCEPTED
        lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert 1 <= len(lines) <= 2 + time.monotonic() - started  # at most one a second
        assert not any(key.hex() in caplog.text for key in KEYS.values())


def test_a_wrong_secret_is_refused_and_tells_where_to_look() -> None:
    with served() as server:
        with pytest.raises(HandshakeFailed, match="secret mismatch.* See rainband doctor"):
            connect(server.address, False, role_keys(new_secret()), RUN_ID, Peer("worker", 0), DEADLINE_S)
        with pytest.raises(HandshakeFailed, match="another run"):
            connect(server.address, False, KEYS, new_run_id(), Peer("worker", 0), DEADLINE_S)
        assert not server.hub.peers


@pytest.mark.parametrize("header_bytes, body_bytes", [(2**32 - 1, 0), (10, 2**63), (10, 2**27)])
def test_a_huge_length_after_a_good_handshake_is_refused_before_anything_is_allocated(
    header_bytes: int, body_bytes: int
) -> None:
    with served() as server:
        worker = Worker(server, "tcp")
        worker.load_zeros()
        sock, _, _ = connect(server.address, False, KEYS, RUN_ID, Peer("worker", 1), DEADLINE_S)
        before = psutil.Process().memory_info().vms
        sock.sendall(frames._PREFIX.pack(frames.MAGIC, frames.PROTOCOL_VERSION, 0, 0, header_bytes, body_bytes, 0, 0))
        assert is_closed(sock)
        assert psutil.Process().memory_info().vms - before < 2**26
        assert worker.push_ones(0) == PushResult.ACCEPTED


def test_a_frame_with_any_one_byte_flipped_changes_nothing() -> None:
    with served() as server:
        worker = Worker(server, "tcp")
        worker.load_zeros()
        body = memoryview(torch.ones(16).numpy().tobytes())
        push = Push(0, 1, 1, (BatchRange(0, 9, 10, 1),), 1, 1, 1, 0, "float32", 16)
        length = len(frames.pack(encode(push), body, 0)) + len(body)
        for at in range(length):
            sock, _, key = connect(server.address, True, KEYS, RUN_ID, Peer("worker", 1), DEADLINE_S)
            frame = bytearray(frames.pack(encode(push), body, key) + bytes(body))
            frame[at] ^= 0x10
            sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)  # it may be waiting for a longer one
            assert is_closed(sock)
        assert server.server.updates == 0
        assert worker.push_ones(9) == PushResult.ACCEPTED


@pytest.mark.parametrize("num_bytes", [1, 31, 32, 60, 130])
def test_half_a_frame_changes_nothing(num_bytes: int) -> None:
    with served() as server:
        Worker(server, "tcp").load_zeros()
        body = memoryview(torch.ones(16).numpy().tobytes())
        push = Push(0, 1, 1, (BatchRange(0, 9, 10, 1),), 1, 1, 1, 0, "float32", 16)
        sock, _, key = connect(server.address, False, KEYS, RUN_ID, Peer("worker", 1), DEADLINE_S)
        sock.sendall((frames.pack(encode(push), body, key) + bytes(body))[:num_bytes])
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
        assert server.server.updates == 0


def test_who_does_not_say_who_it_is_in_time_is_closed() -> None:
    with served(timeout_s=0.2) as server:
        slow = [connect_raw(server) for _ in range(3)]
        slow[1].sendall(b"R")
        slow[2].sendall(b"RBHI")
        assert all(map(is_closed, slow))


def test_many_connections_that_say_nothing_keep_nobody_out() -> None:
    with served() as server:
        idle = [connect_raw(server) for _ in range(MAX_UNKNOWN + 44)]
        worker = Worker(server, "tcp")
        worker.load_zeros()
        assert worker.push_ones(0) == PushResult.ACCEPTED
        assert len(server.hub.connections) <= MAX_UNKNOWN + 1
        assert is_closed(idle[0])  # the oldest had to go
        for sock in idle:
            sock.close()


def test_a_server_without_a_free_file_descriptor_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with served() as server:
        worker = Worker(server, "tcp")
        worker.load_zeros()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        late = socket.socket()
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            late.connect(("127.0.0.1", server.address.port))
            assert worker.push_ones(0) == PushResult.ACCEPTED
            wait_for(lambda: "no file descriptor is left" in caplog.text, "a warning")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        late.sendall(HTTP)
        assert is_closed(late)


@pytest.mark.parametrize(
    "message",
    [
        Assign(PLAN, (), (), 1),
        Revoke(0, 99),
        Forget(0),
        Flush(),
        Shutdown("now"),
        BlockReady(0),
        Ack(0, 0, PushResult.ACCEPTED, 1, 0),
    ],
)
def test_a_worker_that_speaks_like_the_coordinator_is_refused_and_counted(message: Message) -> None:
    with served() as server:
        worker = Worker(server, "tcp")
        worker.load_zeros()
        worker.port.send(message)
        assert worker.push_ones(0) == PushResult.ACCEPTED
        assert server.server.progress.refused == {f"{type(message).__name__} from a worker": 1}
        assert not server.server.validator.min_lease


def test_a_worker_cannot_push_for_another() -> None:
    with served() as server:
        worker = Worker(server, "tcp")
        worker.load_zeros()
        worker.push(0, lambda out, index: out, worker=1)
        ((ack, _),) = worker.wait(Ack, 1)
        assert (ack.result, ack.reason) == (PushResult.BAD, "a push of worker 1 came from worker 0")


def test_memory_is_mapped_with_its_pages_while_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MAP_POPULATE none runs until all pages are made: for some GB a worker would send no heartbeats."""
    flags: list[int] = []
    real = mmap.mmap

    class Noted(real):
        def __new__(cls, *args: Any, **options: Any) -> Any:
            flags.append(options["flags"])
            return real(*args, **options)

    monkeypatch.setattr(mmap, "mmap", Noted)
    size, groups, rounds = 3 * PAGE, GroupMemory(2), RoundsMemory(2)
    segment = SharedSegment.create("test", size)
    files = [segment.fd, groups.fd, rounds.fd]
    before = [os.fstat(fd).st_blocks for fd in files]
    room = GroupWords(groups.fds).room(1, 0, size)
    areas = [SharedBoard(rounds.fds, 0, [torch.zeros(size // 4)]).tensors(rank, 1) for rank in range(2)]
    after = [os.fstat(fd).st_blocks for fd in files]
    assert before[0] * 512 >= size and after[1] - before[1] >= size // 512
    assert after[2] - before[2] >= 2 * 2 * size // 512  # of two workers, who have two areas each
    assert flags and set(flags) == {mmap.MAP_SHARED}
    room.fill_(7)
    areas[1][0].fill_(7)
    again = SharedBoard(rounds.fds, 1, [torch.zeros(size // 4)])
    assert again.tensors(1, 1)[0].eq(7).all() and again.tensors(1, 0)[0].eq(0).all()  # mapping changes nothing
    assert GroupWords(groups.fds).room(1, 0, size).eq(7).sum() == size
    groups.close()
    rounds.close()


def sealed(num_bytes: int) -> int:
    return SharedSegment.create("test", num_bytes).fd


def unsealed(num_bytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd


def no_memory(num_bytes: int) -> int:
    return os.open("/dev/null", os.O_RDWR)


@pytest.mark.parametrize(
    "make, num_bytes, hello",
    [
        (sealed, 4096, Hello(8, 1024)),  # too small
        (unsealed, 8192, Hello(8, 1024)),  # could be cut off later
        (no_memory, 0, Hello(8, 1024)),
        (sealed, 4096, Hello(1 << 40, 1 << 40)),
        (sealed, 4096, Hello(-1, -4096)),
        (sealed, 4000, Hello(8, 500)),  # not in whole cache lines
    ],
)
def test_a_mailbox_that_is_not_what_it_says_is_refused(
    make: Callable[[int], int], num_bytes: int, hello: Hello
) -> None:
    with served() as server:
        worker = Worker(server, "shm")
        worker.load_zeros()
        fd = make(num_bytes)
        gc.collect()  # closes what earlier tests left open
        open_before = os.listdir("/proc/self/fd")
        sock, _, key = connect(server.address, True, KEYS, RUN_ID, Peer("worker", 1), DEADLINE_S)
        socket.send_fds(sock, [frames.pack(encode(hello), None, key)], [fd, fd])
        assert is_closed(sock)
        assert worker.push_ones(0) == PushResult.ACCEPTED
        assert Peer("worker", 1) not in server.hub.peers
        gc.collect()
        assert os.listdir("/proc/self/fd") == open_before  # the server has kept none of it
        os.close(fd)


@pytest.mark.parametrize("dtype", ["quint8", "complex64", "float8_e4m3fn", "nn", "no such dtype", "bits8"])
def test_a_push_of_a_strange_dtype_is_refused_with_a_reason(dtype: str) -> None:
    with served() as server:
        worker = Worker(server, "shm")
        worker.load_zeros()
        assert isinstance(worker.port, SharedPort)
        fields = Push(0, 0, 1, (BatchRange(0, 0, 1, 1),), 1, 1, 1, 0, dtype, 16, slot=0)
        worker.port.send(fields)
        ((ack, _),) = worker.wait(Ack, 1)
        assert ack.result == PushResult.BAD
        assert dtype in ack.reason


def test_a_message_that_is_none_of_ours_closes_the_connection() -> None:
    with served() as server:
        sock, _, key = connect(server.address, False, KEYS, RUN_ID, Peer("worker", 1), DEADLINE_S)
        sock.sendall(frames.pack(b"\x91\xa5hello", None, key))
        assert is_closed(sock)


def test_a_mailbox_holds_what_fits_and_refuses_the_rest() -> None:
    mailbox = Mailbox.create(2, 64)
    assert mailbox.tensor(1, "float32", 16).numel() == 16
    for slot, dtype, numel in ((2, "float32", 16), (-1, "float32", 16), (0, "float32", 17), (0, "float32", -1)):
        with pytest.raises(ValueError, match="in slot"):
            mailbox.tensor(slot, dtype, numel)


@pytest.mark.processes
def test_training_is_not_harmed_by_strangers_on_a_servers_port(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, transport="tcp", samples=2048, timeout_s=1.0) as run:
        run.under_way()
        run.gate.let(100)
        ports = [int(name.removeprefix("port ")) for name in run.sockets if name.startswith("port ")]
        assert len(ports) == 2
        before = [run.server(i).memory_info().rss for i in range(2)]
        started, strangers = time.monotonic(), []
        run.gate.let(300)
        for port in ports:
            for number in range(300):
                stranger = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
                with suppress(OSError):
                    stranger.sendall([b"", HTTP, TLS, os.urandom(100)][number % 4])
                strangers.append(stranger)
        after = [run.server(i).memory_info().rss for i in range(2)]
        run.gate.open()
        assert run.ended() == 0
        for stranger in strangers:
            stranger.close()
        assert exact(run)
        assert all(new - old < 2**25 for new, old in zip(after, before, strict=True))
        lines = run.printed().splitlines()
        assert 2 <= len(lines) <= 2 * (2 + time.monotonic() - started)
        assert all(line.startswith("server: ") for line in lines), lines
