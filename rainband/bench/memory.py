"""Peak memory of a server: a 400 MB model, Adagrad, four workers."""

from __future__ import annotations

from rainband.bench.rig import Rig
from rainband.bench.rows import Effort, Row, at_most
from rainband.transports.ports import MAILBOX_SLOTS
from rainband.worlds.local import SERVERS_NEED
from rainband.worlds.zygote import Zygote

MIB = 1 << 20


def run(effort: Effort) -> list[Row]:
    num_elements = 100 * MIB
    zygote = Zygote.start(SERVERS_NEED)
    try:
        rig = Rig(zygote, num_elements, 1, "adagrad", "shm")
        rig.measure(4, 3, limit=False)
        [(peak, shared)] = rig.close()
    finally:
        zygote.close(1.0)
    needed = 2 * 4 * num_elements + 4 * MAILBOX_SLOTS * MIB
    return [
        Row("peak resident size of the server", peak / MIB, "MiB"),
        Row("parameters + Adagrad state + four mailboxes", needed / MIB, "MiB"),
        at_most("peak resident size of the server", peak / needed, 1.2, "parameters + state + mailboxes"),
        Row("the same, without pages it shares with its zygote", (peak - shared) / needed, "x", "as above"),
    ]
