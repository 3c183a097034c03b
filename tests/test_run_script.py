"""`rainband run train.py`: real processes, a script as users write it, and what becomes of its mistakes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rainband.cli.run import split
from rainband.runtimes.training_loop.script_process import _of_killed_loader
from tests.processes import DEADLINE_S, RunLauncher

ROOT = Path(__file__).parent.parent

DOWNPOUR = ["--strategy", "downpour", "--servers", "1"]

SCRIPT = """
import argparse
import torch
import rainband
from beside import data, net
from torch.nn.functional import mse_loss

options = argparse.ArgumentParser()
options.add_argument("--batch", type=int, default=8)
options.add_argument("--lr", type=float, default=0.1)
options = options.parse_args()

model = net()
optimizer = {optimizer}(model.parameters(), lr=options.lr)
with rainband.join(model, optimizer) as run:
    for epoch in run.epochs(2):
        for inputs, targets in run.batches(data, batch_size=options.batch):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            {inside}
print("worker", run.rank, "of", run.num_workers, [round(p.double().sum().item(), 6) for p in model.parameters()])
{after}
"""
BESIDE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from tests.lion import Lion

numbers = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(160, 3, generator=numbers), torch.randn(160, 1, generator=numbers))

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
"""


ENDLESS = """
import itertools, os, signal, time
import torch
import rainband
from beside import data, net
from torch.nn.functional import mse_loss

def interrupt():
    os.kill(int(os.environ["LAUNCHER_PID"]), signal.SIGINT)

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rainband.join(model, optimizer) as run:
    for epoch in itertools.count():
        for number, (inputs, targets) in enumerate(run.batches(data, batch_size=8)):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if (epoch, number, run.rank) == (2, 1, 0):
                {inside}
print("worker", run.rank, "stopped:", run.stopped, [round(p.double().sum().item(), 6) for p in model.parameters()])
{after}
"""


class Told:
    """The output and the files of a command."""

    def __init__(
        self, launcher: RunLauncher, folder: Path, words: list[str], script: str = SCRIPT, **pieces: str
    ) -> None:
        filled = {"optimizer": "torch.optim.SGD", "inside": "", "after": "", **pieces}
        (folder / "train.py").write_text(script.format(**filled))
        (folder / "beside.py").write_text(BESIDE)
        if words[0] == "train.py":
            done = subprocess.run(
                [sys.executable, *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=4 * DEADLINE_S,  # only a run that never ends comes near
            )
            self.exit_code, self.out, self.err = done.returncode, done.stdout, done.stderr
        else:
            runs = ("--runs", str(folder / "runs"))
            self.exit_code, self.out, self.err = launcher.typed(folder, "run", "--json", *runs, *words)

    @property
    def json(self) -> Any:
        assert self.out, self.err
        return json.loads(self.out.splitlines()[-1])

    @property
    def sums(self) -> list[list[float]]:
        """Of each worker's final parameters, as it printed them."""
        lines = (self.out + self.err).splitlines()
        return [
            json.loads(line[line.index("[") :])
            for line in lines
            if "worker" in line and "[" in line and not line.startswith("{")
        ]


# Workers that share batches, and (slow: other tests cover more of it within one process) workers with servers.
default_and_downpour = pytest.mark.parametrize(
    "strategy", [pytest.param([], id="default"), pytest.param(DOWNPOUR, id="downpour", marks=pytest.mark.slow)]
)


@pytest.mark.processes
@pytest.mark.slow
def test_two_workers_in_rounds_are_one_with_batches_twice_as_large(launcher: RunLauncher, tmp_path: Path) -> None:
    together = Told(
        launcher,
        tmp_path,
        ["--workers", "2", "--strategy", "sync", "batch_per_worker=true", "train.py", "--batch", "8"],
    )
    alone = Told(launcher, tmp_path, ["train.py", "--batch", "16"])
    assert (together.exit_code, alone.exit_code) == (0, 0), together.err + alone.err
    first, second = together.sums
    assert first == second == pytest.approx(alone.sums[0], abs=1e-5)
    assert "training in one process" in alone.err and "training alone" not in together.err
    accounting = together.json["accounting"]
    assert (accounting["applied"], accounting["batches"], accounting["lost"], accounting["applied_twice"]) == (
        40,
        40,
        0,
        0,
    )
    saved = safetensors.torch.load_file(Path(together.json["directory"]) / "model.safetensors")
    assert sorted(round(tensor.double().sum().item(), 6) for tensor in saved.values()) == sorted(first)


@pytest.mark.processes
def test_a_worker_that_hangs_for_good_does_not_keep_the_run_from_ending(launcher: RunLauncher, tmp_path: Path) -> None:
    """It stops itself (SIGSTOP), so its process never ends by itself."""
    stop = "if run.rank == 1 and epoch == 0: __import__('os').kill(__import__('os').getpid(), 19)"
    told = Told(launcher, tmp_path, ["--workers", "2", *DOWNPOUR, "--failure-timeout", "2", "train.py"], inside=stop)
    assert told.exit_code == 0, told.err
    accounting = told.json["accounting"]
    assert (accounting["applied"], accounting["lost"], accounting["applied_twice"]) == (40, 0, 0)
    assert len(told.sums) == 1


@pytest.mark.processes
def test_when_a_worker_is_killed_the_others_do_its_batches(launcher: RunLauncher, tmp_path: Path) -> None:
    """With an optimizer of the user's own, over TCP."""
    words = ["--workers", "3", *DOWNPOUR, "--transport", "tcp", "--optimizer", "tests.lion:Lion", "n_push=2"]
    told = Told(
        launcher,
        tmp_path,
        [*words, "train.py", "--lr", "0.01"],
        optimizer="__import__('beside').Lion",
        inside="if run.rank == 1 and epoch == 0: __import__('os').kill(__import__('os').getpid(), 9)",
    )
    assert told.exit_code == 0, told.err
    accounting = told.json["accounting"]
    assert (accounting["applied"], accounting["batches"], accounting["lost"], accounting["applied_twice"]) == (
        40,
        40,
        0,
        0,
    )
    assert len(told.sums) == 2 and told.sums[0] == told.sums[1]


@pytest.mark.processes
@default_and_downpour
def test_a_script_may_change_its_directory_and_end_inside_the_with_block(
    launcher: RunLauncher, strategy: list[str], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    inside = "import os, sys; os.path.exists('elsewhere') and os.chdir('elsewhere'); epoch and sys.exit(0)"
    told = Told(launcher, tmp_path, ["--runs", "out", "--workers", "2", *strategy, "train.py"], inside=inside)
    assert (told.exit_code, told.json["outcome"]) == (0, "finished"), told.err
    assert Path(told.json["directory"]).parent == Path("out")
    saved = safetensors.torch.load_file(tmp_path / told.json["directory"] / "model.safetensors")
    assert len(saved) == 4


KILL_A_LOADER = """
            if run.rank == 1 and not os.path.exists("killed"):
                os.kill(psutil.Process().children()[0].pid, 9)
                open("killed", "x").close()
            while not os.path.exists("killed"):  # or the other worker could compute all batches first
                time.sleep(0.01)
"""


@pytest.mark.processes
@default_and_downpour
def test_when_a_process_of_a_loader_is_killed_only_its_worker_is_lost(
    launcher: RunLauncher, strategy: list[str], tmp_path: Path
) -> None:
    script = SCRIPT.replace("import argparse", "import argparse, os, psutil, time")
    script = script.replace("batch_size=options.batch)", "batch_size=options.batch, num_workers=1)")
    told = Told(launcher, tmp_path, ["--workers", "2", *strategy, "train.py"], script, inside=KILL_A_LOADER)
    assert told.exit_code == 0, told.err
    assert "lost worker 1 (LoaderProcessLost: a process of its data loader was killed" in told.err
    if strategy:
        accounting = told.json["accounting"]
        assert (accounting["applied"], accounting["batches"], accounting["lost"]) == (40, 40, 0)
    assert "worker 0 of 2 [" in told.err and "worker 1 of 2 [" not in told.err


class Missing:
    """A dataset whose file is not there."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError("samples.bin")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_is_the_scripts(num_workers: int) -> None:
    try:
        list(torch.utils.data.DataLoader(Missing(), num_workers=num_workers))  # type: ignore[arg-type]
        raise AssertionError("the dataset has no file")
    except FileNotFoundError as error:  # pytest.raises would keep the loader's process alive
        assert _of_killed_loader(error) is None
    gc.collect()  # ends that process
    assert _of_killed_loader(RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1.")) is None
    assert _of_killed_loader(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")) is not None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ({"inside": "1 / 0"}, "ZeroDivisionError"),
        (
            {"optimizer": '__import__("sys").exit("no data here") or SGD'},
            "before it joined: exit code 1: no data here",
        ),
        pytest.param({"optimizer": "missing"}, "NameError", marks=pytest.mark.slow),
        pytest.param({"after": "raise SystemExit(3)"}, "exit code 3", marks=pytest.mark.slow),
    ],
    ids=["in the loop", "left before it", "before it", "after it"],
)
def test_an_error_in_the_script_fails_the_run_and_is_shown(
    launcher: RunLauncher, tmp_path: Path, pieces: dict[str, str], said: str
) -> None:
    told = Told(launcher, tmp_path, ["--workers", "1", "train.py"], **pieces)
    assert told.exit_code == 1
    assert said in told.err and told.json["outcome"] == "failed"
    assert told.err.count("Traceback") <= 1


@pytest.mark.processes
def test_a_loop_that_was_stopped_continues_with_the_updates_of_one_that_was_not(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    words = ["--workers", "2", "--parts", "equal"]
    whole = Told(launcher, tmp_path, [*words, "train.py"])
    stop = "if (epoch, run.passes.where.batch) == (1, 6): run.stop('enough')"  # in the middle of the second pass
    stopped = Told(launcher, tmp_path, [*words, "train.py"], inside=stop)
    assert stopped.json["outcome"] == "stopped" and stopped.json["checkpoint"], stopped.err
    after = Told(launcher, tmp_path, ["--resume", stopped.json["directory"], *words, "train.py"])
    assert after.exit_code == 0, after.err
    assert after.sums == whole.sums != stopped.sums


LEASED = """
import torch
import rainband
from beside import data, net
from torch.nn.functional import mse_loss

model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
average = torch.optim.swa_utils.AveragedModel(model)
with rainband.join(model, optimizer) as run:
    run.register(scheduler, average)
    for epoch in run.epochs(3):
        for inputs, targets in run.batches(data, batch_size=8):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            if run.rank == 0:
                {inside}
lr = optimizer.param_groups[0]["lr"]
print("worker", run.rank, lr, int(average.n_averaged), [p.double().sum().item() for p in average.parameters()])
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "workers", "exact"),
    [
        (["single"], 1, True),
        (["sync", "--servers", "2", "batch_per_worker=true"], 2, False),
        (["downpour", "--servers", "2"], 2, False),
    ],
    ids=["single", "rounds", "downpour"],
)
def test_a_loop_whose_batches_are_leased_continues_with_its_schedule(
    launcher: RunLauncher, tmp_path: Path, strategy: list[str], workers: int, exact: bool
) -> None:
    name, *rest = strategy
    words = ["--workers", str(workers), "--strategy", name, *rest, "train.py"]
    whole = Told(launcher, tmp_path, words, LEASED, inside="None")
    stopped = Told(launcher, tmp_path, words, LEASED, inside="run.progress > 0.5 and run.stop('enough')")
    assert stopped.json["outcome"] == "stopped" and stopped.json["checkpoint"], stopped.err
    after = Told(launcher, tmp_path, ["--resume", stopped.json["directory"], *words], LEASED, inside="None")
    assert after.exit_code == 0, after.err
    accounting = after.json["accounting"]
    assert (accounting["applied"], accounting["lost"], accounting["applied_twice"]) == (60, 0, 0)
    ends = [[line for line in (told.out + told.err).splitlines() if "| worker" in line] for told in (whole, after)]
    assert len(ends[0]) == len(ends[1]) == workers
    if exact:
        models = [
            safetensors.torch.load_file(Path(told.json["directory"]) / "model.safetensors") for told in (whole, after)
        ]
        assert all(torch.equal(models[1][name], values) for name, values in models[0].items())
        assert sorted(ends[0]) == sorted(ends[1])


@pytest.mark.processes
@default_and_downpour
def test_a_loop_without_end_is_stopped_by_one_worker(
    launcher: RunLauncher, strategy: list[str], tmp_path: Path
) -> None:
    words = ["--workers", "2", *strategy, "train.py"]
    told = Told(launcher, tmp_path, words, ENDLESS, inside="run.stop('converged')")
    assert told.exit_code == 0, told.err
    assert told.err.count("stopped: converged") == 2
    assert told.sums[0] == told.sums[1]
    assert (told.json["outcome"], told.json["reason"]) == ("stopped", "converged")
    assert (Path(told.json["directory"]) / "model.safetensors").exists()


@pytest.mark.processes
@default_and_downpour
def test_the_first_interrupt_ends_the_loop_and_the_second_the_script(
    launcher: RunLauncher, strategy: list[str], tmp_path: Path
) -> None:
    """The second arrives while a script would go on for an hour."""
    words = ["--workers", "2", *strategy, "train.py"]
    after = "if run.rank == 0: interrupt(); time.sleep(3600)"
    told = Told(launcher, tmp_path, words, ENDLESS, inside="interrupt()", after=after)
    assert told.exit_code == 130, told.err
    assert "worker 0 stopped: interrupted" in told.err
    assert (told.json["outcome"], told.json["reason"]) == ("stopped", "interrupted twice")
    assert (Path(told.json["directory"]) / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_never_joins_fails_with_what_it_needs(launcher: RunLauncher, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("print('nothing to do')\n")
    told = Told(launcher, tmp_path, ["--workers", "1", "idle.py"])
    assert told.exit_code == 1
    assert "idle.py never joined: it needs `with rainband.join(model, optimizer) as run:`" in told.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a script is required"),
        (["n_push=2"], "a script is required"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--lr"], "Options come before the script"),
        (["--runtime", "sim", "x.py"], "^--runtime works only with rainband train: omit it.$"),
        (["--stages", "2", "x.py"], "^--stages works only with rainband train: omit it.$"),
        (["--epochs", "2", "x.py"], r"rainband train: omit it, and call run.epochs\(N\) in the script.$"),
        (["--batch-size=2", "x.py"], r"omit it, and call run.batches\(dataset, batch_size=N\) in the script.$"),
        (["--eval-every", "2", "x.py"], "omit it, and call your evaluation function in the script.$"),
        (["--worker=3", "x.py"], r"rainband run has no --worker \(did you mean --workers\?\)"),
        (["n_push=2", "--workers", "3", "x.py"], "--workers comes after a setting"),
    ],
)
def test_words_without_a_script_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split(words)


def test_what_follows_the_script_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.py").touch()
    assert split(["n_push=2", "n_fetch=3", "a=b.py", "--lr", "n_push=9"]) == (
        ["n_push=2", "n_fetch=3"],
        tmp_path / "a=b.py",
        ["--lr", "n_push=9"],
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr=0.1", "SCRIPT"], "the script's own optimizer"),
        (["--strategy", "downpour", "--servers", "0", "SCRIPT"], "so use --servers 1 or more"),
        (["--servers", "2", "SCRIPT"], "sync has no servers: omit --servers 2, or choose a strategy"),
        (["--strategy", "downpour", "--parts", "equal", "SCRIPT"], "workers do not share batches, so omit it"),
        (["--parts", "fair", "SCRIPT"], "choose from speed, equal"),
        (["--strategy", "single", "--workers", "2", "SCRIPT"], "single runs in one process: omit --workers 2"),
        (["--strategy", "downpuor", "SCRIPT"], "did you mean downpour"),
        (["--strategy", "downpour", "n_pusch=2", "SCRIPT"], "n_push"),
        (["--strategy", "pipedream", "SCRIPT"], "pipedream does not work in a custom training loop"),
        (["--strategy", "sandblaster", "SCRIPT"], "rainband train TASK sandblaster"),
        (["--strategy", "hogwild", "SCRIPT"], "memory that all workers share"),
        (["--strategy", "downpour", "--transport", "quic", "SCRIPT"], "--transport quic: choose from auto, tcp, shm"),
        (["--optimizer", "foo", "SCRIPT"], "--optimizer foo: give module:Class"),
        (["--seed", "-1", "SCRIPT"], "--seed -1: must be at least 0"),
    ],
)
def test_what_was_typed_wrong_is_reported_before_anything_starts(tmp_path: Path, words: list[str], said: str) -> None:
    from typer.testing import CliRunner

    from rainband.cli.main import build_app

    script = tmp_path / "train.py"
    script.touch()
    result = CliRunner().invoke(build_app(), ["run", *(str(script) if w == "SCRIPT" else w for w in words)])
    assert result.exit_code == 2
    assert said in result.output


def test_a_script_is_run_with_the_options_of_train_that_it_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from rainband.cli.main import build_app
    from rainband.runtimes.config import RunConfig

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    asked: list[RunConfig] = []

    def watch(config: RunConfig, sinks: list[Any], as_json: bool, verbose: bool) -> int:
        asked.append(config)
        assert [sink.func.__name__ for sink in sinks] == ["Csv"]
        return 0

    monkeypatch.setattr("rainband.cli.train.watch", watch)
    words = ["--workers", "3", "--failure-timeout", "9", "--seed", "7", "--csv", "--strategy", "downpour"]
    assert CliRunner().invoke(build_app(), ["run", *words, "n_push=2", "train.py", "--csv"]).exit_code == 0
    [config] = asked
    assert (config.num_workers, config.num_servers, config.failure_timeout_s, config.seed) == (3, 2, 9.0, 7)
    assert (config.script, config.arguments) == (str(tmp_path / "train.py"), ("--csv",))
    for option in ("--stages", "--epochs", "--record"):
        refused = CliRunner().invoke(build_app(), ["run", option, "2", "train.py"])
        assert refused.exit_code == 2, option


def test_torch_numbers_differ_between_workers_from_joining_on() -> None:
    from rainband.runtimes.training_loop.script_random import seed_by_rank, seed_equally

    drawn = []
    for index in (0, 1, 2):
        seed_equally(7)
        before = torch.rand(1).item()
        seed_by_rank(index)
        drawn.append((before, torch.rand(1).item()))
    assert len({before for before, _ in drawn}) == 1
    assert len({after for _, after in drawn}) == 3
