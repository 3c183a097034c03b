"""A run inside one process: the real coordinator and servers in memory, and workers whose loops are the test's own."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.protocol.accounting import BatchAccounting
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    COORDINATOR,
    Address,
    InitBlock,
    Message,
    Params,
    Peer,
    Push,
    ServerJoin,
    Shutdown,
    StatePart,
    Welcome,
    decode,
    encode,
)
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.protocol.ports import BlockValues
from rainband.runtimes.training_loop.loop import TrainingLoop
from rainband.server.server import Server
from rainband.strategies.downpour import Downpour
from rainband.strategy import ServerPart, Strategy
from rainband.worker.session import Session

PLAIN = Downpour(overlap=False)  # one worker that waits for its own push: the same as plain PyTorch


class OneProcess:
    """A worker's membership, and the rest of the run behind it. Messages travel encoded, and in order."""

    index = 0

    def __init__(self, strategy: Strategy = PLAIN, num_servers: int = 2, seed: int = 0, num_workers: int = 1) -> None:
        self.strategy = strategy
        self.num_workers = num_workers
        self.me = Peer("worker", self.index)
        self.members = {self.me: self}
        self.turns = Turns()
        self.optimizers: Sequence[str] = ()
        self.left = self.joined = self.asked_rank = False
        self.mail: deque[tuple[Peer, Peer, bytes, Any]] = deque()  # from, to, message, payload
        self.pushes: list[Push] = []  # that reached the first block
        self.pushed_numel = 0
        self.sent: Counter[str] = Counter()
        self.now = 0.0
        num_servers = num_servers if strategy.server(1) else 0
        self.coordinator = Coordinator(
            RunSettings(num_workers=num_workers, num_servers=num_servers, seed=seed, optimizers=("tests.lion:Lion",))
        )
        self.servers = {Peer("server", i): Server(self._half, _publish) for i in range(num_servers)}
        self.session = Session(self.me, self)

    def _half(self, num_workers: int) -> ServerPart:
        half = self.strategy.server(num_workers)
        assert half is not None
        return half

    # ---- what a membership does ----

    def connect(self) -> None:
        for peer in self.servers:
            self.bus(peer, COORDINATOR, ServerJoin(Address("", 0)))

    def tell(self, message: Message, body: bytes | None = None) -> None:
        self.bus(self.me, COORDINATOR, message, body)

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self.mail:
            assert timeout_s == 0 or self.turns.order, "the loop waits, and nothing is under way"
            self.turns.next(self.index, in_vain=timeout_s != 0)
            return False
        while self.mail:
            self._deliver(*self.mail.popleft())
        self.turns.next(self.index, in_vain=False)
        return True

    def open_links(self, welcome: Welcome, part: int) -> list[Any]:
        return [MemoryPort(self, peer) for peer in self.servers]

    def before_training(self, worker: object) -> None: ...

    def source(self) -> Any:
        """Return None: the run begins anew."""

    def save_state(self, snapshot: object, state: object, block: object, step: int = 0) -> None: ...

    def finish_saving(self) -> None: ...

    def flush_output(self) -> None: ...

    async def saved(self) -> None: ...

    async def failure_is_known(self) -> None: ...

    # ---- the post ----

    def bus(self, sender: Peer, to: Peer, message: Message, payload: Any = None) -> None:
        self.sent[type(message).__name__] += 1
        self.mail.append((sender, to, encode(message), payload))

    def _deliver(self, sender: Peer, to: Peer, data: bytes, payload: Any) -> None:
        message = decode(data)
        if to == COORDINATOR:
            for told in self.coordinator.receive(sender, message, self.now, payload):
                self.bus(COORDINATOR, told.to, told.message, told.body)
        elif to in self.members:
            self.members[to]._to_worker(message, payload)
        else:
            self._to_server(sender, to, message, payload)

    def _to_server(self, sender: Peer, to: Peer, message: Message, payload: Tensor | None) -> None:
        server = self.servers[to]
        if isinstance(message, Push):
            self.pushed_numel += message.numel
            if message.block == 0:
                self.pushes.append(message)
        for out in server.receive(sender, message, payload):
            if not out.read:
                self.bus(to, out.to, out.message)
            elif isinstance(out.message, StatePart):
                self.bus(to, out.to, *server.read_state(out.message))
            else:
                assert isinstance(out.message, Params)
                params, values = server.read(out.message)
                self.bus(to, out.to, params, None if values is None else values.clone())

    def _to_worker(self, message: Message, payload: Any) -> None:
        if isinstance(message, Shutdown):
            assert self.left, f"dismissed: {message.reason}"
        else:
            self.session.receive(message, payload)

    # ---- what a test asks ----

    @property
    def accounting(self) -> BatchAccounting:
        """As they are when everyone has left."""
        while self.mail:
            self.wait()
        assert self.coordinator.state.phase == "over", self.coordinator.state.phase
        accounting = self.coordinator.reporting.accounting()
        assert accounting is not None
        assert accounting.balanced
        return accounting

    @property
    def num_pushed(self) -> int:
        """Pushes that carried a gradient."""
        return sum(not push.skip for push in self.pushes)


class OtherWorker(OneProcess):
    """The membership of another worker of the same run."""

    def __init__(self, first: OneProcess, index: int) -> None:
        self.__dict__.update(first.__dict__)  # the same post, coordinator and servers
        self.index, self.me = index, Peer("worker", index)
        self.left = self.joined = self.asked_rank = False
        self.session = Session(self.me, self)
        self.members[self.me] = self

    def connect(self) -> None: ...


class Turns:
    """Lets the threads of several workers run one at a time, in order: each until it looks at its mail."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order: deque[int] = deque()  # of workers whose loops are not over; the first one runs
        self.errors: list[BaseException] = []
        self.in_vain = 0  # waits since there was mail

    def next(self, index: int, in_vain: bool) -> None:
        """Let the other workers run."""
        if not self.order:
            return
        self.in_vain = self.in_vain + 1 if in_vain else 0
        assert self.in_vain < 1000, "the workers wait for each other"
        self.order.rotate(-1)
        self.changed.notify_all()
        self.mine(index)

    def mine(self, index: int) -> None:
        self.changed.wait_for(lambda: self.order[0] == index or self.errors)
        assert not self.errors, "another worker has failed"

    def run(self, index: int, script: Callable[[], None]) -> None:
        with self.changed:
            try:
                self.mine(index)
                script()
            except BaseException as error:
                self.errors.append(error)
            self.order.remove(index)
            self.changed.notify_all()


def run_workers(first: OneProcess, script: Callable[[OneProcess], None]) -> None:
    """Run a script on each worker of a run; an error of one of them is raised."""
    members = [first, *(OtherWorker(first, index) for index in range(1, first.num_workers))]
    turns = first.turns
    turns.order.extend(range(len(members)))
    threads = [threading.Thread(target=turns.run, args=(one.index, partial(script, one))) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.errors:
        raise turns.errors[0]


class MemoryPort:
    """To a server in the same process."""

    direct = False

    def __init__(self, run: OneProcess, server: Peer) -> None:
        self.run = run
        self.server = server

    def send(self, message: Message) -> None:
        self.run.bus(self.run.me, self.server, message)

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        payload = torch.empty(message.numel, dtype=getattr(torch, message.dtype))
        values.write(payload)
        self.run.bus(self.run.me, self.server, message, payload)

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        raise AssertionError("there is nothing to read in place")


def _publish(specs: Sequence[BlockSpec], buffers: int) -> list[ParameterBuffer]:
    return [
        ParameterBuffer([0], 0, [torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype)) for _ in range(buffers)])
        for spec in specs
    ]


@contextmanager
def joined(model: Any, optimizer: Any, member: OneProcess) -> Iterator[TrainingLoop]:
    """As rainband.join, with the place in the run handed in."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    with TrainingLoop(model, optimizers, member) as run:
        yield run
