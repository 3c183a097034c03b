"""Observers see everything, and change nothing."""

from __future__ import annotations

from collections import Counter
from inspect import isfunction
from typing import Any

import pytest

from rainband.observer import Observer, Observers, join_observers
from rainband.protocol.messages import Peer
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.models.cluster_model import load_model

CONFIG = RunConfig(task="linear", strategy="downpour", num_workers=2, num_servers=2, epochs=1)
METHODS = [name for name, value in vars(Observer).items() if isfunction(value)]


class CountingObserver(Observer):
    """Counts the calls of each method."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS:
            self.calls[name] += 1
        return super().__getattribute__(name)


def ran(observe: Any) -> SimulatedCluster:
    settings = sim.settings_of(CONFIG, "")
    cluster = SimulatedCluster(sim.make_scenario(CONFIG), settings, load_model("lan"), Notes(observe=observe))
    cluster.start()
    cluster.run()
    return cluster


@pytest.mark.parametrize("method", METHODS)
def test_several_observers_are_all_told(method: str) -> None:
    assert method in vars(Observers)
    first, second = CountingObserver(), CountingObserver()
    arguments = [None] * (getattr(Observer, method).__code__.co_argcount - 1)
    getattr(join_observers([first, second]), method)(*arguments)
    assert first.calls == second.calls == {method: 1}


def test_no_observers_are_none_and_one_is_itself() -> None:
    assert join_observers([]) is None
    assert join_observers([one := Observer()]) is one


def test_an_observed_run_is_the_same_run() -> None:
    seen: dict[Peer, CountingObserver] = {}

    def observe(peer: Peer) -> CountingObserver:
        return seen.setdefault(peer, CountingObserver())

    plain, observed = ran(lambda peer: None), ran(observe)
    assert plain.trace.digest() == observed.trace.digest()
    workers, servers = ([seen[Peer(role, i)].calls for i in range(2)] for role in ("worker", "server"))
    pushes = sum(calls["pushed"] for calls in workers)
    assert pushes == sum(calls["computed"] for calls in workers) > 0
    assert (
        sum(calls["answered"] for calls in servers) == sum(calls["applying"] for calls in servers) == pushes
    )  # one block
    for calls in workers:
        assert calls["began"] == calls["ended"] > 0 and calls["joined"] == 1 and calls["spent"] > 0
    for calls in [*workers, *servers]:
        assert calls["receiving"] == calls["received"] > 0
