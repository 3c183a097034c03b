"""One call that trains: from a file, a prompt or a thread, with tasks that can be imported and tasks that cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rainband
from rainband.cli.main import build_app
from rainband.errors import RainbandError
from rainband.fit import _carried, _inherited, _named, _warn_if_diverged
from rainband.options import FitOptions, OptionError, declared
from rainband.runtimes.config import RunConfig
from rainband.runtimes.configure import PLAIN_FIELDS
from rainband.runtimes.processes.zygote import Zygote
from rainband.tasks.linear import Linear
from rainband.tasks.quadratic import Quadratic
from rainband.tasks.task import ModuleTask

ROOT = Path(__file__).parent.parent


# ---- names, where there are any ----


@dataclasses.dataclass(frozen=True)
class Importable(Linear):
    note: str = "mine"


@pytest.mark.parametrize(
    ("thing", "family", "name"),
    [
        ("digits", "rainband.tasks", "digits"),
        (Linear(dimension=4), "rainband.tasks", "linear"),
        (rainband.Downpour(n_push=2), "rainband.strategies", "downpour"),
        (Importable(), "rainband.tasks", "tests.test_fit:Importable"),
    ],
)
def test_what_can_be_imported_goes_by_its_name(thing: Any, family: str, name: str) -> None:
    found, settings = _named(thing, family)
    assert found == name
    if not isinstance(thing, str):
        assert type(thing)(**settings) == thing


def test_what_is_made_of_code_has_no_name() -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(Linear):
        pass

    assert _named(Local(), "rainband.tasks") == ("", {})
    task = ModuleTask(torch.nn.Flatten, torch.utils.data.TensorDataset(torch.ones(3)), lambda a, b: a)
    assert _named(task, "rainband.tasks") == ("", {})


def test_a_task_without_a_name_comes_through_memory_as_it_is() -> None:
    rows = torch.arange(6.0)
    task = ModuleTask(torch.nn.Flatten, torch.utils.data.TensorDataset(rows), lambda a, b: a + b)
    with _inherited({"task": task, "strategy": None}) as fds:
        carried = _carried([os.dup(fds[0])])
    assert carried["strategy"] is None
    assert carried["task"].loss_fn(1, 2) == 3
    assert torch.equal(carried["task"].dataset.tensors[0], rows)


def test_with_names_for_all_nothing_is_handed_over() -> None:
    with _inherited({"task": None, "strategy": None}) as fds:
        assert fds == []
    assert _carried([]) == {"task": None, "strategy": None}


def test_what_cannot_be_handed_over_is_reported() -> None:
    task = ModuleTask(torch.nn.Flatten, torch.utils.data.TensorDataset(torch.ones(3)), threading.Lock().acquire)
    with pytest.raises(ValueError, match=r"task cannot be handed .*inside model\(\) or data\(\)"):
        rainband.fit(task, "downpour", workers=1, servers=1)


def test_there_must_be_a_worker() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        rainband.fit("linear", workers=0)


# ---- options ----


REFUSED = [
    ("downpour", {"servers": 0}, "servers", "0", "downpour requires servers, which hold the parameters"),
    ("downpour", {"transport": "quic"}, "transport", "quic", "choose from auto, tcp, shm"),
    ("downpour", {"transport": "tpc"}, "transport", "tpc", "(did you mean tcp?)"),
    ("downpour", {"batch_size": 0}, "batch-size", "0", "must be at least 1"),
    ("downpour", {"epochs": 0}, "epochs", "0", "must be at least 1"),
    ("downpour", {"epochs": 10**20}, "epochs", f"{10**20}", "must be at most 1000000000"),
    ("downpour", {"seed": -1}, "seed", "-1", "must be at least 0"),
    ("downpour", {"threads": 0}, "threads", "0", "must be at least 1"),
    ("downpour", {"failure_timeout_s": 0.0}, "failure-timeout", "0.0", "must be at least 0.1"),
    ("single", {"workers": 5}, "workers", "5", "single runs in one process"),
    ("hogwild", {"servers": 3}, "servers", "3", "hogwild has no servers"),
    ("downpour", {"workers": 100_000}, "workers", "100000", "would only wait for each other"),
]


@pytest.mark.parametrize("strategy, options, name, value, says", REFUSED)
def test_python_and_the_command_line_refuse_the_same_each_in_its_words(
    strategy: str, options: dict[str, Any], name: str, value: str, says: str
) -> None:
    [python_name] = options
    typed = f'"{value}"' if python_name == "transport" else value
    with pytest.raises(OptionError) as raised:
        rainband.fit("linear", strategy, **options)
    assert says in str(raised.value) and f"{python_name}={typed}" in str(raised.value)
    result = CliRunner().invoke(build_app(), ["train", "linear", strategy, f"--{name}", value])
    assert result.exit_code == 2
    assert says in result.output and f"--{name} {value}" in result.output and python_name + "=" not in result.output


@pytest.mark.parametrize(
    "options, says",
    [
        ({"network": "wan"}, 'network requires runtime="sim"'),
        ({"time_only": True}, 'time_only requires runtime="sim"'),
        ({"runtime": "sim", "steps": 3}, "steps requires time_only=True"),
        ({"runtime": "sim", "record": True}, "a simulated run needs no record"),
        (
            {"record": True},
            "sync has no servers, and the order of their updates is what is recorded, so omit record=True",
        ),
        ({"epochs": "3"}, 'epochs="3": must be a whole number'),
        ({"eval_every_s": "5"}, 'eval_every_s="5": must be a number'),
        ({"on_event": 3}, "on_event=3: must be a function that takes an event"),
        ({"csv": "yes"}, 'csv="yes": must be True or False'),
        ({"network": 3}, "network=3: must be text"),
        ({"placement": {}}, "placement={}: must be the path of a file"),
        ({"compute": "step_s=1"}, 'compute="step_s=1": must be a dictionary, such as dict(step_s=0.05)'),
        (
            {"settings": {"n_push": 2}},
            "fit() has no option settings: give the strategy its settings, rainband.Sync(lr=0.1).",
        ),
        (
            {"optimizer": "adam"},
            "fit() has no option optimizer: give the strategy its settings, rainband.Sync(optimizer='adam').",
        ),
        ({"faults": "nofile", "runtime": "sim"}, 'faults="nofile"'),
        ({"runs": "/proc/x"}, 'runs="/proc/x": No such file or directory. Use a folder that can be written to.'),
        ({"seed": True}, "seed=True: must be a whole number"),
        ({"epoch": 3}, "there is no option epoch (did you mean epochs?)"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as raised:
        rainband.fit("linear", **options)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "task, strategy, says",
    [
        ("linear", "dwnpour", r"no strategy named 'dwnpour' \(did you mean downpour\?\)"),
        ("liner", "downpour", r"no task named 'liner' \(did you mean linear\?\)"),
    ],
)
def test_names_that_are_mistyped_are_reported(task: str, strategy: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rainband.fit(task, strategy)


class Half:
    """Has only some of what a task has."""

    batch_size, epochs = 1, 1

    def data(self) -> None: ...

    def loss(self) -> None: ...


@pytest.mark.parametrize(
    "task, strategy, says",
    [
        (3, "sync", r'^3 is not a task: give a name, such as "digits", or rainband.ModuleTask\(...\).$'),
        (
            torch.nn.Linear(2, 2),
            "sync",
            r"^Linear\(.*\) is not a task: give a name, .* or rainband.ModuleTask\(",
        ),
        (Half(), "sync", r"^Half is not a task, because it has no model, evaluate: add what is missing, or"),
        (Linear, "sync", r"Linear is a class. Make an object of it: Linear\(\)"),
        ("digits", rainband.Downpour, r"Downpour is a class. Make an object of it: Downpour\(\)"),
        ("digits", 3, r"strategy=3: must be a strategy, such as rainband.Downpour\(\), or the name of one"),
    ],
)
def test_a_thing_that_is_no_task_or_strategy_is_refused_with_what_to_give(task: Any, strategy: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rainband.fit(task, strategy)


@pytest.mark.parametrize(
    "make, kind, says",
    [
        (lambda: rainband.Sync(lr="x"), ValueError, "lr='x': expected a number, such as lr=0.1"),
        (lambda: rainband.Sync(lr="0.1"), ValueError, "lr='0.1': expected a number"),
        (lambda: rainband.Downpour(n_push=2.5), ValueError, "n_push=2.5: expected a whole number"),
        (lambda: rainband.Downpour(local_lr="none"), ValueError, "local_lr='none': expected"),
        (lambda: rainband.Downpour(optimizer=3), ValueError, "optimizer=3: expected text"),
        (lambda: rainband.Downpour(npush=3), TypeError, r"Downpour has no setting 'npush' \(did you mean n_push\?\)"),
    ],
)
def test_wrong_settings_in_python_are_refused_by_name(make: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        make()
    assert rainband.Downpour(local_lr=None, lr=1, n_push=2) == rainband.Downpour(local_lr=None, lr=1.0, n_push=2)


def test_an_earlier_run_that_does_not_exist_is_reported_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read .*x: No such file"):
        rainband.fit("digits", "sync", config=tmp_path / "x")


def test_a_task_is_required() -> None:
    with pytest.raises(TypeError, match="requires a task"):
        rainband.fit()


def test_what_help_says_of_defaults_is_so() -> None:
    plain = RunConfig(task="", strategy="", num_workers=0, num_servers=0)
    shown = {
        name: one.option.default for name, one in declared().items() if name in PLAIN_FIELDS and one.option.default
    }
    for name, default in shown.items():
        value = getattr(plain, name)
        if value == "":
            continue  # nothing is chosen: the help says what happens then
        assert default == ("the task's own" if value is None else value if isinstance(value, str) else f"{value:g}")


# ---- real runs ----

AT_A_PROMPT = """
import dataclasses, threading, torch, rainband
from rainband.tasks.linear import Linear
from rainband.strategy import Requirements, Strategy

SCALE = 2.0

@dataclasses.dataclass(frozen=True)
class Mine(Linear):
    def loss(self, model, batch):
        return SCALE * super().loss(model, batch)

@dataclasses.dataclass(frozen=True)
class Slowly(Strategy):
    inner: rainband.Downpour = rainband.Downpour(optimizer="sgd", lr=0.25, n_push=2)
    requires = Requirements(batches_per_item=2)
    async def run(self, worker):
        await self.inner.run(worker)
    def server(self, num_replicas):
        return self.inner.server(num_replicas)

task = Mine(dimension=4, samples=64, batch_size=4, epochs=1)
results = {}
def run(key, **named):
    results[key] = rainband.fit(task, workers=2, servers=1, **named)

run("prompt", strategy=Slowly())
thread = threading.Thread(target=run, args=("thread",), kwargs={"strategy": rainband.Downpour(optimizer="sgd", lr=0.5)})
thread.start()
thread.join()

total = task.data().tensors[0].sum(0) / 4
for key, lr in (("prompt", 0.25), ("thread", 0.5)):
    result = results[key]
    assert torch.equal(result.module.weight[0], -lr * SCALE * total), (key, result.module.weight, total)
    assert (result.accounting.applied, result.accounting.batches, result.accounting.balanced) == (16, 16, True)
    assert result.history[-1].samples_done == 64 and result.outcome == "finished"
    assert not result.module.training and result.staleness.max >= 0
    assert (result.directory / "model.safetensors").exists() and "loss" in result.metrics
assert results["prompt"].directory != results["thread"].directory
print("all is well")
"""


@pytest.mark.processes
@pytest.mark.slow
def test_from_a_prompt_and_from_a_thread_twice_in_a_row(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input=AT_A_PROMPT,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "all is well" in done.stdout, done.stdout + done.stderr


@dataclasses.dataclass(frozen=True)
class Printing(Linear):
    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        print("in a worker")
        return super().loss(model, batch)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_two_fits_in_threads_leave_the_output_of_this_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, both, one_at_a_time = Zygote.start, threading.Barrier(2), threading.Lock()

    def at_once(*arguments: Any) -> Zygote:
        both.wait(timeout=20)
        with one_at_a_time:
            zygote = start(*arguments)
        both.wait(timeout=20)
        return zygote

    monkeypatch.setattr(Zygote, "start", staticmethod(at_once))
    before = [os.fstat(fd).st_ino for fd in (1, 2)]
    task = Printing(samples=4, epochs=1)
    runs = [partial(rainband.fit, task, "downpour", workers=1, servers=1, runs=tmp_path / name) for name in ("a", "b")]
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [os.fstat(fd).st_ino for fd in (1, 2)] == before
    printed = {path.parts[-3]: path.read_text() for path in tmp_path.glob("*/*/output.log")}
    assert printed == dict.fromkeys("ab", "in a worker\n" * 2)  # one step and the evaluation


@dataclasses.dataclass(frozen=True)
class Broken(Linear):
    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_an_error_in_the_task_is_raised_with_its_traceback(tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(RainbandError, match=r"ZeroDivisionError: on purpose(?s:.*)in loss"):
        rainband.fit(Broken(), workers=1, runs=tmp_path, on_event=lambda event: seen.append(type(event).__name__))
    assert (seen[0], seen[-1]) == ("RunStarted", "RunEnded") and "UserError" in seen


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_fit_that_is_recorded_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    result = rainband.fit(
        "linear", "downpour", workers=2, servers=1, epochs=1, record=True, timeline=True, runs=tmp_path
    )
    assert list(result.directory.glob("spans-worker-*.jsonl"))
    told = CliRunner().invoke(build_app(), ["replay", str(result.directory)])
    assert told.exit_code == 0 and "bit for bit" in told.output


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_recorded_fit_that_ends_with_skipped_gradients_is_replayed(tmp_path: Path) -> None:
    """The worker that saves the model reads it once more, at the version that its last gradients were to change."""
    task, diverging = Quadratic(samples=320), rainband.Downpour(optimizer="sgd", lr=1e20, guard=False)
    with pytest.warns(UserWarning, match="diverged: 8 of 10"):
        result = rainband.fit(task, diverging, workers=1, servers=1, epochs=1, record=True, runs=tmp_path)
    assert 0 < result.accounting.applied < result.accounting.batches
    told = CliRunner().invoke(build_app(), ["replay", str(result.directory)])
    assert told.exit_code == 0 and "bit for bit" in told.output


# ---- what rainband offers ----


def test_every_strategy_can_be_had_by_its_name() -> None:
    from rainband.plugins import find_strategy, strategy_names

    for name in strategy_names():
        kind = find_strategy(name)
        assert getattr(rainband, kind.__name__) is kind
    assert rainband.ModuleTask is ModuleTask
    with pytest.raises(
        AttributeError, match=r"rainband has no 'Downpuor' \(did you mean Downpour\?\): it has .*, Sync, Tree$"
    ):
        _ = rainband.Downpuor


def test_importing_does_not_import_torch() -> None:
    script = "import sys, rainband; rainband.fit, rainband.join; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_a_training_that_diverged_is_warned_of() -> None:
    def result(skipped: int) -> Any:
        return SimpleNamespace(accounting={"batches": 100, "not_processed": 0, "skipped": {"not finite": skipped}})

    with pytest.warns(UserWarning, match="the training diverged: 60 of 100 batches were skipped"):
        _warn_if_diverged(result(60))
    _warn_if_diverged(result(4))  # a warning would be an error here


# ---- in virtual time ----


def test_a_fit_in_virtual_time_trains_what_a_prompt_defines(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(Linear):
        pass

    task = Local(dimension=16, samples=32, batch_size=2, epochs=1)
    plain = rainband.Downpour(optimizer="sgd", lr=0.25)
    result = rainband.fit(task, plain, workers=2, servers=2, runtime="sim", network="wan", runs=tmp_path)
    assert torch.equal(next(result.module.parameters())[0], task.after(0.25))
    assert result.accounting.applied == 16 and result.history[-1].at_s > 0.03  # a wan's latency


def test_a_simulated_fit_writes_what_it_is_asked_for_and_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "faults.txt").write_text("0.02 pause worker 1 for 0.01\n")
    asked: FitOptions = {"runtime": "sim", "runs": tmp_path / "runs", "csv": True, "eval_every_s": 0.0}
    first = rainband.fit(
        "linear", "downpour", 2, 1, batch_size=16, epochs=1, seed=3, faults=tmp_path / "faults.txt",
        compute={"step_s": 0.01}, **asked,
    )  # fmt: skip
    again = rainband.fit(config=first.directory, **asked)
    assert (first.directory / "progress.csv").read_text() == (again.directory / "progress.csv").read_text()
    assert first.accounting == again.accounting and first.directory != again.directory
    configs = [json.loads((result.directory / "config.json").read_text()) for result in (first, again)]
    assert [config.pop("directory") for config in configs] == [str(first.directory), str(again.directory)]
    assert configs[0] == configs[1] and "pause worker 1" in configs[0]["sim"]["faults"]
    assert configs[0]["strategy_settings"]["n_push"] == 1
    with pytest.raises(ValueError, match="already has a task and a strategy: omit them, or config"):
        rainband.fit("linear", config=first.directory)


def test_message_timing_alone_can_be_simulated(tmp_path: Path) -> None:
    result = rainband.fit("linear", "downpour", 3, 1, runtime="sim", time_only=True, steps=5, runs=tmp_path)
    assert result.outcome == "finished" and result.accounting.applied == 15


@dataclasses.dataclass(frozen=True)
class Complex(Linear):
    """Its model is refused."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2, dtype=torch.complex64)


@pytest.mark.parametrize("strategy", [rainband.Downpour(), rainband.Sync()])
def test_a_simulation_that_is_refused_leaves_nothing_behind(tmp_path: Path, strategy: Any) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="is complex"):
        rainband.fit(Complex(), strategy, runtime="sim", runs=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before


def test_sync_with_stages_has_the_settings_that_it_needs_there(tmp_path: Path) -> None:
    samples = torch.utils.data.TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))  # noqa: E731
    task = ModuleTask(layers, samples, torch.nn.functional.mse_loss, batch_size=4, epochs=1)
    result = rainband.fit(task, "sync", workers=2, stages=2, runtime="sim", runs=tmp_path)
    assert result.accounting.applied == 4


def test_an_option_leaves_out_the_last_batch_of_each_epoch_if_it_is_short(tmp_path: Path) -> None:
    samples = torch.utils.data.TensorDataset(torch.ones(9, 2), torch.ones(9, 1))
    task = ModuleTask(lambda: torch.nn.Linear(2, 1), samples, torch.nn.functional.mse_loss, batch_size=4, epochs=3)
    simulated: dict[str, Any] = {"runtime": "sim", "workers": 1, "servers": 1, "runs": tmp_path}
    assert rainband.fit(task, "downpour", **simulated).accounting.batches == 9
    assert rainband.fit(task, "downpour", drop_last=True, **simulated).accounting.batches == 6
    with pytest.raises(ValueError, match="with drop_last, the batch size must be at most 9"):
        rainband.fit(task, "downpour", drop_last=True, batch_size=10, **simulated)
    with pytest.raises(OptionError, match="sandblaster uses every sample .* so omit drop_last=True"):
        rainband.fit(task, "sandblaster", drop_last=True)


def test_another_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='runtime="moon": choose from processes, ray, sim'):
        rainband.fit("digits", runtime="moon", runs=tmp_path)
