"""Small parts for exact tests: a plan, a push, a server with a few blocks of 32 elements each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rainband.protocol.data_plan import BatchRange, DataPlan, PushId
from rainband.protocol.layout import BlockSpec, Layout, LayoutEntry, arrange, cut
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import COORDINATOR, Ack, Assign, InitBlock, Peer, Push
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.rules import ApplyOnArrival, MeanOfRound
from rainband.rules.rule import Rule
from rainband.server.block import Block
from rainband.server.readers import ServerOutput
from rainband.server.server import Server
from rainband.strategy import ServerPart

NUMEL = 32
WORKERS = [Peer("worker", i) for i in range(4)]


def make_plan(num_batches: int = 8, portion_batches: int = 4, **others: Any) -> DataPlan:
    """One sample per batch and one epoch, unless told otherwise."""
    given = {"num_samples": num_batches, "batch_size": 1, "epochs": 1, "seed": 0, **others}
    return DataPlan(fingerprint="data", layout="model", portion_batches=portion_batches, **given)


def rounds_plan(num_batches: int = 6, items_per_round: int = 3, portion_batches: int = 2, **others: Any) -> DataPlan:
    """Two rounds of three work items, unless told otherwise."""
    return make_plan(num_batches, portion_batches, items_per_round=items_per_round, **others)


def named(portion: int, first: int, last: int | None = None, lease: int = 1) -> PushId:
    """One range; a single batch if `last` is not given."""
    return (BatchRange(portion, first, first + 1 if last is None else last, lease),)


def make_push(name: PushId, worker: int = 0, block: int = 0, **others: Any) -> Push:
    given = {"sequence": 1, "samples": 1, "clock": 1, "term": 1, "version": 0, "dtype": "float32", "numel": NUMEL}
    return Push(block=block, worker=worker, push_id=name, **{**given, **others})


def item_push(plan: DataPlan, round_: int, position: int, **others: Any) -> Push:
    """The push of one work item of a round."""
    group, k = divmod(round_, plan.portion_batches)
    return make_push(named(group * plan.items_per_round + position, k), at_version=round_, **others)


def layout_of(num_blocks: int, dtype: str = "float32") -> Layout:
    """As many parameters of one block each."""
    return arrange([LayoutEntry(f"p{i}", (NUMEL,), dtype) for i in range(num_blocks)])


def specs_of(num_blocks: int, dtype: str = "float32") -> tuple[BlockSpec, ...]:
    return cut(layout_of(num_blocks, dtype), num_servers=num_blocks)


def make_server_part(rule: Callable[[], Rule] = ApplyOnArrival, lr: float = 0.5, **others: Any) -> ServerPart:
    optimizer = others.get("optimizer") or OptimizerSpec("sgd", {"lr": lr})
    return ServerPart(rule, optimizer, others.get("schedule") or Schedule())


def make_buffer(spec: BlockSpec, buffers: int) -> ParameterBuffer:
    return ParameterBuffer([0], 0, [torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype)) for _ in range(buffers)])


def make_block(plan: DataPlan | None = None, server_part: ServerPart | None = None, dtype: str = "float32") -> Block:
    """One block, loaded with zeros."""
    spec, server_part = specs_of(1, dtype)[0], server_part or make_server_part()
    buffers = 2 if server_part.rule().reads == "round" else 1
    block = Block(spec, make_buffer(spec, buffers), plan or make_plan(), server_part, ({},))
    block.load(InitBlock(0, dtype, NUMEL), torch.zeros(NUMEL, dtype=block.parameters.dtype))
    return block


def make_server(num_blocks: int = 1, plan: DataPlan | None = None, loaded: bool = True, **others: Any) -> Server:
    """A server that owns all blocks; rounds if the plan has them."""
    plan = plan or make_plan()
    server_part = make_server_part(MeanOfRound if plan.items_per_round else ApplyOnArrival, **others)
    server = Server(lambda _: server_part, lambda specs, buffers: [make_buffer(spec, buffers) for spec in specs])
    server.receive(COORDINATOR, Assign(plan, specs_of(num_blocks), ({},), num_replicas=len(WORKERS)))
    for block in range(num_blocks if loaded else 0):
        server.receive(WORKERS[0], InitBlock(block, "float32", NUMEL), full(0.0))
    return server


def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient, or parameters, all alike."""
    return torch.full((NUMEL,), value, dtype=dtype)


def answer(outs: Sequence[ServerOutput]) -> Ack:
    """The answer to a push."""
    (ack,) = [out.message for out in outs if isinstance(out.message, Ack)]
    return ack


def send(server: Server, push: Push, value: float | None = 1.0) -> str:
    """Push a gradient that is `value` everywhere; returns what became of it."""
    payload = None if value is None else full(value)
    return answer(server.receive(Peer("worker", push.worker), push, payload)).result


def value_of(block: Block) -> float:
    """The parameter that all elements of a block have."""
    (value,) = set(block.values.tolist())
    return float(value)
