"""The scripts about data parallelism and full batches: each is in the docs, names its claim, and the quickest hold."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import pytest

from reproduce.runs import Done, mean_and_spread

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "results" / "reproductions.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Model parallelism")[0]
SCRIPTS = [ROOT / "reproduce" / f"{name}.py" for name in re.findall(r"^\| `(\w+)`", TABLE, re.MULTILINE)]


def test_the_page_lists_scripts_that_exist() -> None:
    assert SCRIPTS and all(path.exists() for path in SCRIPTS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_names_its_paper_and_prints_its_number_next_to_the_claim(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert re.search(r"\(\w+ et al\. \d{4}", ast.get_docstring(tree) or "")
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert {"arguments", "report"} <= called and called & {"draw", "draw_panels"}


def test_mean_staleness_is_as_claimed_and_its_tail_is_that_of_the_machines() -> None:
    """With thirty workers and updates of ten gradients: mean 29 / 10."""
    from reproduce.mean_staleness import KINDS, measure

    alike, exponential = (measure(3, compute, steps=120) for compute in KINDS.values())
    assert alike[0] == pytest.approx(2.9, rel=0.03) and exponential[0] == pytest.approx(2.9, rel=0.06)
    assert alike[1] == 0.0 and exponential[1] > 5


@pytest.mark.slow
def test_asynchrony_of_four_is_a_momentum_of_three_quarters_with_a_quarter_of_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few runs, so that it is quick: the script fits 0.750 ± 0.003 to many."""
    from reproduce import asynchrony_is_momentum

    monkeypatch.setattr(asynchrony_is_momentum, "RUNS_PER_SEED", 40)
    momentum, share = asynchrony_is_momentum.fitted(groups=4, seed=0)
    assert momentum == pytest.approx(0.75, abs=0.04) and share == pytest.approx(0.25, abs=0.05)


def test_what_a_run_took_to_a_loss_is_read_from_what_it_showed() -> None:
    result: Any = None  # not looked at
    done = Done(result, [(1.0, 2.0), (2.0, 0.5), (3.0, 0.4)], 0.0, [], [(1.0, 10), (2.0, 30), (3.0, 40)])
    assert (done.seconds_to(1.0), done.samples_to(1.0)) == (2.0, 30)
    assert done.seconds_to(0.1) is None and done.samples_to(0.1) is None


def test_of_what_one_seed_never_reached_there_is_no_mean() -> None:
    assert mean_and_spread([1.0, 3.0]) == (2.0, 1.0)
    assert mean_and_spread([1.0, math.inf]) == (math.inf, 0.0)


def test_the_tables_of_the_default_are_those_of_its_results() -> None:
    from reproduce.default import __main__ as default

    for path, text in default.tables().items():
        assert default.written(path) == text, f"{path.name}: python -m reproduce.default --table"


def test_the_readme_has_the_results_of_the_page() -> None:
    from reproduce.default import __main__ as default

    both = default.PAGE, default.README
    page, short = ([row.split(" | ") for row in default.written(path).splitlines()] for path in both)
    rows = [row for row in page if len(row) > 5][1:]
    assert len(rows) == len(default.LOOPS) == len(short) - 2
    for own, row in zip(short[2:], rows, strict=True):
        assert own[1] == row[1]
        assert all(long.startswith(value.rstrip(" |")) for value, long in zip(own[2:], row[2:5], strict=True))
