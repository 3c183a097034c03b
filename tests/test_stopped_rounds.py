"""A run with rounds that is stopped in the middle of one saves a model that is all of one round."""

from __future__ import annotations

import torch

from rainband.protocol.messages import Peer
from rainband.runtimes.simulation.fault_injector import FaultInjector
from rainband.runtimes.simulation.models.faults import parse
from rainband.strategies.sync import Sync
from tests.test_simulation import cluster_of


def test_when_a_worker_dies_with_a_push_on_one_server_only_the_round_before_is_saved() -> None:
    """Steps take 1 s. Of what worker 1 pushes at 3 s, server 1 hears nothing; then it dies, and the run is stopped."""
    cluster = cluster_of(Sync(lr=0.25), 2)
    FaultInjector(cluster, parse("2.5 slow worker 1 > server 1 for 9 by 5"), seed=0)
    cluster.start()
    cluster.run(until_s=3.05)
    cluster.kill(cluster.workers[1], keep=lambda in_flight: False)
    cluster.coordinator_node.send(cluster.coordinator.shutdown.stop("stopped", "enough"))
    cluster.run()

    blocks = [block for node in cluster.servers.values() for block in node.server.blocks.values()]
    assert [block.version for block in blocks] == [3, 2]
    client = cluster.workers[0].client
    assert client is not None and client.me == Peer("worker", 0)
    for block in blocks:
        assert torch.equal(client.servers.views[block.index], block.buffer.at(2))
        assert not torch.equal(block.buffer.at(2), block.buffer.at(1))
