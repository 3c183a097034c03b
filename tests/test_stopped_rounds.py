"""A run with rounds that is stopped in the middle of one saves a model that is all of one round."""

from __future__ import annotations

import torch

from rainband.coordinator.coordinator import RunSettings
from rainband.protocol.messages import Peer
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.fault_injector import FaultInjector
from rainband.runtimes.simulation.models.faults import parse
from rainband.runtimes.simulation.run import make_scenario
from rainband.strategies.sync import Sync
from tests.stage_tasks import Shaped, planned
from tests.test_simulation import INSTANT, cluster_of


def test_when_a_worker_dies_with_a_push_on_one_server_only_the_round_before_is_saved() -> None:
    """Steps take 1 s. Of what worker 1 pushes at 3 s, server 1 hears nothing; then it dies, and the run is stopped."""
    cluster = cluster_of(Sync(batch_per_worker=True, lr=0.25), 2)
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


def test_when_a_stage_dies_with_its_push_under_way_all_stages_save_the_round_before() -> None:
    """Two replicas of two stages. The last push of stage 1 of replica 1 does not arrive: its blocks miss a round."""
    task = Shaped("chain", samples=48)
    config = RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": "chain", "samples": 48},
        strategy="sync",
        strategy_settings={"lr": 0.25, "batch_per_worker": True},
        num_workers=4,
        num_servers=2,
        runtime="sim",
        stage_plan=planned(task, 2),
    )
    settings = RunSettings(num_workers=4, num_servers=2, workers_per_replica=2)
    cluster = SimulatedCluster(make_scenario(config), settings, INSTANT, Notes())
    slow = "\n".join(f"2.5 slow worker 3 > server {server} for 9 by 5" for server in range(2))
    FaultInjector(cluster, parse(slow), seed=0)
    cluster.start()
    cluster.run(until_s=3.05)
    cluster.kill(cluster.workers[3], keep=lambda in_flight: False)
    cluster.coordinator_node.send(cluster.coordinator.shutdown.stop("stopped", "enough"))
    cluster.run()

    blocks = [block for node in cluster.servers.values() for block in node.server.blocks.values()]
    assert {(block.spec.part, block.version) for block in blocks} == {(0, 3), (1, 2)}
    for block in blocks:
        client = cluster.workers[block.spec.part].client
        assert client is not None
        assert torch.equal(client.servers.views[block.index], block.buffer.at(2))
        assert not torch.equal(block.buffer.at(2), block.buffer.at(1))
