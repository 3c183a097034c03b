"""Repeat a recorded asynchronous run bit for bit: the same gradients, applied and read in the same order.

There is no clock, only order. A block advances to its next version when the push that made it has been computed again,
and every worker that read the current version has read it again. Workers run as far as they can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf, nan, sqrt
from pathlib import Path
from typing import NamedTuple

import msgspec
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from rainband.plugins import load_strategy
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    Ack,
    Failed,
    Finish,
    Go,
    InitBlock,
    Lease,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    ServerMoved,
    Welcome,
)
from rainband.protocol.ports import BlockValues, Port
from rainband.protocol.steps import Steps
from rainband.record.record import Applied, Began, Record, RuleChanged, here, read_record
from rainband.runtimes.config import RunConfig
from rainband.runtimes.run_directory import read_config
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.gradients import GradientCompute
from rainband.runtimes.simulation.models.trace import name_of
from rainband.runtimes.simulation.nodes import publish
from rainband.runtimes.simulation.run import Simulated, make_scenario, one_thread
from rainband.server.server import Server
from rainband.worker.client import Client
from rainband.worker.lifecycle import run_worker
from rainband.worker.session import Session
from rainband.worker.worker import Compute, ModuleWorker

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a number


class ReplayedUpdate(NamedTuple):
    """One update of the first block."""

    number: int  # the version after it
    worker: int
    batches: str  # those of its gradient
    read: int  # the version at which its gradient was computed
    staleness: int
    loss: float  # of its batches
    norm: float  # of its gradient; nan: skipped


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    pushes: int
    numbers: int
    different: int  # numbers whose bits differ from the saved model
    saved_hash: str  # of the saved model; empty: there is none
    repeated_hash: str
    warning: str = ""


def replay(
    directory: Path,
    note: Callable[[ReplayedUpdate], None] | None = None,
    until: int | None = None,
    model: Path | None = None,
) -> Replayed:
    """Repeat a run and compare its model; `note` is called for every update.

    With `until`, every block stops at that version. The parameters at the end are saved as `model`.
    """
    config = read_config(directory)
    if obstacle := load_strategy(config.strategy, config.strategy_settings).requires.replay_obstacle():
        raise ValueError(f"{directory.name} cannot be replayed: {config.strategy} {obstacle}.")
    record = read_record(directory)
    with one_thread():
        replayed = Replay(config, record, note, until)
        replayed.run()
    values = replayed.parameters()
    if model is not None:
        safetensors.torch.save_file(values, str(model))
    then = directory / "model.safetensors"
    saved = safetensors.torch.load_file(str(then)) if then.is_file() and until is None else {}
    known = {name: value for name, value in values.items() if name in saved}  # of tied parameters only one is saved
    return Replayed(
        pushes=replayed.pushes,
        numbers=sum(value.numel() for value in known.values()),
        different=sum(int((bits(saved[name]) != bits(value)).sum()) for name, value in known.items()),
        saved_hash=hash_of({name: saved[name] for name in known}),
        repeated_hash=hash_of(known or values),
        warning=why_bits_may_differ(record.began),
    )


def bits(tensor: Tensor) -> Tensor:
    """View numbers as integers, so that a NaN equals itself."""
    return tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()])


def hash_of(tensors: dict[str, Tensor]) -> str:
    hasher = xxhash.xxh3_64()
    for _, tensor in sorted(tensors.items()):
        hasher.update(bits(tensor).numpy().tobytes())
    return hasher.hexdigest() if tensors else ""


def why_bits_may_differ(then: Began | Simulated) -> str:
    """Return which conditions differ from those of the run; empty: none."""
    now = here()
    pairs = {
        "torch": (then.torch, now.torch),
        "the CPU's capability": (then.cpu_capability, now.cpu_capability),
        "the number of threads": (then.threads, 1),
    }
    return "; ".join(f"{what} was {old} and is {new}" for what, (old, new) in pairs.items() if old != new)


def replay_simulated(directory: Path, folder: Path) -> tuple[Simulated, Simulated]:
    """Repeat a simulated run in another folder, with its trace; returns the facts of both runs."""
    config = read_config(directory)
    config = msgspec.structs.replace(config, directory=str(folder), sim=msgspec.structs.replace(config.sim, trace=True))
    then = read_simulated(directory)
    sim.run(config, lambda event: None, model=then.model)
    return then, read_simulated(folder)


def read_simulated(directory: Path) -> Simulated:
    path = directory / "simulation.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Simulated)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is damaged ({error}), so the run cannot be repeated.") from None


class Actor:
    """One worker of a replay, and its runtime. There is no coordinator: messages to it are dropped, errors raised."""

    def __init__(self, replayed: Replay, index: int) -> None:
        record, scenario = replayed.record, replayed.scenario
        self.index = index
        self.ports: list[Port] = [ReplayPort(replayed, index) for _ in record.welcome.servers]
        self.losses = replayed.losses
        self.compute = scenario.make_compute()
        self.session = Session(Peer("worker", index), self)
        self.session.prepare(scenario.strategy, scenario.join, self.compute)
        self.session.receive(msgspec.structs.replace(record.welcome, load=False))
        for lease in record.leases[index]:
            self.session.receive(Lease(lease.portion, lease.lease, lease.groups))
        self.steps = Steps(run_worker(self.session))
        self.asked: set[tuple[int, int]] = set()  # (pull, block), not answered yet

    @property
    def client(self) -> Client:
        assert self.session.client is not None
        return self.session.client

    def advance(self) -> bool:
        self.compute.attach()
        return self.steps.advance(self._perform)

    def _perform(self, work: Compute) -> None:
        work.result = self.compute.gradient(work.worker, work.batch)
        self.losses[work.batch.portion, work.batch.k] = work.result.loss

    def tell(self, message: Message, body: bytes | None = None) -> None:
        if isinstance(message, Failed):
            assert self.session.failure is not None
            raise self.session.failure

    def open_link(self, moved: ServerMoved, part: int) -> Port:
        raise AssertionError("servers have copies in simulations only")

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        return self.ports

    def before_training(self, worker: ModuleWorker) -> None: ...

    def flush_output(self) -> None: ...

    async def saved(self) -> None: ...

    async def failure_is_known(self) -> None: ...


class Replay:
    """All nodes of a run, without a clock."""

    def __init__(
        self, config: RunConfig, record: Record, note: Callable[[ReplayedUpdate], None] | None, until: int | None = None
    ) -> None:
        self.record = record
        self.note = note
        self.until = inf if until is None else until
        self.losses: dict[tuple[int, int], float] = {}  # (portion, batch) -> of its gradient
        self.squares: dict[tuple[int, int], float] = {}  # (worker, sequence) -> of its gradient's norm
        self.scenario = make_scenario(config)
        self.pushes = 0
        self.servers: list[Server] = []
        self.owner: dict[int, Server] = {}
        self.made: dict[tuple[int, int, int], tuple[Push, Tensor | None]] = {}  # (block, worker, sequence) -> a push
        self.actors = {index: Actor(self, index) for index in record.leases}
        self.unread = Counter((block, version) for (_, _, block), version in record.reads.items())

    def _load(self) -> None:
        """Start the servers with the initial values of a worker, which follow from the seed."""
        for assigned in self.record.servers:
            server = Server(self.scenario.server_part, publish)
            server.receive(Peer("coordinator", 0), assigned.assign)
            self.servers.append(server)
            self.owner.update({spec.index: server for spec in assigned.assign.blocks})
        first = next(iter(self.actors.values()))
        first.session.receive(msgspec.structs.replace(self.record.welcome, load=True))
        first.advance()
        for actor in self.actors.values():
            actor.session.receive(Go())
            actor.advance()  # all have a client before the first answer arrives

    def run(self) -> None:
        try:
            self._load()
            while self._everyone_goes_on() | self._blocks_go_on():
                pass
        finally:
            for actor in self.actors.values():
                with suppress(RuntimeError):  # the strategy refuses to end
                    actor.steps.close()
        left = sum(map(len, self.record.order.values()))
        if left and self.until == inf:
            raise ValueError(
                f"{left} recorded updates could not be repeated: the record is incomplete, or the task or the strategy "
                "has changed since. Replay with the code of the run."
            )

    def _everyone_goes_on(self) -> bool:
        return bool(sum(self._go_on(actor) for actor in self.actors.values()))  # `any` would stop at the first

    def _go_on(self, actor: Actor) -> bool:
        moved = False
        while self._answer(actor) | actor.advance():
            moved = True
        return moved

    def _answer(self, actor: Actor) -> bool:
        """Send a worker the versions that it read, as far as they exist."""
        moved = False
        for sequence, block in sorted(actor.asked):
            version = self.record.reads.get((actor.index, sequence, block))
            at = self.owner[block].blocks[block]
            if version is not None and at.version == version:
                actor.asked.discard((sequence, block))
                self.unread[block, version] -= 1
                values = at.buffer.at(version).clone()
                actor.client.receive(Params(block, sequence, 1, version), values)
                moved = True
        return moved

    def _blocks_go_on(self) -> bool:
        return bool(sum(self._apply_next(block) for block in self.record.order))

    def _apply_next(self, block: int) -> bool:
        order, at = self.record.order[block], self.owner[block].blocks[block]
        if not order or at.version >= self.until:
            return False
        first, is_read = order[0], self.unread[block, at.version] <= 0
        match first:
            case RuleChanged(message):  # only a flush makes another version, and only of what is buffered
                if at.rule.buffered and not is_read:
                    return False
                at.change_rule(message)
            case Applied():
                made = self.made.get((block, first.worker, first.sequence))
                if made is None or not (is_read or made[0].skip):  # skipped batches make no other version
                    return False
                self._apply(first)
        order.popleft()
        if not any(self.record.order.values()):
            for actor in self.actors.values():
                actor.client.receive(Finish())
        return True

    def _apply(self, applied: Applied) -> None:
        block = applied.block
        push, payload = self.made.pop((block, applied.worker, applied.sequence))
        if self.note is not None and block == 0:
            self.note(self._update(push, self.owner[block].blocks[block].version))
        peer = Peer("worker", push.worker)
        for out in self.owner[block].receive(peer, push, payload):
            if isinstance(out.message, Ack):
                self.actors[push.worker].client.receive(out.message)
        self.pushes += 1

    def _update(self, push: Push, version: int) -> ReplayedUpdate:
        losses = [self.losses[r.portion, k] for r in push.push_id for k in range(r.first, r.last)]
        norm = sqrt(self.squares.pop((push.worker, push.sequence), nan))
        loss = sum(losses) / len(losses) if losses else nan
        return ReplayedUpdate(
            version + 1, push.worker, name_of(push.push_id), push.version, version - push.version, loss, norm
        )

    def parameters(self) -> dict[str, Tensor]:
        compute = next(iter(self.actors.values())).compute
        assert isinstance(compute, GradientCompute)
        flat = compute.memory.flat
        for block, server in self.owner.items():
            at = server.blocks[block]
            flat.view(at.spec).copy_(at.buffer.at(at.version))
        compute.shared_module.owner = None
        compute.attach()
        return {name: value.detach().clone() for name, value in compute.memory.module.named_parameters()}


class ReplayPort:
    """A port that stores messages until their turn comes."""

    direct = False

    def __init__(self, replayed: Replay, worker: int) -> None:
        self.replayed = replayed
        self.worker = worker

    def send(self, message: Message) -> None:
        if isinstance(message, Pull):
            self._asks(message.sequence, range(len(self.replayed.record.welcome.blocks)))
        elif isinstance(message, Push):  # batches that were skipped
            self._push(message, None)

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        payload = torch.empty(message.numel, dtype=getattr(torch, message.dtype))
        values.write(payload)
        if isinstance(message, InitBlock):
            self.replayed.owner[message.block].receive(Peer("worker", self.worker), message, payload)
            return
        squares, key = self.replayed.squares, (self.worker, message.sequence)
        if self.replayed.note is not None:
            squares[key] = squares.get(key, 0.0) + float(payload.double().square().sum())
        self._push(message, payload)

    def _push(self, message: Push, payload: Tensor | None) -> None:
        self.replayed.made[message.block, self.worker, message.sequence] = message, payload
        if message.want:
            self._asks(message.sequence, [message.block])

    def _asks(self, sequence: int, blocks: range | list[int]) -> None:
        actor = self.replayed.actors[self.worker]
        actor.asked |= {(sequence, block) for block in blocks}

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        raise AssertionError("parameters come with the answer, there is nothing to read in place")
