"""The command line: what is checked before anything starts, what is said, which exit code is given."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rainband.advice import missed_updates
from rainband.bench.harness.rows import Row, at_most
from rainband.cli import doctor as doctor_file
from rainband.cli.bench import as_table
from rainband.cli.doctor import Finding
from rainband.cli.main import COMMANDS, build_app
from rainband.cli.options.words import configured
from rainband.codecs.find import codec_names
from rainband.collectives.algorithm import algorithm_names
from rainband.options import RunOptions
from rainband.plugins import load_strategy, strategy_names, typed_name
from rainband.protocol import events
from rainband.protocol.optimizer_spec import BUILT_IN, TAKERS
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes.launcher import RunResult
from rainband.runtimes.run_directory import write_config
from rainband.settings import fields_of
from rainband.tasks.load import load_task, task_names
from rainband.tasks.source import read_task
from rainband.views.history import read_run
from rainband.views.runs_text import listed
from tests.synthetic_runs import a_config, ended, started, whole_run, write_run

ROOT = Path(__file__).parent.parent


class Said:
    """The output and exit code of a command."""

    def __init__(self, *words: str | Path) -> None:
        result = CliRunner().invoke(build_app(), list(map(str, words)), prog_name="rainband")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.exit_code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")


# ---- help and completion ----


def test_help_lists_the_commands_and_the_exit_codes() -> None:
    said = Said("--help")
    assert said.exit_code == 0
    for word in ("train", "explain", "runs", "export", "doctor", "75 ", "130 "):
        assert word in said.out


def test_help_comes_without_torch_numpy_or_rich() -> None:
    script = """
import sys
from rainband.cli.main import build_app
try:
    build_app()(["--help"], prog_name="rainband")
except SystemExit:
    pass
slow = {"torch", "numpy", "rich", "asyncio", "sqlite3", "msgspec"} & set(sys.modules)
sys.exit(f"imported for --help: {slow}" if slow else 0)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_settings_are_checked_and_strategies_explained_without_torch() -> None:
    script = """
import sys
from rainband.cli.main import build_app
for words in (["train", "digits", "downpour", "npush=3"], ["train", "digits", "downpour", "task.epochs=x"],
              ["train", "digits", "downpour", "momentum=0.9"], ["explain"], ["explain", "digits"],
              ["explain", "ring"], ["runs"]):
    try:
        build_app()(words, prog_name="rainband")
    except SystemExit:
        pass
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_the_version_is_said() -> None:
    assert Said("--version").out == "rainband 0.1.0\n"


def test_a_command_whose_file_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rainband.cli.main.COMMANDS", (*COMMANDS, "not_written_yet"))
    assert Said("--version").exit_code == 0


def completed(words: str) -> list[str]:
    asked = {
        "_RAINBAND_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    return CliRunner().invoke(build_app(), [], env=asked, prog_name="rainband").stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("rainband train quad", ["quadratic"]),
        ("rainband train digits down", ["downpour"]),
        ("rainband train digits downpour n_", ["n_push=", "n_fetch="]),
        ("rainband explain si", ["single", "single_master", "sign", "significant"]),
        ("rainband explain halv", ["halving_doubling"]),
        ("rainband runs show 2026", ["20261116-run"]),
    ],
)
def test_the_shell_completes_names(words: str, offered: list[str], tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "20261116-run", [started()])
    assert completed(words) == offered


# ---- from words to a configuration ----


def config_of(*words: str, config: Path | None = None, **given: object) -> RunConfig:
    return configured(words, RunOptions(config=config, **given))  # type: ignore[typeddict-item]


def test_settings_of_the_strategy_and_of_the_task_are_distinguished() -> None:
    made = config_of("quadratic", "downpour", "n_push=4", "task.samples=64", "lr=0.5")
    assert (made.task, made.strategy, made.task_settings) == ("quadratic", "downpour", {"samples": "64"})
    assert (made.strategy_settings["n_push"], made.strategy_settings["lr"]) == (4, 0.5)


def test_a_task_alone_is_trained_with_sync() -> None:
    for words in (("digits",), ("digits", "lr=0.5")):
        made = config_of(*words)
        assert (made.strategy, made.strategy_settings["batch_per_worker"], made.num_servers) == ("sync", False, 0)
    assert made.strategy_settings["lr"] == 0.5


def test_every_setting_is_written_down_so_that_later_defaults_do_not_matter() -> None:
    settings = config_of("digits", "downpour").strategy_settings
    assert settings["optimizer"] == "adagrad" and settings["local_lr"] is None


def test_four_workers_and_two_servers_are_the_default_and_a_strategy_without_servers_is_alone() -> None:
    pairs = [config_of("digits", strategy) for strategy in ("downpour", "sync", "single")]
    assert [(made.num_workers, made.num_servers) for made in pairs] == [(4, 2), (4, 0), (1, 0)]
    asked = config_of("digits", "downpour", workers=3, servers=1, seed=7)
    assert (asked.num_workers, asked.num_servers, asked.seed) == (3, 1, 7)


@pytest.mark.parametrize(
    ("words", "given", "complaint"),
    [
        ((), {}, "a task is required, such as rainband train digits downpour"),
        (("downpour",), {}, "Strategies: .*downpour"),
        (("lr=3",), {}, "a task is required"),
        (("downpour", "digits"), {}, "the task comes first: type rainband train digits downpour."),
        (("digits", "quadratic"), {}, "quadratic is a task, not a strategy"),
        (("digitz", "sync"), {}, r"no task named 'digitz' \(did you mean digits\?\)"),
        (("digits", "downpuor"), {}, r"no strategy named 'downpuor' \(did you mean downpour\?\)"),
        (("digits", "downpour", "npush=4"), {}, r"no setting 'npush' \(did you mean n_push\?\)"),
        (("digits", "downpour", "n_push=two"), {}, "n_push=two: expected a whole number"),
        (("digits", "downpour", "n_push=0"), {}, "n_push=0: choose from 1 to 64"),
        (("digits", "downpour", "n_push"), {}, "'n_push' is not a setting: write name=value"),
        (("digits", "downpour", "lr=1", "lr=2"), {}, "lr is set twice"),
        (("digits", "downpour", "optimizer=adagrade"), {}, "no optimizer named 'adagrade'"),
        (("digits", "downpour", "momentum=0.9"), {}, "adagrad has no momentum, it takes lr and weight_decay"),
        (("digits", "single", "optimizer=adagrad", "momentum=0.9"), {}, "optimizer=rmsprop or sgd"),
        (("digits", "downpour", "lr=-1"), {}, "lr=-1.0: choose a finite number, 0 or more"),
        (("digits", "sync", "task.epochs=two"), {}, "task.epochs=two: expected a whole number, such as task.epochs=4"),
        (
            ("digits", "sync", "task.epoch=2"),
            {},
            r"the task digits has no setting 'epoch' \(did you mean epochs\?\)",
        ),
        (
            ("nowhere.at_all:Task", "sync"),
            {},
            r"neither installed nor in .*\. Run the command in the folder that contains nowhere/at_all.py.$",
        ),
        (("mine.py:Task", "sync"), {}, "Omit the ending: mine:Task."),
        (("digits", "json:JSONDecoder"), {}, "json:JSONDecoder is not a strategy"),
        (
            ("digits", "downpour"),
            {"servers": 0},
            "servers=0: downpour requires servers, which hold the parameters, so use servers=1 or more",
        ),
        (
            ("digits", "single"),
            {"workers": 2},
            "^single runs in one process: omit workers=2, or choose .*, such as downpour.$",
        ),
        (
            ("digits", "hogwild"),
            {"servers": 3},
            "^hogwild has no servers: omit servers=3, or choose .* such as downpour.$",
        ),
        (
            ("digits", "downpour", "optimizer=torch.optim:Adafactor"),
            {},
            "^Adafactor cannot run block by block .*row_var",
        ),
        (
            ("digits", "downpour", "optimizer=torch.optim:LBFGS"),
            {},
            "LBFGS cannot run block by block .* needs a closure",
        ),
        (
            ("digits", "downpour", "optimizer=torch.optim:Muon"),
            {},
            "Muon cannot run block by block .* Use an element-wise",
        ),
        (
            ("digits", "single", "optimizer=torch.optim:LBFGS"),
            {},
            "LBFGS cannot run with single: its step needs a clos",
        ),
        (("digits", "sync", "optimizer=nowhere:Lion"), {}, "optimizer 'nowhere:Lion' cannot be imported"),
        (
            ("digits", "sandblaster"),
            {"runtime": "sim", "time_only": True},
            "computes no loss, and sandblaster needs it",
        ),
        (("digits", "sync"), {"workers": 100_000}, "would only wait for each other. Use at most"),
        (("digits", "sync"), {"transport": "pigeon"}, 'transport="pigeon": choose from auto, tcp, shm'),
        (("digits", "sync", "warmup=0.1"), {}, r"no setting 'warmup' \(it is now warmup_fraction\)"),
        (("digits", "sandblaster", "batch=0.1"), {}, r"no setting 'batch' \(it is now data_fraction\)"),
        (("digits", "sync", "warmup_fraction=2"), {}, "warmup_fraction=2.0: give a fraction from 0 to below 1"),
        (("digits", "bounded_delay", "tau=-1"), {}, r"^tau=-1: choose 0 \(lock-step\) or more.$"),
        (("digits", "sync", "compute.stp=1"), {}, "^compute has no setting 'stp'"),
        (("digits", "sync", "compute.step_s=-1"), {}, "^compute.step_s=-1.0: choose 0 or more.$"),
        (("digits", "sync", "compute.step_s=x"), {}, "^compute.step_s=x: expected a number"),
        (("digits", "sync"), {"seed": 10**23}, "seed=1" + "0" * 23 + ": must be at most 4294967295"),
        (("digits", "hogwild"), {"transport": "tcp"}, 'transport="tcp": hogwild has no servers .* so omit it'),
        (("digits", "single"), {"transport": "shm"}, 'transport="shm": single has no servers .* so omit it'),
        (("digits", "downpour"), {"transport": "shm", "runtime": "sim"}, 'transport="shm": a simulation has only'),
        (
            ("digits", "sync"),
            {"runtime": "sim", "time_only": True, "eval_every_s": 3.0},
            "eval_every_s: with time_only=True, nothing is evaluated",
        ),
        (
            ("digits", "sync"),
            {"runtime": "sim", "time_only": True, "steps": 3, "epochs": 2},
            "steps and epochs both set the length of the run: omit one of them",
        ),
        (("digits", "sync", "task.batch_size=3"), {"batch_size": 4}, "task.batch_size=3 and batch_size=4: omit one"),
        (
            ("digits", "sync"),
            {"runtime": "sim", "faults": "nofile"},
            'faults="nofile": cannot read it .* one fault per',
        ),
        (("digits", "sync"), {"placement": "nope.json"}, 'placement="nope.json": cannot read it .* rainband placement'),
    ],
)
def test_a_mistake_is_reported_with_what_would_be_right(
    words: tuple[str, ...], given: Mapping[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        config_of(*words, **given)


def test_every_built_in_task_is_known_by_its_fields() -> None:
    for task in task_names():
        with pytest.raises(ValueError, match="no setting 'never': it has"):
            config_of(task, "sync", "task.never=1")


def test_a_run_is_done_again_from_its_configuration_with_what_is_given_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [], a_config(seed=5, strategy_settings={"lr": 0.25}))
    again = config_of(config=run / "config.json")
    assert (again.task, again.strategy, again.seed, again.num_workers) == ("digits", "downpour", 5, 2)
    assert again.strategy_settings["lr"] == 0.25
    changed = config_of("lr=0.5", "task.epochs=2", config=run, seed=6)
    assert (changed.strategy_settings["lr"], changed.task_settings, changed.seed) == (0.5, {"epochs": "2"}, 6)


def test_the_configuration_of_a_script_is_for_rainband_run(tmp_path: Path) -> None:
    script = a_config(script="/home/me/train.py", arguments=["--lr", "0.1"], strategy_settings={"n_push": 2})
    run = write_run(tmp_path / "r", [started()], script)
    command = "rainband run --workers 2 --servers 1 --strategy downpour --seed 0 n_push=2 /home/me/train.py --lr 0.1"
    with pytest.raises(ValueError, match=f"is that of a script: type {command}"):
        config_of(config=run)
    assert command in " ".join(Said("runs", "show", run).out.split())


def test_a_configuration_and_a_task_together_are_a_mistake(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [])
    with pytest.raises(ValueError, match="already has a task and a strategy: omit digits"):
        config_of("digits", config=run)


def test_a_configuration_that_cannot_be_read_is_reported_before_all_else() -> None:
    with pytest.raises(ValueError, match="^cannot read nope.json: No such file"):
        config_of("digits", "downpour", config=Path("nope.json"))


def test_an_optimizer_in_the_current_folder_is_tried(tmp_path: Path) -> None:
    (tmp_path / "mylab_lion.py").write_text((ROOT / "tests" / "lion.py").read_text())
    assert config_of("digits", "sync", "optimizer=mylab_lion:Lion").strategy_settings["optimizer"] == "mylab_lion:Lion"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("runs", "show"), "rainband runs show requires RUN, such as rainband runs show last"),
        (("export", "last"), "rainband export requires RUN and OUT, such as rainband export last model.safetensors"),
        (("placement",), "rainband placement requires TASK, such as rainband placement digits"),
    ],
)
def test_a_missing_argument_is_reported_with_an_example(words: tuple[str, ...], told: str) -> None:
    said = Said(*words)
    assert said.exit_code == 2 and told in said.err


def test_an_infinite_setting_survives_the_file(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "from dataclasses import dataclass\n"
        "from rainband.strategy import Strategy\n"
        "@dataclass(frozen=True)\n"
        "class Endless(Strategy):\n"
        "    bound: float = float('inf')\n"
        "    hook: object = print\n"
        "    async def run(self, worker): ...\n"
        "    def server(self, num_replicas): return object()\n"
    )
    made = config_of("digits", "endless:Endless")
    assert made.strategy_settings == {"bound": "inf"}
    run = write_run(tmp_path / "r", [], {**a_config(strategy="endless:Endless"), "strategy_settings": {"bound": "inf"}})
    assert config_of(config=run).strategy_settings == {"bound": "inf"}


# ---- train, with a runtime that does nothing ----


def pretend(monkeypatch: pytest.MonkeyPatch, story: list[events.AnyEvent], exit_code: int = 0) -> list[RunConfig]:
    """Instead of starting processes, tell a story; returns the configurations that were asked for."""
    asked: list[RunConfig] = []

    def run(config: RunConfig, view: Any, capture: bool = False) -> RunResult:
        asked.append(config)
        for event in story:
            view(event)
        return RunResult(
            outcome="finished",
            reason="",
            strategy=config.strategy,
            task=config.task,
            workers=config.num_workers,
            servers=config.num_servers,
            samples=2000,
            seconds=20.0,
            samples_per_s=100.0,
            metrics={"accuracy": 0.975},
            accounting={"batches": 900},
            staleness={"mean": 0.5},
            directory=config.directory,
            exit_code=exit_code,
        )

    monkeypatch.setattr("rainband.runtimes.processes.launcher.run", run)
    return asked


def test_training_shows_its_progress_and_ends_with_the_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, whole_run())
    said = Said("train", "digits", "downpour", "n_push=4", "--workers", "2", "--failure-timeout", "3")
    assert said.exit_code == 0 and said.err == ""
    lines = said.out.splitlines()
    assert lines[:2] == [
        "digits with downpour: 2 workers and 1 server",
        "starting 2 workers and 1 server ...",
    ]
    assert "  batches    898 of 900 applied, 0 lost, 0 applied twice" in lines
    [config] = asked
    assert (config.num_workers, config.failure_timeout_s, config.strategy_settings["n_push"]) == (2, 3.0, 4)
    assert Path(config.directory).parent == Path("runs") and Path(config.directory).is_dir()


def test_json_is_all_there_is_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, whole_run())
    said = Said("train", "digits", "downpour", "--json")
    [line] = said.out.splitlines()
    result = json.loads(line)
    for name in (
        "strategy",
        "workers",
        "servers",
        "samples",
        "seconds",
        "metrics",
        "accounting",
        "staleness",
        "directory",
    ):
        assert name in result
    assert "898 of 900 applied" in said.err


@pytest.mark.parametrize("exit_code", [0, 1, 75, 130])
def test_the_exit_code_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, exit_code: int) -> None:
    pretend(monkeypatch, whole_run(), exit_code)
    assert Said("train", "digits", "sync").exit_code == exit_code


def test_what_is_typed_wrong_starts_nothing_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = pretend(monkeypatch, [])
    for words in (
        ("digits", "downpour", "npush=4"),
        ("digits", "sync", "--runtime", "mars"),
        ("digits", "sync", "--workers", "0"),
        ("digits", "sync", "--no-such-option"),
        (),
    ):
        said = Said("train", *words)
        assert said.exit_code == 2 and said.out == ""
        assert "Traceback" not in said.err
    assert asked == [] and list(tmp_path.iterdir()) == []


def test_the_users_error_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    error = events.UserError(
        at_s=1.0, worker=1, step=7, error="RuntimeError: bad", traceback="Traceback\nRuntimeError: bad"
    )
    pretend(monkeypatch, [started(), error, ended("failed", "worker 1 failed at step 7: RuntimeError: bad")], 1)
    said = Said("train", "digits", "sync")
    assert said.exit_code == 1
    assert (said.out + said.err).count("RuntimeError: bad") == 1
    assert "worker 1 failed at step 7:" in said.out


def test_csv_is_one_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, whole_run())
    assert Said("train", "digits", "sync", "--csv").exit_code == 0
    assert len((Path(asked[0].directory) / "progress.csv").read_text().splitlines()) == 1 + 18


def test_a_library_that_is_missing_is_reported_before_a_directory_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, [])
    monkeypatch.setattr("rainband.views.sinks.tensorboard.find_spec", lambda name: None)
    said = Said("train", "digits", "sync", "--tensorboard")
    assert said.exit_code == 2 and "pip install 'rainband[tensorboard]'" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, [])
    (tmp_path / "file").touch()
    said = Said("train", "digits", "sync", "--runs", tmp_path / "file")
    assert said.exit_code == 2 and "Traceback" not in said.err
    assert said.err == (f"rainband: --runs {tmp_path}/file: File exists. Use a folder that can be written to.\n")


def test_options_of_an_earlier_run_without_effect_in_this_one_are_not_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    write_config(tmp_path, config_of("digits", "downpour", transport="tcp"))
    assert config_of(config=file, runtime="sim").runtime == "sim"


def test_a_model_that_a_simulation_refuses_is_reported_in_one_line(tmp_path: Path) -> None:
    tmp_path.joinpath("synced.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from rainband.tasks import ModuleTask\n"
        "samples = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))\n"
        "def refused():\n"
        "    return ModuleTask(lambda: nn.SyncBatchNorm(2), samples, nn.functional.mse_loss)\n"
        "def make():\n"
        "    raise ValueError('of my own')\n"
        "def broken():\n"
        "    return ModuleTask(make, samples, nn.functional.mse_loss)\n"
    )
    said = Said("train", "synced:refused", "downpour", "--runtime", "sim")
    assert said.exit_code == 2
    assert said.err.splitlines()[-1].startswith("rainband: the model is a SyncBatchNorm, ")
    with pytest.raises(ValueError, match="^of my own$"):  # with its traceback
        Said("train", "synced:broken", "downpour", "--runtime", "sim")
    assert list(Path("runs").iterdir()) == []


def test_a_strategy_without_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "halfway.py").write_text(
        "from dataclasses import dataclass\nfrom rainband.strategy import Strategy\n"
        "@dataclass(frozen=True)\nclass GD(Strategy):\n    lr: float = 0.1\n"
    )
    with pytest.raises(ValueError, match="halfway:GD has no method run, which every strategy requires"):
        config_of("digits", "halfway:GD")
    with pytest.raises(ValueError, match="inherits from rainband.strategy.Strategy"):
        config_of("digits", "halfway:dataclass")


def test_options_of_earlier_versions_are_refused_with_their_new_names() -> None:
    said = Said("train", "digits", "sync", "--chunks=2")
    assert said.exit_code == 2 and "there is no option --chunks: it is now --stages-per-worker." in said.err


@pytest.mark.parametrize(
    "words, answer",
    [
        (["train", "digits", "--world", "sim"], "there is no option --world: it is now --runtime."),
        (["simtest"], "there is no command simtest: it is now fuzz."),
        (["plan", "digits"], "there is no command plan: it is now placement."),
    ],
)
def test_old_names_are_answered_with_the_new_one(words: list[str], answer: str) -> None:
    said = Said(*words)
    assert (said.exit_code, said.err) == (2, f"rainband: {answer}\n")


def test_the_list_of_commands_has_whole_sentences() -> None:
    commands = Said("--help").out.partition("Commands:")[2].partition("Exit codes:")[0]
    assert "..." not in commands
    assert "export Copy the model of a run to a file that PyTorch loads without Rainband" in " ".join(commands.split())


@pytest.mark.parametrize("command", ["train", "run", "join", "invite", "explain", "placement", "bench", "runs show"])
def test_arguments_are_listed_without_types_of_python(command: str) -> None:
    help_text = Said(*command.split(), "--help").out
    assert "Arguments:" in help_text and not re.findall(r"<(str|list|int|path).*>", help_text, re.IGNORECASE)


def test_a_module_without_the_strategy_lists_its_strategies_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from functools import partial\nfrom rainband.rules import Rule\n"
    source += "from rainband.strategies.downpour import Downpour\n"
    classes = "class Median(Rule): ...\nclass Mine(Downpour): ...\ndef helper(): ...\n"
    (tmp_path / "listed_ideas.py").write_text(source + classes)
    (tmp_path / "empty_ideas.py").write_text("import math\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^listed_ideas has no 'Mime' \(did you mean Mine\?\): it has Mine\.$"):
        config_of("digits", "listed_ideas:Mime")
    with pytest.raises(ValueError, match=r"^empty_ideas has no 'Mine': it defines no strategy\.$"):
        config_of("digits", "empty_ideas:Mine")


@pytest.mark.parametrize(
    "missed, text", [(1.0, "1 update"), (0.5, "0.5 updates"), (1.001, "1 update"), (3, "3 updates")]
)
def test_one_update_is_singular(missed: float, text: str) -> None:
    assert missed_updates(missed) == text


@pytest.mark.parametrize("command", ["train", "run", "placement"])
def test_the_help_of_a_command_lists_help_last(command: str) -> None:
    groups = re.findall(r"^(\S.*):$", Said(command, "--help").out, re.MULTILINE)
    assert groups[-1] == "Options" and groups.count("Options") == 1


@pytest.mark.parametrize(
    "words", [("placement", "digits", "--placement", "nope.json"), ("fuzz", "1", "--faults", "nope.json")]
)
def test_a_file_that_cannot_be_read_is_reported_with_its_option(words: tuple[str, ...]) -> None:
    said = Said(*words)
    assert said.exit_code == 2
    assert f"{words[2]} nope.json: cannot read it (No such file or directory)." in said.err


@pytest.mark.parametrize(
    "words, says",
    [
        (("train", "digits", "--workers", "2.5"), "rainband: --workers 2.5: must be a whole number.\n"),
        (("train", "digits", "--eval-every=soon"), "rainband: --eval-every soon: must be a number.\n"),
        (("fuzz", "1", "--trace", "--nope"), "No such option: --nope"),
    ],
)
def test_a_text_in_place_of_a_number_is_refused_in_one_line(words: tuple[str, ...], says: str) -> None:
    said = Said(*words)
    assert said.exit_code == 2 and says in said.err


# ---- explain ----


def test_every_strategy_every_task_and_every_algorithm_is_explained_in_one_line() -> None:
    said = Said("explain")
    assert said.exit_code == 0
    for name in [*strategy_names(), *task_names(), *algorithm_names(), *codec_names()]:
        assert any(line.startswith(f"  {name} ") for line in said.out.splitlines())


def test_the_first_line_of_every_strategy_and_task_is_a_whole_sentence() -> None:
    summaries = [fact["summary"] for fact in Said("explain", "--json").json]
    assert len(summaries) == len(strategy_names()) + len(task_names()) + len(algorithm_names()) + len(codec_names())
    assert [summary for summary in summaries if not summary.endswith(".")] == []


def test_a_task_is_explained_by_its_own_file_and_its_settings_as_they_are_typed() -> None:
    lines = Said("explain", "quadratic").out.splitlines()
    assert "    f(w) = mean_i  1/2 sum_j h_j (w_j - x_ij)^2          so   w* = mean_i x_i" in lines
    assert "  task.seed=0          of the samples; a whole number" in lines
    assert "Use it:  rainband train quadratic downpour task.dimension=32" in lines


@pytest.mark.parametrize("name", task_names())
def test_what_is_read_from_a_tasks_file_is_what_importing_it_gives(name: str) -> None:
    file, task = read_task(name), load_task(name, {})
    assert file.class_name == type(task).__name__
    assert {s.name: (s.type, s.default, s.doc) for s in file.settings} == {
        s.name: (s.type, s.default, s.doc) for s in fields_of(type(task))
    }


def test_a_strategy_is_explained_by_its_own_file() -> None:
    said = Said("explain", "downpour")
    assert "w  -= lr * D " in said.out
    assert "  n_push=1 steps between two pushes; a whole number" in re.sub(r"(?<=\S) +", " ", said.out).splitlines()
    assert "  overlap=false " in said.out
    assert "Use it:  rainband train digits downpour" in said.out


@pytest.mark.parametrize("name", strategy_names())
def test_the_command_that_explain_shows_is_not_refused(name: str) -> None:
    (line,) = [line for line in Said("explain", name).out.splitlines() if line.startswith("Use it:")]
    words = line.removeprefix("Use it:  rainband train ").removesuffix(" --stages 2").split()
    options: RunOptions = {"runtime": "sim", "stages": 2} if line.endswith("--stages 2") else {}
    assert configured(words, options).strategy == name


def test_a_strategy_is_named_as_it_is_typed() -> None:
    assert [typed_name(load_strategy(name, {})) for name in strategy_names()] == strategy_names()


def test_programs_can_read_the_explanation() -> None:
    settings = {setting["name"]: setting for setting in Said("explain", "sync", "--json").json["settings"]}
    assert settings["lr"] == {
        "name": "lr",
        "type": "a number",
        "default": 0.1,
        "required": False,
        "doc": "learning rate for the mean gradient, before scaling",
    }
    state = Said("explain", "--json").json
    assert [fact["name"] for fact in state if fact["kind"] == "strategy"] == strategy_names()
    assert [fact["name"] for fact in state if fact["kind"] == "task"] == task_names()


def test_an_algorithm_is_explained_next_to_all_others() -> None:
    lines = [" ".join(line.split()) for line in Said("explain", "ring", "--workers", "8").out.splitlines()]
    assert "> ring 2(P−1): 14 1: 1 2(P−1)/P N: 1.75 N" in lines
    assert "direct 2: 2 P−1: 7 2(P−1)/P N: 1.75 N" in lines
    assert "recursive_doubling log2 Q, +2 if P>Q: 3 1: 1 N log2 Q, +N if P>Q: 3 N" in lines
    assert "Bytes sent in all: 2(P−1)N: 14 N; recursive_doubling QN log2 Q + 2(P−Q)N: 24 N." in lines


def test_the_settings_of_an_algorithm_change_its_costs() -> None:
    state = Said("explain", "two_level", "machines=4", "--workers", "8", "--json").json
    assert state["given"] == {"machines": 4}
    found = {each["name"]: each["found"] for each in state["algorithms"]}
    assert found["two_level"] == {"steps": 4, "fan_in": 3, "max_sent": 1.75, "total_sent": 14}
    assert sorted(found) == algorithm_names()


def test_more_workers_than_are_checked_are_refused() -> None:
    said = Said("explain", "ring", "--workers", "34")
    assert said.exit_code == 2 and "--workers 34: the tables of algorithms are checked for at most 33" in said.err


def test_a_strategy_that_does_not_exist_is_reported() -> None:
    said = Said("explain", "snyc")
    assert said.exit_code == 2 and "did you mean sync?" in said.err


# ---- runs ----


def test_where_there_are_no_runs_it_says_so() -> None:
    said = Said("runs")
    assert said.exit_code == 0 and said.out.startswith("There are no runs in runs. Train something")


def test_runs_are_listed_newest_first_with_how_they_ended() -> None:
    write_run(Path("runs/old"), [started(at="2026-11-16T08:00:00.000+00:00"), ended("failed", "bad")])
    write_run(Path("runs/new"), whole_run())
    write_run(Path("runs/killed"), whole_run()[:-1], tail=b'{"event":"Prog')
    rows = [line.split()[:2] for line in Said("runs").out.splitlines()]
    assert rows == [["run", "state"], ["new", "finished"], ["killed", "killed"], ["old", "failed"]]
    assert Said("runs", "-n", "1").out.splitlines()[-1] == "... and 2 older: rainband runs -n 3"
    assert [run["state"] for run in Said("runs", "--json").json] == ["finished", "killed", "failed"]


def test_a_run_is_shown_with_its_accounting_its_staleness_and_its_curve() -> None:
    write_run(Path("runs/one"), whole_run())
    lines = Said("runs", "show", "last").out.splitlines()
    assert lines[0] == "one: finished"
    assert "  task     digits with downpour n_push=4 overlap=true local_lr=none" in lines
    assert "  batches    898 of 900 applied, 0 lost, 0 applied twice" in lines
    assert [line.split()[0] + " " + line.split()[-1] for line in lines if "█" in line] == [
        "0 6",
        "1 3",
        "2 1",
    ]
    assert sum(line.count("•") for line in lines) >= 10


def test_a_killed_run_is_shown_as_far_as_it_came() -> None:
    written = events.CheckpointWritten(at_s=9.0, name="step-0000001600", step=1600, num_bytes=1, seconds=0.1)
    write_run(Path("runs/one"), [*whole_run()[:-1], written], tail=b'{"event":"Prog')
    said = Said("runs", "show", "one")
    assert said.exit_code == 0
    assert "from its checkpoint of step 1,600: rainband resume runs/one" in said.out
    assert "The run was killed, or its machine stopped" in said.out and "1,700 of 2,000 samples" in said.out
    assert "1 lines of events.jsonl could not be read" in said.out


def test_programs_can_read_a_run() -> None:
    write_run(Path("runs/one"), whole_run())
    shown = Said("runs", "show", "one", "--json").json
    assert (shown["state"], shown["samples"], len(shown["progress"])) == ("finished", 2000, 18)


def test_a_list_of_runs_fits_the_terminal() -> None:
    runs = [read_run(write_run(Path(f"runs/20261116-033454-table_regression-{name}"), whole_run())) for name in "ab"]
    assert max(map(len, listed(runs))) > 80 >= max(map(len, listed(runs, 80)))
    assert all("accuracy 0.975" in line for line in [*listed(runs)[1:], *listed(runs, 80)[1:]])


def test_what_was_not_set_is_the_tasks_own_only_where_a_task_has_one() -> None:
    unset = a_config(epochs=None, strategy_settings={"local_lr": None})
    write_run(Path("runs/a"), [started()], unset)
    write_run(Path("runs/b"), [started()], a_config(epochs=3, strategy_settings={"local_lr": 0.5}))
    lines = [line.split("  ") for line in Said("compare", "a", "b").out.splitlines()]
    rows = {tuple(filter(None, map(str.strip, line))) for line in lines}
    assert {("epochs", "the task's default", "3"), ("local_lr", "none", "0.5")} <= rows


def test_two_runs_are_compared_by_the_settings_that_differ_and_the_results() -> None:
    write_run(Path("runs/a"), [started(), ended(accuracy=0.5)], a_config(seed=1))
    write_run(Path("runs/b"), [started(), ended(accuracy=0.75)], a_config(seed=2))
    lines = Said("compare", "a", "b").out.splitlines()
    assert [line.split() for line in lines if line.startswith("accuracy")] == [["accuracy", "0.5", "0.75", "1.50"]]
    assert lines[:2] == ["first   a", "second  b"]
    at = lines.index("Settings that differ:")
    assert lines[at + 1 : at + 3] == ["        first  second", "  seed  1      2"]
    write_run(Path("runs/c"), [started(), ended(accuracy=0.5)], a_config(seed=1))
    assert "All settings are equal." in Said("compare", "a", "c").out.splitlines()
    assert "the same run is given twice" in Said("compare", "a", "a").err


def test_a_run_that_does_not_exist_is_reported() -> None:
    write_run(Path("runs/one"), whole_run())
    said = Said("runs", "show", "two")
    assert said.exit_code == 2 and "no run named two in runs: choose from one, or type last." in said.err


# ---- export ----


def with_model(directory: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    write_run(directory, whole_run())
    save_file({"weight": torch.arange(6.0)}, str(directory / "model.safetensors"))
    return directory


def test_a_model_is_exported_and_says_how_to_load_it() -> None:
    source = with_model(Path("runs/one"))
    said = Said("export", "last", "out.safetensors")
    assert said.exit_code == 0
    assert said.out.splitlines()[0].startswith("out.safetensors: 1 tensor, 6 numbers, ")
    assert "load_model(module, 'out.safetensors')" in said.out
    assert Path("out.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert sorted(path.name for path in Path().iterdir()) == ["out.safetensors", "runs"]


def test_a_file_that_is_there_is_overwritten_only_on_demand() -> None:
    with_model(Path("runs/one"))
    Path("out.safetensors").write_text("precious")
    said = Said("export", "last", "out.safetensors")
    assert said.exit_code == 2 and "add --force" in said.err
    assert Path("out.safetensors").read_text() == "precious"
    assert Said("export", "last", "out.safetensors", "--force").exit_code == 0
    assert Path("out.safetensors").read_bytes() != b"precious"


def test_a_damaged_model_is_not_exported() -> None:
    model = with_model(Path("runs/one")) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4])
    said = Said("export", "last", "out.safetensors")
    assert said.exit_code == 2 and "does not load" in said.err and not Path("out.safetensors").exists()


def test_what_cannot_be_exported_is_reported() -> None:
    write_run(Path("runs/one"), [started(), ended("failed", "server 0 was lost")])
    assert "one has no model (failed: server 0 was lost)" in Said("export", "one", "x").err
    with_model(Path("runs/two"))
    assert "there is no directory nowhere: create it first" in Said("export", "two", "nowhere/x").err
    assert "runs is a directory: give a file" in Said("export", "two", "runs").err


# ---- doctor ----


def test_the_doctor_looks_at_everything_and_this_machine_is_well() -> None:
    said = Said("doctor")
    assert said.exit_code == 0 and said.out.splitlines()[-1] == "Everything that is required is here."
    for word in ("Python", "cores", "memory", "/dev/shm", "memfd", "torch", "127.0.0.1", "open files"):
        assert word in said.out


def test_something_essential_that_is_missing_is_said_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = [
        Finding("cores", "ok", "2"),
        Finding("torch", "missing", "cannot be imported", "pip install torch==2.13.0"),
        Finding("extra ray", "note", "ray not installed", "pip install 'rainband[ray]'"),
    ]
    monkeypatch.setattr(doctor_file, "examine", lambda: findings)
    said = Said("doctor")
    assert said.exit_code == 1
    assert said.out.splitlines() == [
        "ok       cores      2",
        "MISSING  torch      cannot be imported",
        "note     extra ray  ray not installed",
        "",
        "What to do:",
        "  torch      pip install torch==2.13.0",
        "  extra ray  pip install 'rainband[ray]'",
        "",
        "Something that is required is missing.",
    ]
    assert Said("doctor", "--json").json["ok"] is False


def test_a_missing_extra_is_a_note_and_a_missing_library_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [
        "msgspec>=0.19",
        "not-there>=1",
        'scikit-learn>=1; extra == "data"',
        'no-such-thing; extra == "ray"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    found = {finding.name: finding for finding in doctor_file._libraries()}
    assert (found["libraries"].verdict, found["libraries"].found) == ("missing", "not-there not installed")
    assert found["extra data"].verdict == "ok"
    assert (found["extra ray"].verdict, found["extra ray"].advice) == ("note", "pip install 'rainband[ray]'")


# ---- real runs ----

TALKER = """
from rainband.tasks.linear import Linear

class Talker(Linear):
    def loss(self, model, batch):
        print("a word from a worker")
        return super().loss(model, batch)
"""


@pytest.mark.processes
def test_a_real_run_ends_with_one_json_object_and_a_directory_that_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(TALKER)
    command = [sys.executable, "-c", "from rainband.cli.main import main; main()", "train", "talker:Talker"]
    options = [
        "downpour",
        "lr=0.5",
        "optimizer=sgd",
        "--workers",
        "2",
        "--servers",
        "1",
        "--json",
        "--epochs",
        "1",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}  # which tears lines, if one lets it
    result = subprocess.run([*command, *options], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()  # what workers print is no part of it
    told = json.loads(line)
    assert (told["workers"], told["servers"], told["samples"]) == (2, 1, 1024)
    assert (told["accounting"]["applied"], told["accounting"]["lost"], told["accounting"]["applied_twice"]) == (
        256,
        0,
        0,
    )
    assert "| a word from a worker" in result.stderr and "256 of 256 applied" in result.stderr
    directory = Path(told["directory"])
    names = {path.name for path in directory.iterdir()}
    assert names == {"config.json", "events.jsonl", "metrics.sqlite", "model.safetensors", "output.log"}
    # Once for each batch; if heartbeats are late on a busy machine, a batch may be computed again.
    printed = (directory / "output.log").read_text().splitlines()
    assert len(printed) >= 256 and set(printed) == {"a word from a worker"}
    shown = Said("runs", "show", "last", "--json").json
    assert (shown["state"], shown["progress"][-1]["samples_done"]) == ("finished", 1024)
    assert config_of(config=directory).strategy_settings["lr"] == 0.5


@pytest.mark.processes
@pytest.mark.slow
def test_a_real_run_asked_to_stop_ends_in_good_order_with_75(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from rainband.cli.main import main; main()",
        "train",
        "linear",
        "downpour",
    ]
    options = ["--workers", "2", "--servers", "1", "--epochs", "2000"]
    process = subprocess.Popen(
        [*command, *options, "task.samples=1024"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if " left" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.communicate()[0]
    assert process.returncode == 75, rest
    assert "stopping (interrupted)" in rest and "0 lost, 0 applied twice" in rest and "not processed" in rest


# ---- optimizers ----


@pytest.mark.parametrize("setting", TAKERS)
def test_what_an_optimizer_takes_is_written_down_as_torch_has_it(setting: str) -> None:
    takers = {name for name, kind in BUILT_IN.items() if setting in signature(getattr(torch.optim, kind)).parameters}
    assert takers == TAKERS[setting]


# ---- bench ----


def test_a_benchmarks_table_fits_80_columns_with_its_numbers_in_line() -> None:
    rows = [
        Row("64 MB over TCP", 95.2, "ms"),
        at_most("64 MB over TCP", 1.55, 1.3, "a bare socket loop, same work, same bytes, and much more of it"),
        Row("64 MB, 2 workers, 1 servers", 2352.0, "GB/s pushed, applied and pulled"),
    ]
    assert as_table("ps", rows, 80) == [
        "bench ps",
        "  value  unit  target  met  what",
        "   95.2  ms                 64 MB over TCP",
        "   1.55  x     1.3     NO   64 MB over TCP, against a bare socket loop, same",
        "                            work, same bytes, and much more of it",
        "  2,352  GB/s               64 MB, 2 workers, 1 servers, pushed, applied and",
        "                            pulled",
        "",
    ]


@pytest.mark.parametrize(
    "why, said",
    [(KeyboardInterrupt(), "interrupted"), (RuntimeError("the run failed: no worker is left"), "no worker is left")],
)
def test_a_benchmark_that_is_broken_off_shows_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, why: BaseException, said: str
) -> None:
    def broken_off(effort: str) -> Iterator[Row]:
        yield at_most("start-up", 4.0, 5.0, "", "s")
        raise why

    monkeypatch.setattr("rainband.bench.cases.startup.run", broken_off)
    told = Said("bench", "startup")
    assert told.exit_code == 1 and said in told.err
    assert "  start-up: 4 s (target 5, met: yes)\n" in told.err  # at once, before the table
    assert told.out.splitlines()[:3] == [
        "bench startup",
        "  value  unit  target  met  what",
        "      4  s     5       yes  start-up",
    ]
