"""Simulate one batch of a partitioned model, with shared network cards and a cost of each message.

A machine runs one job at a time. It computes a unit when all its inputs have arrived, and sends each output once to
each machine that reads it; a gradient goes back when the last reader on its machine is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from rainband.model_parallel.placement.profile import CutValue, Profile
from rainband.runtimes.simulation.models.clock import VirtualClock
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.compute import ComputeModel, ComputePace
from rainband.runtimes.simulation.models.network import Flow, Network, Parcel

Do = Callable[[], None]


def batch_s(profile: Profile, placement: Mapping[str, int], cluster: ClusterModel, seed: int = 0) -> float:
    """Return the seconds of a batch, forward and backward; unit times vary as in the cluster's compute model."""
    play = _Play(profile, placement, cluster, seed)
    play.begin()
    while play.clock.step():
        pass
    assert not play.waiting, f"these never ran: {sorted(play.waiting)[:5]}"
    return play.finished_s


class _Box(Parcel):
    """A message and the function that its receiver calls."""

    def __init__(self, flow: Flow, num_bytes: int, arrive: Do) -> None:
        super().__init__(flow, num_bytes)
        self.arrive = arrive

    def deliver(self) -> None:
        self.arrive()


class _Host:
    """A machine that runs its jobs one after the other."""

    def __init__(self, play: _Play, number: int, compute: ComputeModel, seed: int) -> None:
        self.play, self.number = play, number
        self.pace = ComputePace(compute, seed, number)
        self.card = play.network.machine()
        self.flows: dict[int, Flow] = {}
        self.jobs: deque[tuple[float, Do]] = deque()
        self.busy = False

    def work(self, seconds: float, then: Do) -> None:
        self.jobs.append((seconds, then))
        if not self.busy:
            self._next()

    def _next(self) -> None:
        self.busy = bool(self.jobs)
        if self.busy:
            seconds, then = self.jobs.popleft()
            self.play.clock.after(seconds, lambda: self._done(then))

    def _done(self, then: Do) -> None:
        then()
        self._next()

    def send(self, other: _Host, num_bytes: int, arrive: Do) -> None:
        """Send a message, which costs time on both machines."""
        if other.number not in self.flows:
            self.flows[other.number] = Flow(self.card, other.card)
        cost_s = self.play.message_s
        box = _Box(self.flows[other.number], max(1, num_bytes), lambda: other.work(cost_s, arrive))
        self.work(cost_s, lambda: self.play.network.send(box, self.play.clock.now))


class _Play:
    def __init__(self, profile: Profile, placement: Mapping[str, int], cluster: ClusterModel, seed: int) -> None:
        self.profile, self.placement = profile, placement
        self.clock = VirtualClock()
        self.network = Network(cluster.network, self.clock, seed)
        self.message_s = cluster.nodes.message_s
        numbers = range(max(placement.values()) + 1)
        self.hosts = [_Host(self, number, cluster.compute, seed) for number in numbers]
        self.made: dict[str, list[CutValue]] = {name: [] for name in profile.names}
        self.read: dict[str, list[CutValue]] = {name: [] for name in profile.names}
        for value in profile.values:
            self.made[value.maker].append(value)
            for reader in value.readers:
                self.read[reader].append(value)
        self.missing = {name: len(values) for name, values in self.read.items()}  # values, then gradients
        self.waiting = {*((name, "forward") for name in profile.names), *((name, "backward") for name in profile.names)}
        self.finished_s = 0.0

    def begin(self) -> None:
        for name in self.profile.names:
            if not self.missing[name]:
                self._forward(name)

    # ---- forward ----

    def _forward(self, name: str) -> None:
        host = self.hosts[self.placement[name]]
        host.work(self.profile.by_name[name].forward_s * host.pace.next_s(), lambda: self._forward_done(name))

    def _forward_done(self, name: str) -> None:
        self.waiting.discard((name, "forward"))
        host = self.hosts[self.placement[name]]
        self.missing[name] = sum(len(self._returns(value)) for value in self.made[name])
        for value in self.made[name]:
            self._arrived(value, host.number)
            for other in self._others(value):
                host.send(self.hosts[other], value.forward_bytes, lambda v=value, o=other: self._arrived(v, o))  # type: ignore[misc]
        if not self.missing[name]:
            self._backward(name)

    def _arrived(self, value: CutValue, machine: int) -> None:
        for reader in value.readers:
            if self.placement[reader] == machine:
                self.missing[reader] -= 1
                if not self.missing[reader]:
                    self._forward(reader)

    def _others(self, value: CutValue) -> list[int]:
        """Return the machines to send to, beginning with the next one, so that they do not all begin with the first."""
        here, count = self.placement[value.maker], len(self.hosts)
        return sorted({self.placement[r] for r in value.readers} - {here}, key=lambda other: (other - here) % count)

    # ---- backward ----

    def _returns(self, value: CutValue) -> list[int]:
        """Return the machines that send a gradient back, including the value's own if it reads it."""
        here = self.placement[value.maker]
        machines = {self.placement[reader] for reader in value.readers}
        return [machine for machine in machines if machine == here or value.backward_bytes]

    def _backward(self, name: str) -> None:
        host = self.hosts[self.placement[name]]
        host.work(self.profile.by_name[name].backward_s * host.pace.next_s(), lambda: self._backward_done(name))

    def _backward_done(self, name: str) -> None:
        self.waiting.discard((name, "backward"))
        self.finished_s = max(self.finished_s, self.clock.now)
        host = self.hosts[self.placement[name]]
        for value in self.read[name]:
            here = [reader for reader in value.readers if self.placement[reader] == host.number]
            if any((reader, "backward") in self.waiting for reader in here):
                continue
            home = self.placement[value.maker]
            if home == host.number:
                self._returned(value)
            elif value.backward_bytes:
                host.send(self.hosts[home], value.backward_bytes, lambda v=value: self._returned(v))  # type: ignore[misc]

    def _returned(self, value: CutValue) -> None:
        self.missing[value.maker] -= 1
        if not self.missing[value.maker]:
            self._backward(value.maker)
