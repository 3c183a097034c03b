"""The connections of a worker process to the coordinator and the servers."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from rainband.checkpoints.read import Checkpoint
from rainband.errors import NOT_IN_BLOCK, CoordinatorLost, RainbandError, ServerLost
from rainband.observer import Observer
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    Address,
    Conclude,
    FilePart,
    InitBlock,
    LinksOpened,
    Message,
    Peer,
    Push,
    ServerMoved,
    TakeSnapshot,
    Welcome,
)
from rainband.protocol.ports import BlockValues, Port
from rainband.protocol.saved_state import SavedBlock
from rainband.runtimes.checkpoints.background import BackgroundThread
from rainband.runtimes.checkpoints.place import worker_file
from rainband.runtimes.checkpoints.remote import NodeFiles
from rainband.runtimes.checkpoints.write import write_worker
from rainband.runtimes.codecs import codecs_of
from rainband.runtimes.config import Job
from rainband.runtimes.processes.drive import Deadline, drive
from rainband.strategy import Strategy
from rainband.transports.connect import can_share_memory, connect, is_here
from rainband.transports.coordinator_link import CoordinatorLink
from rainband.transports.event_loop import EventLoop
from rainband.transports.server_links import SharedPort, TcpPort
from rainband.worker.lifecycle import report_failure
from rainband.worker.session import Session
from rainband.worker.worker import ModuleWorker

FILE_PART_BYTES = 4 << 20


def flush_output() -> None:
    """Flush what the user's code has printed: when the run ends, processes are ended quickly."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed by the user, or without a reader
            stream.flush()


class NullPort:
    """Takes the place of a port to a server that holds none of this worker's blocks."""

    direct = False

    def send(self, message: Message) -> None:
        raise AssertionError("there is nothing to say to it")

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        raise AssertionError("it has none of our blocks")

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        raise AssertionError("it has none of our blocks")


def _transport_of(port: Port, address: Address) -> str:
    """Return how a worker reaches a server, in one word."""
    if isinstance(port, NullPort):
        return ""
    if isinstance(port, SharedPort):
        return "shm"
    return _over_network(address)


def _over_network(address: Address) -> str:
    return "tls" if address.fingerprint else "tcp"


def nothing() -> None:
    pass


class WorkerLink:
    """One worker process of a run. Messages are handled on the thread that waits."""

    def __init__(self, job: Job, strategy: Strategy | None = None, observer: Observer | None = None) -> None:
        self.job = job
        self.config = job.config
        self.me = Peer("worker", job.index, job.incarnation)
        self.index = job.index
        self.num_workers = job.config.num_workers
        self.strategy = strategy
        self.optimizers = job.config.optimizers
        self.event_loop = EventLoop()
        self.session = Session(self.me, self, observer)
        self.session.codec, self.session.pull_codec = codecs_of(job.config)
        self.stats = self.session.stats
        self.control: CoordinatorLink | None = None
        self.joined = False  # a custom training loop uses it
        self.left = False  # and has ended
        self.file_home: Path | None = None  # the saved model, which belongs on another machine
        self.group_files: Sequence[int] = ()  # the same for all-reduces
        self.round_files: Sequence[int] = ()  # inherited files for rounds of split batches
        self.background = BackgroundThread()  # writes checkpoints
        self.files = NodeFiles(job)
        self.asked_rank = False  # the script has asked for this worker's rank, so it may shard its own data

    def connect(self) -> None:
        """Connect to the coordinator, and begin to send heartbeats."""
        if self.control is not None:
            return
        address, heartbeat_s = self.job.coordinator, self.config.failure_timeout_s / 5
        try:
            sock, _, key = connect(address, is_here(address), self.job.keys, self.job.run_id, self.me)
        except RainbandError as error:
            raise CoordinatorLost("the coordinator", f"connecting to it ({error})") from None
        self.control = CoordinatorLink(sock, key, self.event_loop, self._from_coordinator, self.stats, heartbeat_s)

    def tell(self, message: Message, body: bytes | None = None) -> None:
        """Send a message to the coordinator."""
        if self.control is None:  # a custom training loop has not begun
            raise ValueError(NOT_IN_BLOCK)
        self.control.send(message, body)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for messages and handle them; return False if none arrived in time."""
        return self.event_loop.wait(timeout_s)

    def open_link(self, moved: ServerMoved, part: int) -> Port:
        raise AssertionError("servers have copies in simulations only")

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        """Connect to the servers; with stages, only to those that hold blocks of this stage."""
        if self.job.memory:
            return []  # all workers share one copy of the parameters
        needed = {owner for block, owner in zip(welcome.blocks, welcome.owners, strict=False) if block.part == part}
        some = bool(welcome.replica_addresses) or welcome.via >= 0
        ports = [
            self._port(i, address, welcome) if i in needed or i == welcome.via or not some else NullPort()
            for i, address in enumerate(welcome.servers)
        ]
        self.report_links([_transport_of(port, to) for port, to in zip(ports, welcome.servers, strict=True)])
        return ports

    def report_links(self, transports: Sequence[str]) -> None:
        """Tell the coordinator how this worker reaches the servers, or the workers with which it shares batches."""
        if self.job.round_files:
            transports = [_over_network(self.job.coordinator) if self.job.remote else "shm"]
        peers = tuple(sorted(self._peers().items()))
        self.tell(LinksOpened(self.job.machine or platform.node(), tuple(transports), peers))

    def _peers(self) -> Mapping[int, str]:
        """Return the workers that this one has connected to, and how."""
        return {}

    def before_training(self, worker: ModuleWorker) -> None:
        """Prepare the worker of a task; a custom training loop needs nothing."""

    def save_state(self, snapshot: TakeSnapshot, state: object, block: SavedBlock | None, step: int = 0) -> None:
        """Write the state of this worker for a checkpoint, beside the training."""

        size = self.config.stage_plan.size if self.config.stage_plan is not None else 1
        name = worker_file(self.index, size)

        def write() -> Callable[[], None]:
            with suppress(RainbandError):  # the run is over
                self.tell(write_worker(self.files.store(), snapshot, state, block, step, name))
            return nothing

        self.background.submit(write)

    def source(self) -> Checkpoint | None:
        """Return the checkpoint to begin with: of this run, or the one from which it continues; None: there is none."""
        if self.session.is_welcome and (name := self.session.welcome.checkpoint):
            return Checkpoint(self.files.store(), name)
        return self.files.source() if self.config.resume_from else None

    def finish_saving(self) -> None:
        self.background.finish()

    def flush_output(self) -> None:
        flush_output()

    async def saved(self) -> None:
        """Return when checkpoints are written, and a model for another machine is sent. A script may end after it."""
        self.background.finish()
        if self.file_home is not None:
            path, self.file_home = self.file_home, None
            if path.exists():  # otherwise another worker of its replica has saved the model
                self._send_home(path)

    def _send_home(self, path: Path) -> None:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            for offset in range(0, num_bytes, FILE_PART_BYTES):
                self.tell(FilePart(offset, num_bytes), file.read(FILE_PART_BYTES))
        path.unlink()

    async def failure_is_known(self) -> None:
        deadline = Deadline(self.config.failure_timeout_s)
        while not deadline.ready():
            with suppress(ServerLost):  # the same one, or another
                await deadline

    def report(self, error: Exception) -> None:
        """Report an error that was raised outside the worker's coroutine: by a user's script."""
        with suppress(RainbandError):  # when the run ends
            self.connect()
            drive(report_failure(self.session, error), self.wait)

    def _port(self, index: int, address: Address, welcome: Welcome) -> Port:
        peer = Peer("server", index)
        # Recording, and rules that keep copies of what was read, need reads of exactly one version. Shared memory may
        # be written to during a read.
        one_version = self.config.record or self._reads_are_kept()
        shared = can_share_memory(address) and self.config.transport != "tcp" and not one_version
        if self.config.transport == "shm" and not shared:
            raise ValueError(
                f"--transport shm requires {peer} on this machine, and memory that can be shared: use --transport tcp."
            )
        specs = [welcome.blocks[b] for b, owner in enumerate(welcome.owners) if index in (owner, welcome.via)]
        sock, _, key = connect(address, shared, self.job.keys, self.job.run_id, self.me)
        if shared:
            return SharedPort(peer, sock, key, specs, self.event_loop, self._from_server, self.stats)
        return TcpPort(peer, sock, key, specs, self.event_loop, self._from_server, self.stats)

    def _reads_are_kept(self) -> bool:
        half = self.session.strategy.server(self.num_workers)
        return half is not None and half.rule().keeps_reads

    def _from_server(self, message: Message, payload: Tensor | None) -> None:
        if self.session.client is not None:
            self.session.receive(message, payload)

    def _from_coordinator(self, message: Message, body: memoryview | None) -> None:
        if isinstance(message, Conclude) and message.path and self.job.remote:
            name = f"rainband-{self.job.run_id.hex()}-{self.index}.safetensors"
            self.file_home = Path(tempfile.gettempdir(), name)
            message = Conclude(str(self.file_home))
        self.session.receive(message, body)
