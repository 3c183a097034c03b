"""The documentation tells the truth: what it links to, names, shows and lists is there."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.processes import RunLauncher

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT).with_suffix("")))


# ---- reading a page ----


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without what stands between fences."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """As anchors: 'Where is it the wrong choice?' is #where-is-it-the-wrong-choice."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def shown_commands(program: str) -> list[tuple[str, list[str]]]:
    """(where, words) of every `$ rainband ...` line in a console block."""
    return [
        (page.name, shlex.split(line.removeprefix("$ "))[1:])
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith(f"$ {program} ")
    ]


# ---- links and pictures ----


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if target.startswith(("http://", "https://")):
            continue
        if not there.exists() or (anchor and anchor not in headings(there)):
            dead.append(target)
    assert dead == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w/]+\.md)", PAGES[0].read_text(encoding="utf-8")))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES if page.is_relative_to(ROOT / "docs")}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.stem)
def test_a_page_begins_with_what_it_is_for_whom_and_one_command(page: Path) -> None:
    beginning = page.read_text(encoding="utf-8").split("\n## ")[0]
    title, what, *rest = beginning.split("\n\n")
    assert title.startswith("# ") and not what.startswith(("```", "|", "!"))
    assert re.search(r"\b(you|your|for|users?|developers|readers|everyone)\b", what.lower())
    assert "```console\n$ " in "\n\n".join(rest)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_has_a_background_of_its_own_in_both_colour_schemes(picture: Path) -> None:
    ElementTree.parse(picture)
    style = picture.read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    colours = r"(\.[\w-]+)\s*\{"
    assert 'class="paper"' in dark
    assert set(re.findall(colours, light)) == set(re.findall(colours, dark.split("</style>")[0]))


# ---- names ----


@cache
def names_in(path: Path) -> frozenset[str]:
    """Function, Class, Class.method and CONSTANT of one file, read but not run."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= set(_names_of(node))
    return frozenset(found)


def _names_of(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name
        case ast.ClassDef():
            yield node.name
            yield from (f"{node.name}.{name}" for inner in node.body for name in _names_of(inner))
        case ast.Assign():
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def file_of(name: str) -> Path | None:
    """A file as pages name it: from the root, or from inside the package."""
    return next((path for path in (ROOT / name, ROOT / "rainband" / name) if path.is_file()), None)


def wrong_references(text: str) -> list[str]:
    """Return those of `fit.py` and `fit.py:FitResult.module` whose file or name does not exist."""
    wrong = []
    for file, name in re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", text):
        path = None if file in THEIR_FILES else file_of(file)
        if file not in THEIR_FILES and (path is None or (name and name not in names_in(path))):
            wrong.append(f"{file}:{name}" if name else file)
    return wrong


# Files that the reader writes.
THEIR_FILES = {
    "rainband/cli/howmany.py",
    "ideas.py",
    "moving.py",
    "mylab.py",
    "staleness_aware.py",
    "train.py",
}  # what the reader writes


@each_page
def test_every_file_and_function_that_is_named_exists(page: Path) -> None:
    assert wrong_references(prose(page)) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`fit.py:fit` `fit.py:shove` `no_such.py` `server/server.py:Server` `rainband/server/server.py`"
    assert wrong_references(text) == ["fit.py:shove", "no_such.py"]


def test_the_way_of_one_gradient_goes_through_the_files_in_their_order() -> None:
    text = (ROOT / "docs" / "internals" / "life_of_a_gradient.md").read_text(encoding="utf-8").split("**2. ")[1]
    files = [
        "worker/worker",
        "model/gradient",
        "worker/client",
        "transports/server_links",
        "server/server",
        "rules/apply_on_arrival",
        "server/block",
    ]
    places = [text.index(f"`{file}.py:") for file in files]
    assert places == sorted(places)


def test_the_page_about_events_lists_every_event() -> None:
    from rainband.protocol import events

    text = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    table = text.split("| event | meaning |")[1].split("\n\n")[0]
    listed = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    assert sorted(listed) == sorted(kind.__name__ for kind in events.AnyEvent.__args__)


def test_the_page_of_faults_has_each_of_the_54_once() -> None:
    page = (ROOT / "docs" / "guides" / "faults.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert sorted(numbers) == list(range(1, 55))


def test_the_page_about_the_run_directory_lists_every_entry_of_the_accounting() -> None:
    from rainband.protocol.accounting import BatchAccounting

    text = (ROOT / "docs" / "reference" / "run_directory.md").read_text(encoding="utf-8")
    table = text.split("| entry | counts |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(BatchAccounting.__struct_fields__)


def test_the_protocol_lists_every_answer_a_server_gives() -> None:
    from rainband.protocol.messages import PushResult

    text = (ROOT / "docs" / "internals" / "protocol.md").read_text(encoding="utf-8")
    table = text.split("| answer | because | the worker |")[1].split("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    assert listed == {result.name.lower() for result in PushResult}


# ---- strategies ----


@cache
def load(name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def strategy_table() -> ModuleType:
    return load("strategy_table")


def test_the_strategy_table_is_what_the_files_say() -> None:
    module = strategy_table()
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.with_table(page, module.table()), "type  make docs"


@pytest.mark.parametrize("avoid", ["Avoid when a|b.", "Not when a|b."])
def test_a_row_of_the_table_is_the_first_paragraph_and_the_advice(tmp_path: Path, avoid: str) -> None:
    (tmp_path / "gossip.py").write_text(
        f'"""Talk to a neighbor.\n\n    w = (w + v) / 2\n\nUse when there is\nno server. {avoid}\n"""\n'
    )
    (row,) = strategy_table().table(tmp_path).splitlines()[2:]
    assert row == "| `gossip` | Talk to a neighbor | when there is no server | when a\\|b |"


def test_the_readme_has_every_strategy_in_a_family_and_counts_them() -> None:
    from rainband.plugins import strategy_names

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    families = readme.split("## Choose a strategy")[1].split("\n## ")[0]
    rows = "\n".join(line.split("|")[2] for line in families.splitlines() if line.startswith("| "))
    named = set(re.findall(r"`(\w+)`", rows))
    assert named | {"single"} == set(strategy_names())
    assert f"**{len(strategy_names())} algorithms by name.**" in readme


@each_page
def test_a_setting_that_is_written_exists(page: Path) -> None:
    """`lr=0.1` in a sentence is a setting of a strategy, a task or a codec, or a parameter of a public function."""
    written = set(re.findall(r"`(?:\w+ )?(\w+)=[^`]*`", prose(page)))
    assert written - known_settings() - THEIR_SETTINGS == set()


def test_a_strategy_that_is_written_with_settings_can_be_made() -> None:
    """Such as sync batch_per_worker=true, on a page or in a text of the program; letters stand for numbers."""
    from rainband.plugins import load_strategy, strategy_names
    from rainband.settings import parse_pairs

    written = re.compile(rf"(?<![\w./:])({'|'.join(strategy_names())})((?:\s+\w+=[\w.:+-]*\w)+)")
    files = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "rainband").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    found = set()
    for file in files:
        text = re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))  # of adjacent literals
        found |= {(name, *settings.split()) for name, settings in written.findall(text)}
    assert len(found) > 20
    for name, *settings in found:
        load_strategy(name, parse_pairs([pair for pair in settings if not re.fullmatch(r"\w+=[a-z]", pair)]))


@cache
def known_settings() -> frozenset[str]:
    import dataclasses
    import inspect

    import rainband
    from rainband import options
    from rainband.codecs.find import codec_names, find_codec
    from rainband.model_parallel.schedules import builders
    from rainband.plugins import find_strategy, strategy_names

    functions = [rainband.fit, rainband.join, rainband.minimize, *vars(builders).values()]
    found = {*options.declared()}
    found |= {field.name for name in strategy_names() for field in dataclasses.fields(find_strategy(name))}
    found |= {field.name for name in codec_names() for field in dataclasses.fields(find_codec(name))}  # type: ignore[arg-type]
    for function in filter(inspect.isfunction, functions):
        found |= set(inspect.signature(function).parameters)
    return frozenset(found)


THEIR_SETTINGS = {
    *("RAY_AUTH_MODE", "RAY_USE_TLS"),  # variables of Ray's
    *("set_to_none", "requires_grad", "shuffle", "assign"),  # torch's
    *("callbacks", "sparse", "batch_size"),  # of others, or of run.batches
    *("step_s", "slow_workers", "measure_s"),  # of the simulated machines: compute.step_s=0.05
    *("fc1", "mlp", "conv"),  # layers
    *("deferred", "prefetch"),  # attributes of tasks and data
}


def test_a_strategy_without_advice_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text('"""Says nothing."""\n')
    with pytest.raises(ValueError, match=r"silent.py: its docstring should have a paragraph 'Use when"):
        strategy_table().table(tmp_path)


def the_new_strategy(having: str = "class StalenessAware") -> str:
    return next(block for block in blocks(ROOT / "docs" / "guides" / "add_strategy.md", "python") if having in block)


def imported(name: str, file: Path, monkeypatch: pytest.MonkeyPatch, having: str = "class StalenessAware") -> Any:
    """Import the page's strategy from a file, under a name."""
    file.write_text(the_new_strategy(having))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_rule_on_the_page_about_strategies_divides_by_staleness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    ideas = imported("ideas", tmp_path / "ideas.py", monkeypatch)
    rule, block = ideas.DivideByStaleness(), Recorder(version=5)
    rule.absorb(block, FakePush(version=2), torch.tensor([6.0]))  # has missed 3 updates
    rule.absorb(block, FakePush(version=5), torch.tensor([6.0]))  # has missed none
    rule.absorb(block, FakePush(version=5), None)
    assert block.applied == [2.0, 6.0]


def test_the_test_of_a_rule_on_the_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import test_rules

    ideas = imported("ideas", tmp_path / "ideas.py", monkeypatch)
    names = {**vars(test_rules), **vars(ideas)}
    exec(the_new_strategy("def test_a_gradient_is_divided"), names)
    names["test_a_gradient_is_divided_by_its_staleness"]()


def test_the_buffering_rule_on_the_page_applies_medians_and_each_batch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rainband.strategies.downpour import Downpour
    from tests import test_rules
    from tests.builders import make_plan, make_push, named
    from tests.harness import run
    from tests.ledger import LR, Case
    from tests.unscaled import AtFullWeight

    names = {**vars(imported("ideas", tmp_path / "ideas.py", monkeypatch))}
    names |= {"Push": object, "RuleBlock": object, "Tensor": object}  # which a module imports for its types only
    (code,) = [b for b in blocks(ROOT / "docs" / "guides" / "add_strategy.md", "python") if "class Median" in b]
    exec(code, names)
    rule, block = names["Median"](), test_rules.Recorder(make_plan())
    for portion, (value, absent) in enumerate([(1.0, (0, 3)), (100.0, (3,)), (2.0, (3, 4)), (7.0, ())]):
        rule.absorb(block, make_push(named(portion, 0), absent=absent), test_rules.number(value))
    assert (block.numbers(), block.absent, rule.buffered) == ([2.0], [{3}], 1)
    rule.flush(block)
    assert (block.numbers(), rule.buffered) == ([2.0, 7.0], 0)

    class Robust(Downpour):
        def server(self, num_replicas: int) -> Any:
            return dataclasses.replace(super().server(num_replicas), rule=names["Median"])

    case = Case(AtFullWeight(Robust(lr=LR, optimizer="sgd", guard=False)), num_workers=2, num_servers=2)
    accounting = run(0, case).coordinator.reporting.accounting()
    assert accounting is not None and accounting.applied == accounting.batches == 8


def test_the_strategy_on_the_page_refuses_wrong_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ideas = imported("ideas", tmp_path / "ideas.py", monkeypatch)
    for wrong in ({"lr": -1.0}, {"power": -1.0}, {"optimizer": "adam"}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
            ideas.StalenessAware(**wrong)


def test_the_strategy_without_servers_ends_with_the_moving_average_of_the_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the lines of the page: with means of 4, 6 and 10 and a decay of 0.5, the average ends at 7.5."""
    import asyncio

    import torch

    from rainband.model.model_vector import ModelVector

    moving = imported("moving", tmp_path / "moving.py", monkeypatch, "class MovingMean")
    means = [ModelVector([torch.tensor([value])]) for value in (4.0, 6.0, 10.0)]
    worker = FakeWorker(means)
    asyncio.run(moving.MovingMean(period=2, decay=0.5).run(worker))
    assert [vector.tensors[0].item() for vector in worker.replaced] == [4.0, 6.0, 7.5]


class FakeWorker:
    """A worker that is its own models, parameters and optimizer; each round has one of the given means."""

    def __init__(self, means: list[Any]) -> None:
        self.means = means
        self.models = self.params = self
        self.shared: dict[str, Any] = {}
        self.replaced: list[Any] = []

    def optimizer(self, spec: Any, schedule: Any) -> FakeWorker:
        return self

    async def begin(self) -> bool:
        return bool(self.means)

    def batches(self, number: int) -> range:
        return range(number)

    async def gradient(self, batch: int) -> int:
        return batch

    def step(self, gradient: int) -> None:
        assert gradient in (0, 1)

    async def mean(self) -> Any:
        return self.means.pop(0)

    @property
    def is_last(self) -> bool:
        return not self.means

    def replace(self, vector: Any) -> None:
        self.replaced.append(vector)


def test_the_strategy_without_servers_passes_the_contract_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rainband import plugins
    from tests.contract import test_strategies as contract

    name, names = "moving_mean", plugins.strategy_names()
    imported(f"rainband.strategies.{name}", tmp_path / f"{name}.py", monkeypatch, "class MovingMean")
    monkeypatch.setattr(plugins, "names_of", lambda family: [*names, name])
    tests = [test for key, test in vars(contract).items() if key.startswith("test_")]
    assert sum(call_for_strategy(test, name, "averaging") for test in tests) >= 4
    assert strategy_table().row(tmp_path / f"{name}.py").startswith(f"| `{name}` |")


def test_the_strategy_on_the_page_passes_the_contract_tests_when_its_file_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rainband import plugins
    from tests.contract import test_strategies as contract
    from tests.test_layers import read_module, read_package, wrong_imports

    name, names = "staleness_aware", plugins.strategy_names()
    full_name = f"rainband.strategies.{name}"
    imported(full_name, tmp_path / f"{name}.py", monkeypatch)
    monkeypatch.setattr(plugins, "names_of", lambda family: [*names, name])
    assert name not in contract.UNSCALED and name not in contract.AS_LEDGER
    tests = [test for key, test in vars(contract).items() if key.startswith("test_")]
    ran = sum(call_for_strategy(test, name) for test in tests)
    assert ran >= 16
    assert strategy_table().row(tmp_path / f"{name}.py").startswith(f"| `{name}` |")
    package = {**read_package(), full_name: read_module(full_name, the_new_strategy())}
    assert wrong_imports(package) == []
    script = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path).returncode == 0


def call_for_strategy(test: Any, name: str, like: str = "") -> int:
    """Call a test that has a strategy's name as a parameter, with each value of its others; return the calls.

    `like`: only those that are for this strategy, too.
    """
    parameters = {mark.args[0]: mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"}
    if "name" not in parameters or (like and like not in parameters["name"]):
        return 0
    calls = [
        dict(zip(parameters, values, strict=True)) for values in product(*({**parameters, "name": [name]}.values()))
    ]
    for arguments in calls:
        test(**arguments)
    return len(calls)


class Recorder:
    """A block that remembers what was applied."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.applied: list[float] = []

    def apply(self, gradient: Any, pushes: Any, absent: Any) -> None:
        self.applied.append(gradient.item())


class FakePush:
    def __init__(self, version: int) -> None:
        self.version = version
        self.absent = ()


def test_the_full_batch_strategy_on_the_page_descends(tmp_path: Path) -> None:
    (tmp_path / "descent.py").write_text(blocks(ROOT / "docs" / "guides" / "full_batch.md", "python")[-1])
    words = ["quadratic", "descent:GradientDescent", "lr=0.05", "iterations=20", "--runtime", "sim"]
    done = rainband("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("runs/*/events.jsonl")
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [event["loss"] for event in seen if event["event"] == "IterationDone"]
    assert len(losses) == 20 and losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]


@pytest.mark.processes
def test_the_strategy_on_the_page_runs_from_outside_the_package(tmp_path: Path) -> None:
    (tmp_path / "ideas.py").write_text(the_new_strategy())
    words = ["quadratic", "ideas:StalenessAware", "lr=0.05", "--workers", "2", "--servers", "1", "--epochs", "1"]
    done = rainband("train", *words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"applied":32' in done.stdout.splitlines()[-1]  # 1,024 samples in batches of 32


def rainband(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from rainband.cli.main import main; main()"]
    return subprocess.run([*program, *words], cwd=cwd, capture_output=True, text=True, timeout=50)


# ---- numbers ----

NUMBERS = [  # page, sentence, where the number is, its value
    (
        "guides/fault_tolerance",
        "for `--failure-timeout` seconds (5 unless",
        "runtimes.config:RunConfig.failure_timeout_s",
        5,
    ),
    ("guides/fault_tolerance", "If three workers die on the same batches", "coordinator.liveness:FATAL_DEATHS", 3),
    ("guides/fault_tolerance", "After 10 minutes, or", "coordinator.liveness:SHORTEST_END_S", 10 * 60),
    ("guides/fault_tolerance", "or 10 × the failure timeout", "coordinator.liveness:ENDED_AFTER", 10),
    ("guides/full_batch", "more than twice the usual time", "coordinator.work_queue:OVERDUE", 2),
    ("guides/simulation", "With 10,000 connections or more", "runtimes.simulation.run:AGGREGATE_FROM", 10_000),
    ("guides/strategies", "by more than twice its initial size", "coordinator.divergence_guard:DIVERGED", 2),
    ("guides/strategies", "one gradient in ten", "coordinator.divergence_guard:NOT_FINITE_FRACTION", 0.1),
    ("guides/strategies", "(and at least three)", "coordinator.divergence_guard:NOT_FINITE_LEAST", 3),
    ("internals/flat_parameters", "on a 64-byte boundary (16 floats)", "protocol.layout:UNIT", 16),
    ("internals/protocol", "a group of up to 64 batches", "protocol.data_plan:MAX_PORTION_BATCHES", 64),
    ("internals/transports", "at most eight times", "transports.shared_memory:READ_TRIES", 8),
    ("internals/transports", "up to eight slots", "transports.server_links:MAILBOX_SLOTS", 8),
    ("internals/transports", "with 64 files lent", "transports.peers_shared:MAX_SEGMENTS", 64),
    ("internals/transports", "with 64 MB not sent", "transports.peers_tcp:ROOM_BYTES", 64 << 20),
    ("internals/transports", "Up to 4 kB are sent", "transports.peers_shared:INLINE_BYTES", 4096),
    ("internals/transports", "    32 bytes ", "transports.frames:PREFIX_BYTES", 32),
]


@pytest.mark.parametrize("page, sentence, where, value", NUMBERS)
def test_a_number_on_a_page_is_that_of_the_code(page: str, sentence: str, where: str, value: float) -> None:
    import importlib

    module, _, names = where.partition(":")
    found: Any = importlib.import_module(f"rainband.{module}")
    for name in names.split("."):
        found = default_of(found, name) if isinstance(found, type) else getattr(found, name)
    assert found == value
    assert sentence in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("\n", " ")


def default_of(struct: type, field: str) -> Any:
    import msgspec

    return next(entry.default for entry in msgspec.structs.fields(struct) if entry.name == field)


# ---- output ----


@pytest.mark.processes
def test_the_output_on_the_pages_is_what_a_run_prints(launcher: RunLauncher, tmp_path: Path) -> None:
    """Whatever the numbers: with them masked, the lines are the same."""
    words = ("train", "digits", "downpour", "--workers", "4", "--servers", "2", "--epochs", "1")
    _, output, _ = launcher.typed(tmp_path, *words)
    printed = {masked(line) for line in output.splitlines()}
    (shown,) = (block for block in blocks(ROOT / "docs/guides/quickstart.md", "text") if "finished after" in block)
    lines = [masked(line) for line in shown.splitlines() if " samples  loss " not in line]
    assert [line for line in lines if line not in printed] == []


@pytest.mark.processes
def test_the_output_in_the_readme_is_what_a_script_prints(launcher: RunLauncher, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "image_classifier.py")
    _, output, _ = launcher.typed(tmp_path, "run", "--workers", "2", script, "--tiny")
    printed = {masked(line) for line in output.splitlines()}
    (shown,) = (block for block in blocks(ROOT / "README.md", "text") if "which the workers shared" in block)
    assert [line for line in map(masked, shown.splitlines()) if line not in printed] == []


def masked(line: str) -> str:
    line = re.sub(r"\d[\d.,]*(?: (?:m?s|[kMG]?B))?", "#", line)
    return re.sub(r"\bepochs?\b", "epochs", re.sub(r" +", " ", line))


# ---- code ----


@each_page
def test_python_on_a_page_can_be_compiled(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@each_page
def test_both_sides_of_a_diff_can_be_compiled(page: Path) -> None:
    for block in blocks(page, "diff"):
        for side in "+-":
            lines = [line[1:] for line in block.splitlines() if line[:1] in (side, " ", "")]
            compile("\n".join(lines), page.name, "exec")


def test_the_change_of_a_training_loop_is_three_lines() -> None:
    for page in ("README.md", "docs/guides/training_loop.md"):
        (diff,) = blocks(ROOT / page, "diff")
        old = [line[1:].strip() for line in diff.splitlines() if line.startswith("-")]
        new = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
        assert len([line for line in new if line not in old]) == 3


# ---- the command line ----


@cache
def app() -> Any:
    import typer.main

    from rainband.cli.main import build_app

    return typer.main.get_command(build_app())


def commands() -> dict[str, Any]:
    """Return every command by its full name: "train", "runs", "runs show"."""
    found = {}
    for name, command in app().commands.items():
        found[name] = command
        found |= {f"{name} {inner}": sub for inner, sub in getattr(command, "commands", {}).items()}
    return found


def test_the_page_about_the_command_line_is_what_the_commands_print() -> None:
    module = load("cli_page")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "type  make docs"
    sections = re.findall(r"^## rainband ?(.*)$", module.page(), re.MULTILINE)
    assert sorted(filter(None, sections)) == sorted(commands())


@each_page
def test_no_option_is_named_that_no_command_has(page: Path) -> None:
    known = {option for command in commands().values() for parameter in command.params for option in parameter.opts}
    named = set(re.findall(r"`(--[\w-]+)", prose(page)))
    assert named - known - {"--help", "--version", "--write", "--install-completion"} == set()


@pytest.mark.parametrize("where, words", shown_commands("rainband"), ids=str)
def test_a_command_that_is_shown_can_be_typed(where: str, words: list[str]) -> None:
    """Parsed by the real command line, without doing it."""
    command, name = app(), "rainband"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{where}: {name} has no command {words[0]}"
        name, command, words = words[0], command.commands[words[0]], words[1:]
    assert command.make_context(name, list(words))


def test_the_built_in_tasks_are_those_on_the_page() -> None:
    from rainband.tasks.load import task_names

    text = (ROOT / "docs" / "guides" / "quickstart.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"The built-in tasks are (.*?);", text)
    assert re.findall(r"`(\w+)`", told) == task_names()


def test_what_the_readme_says_make_does_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)$", "\n".join(blocks(ROOT / "README.md", "console")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


# ---- names in Python ----


@each_page
def test_what_a_page_imports_and_calls_exists(page: Path) -> None:
    import rainband

    wrong = [f"rainband.{name}" for name in re.findall(r"`rainband\.(\w+)", prose(page)) if not is_public(name)]
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rainband":
                wrong += [] if hasattr(rainband, node.attr) else [f"rainband.{node.attr}"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rainband."):
                wrong += [
                    f"{node.module}.{alias.name}" for alias in node.names if not is_defined(node.module, alias.name)
                ]
    assert wrong == []


def is_public(name: str) -> bool:
    """Return True if `rainband.name` is an attribute or a package."""
    import rainband

    return hasattr(rainband, name) or importlib.util.find_spec(f"rainband.{name}") is not None


def is_defined(module: str | None, name: str) -> bool:
    path = ROOT.joinpath(*(module or "").split("."))
    file = next(file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())
    return name in names_in(file) or bool(re.search(rf"^(from|import) .*\b{name}\b", file.read_text(), re.MULTILINE))


def test_the_fault_lines_on_the_page_are_faults() -> None:
    from rainband.runtimes.simulation.models import faults

    text = (ROOT / "docs" / "guides" / "simulation.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([\d.]+ [^`]+)` \|", text, re.MULTILINE)
    assert len(lines) > 5
    assert {fault.what for fault in faults.parse("\n".join(lines))} == {*faults.ON_A_NODE, *faults.ON_A_LINK}


# ---- the architecture ----


def architecture() -> str:
    return (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def rows_under(head: str, text: str) -> list[list[str]]:
    """Return the entries of a Markdown table, row by row, without its head."""
    table = text.split(head)[1].split("\n\n")[0]
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in table.strip().splitlines()[1:]]


def test_an_unreleased_change_is_one_line() -> None:
    unreleased = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("## [Unreleased]")[1].split("\n## ")[0]
    entries = unreleased.split("Names of earlier development versions.")[0].splitlines()
    others = [line for line in entries if line and not line.startswith(("- ", "### ")) and not line.endswith(":")]
    assert others == [], "continue no entry on a second line"
    assert [line for line in entries if len(line) > 160] == []


def test_the_table_of_packages_is_that_of_the_layers() -> None:
    from tests.test_layers import LAYERS

    table = [
        [name, set(re.findall(r"`([\w.]+)`", modules)), "" if imports == "nothing" else imports.replace(",", "")]
        for name, modules, _, imports in rows_under("| layer | modules | responsibility | may import |", architecture())
    ]
    assert table == [[name, set(layer.modules.split()), layer.may_import] for name, layer in LAYERS.items()]


def test_the_table_of_slow_networks_is_that_of_the_measured_rows() -> None:
    module = load("slow_network_page")
    rows = [
        {"name": f"downpour lr=0.2 optimizer=sgd, topk:0.01, {mbit} Mbit, 0.7M, to 50 %", "unit": "s", "value": value}
        for mbit, value in ((100, 2.0), (100, 3.04), (1000, float("inf")))
    ]
    assert module.table(module.times(rows)).splitlines()[2] == "| `downpour`, `topk:0.01` | 2-3 s | not in 75 s |"
    assert module.written() == module.table(module.times(module.rows([module.KEPT])))


def test_the_messages_in_the_picture_are_messages() -> None:
    from rainband.protocol import messages

    rows = rows_under("| from, to | messages | answers |", architecture())
    named = {name for row in rows for name in re.findall(r"`(\w+)`", " ".join(row))}
    assert len(named) > 10
    assert [name for name in named if not hasattr(messages, name)] == []


def test_every_new_path_in_the_table_of_old_paths_exists() -> None:
    """A file of the package, a document or a test; a file that was split has several new paths."""
    rows = rows_under("| old | new |", architecture())
    assert len(rows) > 200
    assert {old.split("/")[0] for old, _ in rows} == {"rainband", "docs", "reproduce", "tests"}
    assert [old for old, new in rows if "," in new] != []
    missing = [path for _, new in rows if new != "(removed)" for path in new.split(", ") if not (ROOT / path).is_file()]
    assert missing == []


def test_every_file_that_was_moved_is_in_the_table_of_old_paths() -> None:
    """The table begins at this commit; a clone without history cannot be checked."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "2ece5f6"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this clone does not have the commit")
    moved = {path for path in listed.stdout.split() if not (ROOT / path).exists()}
    assert {old for old, _ in rows_under("| old | new |", architecture())} == moved


def test_the_example_rule_limits_a_gradient() -> None:
    import torch

    example: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "internals" / "extending.md", "python")[0], example)
    block, applied = Recorder(version=0), []
    block.apply = lambda gradient, pushes, absent: applied.append(gradient.tolist())  # type: ignore[method-assign]
    for gradient in (torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5]), None):
        example["ClipOnArrival"]().absorb(block, FakePush(version=0), gradient)
    assert [[round(value, 6) for value in values] for values in applied] == [[0.6, 0.8], [0.0, 0.5]]


def test_the_example_command_counts_runs(tmp_path: Path) -> None:
    import typer
    from typer.testing import CliRunner

    example: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "internals" / "extending.md", "python")[1], example)
    command = typer.Typer()
    example["register"](command)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "events.jsonl").touch()
    (tmp_path / "no_run").mkdir()
    assert CliRunner().invoke(command, ["--runs", str(tmp_path)]).output == "1\n"


# ---- the site ----


def test_the_navigation_of_the_site_has_every_page() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w/]+\.md)$", configuration, re.MULTILINE)
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    )


def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed: make docs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "rainband").symlink_to(ROOT / "rainband")
    (tmp_path / "mkdocs.yml").write_bytes((ROOT / "mkdocs.yml").read_bytes())
    program = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    printed = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    assert [
        line for line in printed.splitlines() if "could not" in line or " ]" in line
    ] == []  # names; pages and lines
    assert done.returncode == 0, printed
    assert "No issues found" in printed
    assert 'id="rainband.fit.fit"' in (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
