"""Comparisons: what runs have measured, verdicts as a table of cases, the report, and the command."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rainband.cli.main import build_app
from rainband.cli.options.words import configured
from rainband.coordinator.state import Target
from rainband.runtimes.simulation.run import run as simulate
from rainband.tasks.linear import Linear
from rainband.views.compare.judge import Comparison, Entrant, Tuning, contenders_of, overlap, verdict
from rainband.views.compare.measured import FirstReached, MetricPoint, RunMeasures, facts_of, parse_target
from rainband.views.compare.report import report, ticks
from rainband.views.compare.tables import as_record, lines_of
from tests.dashboard_runs import HOSTILE, made_run, written

TARGET = Target("accuracy", 0.9)


def run(
    seconds: float | None = 2.0,
    *,
    final: float = 0.95,
    strategy: str = "sync",
    within_s: float = 0.1,
    samples: int = 1000,
    per_s: float = 500.0,
    state: str = "finished",
    **settings: object,
) -> RunMeasures:
    """Return a run that reached the target after these seconds, or never."""
    reached = None if seconds is None else FirstReached(seconds, samples, samples / 10, within_s)
    curve = [MetricPoint(0.5, 100, 10, 0.5), MetricPoint(4.0, 2000, 200, final)]
    return RunMeasures(
        directory=Path("runs") / strategy,
        task="digits",
        strategy=strategy,
        settings={"lr": 0.1, "optimizer": "sgd", **settings},
        workers=4,
        seed=0,
        state=state,
        metric="accuracy",
        curve=curve,
        reached=reached,
        virtual=False,
        training_s=4.0,
        samples=int(4 * per_s),
        cpu_s=8.0,
        num_bytes=1_000_000,
    )


def several(name: str, *seconds: float | None, **more: object) -> Entrant:
    runs = tuple(run(s, strategy=name, **more) for s in seconds)  # type: ignore[arg-type]
    return Entrant(name, runs)


def verdict_of(*contenders: Entrant, target: Target | None = TARGET) -> str:
    return "\n".join(verdict(Comparison("digits", contenders, target)))


# ---- verdicts ----


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.4), True),
        ((1.0, 1.1, 1.2), (1.15, 2.0, 3.0), False),
        ((1.0, 1.1, 1.2), (1.25, 2.0, 3.0), False),  # its evaluations are 0.1 s apart: it may have been there at 1.15 s
        ((1.0, 1.1, 1.2), (1.35, 2.0, 3.0), True),
        ((1.0,), (1.0,), False),
    ],
)
def test_overlapping_ranges_cannot_be_told_apart(
    first: tuple[float, ...], second: tuple[float, ...], apart: bool
) -> None:
    a, b = several("a", *first), several("b", *second)
    assert overlap(a, b) == overlap(b, a) == (not apart)
    text = verdict_of(b, a)
    assert ("cannot be told apart" in text) == (not apart)
    assert ("b is slower" in text) == apart


def test_the_verdict_explains_the_time_by_samples_and_their_rate() -> None:
    text = verdict_of(several("a", 1.0, per_s=1000.0, samples=1500), several("b", 2.0, per_s=500.0, samples=1000))
    assert "a reached accuracy of at least 0.9 after 1 s in its only run." in text
    assert "2.0 times as long" in text
    assert "2.00 times as many samples per second as b, and needs 1.50 times as many" in text


def test_one_that_missed_the_target_once_is_not_ranked() -> None:
    text = verdict_of(several("a", 0.1, None), several("b", 2.0, 2.1))
    assert text.startswith("b reached accuracy of at least 0.9")
    assert "a did not reach accuracy of at least 0.9 in 1 of 2 runs." in text


def test_nobody_reached_it() -> None:
    assert verdict_of(several("a", None), several("b", None)).startswith(
        "None reached accuracy of at least 0.9 with every seed."
    )


def test_failed_runs_are_counted_and_not_left_out() -> None:
    failed = Entrant("a", (run(1.0), run(None, state="failed")))
    text = verdict_of(failed, several("b", 2.0, 2.0))
    assert "a: 1 of 2 runs did not finish (failed)." in text
    assert text.startswith("b reached")


@pytest.mark.parametrize(
    ("settings", "warns"), [({}, False), ({"lr": 0.2}, True), ({"optimizer": "adam"}, True), ({"n_push": 3}, False)]
)
def test_it_warns_if_more_differs_than_the_strategy(settings: dict[str, object], warns: bool) -> None:
    text = verdict_of(several("a", 1.0), several("b", 2.0, **settings))
    assert ("Careful: optimizers or learning rates differ" in text) == warns


def test_it_warns_of_few_seeds_only() -> None:
    assert "With 3 seeds, only large differences can be seen." in verdict_of(
        several("a", 1, 1, 1), several("b", 2, 2, 2)
    )
    assert "seeds" not in verdict_of(several("a", *[1.0] * 5), several("b", *[2.0] * 5)).splitlines()[-1]


def test_a_spread_within_the_resolution_says_nothing_about_seeds() -> None:
    def with_finals(name: str, *finals: float) -> Entrant:
        return Entrant(name, tuple(run(1.0, final=final) for final in finals))

    grain = 1 / 360
    text = verdict_of(with_finals("a", 0.95, 0.95 + grain), with_finals("b", 0.95, 0.95))
    assert "differ by no more than the resolution of accuracy" in text
    text = verdict_of(with_finals("a", 0.95, 0.95 + 40 * grain), with_finals("b", 0.95, 0.95 + grain))
    assert "accuracy of a differs most, by 0.111, and that of b least, by 0.00278" in text


def test_without_a_target_final_values_are_compared() -> None:
    def finals(name: str, *values: float) -> Entrant:
        return Entrant(name, tuple(run(None, final=value) for value in values))

    assert "a has the best final accuracy" in verdict_of(finals("a", 0.99, 0.98), finals("b", 0.9, 0.91), target=None)
    text = verdict_of(finals("a", 0.99, 0.90), finals("b", 0.95, 0.96), target=None)
    assert "cannot be told apart by their final accuracy" in text


def test_the_cost_of_tuning_counts() -> None:
    tuned = dataclasses.replace(several("a", 1.0), tuning=Tuning((0.01, 0.1), 0.1, 7, 7000, 3.0))
    assert "Tuning took 7 runs and 7,000 samples in addition, and chose a lr=0.1." in verdict_of(
        tuned, several("b", 2.0)
    )


# ---- what runs have measured ----


@pytest.mark.parametrize(
    ("text", "metric", "value", "more"),
    [
        ("accuracy=0.95", "accuracy", 0.95, True),
        ("loss=0.1", "loss", 0.1, False),
        ("val_error=2", "val_error", 2, False),
    ],
)
def test_a_target_is_read_with_its_direction(text: str, metric: str, value: float, more: bool) -> None:
    target = parse_target(text)
    assert (target.metric, target.value, target.is_upper) == (metric, value, not more)
    assert target.is_reached({metric: value}) and target.is_reached({metric: value + 0.01}) == more


@pytest.mark.parametrize("text", ["accuracy", "=0.5", "accuracy=", "accuracy=high", "accuracy=nan"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a metric and a number"):
        parse_target(text)


def test_the_first_evaluation_at_the_target_counts(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", made_run(2, 20, text="accuracy"))  # measured after 5, 10, 15 and 20 s
    facts = facts_of(directory, Target("accuracy", 0.9))
    assert facts.reached == FirstReached(10.0, 10_000, 20.0, 5.0)
    assert [round(point.value, 4) for point in facts.curve] == [0.8333, 0.9091, 0.9375, 0.9524, 0.97]
    assert facts.final == 0.97
    assert facts_of(directory, Target("accuracy", 0.99)).reached is None


def test_the_final_value_is_an_evaluation_too(tmp_path: Path) -> None:
    made = made_run(2, 4, text="x")
    made[-1] = msgspec.structs.replace(made[-1], metrics={"accuracy": 0.97})
    facts = facts_of(written(tmp_path / "run", made), Target("accuracy", 0.96))
    assert facts.reached is not None and facts.reached.samples == 4000
    assert facts.metric == "accuracy" and facts.final == 0.97


def test_runs_that_differ_in_their_seed_only_are_one_contender() -> None:
    runs = [
        run(1.0, strategy="downpour", n_push=1),
        dataclasses.replace(run(1.1, strategy="downpour", n_push=1), seed=1),
        run(2.0, strategy="downpour", n_push=4),
        run(3.0, strategy="sync"),
    ]
    assert [(one.name, len(one.runs)) for one in contenders_of(runs)] == [
        ("downpour n_push=1", 2),
        ("downpour n_push=4", 1),
        ("sync", 1),
    ]


# ---- report and table ----


def test_the_report_needs_nothing_else_and_runs_nothing() -> None:
    comparison = Comparison(HOSTILE, (several(HOSTILE, 1.0, 1.2), several("b", 2.0, None)), TARGET, HOSTILE, (HOSTILE,))
    page = report(comparison)
    assert "<img" not in page and "<script" not in page and "<b>\"'" not in page
    assert re.findall(r"https?:|(?<!&lt;img )src=|href=|url\(|@import", page) == []
    assert "default-src 'none'" in page
    assert page.count("<section") == page.count("</section>") == 6


def test_the_table_has_the_four_judgements() -> None:
    comparison = Comparison("digits", (several("slow", 2.0, 2.2, n_push=1), several("fast", 1.0, 1.2)), TARGET)
    lines = lines_of(comparison)
    head = "time to accuracy of at least 0.9 samples updates final accuracy spread own settings CPU bytes start"
    assert lines[0].split() == head.split()
    assert lines[1].startswith("fast") and "1.1 s (1 s to 1.2 s)" in lines[1]
    assert lines[2].startswith("slow") and "2.1 s (2 s to 2.2 s)" in lines[2]
    record = as_record(comparison)
    assert [one["name"] for one in record["contenders"]] == ["fast", "slow"]
    assert record["contenders"][1]["own_settings"] == ["n_push"]


def test_ticks_are_round() -> None:
    assert ticks(0.0, 8622.0) == [0, 2000, 4000, 6000, 8000]
    assert ticks(0.09, 0.99) == [0.2, 0.4, 0.6, 0.8]
    assert ticks(1.0, 1.0) == [1.0]


# ---- the command ----


class Said:
    def __init__(self, *words: str) -> None:
        result = CliRunner().invoke(build_app(), list(words))
        self.exit_code, self.out, self.err = result.exit_code, result.stdout, result.stderr


QUICK = ("--runtime", "sim", "--epochs", "2", "--seeds", "2", "--workers", "2", "--eval-every", "0.02")


def test_a_comparison_is_trained_once_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("compare", "linear", "downpour", "lr=0.05", "sync", "--target", "loss=90", "--out", "kept", *QUICK)
    first = Said(*words)
    assert first.exit_code == 0, first.err
    assert "0 of 4 runs  downpour lr=0.05, seed 0" in first.err
    runs = sorted(path.name for path in Path("kept/runs").iterdir())
    assert runs == [f"{name}-2-workers-seed{seed}" for name in ("downpour_lr=0.05", "sync") for seed in (0, 1)]
    seeds = {facts_of(path, None).seed for path in Path("kept/runs").iterdir()}
    assert seeds == {0, 1}
    page = Path("kept/report.html").read_text()
    assert "downpour lr=0.05" in page
    events_file = Path("kept/runs/sync-2-workers-seed1/events.jsonl")
    lines = events_file.read_bytes().splitlines(keepends=True)
    events_file.write_bytes(b"".join(lines[:-1]))  # as if it had been killed
    stamps = {path: path.stat().st_mtime_ns for path in Path("kept/runs").glob("*/events.jsonl")}
    again = Said(*words)
    assert again.out.partition("report")[0] == first.out.partition("report")[0]
    changed = [path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp]
    assert changed == [events_file]
    other = Said(*words[:-2], "--eval-every", "0.5")
    assert other.exit_code == 2 and "another comparison (eval every s 0.02, not 0.5)" in other.err
    other = Said(*(word.replace("loss=90", "loss=91") for word in words))
    assert other.exit_code == 2 and "(target loss=90, not loss=91)" in other.err
    assert "rainband compare kept/runs/* --target" in other.err
    assert Said(*words, "--workers", "3").exit_code == 0
    workers = [facts_of(path, None).workers for path in Path("kept/runs").glob("*-3-workers-*")]
    assert workers == [3] * 4
    file = Path("kept/runs/sync-2-workers-seed0/config.json")
    file.write_text(file.read_text().replace('"num_workers": 2', '"num_workers": 7'))
    changed_by_hand = Said(*words)
    assert changed_by_hand.exit_code == 2 and "with other options (num_workers 7, not 2)" in changed_by_hand.err


def test_a_target_that_the_task_does_not_measure_is_refused_after_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("compare", "linear", "downpour", "--out", "kept", *QUICK)
    said = Said(*words, "--target", "nosuch=1")
    assert said.exit_code == 2 and "--target nosuch: the runs have not measured it; choose from" in said.err
    assert len(list(Path("kept/runs").iterdir())) == 1
    said = Said("compare", *map(str, Path("kept/runs").iterdir()), "last", "--runs", "kept/runs")
    assert said.exit_code == 2 and "the same run is given twice" in said.err
    assert Said(*words, "--target", "loss=90").exit_code == 0  # corrected


BROKEN = """
from rainband.tasks.linear import Linear

class Broken(Linear):
    def data(self):
        raise RuntimeError("no data here")
"""


def test_a_task_that_raises_is_a_row_and_is_trained_again_when_it_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f30_broken.py").write_text(BROKEN)
    words = ("compare", "f30_broken:Broken", "downpour", "sync", "--out", "kept", *QUICK)
    said = Said(*words)
    assert said.exit_code == 1
    for name in ("downpour", "sync"):
        assert f"{name}: 2 of 2 runs did not finish (failed). RuntimeError: no data here." in said.out
    assert Path("kept/report.html").is_file()
    sys.modules["f30_broken"].Broken.data = Linear.data
    assert Said(*words).exit_code == 0


class Interrupted(Linear):
    """A task during whose 20th gradient the user presses Ctrl-C."""

    gradients = 0

    def loss(self, *given: Any) -> Any:
        self.gradients += 1
        if self.gradients == 20:
            signal.raise_signal(signal.SIGINT)
        return super().loss(*given)


@pytest.mark.parametrize("strategy", ["sync", "downpour"])
def test_ctrl_c_during_a_gradient_stops_a_simulation_in_order(strategy: str, tmp_path: Path) -> None:
    config = configured(["linear", strategy], {"runtime": "sim", "workers": 2, "epochs": 50})
    config = msgspec.structs.replace(config, directory=str(tmp_path))
    task, before = Interrupted(), signal.getsignal(signal.SIGINT)
    result = simulate(config, lambda event: None, task=task)
    assert (result.outcome, result.exit_code) == ("stopped", 130)
    assert 20 <= task.gradients < 40
    assert signal.getsignal(signal.SIGINT) is before


def test_times_of_real_and_simulated_runs_are_not_compared() -> None:
    simulated = Entrant("b", tuple(dataclasses.replace(one, virtual=True) for one in several("b", 1.0, 1.1).runs))
    text = verdict_of(several("a", 2.0, 2.1), simulated)
    assert text.startswith("a and b have reached accuracy of at least 0.9 with every seed.")
    assert "times are not compared" in text and "slower" not in text and "Why" not in text
    assert [one.name for one in Comparison("t", (several("a", 2.0), simulated), TARGET).ranked()] == ["a", "b"]


def test_one_contender_differs_from_no_other() -> None:
    runs = tuple(run(1.0, final=final) for final in (0.91, 0.92, 0.99))
    assert "the final accuracy of a differs by 0.08" in verdict_of(Entrant("a", runs))


def test_tuning_tries_the_stated_grid_and_trains_with_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = Said("compare", "linear", "downpour", "--tune", "--out", "kept", *QUICK, "--epochs", "8")
    assert said.exit_code == 0, said.err
    rates = {re.search(r"lr=([\d.]+)-", path.name)[1] for path in Path("kept/runs").iterdir()}  # type: ignore[index]
    assert len(rates) == 5
    assert "Tuning took 7 runs" in said.out and "5 lrs tried" in said.out
    assert "tuned on 0.1, 0.3, 1, 3, 10 times the default" in Path("kept/report.html").read_text()


def test_existing_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        written(tmp_path / "runs" / name, made_run(2, 20, text="accuracy"))
    said = Said("compare", "a", "b", "--target", "accuracy=0.9", "--out", "kept")
    assert said.exit_code == 0, said.err
    assert "accuracy" in said.out and Path("kept/report.html").is_file()
    in_json = Said("compare", "a", "b", "--json")
    assert msgspec.json.decode(in_json.out)["target"] is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("linear",), "strategies are required"),
        (("nothing",), "alone cannot be compared"),
        (("linear", "lr=1", "sync"), "settings follow the strategy"),
        (("linear", "sync", "--workers", "0,2"), "give numbers from 1 on"),
        (("linear", "sync", "--target", "high"), "give a metric and a number"),
        (("linear", "sinc"), "sync"),
        (("nothing", "last"), "no runs in"),
        (("tests.dashboard_runs:nope", "sync"), "has no 'nope'"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = Said("compare", *words)
    assert said.exit_code == 2 and text in said.err
    assert list(tmp_path.iterdir()) == []
