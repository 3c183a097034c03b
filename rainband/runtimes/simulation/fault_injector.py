"""Inject the faults of a script into a simulated run."""

from __future__ import annotations

from functools import partial
from random import Random

from rainband.runtimes.simulation.cluster import SimulatedCluster
from rainband.runtimes.simulation.message_bus import InFlight, Node
from rainband.runtimes.simulation.models.faults import Fault, Script
from rainband.runtimes.simulation.models.trace import NodeEvent
from rainband.runtimes.simulation.worker import WorkerNode


class FaultInjector:
    """Injects each fault of a script at its time."""

    def __init__(self, cluster: SimulatedCluster, script: Script, seed: int) -> None:
        self.cluster = cluster
        self.random = Random(f"trouble {seed}")
        self.deaths = 0
        self.servers_died = False  # one or more; each may have been started again
        self.raised = False  # the code of a worker
        self._count_restarts(script)
        for fault in script:
            cluster.clock.at(fault.at_s, partial(self._strike, fault))

    def _strike(self, fault: Fault) -> None:
        cluster, now = self.cluster, self.cluster.clock.now
        if fault.what == "start":
            self._start(fault)
            return
        node = self._node(fault.node)
        if node is None or not node.alive:
            return
        match fault.what:
            case "kill" | "crash":
                cluster.kill(node, self._survives, silent=fault.what == "crash")
                self.deaths += 1
                self.servers_died |= node.peer.role == "server"
            case "raise":
                assert isinstance(node, WorkerNode)
                node.raises = self.raised = True
            case "stop":
                cluster.coordinator_node.wake(cluster.stop)
            case "pause":
                cluster.pause(node, fault.for_s)
            case "skew":
                cluster.trace.note(now, node.name, NodeEvent.CLOCK_JUMPED, f"its clock jumps by {fault.by_s}")
                node.skew_s += fault.by_s
            case "disk":
                cluster.trace.note(now, node.name, NodeEvent.DISK_SLOWED, f"its disk is slower by {fault.by_s}")
                node.disk_s = fault.by_s
            case _:
                self._on_line(fault, node, now)

    def _on_line(self, fault: Fault, node: Node, now: float) -> None:
        other = self._node(fault.to)
        if other is None or not other.alive:
            return
        if fault.what == "reset":
            self.cluster.disconnect(node, other)
            self.deaths += 1  # a worker ends that cannot reach a server
            return
        flow = self.cluster.bus.flow(node, other)
        self.cluster.trace.note(now, node.name, NodeEvent.LINK_FAULT, f"{fault.what} > {other.name} for {fault.for_s}")
        match fault.what:
            case "netsplit":
                flow.split_until = max(flow.split_until, now + fault.for_s)
                if self.cluster.rounds is not None:
                    self.cluster.clock.at(flow.split_until, self.cluster.rounds.notify)
            case "duplicate":
                flow.duplicate_until = max(flow.duplicate_until, now + fault.for_s)
            case "reorder":
                flow.reorder_until, flow.reorder_s = max(flow.reorder_until, now + fault.for_s), fault.by_s
            case "slow":
                flow.extra_s = fault.by_s
                self.cluster.clock.after(fault.for_s, partial(setattr, flow, "extra_s", 0.0))

    def _start(self, fault: Fault) -> None:
        role, _, number = fault.node.partition(" ")
        if role == "coordinator":
            self.cluster.start_coordinator()
            return
        index = int(number)
        if role == "server":
            server = self.cluster.servers.get(index)
            if server is not None and not server.alive:
                self.cluster.add_server(index, server.peer.incarnation + 1)
            return
        known = self.cluster.workers.get(index)
        if known is None:
            self.cluster.add_worker(index)
        elif not known.alive:
            self.cluster.add_worker(index, known.peer.incarnation + 1)

    def _count_restarts(self, script: Script) -> None:
        """Count how often the coordinator is started again: only full-batch strategies keep a journal for that."""
        restarts = [fault for fault in script if fault.what == "start" and fault.node == "coordinator"]
        if restarts and not self.cluster.scenario.strategy.requires.coordinated:
            raise ValueError(
                f"{restarts[0]}: only full-batch strategies can start their coordinator again: choose sandblaster or "
                "conjugate_gradient."
            )
        self.cluster.restarts = len(restarts)

    def _survives(self, in_flight: InFlight) -> bool:
        """Draw whether a message of a dying node still arrives."""
        return self.random.random() < 0.8

    def _node(self, name: str) -> Node | None:
        role, _, index = name.partition(" ")
        match role:
            case "worker":
                return self.cluster.workers.get(int(index))
            case "server":
                return self.cluster.servers.get(int(index))
            case "copy":
                return self.cluster.copies.get(int(index))
        return self.cluster.coordinator_node
