"""Every all-reduce algorithm sums right, and sends the bytes of its textbook formula (Rabenseifner 2004; Patarasuk and
Yuan 2009).

2 to 17 processes on this machine, connected by TCP; the kernel counts what each connection has received. Whole numbers,
so sums are exact.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray

from rainband.collectives.algorithm import algorithm_names, load_algorithm
from rainband.transports.collectives.tcp import TcpGroup
from reproduce.claim import Check, Claim, Method, Results

SIZE = 1 << 18  # elements of 4 bytes
BYTES_RECEIVED = 128  # offset in the kernel's struct tcp_info
RANKS = tuple(float(number) for number in range(2, 18))
NAMES = tuple(algorithm_names())


def point(seed: int, x: float, task: str, algorithm: str) -> dict[str, float]:
    number = int(x)
    links = _links(number)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(number)]
    processes = [
        context.Process(target=_one_rank, args=(rank, links[rank], algorithm, pipes[rank][1])) for rank in range(number)
    ]
    for process in processes:
        process.start()
    reports = [pipe[0].recv() for pipe in pipes]
    for process in processes:
        process.join()
    for row in links.values():
        for sock in row.values():
            sock.close()
    sent = [sum(received.get(rank, 0) for received, _ in reports) for rank in range(number)]
    formula = load_algorithm(algorithm).textbook(number)
    table = load_algorithm(algorithm).table(number)
    return {
        "wrong": sum(wrong for _, wrong in reports),
        "most": max(sent) / (4 * SIZE),
        "against_book": max(sent) / (4 * SIZE * formula.max_sent),
        "total_against_book": sum(sent) / (4 * SIZE * formula.total_sent),
        "steps_over": table.num_steps - formula.steps,
    }


def _links(number: int) -> dict[int, dict[int, socket.socket]]:
    links: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(number)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for one in range(number):
            for other in range(one):
                links[one][other] = socket.create_connection(listener.getsockname())
                links[other][one], _ = listener.accept()
    return links


def _one_rank(rank: int, sockets: dict[int, socket.socket], algorithm: str, report: Connection) -> None:
    torch.set_num_threads(1)
    group = TcpGroup(rank, sockets)
    vector = torch.arange(SIZE, dtype=torch.float32) % 97 + rank
    group.all_reduce(vector, algorithm)
    number = group.num_ranks
    expected = number * (torch.arange(SIZE, dtype=torch.float32) % 97) + number * (number - 1) // 2
    received = {}
    for other, sock in sockets.items():
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        received[other] = struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    report.send((received, int((vector != expected).sum())))
    group.barrier()  # the others may still need this rank


def most_of(measure: str) -> object:
    """Return the largest value over all algorithms and numbers of ranks."""

    def of(r: Results) -> NDArray[np.float64]:
        largest: NDArray[np.float64] = np.max([r(name, measure, x) for name in NAMES for x in RANKS], axis=0)
        return largest

    return of


CLAIM = Claim(
    paper="Rabenseifner 2004; Patarasuk and Yuan 2009",
    text="each all-reduce algorithm sends the bytes of its textbook formula in as many steps, for 2 to 17 ranks",
    part="Model averaging",
    how="processes",
    methods=tuple(Method(name, {"algorithm": name}) for name in NAMES),
    point=point,
    x=RANKS,
    x_label="ranks",
    repeated=False,
    shown={"most": "vectors that the busiest rank sends"},
    checks=(
        Check("all sums are right: wrong elements", most_of("wrong"), below=0.5),  # type: ignore[arg-type]
        Check(
            "no rank sends over 1 % more than the formula says",
            most_of("against_book"),  # type: ignore[arg-type]
            below=1.01,
            unit="times",
        ),
        Check(
            "in all, at most 1 % more",
            most_of("total_against_book"),  # type: ignore[arg-type]
            below=1.01,
            unit="times",
        ),
        Check("no more steps than the formula says", most_of("steps_over"), below=0.5),  # type: ignore[arg-type]
        Check(
            "with 17 ranks, the busiest rank of a single master sends over 5 times as much as one of a ring",
            lambda r: r("single_master", "most", 17.0) / r("ring", "most", 17.0),
            above=5.0,
            unit="times",
            control=True,
        ),
    ),
)
