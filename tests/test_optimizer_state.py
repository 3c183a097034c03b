"""An optimizer's state between a custom loop and the servers: its cost grows with the tensors, not their square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Adam

from rainband.model.flat_parameters import Flat
from rainband.model.optimizer_state import GatheredState, put_state, state_of
from rainband.protocol.layout import cut
from rainband.protocol.messages import InitBlock, Message
from rainband.protocol.ports import BlockValues
from rainband.worker.server_blocks import ServerBlocks
from rainband.worker.state_transfer import StateTransfer


class Counting(list[nn.Parameter]):
    """The parameters of a group; counts how often they are walked through."""

    walks = 0

    def __iter__(self) -> Iterator[nn.Parameter]:
        self.walks += 1
        return super().__iter__()


class Unsearched(tuple[int, ...]):
    """Numbers of parameters that nobody may search one by one."""

    def __contains__(self, number: object) -> bool:
        raise AssertionError("a search through all absent parameters")


class Sent:
    """A port that keeps its messages."""

    direct = False

    def __init__(self) -> None:
        self.messages: list[InitBlock] = []

    def send(self, message: Message) -> None:
        raise AssertionError("only values are sent")

    def push(self, message: Any, values: BlockValues) -> None:
        self.messages.append(message)

    def read(self, spec: Any, at_version: int, out: Any) -> int | None:
        raise AssertionError("nothing is read")


def trained(num_tensors: int) -> tuple[nn.ParameterList, Adam]:
    """Parameters of 16 elements each, of which every second one has state."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(num_tensors))
    optimizer = Adam(module.parameters(), lr=0.1)
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.ones(16) if number % 2 else None
    optimizer.step()
    return module, optimizer


def walks(num_tensors: int) -> int:
    module, optimizer = trained(num_tensors)
    counting = optimizer.param_groups[0]["params"] = Counting(optimizer.param_groups[0]["params"])
    parameters = list(module.parameters())
    put_state([optimizer], parameters, state_of([optimizer], parameters))
    assert sum(parameter in optimizer.state for parameter in parameters) == num_tensors // 2
    return counting.walks


def test_a_group_is_walked_through_as_often_for_many_tensors_as_for_few() -> None:
    assert walks(4) == walks(400) <= 4


def test_each_block_gets_its_own_parameters_only() -> None:
    module, optimizer = trained(40)
    state = state_of([optimizer], list(module.parameters()))
    flat, port = Flat(module), Sent()
    specs = cut(flat.layout, block_bytes=4 * 16 * 4)  # four parameters each
    blocks = ServerBlocks(flat, specs, [0] * len(specs), [port])

    StateTransfer(blocks).load(state)

    assert [m.part for m in port.messages] == ["exp_avg", "exp_avg_sq", ""] * 10
    assert [m.absent for m in port.messages[:4]] == [(0, 2), (0, 2), (), (4, 6)]
    assert [m.numbers for m in port.messages if m.numbers][1] == {"step": {5: 1.0, 7: 1.0}}


def test_received_state_is_put_together_without_a_search() -> None:
    module, _ = trained(4)
    flat = Flat(module)
    (block,) = cut(flat.layout)
    gathered = GatheredState(flat.parameters)

    gathered.add(block, "exp_avg", Unsearched((0, 2)), torch.arange(64.0))

    values = [None if tensor is None else tensor[0].item() for tensor in gathered.state.tensors["exp_avg"]]
    assert values == [None, 16.0, None, 48.0]
