"""The rate of each schedule, several stages on one machine, and the position of units in pictures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rainband.cli.main import build_app
from rainband.model_parallel.drawing.picture import Spot, bytes_text, draw_plan, draw_schedule, spots
from rainband.model_parallel.drawing.text import compared_lines, rate_lines
from rainband.model_parallel.placement.partitioners import make_plan
from rainband.model_parallel.placement.pipedream_planner import interleaved, one_machine_per_stage
from rainband.model_parallel.placement.placement import PlacedStage, Placement, check, load, memory
from rainband.model_parallel.placement.predict import pipeline_s
from rainband.model_parallel.placement.profile import CutValue, LinkSpeed, Profile, Resources, Unit
from rainband.model_parallel.schedules.builders import SCHEDULES
from rainband.model_parallel.schedules.forecast import FLUSHES, Forecast, every_schedule, partitioner_for, played

FREE = LinkSpeed(bytes_per_s=1e15, latency_s=0.0)


def chain(units: int, parameters: int = 10**12, size: int = 0) -> Profile:
    """Units that take 1 s forward and 2 s backward; they have too many parameters to be replicated."""
    names = [f"u{n}" for n in range(units)]
    made = tuple(Unit(name, 1.0, 2.0, parameters, 7) for name in names)
    values = tuple(CutValue(a, a, (b,), size, size) for a, b in pairwise(names))
    return Profile("chain", 32, made, values)


DEAR = LinkSpeed(bytes_per_s=1e9, latency_s=0.0)  # updates of replicas take a thousand seconds


# ---- rates ----


def test_a_batch_of_every_schedule_takes_what_its_formula_says() -> None:
    """Four units of 3 s on two machines, four microbatches: 6 s of work on each, and the bubble."""
    found = every_schedule(chain(4), Resources(num_machines=2, network=DEAR), microbatches=4)
    seconds = {name: play.batch_s for name, play in found.items() if not isinstance(play, ValueError)}
    assert seconds == pytest.approx(
        {
            "gpipe": 6 * 5 / 4,  # (M + S - 1) / M
            "one_f_one_b": 6 * 5 / 4,
            "interleaved": 6 * 9 / 8,  # (V M + P - 1) / (V M)
            "pipedream": 6.0,
            "pipedream_2bw": 6.0,
        }
    )


def test_only_schedules_that_never_flush_have_late_gradients() -> None:
    found = every_schedule(chain(6), Resources(num_machines=3, network=DEAR), microbatches=6)
    late = {name: play.late for name, play in found.items() if not isinstance(play, ValueError)}
    assert late == {"gpipe": 0, "one_f_one_b": 0, "interleaved": 0, "pipedream": 2, "pipedream_2bw": 1}
    assert {name for name in late if not late[name]} == set(FLUSHES)


def test_what_cannot_be_played_is_reported_and_the_others_are_compared() -> None:
    found = every_schedule(chain(3), Resources(num_machines=3, network=DEAR), microbatches=2)
    lines = compared_lines(found, chain(3))
    assert isinstance(found["interleaved"], ValueError) and isinstance(found["pipedream_2bw"], ValueError)
    assert "chain has 3 units, and 2 stages on each of 3 machines are 6" in lines[-2]
    assert lines[-1].startswith("no pipedream_2bw: pipedream_2bw requires at least as many microbatches as stages")
    assert lines[1].split() == ["gpipe", "1-1-1", "6000.000", "5", "1.50", "2", "1", "0"]


def test_replicas_wait_while_they_exchange_gradients() -> None:
    """One unit of 3 s on two machines: 1.5 s a batch, if 10 bytes did not take 4 s for two batches: 3.5 s."""
    profile = chain(1, parameters=10)
    both = Placement(
        model="", kind="pipeline", partitioner="me", num_machines=2, stages=(PlacedStage((0, 1), ("u0",)),)
    )
    slow = Resources(num_machines=2, network=LinkSpeed(bytes_per_s=2.5, latency_s=0.0))
    quick = Resources(num_machines=2, network=FREE)
    for resources, seconds in ((slow, 3.5), (quick, 1.5)):
        plan = make_plan(lambda profile, resources: both, profile, resources)
        assert plan.predicted is not None and plan.predicted.batch_s == pytest.approx(seconds)
        in_a_run = Forecast(plan, profile, "pipedream", 1, resources.network)
        assert in_a_run.batch_s == pytest.approx(seconds)
        assert played("pipedream", plan, profile, resources, microbatches=4).batch_s == pytest.approx(seconds)


def test_a_rate_is_reported_in_samples() -> None:
    play = played(
        "gpipe",
        make_plan(one_machine_per_stage, chain(2), Resources(num_machines=2, network=DEAR)),
        chain(2),
        RESOURCES,
        1,
    )
    assert rate_lines(play, chain(2)) == [
        "no gradient is late",
        "predicted: a batch every 6000.000 ms, 5 samples/s, 1.00 times as fast as alone",
    ]


RESOURCES = Resources(num_machines=2, network=DEAR)


# ---- several stages on a machine ----


def test_stages_are_dealt_to_machines_in_turn() -> None:
    plan = make_plan(interleaved, chain(8), RESOURCES)
    assert [stage.machines for stage in plan.stages] == [(0,), (1,), (0,), (1,)]
    assert [len(stage.units) for stage in plan.stages] == [2, 2, 2, 2]
    assert plan.predicted is not None and plan.predicted.batch_s == 12.0  # each machine has four units of 3 s


def test_a_link_carries_what_crosses_it_in_every_round() -> None:
    """Two crossings from machine 0 to 1 and one back, of 10 + 10 bytes: 40 bytes there."""
    plan = make_plan(interleaved, chain(4, size=10), Resources(num_machines=2, network=LinkSpeed(bytes_per_s=2.0)))
    assert pipeline_s(plan, chain(4, parameters=0, size=10), LinkSpeed(bytes_per_s=2.0)) == 40 / 2


def test_a_machine_needs_memory_for_all_its_stages() -> None:
    profile = chain(4, parameters=100)
    plan = make_plan(interleaved, profile, RESOURCES)
    assert memory(plan, profile, Resources(num_machines=2, state_copies=1)) == (207, 207, 207, 207)
    check(plan, profile, Resources(num_machines=2, memory_bytes=414, state_copies=1))
    with pytest.raises(ValueError, match="needs 414 bytes and a machine has 413"):
        check(plan, profile, Resources(num_machines=2, memory_bytes=413, state_copies=1))


@pytest.mark.parametrize("homes", [(0, 1, 1, 0), (0, 1, 0), (0, 0)])
def test_stages_that_are_not_dealt_in_turn_are_refused(homes: tuple[int, ...]) -> None:
    stages = tuple(PlacedStage((home,), (f"u{n}",)) for n, home in enumerate(homes))
    plan = Placement(model="", kind="pipeline", partitioner="me", num_machines=2, stages=stages)
    with pytest.raises(ValueError, match=r"deal the stages of a pipeline to all its machines in turn \(0, 1, 0, 1\)"):
        check(plan, chain(len(homes)))


@pytest.mark.parametrize(
    ("name", "planned_for", "message"),
    [
        ("interleaved", "gpipe", "interleaved requires several stages per machine"),
        (
            "gpipe",
            "interleaved",
            "several stages on a machine, which only the schedule interleaved supports, not gpipe",
        ),
    ],
)
def test_a_schedule_that_does_not_suit_the_plan_is_reported(name: str, planned_for: str, message: str) -> None:
    plan = make_plan(partitioner_for(planned_for), chain(4), RESOURCES)
    with pytest.raises(ValueError, match=message):
        played(name, plan, chain(4), RESOURCES, microbatches=4)


def test_on_one_machine_there_is_nothing_to_deal() -> None:
    alone = Resources(num_machines=1)
    plan = make_plan(interleaved, chain(2), alone)
    assert played("interleaved", plan, chain(2), alone, microbatches=2).batch_s == 6.0


# ---- pictures ----


@st.composite
def graphs(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(1, 12))
    names = [f"u{n}" for n in range(count)]
    values = []
    for number, name in enumerate(names[:-1]):
        readers = draw(st.sets(st.sampled_from(names[number + 1 :]), max_size=3))
        if readers:
            values.append(CutValue(name, name, tuple(sorted(readers, key=names.index)), 1, 1))
    return Profile("", 1, tuple(map(Unit, names)), tuple(values))


@given(graphs())
def test_every_unit_has_a_position_of_its_own_below_what_it_reads(profile: Profile) -> None:
    where = spots(profile)
    assert sorted(where) == sorted(profile.names) and len(set(where.values())) == len(where)
    assert all(where[r].row > where[v.maker].row for v in profile.values for r in v.readers)


def test_branches_stand_beside_each_other_in_an_order_without_crossings() -> None:
    """Two branches whose units are listed crosswise: each stays in its column."""
    names = ["stem", "a1", "b1", "b2", "a2", "join"]
    edges = [("stem", ("a1", "b1")), ("a1", ("a2",)), ("b1", ("b2",)), ("a2", ("join",)), ("b2", ("join",))]
    values = tuple(CutValue(maker, maker, readers, 1, 1) for maker, readers in edges)
    where = spots(Profile("", 1, tuple(map(Unit, names)), values))
    assert where["stem"] == Spot(0.5, 0.0) and where["join"] == Spot(0.5, 3.0)
    assert where["a1"].column == where["a2"].column and where["b1"].column == where["b2"].column


def test_bytes_are_written_short() -> None:
    assert [bytes_text(n) for n in (7, 999, 1500, 262_144, 20_000_000)] == [
        "7 B",
        "999 B",
        "1.5 kB",
        "262 kB",
        "20.0 MB",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_and_its_plan_can_be_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile = chain(4, size=3000)
    plan = make_plan(partitioner_for(name), profile, RESOURCES)
    play = played(name, plan, profile, RESOURCES, microbatches=4)
    assert draw_plan(plan, profile, tmp_path / "plan.svg")
    assert draw_schedule(play.table, play.facts, tmp_path / "schedule.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text() and "<svg" in (tmp_path / "schedule.svg").read_text()


# ---- the command ----


def rainband_plan(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["placement", *words, "--repeats", "1"])
    return result.exit_code, result.output


def test_the_command_compares_all_schedules() -> None:
    code, text = rainband_plan("digits", "--machines", "2", "--schedule", "all", "--microbatches", "4")
    assert code == 0, text
    rows = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert set(SCHEDULES) <= rows


def test_the_command_plans_as_the_schedule_needs_it_and_saves_that(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    code, text = rainband_plan("digits", "--schedule", "interleaved", "--stages-per-worker", "3", "--out", str(file))
    assert code == 0, text
    assert [stage.machines for stage in load(file).stages] == [(0,), (1,)] * 3
    assert "interleaved: 6 stages, 8 microbatches" in text and "no gradient is late" in text
    code, text = rainband_plan("digits", "--placement", str(file), "--schedule", "interleaved", "--json")
    assert msgspec.json.decode(text, type=Placement).stages == load(file).stages


def test_a_model_of_ones_own_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.nn import functional\n"
        "from torch.utils.data import TensorDataset\n"
        "from rainband import ModuleTask\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
        "class Odd(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) if x.sum() > 0 else x\n"
        "def odd_net():\n"
        "    return Odd(4, 4)\n"
        "data = TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long))\n"
        "def mine():\n"
        "    return ModuleTask(net, data, functional.cross_entropy)\n"
        "def odd():\n"
        "    return ModuleTask(odd_net, data, functional.cross_entropy)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, text = rainband_plan("my_own_net:mine", "--draw", "plan.png")
    assert code == 0 and "my_own_net:mine: 3 units" in text and (tmp_path / "plan.png").exists()
    code, text = rainband_plan("my_own_net:odd")
    assert code == 2 and text.startswith("rainband: Odd cannot be cut.")  # and not pages of a tracing tool before it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draw", "plan.jpg"], "a picture is a file that ends in .png, .svg, .pdf, not plan.jpg"),
        (["--draw", "nowhere/plan.png"], "there is no folder nowhere for the picture"),
        (["--schedule", "interleaved", "--microbatches", "7"], r"use --microbatches 8"),
        (
            ["--schedule", "interleaved", "--stages-per-worker", "7"],
            "use fewer machines or fewer stages per worker",
        ),
    ],
)
def test_a_mistake_is_reported_with_what_to_type(words: list[str], message: str) -> None:
    code, text = rainband_plan("digits", *words)
    assert code == 2 and message in text and "Traceback" not in text
