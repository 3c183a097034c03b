"""Commands whose options are those of `rainband.options`, in groups, and the words that come before them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from rainband.cli.options import completion
from rainband.cli.report_errors import USAGE, give_up, report_errors
from rainband.options import DeclaredOption, Duration, OptionError, RunOptions, ThreadCount, check_value, declared, opt

RENAMED = {
    "--world": "--runtime",
    "--plan": "--placement",
    "--chunks": "--stages-per-worker",
    "--group": "--machines-per-group",
    "--between": "--inter-group-network",
    "--most": "--limit",
}  # options of earlier development versions, for hints
RENAMED_COMMANDS = {"simtest": "fuzz", "plan": "placement"}
MAX_SUMMARY = 1000  # characters in the list of commands: no sentence is longer
OUTPUT = "Output"  # the group of --json and --verbose
NUMBERS: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
}  # how a text is read, and what is expected

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="End standard output with one JSON object; everything else goes to stderr.",
        rich_help_panel=OUTPUT,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show every event and log record.", rich_help_panel=OUTPUT)
]


PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunsDirectory = Annotated[Path, typer.Option(metavar="DIR", help="Directory of the runs.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run: its directory, its name or the beginning of its name; last: the newest.",
        autocompletion=completion.runs,
    ),
]


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


class CommandGroup(TyperGroup):
    """A group of commands that lists the first sentence of each, without cutting it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # click's Context and HelpFormatter
        found = [(name, command) for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=MAX_SUMMARY)) for name, command in found])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and (new := RENAMED_COMMANDS.get(name)) in self.commands:
            give_up(f"there is no command {name}: it is now {new}.", USAGE)
        return super().resolve_command(ctx, args)


class ExampleCommand(TyperCommand):
    """A command that is shown with the first example of its --help if an argument is missing."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # click's Context and HelpFormatter
        """Write the options in their groups, and arguments without the types of Python."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                is_argument = param.param_type_name == "argument"
                group = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                name = str(param.metavar or record[0]) if is_argument else record[0]
                groups.setdefault(group, []).append((name, record[1]))
        for group, records in sorted(groups.items(), key=lambda item: item[0] == "Options"):
            with formatter.section(group):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if type(error) is typer.BadParameter:
                refuse_text(words, self.get_params(ctx))
                raise
            # It is click's MissingParameter, which typer does not export.
            required = [str(param.metavar) for param in self.get_params(ctx) if param.required]
            lines = map(str.strip, (self.help or "").splitlines())
            example = next(line for line in lines if line.startswith("rainband "))
            give_up(f"{ctx.command_path} requires {' and '.join(required)}, such as {example}", USAGE)


def refuse_text(words: list[str], params: Iterable[Any]) -> None:
    """End with the option that was given a text in place of a number, if there is one."""
    kinds = {
        flag: NUMBERS[param.bare_type()] for param in params if param.bare_type() in NUMBERS for flag in param.opts
    }
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        flag, sign, value = word.partition("=")
        value = value if sign else next_word
        make, expected = kinds.get(flag, (str, ""))
        try:
            make(value)
        except ValueError:
            give_up(f"{flag} {value}: must be {expected}.", USAGE)


class GroupedCommand(ExampleCommand):
    """A command whose --help lists its options in groups; --help itself is last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.allow_interspersed_args:  # otherwise a later word may be the argument of a script
            known = {flag for param in self.get_params(ctx) for flag in param.opts}
            for old in (word.partition("=")[0] for word in args):
                if old not in known and (new := RENAMED.get(old)) in known:
                    give_up(f"there is no option {old}: it is now {new}.", USAGE)
        return super().parse_args(ctx, args)


def with_run_options(
    command: Callable[..., None], leave_out: Collection[str] = (), defaults: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., None]:
    """Return `command(..., options: RunOptions)` as a function from whose signature typer reads every option.

    `defaults` are the words for those of this command, where they are not the declared ones.
    """
    shown = [
        one._replace(option=one.option._replace(default=defaults.get(one.name, one.option.default)))
        for one in declared().values()
        if one.name not in leave_out
    ]
    return with_options(command, RunOptions, shown)


def with_options(
    command: Callable[..., None],
    make: Callable[..., object],
    options: Iterable[DeclaredOption],
    completions: Mapping[str, Callable[[str], list[str]]] | None = None,
) -> Callable[..., None]:
    """Return `command(..., options)` as a function with a parameter for each option; `make` collects those given."""
    shown = {one.name: one for one in options if one.flag != "-"}
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]

    def typed(**words: Any) -> None:
        values = {name: words.pop(name) for name in shown}
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        with report_errors():
            for name in (name for name in given if is_mapping(shown[name])):
                given[name] = numbers_by_name(name, given[name])
            for name, value in given.items():
                check_value(shown[name], value)
        command(**words, options=make(**given))

    positional = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    parameters = [
        *positional,
        *(_parameter(one, (completions or {}).get(one.name)) for one in shown.values()),
        *(p for p in own if p not in positional),  # of the last group
    ]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    typed.__doc__ = command.__doc__
    typed.__annotations__ = {p.name: p.annotation for p in parameters}
    return typed


def is_mapping(one: DeclaredOption) -> bool:
    return get_origin(one.kind) is Mapping


def numbers_by_name(option: str, text: str) -> dict[str, float]:
    """Return the numbers of an option that was typed as NAME=N,NAME=N."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    try:
        return {name.strip(): float(number) for name, _, number in pairs}
    except ValueError:
        raise OptionError(f"{opt(option, text)}: write names and numbers, such as CPU=2,GPU=1.") from None


def _parameter(one: DeclaredOption, complete: Callable[[str], list[str]] | None) -> inspect.Parameter:
    option, is_flag = one.option, one.kind is bool
    shown = typer.Option(
        one.flag,
        help=f"{option.help}  [default: {option.default}]" if option.default else option.help,
        metavar=None if is_flag else option.metavar,
        rich_help_panel=one.group,
        autocompletion=complete,
    )
    as_text = is_mapping(one) or one.kind in (Duration, ThreadCount)
    kind: Any = bool if is_flag else (str if as_text else one.kind) | None
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=False if is_flag else None, annotation=Annotated[kind, shown]
    )
