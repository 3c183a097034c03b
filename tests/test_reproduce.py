"""The scripts about consistency: each is told in the docs, says what it claims, and the quickest of them holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs" / "consistency.md").read_text(encoding="utf-8").split("| script | claim |")[1]
SCRIPTS = [ROOT / "reproduce" / f"{name}.py" for name in re.findall(r"^\| `(\w+)`", TABLE, re.MULTILINE)]


def test_the_page_about_consistency_lists_scripts_that_are_there() -> None:
    assert SCRIPTS and all(path.exists() for path in SCRIPTS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_names_its_paper_and_prints_its_number_next_to_the_claim(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert re.search(r"\(\w+ et al\. \d{4}", ast.get_docstring(tree) or "")
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert {"arguments", "report", "draw"} <= called


def test_mean_staleness_is_as_claimed_and_its_tail_is_that_of_the_machines() -> None:
    """With thirty workers and updates of ten gradients: 29 / 10 in the mean."""
    from reproduce.mean_staleness import KINDS, measure

    alike, exponential = (measure(3, compute, steps=120) for compute in KINDS.values())
    assert alike[0] == pytest.approx(2.9, rel=0.03) and exponential[0] == pytest.approx(2.9, rel=0.06)
    assert alike[1] == 0.0 and exponential[1] > 5
