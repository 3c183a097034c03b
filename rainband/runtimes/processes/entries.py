"""The processes of a run: their entries, the modules that they need, their keys, and how they end.

Torch is not imported for this, so that a command can start its fork server at once.
"""

from __future__ import annotations

import signal

from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes.zygote import Exited
from rainband.strategy import Requirements

ENTRIES = {
    "worker": "rainband.runtimes.processes.worker_main:main",
    "server": "rainband.runtimes.processes.server_process:main",
}
SCRIPT = "rainband.runtimes.training_loop.script_process:main"  # the entry of a worker that runs a user's script
# Servers are forked first, without torch._dynamo, which takes 70 MB and which they do not need.
SERVERS_NEED = ("torch", ENTRIES["server"].partition(":")[0])
WORKERS_NEED = ("torch._dynamo", *(entry.partition(":")[0] for entry in (ENTRIES["worker"], SCRIPT)))
# The keys of a process: its role's, those of nodes that may connect to it, and, of a worker, that for tunnels.
KEYS_OF = {"worker": ("worker", "tunnel", "files"), "server": ("worker", "server", "files")}
FINE = "exit code 0"
LINK_BROKEN = 69  # the exit code of a worker whose connections have broken; it may be started again


def modules_of_workers(config: RunConfig, requires: Requirements) -> tuple[str, ...]:
    """Return the modules to import before workers are forked.

    An optimizer imports torch._dynamo, which takes more than a second. Workers that only send gradients have none.
    """
    only_send = requires.servers and requires.optimizer == "servers" and not config.script
    return WORKERS_NEED[1:] if only_send else WORKERS_NEED


def how_it_ended(exited: Exited) -> str:
    if exited.signal == signal.SIGKILL:
        return "killed by signal 9, often because memory ran out"
    if exited.signal:
        return f"killed by signal {exited.signal}"
    return f"exit code {exited.code}" + (f": {exited.error}" if exited.error else "")
