"""The drawing of the package: who may import whom, where threads and clocks may be, and what is unsafe."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).parent.parent


class Layer(NamedTuple):
    """Some modules and packages of rainband, and the layers they may import besides their own."""

    modules: str  # dotted, below rainband; a package stands for all in it that has no row of its own
    may_import: str


# Imports point up this table only: a layer may import itself and the layers it names, which are above it.
# A new module needs a place here. Imports under `if TYPE_CHECKING:` are free, and so is rainband.__version__.
LAYERS = {
    "contracts": Layer(
        "strategy stage coordinator_api errors options settings plugins advice observer protocol", may_import=""
    ),
    # Computing without communicating: tensors in, tensors out.
    "model": Layer("model", may_import="contracts"),
    "rules": Layer("rules", may_import="contracts"),
    "tasks": Layer("tasks", may_import="contracts model"),
    "graphs": Layer(
        "model_parallel model_parallel.graph model_parallel.placement model_parallel.schedules model_parallel.drawing",
        may_import="contracts model",
    ),
    "codecs": Layer("codecs", may_import="contracts"),
    "full_batch": Layer("full_batch", may_import="contracts"),
    "rounds": Layer("rounds", may_import="contracts codecs"),
    "collectives": Layer("collectives", may_import="contracts"),
    # The algorithms: they know what to send, never how it travels.
    "strategies": Layer("strategies optimizer_settings", may_import="contracts rules full_batch collectives"),
    # State machines without I/O.
    "nodes": Layer("server worker coordinator", may_import="contracts model rules rounds tasks codecs"),
    "execution": Layer("model_parallel.execution", may_import="contracts model graphs nodes"),
    "transports": Layer("transports", may_import="contracts rounds collectives"),
    # Files of checkpoints; who writes and reads them, and when, is up to the runtimes.
    "checkpoints": Layer("checkpoints", may_import="contracts model"),
    # What reads a run's events and nothing else.
    "records": Layer(
        "views.history views.sinks views.spans views.training_time views.formatting views.event_text views.forecast "
        "views.dashboard.listener",
        may_import="contracts",
    ),
    "dashboard": Layer("views.dashboard", may_import="contracts records"),
    "simulation_models": Layer("runtimes.simulation.models", may_import="contracts"),
    # What drives nodes and strategies; what a user calls.
    "runtimes": Layer("runtimes record", may_import="all above"),
    # What is known of a run before it: measured, simulated, computed.
    "analysis": Layer("analysis", may_import="all above"),
    "public": Layer("__init__ join fit minimize adapters", may_import="all above"),
    "views": Layer("views", may_import="all above"),
    "top": Layer("cli bench", may_import="all above"),
}

# Where these may be imported or called; everywhere else they are a mistake in the design.
CONCURRENCY = {"threading", "_thread", "socket", "selectors", "multiprocessing", "asyncio", "concurrent"}
# bench: baselines are bare sockets
MAY_BE_CONCURRENT = {"transports", "runtimes", "record", "bench", "views.dashboard"}
MAY_START_PROGRAMS = {"transports", "runtimes", "record", "bench", "cli", "views.sinks.dashboard"}
MAY_READ_WALL_TIME = {"protocol.events", "bench", "cli", "views"}

UNSAFE_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save"}
MAY_BE_UNSAFE: tuple[str, ...] = (
    "rainband.fit",  # cloudpickle, to hand a task of a notebook to its own children through inherited memory
    "rainband.runtimes.training_loop.script_process",  # exec, to run the user's own script, as `python script.py` would
)

# Importing these must not import torch: it takes seconds, and a command line has a quarter of one.
QUICK_TO_IMPORT = ("rainband", "rainband.cli.main", "rainband.strategies")


class Module(NamedTuple):
    """One file of the package, read but not run."""

    name: str  # "rainband.transports.tcp"
    family: str  # "transports.tcp": the name below rainband
    imports: set[str]  # full names: `from os import path` gives os.path
    calls: set[str]  # as written: "time.time"
    bare_functions: list[str]  # those that lack annotations


# ---- reading a file ----


def read_package() -> dict[str, Module]:
    modules = {}
    for path in sorted((ROOT / "rainband").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = read_module(name, path.read_text(encoding="utf-8"), is_package)
    return modules


def read_module(name: str, source: str, is_package: bool = False) -> Module:
    nodes = list(nodes_that_run(ast.parse(source)))
    folder = name if is_package else name.rpartition(".")[0]
    return Module(
        name,
        family=name.partition(".")[2] or "__init__",
        imports={imported for node in nodes for imported in imported_names(node, folder)},
        calls={ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)},
        bare_functions=[f"{node.name} in line {node.lineno}" for node in nodes if is_bare_function(node)],
    )


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk the tree, functions included, leaving out what only a type checker sees."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def imported_names(node: ast.AST, folder: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = ".".join(filter(None, [relative_to(folder, node.level), node.module]))
        return [f"{origin}.{alias.name}" for alias in node.names]
    return []


def relative_to(folder: str, dots: int) -> str:
    """One dot is the folder itself, two dots the one above it."""
    parts = folder.split(".")
    return ".".join(parts[: len(parts) + 1 - dots]) if dots else ""


def is_bare_function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    given = node.args
    named = [a for a in given.posonlyargs + given.args + given.kwonlyargs if a.arg not in ("self", "cls")]
    starred = [a for a in (given.vararg, given.kwarg) if a]
    return node.returns is None or any(a.annotation is None for a in named + starred)


# ---- the laws: each returns the sentences that say what is wrong ----


def wrong_imports(package: dict[str, Module]) -> list[str]:
    wrong = []
    for module in package.values():
        here = layer_of(module.family)
        if here is None:
            wrong.append(f"{module.name} is in no layer: give it a place in LAYERS")
            continue
        for imported in sorted(imports_of_rainband(module, package)):
            there = layer_of(package[imported].family) if imported in package else None
            if there != here and there not in may_import(here):
                wrong.append(f"{module.name} ({here}) imports {imported} ({there})")
    return wrong


PLACES = {module: name for name, layer in LAYERS.items() for module in layer.modules.split()}


def layer_of(family: str) -> str | None:
    """Return the layer of a module: that of its longest prefix in the table."""
    return next((PLACES[prefix] for prefix in prefixes_of(family) if prefix in PLACES), None)


def prefixes_of(family: str) -> list[str]:
    """Return "a.b.c", "a.b", "a" for "a.b.c"."""
    parts = family.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def is_within(family: str, packages: set[str]) -> bool:
    return not packages.isdisjoint(prefixes_of(family))


def may_import(layer: str) -> list[str]:
    if LAYERS[layer].may_import == "all above":
        return list(LAYERS)[: list(LAYERS).index(layer)]
    return LAYERS[layer].may_import.split()


def imports_of_rainband(module: Module, package: dict[str, Module]) -> set[str]:
    ours = {name for name in module.imports if name.split(".")[0] == "rainband"} - {"rainband.__version__"}
    return {nearest_module(name, package) for name in ours} - {module.name}


def nearest_module(name: str, package: dict[str, Module]) -> str:
    """`rainband.strategy.Worker` is a name in the module rainband.strategy."""
    return next((prefix for prefix in prefixes_of(name) if prefix in package), name)


def import_cycle(package: dict[str, Module]) -> list[str]:
    graph = {name: imports_of_rainband(module, package) for name, module in package.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def wrong_concurrency(package: dict[str, Module]) -> list[str]:
    return [
        f"{module.name} imports {name}: threads and sockets belong in transports/ and runtimes/"
        for module in package.values()
        for name in sorted(libraries(module))
        if (name in CONCURRENCY and not is_within(module.family, MAY_BE_CONCURRENT))
        or (name == "subprocess" and not is_within(module.family, MAY_START_PROGRAMS))
    ]


def libraries(module: Module) -> set[str]:
    return {name.split(".")[0] for name in module.imports}


def wall_times(package: dict[str, Module]) -> list[str]:
    return [
        f"{module.name} uses time.time: take a Clock, or time.monotonic to measure"
        for module in package.values()
        if "time.time" in module.calls | module.imports and not is_within(module.family, MAY_READ_WALL_TIME)
    ]


def unsafe_uses(package: dict[str, Module]) -> list[str]:
    return [
        f"{module.name} uses {name}: nothing that comes from outside may run as code"
        for module in package.values()
        if module.name not in MAY_BE_UNSAFE
        for name in sorted(libraries(module) & UNSAFE_IMPORTS | (module.calls | module.imports) & UNSAFE_CALLS)
    ]


def bare_functions(package: dict[str, Module]) -> list[str]:
    return [f"{module.name}: {function}" for module in package.values() for function in module.bare_functions]


# ---- the package obeys them ----


@pytest.fixture(scope="module")
def package() -> dict[str, Module]:
    return read_package()


def nothing_wrong(sentences: list[str]) -> None:
    if sentences:
        pytest.fail("\n".join(sentences), pytrace=False)


def test_imports_point_up_the_table_only(package: dict[str, Module]) -> None:
    nothing_wrong(wrong_imports(package))


def test_no_module_imports_itself_through_others(package: dict[str, Module]) -> None:
    assert import_cycle(package) == []


def test_threads_and_sockets_are_only_in_transports_and_runtimes(package: dict[str, Module]) -> None:
    nothing_wrong(wrong_concurrency(package))


def test_nothing_below_the_command_line_reads_the_wall_clock(package: dict[str, Module]) -> None:
    nothing_wrong(wall_times(package))


def test_nothing_is_unpickled_or_evaluated(package: dict[str, Module]) -> None:
    nothing_wrong(unsafe_uses(package))


def test_every_function_is_annotated(package: dict[str, Module]) -> None:
    nothing_wrong(bare_functions(package))


def test_the_command_line_and_the_strategies_are_imported_without_torch(package: dict[str, Module]) -> None:
    quick = [name for name in package if name.startswith("rainband.strategies.") or name in QUICK_TO_IMPORT]
    script = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imports torch: import it inside the function that needs it")
"""
    result = subprocess.run([sys.executable, "-c", script, *quick], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- the laws notice what they should ----


Law = Callable[[dict[str, Module]], list[str]]


def package_of(**sources: str) -> dict[str, Module]:
    names = {"rainband." + name.replace("__", "."): source for name, source in sources.items()}
    return {name: read_module(name, source) for name, source in names.items()}


def test_every_layer_imports_only_layers_above_it_in_the_table() -> None:
    above: set[str] = set()
    for name in LAYERS:
        assert set(may_import(name)) <= above
        above.add(name)


def test_no_module_is_in_two_layers() -> None:
    placed = [module for layer in LAYERS.values() for module in layer.modules.split()]
    assert len(placed) == len(set(placed))


@pytest.mark.parametrize(
    "line",
    [
        "import rainband.transports.tcp",
        "from rainband.transports.tcp import connect",
        "from rainband.transports import tcp",
        "from ..transports.tcp import connect",
        "from ..transports import tcp",
        "def run():\n    from rainband.transports import tcp",
    ],
)
def test_a_strategy_that_imports_a_transport_is_noticed(line: str) -> None:
    package = package_of(strategies__eager=line, transports__tcp="")
    assert wrong_imports(package) == [
        "rainband.strategies.eager (strategies) imports rainband.transports.tcp (transports)"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "from rainband.strategy import Worker",
        "from ..strategy import Worker",
        "from rainband import __version__",
        "if TYPE_CHECKING:\n    from rainband.transports import tcp",
        "if typing.TYPE_CHECKING:\n    from rainband.transports import tcp",
    ],
)
def test_a_strategy_may_import_contracts_and_name_any_type(line: str) -> None:
    assert wrong_imports(package_of(strategies__calm=line, strategy="", transports__tcp="")) == []


@pytest.mark.parametrize("condition", ["if TYPE_CHECKING:\n    pass\nelse:", "if not TYPE_CHECKING:"])
def test_the_other_branch_of_type_checking_is_read(condition: str) -> None:
    line = f"{condition}\n    import rainband.transports.tcp"
    assert len(wrong_imports(package_of(strategies__sly=line, transports__tcp=""))) == 1


def test_a_module_without_a_place_is_noticed() -> None:
    assert wrong_imports(package_of(utils="")) == ["rainband.utils is in no layer: give it a place in LAYERS"]


def test_a_contract_that_imports_a_rule_is_noticed() -> None:
    assert len(wrong_imports(package_of(strategy="import rainband.rules", rules=""))) == 1


def test_a_cycle_is_noticed_even_inside_one_layer() -> None:
    package = package_of(strategy="import rainband.errors", errors="def late():\n    from rainband import strategy")
    assert set(import_cycle(package)) == {"rainband.strategy", "rainband.errors"}


@pytest.mark.parametrize(
    ("law", "family", "line"),
    [
        (wrong_concurrency, "server", "import threading"),
        (wrong_concurrency, "strategies__x", "from asyncio import sleep"),
        (wrong_concurrency, "client", "import multiprocessing.shared_memory"),
        (wrong_concurrency, "server", "def f():\n    import socket"),
        (wrong_concurrency, "server", "import subprocess"),
        (wall_times, "server", "import time\nnow = time.time()"),
        (wall_times, "runtimes__launcher", "from time import time"),
        (unsafe_uses, "checkpoint", "import pickle"),
        (unsafe_uses, "checkpoint", "torch.load('x')"),
        (unsafe_uses, "checkpoint", "from torch import save"),
        (unsafe_uses, "settings", "eval('1')"),
        (bare_functions, "server", "def f(x): ..."),
        (bare_functions, "server", "def f(x) -> int: ..."),
        (bare_functions, "server", "def f(*rest) -> int: ..."),
        (bare_functions, "server", "class A:\n    async def f(self): ..."),
    ],
)
def test_a_breach_is_noticed(law: Law, family: str, line: str) -> None:
    assert len(law(package_of(**{family: line}))) == 1


@pytest.mark.parametrize(
    ("law", "family", "line"),
    [
        (wrong_concurrency, "transports__tcp", "import socket, threading, subprocess"),
        (wrong_concurrency, "bench__ps", "import subprocess"),
        (wall_times, "protocol__events", "import time\nnow = time.time()"),
        (wall_times, "server", "import time\nnow = time.monotonic()"),
        (unsafe_uses, "tasks__digits", "model.eval()"),
        (bare_functions, "server", "class A:\n    def f(self, x: int, *rest: int, **named: int) -> int: ..."),
    ],
)
def test_what_is_allowed_is_left_alone(law: Law, family: str, line: str) -> None:
    assert law(package_of(**{family: line})) == []
