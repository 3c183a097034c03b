"""Repeat a recorded asynchronous run bit for bit: the same gradients, applied and read in the same order.

There is no clock here, only order. A block goes on to its next version when the push that was next has been made
again, and everyone who had read this version has read it again. Workers run as far as they can.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from rainband.blocks import BlockSpec
from rainband.client import Client, Handle
from rainband.messages import Ack, Finish, Lease, Load, Message, Params, Peer, Pull, Push, Welcome
from rainband.server import Server
from rainband.types import Port, ServerHalf
from rainband.worker import Compute, ModuleWorker
from rainband.worlds import sim
from rainband.worlds.config import RunConfig
from rainband.worlds.directory import read_config
from rainband.worlds.record import Applied, Assigned, Began, Leased, Read, Refused, Welcomed, here, read_notes
from rainband.worlds.sim import Simulated, make_play, one_thread
from rainband.worlds.sim_body import RealBody
from rainband.worlds.sim_nodes import publish
from rainband.worlds.sim_worker import Body


@dataclass
class Record:
    """What a run's processes noted."""

    began: Began
    welcome: Welcome
    servers: list[Assigned]
    leases: dict[int, list[Leased]]  # worker -> in order
    reads: dict[tuple[int, int, int], int]  # (worker, pull, block) -> version
    order: dict[int, deque[Applied]]  # block -> what it applied, in order


def read_record(directory: Path) -> Record:
    """Put the notes of all processes together."""
    workers = {int(path.stem.split("-")[2]): list(read_notes(path)) for path in directory.glob("record-worker-*.bin")}
    servers = {int(path.stem.split("-")[2]): list(read_notes(path)) for path in directory.glob("record-server-*.bin")}
    if not workers or not servers:
        raise ValueError(
            f"{directory.name} was not recorded, so it cannot be repeated: start it with --record. "
            "(Rounds, as of sync, need no record: the same seed gives the same bits.)"
        )
    every = [note for notes in (*workers.values(), *servers.values()) for note in notes]
    if refused := Counter(note.result for note in every if isinstance(note, Refused)):
        told = ", ".join(f"{times} {result}" for result, times in refused.items())
        raise ValueError(f"{directory.name} cannot be repeated: pushes were refused in it ({told}).")
    order: dict[int, deque[Applied]] = {}
    for note in every:
        if isinstance(note, Applied):
            order.setdefault(note.block, deque()).append(note)
    return Record(
        began=next(note for note in every if isinstance(note, Began)),
        welcome=next(note.welcome for note in every if isinstance(note, Welcomed)),
        servers=[note for i in sorted(servers) for note in servers[i] if isinstance(note, Assigned)],
        leases={w: [note for note in notes if isinstance(note, Leased)] for w, notes in sorted(workers.items())},
        reads={
            (w, note.sequence, note.block): note.version
            for w, notes in sorted(workers.items())
            for note in notes
            if isinstance(note, Read)
        },
        order=order,
    )


@dataclass(frozen=True)
class Replayed:
    """What a repetition came to."""

    pushes: int
    numbers: int
    different: int  # numbers that are not the same bits as those of the saved model
    warning: str = ""


def replay(directory: Path, note: Callable[[int, int, int, float], None] | None = None) -> Replayed:
    """Repeat a run and compare its model. `note` is told of every gradient: worker, portion, batch, loss."""
    config = read_config(directory)
    record = read_record(directory)
    with one_thread():
        repetition = Repetition(config, record, note)
        repetition.run()
    numbers, different = repetition.compare(directory / "model.safetensors")
    return Replayed(repetition.pushes, numbers, different, why_bits_may_differ(record.began))


def why_bits_may_differ(then: Began | Simulated) -> str:
    """What the bits of gradients depend on, where it is not as it was then."""
    now = here()
    pairs = {
        "torch": (then.torch, now.torch),
        "the CPU's capability": (then.cpu_capability, now.cpu_capability),
        "the number of threads": (then.threads, 1),
    }
    return "; ".join(f"{what} was {old} and is {new}" for what, (old, new) in pairs.items() if old != new)


def replay_simulated(directory: Path, folder: Path) -> tuple[Simulated, Simulated]:
    """Simulate a simulated run once more, in a folder of its own; what it was then, and what it is now."""
    config = msgspec.structs.replace(read_config(directory), directory=str(folder))
    sim.run(config, lambda event: None)
    then, now = (
        msgspec.json.decode((path / "simulation.json").read_bytes(), type=Simulated) for path in (directory, folder)
    )
    return then, now


@dataclass
class Actor:
    """One worker of the repetition."""

    index: int
    body: Body
    client: Client
    worker: ModuleWorker
    coroutine: Iterator[object]
    waiting: Handle | None = None
    over: bool = False
    asked: set[tuple[int, int]] = field(default_factory=set)  # (pull, block) not answered yet


class Repetition:
    """All nodes, without a clock."""

    def __init__(self, config: RunConfig, record: Record, note: Callable[[int, int, int, float], None] | None) -> None:
        self.record = record
        self.note = note
        self.play = make_play(config)
        half = self.play.strategy.server(config.num_workers)
        if half is None or half.rule().reads != "any":
            raise ValueError(f"{config.strategy} reads by rounds or rules: only asynchronous runs are repeated.")
        self.pushes = 0
        self.servers: list[Server] = []
        self.owner: dict[int, Server] = {}
        self.made: dict[tuple[int, int, int], tuple[Push, Tensor]] = {}  # (block, worker, sequence) -> a push
        self.actors = {index: self._actor(index) for index in record.leases}
        self._load()
        self.unread = Counter((block, version) for (_, _, block), version in record.reads.items())

    def _actor(self, index: int) -> Actor:
        welcome, body = self.record.welcome, self.play.body()
        ports: list[Port] = [ReplayPort(self, index) for _ in welcome.servers]
        client = body.make_client(Peer("worker", index), welcome, ports, lambda message: None)
        for lease in self.record.leases[index]:
            client.receive(Lease(lease.portion, lease.lease, lease.groups))
        worker = body.worker(index, client)
        strategy = self.play.strategy
        return Actor(index, body, client, worker, iter(strategy.run(worker).__await__()))  # type: ignore[arg-type]

    def _load(self) -> None:
        """Servers with their first values: those of the seed, as any worker has them."""
        first = next(iter(self.actors.values())).client
        for assigned in self.record.servers:
            server = Server(self._half, publish)
            server.receive(Peer("coordinator", 0), assigned.assign)
            self.servers.append(server)
            for spec in assigned.assign.blocks:
                load = Load(spec.index, spec.dtype, spec.numel)
                server.receive(Peer("worker", 0), load, first.views[spec.index].clone())
                self.owner[spec.index] = server

    def _half(self, num_workers: int) -> ServerHalf:
        half = self.play.strategy.server(num_workers)
        assert half is not None
        return half

    # ---- going on --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while self._everyone_goes_on() | self._blocks_go_on():
            pass
        left = sum(map(len, self.record.order.values()))
        if left:
            raise ValueError(f"the record does not fit: {left} updates could not be made again.")

    def _everyone_goes_on(self) -> bool:
        return bool(sum(self._go_on(actor) for actor in self.actors.values()))  # all of them, not up to the first

    def _go_on(self, actor: Actor) -> bool:
        moved = self._answer(actor)
        while not actor.over and (actor.waiting is None or actor.waiting.ready()):
            actor.body.sit_down()
            moved = True
            try:
                wanted = next(actor.coroutine)
            except StopIteration:
                actor.over = True
                break
            actor.waiting = None
            if isinstance(wanted, Compute):
                wanted.result = actor.body.gradient(actor.worker, wanted.batch)
                if self.note is not None:
                    self.note(actor.index, wanted.batch.portion, wanted.batch.k, wanted.result.loss)
            else:
                assert isinstance(wanted, Handle)
                actor.waiting = wanted
            self._answer(actor)
        return moved

    def _answer(self, actor: Actor) -> bool:
        """Give a worker the versions it had read, as far as they are there."""
        moved = False
        for sequence, block in sorted(actor.asked):
            version = self.record.reads.get((actor.index, sequence, block))
            at = self.owner[block].blocks[block]
            if version is not None and at.version == version:
                actor.asked.discard((sequence, block))
                self.unread[block, version] -= 1
                values = at.place.of(version).clone()
                actor.client.receive(Params(block, sequence, 1, version), values)
                moved = True
        return moved

    def _blocks_go_on(self) -> bool:
        return bool(sum(self._apply_next(block) for block in self.record.order))

    def _apply_next(self, block: int) -> bool:
        order, at = self.record.order[block], self.owner[block].blocks[block]
        if not order or self.unread[block, at.version] > 0:
            return False
        key = block, order[0].worker, order[0].sequence
        if key not in self.made:
            return False
        order.popleft()
        push, payload = self.made.pop(key)
        peer = Peer("worker", push.worker)
        for out in self.owner[block].receive(peer, push, payload, checked=True):
            if isinstance(out.message, Ack):
                self.actors[push.worker].client.receive(out.message)
        self.pushes += 1
        if not any(self.record.order.values()):
            for actor in self.actors.values():
                actor.client.receive(Finish())
        return True

    # ---- the end ---------------------------------------------------------------------------------------------------

    def compare(self, model: Path) -> tuple[int, int]:
        """How many numbers the saved model has, and how many of them came out differently."""
        body = next(iter(self.actors.values())).body
        assert isinstance(body, RealBody)
        flat = body.memory.flat
        for block, server in self.owner.items():
            at = server.blocks[block]
            flat.view(at.spec).copy_(at.place.of(at.version))
        body.desk.owner = None
        body.sit_down()
        saved = safetensors.torch.load_file(str(model))
        numbers = different = 0
        for name, parameter in body.memory.module.named_parameters():
            if name in saved:  # of tied parameters only one is saved
                numbers += parameter.numel()
                different += int((saved[name].view(-1) != parameter.detach().reshape(-1)).sum())
        return numbers, different


class ReplayPort:
    """A way to a server that is kept until its turn comes."""

    direct = False

    def __init__(self, repetition: Repetition, worker: int) -> None:
        self.repetition = repetition
        self.worker = worker

    def send(self, message: Message) -> None:
        if isinstance(message, Pull):
            self._asks(message.sequence, range(len(self.repetition.record.welcome.blocks)))

    def push(self, message: Push | Load, fill: Callable[[Tensor], None]) -> None:
        assert isinstance(message, Push)
        payload = torch.empty(message.numel, dtype=getattr(torch, message.dtype))
        fill(payload)
        self.repetition.made[message.block, self.worker, message.sequence] = message, payload
        if message.want:
            self._asks(message.sequence, [message.block])

    def _asks(self, sequence: int, blocks: range | list[int]) -> None:
        actor = self.repetition.actors[self.worker]
        actor.asked |= {(sequence, block) for block in blocks}

    def read(self, spec: BlockSpec, point: int, out: Tensor) -> int | None:
        raise AssertionError("parameters come with the answer, there is nothing to read in place")
