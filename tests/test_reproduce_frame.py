"""The frame of the reproductions: verdicts from known numbers, points that are kept, and the page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce import __main__ as command
from reproduce import page
from reproduce.claim import FAILS, HOLDS, UNDECIDED, Check, Claim, Interval, Method, Results, verdict_of
from reproduce.points import FIRST_SEED, Store, complete_seeds, measure

NAMES = page.names()


def squared(seed: int, x: float, task: str, base: float, rate: float = 0.0) -> dict[str, float]:
    """The error of method `base` is base + x + seed / 10 + (rate - 3) squared: least at a rate of 3."""
    return {"error": base + x + (seed % 100) / 10 + (rate - 3) ** 2}


def worse(other: str, than: str, x: float = 1.0, **how: Any) -> Check:
    return Check(f"{other} > {than}", lambda r: r(other, "error", x) - r(than, "error", x), above=0.0, **how)


CLAIM = Claim(
    paper="Nobel et al. 1901",
    text="b is worse than a",
    methods=(Method("a", {"base": 1.0}), Method("b", {"base": 2.0})),
    point=squared,
    x=(0.0, 1.0),
    checks=(worse("b", "a", control=True),),
    shown={"error": "error, %"},
)
RATES = [{"rate": rate} for rate in (0.0, 2.0, 3.0, 7.0)]
TUNED = replace(CLAIM, methods=(Method("a", {"base": 1.0}, RATES), Method("b", {"base": 2.0}, RATES)), tuned_by="error")


def measured(claim: Claim, folder: Path, seeds: int = 3, jobs: int = 1) -> page.Found:
    store = Store(folder / "claim.jsonl")
    list(measure(claim, store, seeds, jobs))
    return page.found(claim, store)


# ---- verdicts ----


@pytest.mark.parametrize(
    "values, mean, half",
    [
        ([1.0, 2.0, 3.0], 2.0, 4.303 / math.sqrt(3)),  # Student's t with two degrees of freedom; deviation 1
        ([5.0, 5.0, 5.0], 5.0, 0.0),
        ([1e-17, 0.0], 5e-18, 12.706 * 5e-18),
        ([math.inf, math.inf], math.inf, 0.0),
    ],
)
def test_an_interval_is_the_mean_and_student_s_t(values: list[float], mean: float, half: float) -> None:
    found = Interval.of(values)
    assert found.mean == pytest.approx(mean) and found.half == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize(
    "values, above, below",
    [
        ([1.0, 1.1, 0.9], HOLDS, FAILS),
        ([-1.0, -1.1, -0.9], FAILS, HOLDS),
        ([1.0, -1.0, 0.5], UNDECIDED, UNDECIDED),
        ([0.0, 0.0], FAILS, FAILS),  # neither above nor below 0
        ([math.inf, math.inf], HOLDS, FAILS),
        ([math.inf, 1.0], UNDECIDED, UNDECIDED),  # one seed never reached it
        ([math.nan, 1.0], UNDECIDED, UNDECIDED),
        ([], UNDECIDED, UNDECIDED),
    ],
)
def test_a_check_holds_if_its_whole_interval_is_on_the_right_side(
    values: Sequence[float], above: str, below: str
) -> None:
    for check, verdict in (
        (Check("", lambda r: values, above=0.0), above),
        (Check("", lambda r: values, below=0.0), below),
    ):
        assert check.verdict(check.interval(Results({}))) == verdict


def test_one_check_refutes_and_all_must_hold() -> None:
    assert verdict_of([HOLDS, HOLDS]) == HOLDS
    assert verdict_of([HOLDS, UNDECIDED]) == UNDECIDED
    assert verdict_of([HOLDS, UNDECIDED, FAILS]) == FAILS
    assert verdict_of([]) == UNDECIDED


def test_a_claim_is_decided_from_differences_seed_by_seed(tmp_path: Path) -> None:
    """Errors spread by 0.1 from seed to seed, but b - a is 1 in each: the interval has no width."""
    it = measured(CLAIM, tmp_path)
    ((_, _, interval, verdict),) = it.checks
    assert (it.seeds, it.verdict, verdict) == (3, HOLDS, HOLDS)
    assert (interval.mean, interval.half) == (pytest.approx(1.0), 0.0)


def test_a_control_that_refutes_gives_does_not_hold(tmp_path: Path) -> None:
    checks = (worse("b", "a"), worse("a", "b", control=True))
    it = measured(replace(CLAIM, checks=checks), tmp_path)
    assert [verdict for *_, verdict in it.checks] == [HOLDS, FAILS] and it.verdict == FAILS


def test_one_seed_decides_nothing_unless_there_is_no_randomness(tmp_path: Path) -> None:
    assert measured(CLAIM, tmp_path, seeds=1).verdict == UNDECIDED
    assert measured(replace(CLAIM, repeated=False), tmp_path, seeds=8).seeds == 1
    assert measured(replace(CLAIM, repeated=False), tmp_path).verdict == HOLDS


@pytest.mark.parametrize(
    "change, message",
    [
        ({"checks": (worse("b", "a"),)}, "control"),
        ({"methods": (TUNED.methods[0], Method("b", {"base": 2.0}, RATES[:2])), "tuned_by": "error"}, "same effort"),
        ({"methods": TUNED.methods}, "tuned_by"),
        ({"methods": (CLAIM.methods[0], CLAIM.methods[0])}, "name of its own"),
    ],
)
def test_a_claim_without_a_control_or_with_unequal_tuning_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CLAIM, **change)


# ---- points ----


def test_each_method_is_tuned_on_other_seeds_than_those_that_decide(tmp_path: Path) -> None:
    it = measured(TUNED, tmp_path, seeds=2)
    assert list(it.results["digits"]("a", "error", 0.0)) == pytest.approx([1.0, 1.1])  # at the rate of 3
    lines = [json.loads(line) for line in (tmp_path / "claim.jsonl").read_text().splitlines()][1:]
    tuning = [line for line in lines if line["seed"] < FIRST_SEED]
    assert len(tuning) == 2 * 2 * len(RATES) * 2  # methods, x, rates, seeds
    assert {line["seed"] for line in lines} == {1, 2, FIRST_SEED, FIRST_SEED + 1}


def test_a_rate_that_is_chosen_at_one_x_is_used_for_all(tmp_path: Path) -> None:
    methods = [replace(method, tuned_at=1.0) for method in TUNED.methods]
    measured(replace(TUNED, methods=methods), tmp_path, seeds=2)
    lines = [json.loads(line) for line in (tmp_path / "claim.jsonl").read_text().splitlines()][1:]
    assert sum(line["seed"] < FIRST_SEED for line in lines) == 2 * len(RATES) * 2


@pytest.mark.parametrize("after", [1, 9, 33, 40])  # of 32 tuning points and 12 others
def test_what_was_interrupted_and_resumed_equals_what_was_not(tmp_path: Path, after: int) -> None:
    whole, path = tmp_path / "whole", tmp_path / "claim.jsonl"
    expected = measured(TUNED, whole)
    for _, (done, _) in zip(range(after), measure(TUNED, Store(path), 3, 1), strict=False):
        assert done <= after
    path.write_text(path.read_text() + '{"method": "a", "x": 0.0, "val')  # killed while it wrote
    assert len(complete_seeds(TUNED, Store(path))) < 3
    again = list(measure(TUNED, Store(path), 3, 1))
    assert again[-1] == (44 - after, 44 - after)
    found = page.found(TUNED, Store(path))
    assert found.checks == expected.checks and found.seeds == 3
    assert len(path.read_text().splitlines()) == len((whole / "claim.jsonl").read_text().splitlines())
    assert list(measure(TUNED, Store(path), 3, 1)) == []


def test_more_seeds_use_those_that_are_finished_and_other_settings_do_not(tmp_path: Path) -> None:
    store = Store(tmp_path / "claim.jsonl")
    assert list(measure(CLAIM, store, 2, 1))[-1] == (8, 8)
    assert list(measure(CLAIM, store, 5, 1))[-1] == (12, 12)
    changed = replace(CLAIM, settings={"rate": 1.0})
    assert complete_seeds(changed, store) == []
    assert list(measure(changed, store, 2, 1))[-1] == (8, 8)
    assert Store(store.path, resume=False).values == {} and not store.path.exists()


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_measure_what_one_does(tmp_path: Path) -> None:
    claim = replace(page.load("same_bubble"), x=(0.0,))
    one, two = (Store(tmp_path / f"{jobs}.jsonl") for jobs in (1, 2))
    assert list(measure(claim, one, 8, jobs=1)) == list(measure(claim, two, 8, jobs=2)) == [(1, 2), (2, 2)]
    assert one.values == two.values


# ---- the command and the page ----


@pytest.fixture
def claim_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "names", lambda: ["c"])
    monkeypatch.setattr(page, "load", lambda name: CLAIM)


@pytest.mark.usefixtures("claim_c")
def test_the_command_prints_the_verdict_and_keeps_points_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = page.written()
    assert command.main(["c", "--seeds", "2", "--jobs", "1", "--results", str(tmp_path)]) == 0
    assert "verdict  holds (2 seeds)" in capsys.readouterr().out
    assert (tmp_path / "c.jsonl").exists() and (tmp_path / "c.png").exists()
    assert page.written() == written  # results elsewhere leave the page alone


@pytest.mark.usefixtures("claim_c")
@pytest.mark.parametrize("words", [["no_such"], [], ["c", "--seeds", "1"], ["c", "--jobs", "0"]])
def test_what_cannot_be_run_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(words)
    assert "c" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_names_its_paper_and_is_on_the_page(name: str) -> None:
    claim = page.load(name)
    assert claim.part in page.PARTS and claim.how in ("simulation", "processes", "computation")
    assert f"\n### {name}\n" in page.written() and claim.shown
    assert any(char.isdigit() for char in claim.paper)


def test_the_page_is_that_of_the_results() -> None:
    assert page.written() == page.page().strip(), "python -m reproduce --page"


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_that_is_measured_and_does_not_hold_says_why(name: str) -> None:
    claim, store = page.load(name), Store(page.RESULTS / f"{name}.jsonl")
    it = page.found(claim, store)
    if it.seeds and it.verdict != HOLDS:
        assert 1 <= claim.why.count(". ") + claim.why.endswith(".") <= 3
