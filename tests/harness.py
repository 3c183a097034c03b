"""A whole run in one process: the real coordinator, servers and clients, with faults, replayed from a seed.

Nodes talk over lines: first in, first out, one for each direction between two nodes. Which line delivers next, who
computes next and what breaks is drawn from one random generator, so a seed gives the same run for ever.

The parameters are the ledger. Each block has one element per batch of the run, and the gradient of batch i is zero
but for element i, whatever the parameters are. So the elements count how often each batch reached each block, apart
from any name, mark or book, to the last bit; and every version that a round may read is known beforehand.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

import rainband.block
import rainband.coordinator
from rainband.block import Block
from rainband.blocks import BlockSpec, Entry, Layout, arrange
from rainband.client import Client, Handle, PullHandle
from rainband.coordinator import Coordinator, RunSettings
from rainband.errors import Stop
from rainband.gradient import ModuleGradient
from rainband.messages import (
    COORDINATOR,
    Ack,
    Address,
    Ask,
    Beat,
    Bye,
    Conclude,
    Concluded,
    Ended,
    Finish,
    Forget,
    Go,
    Join,
    Lease,
    Load,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    Report,
    Return,
    Revoke,
    ServerJoin,
    Sets,
    Want,
    Welcome,
    decode,
    encode,
)
from rainband.optim_spec import OptimizerSpec
from rainband.place import Place
from rainband.portions import Plan, bits, choose_portion_batches
from rainband.server import Server
from rainband.strategies.downpour import Downpour
from rainband.strategies.sync import Sync
from rainband.types import Batch, ServerHalf, Strategy, Worker
from rainband.worker import Compute, ModuleWorker, ServerSide

LR = 0.5
AMOUNT = 840  # divisible by every number of samples from 1 to 8, so that means stay exact
MAX_ROUND_SAMPLES = 8
TIMEOUT_S = 5.0
ELEMENTS = 64  # of a block: one per batch
M = TypeVar("M", bound=Message)
MAY_COME_TWICE = (Push, Ack, Pull, Params, Revoke, Sets, Forget, Ask, Report, Lease, Want, Return, Beat, Finish)
MAY_COME_AGAIN_LATER = (Push, Ack, Revoke, Sets)


class Wrong(AssertionError):
    """The run broke a promise."""


class Killed(BaseException):
    """A worker's process ends here, in the middle of whatever it was doing."""


class Letter(NamedTuple):
    """What travels on a line."""

    message: Message | None  # None: the connection has closed
    payload: Tensor | None = None
    body: bytes | None = None
    read: bool = False  # the payload is read when it arrives, not when it was sent


CLOSED = Letter(None)


def replaced(message: M, **changes: object) -> M:
    """The same message with some fields changed."""
    return msgspec.structs.replace(message, **changes)


# ---- what a seed decides ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The size of a run, its strategy, and which of its batches are odd."""

    strategy: Strategy
    num_workers: int = 2
    num_servers: int = 1
    dtypes: tuple[str, ...] = ("float32",)  # one vector each, cut into one block per server
    num_samples: int = 16
    batch_size: int = 2
    epochs: int = 1
    portion_batches: int = 0  # 0: as the coordinator chooses
    direct: bool = False  # the servers' parameters are read in place, as in shared memory
    not_finite: frozenset[int] = frozenset()  # batches whose gradient is not finite
    absent: frozenset[tuple[int, int]] = frozenset()  # (batch, parameter) without a gradient

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @property
    def num_batches(self) -> int:
        return self.batches_per_epoch * self.epochs

    @property
    def num_blocks(self) -> int:
        return len(self.dtypes) * self.num_servers

    @property
    def rounds(self) -> bool:
        return bool(getattr(self.strategy, "rounds", False))


@dataclass(frozen=True)
class Faults:
    """How many of each; when and to whom is the seed's choice."""

    kills: int = 0
    restarts: int = 0  # a killed worker comes back under its own number
    pauses: int = 0  # a worker stops, is given up, and wakes when others have its work
    suspicions: int = 0  # a worker's heartbeats are late, it works on
    reconnects: int = 0  # a connection breaks; what is unanswered is sent again, in any order
    duplicates: float = 0.0  # the part of the messages that come twice
    latecomers: int = 0
    stop: bool = False  # the run is stopped early


# ---- the ledger ------------------------------------------------------------------------------------------------------


class Ledger:
    """What the parameters must be, worked out from the plan alone."""

    def __init__(self, case: Case) -> None:
        self.case = case
        assert case.num_batches <= ELEMENTS, "one element per batch"

    def amount(self, block: int, batch: int) -> float:
        """What one application of a batch adds to its element, before the learning rate."""
        if batch in self.case.not_finite or (batch, block) in self.case.absent:
            return 0.0
        return float(AMOUNT << block % 4)  # neighbours differ, so a block in the wrong place shows

    def first(self, block: int) -> Tensor:
        return torch.full((ELEMENTS,), float(block + 1), dtype=torch.float64)

    def samples(self, batch: int) -> int:
        inside = batch % self.case.batches_per_epoch
        return min(self.case.batch_size, self.case.num_samples - inside * self.case.batch_size)

    def after(self, block: int, batches: Collection[int]) -> Tensor:
        """After these batches have been applied once each, in whatever order."""
        values = self.first(block)
        for batch in batches:
            values[batch] -= LR * self.amount(block, batch)
        return values

    def versions(self, block: int, columns: int) -> list[Tensor]:
        """In rounds: every version of a block, from the first values to the last."""
        values = self.first(block)
        versions = [values.clone()]
        for cells in self.rounds(columns):
            num_samples = sum(self.samples(b) for b in cells if b not in self.case.not_finite)
            for batch in cells:
                weight = self.samples(batch) / num_samples if num_samples else 0.0
                values[batch] -= LR * self.amount(block, batch) * weight
            versions.append(values.clone())
        return versions

    def rounds(self, columns: int) -> list[range]:
        per_epoch = self.case.batches_per_epoch
        starts = [(e, at) for e in range(self.case.epochs) for at in range(0, per_epoch, columns)]
        return [range(e * per_epoch + at, e * per_epoch + min(at + columns, per_epoch)) for e, at in starts]

    def describe(self, block: int, found: Tensor, wanted: Tensor) -> str:
        """Name the batches whose elements are not what they must be."""
        lines = []
        for at in (found.double() != wanted.double()).nonzero().flatten().tolist():
            start, amount = self.first(block)[at], self.amount(block, at) or math.nan
            times = (start - found[at].double()) / (LR * amount)
            lines.append(f"batch {at} on block {block} counts {times:g} times, not {(start - wanted[at]) / (LR * amount):g}")
        return "; ".join(lines)


class CountingOptimizer:
    """Plain SGD over a block's segments; it stands in for torch's where thousands of runs are made."""

    single_pass = True

    def __init__(
        self, spec: OptimizerSpec, block: BlockSpec, values: Tensor, groups: Sequence[Mapping[str, object]]
    ) -> None:
        assert spec.name == "sgd"
        self.lr = float(spec.settings["lr"])  # type: ignore[arg-type]
        self.segments = [(s.parameter, values[s.start : s.stop], s.start, s.stop) for s in block.segments]

    def step(self, gradient: Tensor, absent: Collection[int] = (), lr_scale: float = 1.0) -> None:
        for parameter, values, start, stop in self.segments:
            if parameter not in absent:
                values.sub_(gradient[start:stop], alpha=self.lr * lr_scale)


class Memory:
    """A worker's parameters: what a client uses of the flat vector."""

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self.layout = layout
        self.vectors = [torch.zeros(v.numel, dtype=getattr(torch, v.dtype)) for v in layout.vectors]
        self.parameters = [
            self.vectors[p.vector][p.start : p.start + p.numel] for p in layout.parameters
        ]
        for index, parameter in enumerate(self.parameters):
            parameter.copy_(ledger.first(index))

    def view(self, block: BlockSpec) -> Tensor:
        return self.vectors[block.vector][block.start : block.stop]

    def write(self, block: BlockSpec, tensors: Sequence[Tensor | None], out: Tensor) -> None:
        out.zero_()
        for s in block.segments:
            tensor = tensors[s.parameter]
            if tensor is not None:
                out[s.start : s.stop] = tensor[s.offset : s.offset + s.numel]

    def add_(self, tensors: Sequence[Tensor | None], alpha: float) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            if tensor is not None:
                parameter.add_(tensor, alpha=alpha)


# ---- workers ---------------------------------------------------------------------------------------------------------


class LinePort:
    """A worker's way to one server: a line, or the server's own memory."""

    def __init__(self, world: World, worker: Node, server: Peer) -> None:
        self.world = world
        self.worker = worker
        self.server = server
        self.direct = world.case.direct
        self.unanswered: dict[tuple[int, int], Letter] = {}  # (block, sequence) -> the push, to be sent again
        self.inbox: dict[int, Tensor] = {}  # a reply lands here, over the one before

    def send(self, message: Message) -> None:
        self._send(Letter(message))

    def push(self, message: Push | Load, fill: Callable[[Tensor], None]) -> None:
        if self.direct and self.world.random.random() < 0.1:  # waiting for room, it takes what has come
            self.world.hand_over_some(self.server, self.worker.peer)
        payload = torch.empty(message.numel, dtype=getattr(torch, message.dtype))
        fill(payload)
        self._send(Letter(message, payload))

    def _send(self, letter: Letter) -> None:
        self.worker.may_die()
        if isinstance(letter.message, Push):
            self.unanswered[letter.message.block, letter.message.sequence] = letter
        self.world.post(self.worker.peer, self.server, letter)

    def read(self, spec: BlockSpec, point: int, out: Tensor) -> int | None:
        block = self.world.servers[self.server].blocks[spec.index]
        if not (point < 0 or point <= block.version <= point + 1):
            return None
        version = block.version if point < 0 else point
        out.copy_(block.place.of(version))
        return version

    def arrived(self, letter: Letter) -> Letter:
        """Before a reply is handed to the client."""
        match letter.message:
            case Ack():
                self.unanswered.pop((letter.message.block, letter.message.sequence), None)
            case Params() if letter.payload is not None:
                block = letter.message.block
                inbox = self.inbox.setdefault(block, torch.empty_like(letter.payload))
                inbox.copy_(letter.payload)
                return letter._replace(payload=None if self.direct else inbox)
        return letter


class OwnParameters:
    """The worker's own copy of the parameters, for its local steps."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def step(self, gradient: ModuleGradient, lr: float) -> None:
        self.memory.add_(gradient.tensors, -lr)


class Node:
    """A worker from its first word to its last: the same steps as its process takes."""

    def __init__(self, world: World, peer: Peer) -> None:
        self.world = world
        self.case = world.case
        self.peer = peer
        self.index = peer.index
        self.num_workers = world.case.num_workers
        self.memory = Memory(world.layout, world.ledger)
        self.params = OwnParameters(self.memory)
        self.client: Client | None = None
        self.ports: list[LinePort] = []
        self.welcome: Welcome | None = None
        self.go = False
        self.early: list[Message] = []  # that came before there was a client
        self.conclude = False
        self.dismissed = False
        self.paused = False
        self.dies_at = -1  # at so many more frames
        self.waits_for: Callable[[], bool] = lambda: True
        self.life = self._live()

    # ---- what a strategy may touch ----

    cells = ModuleWorker.cells

    @property
    def server(self) -> ServerSide:
        assert self.client is not None
        return ServerSide(self.client)

    def gradient(self, batch: Batch) -> Compute:
        return Compute(self, batch)  # type: ignore[arg-type]

    # ---- its life ----

    def runnable(self) -> bool:
        return not self.paused and not self.dismissed and self.waits_for()

    def run(self) -> None:
        self.waits_for = next(self.life, lambda: False)

    def may_die(self) -> None:
        self.dies_at -= 1
        if self.dies_at == 0:
            raise Killed

    def tell(self, message: Message, body: bytes | None = None) -> None:
        self.world.post(self.peer, COORDINATOR, Letter(message, body=body))

    def receive(self, sender: Peer, letter: Letter) -> None:
        message = letter.message
        assert message is not None
        if sender.role == "server":
            letter = self.ports[sender.index].arrived(letter)
            assert self.client is not None
            self.client.receive(message, letter.payload)
            return
        match message:
            case Bye():
                self.dismissed = True
            case Welcome():
                self.welcome = message
            case Go():
                self.go = True
            case Conclude():
                self.conclude = True
            case _ if self.client is None:
                self.early.append(message)
            case _:
                self.client.receive(message)

    def _live(self) -> Iterator[Callable[[], bool]]:
        self.tell(self.world.join())
        yield lambda: self.welcome is not None
        client = self._enter()
        loaded = False
        while not self.go:
            assert self.welcome is not None
            if self.welcome.load and not loaded:
                loaded = True
                client.load()
            yield lambda: self.go or (self.welcome is not None and self.welcome.load and not loaded)
        yield from self._drive(client)
        yield lambda: not client.pushes
        client.give_all_back("stopped")
        self.tell(client.stats.beat())
        self.tell(Ended(client.stats.samples))
        while True:
            yield lambda: self.conclude
            self.conclude = False
            pull = client.pull_latest()
            yield pull.ready
            self.world.saved = [parameter.clone() for parameter in self.memory.parameters]
            self.tell(Concluded({}))

    def _enter(self) -> Client:
        assert self.welcome is not None
        self.ports = [LinePort(self.world, self, Peer("server", i)) for i in range(self.case.num_servers)]
        self.client = Client(
            self.peer,
            self.welcome.plan,
            self.memory,  # type: ignore[arg-type]
            self.welcome.blocks,
            self.welcome.owners,
            self.ports,
            self.tell,
        )
        for message in self.early:
            self.client.receive(message)
        return self.client

    def _drive(self, client: Client) -> Iterator[Callable[[], bool]]:
        coroutine = self.case.strategy.run(self)  # type: ignore[arg-type]
        thrown = False
        try:
            wanted = coroutine.send(None)
            while True:
                if isinstance(wanted, Compute):
                    yield lambda: True
                    wanted.result = self._compute(client, wanted.batch)
                else:
                    yield self._until(client, wanted, thrown)
                    if not wanted.ready():
                        thrown = True
                        wanted = coroutine.throw(Stop())
                        continue
                wanted = coroutine.send(None)
        except (StopIteration, Stop):
            return

    def _until(self, client: Client, wanted: Any, thrown: bool) -> Callable[[], bool]:
        assert isinstance(wanted, Handle), f"a strategy may only await what its worker gave, not {wanted!r}"

        def ready() -> bool:
            client.stats.waiting = not wanted.ready()
            return not client.stats.waiting or (client.stopping and isinstance(wanted, PullHandle) and not thrown)

        return ready

    def _compute(self, client: Client, batch: Batch) -> ModuleGradient:
        plan = client.plan
        number = number_of(plan, batch.portion, batch.k)
        if plan.columns:
            self.world.check_round_read(self, plan.round_of(batch.portion, batch.k), plan)
        samples = plan.samples_in(batch.portion, batch.k)
        client.stats.steps += 1
        client.stats.samples += samples
        return ModuleGradient(self._gradients(number), (batch,), samples, 0.0)

    def _gradients(self, number: int) -> list[Tensor | None]:
        tensors: list[Tensor | None] = []
        for index, parameter in enumerate(self.memory.parameters):
            if (number, index) in self.case.absent:
                tensors.append(None)
                continue
            gradient = torch.zeros_like(parameter)
            gradient[number] = self.world.ledger.amount(index, number)
            if number in self.case.not_finite and index == number % len(self.memory.parameters):
                gradient[number] = math.nan
            tensors.append(gradient)
        return tensors


# ---- the world -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run came to."""

    steps: int
    seconds: float
    coordinator: Coordinator
    blocks: dict[int, Block]
    saved: list[Tensor] = field(default_factory=list)


class World:
    """All nodes of a run, the lines between them, and what goes wrong."""

    def __init__(self, seed: int, case: Case, faults: Faults = Faults(), max_steps: int = 20_000) -> None:  # noqa: B008
        self.random = random.Random(seed)
        self.case = case
        self.faults = faults
        self.max_steps = max_steps
        self.ledger = Ledger(case)
        entries = [
            Entry(f"{dtype} {v} {s}", (ELEMENTS,), dtype, device=f"vector {v}")
            for v, dtype in enumerate(case.dtypes)
            for s in range(case.num_servers)
        ]
        self.layout = arrange(entries)
        self.now = 0.0
        self.steps = 0
        self.lines: dict[tuple[Peer, Peer], deque[Letter]] = {}
        self.speed: dict[tuple[Peer, Peer], float] = {}
        self.saved: list[Tensor] = []
        self.versions: list[list[Tensor]] = []
        self.trace: deque[str] = deque(maxlen=40)
        self.coordinator = Coordinator(
            RunSettings(
                num_workers=case.num_workers, num_servers=case.num_servers, failure_timeout_s=TIMEOUT_S
            )
        )
        self.servers = {Peer("server", i): Server(self._half, self._publish) for i in range(case.num_servers)}
        for peer in self.servers:
            self.post(peer, COORDINATOR, Letter(ServerJoin(Address("here", 0))))
        self.workers: dict[Peer, Node] = {}
        for index in range(case.num_workers):
            self._add_worker(Peer("worker", index))
        self.restarts_left = faults.restarts
        self.todo = self._draw_faults()

    def _portion_batches(self, *given: int) -> int:
        return self.case.portion_batches or choose_portion_batches(*given)

    def _half(self, num_workers: int) -> ServerHalf:
        half = self.case.strategy.server(num_workers)
        assert half is not None
        return half

    def _publish(self, specs: Sequence[BlockSpec], buffers: int) -> list[Place]:
        return [
            Place([0], 0, [torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype)) for _ in range(buffers)])
            for spec in specs
        ]

    def join(self) -> Join:
        strategy = self.case.strategy
        return Join(
            fingerprint="the data",
            num_samples=self.case.num_samples,
            layout=self.layout,
            batch_size=self.case.batch_size,
            epochs=self.case.epochs,
            cell_batches=getattr(strategy, "cell_batches", 1),
            rounds=self.case.rounds,
            warm_batches=getattr(strategy, "warm_batches", 0),
        )

    def _add_worker(self, peer: Peer) -> Node:
        node = self.workers[peer] = Node(self, peer)
        return node

    # ---- lines ----

    def post(self, sender: Peer, to: Peer, letter: Letter) -> None:
        if to.role == "worker" and to not in self.workers:
            return  # nobody is there any more
        if letter.message is not None:
            letter = letter._replace(message=decode(encode(letter.message)))
        key = sender, to
        if key not in self.lines:
            self.lines[key] = deque()
            self.speed[key] = self.random.choice((1.0, 1.0, 0.3, 0.05))
        self.lines[key].append(letter)

    def deliver(self, sender: Peer, to: Peer) -> None:
        line = self.lines[sender, to]
        letter = line.popleft()
        if isinstance(letter.message, MAY_COME_TWICE) and self.random.random() < self.faults.duplicates:
            later = isinstance(letter.message, MAY_COME_AGAIN_LATER) and self.random.random() < 0.5
            line.append(letter) if later else line.appendleft(letter)
        self.hand_over(sender, to, letter)

    def hand_over(self, sender: Peer, to: Peer, letter: Letter) -> None:
        self.trace.append(f"{sender}.{sender.incarnation} -> {to}: {letter.message}")
        if to == COORDINATOR:
            self._coordinator_gets(sender, letter)
        elif to.role == "server":
            self._server_gets(sender, to, letter)
        elif to in self.workers:
            if letter.read:
                letter = self._read(sender, letter)
            self.workers[to].receive(sender, letter)

    def hand_over_some(self, sender: Peer, to: Peer) -> None:
        line = self.lines.get((sender, to), ())
        for _ in range(self.random.randint(0, len(line))):
            self.deliver(sender, to)

    def _read(self, server: Peer, letter: Letter) -> Letter:
        assert isinstance(letter.message, Params)
        message, values = self.servers[server].read(letter.message)
        return Letter(message, None if values is None else values.clone())

    def _coordinator_gets(self, sender: Peer, letter: Letter) -> None:
        if letter.message is None:
            self._say(self.coordinator.lost(sender, self.now))
        else:
            self._say(self.coordinator.receive(sender, letter.message, self.now, letter.body))

    def _say(self, outs: Sequence[Any]) -> None:
        for out in outs:
            self.post(COORDINATOR, out.to, Letter(out.message, body=out.body))

    def _server_gets(self, sender: Peer, to: Peer, letter: Letter) -> None:
        server = self.servers[to]
        if letter.message is None:
            server.lost(sender)
            return
        for out in server.receive(sender, letter.message, letter.payload):
            reply = Letter(out.message, read=out.read)
            if out.read and self.random.random() < 0.5:  # its bytes leave at once, or when the line is free
                reply = self._read(to, reply)
            self.post(to, out.to, reply)

    # ---- faults ----

    def _draw_faults(self) -> list[tuple[int, Callable[[], None]]]:
        """What goes wrong, and after how many steps."""
        f = self.faults
        kinds: list[Callable[[], None]] = [self._kill] * f.kills + [self._pause] * f.pauses
        kinds += [self._suspect] * f.suspicions + [self._reconnect] * f.reconnects
        kinds += [self._join_late] * f.latecomers + [self._stop] * f.stop
        length = (25 if self.case.rounds else 12) * self.case.num_batches
        return [(self.random.randrange(5, length), kind) for kind in kinds]

    def _alive(self) -> list[Node]:
        return [w for w in self.workers.values() if not w.dismissed]

    def _one_of_several(self) -> Node | None:
        """A worker without which another one can still end the run."""
        well = [w for w in self._alive() if not w.paused and w.dies_at < 0]
        if self.coordinator.phase not in ("forming", "loading"):
            well = [w for w in well if w.client is not None]
        return self.random.choice(well) if len(well) > 1 else None

    def _kill(self) -> None:
        """At once, or in the middle of the next frames it sends."""
        victim = self._one_of_several()
        if victim is None:
            return
        if self.random.random() < 0.5:
            self.bury(victim)
        else:
            victim.dies_at = self.random.randint(1, 2 * self.case.num_blocks)

    def bury(self, node: Node) -> None:
        """What is on its lines arrives up to some point, as with TCP; then they close."""
        self.trace.append(f"{node.peer} dies")
        del self.workers[node.peer]
        for (sender, to), line in list(self.lines.items()):
            if sender == node.peer:
                keep = self.random.randint(0, len(line))
                self.lines[sender, to] = deque([*list(line)[:keep], CLOSED])
            elif to == node.peer:
                del self.lines[sender, to]
        for to in (COORDINATOR, *self.servers):
            if (node.peer, to) not in self.lines:
                self.post(node.peer, to, CLOSED)
        if self.restarts_left:
            self.restarts_left -= 1
            self._add_worker(Peer("worker", node.peer.index, node.peer.incarnation + 1))

    def _pause(self) -> None:
        node = self._one_of_several()
        if node is None:
            return
        node.paused = True
        given_up_after = self.random.randint(0, 60)
        self._later(given_up_after, lambda: self._suspect(node))
        self._later(given_up_after + self.random.randint(0, 150), lambda: setattr(node, "paused", False))

    def _later(self, steps: int, do: Callable[[], None]) -> None:
        self.todo.append((self.steps + steps, do))

    def _suspect(self, node: Node | None = None) -> None:
        """Nothing is heard of it for too long, while the heartbeats of the others come through."""
        node = node or self.random.choice(self._alive())
        self.trace.append(f"{node.peer} is suspected")
        self.now += TIMEOUT_S + 0.1
        for other in list(self.workers.values()):
            if other is not node and other.client is not None and not other.paused:
                self.hand_over(other.peer, COORDINATOR, Letter(other.client.stats.beat()))
        if self.coordinator.phase != "over":
            self._say(self.coordinator.tick(self.now))

    def _reconnect(self) -> None:
        node = self.random.choice(self._alive())
        if not node.ports or self.coordinator.phase != "running":
            return
        port = self.random.choice(node.ports)
        for key in ((node.peer, port.server), (port.server, node.peer)):
            line = self.lines.get(key)
            if line:
                self.lines[key] = deque(list(line)[: self.random.randint(0, len(line))])
        self.trace.append(f"{node.peer} reconnects to {port.server}")
        self.post(node.peer, port.server, CLOSED)
        again = list(port.unanswered.values())
        self.random.shuffle(again)
        for letter in again:
            self.post(node.peer, port.server, letter)
        pull = node.client.pulling if node.client else None
        if pull is not None and not (port.direct and pull.point < 0):
            self.post(node.peer, port.server, Letter(Pull(pull.sequence, 0, pull.point)))

    def _join_late(self) -> None:
        index = 1 + max(w.index for w in self.workers.values())
        self._add_worker(Peer("worker", max(index, self.case.num_workers)))

    def _stop(self) -> None:
        self._say(self.coordinator.stop("stopped", "asked to"))

    # ---- running ----

    def run(self) -> Outcome:
        """To the end; raises Wrong when the run breaks a promise or does not end."""
        with patch.object(rainband.coordinator, "choose_portion_batches", self._portion_batches):
            while self.coordinator.phase != "over":
                self.steps += 1
                if self.steps > self.max_steps:
                    raise Wrong(f"not over after {self.max_steps} steps: {self.where()}")
                self._next()
        blocks = {i: b for s in self.servers.values() for i, b in s.blocks.items()}
        return Outcome(self.steps, self.now, self.coordinator, blocks, self.saved)

    def _next(self) -> None:
        due = [item for item in self.todo if item[0] <= self.steps]
        for item in due:
            self.todo.remove(item)
            item[1]()
        actions: list[Callable[[], None]] = []
        weights: list[float] = []
        for (sender, to), line in self.lines.items():
            if line and not (to in self.workers and self.workers[to].paused):
                actions.append(lambda s=sender, t=to: self.deliver(s, t))  # type: ignore[misc]
                weights.append(self.speed[sender, to] * len(line))
        for node in self.workers.values():
            if node.runnable():
                actions.append(lambda n=node: self._run(n))  # type: ignore[misc]
                weights.append(0.5)
        if actions and self.random.random() < 0.985:
            self.random.choices(actions, weights)[0]()
        else:
            self._pass_time()

    def _run(self, node: Node) -> None:
        try:
            node.run()
        except Killed:
            self.bury(node)

    def _pass_time(self) -> None:
        self.now += self.random.choice((0.2, 1.0, 2.0))
        for node in self.workers.values():
            if node.client is not None and not node.paused and not node.dismissed:
                node.tell(node.client.stats.beat())
        if self.coordinator.phase != "over":
            self._say(self.coordinator.tick(self.now))

    def where(self) -> str:
        c = self.coordinator
        held = {str(w.peer): dict(w.leases) for w in c.workers.values()}
        return (
            f"phase {c.phase}, {c.batches_done()} of {self.case.num_batches} batches, leases {held}, "
            f"to do again {c.again}, asking {list(c.gathering)}, wanting {c.wanting}, "
            f"here {[i for i, w in c.workers.items() if w.here]}; last steps:\n" + "\n".join(self.trace)
        )

    # ---- promises ----

    def check_round_read(self, node: Node, round_: int, plan: Plan) -> None:
        """A cell of a round is computed at exactly that round's version of every block."""
        if not self.versions:
            self.versions = [self.ledger.versions(b, plan.columns) for b in range(self.case.num_blocks)]
        for block, parameter in enumerate(node.memory.parameters):
            if not torch.equal(parameter, self.versions[block][round_].to(parameter.dtype)):
                near = [
                    r for r, v in enumerate(self.versions[block]) if torch.equal(parameter, v.to(parameter.dtype))
                ]
                raise Wrong(f"{node.peer} computes round {round_} with block {block} at version {near}")


def check(world: World, outcome: Outcome) -> None:
    """All that is promised at the end of a run, whatever went wrong on its way."""
    coordinator, case = outcome.coordinator, world.case
    books = coordinator.books()
    if books is None and world.faults.stop:
        return  # stopped before there was a plan
    assert books is not None
    if not books.balanced:
        raise Wrong(f"the books do not balance: {books}")
    for index, block in outcome.blocks.items():
        check_block(world, index, block)
    if coordinator.outcome == "stopped" and world.faults.stop:
        return
    if coordinator.outcome != "finished" or books.not_done:
        raise Wrong(f"{coordinator.outcome} {coordinator.reason}: {books}")
    for index, block in outcome.blocks.items():
        if block.marks.count != case.num_batches:
            raise Wrong(f"block {index} had {block.marks.count} batches of {case.num_batches}")
        if not torch.equal(outcome.saved[index], block.values.to(outcome.saved[index].dtype)):
            raise Wrong(f"block {index} of the saved model is not the server's")


def check_block(world: World, index: int, block: Block) -> None:
    """The parameters of a block are what its marks say, to the last bit: each batch once, nothing else."""
    plan, ledger = block.plan, world.ledger
    if not block.loaded and not block.marks.count:
        return  # the run was stopped before it had begun
    had = {number_of(plan, p, k) for p in range(plan.num_portions) for k in bits(block.marks.of(p))}
    skipped = {number_of(plan, p, k) for (p, _), mask in block.skipped.items() for k in bits(mask)}
    if skipped & had != skipped or world.case.not_finite & had - skipped:
        raise Wrong(f"block {index} skipped {skipped} of {had}; not finite are {set(world.case.not_finite)}")
    if plan.columns:
        wanted = ledger.versions(index, plan.columns)[block.version]
    else:
        wanted = ledger.after(index, had - skipped)
    if not torch.equal(block.values, wanted.to(block.values.dtype)):
        raise Wrong(ledger.describe(index, block.values, wanted))


def number_of(plan: Plan, portion: int, k: int) -> int:
    """The number of a batch in the whole run."""
    return plan.epoch_of(portion) * plan.batches_per_epoch + plan.number(portion, k)


@dataclass(frozen=True)
class Ragged:
    """Downpour whose workers cut a cell differently, as loops of their own would: no two begin alike."""

    cell_batches: int = 4

    async def run(self, worker: Worker) -> None:
        await worker.server.pull()
        async for cell in worker.cells():
            cut = 2 + worker.index % (self.cell_batches - 1)
            for at in range(0, len(cell.batches), cut):
                gradients = [await worker.gradient(batch) for batch in cell.batches[at : at + cut]]
                worker.server.push(functools.reduce(operator.add, gradients))

    def server(self, num_workers: int) -> ServerHalf:
        return Downpour(lr=LR, optimizer="sgd").server(num_workers)


# ---- schedules -------------------------------------------------------------------------------------------------------


def draw(seed: int, kind: str) -> tuple[Case, Faults]:
    """The run and the faults that a seed stands for; `kind` is downpour, ragged or sync."""
    r = random.Random(f"{kind} {seed}")
    epochs = r.choice((1, 1, 2))
    num_samples, batch_size = r.randint(8, 40 // epochs), r.choice((1, 2))
    num_batches, num_servers = -(-num_samples // batch_size) * epochs, r.randint(1, 3)
    dtypes = tuple(r.choices(("float32", "float32", "float64", "bfloat16"), k=r.randint(1, 2)))
    odd = r.random() < 0.3
    not_finite = frozenset(r.sample(range(num_batches), 2)) if odd else frozenset()
    strategy: Strategy = {"downpour": _draw_downpour, "ragged": _draw_ragged, "sync": _draw_sync}[kind](r)
    case = Case(
        strategy=strategy,
        num_workers=r.randint(2, 4),
        num_servers=num_servers,
        dtypes=dtypes,
        num_samples=num_samples,
        batch_size=batch_size,
        epochs=epochs,
        portion_batches=r.choice((0, 2, 4)) * getattr(strategy, "cell_batches", 1),
        direct=r.random() < 0.5,
        not_finite=not_finite,
        absent=_draw_absent(r, num_batches, len(dtypes) * num_servers, not_finite) if odd else frozenset(),
    )
    most = 2 if kind == "ragged" else 1  # its pushes are many in flight, so breaking its lines tells most
    faults = Faults(
        kills=r.choice((0, 1, 2)),
        restarts=r.choice((0, 1)),
        pauses=r.choice((0, 1, 2)) * most,
        suspicions=r.choice((0, 1, 3)) * most,
        reconnects=r.choice((0, 1, 4)) * most,
        duplicates=r.choice((0.0, 0.0, 0.1, 0.3)),
        latecomers=r.choice((0, 0, 1)),
        stop=r.random() < 0.05,
    )
    return case, faults


def _draw_downpour(r: random.Random) -> Downpour:
    return Downpour(
        n_push=r.randint(1, 3),
        n_fetch=r.randint(1, 2),
        lr=LR,
        optimizer="sgd",
        overlap=r.random() < 0.5,
        warm_batches=r.choice((0, 0, 4)),
    )


def _draw_ragged(r: random.Random) -> Ragged:
    return Ragged(cell_batches=r.randint(3, 5))


def _draw_sync(r: random.Random) -> Sync:
    return Sync(lr=LR)


def _draw_absent(
    r: random.Random, num_batches: int, num_blocks: int, but: Collection[int]
) -> frozenset[tuple[int, int]]:
    drawn = [(r.randrange(num_batches), r.randrange(num_blocks)) for _ in range(4)]
    return frozenset((batch, block) for batch, block in drawn if batch not in but)


def run(seed: int, case: Case, faults: Faults = Faults(), max_steps: int = 20_000) -> Outcome:  # noqa: B008
    """Run a case to its end and check all promises; the optimizer is the harness's own."""
    world = World(seed, case, faults, max_steps)
    with patch.object(rainband.block, "BlockOptimizer", CountingOptimizer):
        outcome = world.run()
    check(world, outcome)
    return outcome


def run_seed(seed: int, kind: str, max_steps: int = 20_000) -> Outcome:
    """Run what a seed stands for; a failure says how to run it again."""
    case, faults = draw(seed, kind)
    try:
        return run(seed, case, faults, max_steps)
    except Exception as error:
        error.add_note(f"to see it again: tests.harness.run_seed({seed}, {kind!r})\n{case}\n{faults}")
        raise
