"""Plans as data: measured, checked, edited, saved, drawn; and the command that makes them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from rainband.cli.main import build_app
from rainband.model_parallel.drawing.picture import draw_plan, draw_schedule
from rainband.model_parallel.drawing.text import plan_lines, profile_lines
from rainband.model_parallel.execution.in_process import Pipeline
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import cut_task, microbatches_of
from rainband.model_parallel.placement.measure import measure
from rainband.model_parallel.placement.partitioners import find_partitioner, make_plan
from rainband.model_parallel.placement.pipedream_planner import (
    in_stages,
    interleaved,
    num_units,
)
from rainband.model_parallel.placement.placement import (
    PlacedStage,
    Placement,
    check,
    from_placement,
    load,
    memory,
    save,
)
from rainband.model_parallel.placement.profile import CutValue, LinkSpeed, Profile, Resources, Unit
from rainband.model_parallel.schedules.builders import pipedream
from rainband.model_parallel.schedules.check import check as play
from rainband.tasks.digits import Digits
from rainband.tasks.task import TensorData
from tests.pipeline_models import (
    Recurrent,
    Skips,
    examples,
    floats,
    one_thread,  # noqa: F401 (a fixture for all)
    words,
)
from tests.stage_tasks import Shaped

PROFILE = Profile(
    "three",
    8,
    (Unit("a", 1.0, 2.0, 100, 10), Unit("b", 1.0, 2.0, 200, 20), Unit("c", 1.0, 2.0, 300, 30)),
    (CutValue("a", "a", ("b", "c"), 1000, 1000), CutValue("b", "b", ("c",), 500, 0)),
)


def pipeline(*stages: PlacedStage, machines: int = 3) -> Placement:
    return Placement(model="three", kind="pipeline", partitioner="me", num_machines=machines, stages=stages)


GOOD = pipeline(PlacedStage((0, 1), ("a",)), PlacedStage((2,), ("b", "c")))


# ---- measuring ----


@pytest.mark.parametrize("name", ["chain", "skips", "recurrent", "transformer", "on_shapes", "tied"])
def test_a_profile_has_every_unit_with_what_it_makes(name: str) -> None:
    model, args = examples()[name]
    graph = cut(model, args)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    profile = measure(graph, args, model=name, repeats=1)
    assert sorted(profile.names) == sorted(graph.units)
    assert all(unit.forward_s > 0 and unit.backward_s >= 0 for unit in profile.units)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    edges = {(value.name, reader) for value in profile.values for reader in value.readers}
    assert edges == {(value, reader) for value, _, reader in graph.unit_edges()}


def test_bytes_are_those_of_the_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).double()
    profile = measure(cut(model, (floats(2, 8),)), (floats(2, 8),), repeats=1)
    first, second = profile.units
    assert (first.parameter_bytes, first.activation_bytes, first.what) == (8 * (32 + 4), 8 * 2 * 4, "Linear")
    assert (second.parameter_bytes, second.activation_bytes, second.what) == (0, 64, "ReLU")
    (value,) = profile.values
    assert (value.forward_bytes, value.backward_bytes) == (64, 64)
    assert profile.batch_size == 2


def test_views_and_work_in_place_take_no_memory() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 2)), nn.Flatten())
    profile = measure(cut(model, (torch.randn(2, 8),)), (torch.randn(2, 8),), repeats=1)
    assert [unit.activation_bytes for unit in profile.units][2:] == [0, 0]


def test_a_model_without_values_has_the_bytes_of_one_with_them() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 3))

    with torch.device("meta"):
        empty = net()
    x = torch.randn(2, 8)
    there, not_there = (measure(cut(model, (x,)), (x,), repeats=1) for model in (net(), empty))
    kept = [[(u.parameter_bytes, u.activation_bytes) for u in profile.units] for profile in (there, not_there)]
    assert kept[0] == kept[1] == [(144, 32), (0, 0), (0, 0), (60, 24)]
    assert not_there.values == there.values
    assert not_there.units[0].forward_s == 2 * 8 * 4 / 1e10  # the number of multiplications


def test_the_parts_of_a_tuple_are_distinguished() -> None:
    graph = cut(Recurrent(), (words(3, 5),))
    profile = measure(graph, (words(3, 5),), repeats=1)
    sizes = {value.name: value.forward_bytes for value in profile.values if value.maker == "first"}
    assert sorted(sizes.values()) == [2 * 4 * 3 * 8, 4 * 3 * 5 * 8]  # the state, and the outputs


def test_a_profile_in_the_wrong_order_is_refused() -> None:
    with pytest.raises(ValueError, match="value a is read before a has made it: sort the units"):
        Profile("", 1, PROFILE.units[::-1], PROFILE.values[:1])


# ---- checking ----


def test_a_good_plan_passes() -> None:
    check(GOOD, PROFILE, Resources(num_machines=3, memory_bytes=3000))
    assert GOOD.replicas() == (2, 1)
    assert GOOD.stage_of() == {"a": 0, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (pipeline(PlacedStage((0,), ("a", "b"))), "the placement lacks c: give each unit a stage"),
        (pipeline(PlacedStage((0,), ("a", "b", "c", "a"))), "the placement has a more than once"),
        (
            pipeline(PlacedStage((0,), ("a", "b", "c", "d"))),
            "the placement has d, which three does not have: its units are a, b, c",
        ),
        (pipeline(PlacedStage((0,), ("a",)), PlacedStage((0,), ("b", "c"))), "machine 0 has more than one stage"),
        (pipeline(PlacedStage((3,), ("a", "b", "c"))), "uses machine 3 of 3: use 0 to 2, or raise num_machines"),
        (pipeline(PlacedStage((), ("a", "b", "c"))), "stage 0 has no machine"),
        (pipeline(PlacedStage((0,), ("a", "b", "c")), PlacedStage((1,), ())), "stage 1 has no units"),
        (
            pipeline(PlacedStage((0,), ("b",)), PlacedStage((1,), ("a", "c"))),
            "b in stage 0 reads a of stage 1: in a pipeline",
        ),
        (
            msgspec.structs.replace(GOOD, kind="partition"),
            "stage 0 is on 2 machines, and in a partition each is on one",
        ),
    ],
)
def test_a_wrong_plan_is_refused_with_what_to_change(plan: Placement, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(plan, PROFILE)


def test_a_partition_may_go_back_and_forth() -> None:
    check(from_placement(PROFILE, {"a": 0, "b": 1, "c": 0}, "me", 2), PROFILE)


def test_memory_counts_versions_and_activations_of_the_batches_on_the_way() -> None:
    plan = pipeline(PlacedStage((0,), ("a",)), PlacedStage((1,), ("b",)), PlacedStage((2,), ("c",)))
    resources = Resources(num_machines=3, state_copies=1)
    assert memory(plan, PROFILE, resources) == (100 * 4 + 10 * 3, 200 * 3 + 20 * 2, 300 * 2 + 30)
    with pytest.raises(ValueError, match=r"stage 1 \(b\) needs 640 bytes and a machine has 639: move a unit"):
        check(plan, PROFILE, Resources(num_machines=3, memory_bytes=639, state_copies=1))


def test_a_partition_has_one_batch_on_the_way() -> None:
    plan = from_placement(PROFILE, {"a": 0, "b": 0, "c": 1}, "me", 2)
    assert memory(plan, PROFILE, Resources(num_machines=2, state_copies=1)) == (300 * 2 + 30, 300 * 2 + 30)


def test_machines_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 machines are not a multiple of 2 machines per group: use 6 machines"):
        Resources(num_machines=5, network=LinkSpeed(machines_per_group=2))


# ---- editing, saving ----


@pytest.mark.parametrize("name", ["plan.json", "plan.toml"])
def test_a_saved_plan_is_the_same_when_loaded(tmp_path: Path, name: str) -> None:
    plan = make_plan(lambda profile, resources: GOOD, PROFILE, Resources(num_machines=3))
    save(plan, tmp_path / name)
    assert load(tmp_path / name) == plan
    save(GOOD, tmp_path / name)  # without a prediction
    assert load(tmp_path / name) == GOOD


def test_a_file_that_is_no_plan_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"model": "x"}')
    with pytest.raises(ValueError, match=r"plan.json is not a placement: Object missing required field `kind`"):
        load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"a placement is a file that ends in .json or .toml, not plan.yaml"):
        save(GOOD, tmp_path / "plan.yaml")


# ---- showing ----


def test_too_few_units_for_the_stages_are_reported_with_what_to_do() -> None:
    machines = Resources(num_machines=len(PROFILE.units) + 1)
    with pytest.raises(ValueError, match="three has 3 units, too few for 4 stages: use fewer stages"):
        in_stages(PROFILE, machines)
    with pytest.raises(ValueError, match="three has 3 units, and 2 stages on each of 4 machines are 8"):
        interleaved(PROFILE, machines)
    assert num_units(Profile("one", 8, PROFILE.units[:1], ())) == "1 unit"


def test_a_plan_is_shown_with_what_crosses() -> None:
    plan = make_plan(lambda profile, resources: GOOD, PROFILE, Resources(num_machines=3))
    text = "\n".join(plan_lines(plan, PROFILE, Resources(num_machines=3)))
    assert "pipeline of three on 3 machines, by me" in text
    assert "1 values cross, 2.0 kB for each batch" in text  # a goes to stage 1 once, whatever reads it there
    assert "alone 9000.000 ms" in text
    assert len(profile_lines(PROFILE)) == 4
    many = Profile("", 1, tuple(Unit(f"u{n}", float(n)) for n in range(50)), ())
    assert profile_lines(many)[-1] == "and 10 units that take 45000.000 ms together"


def test_one_stage_on_all_machines_is_reported_as_data_parallelism() -> None:
    stage = PlacedStage((0, 1), ("a", "b", "c"))
    plan = make_plan(lambda *_: pipeline(stage, machines=2), PROFILE, Resources(num_machines=2))
    text = "\n".join(plan_lines(plan, PROFILE, Resources(num_machines=2)))
    assert "rainband train three sync --workers 2 needs no placement" in text


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = pipedream([2, 1], 4)
    assert draw_plan(GOOD, PROFILE, tmp_path / "plan.png")
    assert draw_schedule(table, play(table), tmp_path / "schedule.svg")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert "machine 2" in (tmp_path / "schedule.svg").read_text() or (tmp_path / "schedule.svg").stat().st_size > 1000


# ---- partitioners of one's own ----


def test_a_partitioner_of_ones_own_is_found_checked_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_partitioner.py").write_text(
        "from rainband.model_parallel.placement.placement import from_placement\n"
        "def first_alone(profile, resources):\n"
        "    where = {unit: int(unit != profile.names[0]) for unit in profile.names}\n"
        "    return from_placement(profile, where, 'first_alone', resources.num_machines)\n"
        "def forgetful(profile, resources):\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    resources = Resources(num_machines=2, network=LinkSpeed(latency_s=0.0))
    plan = make_plan(find_partitioner("my_partitioner:first_alone"), PROFILE, resources)
    assert plan.placement() == {"a": 0, "b": 1, "c": 1}
    assert plan.predicted is not None and plan.predicted.crossing_bytes == 2000
    with pytest.raises(ValueError, match="returned a NoneType: it must return a rainband.model_parallel Placement"):
        make_plan(find_partitioner("my_partitioner:forgetful"), PROFILE, resources)
    with pytest.raises(ValueError, match="my_partitioner has no function 'x'"):
        find_partitioner("my_partitioner:x")
    with pytest.raises(
        ValueError,
        match="no partitioner named 'fast': choose from balanced, hybrid, interleaved, one_machine_per_stage",
    ):
        find_partitioner("fast")


# ---- tasks ----


def test_digits_learn_in_a_pipeline_of_three_machines() -> None:
    """A plan without replicas, weight stashing, every batch an update: as a user would put it together."""
    task = Digits()
    data = task.data()
    torch.manual_seed(0)
    model = task.model()
    graph, args, kwargs = cut_task(task, model, data, batch_size=32)
    profile = measure(graph, args, kwargs, model="digits", repeats=1)
    where = {unit: min(2, place // 3) for place, unit in enumerate(profile.names)}
    plan = pipeline_of(profile, where)
    check(plan, profile)
    before = task.evaluate(model)["loss"]
    microbatches = microbatches_of(task, data, [range(first, first + 32) for first in range(0, 1280, 32)])
    trained = Pipeline(
        graph, plan.stage_of(), pipedream(plan.replicas(), len(microbatches)), lambda p: torch.optim.Adam(p, lr=3e-3)
    )
    losses = trained.run(microbatches)
    assert len(losses) == 40 and losses[-1] < losses[0] / 2
    assert task.evaluate(model)["loss"] < before / 2
    assert trained.sent == 40 * 2 * 2  # two cuts, there and back


def pipeline_of(profile: Profile, where: dict[str, int]) -> Placement:
    stages = [PlacedStage((m,), tuple(u for u in profile.names if where[u] == m)) for m in sorted(set(where.values()))]
    return Placement(model="digits", kind="pipeline", partitioner="me", num_machines=3, stages=tuple(stages))


def test_too_small_a_batch_is_reported() -> None:
    data = TensorData(torch.ones(1, 8))
    with pytest.raises(ValueError, match="an example of at least two samples"):
        cut_task(Shaped(), Skips(), data, batch_size=4)


# ---- the command ----


def rainband_plan(*options: str) -> str:
    result = CliRunner().invoke(build_app(), ["placement", "digits", "--repeats", "1", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_plans_saves_draws_and_plays(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    options = [
        "--machines",
        "3",
        "--partitioner",
        "one_machine_per_stage",
        "--out",
        str(file),
        "--draw",
        str(tmp_path / "plan.png"),
    ]
    text = rainband_plan(*options, "--schedule", "one_f_one_b", "--microbatches", "6", "--network", "datacenter")
    plan = load(file)
    assert plan.kind == "pipeline" and set(plan.replicas()) == {1}
    assert "digits: 9 units, measured with batches of 32" in text
    assert f"one_f_one_b: {len(plan.stages)} stages, 6 microbatches" in text
    assert text.count("predicted: ") == 1  # the schedule's, not the planner's as well
    assert (tmp_path / "plan_schedule.png").exists()

    edited = msgspec.structs.replace(plan, partitioner="by hand", predicted=None)
    save(edited, tmp_path / "edited.json")
    again = rainband_plan("--placement", str(tmp_path / "edited.json"), "--json")
    assert msgspec.json.decode(again, type=Placement).stages == edited.stages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--partitioner", "fast"], "no partitioner named 'fast'"),
        (["--partitioner", "balanced", "--memory", "0.01"], "does not fit on 2 machines of 10,000 bytes"),
        (["--network", "carrier_pigeon"], "no network named 'carrier_pigeon'"),
        (["--inter-group-network", "wan"], "--inter-group-network requires --machines-per-group"),
        (["--partitioner", "balanced", "--schedule", "gpipe"], "a schedule needs a pipeline"),
        (
            ["--partitioner", "one_machine_per_stage", "--schedule", "slow"],
            "no schedule named 'slow': choose from gpipe",
        ),
        (["--out", "plan.yaml"], "ends in .json or .toml"),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), ["placement", "mlp", "task.samples=64", "--repeats", "1", *options])
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output
