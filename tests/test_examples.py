"""The examples run, alone and in a run, on a tiny budget; and they stay short."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN_BY_THEMSELVES = ("physics_informed", "split_model", "wrap_a_dataset")  # these start runs of their own
SCRIPTS = [path for path in EXAMPLES if path.stem not in RUN_BY_THEMSELVES]

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def test_there_is_an_example_for_pictures_text_tables_equations_and_large_models() -> None:
    examples = ["char_lm", "image_classifier", "physics_informed", "split_model", "table_regression", "wrap_a_dataset"]
    assert [path.stem for path in EXAMPLES] == examples


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_under_a_hundred_lines(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 100


@each_script
def test_a_script_started_without_a_run_trains_alone(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--tiny"])
    runpy.run_path(str(script), run_name="__main__")
    assert WHAT_IT_PRINTS[script.stem] in capsys.readouterr().out


# 320 images, or 312 windows of text, in batches of 32, once; a loader of one's own has no batches of the run's.
BATCHES = {"image_classifier": 10, "char_lm": 10, "table_regression": 0}
WHAT_IT_PRINTS = {"image_classifier": "accuracy", "char_lm": "'The ", "table_regression": "% of the variance"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_in_two_workers_and_the_accounting_balances(script: Path, tmp_path: Path) -> None:
    result = last_json(rainband_run("--json", str(script), "--tiny", cwd=tmp_path))
    assert result["outcome"] == "finished"
    accounting = result["accounting"]
    assert accounting["batches"] == accounting["applied"] == BATCHES[script.stem]
    assert (accounting["lost"], accounting["applied_twice"]) == (0, 0)
    assert (tmp_path / result["directory"] / "model.safetensors").is_file()


@pytest.mark.processes
def test_a_module_and_a_dataset_are_trained_with_one_call(tmp_path: Path) -> None:
    script = ROOT / "examples" / "wrap_a_dataset.py"
    done = run([sys.executable, str(script), "--tiny"], tmp_path)
    assert "45 of 45 batches applied, 0 lost, 0 applied twice" in done.stdout  # 1,437 samples in batches of 32
    assert "accuracy 0." in done.stdout


@pytest.mark.processes
@pytest.mark.slow
def test_an_equation_is_solved_by_one_call_and_its_plot_drawn(tmp_path: Path) -> None:
    done = run([sys.executable, str(ROOT / "examples" / "physics_informed.py"), "--tiny"], tmp_path)
    assert "L-BFGS: 5 iterations" in done.stdout and " 0 applied twice" in done.stdout
    assert (tmp_path / "physics_informed.png").is_file()


@pytest.mark.processes
@pytest.mark.slow
def test_a_model_is_trained_of_which_no_process_holds_all(tmp_path: Path) -> None:
    done = run([sys.executable, str(ROOT / "examples" / "split_model.py"), "--tiny"], tmp_path)
    assert "2 of 2 applied, 0 lost, 0 applied twice" in done.stdout
    measured = [line for line in done.stdout.splitlines() if " MB, at most " in line]
    assert [line.partition(":")[0] for line in measured] == [
        *(f"rainband server {n}" for n in range(2)),
        *(f"rainband worker {n}" for n in range(2)),
    ]


def rainband_run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from rainband.cli.main import main; main()"]
    return run([*program, "run", "--workers", "2", *words], cwd)


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
