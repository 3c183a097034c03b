"""Push + apply + pull through the servers, against the same in one process, gloo's all-reduce and a bare socket."""

from __future__ import annotations

from statistics import median

from rainband.bench.baselines.data_parallel import GlooOrder, SocketOrder
from rainband.bench.harness.cluster import ExchangeCluster, Seconds
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.runtimes.processes.zygote import Zygote

MIB = 1 << 20
NUM_ELEMENTS = 16 * MIB  # 64 MB of float32


def run(effort: Effort) -> list[Row]:
    rounds = 60 if effort == "full" else 15
    zygote = Zygote.start(PRELOAD)
    try:
        return [*_shared_memory(zygote, rounds), *_tcp(zygote, rounds), *_variants(zygote, rounds)]
    finally:
        zygote.close(1.0)


def _shared_memory(zygote: Zygote, rounds: int) -> list[Row]:
    [ours] = _exchange(zygote, NUM_ELEMENTS, 1, 1, "sgd", "shm", rounds)
    gloo = _gloo(zygote, NUM_ELEMENTS, rounds)
    seconds, limit = (median(values) for values in zip(*ours, strict=True))
    return [
        Row("64 MB through shared memory", seconds * 1e3, "ms"),
        at_most("64 MB through shared memory", _ratio(ours), 1.5, "the same apply + copy inside one process"),
        Row("64 MB gloo all-reduce, two ranks", gloo * 1e3, "ms"),
        at_least("time of gloo all-reduce", gloo / seconds, 4.0, "64 MB through shared memory"),
        Row("time of gloo all-reduce", gloo / limit, "x", "the same apply + copy inside one process"),
    ]


def _tcp(zygote: Zygote, rounds: int) -> list[Row]:
    ours, bare = [], []
    for _ in range(3):  # in turns: both cannot run in one process
        [seconds] = _exchange(zygote, NUM_ELEMENTS, 1, 1, "sgd", "tcp", rounds // 3)
        ours += [exchange for exchange, _ in seconds]
        bare += _bare_socket(zygote, NUM_ELEMENTS, rounds // 3)
    return [
        Row("64 MB over TCP", median(ours) * 1e3, "ms"),
        Row("64 MB, bare socket loop", median(bare) * 1e3, "ms"),
        at_most("64 MB over TCP", median(ours) / median(bare), 1.3, "a bare socket loop, same work, same bytes"),
    ]


def _variants(zygote: Zygote, rounds: int) -> list[Row]:
    rows = []
    for name, num_bytes in (("1 KB", 1024), ("1 MB", MIB)):
        for transport in ("shm", "tcp"):
            [seconds] = _exchange(zygote, num_bytes // 4, 1, 1, "sgd", transport, rounds * 10)
            rows.append(Row(f"{name}, {transport}", median([s for s, _ in seconds]) * 1e6, "us"))
    for optimizer in ("adagrad", "adam"):
        [seconds] = _exchange(zygote, NUM_ELEMENTS, 1, 1, optimizer, "shm", rounds // 2)
        rows.append(Row(f"64 MB, {optimizer}", _ratio(seconds), "x", "the same apply + copy inside one process"))
    for num_servers in (1, 2):
        for num_workers in (1, 2, 4):
            everyone = _exchange(zygote, NUM_ELEMENTS, num_workers, num_servers, "sgd", "shm", rounds // 4, False)
            per_second = sum(1 / median([s for s, _ in seconds]) for seconds in everyone)
            name = f"64 MB, {num_workers} workers, {num_servers} servers"
            rows.append(Row(name, per_second * NUM_ELEMENTS * 4 / 1e9, "GB/s pushed, applied and pulled"))
    return rows


def _exchange(
    zygote: Zygote,
    elements: int,
    workers: int,
    servers: int,
    optimizer: str,
    transport: str,
    rounds: int,
    limit: bool = True,
) -> list[Seconds]:
    cluster = ExchangeCluster(zygote, elements, servers, optimizer, transport)
    try:
        return cluster.measure(workers, max(5, rounds), limit)
    finally:
        cluster.close()


def _ratio(seconds: Seconds) -> float:
    return median([exchange / limit for exchange, limit in seconds])


def _gloo(zygote: Zygote, num_elements: int, rounds: int) -> float:
    port = free_port()
    orders = [GlooOrder(rank, port, num_elements, max(5, rounds // 2)) for rank in range(2)]
    entry = "rainband.bench.baselines.data_parallel:gloo_main"
    ranks = [BenchProcess(zygote, entry, order, "gloo") for order in orders]
    return float(median([s for rank in ranks for s in rank.result()]))


def _bare_socket(zygote: Zygote, num_elements: int, rounds: int) -> list[float]:
    order = SocketOrder(free_port(), num_elements, max(5, rounds), 3)
    server = BenchProcess(zygote, "rainband.bench.baselines.data_parallel:socket_server_main", order, "bare server")
    server.read_byte()
    client = BenchProcess(zygote, "rainband.bench.baselines.data_parallel:socket_client_main", order, "bare client")
    seconds: list[float] = client.result()
    return seconds
