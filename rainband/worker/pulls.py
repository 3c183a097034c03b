"""The pulls of one worker: blocks of parameters arrive, and are copied into the model while the worker waits."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rainband.codecs.codec import Codec, key_of
from rainband.errors import Refused
from rainband.protocol.messages import Ack, Idle, Params, Pull, PullDelayed
from rainband.protocol.ports import Port
from rainband.protocol.steps import Handle
from rainband.worker.leases import HeldLeases
from rainband.worker.pushes import Pushes
from rainband.worker.server_blocks import ServerBlocks


@dataclass(eq=False, slots=True)
class PullHandle(Handle):
    """Requested parameters. They are copied into the model, block by block, while this is awaited."""

    pulls: Pulls
    sequence: int
    at_version: int  # the round or evaluation; -1: the newest
    left: int  # blocks that are not copied yet
    arrived: list[tuple[int, Tensor | None, int]] = field(default_factory=list)  # block, values, version
    arrived_blocks: int = 0  # bit mask of the blocks that have arrived
    request: Pull | None = None  # for servers that must be asked
    late: bool = False  # that round is over
    eager: bool = False  # copy each block when it arrives, while it is still in the cache

    def restart(self, sequence: int, num_blocks: int) -> None:
        """Request everything again under another number."""
        self.sequence, self.left = sequence, num_blocks
        self.arrived.clear()
        self.arrived_blocks = 0

    def has(self, block: int) -> bool:
        return bool(self.arrived_blocks >> block & 1)

    def has_every(self) -> bool:
        """Return True if all blocks have arrived."""
        return self.arrived_blocks.bit_count() == len(self.pulls.servers.blocks)

    def arrive(self, block: int, values: Tensor | None, version: int = 0) -> None:
        if self.has(block):
            return  # a repeated request was answered twice
        self.arrived_blocks |= 1 << block
        self.arrived.append((block, values, version))
        if self.eager:
            self.ready()

    def ready(self) -> bool:
        while self.arrived and not self.late:
            self.pulls.take(self, *self.arrived.pop(0))
        return self.left == 0 or self.late

    def may_never_complete(self, stopping: bool) -> bool:
        return stopping

    def __await__(self) -> Generator[Handle, None, bool]:
        while not self.ready():
            yield self
        return not self.late


class Pulls:
    """Requests parameters, or reads them in shared memory. At most one pull is under way."""

    __slots__ = ("asks", "codec", "current", "entered", "leases", "pushes", "servers", "versions")

    def __init__(self, servers: ServerBlocks, pushes: Pushes, leases: HeldLeases) -> None:
        self.servers = servers
        self.pushes = pushes
        self.leases = leases
        self.versions = pushes.versions
        self.codec: Codec | None = None  # with which servers encode parameters
        self.current: PullHandle | None = None
        self.asks: bool | None = None  # must servers in shared memory be asked before a read? Their first reply says
        self.entered = False  # readers on the servers wait for this worker

    def newest(self, clock: int) -> PullHandle:
        """Request the newest parameters, for the work item after `clock` pushed ones; -1: not to compute with them."""
        return self._request(PullHandle(self, 0, -1, 0), clock)

    def with_push(self) -> PullHandle:
        """Return the handle of a pull that the next push requests, block by block."""
        request = Pull(self.pushes.sequence + 1, self.pushes.clock + 1, base=self.pushes.base, part=self.servers.part)
        num_blocks = len(self.servers.blocks)
        pull = self.current = PullHandle(self, request.sequence, -1, num_blocks, request=request, eager=True)
        return pull

    def round(self, round_: int, final: bool = False) -> PullHandle:
        """Request exactly the parameters of a round, unless that is under way already; `final`: to be saved."""
        if self.current is None or self.current.at_version != round_ or final:
            clock = -1 if final else self.pushes.clock
            request = Pull(self.pushes.next_sequence(), clock, round_, part=self.servers.part)
            self.current = PullHandle(self, request.sequence, round_, len(self.servers.blocks), request=request)
            self.servers.send_all(request)
            self.requested(self.current)
        return self.current

    def has_opened(self) -> bool:
        """Return True if all blocks have reached the requested round, or have passed it."""
        assert self.current is not None
        return self.current.late or self.current.has_every()

    def must_ask(self, block: int) -> bool:
        """Return True if this block's server must be asked: its memory is not shared, or its rule decides on reads."""
        return not self.servers.port_of[block].direct or self.asks is not False

    def rest(self) -> None:
        """Report that this worker is idle, so that no reader waits for it (prevents deadlock)."""
        self.entered = False
        self.servers.send_all(Idle())

    def _request(self, pull: PullHandle, clock: int) -> PullHandle:
        # A new number: late answers to an older request must not be taken for answers to this one.
        servers, pushes = self.servers, self.pushes
        pull.restart(pushes.next_sequence(), len(servers.blocks))
        request = pull.request = Pull(pull.sequence, clock, base=pushes.base, part=servers.part)
        self.current, servers.stats.held_by = pull, None
        for port in servers.own_ports:
            if not port.direct or self.asks is not False:
                servers.send(port, request)
        if servers.direct_blocks:
            self._read_in_shared_memory(pull)
        if servers.observer is not None:
            servers.observer.pulled(pull)
        return pull

    def requested(self, pull: PullHandle) -> None:
        if self.servers.observer is not None:
            self.servers.observer.pulled(pull)

    def request_again(self, port: Port) -> None:
        """Repeat the request that is under way, at the copy that has taken over a server."""
        pull = self.current
        if pull is None or pull.request is None or pull.left == 0 or pull.late:
            return
        self.servers.send(port, pull.request)
        if pull.at_version < 0:
            self._read_in_shared_memory(pull)

    def _read_in_shared_memory(self, pull: PullHandle) -> None:
        """Read the blocks that need no request and have answered all of this worker's pushes."""
        for block in self.servers.direct_blocks:
            if not self.must_ask(block.index) and not self.pushes.unanswered[block.index]:
                pull.arrive(block.index, None)

    def received(self, params: Params, payload: Tensor | None) -> None:
        """Take one block's reply."""
        pull = self.current
        if pull is None or pull.sequence != params.sequence or pull.has(params.block):
            return
        if params.round_over:
            self._round_is_over(pull)
            return
        if self.asks is None:
            self.asks = params.asks
            if pull.at_version < 0:
                self._read_in_shared_memory(pull)
        pushes = self.pushes
        pushes.terms[params.block] = params.term
        self.entered = params.asks and params.clock >= 0
        if params.clock > pushes.clock:  # this worker joined late, or was given up: it starts at the slowest clock
            not_pushed = 0 if pull.request is None else max(0, pull.request.clock - pushes.clock)
            pushes.clock = pushes.base = params.clock
            self._request(pull, pushes.clock + not_pushed)
            return
        pull.arrive(params.block, payload, params.version)

    def answered(self, ack: Ack) -> None:
        """Read a block in shared memory if its pull waited only for this answer to a push."""
        pull = self.current
        if pull is None or pull.at_version >= 0 or not self.servers.direct_blocks or self.must_ask(ack.block):
            return
        if ack.sequence <= pull.sequence and self.pushes.has_answered_up_to(pull.sequence, ack.block):
            pull.arrive(ack.block, None)

    def delayed(self, message: PullDelayed) -> None:
        """Note the worker that holds back the current pull."""
        if self.current is not None and self.current.sequence == message.sequence:
            self.servers.stats.held_by = message.worker

    def take(self, pull: PullHandle, block: int, values: Tensor | None, version: int) -> None:
        """Copy a block into the model. Only called while the strategy awaits, between two steps."""
        servers, observer = self.servers, self.servers.observer
        if observer is not None:
            observer.began("read")
        out, num_bytes = servers.views[block], servers.num_bytes[block]
        if values is None:
            read = servers.port_of[block].read(servers.specs[block], pull.at_version, out)
            if read is None:
                self._round_is_over(pull)
                if observer is not None:
                    observer.ended("read")
                return
            version = read
        elif self.codec is not None and values.dtype == torch.uint8 and values.nbytes < servers.num_bytes[block]:
            out.copy_(self._decoded(self.codec, pull, block, values))
            num_bytes = values.nbytes
        elif values is not out and values.data_ptr() != out.data_ptr():  # otherwise it was received there
            out.copy_(values.view(out.dtype))
        self.versions[block] = version
        pull.left -= 1
        servers.stats.pulled_bytes += num_bytes
        if observer is not None:
            observer.ended("read")

    def _decoded(self, codec: Codec, pull: PullHandle, block: int, body: Tensor) -> Tensor:
        """Return the parameters that a codec has encoded; raise Refused if these bytes cannot be any."""
        try:
            return codec.decode(body, self.servers.specs[block].numel, key_of(pull.sequence, block))
        except ValueError as error:
            raise Refused(f"the parameters of block {block} cannot be decoded: {error}") from None

    def _round_is_over(self, pull: PullHandle) -> None:
        """Mark the pull as late: other workers have done the rest of its round."""
        pull.late = True
        self.leases.skip_rounds(pull.at_version)
