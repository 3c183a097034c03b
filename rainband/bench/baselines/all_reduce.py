"""All-reduces side by side in the same processes: gloo's, and ours through shared memory and TCP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from rainband.bench.baselines.data_parallel import join_gloo
from rainband.bench.baselines.limit import timed
from rainband.collectives.algorithm import fast_algorithms
from rainband.collectives.cost import MEASURED_BYTES
from rainband.protocol.messages import Address
from rainband.transports.auth import role_keys
from rainband.transports.collectives.connect import connect_ranks
from rainband.transports.collectives.shared import SharedGroup
from rainband.transports.collectives.tcp import TcpGroup

BLOCKS = 4  # in which the variants take turns


class AllReduceOrder(msgspec.Struct, frozen=True):
    """The order for one of several ranks that sum vectors in every way, in turns."""

    rank: int
    num_ranks: int
    gloo_port: int
    ports: tuple[int, ...]  # of the ranks
    secret: bytes
    run_id: bytes
    rounds: dict[int, int]  # size in bytes -> repetitions


class AllReduceTimes(msgspec.Struct, frozen=True):
    """The seconds that rank 0 has measured, and the costs of each transport."""

    seconds: dict[int, dict[str, list[float]]]  # size -> "gloo", or transport and algorithm -> seconds
    costs: dict[str, tuple[float, float, float, int]]  # place -> LinkCosts


def all_reduce_main(job: bytes, fds: list[int]) -> None:
    order = msgspec.msgpack.decode(job, type=AllReduceOrder)
    torch.set_num_threads(1)
    report, listener, *memory = fds
    join_gloo(order.rank, order.gloo_port, order.num_ranks)
    shared = SharedGroup(memory, order.rank)
    addresses = {
        rank: Address("127.0.0.1", port, "", "") for rank, port in enumerate(order.ports) if rank != order.rank
    }
    sockets = connect_ranks(
        order.rank, addresses, socket.socket(fileno=listener), role_keys(order.secret, "worker"), order.run_id
    )
    tcp = TcpGroup(order.rank, sockets)
    segment = shared.vector(max(order.rounds) // 4).zero_()
    costs = {
        "segment": shared.measure_costs(segment[: MEASURED_BYTES[-1] // 4]),
        "staged": shared.measure_costs(),
        "tcp": tcp.measure_costs(),
    }
    seconds = {
        num_bytes: _measure(shared, dict(_variants(shared, tcp, segment[: num_bytes // 4])), rounds)
        for num_bytes, rounds in order.rounds.items()
    }
    if order.rank == 0:
        times = AllReduceTimes(seconds, dict(costs))
        with open(report, "wb") as file:
            file.write(msgspec.msgpack.encode(times))
    else:
        os.close(report)
    shared.barrier()  # rank 0 may still read memory of the others


def _variants(shared: SharedGroup, tcp: TcpGroup, segment: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    private = torch.zeros_like(segment)
    yield "gloo", partial(dist.all_reduce, private)
    distinct = {algorithm.table(tcp.num_ranks): name for name, algorithm in reversed(fast_algorithms().items())}
    for name in reversed(distinct.values()):  # of two ranks that are the same, the first, which the model names
        yield f"segment {name}", partial(shared.all_reduce, segment, name)
        yield f"staged {name}", partial(shared.all_reduce, private, name)
        yield f"tcp {name}", partial(tcp.all_reduce, private, name)


def _measure(shared: SharedGroup, variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for work in variants.values():  # warm up: plans, page faults
        work()
        work()
    for _ in range(BLOCKS):
        for name, work in variants.items():
            for _ in range(-(-rounds // BLOCKS)):
                shared.barrier()
                seconds[name].append(timed(work))
    return seconds
