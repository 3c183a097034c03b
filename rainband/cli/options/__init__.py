"""Commands whose options are those of `rainband.options`, in groups, and the words that come before them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rainband.options import DeclaredOption, RunOptions, declared

OUTPUT = "Output"  # the group of --json and --verbose

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


class GroupedCommand(TyperCommand):
    """A command whose --help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # click's Context and HelpFormatter
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                is_argument = param.param_type_name == "argument"
                group = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def with_run_options(command: Callable[..., None], leave_out: Collection[str] = ()) -> Callable[..., None]:
    """Return `command(..., options: RunOptions)` as a function from whose signature typer reads every option."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
    shown = [_parameter(one) for one in declared().values() if one.flag != "-" and one.name not in leave_out]

    def typed(**words: Any) -> None:
        values = {p.name: words.pop(p.name) for p in shown}
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        command(**words, options=RunOptions(**given))  # type: ignore[typeddict-item]

    # The command's own options that belong to a group are listed at its end.
    positional = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    parameters = [*positional, *shown, *(p for p in own if p not in positional)]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    typed.__doc__ = command.__doc__
    typed.__annotations__ = {p.name: p.annotation for p in parameters}
    return typed


def _parameter(declared_option: DeclaredOption) -> inspect.Parameter:
    name, group, kind, option = declared_option
    if kind is bool:
        annotation: Any = Annotated[bool, typer.Option(declared_option.flag, help=option.help, rich_help_panel=group)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
    shown = typer.Option(
        declared_option.flag,
        help=f"{option.help}  [default: {option.default}]" if option.default else option.help,
        metavar=option.metavar,
        rich_help_panel=group,
    )
    annotation = Annotated[(kind if kind in (int, float, Path) else str) | None, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
