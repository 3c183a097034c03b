"""A server process: the server's state machine behind a hub."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from rainband.errors import BadCheckpoint, PeerLost
from rainband.observer import Observer, join_observers
from rainband.plugins import load_strategy
from rainband.protocol import messages
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import COORDINATOR, Address, InitBlock, Message, Peer
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.runtimes.checkpoints.background import BackgroundThread
from rainband.runtimes.checkpoints.remote import NodeFiles
from rainband.runtimes.checkpoints.restore import restore_server
from rainband.runtimes.checkpoints.write import ServerWriter
from rainband.runtimes.codecs import codecs_of
from rainband.runtimes.config import Job, decode_job
from rainband.server.readers import ServerOutput
from rainband.server.server import Server
from rainband.strategy import ServerPart, Strategy
from rainband.transports.connect import connect, is_here, listen_tcp, listen_unix, process_usage, this_machine
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub
from rainband.transports.shared_memory import Mailbox, Published

MAX_BODY_BYTES = 1 << 26
MAX_MAILBOX_BYTES = 1 << 30


def main(job: bytes, fds: list[int]) -> None:
    """Run the server that a job describes."""
    serve(decode_job(job), fds)


def serve(job: Job, fds: Sequence[int], strategy: Strategy | None = None) -> None:
    """Run a server, which inherits `fds`. By default the strategy is the one that the configuration names."""
    torch.set_num_threads(1)  # one thread owns the blocks: no locks, and results do not depend on the number of cores
    leave_out_the_compiler()
    if job.config.script:  # the script's optimizer may be in a module beside it
        sys.path.insert(0, os.path.dirname(job.config.script))
    sock = listen_tcp("127.0.0.1") if job.door is None else socket.socket(fileno=fds[-1])
    ServerProcess(job, sock, strategy).run()


def leave_out_the_compiler() -> None:
    """Prevent torch from importing its compiler (70 MB), which a server does not use.

    Torch imports it to disable it for some methods of optimizers.
    """
    for wrapped in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict):
        method = getattr(wrapped, "__wrapped__", None)
        if method is not None:
            setattr(method, "__dynamo_disable", method)  # where torch caches the disabled method


def as_in_memory(message: Message) -> Message:
    """Return a reply for a worker that reads the parameters in shared memory, where no codec is used."""
    return msgspec.structs.replace(message, encoded=0) if isinstance(message, messages.Params) else message


def _observers(job: Job) -> list[Observer]:
    """Return the observers of a server that its configuration asks for; importing them costs memory, so only then."""
    observers: list[Observer] = []
    if job.config.record:
        from rainband.record.record import Recorder

        observers.append(Recorder(job.config.directory, Peer("server", job.index)))
    if job.config.message_cost:
        from rainband.record.message_cost import ServerCost

        observers.append(ServerCost(job.config.directory, f"server-{job.index}"))
    return observers


class ServerProcess:
    """Passes messages from the hub to the server, and its answers back."""

    def __init__(self, job: Job, tcp: socket.socket, strategy: Strategy | None = None) -> None:
        """`tcp` is the socket on which it listens for workers that do not share memory with it."""
        config = job.config
        self.job = job
        self.tcp = tcp
        self.me = Peer("server", job.index, job.incarnation)
        self.strategy = strategy or load_strategy(config.strategy, config.strategy_settings)
        self.server = Server(self._server_part, self._publish, join_observers(_observers(job)), *codecs_of(config))
        self.published: Published | None = None
        self.unopened: list[tuple[Connection, messages.Hello]] = []  # workers that were sooner than the blocks
        self.over = False
        accepted = {"worker": job.keys["worker"]}
        if self.strategy.requires.tree_arity:
            accepted["server"] = job.keys["server"]  # of the inner servers below this one
        self.hub = Hub(self.me, accepted, job.run_id, self, MAX_BODY_BYTES, config.failure_timeout_s, self._read_now)
        self.background = BackgroundThread()  # writes checkpoints
        self.files = NodeFiles(job)
        self.writer = ServerWriter(f"server-{job.index}", self.server, self.files.store, self.background)

    def _server_part(self, num_workers: int) -> ServerPart:
        server_part = self.strategy.server(num_workers)
        assert server_part is not None, "a strategy without servers was given one"
        return server_part

    def _publish(self, specs: Sequence[BlockSpec], buffers: int) -> list[ParameterBuffer]:
        self.published = Published.create(specs, buffers)
        self.published.segment.seal_against_writers()
        return [self.published.buffer(spec) for spec in specs]

    def run(self) -> None:
        unix = listen_unix(f"rainband-{self.job.run_id.hex()}-{self.job.index}")
        self.hub.listen(unix)
        here = self._listen(unix.getsockname()[1:].decode())
        timeout_s = self.job.config.failure_timeout_s
        address = self.job.coordinator
        try:
            sock, peer, key = connect(address, is_here(address), self.job.keys, self.job.run_id, self.me)
        except PeerLost:
            sys.exit(1)  # the run has ended already
        self.hub.adopt(sock, peer, key)
        self.hub.send(
            COORDINATOR, messages.ServerJoin(here, f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
        )
        self.hub.watch(self.background.fd, self.background.settle)
        heartbeat_at = time.monotonic()
        while not self.over:
            self.hub.run_once(timeout_s / 5)
            self.writer.advance(partial(self.hub.send, COORDINATOR))
            if time.monotonic() - heartbeat_at > timeout_s / 5:
                heartbeat_at = time.monotonic()
                cpu_s, memory_bytes = process_usage()
                self.hub.send(COORDINATOR, messages.Heartbeat(cpu_s=cpu_s, memory_bytes=memory_bytes))
        self.hub.close()

    def _listen(self, unix: str) -> Address:
        """Listen on TCP; return the address at which workers reach this server."""
        door = self.job.door
        if door is None:
            self.hub.listen(self.tcp)
            return Address("127.0.0.1", self.tcp.getsockname()[1], unix, this_machine())
        self.hub.listen(self.tcp, door.certificate)
        fingerprint = door.certificate.fingerprint if door.certificate else b""
        return Address(door.host, door.port, unix, this_machine(), fingerprint)

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        if isinstance(message, messages.Hello):
            return self._open(connection, message)
        if isinstance(message, messages.Shutdown) and connection.peer == COORDINATOR:
            self.over = True
            return
        if isinstance(message, messages.Assign) and message.parent_address is not None:
            self._connect_to_parent(message.parent_address)
        try:
            payload = self._payload(connection, message, body)
        except (ValueError, RuntimeError):  # torch raises RuntimeError if the bytes do not fit the dtype
            payload = None  # the server refuses the message, with a reason
        outs = self.server.receive(connection.peer, message, payload)
        if isinstance(message, messages.Assign) and message.restores:
            outs += self._restored()
        for out in outs:
            target = self.hub.peers.get(out.to)
            if target is None:
                continue
            if out.read:
                target.reads.append(as_in_memory(out.message) if target.mailbox is not None else out.message)
            else:
                target.send(out.message)
            self.hub.queue(target)
        if self.unopened and self.published is not None:
            unopened, self.unopened = self.unopened, []
            for early, hello in unopened:
                self._open(early, hello)

    def _restored(self) -> list[ServerOutput]:
        """Read the blocks' state of the checkpoint from which the run continues."""
        try:
            restore_server(self.server, self.files.source())
        except (BadCheckpoint, ValueError, OSError) as error:
            return [ServerOutput(COORDINATOR, messages.Failed(0, f"{self.me} cannot continue: {error}", ""))]
        return self.server.restored()

    def _connect_to_parent(self, address: Address) -> None:
        """Open the connection on which an inner server of a tree pushes and pulls."""
        with suppress(PeerLost):  # the coordinator notices, and ends the run
            self.hub.adopt(*connect(address, is_here(address), self.job.keys, self.job.run_id, self.me))

    def lost(self, peer: Peer) -> None:
        if peer == COORDINATOR:
            self.over = True
        self.server.lost(peer)

    def _open(self, connection: Connection, hello: messages.Hello) -> None:
        """Accept a worker's data connection; with shared memory, exchange its mailbox and the parameters."""
        if hello.slots and self.published is None:
            self.unopened.append((connection, hello))
            return
        fds, connection.fds = connection.fds, []
        connection.takes_fds = False
        shared, spare = (fds[:1], fds[1:]) if hello.slots else ([], fds)
        for fd in spare:
            os.close(fd)
        if not shared:
            connection.send(messages.Opened())
            self.hub.queue(connection)
            return
        assert self.published is not None
        try:
            connection.mailbox = Mailbox.open(shared[0], hello.slots, hello.slot_bytes, MAX_MAILBOX_BYTES)
            connection.send_with_fd(messages.Opened(self.published.buffers), self.published.segment.fd)
        except (ValueError, OSError) as error:
            self.hub.refuse(connection, str(error))

    def _payload(self, connection: Connection, message: Message, body: memoryview | None) -> Tensor | None:
        if isinstance(message, messages.Push | InitBlock) and message.slot >= 0 and connection.mailbox is not None:
            tensor: Tensor = connection.mailbox.tensor(message.slot, *message.payload)
            return tensor
        return None if body is None else torch.frombuffer(body, dtype=torch.uint8)

    def _read_now(self, asked: Message) -> tuple[Message, memoryview | None]:
        """Return a message with the values that it has when it is sent; the connection copies them."""
        message, values = self.server.fill(asked)
        if values is None:
            return message, None
        return message, memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
