"""All-reduce of one vector, in shared memory and over TCP on the loopback interface, against gloo's.

All run in the same processes, in turns, without encryption. "in the segment": the vector lies in shared memory;
"staged": it is copied there and back. gloo's times have two modes on few cores, so three percentiles are printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median, quantiles

from rainband.bench.baselines.all_reduce import AllReduceOrder, AllReduceTimes
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.collectives.cost import LinkCosts, crossover_bytes, ranking
from rainband.runtimes.processes.zygote import Zygote
from rainband.transports.auth import new_run_id, new_secret
from rainband.transports.collectives.memory import GroupMemory
from rainband.transports.connect import listen_tcp

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = {4 * KIB: 400, 16 * KIB: 200, 64 * KIB: 200, 256 * KIB: 80, MIB: 80, 4 * MIB: 24, 16 * MIB: 12, 64 * MIB: 8}
PLACES = {"segment": "in the segment", "staged": "staged", "tcp": "TCP"}
AS_FAST = 1.15  # an algorithm that takes at most this much longer than the fastest counts as a winner, too


def run(effort: Effort) -> Iterator[Row]:
    for num_ranks in (2, 4):
        yield from _rows(num_ranks, measured_times(num_ranks, 1 if effort == "full" else 4))


def measured_times(num_ranks: int, divisor: int) -> AllReduceTimes:
    """Measure in processes of their own, with a fraction of the repetitions."""
    zygote = Zygote.start((*PRELOAD, "rainband.bench.baselines.all_reduce"))
    try:
        return _measured(zygote, num_ranks, divisor)
    finally:
        zygote.close(1.0)


def _measured(zygote: Zygote, num_ranks: int, divisor: int) -> AllReduceTimes:
    memory, listeners = GroupMemory(num_ranks), [listen_tcp("127.0.0.1") for _ in range(num_ranks)]
    ports = tuple(listener.getsockname()[1] for listener in listeners)
    secret, run_id, gloo_port = new_secret(), new_run_id(), free_port()
    rounds = {size: max(4, count // divisor) for size, count in ROUNDS.items()}
    processes = []
    for rank, listener in enumerate(listeners):
        order = AllReduceOrder(rank, num_ranks, gloo_port, ports, secret, run_id, rounds)
        entry, fds = "rainband.bench.baselines.all_reduce:all_reduce_main", [listener.fileno(), *memory.fds]
        processes.append(BenchProcess(zygote, entry, order, "all-reduce", fds))
    for listener in listeners:
        listener.close()
    times: AllReduceTimes = processes[0].result(AllReduceTimes)
    memory.close()
    return times


def _rows(num_ranks: int, times: AllReduceTimes) -> Iterator[Row]:
    costs = {place: LinkCosts(*values) for place, values in times.costs.items()}
    for size, seconds in times.seconds.items():
        yield from _size_rows(num_ranks, size, seconds, costs)
    for place in PLACES:
        yield from _crossover_rows(num_ranks, place, times, costs[place])


def _size_rows(
    num_ranks: int, size: int, seconds: dict[str, list[float]], costs: dict[str, LinkCosts]
) -> Iterator[Row]:
    what = f"{_name(size)}, {num_ranks} ranks"
    gloo = seconds["gloo"]
    gloo_p10, gloo_median, gloo_p90 = _percentile(gloo, 1), median(gloo), _percentile(gloo, 9)
    for label, value in (("p10", gloo_p10), ("median", gloo_median), ("p90", gloo_p90)):
        yield Row(f"{what}, gloo {label}", value * 1e6, "us")
    for place in PLACES:
        chosen = ranking(num_ranks, size, costs[place])[0]
        medians = {key.split()[1]: median(values) for key, values in seconds.items() if key.startswith(place)}
        ours, where = medians[chosen], f"{what}, {PLACES[place]}"
        yield Row(f"{where}, {chosen}", ours * 1e6, "us")
        yield from _gloo_rows(place, size, where, ours, gloo_p10, gloo_median)
        fastest = min(medians, key=medians.__getitem__)
        against = f"the fastest algorithm, {fastest}"
        yield at_most(f"{where}, the model's choice {chosen}", ours / medians[fastest], AS_FAST, against)


def _gloo_rows(place: str, size: int, where: str, ours: float, gloo_p10: float, gloo_median: float) -> Iterator[Row]:
    if place == "tcp":
        yield at_least("median time of gloo", gloo_median / ours, 1.0, where)
        yield Row("p10 time of gloo", gloo_p10 / ours, "x", where)
    elif size == 64 * MIB:
        yield at_least("median time of gloo", gloo_median / ours, 4.0 if place == "segment" else 3.0, where)
    elif size == MIB:
        yield at_least("p10 time of gloo", gloo_p10 / ours, 2.0, where)
    elif size == 4 * KIB:
        yield at_least("p10 time of gloo", gloo_p10 / ours, 1.0, where)
    else:
        yield Row("p10 time of gloo", gloo_p10 / ours, "x", where)


def _crossover_rows(num_ranks: int, place: str, times: AllReduceTimes, costs: LinkCosts) -> Iterator[Row]:
    """Compare the size from which `direct` is faster than `recursive_doubling`: predicted and measured."""
    predicted = crossover_bytes(num_ranks, costs, "recursive_doubling", "direct")
    ratios = {
        size: median(seconds[f"{place} recursive_doubling"]) / median(seconds[f"{place} direct"])
        for size, seconds in times.seconds.items()
    }
    measured = crossing(ratios)
    if predicted is None or measured is None:
        return
    what = f"{num_ranks} ranks, {PLACES[place]}, direct overtakes recursive doubling"
    yield Row(f"{what}, measured", measured / KIB, "KiB")
    yield Row(f"{what}, predicted", predicted / KIB, "KiB")
    yield at_most(what, max(predicted / measured, measured / predicted), 2.0, "larger of predicted and measured")


def crossing(ratios: dict[int, float]) -> float | None:
    """Return the size at which a ratio passes 1 for the last time, by a straight line between logarithms."""
    sizes, found = sorted(ratios), None
    for low, high in pairwise(sizes):
        if ratios[low] < 1 <= ratios[high]:
            share = math.log(1 / ratios[low]) / math.log(ratios[high] / ratios[low])
            found = low * (high / low) ** share
    return found


def _percentile(seconds: list[float], tenth: int) -> float:
    return quantiles(seconds, n=10, method="inclusive")[tenth - 1]


def _name(size: int) -> str:
    return f"{size // MIB} MB" if size >= MIB else f"{size // KIB} KB"
