"""Words that a reader from outside cannot understand, or would understand otherwise: in texts, in names and in --help.

To list every place: python -m tests.test_words [beginning of a path ...]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("rainband", "examples", "reproduce", "docs", "tests")
EXCEPT = Path(__file__)  # this file contains all banned words
PAGES = ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs")

# What must not be written, as a pattern that ignores case, and what to write instead.
BANNED = {
    r"(?<!--)\bworlds?\b(?![ _-]size)": "runtime (where a run executes)",  # --world: an old option, for hints
    r"\bbooks?\b": "batch accounting",
    r"\bthird half\b": "coordinator part",
    r"\b(workers?|servers?|coordinator|users?|other)('s|s')? hal(f|ves)\b": "part, or side",
    r"(?<!lstm)(?<!rnn)(?<!gru)(?<!notebook )(?<!table )\bcells?\b": "work item, or batch",
    r"\b(team)?mates?\b": "stage replicas, or the workers of one replica",
    r"\bswitchboard\b": "event loop",
    r"\b(own loops?|loops? of (your|one's|their|its|the user's) own)\b": "custom training loop",
    r"\bwho ever\b": "name the actor",
    r"\bin the mean\b(?! (of|over)\b)": "on average, or mean 4.6",
    r"\bso (many|often|long)\b(?! (that|as)\b)": "the number itself, with its unit",
    r"`(had|crossed|moved)`|\b(answer(s|ed)?|result) (is |was |with )?['\"]?(had|crossed|moved)\b"
    r"|\b(accepted|applied|duplicate), ?(or |and )?(had|crossed|moved)\b": "duplicate, overlaps, wrong_server",
    r"\bleased again\b|\bleasing again\b": "reassigned",
    r"\bcrews?\b": "workers and servers",
    r"\bseats?\b": "rank, or position",
    r"\bnests?\b": "pytree",
    r"\bmade-up data\b": "synthetic data",
    r"\bcome to nothing\b|\bcomes to nothing\b": "is discarded, by whom",
    r"\bheard of\b": "without a heartbeat for",
    r"\bvirtual worlds?\b|\bself-made\b": "simulation; custom",
}
# The same, except in tests.
BANNED_OUTSIDE_TESTS = {
    r"\b(no|some|any|every)body\b": "name the actor: no worker, another process",
    r"\btells\b": "reports, sends, returns",
    r"\bin vain\b": "not used, refused",
    r"\bin good order\b": "cleanly",
    r"\bone's own\b": "custom",
    r"\bsigns? of life\b": "heartbeat",
    r"\bcome(s)? home\b|\bat home\b": "arrive; rank, offset",
    r"\b(is|are) (told|said) (that|to|by)\b": "name the actor: the coordinator informs, reports",
}
# The results of a push: as whole string literals, and as constants. Elsewhere they are words like others.
BANNED_LITERALS = {"had": "duplicate", "crossed": "overlaps", "moved": "wrong_server"}
# How no docstring and no option begins: with a pronoun, or as a question.
BANNED_OPENINGS = {
    r"((those|these|that|one|anyone|anybody|everyone|somebody|nobody|he|they) (who|that|which)|who|what|whose|whoever"
    r"|how|where|when|which|whether|why)\b": "a verb or a noun: Return ..., A worker ...",
    r"[^.:]*\?": "Return True if ...",
}
# Parts of identifiers and of file names, by their words: own_loop and OwnLoop are "own loop".
BANNED_NAMES = {
    r"\bworlds?\b(?! size)": "runtime, cluster",
    r"\bbooks?\b": "accounting",
    r"\bthird half\b": "coordinator part",
    r"\bcells?\b": "work_item, item",
    r"\b(team)?mates?\b": "stage_replicas",
    r"\bswitchboard\b": "event_loop",
    r"\bown loops?\b": "training_loop",
    r"\bwho ever\b": "name the actor",
    r"\bin the mean\b": "mean",
    r"\bso (many|often|long)\b": "count, interval, duration",
    r"\bleased again\b": "reassigned",
    r"\bcrews?\b": "workers, nodes",
    r"\bseats?\b": "rank",
    r"\bnests?\b": "pytree",
}


class Text(NamedTuple):
    """Some words and where they are."""

    where: str  # "rainband/fit.py" or "--help of train"
    line: int
    kind: str  # "prose", "docstring", "literal" or "name"
    words: str


# ---- collecting texts ----


def texts_of_source(where: str, source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings[first.value] = True
        for name in names_defined(node):
            is_constant = name.isupper() and name.lower() in BANNED_LITERALS
            yield Text(where, getattr(node, "lineno", 1), "literal" if is_constant else "name", spaced(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(where, node.lineno, "docstring" if node in docstrings else "literal", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(where, token.start[0], "prose", token.string.lstrip("# "))


def names_defined(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
        case ast.alias(name=imported, asname=name):
            return [part for part in (*imported.split("."), name) if part]
        case ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)):
            return [name]
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return [name]
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return names
        case _:
            return []


def spaced(name: str) -> str:
    """Return an identifier as words: "own loop" for own_loop and for OwnLoop."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_\W]+", " ", name).lower().strip()


def texts_of_page(where: str, page: str) -> Iterator[Text]:
    """Return the lines of a page, without the old paths and names that tables of changes must mention."""
    for number, line in enumerate(page.splitlines(), 1):
        line = re.sub(r"[\w/.-]*/[\w/.-]*", "", line)  # paths and addresses
        if where == "CHANGELOG.md":
            line = re.sub(r"`[^`]*`", "", line)
        yield Text(where, number, "prose", line)


def texts_of_help() -> Iterator[Text]:
    for name, command in [("rainband", help_app()), *commands(help_app())]:
        where = f"--help of {name}"
        yield Text(where, 1, "docstring", command.help or "")
        for parameter in command.params:
            yield Text(where, 1, "docstring", getattr(parameter, "help", None) or "")
            yield Text(where, 1, "name", spaced(parameter.name))


@cache
def help_app() -> Any:
    import typer.main

    from rainband.cli.main import build_app

    return typer.main.get_command(build_app())


def commands(group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield name, command
        if subcommands := getattr(command, "commands", None):
            yield from ((f"{name} {inner}", sub) for inner, sub in subcommands.items())


@cache
def all_texts() -> list[Text]:
    texts = []
    for path in files(SOURCES, ".py"):
        where = str(path.relative_to(ROOT))
        texts.append(Text(where, 0, "name", spaced(where.removesuffix(".py"))))
        texts += texts_of_source(where, path.read_text(encoding="utf-8"))
    for path in files(PAGES, ".md"):
        where = str(path.relative_to(ROOT))
        texts.append(Text(where, 0, "name", spaced(where.removesuffix(".md"))))
        texts += texts_of_page(where, path.read_text(encoding="utf-8"))
    for path in files(("pyproject.toml", "Makefile", "mkdocs.yml"), ""):
        texts += texts_of_page(path.name, path.read_text(encoding="utf-8"))
    return texts + list(texts_of_help())


def files(places: tuple[str, ...], ending: str) -> list[Path]:
    found = [path for place in places for path in (ROOT / place).rglob("*" + ending) if path != EXCEPT]
    return sorted(found + [ROOT / place for place in places if place.endswith(ending) and (ROOT / place).exists()])


# ---- what is wrong with them ----


def faults(text: Text) -> list[str]:
    """Return what is wrong with a text, one sentence for each word."""
    if text.kind == "name":
        found = matches(BANNED_NAMES, text.words, re.search)
    else:
        found = matches(BANNED, text.words, re.search)
        if not text.where.startswith("tests/"):
            found += matches(BANNED_OUTSIDE_TESTS, text.words, re.search)
    if text.kind == "docstring":
        found += matches(BANNED_OPENINGS, text.words.strip(), re.match)
    if text.kind == "literal" and (result := text.words.strip(" .,:;()'\"").lower()) in BANNED_LITERALS:
        found.append((result, BANNED_LITERALS[result]))
    return [f"{text.where}:{text.line}: {word!r} ({text.kind}): say {instead}" for word, instead in found]


def matches(table: dict[str, str], words: str, match: Any) -> list[tuple[str, str]]:
    words = re.sub(r"\s+", " ", words)
    return [(found[0], instead) for pattern, instead in loose(tuple(table.items())) if (found := match(pattern, words))]


@cache
def loose(table: tuple[tuple[str, str], ...]) -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns with any spaces, hyphens and underlines, or none, where a pattern has a space."""
    between = r"[\\s_-]*"
    return [(re.compile(re.sub(r" (?![^(]*\))(?!\[)", between, pattern), re.I), instead) for pattern, instead in table]


# ---- the texts obey ----


# Files with offenders that wait to be repaired: nothing may be added, and what is repaired must be deleted here.
NOT_YET: set[str] = set()


def test_no_text_and_no_name_has_a_banned_word() -> None:
    offenders: dict[str, list[str]] = {}
    for text in all_texts():
        if found := faults(text):
            offenders.setdefault(text.where, []).extend(found)
    new = [fault for where, found in offenders.items() if where not in NOT_YET for fault in found]
    repaired = sorted(NOT_YET - set(offenders))
    if new or repaired:
        pytest.fail("\n".join(new + [f"{where}: repaired, delete it from NOT_YET" for where in repaired]), False)


def test_every_command_is_read() -> None:
    read = {text.where for text in texts_of_help()}
    assert {"--help of rainband", "--help of train", "--help of runs show"} <= read


# ---- the test notices what it should ----


@pytest.mark.parametrize(
    "source",
    [
        '"""What a worker does."""',
        '"""Those who wait for a round."""',
        "# who ever it is",
        "x = 'an own-loop of batches'",
        "run(world=3)",
        "from rainband import world",
        "try: ...\nexcept ValueError as world: ...",
        "match x:\n    case [world]: ...",
        "match x:\n    case {'a': 1, **cells}: ...",
        'class A:\n    """Who waits for it."""',
        "# the worker's half of it",
        "x = 'staleness 4.61 updates in the mean'",
        'x = f"the {count} cells of a round"',
        'x = ("a loop of "\n     "your own")',
        "RESULTS = ('applied', 'had')",
        "x = f'{count} crossed, '",
        "class PushResult(Enum):\n    MOVED = auto()",
        "# applied, had, crossed",
        'x = "the server answers had: the push is ignored"',
        "def next_cell(): ...",
        "class OwnLoop: ...",
        "def f(world): ...",
        "self.num_cells = 3",
        "import rainband.protocol as books",
        "if (mates := 3): ...",
        '"""Let nobody wait for it."""',
        "# every rank tells all others",
        "x = 'the run ended in good order'",
        "# the driver's last sign of life",
        '"""Is it finite everywhere?"""',
        'def f():\n    """How many batches a lease has."""',
    ],
)
def test_a_banned_word_in_a_source_is_noticed(source: str) -> None:
    assert sum(len(faults(text)) for text in texts_of_source("a.py", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "world_size = dist.get_world_size()",
        "# the world size of torch.distributed",
        "model = torch.nn.LSTMCell(3, 4)",
        '"""A worker that had what was moved."""',
        "# so often that no worker notices",
        "# told apart, and said at once: somewhere, by everyone",
        "moved = step(had=True)",
        "# its result: half of what moved, crossed the line",
        "RENAMED = {'--world': '--runtime'}",
        "estimate = approximates + mature",
        '"""Return what was asked for."""',
    ],
)
def test_what_is_allowed_in_a_source_is_left_alone(source: str) -> None:
    assert [fault for text in texts_of_source("a.py", source) for fault in faults(text)] == []


@pytest.mark.parametrize(
    "where, line",
    [
        ("README.md", "a loop of your own"),
        ("docs/a.md", "The server is told that a push is late."),
        ("docs/a.md", "answers `had`"),
        ("pyproject.toml", "    # A world forks before it computes."),
        ("CHANGELOG.md", "`--world` is `--runtime` in every world"),
    ],
)
def test_a_banned_word_on_a_page_is_noticed(where: str, line: str) -> None:
    assert sum(len(faults(text)) for text in texts_of_page(where, line)) == 1


@pytest.mark.parametrize(
    "where, line", [("CHANGELOG.md", "`--world` is now `--runtime`"), ("ARCHITECTURE.md", "rainband/worlds/local.py")]
)
def test_old_names_in_tables_of_changes_are_left_alone(where: str, line: str) -> None:
    assert [fault for text in texts_of_page(where, line) for fault in faults(text)] == []


if __name__ == "__main__":
    for sentence in (fault for text in all_texts() for fault in faults(text)):
        if len(sys.argv) == 1 or sentence.startswith(tuple(sys.argv[1:])):
            print(sentence)
