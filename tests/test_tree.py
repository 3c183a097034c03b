"""The strategy tree: its shape, the laws of its sums, what its inner servers do with refused sums, and what is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rainband
from rainband.protocol.data_plan import BatchRange
from rainband.protocol.layout import LayoutEntry, arrange, cut
from rainband.protocol.messages import (
    Ack,
    Address,
    Assign,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    PushResult,
    RelayedMember,
    RelayedPush,
)
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.nodes import ServerNode, publish
from rainband.runtimes.simulation.oracle.check import check
from rainband.runtimes.simulation.oracle.scenarios import random_case
from rainband.server import tree
from rainband.server.readers import ServerOutput
from rainband.server.relay import Relay
from rainband.strategies.sync import Sync
from rainband.strategies.tree import Tree
from rainband.tasks.linear import Linear
from tests.builders import make_plan

TASK = Linear(dimension=48, samples=192, batch_size=2, epochs=1)  # 96 batches


def fitted(strategy: Any, folder: Path, workers: int, servers: int, **given: Any) -> rainband.FitResult:
    given = {"runtime": "sim", **given}
    if "faults" in given:
        (folder / "faults.txt").write_text(given["faults"])
        given |= {"faults": folder / "faults.txt", "failure_timeout_s": 0.3}
    return rainband.fit(given.pop("task", TASK), strategy, workers, servers, runs=folder, **given)


def weights(result: rainband.FitResult) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in result.module.parameters()])


# ---- the shape ----


@pytest.mark.parametrize("arity", [2, 3, 5])
def test_every_server_but_the_root_has_a_parent_and_none_has_more_children_than_the_arity(arity: int) -> None:
    for number in range(1, 41):
        children: dict[int, list[int]] = {server: [] for server in range(number)}
        for server in range(1, number):
            children[tree.parent(server, arity)].append(server)
            assert tree.parent(server, arity) < server
        assert max(map(len, children.values())) <= arity
        assert list(tree.leaves(number, arity)) == [server for server, below in children.items() if not below]
        used = [tree.server_of(worker, number, arity) for worker in range(50)]
        counts = [used.count(leaf) for leaf in tree.leaves(number, arity)]
        assert sum(counts) == 50 and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("workers, servers, arity", [(12, 4, 3), (9, 7, 2), (5, 1, 3), (1, 3, 2)])
def test_the_fan_in_of_the_root_is_the_arity(
    workers: int, servers: int, arity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: dict[int, set[Peer]] = {}
    receive = ServerNode.receive

    def noting(node: ServerNode, sender: Peer, message: Message | None, payload: Any) -> None:
        if isinstance(message, Push | RelayedPush | Pull) and sender.role != "coordinator":
            senders.setdefault(node.peer.index, set()).add(sender)
        receive(node, sender, message, payload)

    monkeypatch.setattr(ServerNode, "receive", noting)
    result = fitted(Tree(arity=arity), tmp_path, workers, servers)
    assert result.accounting.applied == 96
    if servers > 1:
        assert senders[0] == {Peer("server", child) for child in range(1, min(servers, arity + 1))} or workers < arity
        assert all(len(of) <= arity for server, of in senders.items() if server < (servers - 1 + arity - 1) // arity)
    else:
        assert len(senders[0]) == workers


# ---- the sums ----


@pytest.mark.parametrize("workers", [1, 3, 4, 7])
def test_the_mean_of_the_tree_is_the_flat_mean_to_the_bit(workers: int, tmp_path: Path) -> None:
    """Whole numbers are summed without rounding, so even the division of the total is the same."""
    flat = fitted(Sync(batch_per_worker=True, lr=0.5), tmp_path, workers, 1)
    for servers, arity in ((3, 2), (6, 2), (5, 3)):
        ours = fitted(Tree(synchronous=True, arity=arity, lr=0.5), tmp_path, workers, servers)
        assert torch.equal(weights(ours), weights(flat))


def relay(rounds: bool = False, numel: int = 16, dtype: str = "float32") -> Relay:
    layout = arrange([LayoutEntry("a", (numel,), dtype)])
    plan = make_plan(num_samples=64, batch_size=4, epochs=1, portion_batches=4)
    return Relay(Assign(plan, cut(layout), layout.groups, 3, parent=0, parent_address=Address("", 0)), rounds, publish)


def push(worker: int, k: int, samples: int = 4, numel: int = 16, dtype: str = "float32", sequence: int = 1) -> Push:
    return Push(0, worker, sequence, (BatchRange(0, k, k + 1, 0),), samples, 1, 1, 0, dtype, numel)


def given(relay: Relay, worker: int, k: int, value: float, samples: int = 4, sequence: int = 1) -> list[ServerOutput]:
    spec = relay.blocks[0].spec
    values = torch.full((spec.numel,), value, dtype=relay.blocks[0].dtype)
    message = push(worker, k, samples, spec.numel, spec.dtype, sequence)
    return relay.receive(Peer("worker", worker), message, values)


def answered(relay: Relay, outs: list[ServerOutput], result: PushResult = PushResult.ACCEPTED) -> list[ServerOutput]:
    [message] = [out.message for out in outs if isinstance(out.message, RelayedPush)]
    return relay.receive(Peer("server", 0), Ack(0, message.sequence, result, 1, 5), None)


def acks(outs: list[ServerOutput]) -> list[tuple[int, PushResult]]:
    return [(out.to.index, out.message.result) for out in outs if isinstance(out.message, Ack)]


def test_what_arrives_while_a_sum_is_under_way_is_added_to_the_next_one() -> None:
    inner = relay()
    first = given(inner, 0, 0, 1.0)
    assert given(inner, 1, 1, 2.0, samples=2) == given(inner, 2, 2, 5.0, samples=3) == []
    then = answered(inner, first)
    assert acks(then) == [(0, PushResult.ACCEPTED)]
    message, total = inner.fill(then[-1].message)
    assert isinstance(message, RelayedPush) and [member.push.worker for member in message.members] == [1, 2]
    assert total is not None and torch.equal(total, torch.full((16,), 2.0 * 2 + 5.0 * 3))


def test_sums_of_sixteen_bits_are_sent_as_means() -> None:
    """Two gradients of 40,000 times 1,000 samples each would be infinite in float16."""
    inner = relay(dtype="float16")
    first = given(inner, 0, 0, 1.0)
    given(inner, 1, 1, 40_000.0, samples=1000)
    given(inner, 2, 2, 40_000.0, samples=1000)
    _, total = inner.fill(answered(inner, first)[-1].message)
    assert total is not None and torch.equal(total, torch.full((32,), 40_000.0, dtype=torch.float16))


def test_a_sum_of_a_sum_counts_each_sample_once() -> None:
    inner = relay()
    first = given(inner, 0, 0, 1.0)
    members = tuple(RelayedMember(0, push(worker, worker, samples=worker)) for worker in (2, 3))
    below = RelayedPush(0, 9, "float32", 16, members)
    assert inner.receive(Peer("server", 4), below, torch.full((16,), 50.0)) == []
    given(inner, 1, 1, 3.0, samples=2)
    then = answered(inner, first)
    message, total = inner.fill(then[-1].message)
    assert isinstance(message, RelayedPush) and len(message.members) == 3
    assert total is not None and torch.equal(total, torch.full((16,), 56.0))


def test_of_a_refused_sum_each_gradient_is_sent_again_by_itself() -> None:
    inner = relay()
    first = given(inner, 0, 0, 1.0)
    given(inner, 1, 1, 2.0)
    given(inner, 2, 2, 3.0)
    outs = answered(inner, answered(inner, first), PushResult.REVOKED)
    assert acks(outs) == []
    _, alone = inner.fill(outs[0].message)
    assert alone is not None and torch.equal(alone, torch.full((16,), 8.0))
    outs = answered(inner, outs, PushResult.REVOKED)
    assert acks(outs) == [(1, PushResult.REVOKED)]
    assert acks(answered(inner, outs)) == [(2, PushResult.ACCEPTED)]


def test_a_message_that_arrives_twice_is_added_once_and_batches_are_not_added_to_themselves() -> None:
    inner = relay()
    first = given(inner, 0, 0, 1.0)
    assert given(inner, 0, 0, 1.0) == []  # the same message
    given(inner, 1, 1, 2.0)
    given(inner, 2, 1, 2.0)  # the same batch, of another worker
    then = answered(inner, first)
    assert isinstance(then[-1].message, RelayedPush) and len(then[-1].message.members) == 1
    assert len(answered(inner, then)) == 2  # the answer, and the other one by itself


def test_a_gradient_of_another_size_is_refused_here() -> None:
    outs = relay().receive(Peer("worker", 0), push(0, 0, numel=15), torch.zeros(15))
    assert acks(outs) == [(0, PushResult.BAD)]


# ---- the parameters ----


def pulled(relay: Relay, reader: int, sequence: int, at_version: int = -1, clock: int = 0) -> list[ServerOutput]:
    return relay.receive(Peer("worker", reader), Pull(sequence, clock, at_version), None)


def received(relay: Relay, request: Message, version: int, over: bool = False) -> list[ServerOutput]:
    assert isinstance(request, Pull)
    params = Params(0, request.sequence, 1, version, request.at_version, round_over=over)
    return relay.receive(Peer("server", 0), params, None if over else torch.full((16,), float(version)))


def test_the_last_parameters_are_requested_after_their_reader_has_asked() -> None:
    """Otherwise they could lack what was pushed. Readers that wait at the same time share one request."""
    inner = relay()
    [request] = pulled(inner, 0, 1, clock=-1)
    assert request.to == Peer("server", 0)
    assert pulled(inner, 1, 1, clock=-1) == pulled(inner, 2, 1, clock=-1) == []
    answer, again = received(inner, request.message, 3)
    assert answer.to == Peer("worker", 0) and isinstance(again.message, Pull)
    outs = received(inner, again.message, 4)
    assert [out.to.index for out in outs] == [1, 2]
    _, values = inner.fill(outs[0].message)
    assert values is not None and torch.equal(values, torch.full((16,), 4.0))


def test_to_train_parameters_that_are_on_their_way_are_new_enough() -> None:
    inner = relay()
    [request] = pulled(inner, 0, 1)
    assert pulled(inner, 1, 1) == []
    assert [out.to.index for out in received(inner, request.message, 3)] == [0, 1]
    assert len(pulled(inner, 0, 2)) == 1  # the next one


def test_a_round_is_requested_once_and_a_lower_one_first() -> None:
    inner = relay(rounds=True)
    [request] = pulled(inner, 0, 1, at_version=6)
    assert pulled(inner, 1, 1, at_version=6) == []
    [lower] = pulled(inner, 2, 1, at_version=5)  # its reader is late, and round 6 may wait for it
    assert isinstance(lower.message, Pull) and lower.message.at_version == 5
    answer, again = received(inner, lower.message, 5)
    assert answer.to == Peer("worker", 2) and isinstance(again.message, Pull) and again.message.at_version == 6
    assert len(received(inner, again.message, 6)) == 2
    assert len(pulled(inner, 3, 1, at_version=5)) == 1  # both rounds are still here
    [late] = pulled(inner, 3, 2, at_version=4)
    [over] = received(inner, late.message, 6, over=True)
    message, _ = inner.fill(over.message)
    assert isinstance(message, Params) and message.round_over
    assert request.to == late.to


# ---- failures ----


@pytest.mark.parametrize("kind", ["tree", "tree_rounds"])
def test_random_faults_lose_no_batch(kind: str) -> None:
    """Killed, paused and suspected workers, duplicated and delayed messages, in trees of up to three servers."""
    for seed in range(40):
        verdict = check(random_case(seed, kind))
        assert not verdict.violations, f"seed {seed}: {verdict.violations}"


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize(
    "settings",
    [{}, {"synchronous": True}, {"variant": "adv_star"}, {"variant": "base"}],
    ids=["adv", "rounds", "*", "base"],
)
def test_a_lost_worker_changes_no_count(settings: dict[str, Any], workers: int, tmp_path: Path) -> None:
    faults = "0.03 kill worker 0\n0.05 start worker 0"
    result = fitted(Tree(arity=2, lr=0.5, **settings), tmp_path, workers, 4, faults=faults)
    accounting = result.accounting
    assert (accounting.applied, accounting.lost, accounting.applied_twice) == (96, 0, 0)


def test_a_lost_inner_server_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="server 2 was lost.*inner server"):
        fitted(Tree(arity=2), tmp_path, 4, 3, faults="0.03 kill server 2")


# ---- the overlap, and where a star saturates ----


STEP_S = 0.04


def overlap(folder: Path, workers: int, servers: int, **settings: Any) -> float:
    """Return the fraction of the time in which each worker computes: steps of 40 ms; 1 MB takes a link 10 ms."""
    long, short = (seconds_of(folder / f"{workers}-{steps}", workers, servers, steps, settings) for steps in (50, 20))
    return STEP_S * 30 / (long - short)


def seconds_of(folder: Path, workers: int, servers: int, steps: int, settings: dict[str, Any]) -> float:
    (directory := folder / settings["variant"]).mkdir(parents=True)
    config = RunConfig(
        task="quadratic",
        task_settings={"dimension": 250_000},
        strategy="tree",
        strategy_settings=settings,
        num_workers=workers,
        num_servers=servers,
        runtime="sim",
        directory=str(directory),
        sim=SimSettings(time_only=True, steps=steps, aggregated=False),
    )
    model = ClusterModel(NetworkModel(latency_s=1e-4, bytes_per_s=1e8), ComputeModel(kind="constant", step_s=STEP_S))
    return sim.run(config, lambda event: None, model=model).seconds


def test_a_star_saturates_and_a_tree_does_not(tmp_path: Path) -> None:
    """A star's server receives a gradient of each worker; the root of a tree receives sums of three servers."""
    star = [overlap(tmp_path, workers, 1, variant="base") for workers in (3, 9, 27)]
    ours = [overlap(tmp_path, *size, variant="adv_star") for size in ((3, 1), (9, 4), (27, 13))]
    assert star[2] < 0.4 * star[1] < 0.4 * star[0]
    assert min(ours) > 0.7


def test_computing_overlaps_more_with_adv_than_base_and_most_with_adv_star(tmp_path: Path) -> None:
    base, adv, adv_star = (
        overlap(tmp_path, 27, servers, variant=variant)
        for variant, servers in (("base", 1), ("adv", 13), ("adv_star", 13))
    )
    assert 1.5 * base < adv < 0.7 * adv_star


# ---- processes ----


@pytest.mark.processes
@pytest.mark.parametrize(
    "settings, transport",
    [({"synchronous": True}, "shm"), ({"synchronous": True}, "tcp"), ({"variant": "adv_star"}, "auto")],
)
def test_processes(settings: dict[str, Any], transport: str, tmp_path: Path) -> None:
    ours = fitted(Tree(arity=2, lr=0.5, **settings), tmp_path, 3, 4, runtime="processes", transport=transport)
    assert ours.accounting.applied == 96
    if "synchronous" in settings:
        flat = fitted(Sync(batch_per_worker=True, lr=0.5), tmp_path, 3, 1)
        assert torch.equal(weights(ours), weights(flat))
