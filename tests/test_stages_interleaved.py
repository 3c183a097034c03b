"""Workers with several stages each: the whole model's gradient, each value sent once, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rainband
from rainband.cli.options.words import configured
from rainband.model_parallel.execution.in_process import MemoryNetwork, run_together
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.placement.placement import save
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.model_parallel.schedules.builders import interleaved
from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation.run import SimulatedResult, run
from rainband.strategy import Batch
from tests.pipeline_models import floats, one_thread  # noqa: F401 (a fixture for all)
from tests.stage_tasks import Shaped, dealt, planned, whole_gradient, worker_of

NAMES = ["chain", "skips", "branches", "tied", "several", "recurrent", "transformer", "on_shapes"]
BY_SAMPLE = ["chain", "branches", "tied", "several", "transformer"]  # the others mix the samples of a batch
BATCH = Batch(0, 1, 7)
DEALT = [(p, v, m) for p in (1, 2, 3) for v in (1, 2, 3) for m in range(p, 7, p)]  # machines, stages, microbatches


class Woven(nn.Module):
    """Every layer reads all those before it, so a value has readers in several stages of one machine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        known = [x]
        for layer in self.layers:
            known.append(layer(torch.stack(known).sum(0)).tanh())
        return known[-1]


@dataclass(frozen=True)
class Weaving(Shaped):
    name: str = "woven"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Woven().double()

    def data(self) -> Any:
        from rainband.tasks.task import TensorData

        torch.manual_seed(1)
        return TensorData(floats(self.samples, 4))


def stage_gradient(
    task: Shaped, plan: StagePlan, order: Any = None
) -> tuple[dict[int, Tensor], list[Any], MemoryNetwork]:
    """The gradient of each parameter, from the one worker that holds it."""
    network = MemoryNetwork(plan.size)
    workers = [worker_of(task, plan, place, network) for place in range(plan.size)]
    gradients = run_together([worker.gradient(BATCH) for worker in workers], order)
    held = [(number, t) for gradient in gradients for number, t in enumerate(gradient.tensors) if t is not None]
    assert len({number for number, _ in held}) == len(held)
    return dict(held), gradients, network


# ---- the gradient ----


@pytest.mark.parametrize("name", BY_SAMPLE)
@pytest.mark.parametrize("machines, stages_per_worker, microbatches", [(2, 2, 2), (2, 2, 4), (1, 2, 1), (1, 4, 3)])
def test_the_gradient_is_that_of_the_whole_model(
    name: str, machines: int, stages_per_worker: int, microbatches: int
) -> None:
    task = Shaped(name)
    plan = dealt(task, machines, stages_per_worker, microbatches)
    assert (plan.size, plan.stages_per_worker) == (machines, stages_per_worker)
    found, gradients, _ = stage_gradient(task, plan)
    whole = whole_gradient(task, BATCH)
    expected = {number: tensor for number, tensor in enumerate(whole.tensors) if tensor is not None}
    assert found.keys() == expected.keys()
    for number, tensor in expected.items():
        torch.testing.assert_close(found[number], tensor, rtol=1e-9, atol=1e-12)
    assert [gradient.loss for gradient in gradients] == [pytest.approx(whole.loss, rel=1e-9)] * machines


@pytest.mark.parametrize("name", [*NAMES[:-2], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[-2:])])
def test_the_gradient_has_the_bits_of_as_many_stages_on_a_machine_each(name: str) -> None:
    task = Shaped(name, batch_size=8)
    found, gradients, _ = stage_gradient(task, dealt(task, 2, 2, 4))
    expected, others, _ = stage_gradient(task, planned(task, 4, microbatches=4))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[number], tensor) for number, tensor in expected.items())
    assert gradients[0].loss == others[0].loss


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_a_batch_with_fewer_samples_than_microbatches_is_computed_all_the_same(samples: int) -> None:
    task = Weaving(batch_size=6, samples=6 + samples)
    found, gradients, _ = stage_gradient(task, dealt(task, 3, 2, 6))
    assert {gradient.samples for gradient in gradients} == {samples}
    for number, tensor in enumerate(whole_gradient(task, BATCH).tensors):
        torch.testing.assert_close(found[number], tensor, rtol=1e-9, atol=1e-12)


class Echo(nn.Module):
    """Its first layer is also its third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.a(self.b(self.a(x))))
        return y


class Echoing(Weaving):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Echo().double()


def test_a_weight_that_two_stages_of_one_worker_share_is_not_sent() -> None:
    task = Echoing()
    plan = dealt(task, 2, 2, 2)
    found, _, network = stage_gradient(task, plan)
    assert not [tag for _, _, tag in network.sent if "tie" in tag or "tied" in tag]
    for number, tensor in enumerate(whole_gradient(task, BATCH).tensors):
        torch.testing.assert_close(found[number], tensor, rtol=1e-9, atol=1e-12)


def test_two_readers_of_a_value_on_one_machine_do_not_add_to_each_others_gradients() -> None:
    """The gradients of what is stacked and summed are one memory, to which autograd would add for the next reader."""
    task = Weaving()
    units = cut(task.model(), task.data().batch(range(2))).units
    plan = planned(task, {unit: number // 4 % 2 for number, unit in enumerate(units)}, kind="partition")
    found, _, _ = stage_gradient(task, plan)
    for number, tensor in enumerate(whole_gradient(task, BATCH).tensors):
        torch.testing.assert_close(found[number], tensor, rtol=1e-9, atol=1e-12)


class Mixed(nn.Module):
    """A weight that is the sum of two, by a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(floats(4, 4)) for _ in range(2))
        self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.d((x @ torch.stack([self.a, self.b]).sum(0)).tanh() + self.c(x))
        return y


class Mixing(Weaving):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Mixed().double()


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_weights_whose_gradients_are_one_memory_sum_their_microbatches_apart(schedule: str) -> None:
    task = Mixing()
    found, _, _ = stage_gradient(
        task, dealt(task, 2, 2, 4) if schedule == "interleaved" else planned(task, 2, microbatches=4, schedule=schedule)
    )
    for number, tensor in enumerate(whole_gradient(task, BATCH).tensors):
        torch.testing.assert_close(found[number], tensor, rtol=1e-9, atol=1e-12)


# ---- what crosses ----


def crossing(network: MemoryNetwork) -> list[tuple[int, int, Any]]:
    return sorted((source, to, tag[3:]) for source, to, tag in network.sent if tag[-2] in ("value", "gradient"))


def test_a_chain_crosses_from_each_stage_to_the_next_and_back() -> None:
    task = Shaped("chain")  # five units, of which the first two are stage 0
    _, _, network = stage_gradient(task, dealt(task, 2, 2, 2))
    forward = [(0, 1, "_1"), (1, 0, "_2"), (0, 1, "_3")]  # the value behind stages 0, 1 and 2
    there = [(a, b, (microbatch, "value", value)) for microbatch in range(2) for a, b, value in forward]
    back = [(b, a, (microbatch, "gradient", value)) for microbatch in range(2) for a, b, value in forward]
    assert crossing(network) == sorted(there + back)


@pytest.mark.parametrize("machines, stages_per_worker", [(2, 3), (3, 2), (3, 3)])
def test_a_value_crosses_once_however_many_stages_of_a_machine_read_it(machines: int, stages_per_worker: int) -> None:
    task = Weaving()
    plan = dealt(task, machines, stages_per_worker, machines)
    _, _, network = stage_gradient(task, plan)
    layout = worker_of(task, plan, 0, MemoryNetwork(machines)).submodel.layout
    once = [(layout.fragments[layout.maker[value]].machine, to, value) for value, to in layout.crossings()]
    readers = [len([i for i in layout.readers[v] if layout.fragments[i].machine == to]) for _, to, v in once]
    assert max(readers) > 1  # or this test would say little
    there = [(source, to, (m, "value", value)) for m in range(machines) for source, to, value in once]
    back = [(to, source, (m, "gradient", value)) for m in range(machines) for source, to, value in once]
    assert crossing(network) == sorted(there + back)


# ---- nobody waits for ever ----


QUICK = [pytest.param(p, v, m, marks=() if m in (p, 6) else pytest.mark.slow) for p, v, m in DEALT]


@pytest.mark.parametrize("machines, stages_per_worker, microbatches", QUICK)
def test_every_size_ends_with_any_slow_worker(machines: int, stages_per_worker: int, microbatches: int) -> None:
    task = Weaving(batch_size=6, samples=12)
    plan = dealt(task, machines, stages_per_worker, microbatches)
    whole = whole_gradient(task, BATCH)
    for order in (list(range(machines)), list(range(machines))[::-1]):
        found, _, _ = stage_gradient(task, plan, order)
        for number, tensor in enumerate(whole.tensors):
            torch.testing.assert_close(found[number], tensor, rtol=1e-9, atol=1e-12)


def test_a_row_is_that_of_the_table_and_a_short_batch_leaves_some_out() -> None:
    plan = dealt(Weaving(), 2, 2, 4)
    table = interleaved(2, 2, 4)
    for machine in range(2):
        whole = [action for action in table.rows[machine] if action.kind != "U"]
        assert list(plan.row(machine, 4)) == whole
        assert list(plan.row(machine, 3)) == [action for action in whole if action.microbatch < 3]
    assert " ".join(map(str, plan.row(0, 1))) == "0F0 2F0 2B0 0B0"
    assert " ".join(map(str, plan.row(1, 1))) == "1F0 3F0 3B0 1B0"


# ---- in virtual time ----


class Seen(list[events.AnyEvent]):
    def __call__(self, event: events.AnyEvent) -> None:
        self.append(event)


def simulated(
    folder: Path,
    strategy: str,
    stage_plan: StagePlan | None,
    replicas: int = 1,
    name: str = "chain",
    faults: str = "",
    compute: dict[str, Any] | None = None,
    samples: int = 48,
    **settings: Any,
) -> tuple[SimulatedResult, Seen]:
    folder.mkdir(parents=True, exist_ok=True)
    woven = name == "woven"
    seen = Seen()
    config = RunConfig(
        task="tests.test_stages_interleaved:Weaving" if woven else "tests.stage_tasks:Shaped",
        task_settings={"name": name, "samples": samples},
        strategy=strategy,
        strategy_settings={"batch_per_worker": True, **settings} if strategy == "sync" else settings,
        num_workers=(stage_plan.size if stage_plan else 1) * replicas,
        num_servers=2 if strategy != "single" else 0,
        runtime="sim",
        epochs=1,
        directory=str(folder),
        sim=SimSettings(faults=faults, compute=compute or {}),
        stage_plan=stage_plan,
    )
    return run(config, seen), seen


@pytest.mark.parametrize("name", ["chain", "tied", "branches", "woven"])
def test_synchronous_training_is_that_of_whole_models(tmp_path: Path, name: str) -> None:
    task = Weaving() if name == "woven" else Shaped(name)
    whole, _ = simulated(tmp_path / "whole", "sync", None, 2, name, lr=0.05)
    parts, _ = simulated(tmp_path / "parts", "sync", dealt(task, 2, 2, 2), 2, name, lr=0.05)
    assert (whole.outcome, parts.outcome) == ("finished", "finished")
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "parts"))
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-9, atol=1e-12)
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-9)
    assert parts.accounting["applied"] == whole.accounting["applied"] == 12


@pytest.mark.parametrize("machines, stages_per_worker, microbatches", QUICK)
def test_in_virtual_time_every_size_finishes(
    tmp_path: Path, machines: int, stages_per_worker: int, microbatches: int
) -> None:
    plan = dealt(
        Weaving(), machines, stages_per_worker, microbatches
    )  # batches of four samples: six microbatches are too many
    result, _ = simulated(tmp_path, "single", plan, name="woven", samples=15, lr=0.05)
    assert (result.outcome, result.accounting["applied"]) == ("finished", 4)


@pytest.mark.parametrize(
    "strategy",
    [
        "downpour",
        "sync",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("stale_sync", "bounded_delay", "soft_sync")),
    ],
)
def test_every_batch_is_applied_once_to_the_blocks_of_every_worker(tmp_path: Path, strategy: str) -> None:
    plan = dealt(Weaving(), 2, 2, 2)
    result, _ = simulated(tmp_path, strategy, plan, 3, "woven")
    assert result.outcome == "finished"
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (12, 0, 0)
    again, _ = simulated(tmp_path / "again", strategy, plan, 3, "woven")
    assert again.trace_hash == result.trace_hash


@pytest.mark.parametrize("strategy", ["downpour", "sync"])
@pytest.mark.parametrize("worker", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_replica_that_loses_a_worker_stops_and_the_others_do_its_work(
    tmp_path: Path, strategy: str, worker: int
) -> None:
    plan = dealt(Weaving(), 2, 3, 4)
    calm, _ = simulated(tmp_path / "calm", strategy, plan, 2, "woven")
    faults = f"{0.4 * calm.seconds:.9f} kill worker {worker}"
    result, seen = simulated(tmp_path, strategy, plan, 2, "woven", faults)
    assert result.outcome == "finished"
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (12, 0, 0)
    assert {event.node for event in seen if isinstance(event, events.Lost)} == {"worker 2", "worker 3"}


@pytest.mark.parametrize("stages_per_worker, batch_s", [(1, 0.625), (2, 0.5625), (3, 0.5417)])
def test_more_stages_on_a_worker_leave_it_idle_for_a_shorter_time(
    tmp_path: Path, stages_per_worker: int, batch_s: float
) -> None:
    """Half a second of work on each of two workers, and a wait of (P-1)/(VM) of it, with four microbatches."""
    slow = {"kind": "constant", "step_s": 1.0}  # 36 units of equal time; messages take next to none
    result, _ = simulated(tmp_path, "single", dealt(Weaving(), 2, stages_per_worker, 4), name="woven", compute=slow)
    assert result.seconds / 12 == pytest.approx(batch_s, rel=0.01)


# ---- as users type it ----


def test_a_plan_that_was_saved_is_trained_as_it_says(tmp_path: Path) -> None:
    from rainband.model_parallel.graph.split_loss import cut_task
    from rainband.model_parallel.placement.measure import measure
    from rainband.model_parallel.placement.partitioners import make_plan
    from rainband.model_parallel.placement.pipedream_planner import interleaved as partitioner
    from rainband.model_parallel.placement.profile import Resources
    from rainband.tasks.digits import Digits

    task = Digits()
    graph, args, kwargs = cut_task(task, task.model(), task.data(), 8)
    made = make_plan(partitioner, measure(graph, args, kwargs, repeats=1), Resources(num_machines=2))
    save(made, tmp_path / "plan.toml")
    config = configured(
        ["digits", "sync", "batch_per_worker=true"],
        {"placement": tmp_path / "plan.toml", "stages": 2, "runtime": "sim"},
    )
    assert config.stage_plan is not None and config.stage_plan.plan.stages == made.stages
    assert (config.num_workers, config.stage_plan.size, config.stage_plan.stages_per_worker) == (4, 2, 2)
    assert (config.stage_plan.schedule, config.stage_plan.microbatches) == ("interleaved", 4)


@pytest.mark.parametrize("batch_size, stages, microbatches", [(None, 2, 4), (5, 3, 3), (2, 3, 3), (7, 2, 4)])
def test_the_usual_microbatches_can_be_dealt(batch_size: int | None, stages: int, microbatches: int) -> None:
    words = ["tests.test_stages_interleaved:Weaving", "single"]
    stage_plan = configured(
        words, {"batch_size": batch_size, "stages": stages, "stages_per_worker": 2, "runtime": "sim"}
    ).stage_plan
    assert stage_plan is not None
    assert (stage_plan.microbatches, stage_plan.schedule, stage_plan.size, stage_plan.stages_per_worker) == (
        microbatches,
        "interleaved",
        stages,
        2,
    )


def test_fit_interleaves(tmp_path: Path) -> None:
    fitted = rainband.fit(
        Weaving(),
        rainband.Sync(batch_per_worker=True),
        4,
        1,
        stages=2,
        schedule="interleaved",
        stages_per_worker=3,
        runs=tmp_path,
        runtime="sim",
    )
    assert fitted.outcome == "finished"
    assert fitted.accounting.applied == 4
    stage_plan = msgspec.json.decode((fitted.directory / "config.json").read_bytes())["stage_plan"]
    assert (stage_plan["schedule"], len(stage_plan["plan"]["stages"]), stage_plan["microbatches"]) == (
        "interleaved",
        6,
        4,
    )


def test_a_batch_smaller_than_a_round_of_microbatches_is_trained(tmp_path: Path) -> None:
    task = Weaving(batch_size=2, samples=5)
    fitted = rainband.fit(task, "single", stages=3, stages_per_worker=2, runs=tmp_path, runtime="sim")
    assert (fitted.outcome, fitted.accounting.applied) == ("finished", 3)


def test_fit_takes_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save(dealt(Weaving(), 2, 3, 2).plan, file)
    fitted = rainband.fit(Weaving(), "single", placement=file, microbatches=2, runs=tmp_path, runtime="sim")
    assert fitted.accounting.applied == 4
    stage_plan = msgspec.json.decode((fitted.directory / "config.json").read_bytes())["stage_plan"]
    assert (len(stage_plan["plan"]["stages"]), stage_plan["microbatches"]) == (6, 2)
