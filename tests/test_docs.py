"""The documentation tells the truth: what it links to, names, shows and lists is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES[1:]}


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
    """Of `client.py` and `client.py:Client.push`: those whose file or name does not exist."""
    wrong = []
    for file, name in re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", text):
        path = None if file in THEIR_FILES else file_of(file)
        if file not in THEIR_FILES and (path is None or (name and name not in names_in(path))):
            wrong.append(f"{file}:{name}" if name else file)
    return wrong


THEIR_FILES = {"ideas.py", "train.py"}  # what the reader writes


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

    text = (ROOT / "docs" / "reference" / "run_directory.md").read_text(encoding="utf-8")
    table = text.split("| event | means |")[1].split("\n\n")[0]
    listed = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    assert sorted(listed) == sorted(kind.__name__ for kind in events.AnyEvent.__args__)


def test_the_page_about_books_lists_every_entry() -> None:
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
def strategy_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("strategy_table", ROOT / "docs" / "strategy_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_strategy_table_is_what_the_files_say() -> None:
    module = strategy_table()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == module.with_table(readme, module.table()), "type  python docs/strategy_table.py --write"


def test_a_row_of_the_table_is_the_first_paragraph_and_the_advice(tmp_path: Path) -> None:
    (tmp_path / "gossip.py").write_text(
        '"""Talk to a neighbour.\n\n    w = (w + v) / 2\n\nUse it when there is\nno server. Not when a|b.\n"""\n'
    )
    (row,) = strategy_table().table(tmp_path).splitlines()[2:]
    assert row == (
        "| [`gossip`](rainband/strategies/gossip.py) | Talk to a neighbour | when there is no server | when a\\|b |"
    )


def test_a_strategy_without_advice_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text('"""Says nothing."""\n')
    with pytest.raises(ValueError, match=r"silent.py: its docstring should have a paragraph 'Use it when"):
        strategy_table().table(tmp_path)


def the_new_strategy() -> str:
    return blocks(ROOT / "docs" / "guides" / "add_strategy.md", "python")[0]


def test_the_rule_on_the_page_about_strategies_divides_by_staleness(tmp_path: Path) -> None:
    import torch

    (tmp_path / "ideas.py").write_text(the_new_strategy())
    spec = importlib.util.spec_from_file_location("ideas", tmp_path / "ideas.py")
    assert spec is not None and spec.loader is not None
    ideas = importlib.util.module_from_spec(spec)
    sys.modules["ideas"] = ideas  # dataclasses look their module up
    try:
        spec.loader.exec_module(ideas)
    finally:
        del sys.modules["ideas"]
    rule, block = ideas.DivideByStaleness(), Recorder(version=5)
    rule.absorb(block, FakePush(version=2), torch.tensor([6.0]))  # has missed 3 updates
    rule.absorb(block, FakePush(version=5), torch.tensor([6.0]))  # has missed none
    rule.absorb(block, FakePush(version=5), None)
    assert block.applied == [2.0, 6.0]


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


def test_the_change_of_ones_own_loop_is_three_lines() -> None:
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
    """Every command with its full name: "train", "runs", "runs show"."""
    found = {}
    for name, command in app().commands.items():
        found[name] = command
        found |= {f"{name} {inner}": sub for inner, sub in getattr(command, "commands", {}).items()}
    return found


def sections() -> dict[str, str]:
    """Of the page about the command line: command -> what is said about it."""
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    parts = re.split(r"^## rainband (.*)$", text.split("## Exit codes")[0], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_about_the_command_line_has_every_command_and_no_other() -> None:
    assert sorted(sections()) == sorted(commands())


def test_every_option_is_told_in_the_section_of_its_command() -> None:
    untold = [
        f"{name} {option}"
        for name, command in commands().items()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--help" and option not in sections()[name]
    ]
    assert untold == []


def test_no_option_is_told_that_a_command_does_not_have() -> None:
    known = {option for command in commands().values() for parameter in command.params for option in parameter.opts}
    told = {option for text in sections().values() for option in re.findall(r"`(--[\w-]+)", text)}
    assert told <= known


def test_exit_codes_are_those_of_the_help() -> None:
    from rainband.cli.report_errors import EXIT_CODES

    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").split("## Exit codes")[1]
    told = {code: meaning.strip() for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}
    assert told == dict(re.findall(r"^  (\d+)\s+(.*)$", EXIT_CODES, re.MULTILINE))


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

    (told,) = re.findall(r"is a built-in one \((.*?)\)", sections()["train"])
    assert re.findall(r"`(\w+)`", told) == task_names()


def test_what_the_readme_says_make_does_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)$", "\n".join(blocks(ROOT / "README.md", "console")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
