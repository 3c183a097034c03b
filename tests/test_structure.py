"""The countable rules of the package's structure; tests/test_layers.py has the directions of imports.

Each rule takes the files of the package and returns its offenders: a stable name, and what is wrong.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).parent.parent

MAX_FILES_PER_FOLDER = 16
MAX_METHODS = 25
MAX_ATTRIBUTES = 20
MAX_PARAMETERS = 8
MAX_LINES = 600
SMALL_MODULE = 60  # lines; below this, a module with one importer belongs into it

# Folders whose files are found by their name, so that one file is one strategy, task, rule or benchmark.
PLUGIN_FOLDERS = (
    "strategies",
    "tasks",
    "rules",
    "codecs",
    "collectives/algorithms",
    "bench/cases",
    "bench/baselines",
    "views/sinks",
)
# Modules that users import by name, or that a new process starts with.
PUBLIC_MODULES = ("errors.py", "join.py", "fit.py", "minimize.py", "adapters/", "runtimes/processes/worker_main.py")

# What is found by name: commands, strategies, tasks, algorithms, benchmarks, adapters that scripts import.
ENTRY_FOLDERS = ("cli/", "strategies/", "tasks/", "collectives/algorithms/", "codecs/", "bench/cases/", "adapters/")

# What a strategy hands out: nobody may probe these for what their class does not declare.
STRATEGY_TYPES = {"Strategy", "ServerPart", "Rule", "Requirements", "CoordinatorApi"}
STRATEGY_MAKERS = {"load_strategy", "find_strategy", "server", "rule", "coordinate"}
STRATEGY_WORDS = re.compile(r"strateg|^(half|server_part|rule)$", re.IGNORECASE)
# Benchmarks compare given strategies, and the oracle of `fuzz` knows the result of each; schedules of pipelines have
# names of their own.
CHOOSE_STRATEGIES = ("bench/", "runtimes/simulation/oracle/", "model_parallel/schedules/")
# Rules are wrapped by forwarding every member that `Rule` declares.
FORWARDERS = {"rules/compensated.py"}
# Objects of torch and of Python, not of our classes: their attributes may be set by computed names.
FOREIGN = {"module", "parent", "self.parent", "main_module", "optimizer"}
# Objects and classes of other libraries, which make these themselves and offer no observer.
OF_OTHER_LIBRARIES = {
    "adapters/hf.py: setattr(state, name, is_main)",
    "adapters/lightning.py: strategy.reduce_boolean_decision",
    "adapters/accelerate.py: kind.__iter__",
    "model/sync_batch_norm.py: layer.__class__",
    "runtimes/training_loop/split/loss_graph.py: torch.autograd.backward",
}
PROBES = {"getattr", "hasattr", "getattr_static", "getmembers", "vars", "dir", "attrgetter", "methodcaller"}
PROBING_ATTRIBUTES = {"__dict__", "__getattribute__", "__getattr__"}
# Make a class without a `class` statement: its name is their first argument.
CLASS_MAKERS = {"namedtuple", "NamedTuple", "TypedDict", "defstruct", "make_dataclass", "new_class", "Enum", "type"}
METHOD_MAKERS = {"property", "cached_property", "partialmethod", "staticmethod", "classmethod"}
STARTS = {"startswith", "endswith", "removeprefix", "removesuffix"}
AS_MAPPING = {"as_dict", "as_plain"}  # list all settings of a strategy; picking one of them is a probe

TENSOR_ATTRIBUTES = {"data", "grad", "requires_grad"}  # of torch's tensors, whatever methods of these names we have

# What the messages of a worker's lifecycle, and the steps of a coroutine, are made by.
ONE_PLACE = {
    ("Ended", "Concluded"): "worker/lifecycle.py",
    ("Join",): "worker/session.py",
    ("send", "throw"): "protocol/steps.py",
}

Offenders = dict[str, str]  # name of the offender -> what is wrong
Law = Callable[["Package"], Offenders]


class File(NamedTuple):
    source: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        return self.source.splitlines()


Package = dict[str, File]  # by path below rainband/: "views/summary.py"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def package_of(sources: dict[str, str]) -> Package:
    return {path: File(source, ast.parse(source)) for path, source in sources.items()}


@pytest.fixture(scope="module")
def package() -> Package:
    folder = ROOT / "rainband"
    return package_of({str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))})


def nodes(package: Package, *kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path, file in package.items():
        yield from ((path, node) for node in ast.walk(file.tree) if isinstance(node, kinds))


# ---- the rules ----


def crowded_folders(package: Package) -> Offenders:
    folders: dict[str, list[str]] = defaultdict(list)
    for path in package:
        folders[str(Path(path).parent)].append(path)
    return {
        folder: f"rainband/{folder} has {len(files)} files: make sub-folders, at most {MAX_FILES_PER_FOLDER} files each"
        for folder, files in folders.items()
        if len(files) > MAX_FILES_PER_FOLDER
    }


def repeated_classes(package: Package) -> Offenders:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, node in nodes(package, ast.ClassDef, ast.Call):
        if name := node.name if isinstance(node, ast.ClassDef) else class_made_by(node):
            homes[name].append(path)
    return {
        name: f"class {name} is defined in {' and '.join(paths)}: give each a name of its own"
        for name, paths in homes.items()
        if len(paths) > 1
    }


def class_made_by(node: ast.AST) -> str:
    """Return the name of the class that a call makes: "Point" of namedtuple("Point", ...); otherwise ""."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in CLASS_MAKERS or len(node.args) < 2:
        return ""
    name = node.args[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def probed_strategies(package: Package) -> Offenders:
    offenders = named_strategies(package)
    for path, file in package.items():
        if path in FORWARDERS:
            continue
        probes = PROBES | aliases(file.tree, PROBES)
        of_self = {name for name in strategy_names_in(file.tree) if name.startswith("self.")}
        for scope in scopes(file.tree):
            known = strategy_names_in(scope) | of_self
            for node in ast.walk(scope):
                probed = probed_value(node, probes)
                if probed is not None and is_strategy(probed, known):
                    text = ast.unparse(node)
                    offenders[f"{path}: {text}"] = f"{path}: {text}: declare it in the contract (strategy.py) instead"
    return offenders


def named_strategies(package: Package) -> Offenders:
    """Return where code outside a strategy's file decides by the name or the class of a strategy."""
    folder = {path: file for path, file in package.items() if path.startswith("strategies/")}
    names = {Path(path).stem for path in folder} - {"__init__"}
    classes = {node.name for _, node in nodes(folder, ast.ClassDef)}  # type: ignore[attr-defined]
    return {
        f"{path}: {text}": f"{path}: {text} decides by which strategy it is: declare what it needs in `requires`"
        for path, file in package.items()
        if path not in folder and not path.startswith(CHOOSE_STRATEGIES)
        for tables in [tables_of(file.tree, names)]
        for node in ast.walk(file.tree)
        if decides_by(node, names | tables, classes)
        for text in [ast.unparse(node)]
    }


def tables_of(tree: ast.Module, names: set[str]) -> set[str]:
    """Return the names that hold a set, list or dictionary with names of strategies."""
    assigned = (pair for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign) for pair in pairs(node))
    return {last_name(target) for target, value in assigned if is_table(value) and constants_of(value) & names}


def is_table(value: ast.expr) -> bool:
    return isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.Call)


def decides_by(node: ast.AST, names: set[str], classes: set[str]) -> bool:
    """Return True if an expression or a pattern compares with one of these names or classes."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        of_strategy = any(is_strategy(side, set()) for side in sides)
        tables = names if of_strategy else set()  # otherwise a table may have the names of other things
        return any(constants_of(side) & (names | classes) or last_name(side) in classes | tables for side in sides)
    if isinstance(node, ast.Subscript):
        return is_strategy(node.slice, set()) and names_one_of(node.value, names)
    if isinstance(node, ast.MatchValue):
        return bool(constants_of(node.value) & names)
    if isinstance(node, ast.MatchClass):
        return last_name(node.cls) in classes
    if isinstance(node, ast.Call) and last_name(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
        return mentions(node.args[1], classes)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr in STARTS:
            text = node.args[0]
            return bool(constants_of(text) & names) or (
                is_strategy(node.func.value, set()) and bool(constants_of(text))
            )
        return node.func.attr == "get" and is_strategy(node.args[0], set()) and names_one_of(node.func.value, names)
    return False


def names_one_of(value: ast.expr, names: set[str]) -> bool:
    """Return True for a table with one of these names, or for a name that holds one."""
    return last_name(value) in names or (is_table(value) and bool(constants_of(value) & names))


def constants_of(value: ast.expr) -> set[object]:
    """Return the text of a constant, or those of a tuple, list, set or dictionary, also as `frozenset({...})`."""
    if isinstance(value, ast.Call):
        return set[object]().union(*(constants_of(given) for given in value.args if is_table(given)))
    parts = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else [value]
    parts = [key for key in value.keys if key] if isinstance(value, ast.Dict) else parts
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def scopes(tree: ast.Module) -> Iterator[ast.AST]:
    yield tree
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def aliases(tree: ast.Module, names: set[str]) -> set[str]:
    """Return other names of these functions: `probe = getattr`, `from inspect import getattr_static as look`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and last_name(node.value) in names:
            found |= {last_name(target) for target in node.targets}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname for alias in node.names if alias.asname and alias.name in names}
    return found


def strategy_names_in(scope: ast.AST) -> set[str]:
    """Return the names that hold a strategy or one of its parts, by annotation or by where the value comes from."""
    names: set[str] = set()
    for _ in range(2):  # again, for names that are given to others: self.s = s
        for node in ast.walk(scope):
            if isinstance(node, ast.arg) and node.annotation and mentions(node.annotation, STRATEGY_TYPES):
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and mentions(node.annotation, STRATEGY_TYPES):
                names.add(ast.unparse(node.target))
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
                for target, value in pairs(node):
                    if makes_strategy(value) or ast.unparse(value) in names or named_strategy(value):
                        names.add(ast.unparse(target))
            elif isinstance(node, ast.For | ast.comprehension) and is_strategy(node.iter, names):
                names.add(ast.unparse(node.target))
    return names


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Return the targets and values of an assignment: of each element, if both sides are tuples."""
    if isinstance(node, ast.AnnAssign | ast.NamedExpr):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if not isinstance(target, ast.Tuple | ast.List):
                yield target, node.value
            elif isinstance(node.value, ast.Tuple | ast.List) and len(node.value.elts) == len(target.elts):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield from ((element, node.value) for element in target.elts)


def named_strategy(value: ast.expr) -> bool:
    """Return True for a name or an attribute that says that it is a strategy: `config.strategy`."""
    return last_name(value) not in STRATEGY_TYPES and bool(STRATEGY_WORDS.search(last_name(value)))


def mentions(annotation: ast.expr, names: set[str]) -> bool:
    return not names.isdisjoint(re.findall(r"\w+", ast.unparse(annotation)))


def makes_strategy(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and last_name(value.func) in STRATEGY_MAKERS


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def probed_value(node: ast.AST, probes: set[str]) -> ast.expr | None:
    """Return what an expression probes: the object of a getattr, of `__dict__`, or of a made attrgetter."""
    if isinstance(node, ast.Attribute) and node.attr in PROBING_ATTRIBUTES:
        return node.value
    if isinstance(node, ast.Attribute) and node.attr in ("get", "pop") and (mapping := mapped(node.value)):
        return mapping
    if isinstance(node, ast.Subscript) and (mapping := mapped(node.value)):
        return mapping
    if isinstance(node, ast.Try | ast.With) and passes_over(node, "AttributeError"):
        inside = (part for statement in node.body for part in ast.walk(statement))
        return next((part.value for part in inside if is_attribute_of_strategy(part)), None)
    if isinstance(node, ast.Call) and node.args:
        maker = node.func.func if isinstance(node.func, ast.Call) else node.func
        if last_name(maker) in probes:
            return node.args[0]
    return None


def passes_over(node: ast.Try | ast.With, error: str) -> bool:
    """Return True if a statement catches an error, or suppresses it."""
    if isinstance(node, ast.Try):
        return any(handler.type and mentions(handler.type, {error}) for handler in node.handlers)
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(last_name(call.func) == "suppress" and mentions(call, {error}) for call in calls)


def mapped(value: ast.expr) -> ast.expr | None:
    """Return the object whose settings a call of `as_dict` lists."""
    is_listing = isinstance(value, ast.Call) and last_name(value.func) in AS_MAPPING and value.args
    return value.args[0] if is_listing else None  # type: ignore[attr-defined]


def is_attribute_of_strategy(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and is_strategy(node.value, set())


def is_strategy(value: ast.expr, known: set[str]) -> bool:
    if isinstance(value, ast.Name) and value.id in STRATEGY_TYPES:
        return False  # the contract itself: what it declares may be listed
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "values":
        return is_strategy(value.func.value, known)
    if isinstance(value, ast.Call):
        return makes_strategy(value) or any(is_strategy(argument, known) for argument in value.args)
    return ast.unparse(value) in known or bool(STRATEGY_WORDS.search(last_name(value)))


def replaced_methods(package: Package) -> Offenders:
    methods = only_methods(package)
    offenders = {}
    for path, file in package.items():
        in_classes = {id(m) for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef) for m in node.body}
        functions = {n.name for n in ast.walk(file.tree) if isinstance(n, Function) and id(n) not in in_classes}
        for line in file.lines:
            if ("ignore[" in line and "method-assign" in line) or ".__class__ =" in line:
                target = line.split("=")[0].strip()
                offenders[f"{path}: {target}"] = f"{path} replaces the method {target}: pass an observer or a subclass"
        for node in ast.walk(file.tree):
            for target, value in attributes_assigned_from_outside(node):
                text = ast.unparse(target)
                forced = isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__"
                if forced or target.attr in methods or is_function(value, functions, methods):
                    offenders[f"{path}: {text}"] = f"{path} replaces the method {text}: pass an observer or a subclass"
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("mock", "patch"):
                text = ast.unparse(node)
                offenders[f"{path}: {text}"] = f"{path}: {text} replaces what it names: pass an observer or a subclass"
            if path not in FORWARDERS and writes_attributes(node):
                text = ast.unparse(node)
                offenders[f"{path}: {text}"] = (
                    f"{path}: {text} sets attributes whose names are not written: assign them"
                )
    return {name: reason for name, reason in offenders.items() if name not in OF_OTHER_LIBRARIES}


def writes_attributes(node: ast.AST) -> bool:
    """Return True if a statement sets attributes by names that are computed, or through `__dict__`."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(target, ast.Subscript) and is_attribute_dict(target.value) for target in targets)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("update", "setdefault", "__setitem__"):
        return is_attribute_dict(node.func.value)
    return (
        last_name(node.func) in ("setattr", "__setattr__")
        and len(node.args) > 1
        and not isinstance(node.args[-2], ast.Constant)
        and ast.unparse(node.args[0]) not in FOREIGN | {"self"}
    )


def is_attribute_dict(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return last_name(value.func) == "vars" and any(ast.unparse(given) not in FOREIGN for given in value.args)
    return isinstance(value, ast.Attribute) and value.attr == "__dict__"


def only_methods(package: Package) -> set[str]:
    """Return the names that are methods of some class, and of no class a property or an attribute."""
    methods, others = set(), set()
    for _, node in nodes(package, ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        for member in node.body:
            if isinstance(member, Function):
                decorated = {last_name(decorator) for decorator in member.decorator_list}
                (others if decorated & {"property", "setter", "cached_property"} else methods).add(member.name)
            elif isinstance(member, ast.AnnAssign | ast.Assign):
                others |= {ast.unparse(target) for target, _ in pairs(member)} | fields(node)
        others |= self_attributes(node)
    return methods - others - TENSOR_ATTRIBUTES


def self_attributes(node: ast.ClassDef) -> set[str]:
    """Return what the methods of a class assign to their first parameter, whatever it is called."""
    found = set()
    for method in [member for member in node.body if isinstance(member, Function)]:
        first = next((argument.arg for argument in method.args.posonlyargs + method.args.args), "self")
        found |= {
            inner.attr
            for inner in ast.walk(method)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and ast.unparse(inner.value) in (first, "self")
        }
    return found


def attributes_assigned_from_outside(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        for target, value in pairs(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls", "sys"):
                yield target, value
    elif (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("setattr", "object.__setattr__")
        and len(node.args) == 3
        and isinstance(name := node.args[1], ast.Constant)
        and ast.unparse(node.args[0]) != "self"
    ):
        yield ast.Attribute(node.args[0], str(name.value), ast.Store()), node.args[2]


def is_function(value: ast.expr, functions: set[str], methods: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return last_name(value.func) in ("MethodType", "partial", "staticmethod", "wraps")
    if isinstance(value, ast.Attribute):
        return value.attr in methods
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def large_classes(package: Package) -> Offenders:
    """Return large classes without a reason, and others with one."""
    offenders = {}
    classes = {node.name: node for _, node in nodes(package, ast.ClassDef)}  # type: ignore[attr-defined]
    for path, node in nodes(package, ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        family = with_bases(node, classes)
        methods = len({name for one in family for name in methods_of(one)})
        attributes = len({name for one in family for name in self_attributes(one) | fields(one)})
        is_large = methods > MAX_METHODS or attributes > MAX_ATTRIBUTES
        if has_reason(package[path], node) and not is_large:
            offenders[node.name] = f"{path}: {node.name} is not large: delete the line `# size:` above it"
        elif is_large and not has_reason(package[path], node):
            offenders[node.name] = (
                f"{path}: {node.name} has {methods} methods and {attributes} attributes with its bases (at most "
                f"{MAX_METHODS} and {MAX_ATTRIBUTES}): split it, or write `# size: why` above it"
            )
    return offenders


def methods_of(node: ast.ClassDef) -> set[str]:
    """Return the methods and properties of a class, also those made without `def`."""
    found = {member.name for member in node.body if isinstance(member, Function)}
    for member in node.body:
        for target, value in pairs(member):
            made = isinstance(value, ast.Call) and last_name(value.func) in METHOD_MAKERS
            if made or isinstance(value, ast.Lambda) or last_name(value) in found:
                found.add(last_name(target))
    return found


def with_bases(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and the classes of the package that it inherits from."""
    family, waiting = [], [node]
    while waiting:
        family.append(one := waiting.pop())
        bases = (classes.get(last_name(base.value if isinstance(base, ast.Subscript) else base)) for base in one.bases)
        waiting += [base for base in bases if base is not None and base not in family]
    return family


def fields(node: ast.ClassDef) -> set[str]:
    """Return what a class declares for its objects: the fields of a dataclass, a Struct or a NamedTuple."""
    declared = [member for member in node.body if isinstance(member, ast.AnnAssign)]
    return {ast.unparse(field.target) for field in declared if not mentions(field.annotation, {"ClassVar"})}


def has_reason(file: File, node: ast.ClassDef) -> bool:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return is_reason(file.lines[first - 2]) if first > 1 else False


def is_reason(line: str) -> bool:
    """Return True for four words or more after the mark, three of which are longer than two letters."""
    marked = re.match(r"\s*# size:(.*)", line)
    words = re.findall(r"[a-z]+", marked[1].lower()) if marked else []
    return len(words) >= 4 and len({word for word in words if len(word) > 2}) >= 3


def long_signatures(package: Package) -> Offenders:
    offenders = {}
    for path, node in nodes(package, ast.Module, ast.ClassDef):
        owner = node.name + "." if isinstance(node, ast.ClassDef) else ""
        if owner.startswith("_"):
            continue
        for member in members(node):
            is_public = isinstance(member, Function) and not member.name.startswith("_")
            if isinstance(member, Function) and (is_public or member.name in ("__init__", "__new__", "__call__")):
                count = num_parameters(member)
                if count > MAX_PARAMETERS:
                    name = f"{path}: {owner}{member.name}"
                    offenders[name] = f"{name} has {count} parameters (at most {MAX_PARAMETERS}): group some in a class"
    return offenders


def members(node: ast.AST) -> Iterator[ast.stmt]:
    """Return the statements of a module or class, also those under `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from members(child)


def num_parameters(function: Function) -> int:
    given = function.args
    names = [argument.arg for argument in given.posonlyargs + given.args + given.kwonlyargs]
    return len(names) - (names[:1] in (["self"], ["cls"])) + bool(given.vararg) + bool(given.kwarg)


def small_modules(package: Package) -> Offenders:
    offenders = {}
    imported = {path: imports(file, path) for path, file in package.items()}
    for path, file in package.items():
        if len(file.lines) < SMALL_MODULE and not is_plugin_or_public(path):
            module = "rainband." + path.removesuffix(".py").replace("/", ".")
            importers = [
                other
                for other, names in imported.items()
                if other != path and module in names and Path(other).name != "__init__.py"
            ]
            if len(importers) == 1:
                offenders[path] = f"{path} has {len(file.lines)} lines and one importer: merge it into {importers[0]}"
    return offenders


def unreached_modules(package: Package) -> Offenders:
    """Return modules that nothing reaches from the command line, the public names or a folder of plugins."""
    reached = {path for path in package if is_entry(path)}
    waiting = list(reached)
    while waiting:
        path = waiting.pop()
        named = {part for name in runtime_imports(package[path], path) for part in files_of(name)}
        waiting += (new := named & set(package) - reached)
        reached |= new
    return {
        path: f"{path} is reached by no command, public name or plugin: use it, or delete it"
        for path in package
        if path not in reached and package[path].source.strip()
    }


def is_entry(path: str) -> bool:
    return path in ("__init__.py", "__main__.py") or path.startswith(ENTRY_FOLDERS)


def runtime_imports(file: File, path: str) -> set[str]:
    """Return the modules that a file imports when it runs, and those that it names as text: "rainband.fit:serve"."""
    hidden = {
        id(inner)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    shown = [node for node in ast.walk(file.tree) if id(node) not in hidden]
    texts = [node.value for node in shown if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {text.partition(":")[0] for text in texts if re.fullmatch(r"rainband(\.\w+)+(:\w+)?", text)}
    programs = [node for text in texts if "import rainband" in text or "from rainband" in text for node in parsed(text)]
    return named.union(*(imported_by(node, path) for node in [*shown, *programs]))


def parsed(text: str) -> list[ast.AST]:
    """Return the nodes of a program that is written as text, for a new process; none if it is no program."""
    try:
        return list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []


def files_of(module: str) -> Iterator[str]:
    """Return the files that hold a module and the packages around it: importing it runs them all."""
    parts = module.split(".")[1:]
    for length in range(len(parts) + 1):
        inside = "/".join(parts[:length])
        yield f"{inside}.py"
        yield f"{inside}/__init__.py".removeprefix("/")


def is_plugin_or_public(path: str) -> bool:
    return (
        Path(path).name in ("__init__.py", "__main__.py")
        or str(Path(path).parent) in PLUGIN_FOLDERS
        or path.startswith(PUBLIC_MODULES)
    )


def imports(file: File, path: str) -> set[str]:
    return set().union(*(imported_by(node, path) for node in ast.walk(file.tree)))


def imported_by(node: ast.AST, path: str) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    folder = ["rainband", *Path(path).parts[: -node.level]] if node.level else []
    module = ".".join([*folder, *([node.module] if node.module else [])])
    return {module, *(f"{module}.{alias.name}" for alias in node.names)}


def long_files(package: Package) -> Offenders:
    return {
        path: f"{path} has {len(file.lines)} lines (at most {MAX_LINES}): split it, or begin it with `# size: why`"
        for path, file in package.items()
        if len(file.lines) > MAX_LINES and not is_reason(file.lines[0])
    }


def second_mechanisms(package: Package) -> Offenders:
    """Return where a file does again what one file does for all: a worker's lifecycle, driving a coroutine."""
    offenders = {}
    for path, node in nodes(package, ast.Call):
        assert isinstance(node, ast.Call)
        called = last_name(node.func)
        home = next((home for names, home in ONE_PLACE.items() if called in names), path)
        nothing = [ast.unparse(given) for given in node.args] == ["None"]  # what sockets cannot send
        is_driving = called not in ("send", "throw") or nothing or "coroutine" in ast.unparse(node.func)
        if home != path and is_driving:
            text = ast.unparse(node.func)
            offenders[f"{path}: {text}"] = f"{path} calls {text}: {home} does that for all runtimes, so use it"
    return offenders


LAWS: list[Law] = [
    second_mechanisms,
    crowded_folders,
    repeated_classes,
    probed_strategies,
    replaced_methods,
    large_classes,
    long_signatures,
    small_modules,
    unreached_modules,
    long_files,
]


# ---- the package obeys them ----


# Offenders that wait to be repaired: nothing may be added, and what is repaired must be deleted here.
NOT_YET: dict[Law, set[str]] = {}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_package_obeys(law: Law, package: Package) -> None:
    offenders = law(package)
    new = [reason for name, reason in offenders.items() if name not in NOT_YET.get(law, set())]
    repaired = NOT_YET.get(law, set()) - set(offenders)
    if new or repaired:
        pytest.fail("\n".join(new + [f"{name}: repaired, delete it from NOT_YET" for name in sorted(repaired)]), False)


# ---- the rules notice what they should ----


def methods(count: int) -> str:
    return "".join(f"    def m{i}(self): ...\n" for i in range(count))


def attributes(count: int) -> str:
    return "    def __init__(self):\n" + "".join(f"        self.a{i} = {i}\n" for i in range(count))


def parameters(count: int) -> str:
    return ", ".join(f"p{i}" for i in range(count))


BREACHES: list[tuple[Law, dict[str, str]]] = [
    (second_mechanisms, {"runtimes/a.py": "link.tell(Ended(3))"}),
    (second_mechanisms, {"runtimes/a.py": "link.tell(messages.Join(layout))"}),
    (second_mechanisms, {"runtimes/a.py": "self.coroutine.send(None)"}),
    (second_mechanisms, {"runtimes/a.py": "program.send(None)"}),
    (crowded_folders, {f"views/v{i}.py": "" for i in range(17)}),
    (repeated_classes, {"a.py": "class Plan: ...", "b.py": "def f():\n    class Plan: ..."}),
    (repeated_classes, {"a.py": "class Plan: ...", "b.py": "Plan = namedtuple('Plan', 'a b')"}),
    (repeated_classes, {"a.py": "P = msgspec.defstruct('Plan', ['a'])", "b.py": "P = make_dataclass('Plan', ['a'])"}),
    (probed_strategies, {"a.py": "getattr(run.strategy, 'bound', 0)"}),
    (probed_strategies, {"a.py": "hasattr(type(strategy), 'server')"}),
    (probed_strategies, {"a.py": "half = strategy.server(2)\nhasattr(half, 'tick')"}),
    (probed_strategies, {"a.py": "def f():\n    cls = find_strategy(name)\n    return hasattr(cls, 'run')"}),
    (probed_strategies, {"a.py": "made = load_strategy(name, {})\ngetattr(made, 'lr')"}),
    (probed_strategies, {"a.py": "if (cls := load_strategy(name)) and hasattr(cls, 'lr'): ..."}),
    (probed_strategies, {"a.py": "def f(it: Rule | None) -> None:\n    getattr(it, 'rounds', None)"}),
    (probed_strategies, {"a.py": "getattr(load_strategy('sync', {}), 'lr')"}),
    (
        probed_strategies,
        {"a.py": "class A:\n def f(self, s: Strategy): self.s = s\n def g(self): hasattr(self.s, 'x')"},
    ),
    (probed_strategies, {"a.py": "for part in strategies: hasattr(part, 'x')"}),
    (probed_strategies, {"a.py": "found = [p for p in strategies.values() if hasattr(p, 'x')]"}),
    (probed_strategies, {"a.py": "probe = getattr\nprobe(strategy, 'x', 0)"}),
    (probed_strategies, {"a.py": "from builtins import getattr as look\nlook(strategy, 'x', 0)"}),
    (probed_strategies, {"a.py": "inspect.getattr_static(strategy, 'x')"}),
    (probed_strategies, {"a.py": "attrgetter('x')(strategy)"}),
    (probed_strategies, {"a.py": "'x' in vars(strategy)"}),
    (probed_strategies, {"a.py": "'x' in strategy.__dict__"}),
    (probed_strategies, {"a.py": "'x' in dir(strategy)"}),
    (probed_strategies, {"a.py": "a, b = load_strategy('sync', {}), 1\nhasattr(a, 'x')"}),
    (probed_strategies, {"a.py": "strategy.__getattribute__('x')"}),
    (probed_strategies, {"a.py": "inspect.getmembers(strategy)"}),
    (probed_strategies, {"a.py": "as_dict(strategy).get('x')"}),
    (probed_strategies, {"a.py": "as_plain(strategy)['x']"}),
    (probed_strategies, {"a.py": "try:\n    x = strategy.bound\nexcept (KeyError, AttributeError): ..."}),
    (probed_strategies, {"a.py": "config.strategy == 'sync'", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "name not in ('x', 'sync')", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "match name:\n    case 'sync': ...", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "match it:\n    case Sync(): ...", "strategies/sync.py": "class Sync: ..."}),
    (probed_strategies, {"a.py": "isinstance(it, int | Sync)", "strategies/sync.py": "class Sync: ..."}),
    (probed_strategies, {"a.py": "type(it) is Sync", "strategies/sync.py": "class Sync: ..."}),
    (probed_strategies, {"a.py": "algo = config.strategy\ngetattr(algo, 'bound', 0)"}),
    (probed_strategies, {"a.py": "with suppress(AttributeError):\n    x = strategy.bound"}),
    (probed_strategies, {"a.py": "it.__class__.__name__ == 'Sync'", "strategies/sync.py": "class Sync: ..."}),
    (probed_strategies, {"a.py": "NAMES = {'sync', 'x'}\nconfig.strategy in NAMES", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "NAMES = frozenset(['sync'])\nstrategy not in NAMES", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "COST: dict = {'sync': 1}\nCOST[config.strategy]", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "{'sync': 1}.get(config.strategy, 0)", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "name.startswith('sync')", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "config.strategy.startswith('stale')", "strategies/stale_sync.py": ""}),
    (replaced_methods, {"a.py": "object.__setattr__(client, 'take', f)"}),
    (replaced_methods, {"a.py": "patch.object(client, 'take')"}),
    (replaced_methods, {"a.py": "mock.patch('rainband.worker.client.Client.take')"}),
    (replaced_methods, {"a.py": "client.take = timed(client.take)  # type: ignore[method-assign]"}),
    (replaced_methods, {"a.py": "client.take = timed  # type: ignore[assignment, method-assign]"}),
    (replaced_methods, {"a.py": "coordinator.__class__ = Counting"}),
    (replaced_methods, {"a.py": "client.take = lambda: 1"}),
    (replaced_methods, {"a.py": "def f(client):\n    def noted(): ...\n    client.take = noted"}),
    (replaced_methods, {"a.py": "class A:\n    def note(self): ...\n    def f(self, x): x.take = self.note"}),
    (replaced_methods, {"a.py": "class A:\n    def take(self): ...", "b.py": "client.take = timed(client)"}),
    (replaced_methods, {"a.py": "setattr(client, 'take', lambda: 1)"}),
    (replaced_methods, {"a.py": "def noted(): ...\nclient.take: object = noted"}),
    (replaced_methods, {"a.py": "def noted(): ...\nclient.take, x = noted, 1"}),
    (replaced_methods, {"a.py": "def noted(): ...\nclass A:\n    def f(self): self.client.take = noted"}),
    (replaced_methods, {"a.py": "setattr(client, name, 1)"}),
    (replaced_methods, {"a.py": "client.__dict__['take'] = 1"}),
    (replaced_methods, {"a.py": "vars(client).update(take=1)"}),
    (large_classes, {"a.py": "class A:\n" + methods(26)}),
    (large_classes, {"a.py": "class A:\n" + methods(25) + "    size = property(lambda self: 1)"}),
    (large_classes, {"a.py": "@dataclass\nclass A:\n" + "".join(f"    a{i}: int\n" for i in range(21))}),
    (large_classes, {"a.py": "# size: it is large\nclass A:\n" + methods(26)}),
    (large_classes, {"a.py": "class A:\n" + attributes(21)}),
    (large_classes, {"a.py": "# size:\nclass A:\n" + methods(26)}),
    (large_classes, {"a.py": "# size: one method per message kind\nclass A:\n" + methods(25)}),
    (large_classes, {"a.py": "# size: a b c d\nclass A:\n" + methods(26)}),
    (large_classes, {"a.py": "class A:\n" + methods(25), "b.py": "class B(A):\n    def n(self): ..."}),
    (large_classes, {"a.py": "class A:\n" + attributes(20), "b.py": "class B(A):\n    b: int"}),
    (large_classes, {"a.py": "class A:\n" + attributes(21).replace("self", "this")}),
    (long_signatures, {"a.py": f"def f({parameters(9)}): ..."}),
    (long_signatures, {"a.py": f"class A:\n    def __init__(self, *, {parameters(9)}): ..."}),
    (long_signatures, {"a.py": f"class A:\n    def __call__(self, {parameters(9)}): ..."}),
    (long_signatures, {"a.py": f"if True:\n    def f({parameters(9)}): ..."}),
    (long_signatures, {"a.py": f"try: ...\nexcept E:\n    def f({parameters(9)}): ..."}),
    (small_modules, {"views/a.py": "x = 1", "views/b.py": "from rainband.views.a import x"}),
    (small_modules, {"views/a.py": "x = 1", "views/b.py": "from .a import x"}),
    (small_modules, {"views/a.py": "x = 1", "tasks/b.py": "from ..views import a"}),
    (small_modules, {"views/a.py": "x = 1", "views/b.py": "def f():\n    from rainband.views import a"}),
    (small_modules, {"views/a.py": "x = 1", "views/b.py": "from .a import x", "views/__init__.py": "from .a import x"}),
    (unreached_modules, {"views/a.py": "x = 1"}),
    (unreached_modules, {"views/a.py": "x = 1", "views/b.py": "", "cli/c.py": "'Text about rainband.views.a'"}),
    (unreached_modules, {"a.py": "x = 1", "cli/c.py": "if TYPE_CHECKING:\n    from rainband.a import x"}),
    (long_files, {"a.py": "x = 1\n" * 601}),
]

ALLOWED: list[tuple[Law, dict[str, str]]] = [
    (second_mechanisms, {"worker/lifecycle.py": "link.tell(Ended(3))", "a.py": "sock.send(data)"}),
    (second_mechanisms, {"a.py": "match it:\n    case Ended(): ..."}),
    (crowded_folders, {f"views/{folder}/v{i}.py": "" for folder in "ab" for i in range(16)}),
    (repeated_classes, {"a.py": "class Plan: ...", "b.py": "class Placement: ..."}),
    (probed_strategies, {"a.py": "getattr(torch, strategy.dtype)"}),
    (probed_strategies, {"a.py": "cls = getattr(importlib.import_module(name), class_name)"}),
    (probed_strategies, {"a.py": "COST = {'sync': 1}\nCOST[number]", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "SCHEDULES = {'sync': 1}\nname in SCHEDULES", "strategies/sync.py": ""}),
    (probed_strategies, {"a.py": "name.startswith('rainband')", "strategies/sync.py": ""}),
    (replaced_methods, {"a.py": "object.__setattr__(self, 'nodes', {})"}),
    (large_classes, {"a.py": "class A:\n" + methods(25) + "    limit = len('x')"}),
    (replaced_methods, {"a.py": "class A:\n    def f(self): self.take = lambda: 1"}),
    (replaced_methods, {"a.py": "class A:\n    count: int\n    def take(self): ...", "b.py": "client.count = 3"}),
    (replaced_methods, {"a.py": "sys.excepthook = partial(show, sys.excepthook)"}),
    (large_classes, {"a.py": "class A:\n" + methods(25)}),
    (large_classes, {"a.py": "# size: one method per message kind\n@final\nclass A:\n" + methods(26)}),
    (long_signatures, {"a.py": f"def f({parameters(8)}): ...\ndef _f({parameters(9)}): ..."}),
    (long_signatures, {"a.py": f"class A:\n    def f(self, {parameters(8)}): ..."}),
    (small_modules, {"views/a.py": "x = 1\n" * 60, "views/b.py": "from rainband.views.a import x"}),
    (small_modules, {"rules/a.py": "x = 1", "views/b.py": "from rainband.rules.a import x"}),
    (small_modules, {"a.py": "x = 1", "b.py": "import rainband.a", "c.py": "from rainband import a"}),
    (probed_strategies, {"strategies/sync.py": "name == 'sync'"}),
    (probed_strategies, {"a.py": "settings = as_dict(strategy)\nisinstance(it, Strategy)"}),
    (large_classes, {"a.py": "class A:\n" + methods(25), "b.py": "class B(A):\n    def m0(self): ..."}),
    (
        unreached_modules,
        {"strategies/sync.py": "", "cli/c.py": "def f():\n    from rainband.a import x", "a.py": "x = 1"},
    ),
    (unreached_modules, {"cli/c.py": "ENTRY = 'rainband.a:serve'", "a.py": "x = 1"}),
    (unreached_modules, {"cli/c.py": "BOOT = 'import os\\nfrom rainband.a import serve'", "a.py": "x = 1"}),
    (unreached_modules, {"cli/c.py": "import rainband.views.b", "views/b.py": "", "views/__init__.py": "x = 1"}),
    (long_files, {"a.py": "# size: one class per message kind\n" + "x = 1\n" * 600}),
]


@pytest.mark.parametrize("law, sources", BREACHES)
def test_a_breach_is_noticed(law: Law, sources: dict[str, str]) -> None:
    assert len(law(package_of(sources))) == 1


@pytest.mark.parametrize("law, sources", ALLOWED)
def test_what_is_allowed_is_left_alone(law: Law, sources: dict[str, str]) -> None:
    assert law(package_of(sources)) == {}


def test_every_rule_is_broken_on_purpose() -> None:
    assert {law for law, _ in BREACHES} == {law for law, _ in ALLOWED} == set(LAWS)
