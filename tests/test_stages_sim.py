"""Replicas that are teams of stages, in virtual time: the same results as whole models, and teams that lose a stage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation.models.faults import Chances, random_script, text
from rainband.runtimes.simulation.run import SimulatedResult, run
from tests.stage_tasks import Shaped, planned

SGD = {"optimizer": "sgd", "lr": 0.01}


class Seen(list[events.AnyEvent]):
    def __call__(self, event: events.AnyEvent) -> None:
        self.append(event)


def simulated(
    folder: Path, name: str, strategy: str, stages: int, replicas: int, faults: str = "", **settings: Any
) -> tuple[SimulatedResult, Seen]:
    folder.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    return run(configured(folder, name, strategy, stages, replicas, faults, **settings), seen), seen


def configured(
    folder: Path, name: str, strategy: str, stages: int, replicas: int, faults: str = "", **settings: Any
) -> RunConfig:
    task = Shaped(name, samples=48)
    return RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": name, "samples": 48},
        strategy=strategy,
        strategy_settings={"batch_per_worker": True, **settings} if strategy == "sync" else settings,
        num_workers=stages * replicas,
        num_servers=2 if strategy not in ("single", "pipedream") else 0,
        runtime="sim",
        epochs=2,
        directory=str(folder),
        sim=SimSettings(faults=faults),
        stage_plan=planned(task, stages) if stages > 1 else None,
    )


@pytest.mark.parametrize("name", ["chain", "tied", "branches"])
def test_synchronous_training_of_stages_is_that_of_whole_models(tmp_path: Path, name: str) -> None:
    whole, _ = simulated(tmp_path / "whole", name, "sync", stages=1, replicas=2, lr=0.05)
    parts, _ = simulated(tmp_path / "parts", name, "sync", stages=2, replicas=2, lr=0.05)
    assert (whole.outcome, parts.outcome) == ("finished", "finished")
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "parts"))
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-9, atol=1e-12)
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-9)
    assert parts.accounting["applied"] == whole.accounting["applied"] == 24


def test_one_replica_without_servers_is_plain_training(tmp_path: Path) -> None:
    whole, _ = simulated(tmp_path / "whole", "chain", "single", stages=1, replicas=1, lr=0.05)
    parts, _ = simulated(tmp_path / "parts", "chain", "single", stages=3, replicas=1, lr=0.05)
    assert parts.outcome == "finished"
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-9)
    assert parts.accounting["applied"] == 24


SOME = [
    "downpour",
    "sync",
    *(pytest.param(s, marks=pytest.mark.slow) for s in ("stale_sync", "bounded_delay", "soft_sync")),
]


@pytest.mark.parametrize("strategy", SOME)
def test_every_batch_is_applied_once_to_the_blocks_of_every_stage(tmp_path: Path, strategy: str) -> None:
    result, _ = simulated(tmp_path, "chain", strategy, stages=2, replicas=3)
    assert result.outcome == "finished"
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (24, 0, 0)
    again, _ = simulated(tmp_path / "again", "chain", strategy, stages=2, replicas=3)
    assert again.trace_hash == result.trace_hash


@pytest.mark.parametrize("strategy", SOME[:3])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_replica_that_loses_a_stage_stops_and_the_others_do_its_work(
    tmp_path: Path, strategy: str, stage: int
) -> None:
    calm, _ = simulated(tmp_path / "calm", "chain", strategy, stages=3, replicas=2)
    faults = f"{0.4 * calm.seconds:.9f} kill worker {3 + stage}"
    result, seen = simulated(tmp_path, "chain", strategy, stages=3, replicas=2, faults=faults)
    assert result.outcome == "finished"
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (24, 0, 0)
    lost = {event.node for event in seen if isinstance(event, events.Lost)}
    assert lost == {"worker 3", "worker 4", "worker 5"}


@pytest.mark.parametrize("strategy", SOME)
@pytest.mark.parametrize("stage", [0, 1])
def test_the_only_replica_that_loses_a_stage_is_started_again(tmp_path: Path, strategy: str, stage: int) -> None:
    calm, _ = simulated(tmp_path / "calm", "chain", strategy, stages=2, replicas=1)
    faults = f"{0.5 * calm.seconds:.9f} kill worker {stage}"
    result, seen = simulated(tmp_path, "chain", strategy, stages=2, replicas=1, faults=faults)
    assert result.outcome == "finished", result.reason
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (24, 0, 0)
    joined = [event.node for event in seen if isinstance(event, events.Joined) and event.node.startswith("worker")]
    assert sorted(joined) == ["worker 0", "worker 0", "worker 1", "worker 1"]


def test_a_replica_that_is_lost_before_it_joins_is_started_again(tmp_path: Path) -> None:
    faults = "0.000000001 kill worker 1"
    result, _ = simulated(tmp_path, "chain", "downpour", stages=2, replicas=1, faults=faults)
    assert (result.outcome, result.accounting["applied"]) == ("finished", 24), result.reason


def test_pipedream_that_loses_a_stage_when_all_is_done_ends_with_the_reason(tmp_path: Path) -> None:
    _, calm = simulated(tmp_path / "calm", "chain", "pipedream", stages=2, replicas=1)
    [over] = [event.at_s for event in calm if isinstance(event, events.PhaseChanged) and event.phase == "finishing"]
    faults = f"{over + 1e-9:.12f} kill worker 1"
    result, _ = simulated(tmp_path, "chain", "pipedream", stages=2, replicas=1, faults=faults)
    assert result.outcome == "failed"
    assert "worker 1 of the same replica was lost" in result.reason


def test_a_stage_that_pauses_is_waited_for_or_its_work_is_done_by_others(tmp_path: Path) -> None:
    calm, _ = simulated(tmp_path / "calm", "chain", "stale_sync", stages=2, replicas=2)
    faults = f"{0.3 * calm.seconds:.9f} pause worker 3 for 30"
    result, _ = simulated(tmp_path, "chain", "stale_sync", stages=2, replicas=2, faults=faults)
    assert result.outcome == "finished"
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (24, 0, 0)


CALM: dict[object, float] = {}  # how long each kind of run takes when nothing happens


@pytest.mark.parametrize("seed", [119, 0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_teams_survive_what_happens_or_say_that_nobody_is_left(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    strategy = dice.choice(["downpour", "stale_sync", "sync", "bounded_delay", "soft_sync", "adaptive_bound"])
    stages, replicas = dice.choice([2, 3]), dice.choice([1, 2, 3])
    backup = strategy == "sync" and dice.random() < 0.4 and replicas > 1
    settings = {"backup_workers": 1} if backup else {}
    kind = strategy, stages, replicas, backup
    if kind not in CALM:
        CALM[kind] = simulated(tmp_path / "calm", "chain", strategy, stages, replicas, **settings)[0].seconds
    faults = []
    for _ in range(dice.randint(1, 3)):
        at_s, worker = dice.uniform(0, 1.1) * CALM[kind], dice.randrange(stages * replicas)
        what = dice.choice(["kill", "kill", "pause"])
        long = f" for {dice.choice([0.01, 1, 7, 30])}" if what == "pause" else ""
        faults.append(f"{at_s:.9f} {what} worker {worker}{long}")
    result, _ = simulated(tmp_path, "chain", strategy, stages, replicas, "\n".join(faults), **settings)
    accounting = result.accounting
    accounted = accounting["applied"] + sum(accounting["skipped"].values()) + accounting["not_processed"]
    assert (accounting["lost"], accounting["applied_twice"], accounted) == (0, 0, accounting["batches"])
    assert (result.outcome == "finished" and accounting["not_processed"] == 0) or "no worker is left" in result.reason


@pytest.mark.parametrize(
    "seed", [33, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30) if seed != 33)]
)
def test_teams_survive_every_kind_of_fault_or_say_why_not(tmp_path: Path, seed: int) -> None:
    """Among others: one stage of a lost replica is started again alone."""
    dice = random.Random(seed)
    strategy = dice.choice(["downpour", "stale_sync", "sync", "bounded_delay", "soft_sync", "adaptive_bound"])
    stages, replicas = dice.choice([2, 3]), dice.choice([1, 2, 3])
    calm = simulated(tmp_path / "calm", "chain", strategy, stages, replicas)[0].seconds
    timeout_s, dies, stops = dice.choice([0.02, 0.2, 5.0]), dice.random() < 0.2, dice.random() < 0.2
    chances = Chances(1.1 * calm, timeout_s, servers_die=dies, stops=stops)
    workers = [f"worker {index}" for index in range(stages * replicas)]
    drawn = random_script(dice, len(workers), 2, chances)
    script = [fault for fault in drawn if fault.what != "start" or fault.node in (*workers, "server 0", "server 1")]
    result, _ = simulated(tmp_path, "chain", strategy, stages, replicas, text(script))
    if result.outcome == "failed":
        assert any(
            why in result.reason for why in ("no worker is left", "was lost", "ended before", "died on the same")
        )
    elif result.outcome == "finished":
        assert result.accounting["applied"] + sum(result.accounting["skipped"].values()) == 24
    if result.accounting:
        assert (result.accounting["lost"], result.accounting["applied_twice"]) == (0, 0) or result.outcome == "failed"


@pytest.mark.parametrize("strategy", ["downpour", "sync"])
def test_a_replica_is_evaluated_on_the_way_as_a_whole_model_is_and_ends_at_a_target(
    tmp_path: Path, strategy: str
) -> None:
    found = []
    for stages in (1, 2):
        seen = Seen()
        (folder := tmp_path / f"{stages}").mkdir()
        config = configured(folder, "chain", strategy, stages, replicas=1, **(SGD if strategy == "sync" else {}))
        slow = SimSettings(compute={"kind": "constant", "step_s": 1.0})
        config = msgspec.structs.replace(config, sim=slow, eval_every_s=5.0, target="loss=1e9")
        result = run(config, seen)
        metrics = [event.metrics["loss"] for event in seen if isinstance(event, events.Progress) and event.metrics]
        assert 0 < result.accounting["applied"] < 24  # it has ended at the first evaluation
        found.append(metrics[0])
    assert found[1] == pytest.approx(found[0], rel=0.2)  # with other numbers of batches done
