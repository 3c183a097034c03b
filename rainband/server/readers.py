"""Readers of a server's blocks: admitted by the update rule, or waiting until it admits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from rainband.codecs.codec import Memory, key_of
from rainband.protocol.messages import Message, Params, Peer, Pull, PullDelayed

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.codecs.codec import Codec
    from rainband.protocol.parameter_buffers import ParameterBuffer
    from rainband.server.block import Block


class ServerOutput(NamedTuple):
    """A message to send. Where `read` is set, its values are read when the bytes leave: see `Server.read`."""

    to: Peer
    message: Message
    read: bool = False


class ReadableBlock(Protocol):
    """A block of which readers see a published version."""

    version: int
    buffer: ParameterBuffer


class Readers:
    """Answers pulls, now or when a block's rule admits the reader."""

    def __init__(self, blocks: Mapping[int, Block], codec: Codec | None = None) -> None:
        """`codec`: with which parameters are sent, except those that are read to be saved or evaluated."""
        self.blocks = blocks
        self.codec = codec
        self.term = 1
        self.asks = False  # readers in shared memory must ask, too
        self.incarnations: dict[int, int] = {}  # worker -> the incarnation whose clock counts
        self.told_delays: dict[Peer, tuple[int, int]] = {}  # reader -> (its pull, the worker it waits for), as sent

    def pull(self, reader: Peer, pull: Pull) -> list[ServerOutput]:
        """Answer a request for all blocks of one part of the model."""
        outs: list[ServerOutput] = []
        for block in self.blocks.values():
            if block.spec.part != pull.part:
                continue
            nobody_waits = block.loaded and not block.waiting and not block.clocked
            if nobody_waits and block.rule.admits(block, pull, reader.index):
                outs.append(ServerOutput(reader, self._params(block, pull, reader.index), True))
            else:
                self.wait(block, reader, pull)
                outs += self.admit(block)
        return outs

    def wait(self, block: Block, reader: Peer, pull: Pull) -> None:
        """Let a reader wait; its newest request replaces older ones."""
        if block.clocked and pull.clock >= 0 and reader.role == "worker":
            self.incarnations[reader.index] = max(reader.incarnation, self.incarnations.get(reader.index, 0))
            block.rule.enter(block, reader.index, pull.base)
        block.waiting.pop(reader, None)
        block.waiting[reader] = pull

    def admit_all(self) -> list[ServerOutput]:
        return [out for block in self.blocks.values() if block.waiting for out in self.admit(block)]

    def admit(self, block: Block) -> list[ServerOutput]:
        """Answer the waiting readers that the rule admits now."""
        if not block.loaded:
            return []
        admits = block.rule.admits
        admitted = [(to, pull) for to, pull in block.waiting.items() if admits(block, pull, to.index)]
        for to, _ in admitted:
            del block.waiting[to]
        outs = [ServerOutput(to, self._params(block, pull, to.index), read=True) for to, pull in admitted]
        if block.clocked and block.waiting:
            outs += self._report_delays(block)
        return outs

    def _params(self, block: Block, pull: Pull, reader: int) -> Params:
        kept = -1
        if block.keeps_reads and pull.clock >= 0:
            block.rule.give(block, reader)
            kept = reader
        clock = -1 if not block.clocked or pull.clock < 0 else block.rule.clock_of(reader)
        return Params(
            block.index,
            pull.sequence,
            self.term,
            block.version,
            pull.at_version,
            asks=self.asks,
            clock=clock,
            kept=kept,
            encoded=int(self.codec is not None and pull.clock >= 0),
        )

    def _report_delays(self, block: Block) -> list[ServerOutput]:
        """Report to waiting readers which worker they wait for; again only if it is another one."""
        outs = []
        for reader, pull in block.waiting.items():
            holder = block.rule.holder(block, pull, reader.index)
            if holder is not None and self.told_delays.get(reader) != (pull.sequence, holder):
                self.told_delays[reader] = pull.sequence, holder
                outs.append(ServerOutput(reader, PullDelayed(pull.sequence, holder)))
        return outs

    def read(self, params: Params) -> tuple[Params, Tensor | None]:
        """Return a reply that is about to leave with the parameters of this moment."""
        params, values = self._read(params)
        if not params.encoded or values is None:
            return params, values
        assert self.codec is not None, "only replies that were made with a codec are encoded"
        body = self.codec.encode(values.float(), key_of(params.sequence, params.block), Memory())
        if len(body) >= values.nbytes or not bool(values.isfinite().all()):
            return msgspec.structs.replace(params, encoded=0), values
        return msgspec.structs.replace(params, encoded=len(body)), body

    def _read(self, params: Params) -> tuple[Params, Tensor | None]:
        block = self.blocks[params.block]
        if block.keeps_reads and params.kept >= 0:
            copy = block.rule.copy_of(params.kept, params.version)
            if copy is not None:  # None: the reader was given up since it was admitted
                return params, copy
        num_older = len(block.buffer.tensors) - 1  # in rounds, the version before the newest can still be read
        round_over = params.at_version >= 0 and block.version > params.at_version + num_older
        version = params.at_version if params.at_version >= 0 else block.version
        if round_over or version != params.version or self.term != params.term:
            params = msgspec.structs.replace(params, term=self.term, version=version, round_over=round_over)
        return params, None if round_over else block.buffer.at(version)

    def is_current(self, worker: Peer) -> bool:
        """Return True if this incarnation of a worker is the newest that has read."""
        return self.incarnations.get(worker.index) == worker.incarnation

    def lost(self, peer: Peer) -> None:
        """Forget a peer whose connection is closed: its requests, and what other readers wait for."""
        self.told_delays.pop(peer, None)
        for block in self.blocks.values():
            block.waiting.pop(peer, None)
            if block.clocked and self.is_current(peer) and peer.role == "worker":
                block.rule.forget(block, peer.index)
