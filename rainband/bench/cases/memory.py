"""Peak memory of a server with a 400 MB model, Adagrad and four workers."""

from __future__ import annotations

from rainband.bench.harness.cluster import ExchangeCluster
from rainband.bench.harness.rows import Effort, Row, at_most
from rainband.runtimes.processes.entries import SERVERS_NEED
from rainband.runtimes.processes.zygote import Zygote
from rainband.transports.server_links import MAILBOX_SLOTS

MIB = 1 << 20


def run(effort: Effort) -> list[Row]:
    num_elements = 100 * MIB
    zygote = Zygote.start(SERVERS_NEED)
    try:
        cluster = ExchangeCluster(zygote, num_elements, 1, "adagrad", "shm")
        cluster.measure(4, 3, limit=False)
        [(peak, shared)] = cluster.close()
    finally:
        zygote.close(1.0)
    needed = 2 * 4 * num_elements + 4 * MAILBOX_SLOTS * MIB
    return [
        Row("peak resident size of the server", peak / MIB, "MiB"),
        Row("parameters + Adagrad state + four mailboxes", needed / MIB, "MiB"),
        at_most("peak resident size of the server", peak / needed, 1.2, "parameters + state + mailboxes"),
        Row("the same, without pages shared with the zygote", (peak - shared) / needed, "x", "as above"),
    ]
