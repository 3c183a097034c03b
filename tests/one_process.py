"""A run inside one process: the real coordinator and servers in memory, and one worker whose loop is the test's own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.protocol.accounting import Books
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    COORDINATOR,
    Address,
    Bye,
    Load,
    Message,
    Params,
    Peer,
    Push,
    ServerJoin,
    StatePart,
    Welcome,
    decode,
    encode,
)
from rainband.protocol.parameter_buffers import Place
from rainband.runtimes.training_loop.loop import OwnLoop
from rainband.server.server import Server
from rainband.strategies.downpour import Downpour
from rainband.strategy import ServerHalf, Strategy
from rainband.worker.session import Session

ME = Peer("worker", 0)
PLAIN = Downpour(overlap=False)  # one worker that waits for its own push: the same as plain PyTorch


class OneProcess:
    """A worker's membership, and the rest of the run behind it. Messages travel encoded, and in order."""

    index = 0
    num_workers = 1

    def __init__(self, strategy: Strategy = PLAIN, num_servers: int = 2, seed: int = 0) -> None:
        self.strategy = strategy
        self.optimizers: Sequence[str] = ()
        self.left = self.joined = self.knows_its_place = False
        self.mail: deque[tuple[Peer, Peer, bytes, Any]] = deque()  # from, to, message, payload
        self.pushes: list[Push] = []  # that reached the first block
        self.sent: Counter[str] = Counter()
        self.now = 0.0
        num_servers = num_servers if strategy.server(1) else 0
        self.coordinator = Coordinator(
            RunSettings(num_workers=1, num_servers=num_servers, seed=seed, optimizers=("tests.lion:Lion",))
        )
        self.servers = {Peer("server", i): Server(self._half, _publish) for i in range(num_servers)}
        self.session = Session(ME, self)

    def _half(self, num_workers: int) -> ServerHalf:
        half = self.strategy.server(num_workers)
        assert half is not None
        return half

    # ---- what a membership does ----

    def connect(self) -> None:
        for peer in self.servers:
            self.post(peer, COORDINATOR, ServerJoin(Address("", 0)))

    def tell(self, message: Message, body: bytes | None = None) -> None:
        self.post(ME, COORDINATOR, message, body)

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self.mail:
            assert timeout_s == 0, "the loop waits, and nothing is under way"
            return False
        while self.mail:
            self._deliver(*self.mail.popleft())
        return True

    def open_links(self, welcome: Welcome, part: int) -> list[Any]:
        return [MemoryPort(self, peer) for peer in self.servers]

    def before_training(self, worker: object) -> None: ...

    def flush_output(self) -> None: ...

    async def saved(self) -> None: ...

    # ---- the post ----

    def post(self, sender: Peer, to: Peer, message: Message, payload: Any = None) -> None:
        self.sent[type(message).__name__] += 1
        self.mail.append((sender, to, encode(message), payload))

    def _deliver(self, sender: Peer, to: Peer, data: bytes, payload: Any) -> None:
        message = decode(data)
        if to == COORDINATOR:
            for told in self.coordinator.receive(sender, message, self.now, payload):
                self.post(COORDINATOR, told.to, told.message, told.body)
        elif to == ME:
            self._to_worker(message, payload)
        else:
            self._to_server(sender, to, message, payload)

    def _to_server(self, sender: Peer, to: Peer, message: Message, payload: Tensor | None) -> None:
        server = self.servers[to]
        if isinstance(message, Push) and message.block == 0:
            self.pushes.append(message)
        for out in server.receive(sender, message, payload):
            if not out.read:
                self.post(to, out.to, out.message)
            elif isinstance(out.message, StatePart):
                self.post(to, out.to, *server.read_state(out.message))
            else:
                assert isinstance(out.message, Params)
                params, values = server.read(out.message)
                self.post(to, out.to, params, None if values is None else values.clone())

    def _to_worker(self, message: Message, payload: Any) -> None:
        if isinstance(message, Bye):
            assert self.left, f"dismissed: {message.reason}"
        else:
            self.session.receive(message, payload)

    # ---- what a test asks ----

    @property
    def books(self) -> Books:
        """As they are when everyone has left."""
        while self.mail:
            self.wait()
        assert self.coordinator.phase == "over", self.coordinator.phase
        books = self.coordinator.books()
        assert books is not None
        assert books.balanced
        return books

    @property
    def num_pushed(self) -> int:
        """Pushes that carried a gradient."""
        return sum(not push.skip for push in self.pushes)


class MemoryPort:
    """To a server in the same process."""

    direct = False

    def __init__(self, run: OneProcess, server: Peer) -> None:
        self.run = run
        self.server = server

    def send(self, message: Message) -> None:
        self.run.post(ME, self.server, message)

    def push(self, message: Push | Load, fill: Callable[[Tensor], None]) -> None:
        payload = torch.empty(message.numel, dtype=getattr(torch, message.dtype))
        fill(payload)
        self.run.post(ME, self.server, message, payload)

    def read(self, spec: BlockSpec, point: int, out: Tensor) -> int | None:
        raise AssertionError("there is nothing to read in place")


def _publish(specs: Sequence[BlockSpec], buffers: int) -> list[Place]:
    return [
        Place([0], 0, [torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype)) for _ in range(buffers)])
        for spec in specs
    ]


@contextmanager
def joined(model: Any, optimizer: Any, member: OneProcess) -> Iterator[OwnLoop]:
    """As rainband.join, with the place in the run handed in."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    with OwnLoop(model, optimizers, member) as run:
        yield run
