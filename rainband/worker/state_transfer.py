"""Transfer of first values and optimizer state between a worker and the servers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rainband.model.flat_parameters import BlockTensors
from rainband.model.optimizer_state import GatheredState, State
from rainband.protocol.messages import FetchState, InitBlock, StatePart
from rainband.protocol.ports import Port
from rainband.protocol.steps import Handle
from rainband.worker.server_blocks import ServerBlocks


@dataclass(eq=False)
class StateHandle(Handle):
    """The requested state of the servers' optimizers."""

    gathered: GatheredState
    missing: set[int]  # blocks whose state is not complete

    def ready(self) -> bool:
        return not self.missing


class StateTransfer:
    """Sends the first values of a run, and collects the servers' optimizer state."""

    __slots__ = ("fetching", "servers")

    def __init__(self, servers: ServerBlocks) -> None:
        self.servers = servers
        self.fetching: StateHandle | None = None

    def load(self, state: State) -> None:
        """Send this worker's parameters and optimizer state: the first values of the run."""
        servers, flat = self.servers, self.servers.flat
        for block in servers.blocks:
            port = servers.owner_port_of[block.index]
            for part, tensors in state.tensors.items():
                message = InitBlock(
                    block.index, block.dtype, block.numel, part=part, absent=flat.absent(block, tensors)
                )
                port.push(message, BlockTensors(flat, block, tensors))
            message = InitBlock(block.index, block.dtype, block.numel, numbers=state.numbers_in(block))
            port.push(message, ParameterValues(servers.views[block.index]))

    def fetch(self) -> StateHandle:
        """Request the state of the servers' optimizers."""
        self.fetching = StateHandle(
            GatheredState(self.servers.flat.parameters), {block.index for block in self.servers.blocks}
        )
        for port in dict.fromkeys(self.servers.owner_port_of[block.index] for block in self.servers.blocks):
            self.servers.send(port, FetchState())
        return self.fetching

    def request_again(self, port: Port) -> None:
        """Repeat a request at the copy that has taken over a server; parts that arrive twice count once."""
        if self.fetching is not None and not self.fetching.ready():
            self.servers.send(port, FetchState())

    def received(self, message: StatePart, payload: Tensor | None) -> None:
        assert self.fetching is not None, "no state was requested"
        block, gathered = self.servers.specs[message.block], self.fetching.gathered
        if message.part:
            assert payload is not None, "a part with a name has values"
            gathered.add(block, message.part, message.absent, payload.view(self.servers.views[message.block].dtype))
            return
        gathered.add_numbers(message.numbers)
        self.fetching.missing.discard(message.block)


class ParameterValues:
    """The parameters of one block, as a source for a port."""

    def __init__(self, view: Tensor) -> None:
        self.view = view

    def write(self, out: Tensor) -> None:
        out.copy_(self.view)

    def contiguous(self) -> Tensor | None:
        return None  # the worker goes on to change them
