"""The runtime `ray`: the coordinator runs here, workers and servers are processes on the nodes of a Ray cluster.

Ray finds places for them, and brings the user's code. All else is as on several machines: they connect to the
coordinator and to each other by themselves. This launcher, not Ray, starts lost workers again, on other nodes if
theirs is lost: the coordinator notices a loss within a failure timeout, and Ray after many seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from rainband.coordinator.coordinator import RunSettings
from rainband.plugins import load_strategy, strategy_names
from rainband.protocol import events
from rainband.protocol.messages import Address, Peer
from rainband.runtimes.config import RunConfig
from rainband.runtimes.machines.doors import Doors
from rainband.runtimes.machines.machine_host import MachineHost
from rainband.runtimes.machines.mirror import MirrorOrder
from rainband.runtimes.machines.software import own_software
from rainband.runtimes.processes.entries import ENTRIES, SERVERS_NEED, modules_of_workers
from rainband.runtimes.processes.launcher import Launcher
from rainband.runtimes.processes.zygote import Starter
from rainband.runtimes.ray.cluster import RayConnection, Resources, connected
from rainband.runtimes.ray.hosts import ActorStarter, Places
from rainband.runtimes.ray.role_host import HostOrder
from rainband.runtimes.ray.user_code import code_folders, pack
from rainband.runtimes.run import RunResult, View
from rainband.strategy import Strategy
from rainband.tasks.load import task_names
from rainband.transports.connect import host_and_port

PLACED_WITHIN_S = 5.0  # usually; later, a warning names what is missing
OPEN = (
    "the Ray cluster demands no token, so everyone who reaches its ports can run programs on it. Start its nodes with "
    "RAY_AUTH_MODE=token, and put the token into ~/.ray/auth_token."
)


def run(
    config: RunConfig,
    view: View,
    capture: bool = False,
    entries: Mapping[str, str] = ENTRIES,
    fds: Sequence[int] = (),
    strategy: Strategy | None = None,
) -> RunResult:
    """Run to the end on a Ray cluster, and return the result also if the run failed: see `processes.launcher.run`."""
    needs = config.ray.worker_needs(config.threads), config.ray.server_needs()
    workers = max(config.num_workers, config.ray.max_workers or 0)
    cpus = workers * needs[0].get("CPU", 0.0) + config.num_servers * needs[1].get("CPU", 0.0)
    with connected(config.ray.address, cpus) as connection:
        launcher = RayLauncher(connection, config, view, capture, entries, fds, strategy)
        with launcher.signals():
            return launcher.run()


# size: the launcher of processes, which starts lost workers again
class RayLauncher(Launcher):
    """Starts the processes of a run on a Ray cluster, and starts lost workers again."""

    zygote: ActorStarter

    def __init__(
        self,
        connection: RayConnection,
        config: RunConfig,
        view: View,
        capture: bool,
        entries: Mapping[str, str],
        fds: Sequence[int],
        strategy: Strategy | None,
    ) -> None:
        self.ray, self.is_open = connection
        self.own_code = bool(fds) or _names_own_code(config)
        self.said_unplaced = False
        super().__init__(config, view, capture, entries, fds, strategy)

    @property
    def settings(self) -> RunSettings:
        return msgspec.structs.replace(super().settings, joinable=True)  # lost workers come back

    def _start_zygote(self, output: int | None) -> Starter:
        config, of_ray = self.config, self.config.ray
        order = HostOrder(
            modules=SERVERS_NEED,
            failure_timeout_s=config.failure_timeout_s,
            software=own_software(),
            folder=os.getcwd(),
            path=tuple(sys.path),
        )
        places = Places(
            workers=config.num_workers,
            servers=config.num_servers,
            worker_needs=of_ray.worker_needs(config.threads),
            server_needs=of_ray.server_needs(),
            runtime_env=of_ray.runtime_env,
        )
        code = pack(code_folders()) if self.own_code else b""
        strategy = load_strategy(config.strategy, config.strategy_settings)
        return ActorStarter(self.ray, places, order, code, output, together=strategy.requires.in_rounds)

    @property
    def ranks_in_memory(self) -> Sequence[int]:
        return ()  # all are on nodes, which have memories of their own

    def _listen(self, secret: bytes) -> MachineHost:
        """Listen at this node's address in the cluster, or where the user says; servers listen on their own nodes."""
        config = self.config
        here = config.listen or host_and_port(str(self.ray.util.get_node_ip_address()), 0)
        doors = Doors(here, config.advertise, num_servers=0)
        machines = MachineHost(config, self.run_id, secret, self.directory, doors)
        machines.ranks_move = True
        return machines

    def _start_processes(self, address: Address) -> None:
        self.address = address
        if self.rounds is not None and self.machines is not None:
            number, key = self.rounds.num_ranks, self.machines.invitation.key
            mirror = MirrorOrder(num_ranks=number, run_id=self.run_id, key=key, address=address)
            self.zygote.order = msgspec.structs.replace(self.zygote.order, mirror=mirror)
        if self.is_open:
            self.emit(events.Warned(at_s=self._now(), text=OPEN))
        for index in range(self.config.num_servers):
            self._start(address, "server", index, threads=1)
        self.zygote.preload(modules_of_workers(self.config, self.strategy.requires))
        for rank in self.settings.local_ranks:
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        if rank in self.restarts.incarnations and self.rounds is not None:
            self.rounds.exclude(rank)  # nothing more of the earlier one is taken from its machine
        super()._start_worker(rank)

    def emit(self, event: events.AnyEvent) -> None:
        is_alone = isinstance(event, events.Warned) and event.no_worker_left
        returns = any(map(self.restarts.may_return, self.restarts.peers()))
        if not (is_alone and returns):  # otherwise there is nothing to do
            super().emit(event)

    def _exclude(self, worker: Peer) -> None:
        if self.restarts.is_last(worker):  # otherwise, the next one is there
            super()._exclude(worker)

    # ---- lost workers ----------------------------------------------------------------------------------------------

    def _starts_again(self, worker: Peer) -> bool:
        return True

    def _look_after_workers(self) -> None:
        """Start workers again that are lost, or that hang: their next incarnation takes over."""
        now = time.monotonic()
        self._start_more_workers()
        if self.rounds is not None:
            for rank, worker in self.coordinator.state.workers.items():
                if not worker.active and not worker.paused:
                    self.rounds.exclude(rank)
        for rank in self.restarts.incarnations:
            if rank not in self.restarts.start_at and self.zygote.should_move(("worker", rank)):
                self.restarts.start_at[rank] = now
        self._start_lost_workers(now)
        self._say_if_unplaced()

    def _is_lost(self, peer: Peer) -> bool:
        worker = self.coordinator.state.workers.get(peer.index)
        if peer in self.causes:
            return True
        if worker is None or worker.peer != peer:
            return False  # it has not joined yet
        if self.rounds is not None and self.zygote.hangs(("worker", peer.index)):
            return True  # its words do not arrive any more, and the others wait for them
        silent = self._now() - worker.heartbeat_at > self.config.failure_timeout_s
        hangs = silent and not (worker.active or worker.paused or worker.leaving or worker.ended)
        return hangs or not worker.connected

    def _start_more_workers(self) -> None:
        """Once the run has begun, start the workers that are welcome as soon as the cluster has room for them."""
        most = self.config.ray.max_workers or 0
        if self.coordinator.state.phase == "running" and len(self.restarts.incarnations) < most:
            for rank in self.coordinator.admission.new_ranks(most - len(self.restarts.incarnations)):
                self._start_worker(rank)

    def _say_if_unplaced(self) -> None:
        if self.said_unplaced or self._now() < PLACED_WITHIN_S or self.coordinator.state.phase != "forming":
            return
        self.said_unplaced = True
        if not self.zygote.has_places():
            there, places = self.ray.cluster_resources(), self.zygote.places
            named = dict.fromkeys((*places.worker_needs, *places.server_needs))
            text = (
                "the Ray cluster has no room for all processes yet. Each of the workers "
                f"({places.workers}) needs {_amounts(places.worker_needs)}, each of the servers ({places.servers}) "
                f"{_amounts(places.server_needs)}; the cluster has "
                f"{_amounts({name: there.get(name, 0.0) for name in named})} in all. Wait, add nodes, or press Ctrl-C "
                "and start fewer."
            )
            self.emit(events.Warned(at_s=self._now(), text=text))


def _names_own_code(config: RunConfig) -> bool:
    """Return True if a task, a strategy or an optimizer is the user's own."""
    named = config.task not in task_names() or config.strategy not in strategy_names()
    optimizer = str(config.strategy_settings.get("optimizer", ""))
    return named or bool(config.optimizers) or ":" in optimizer


def _amounts(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
