"""`rainband bench`: measure speed, in ratios to alternatives or to the hardware's limit."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.report_errors import give_up, report_errors
from rainband.views.formatting import short, table

if TYPE_CHECKING:
    from rainband.bench.harness.rows import Row


def names() -> list[str]:
    """Return the names of the benchmarks, which are those of their files."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Return the module of each benchmark, by name; sub-folders only group files."""
    root = Path(__file__).parents[1]
    files = [file.relative_to(root).with_suffix("") for file in (root / "bench" / "cases").rglob("*.py")]
    return {file.name: ".".join(("rainband", *file.parts)) for file in files if file.name != "__init__"}


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"One of {', '.join(names())}, or all.", autocompletion=names)
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions: faster and less precise.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Measure speed, compared with the hardware's limit and with alternatives (gloo, DDP, bare sockets)."""
    import msgspec

    with report_errors():
        chosen = names() if name == "all" else [name]
        if name not in names() and name != "all":
            give_up(f"no benchmark named {name!r}: choose from {', '.join(names())}, or all.", 2)
    rows: list[Row] = []
    ended_early = ""
    for one in chosen:
        typer.echo(f"measuring {one} ...", err=True)
        found: list[Row] = []
        try:
            for row in importlib.import_module(_modules()[one]).run("quick" if quick else "full"):
                found.append(row)
                typer.echo("  " + one_line(row), err=True)  # the table may take minutes
        except KeyboardInterrupt:
            ended_early = "interrupted"
        except RuntimeError as error:  # a measured run failed
            ended_early = str(error)
        rows += found
        if found and not as_json:
            _show(one, found)
        if ended_early:
            break
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    if ended_early:
        give_up(f"bench {one} ended early: {ended_early}", 1)
    if any(row.met is False for row in rows):
        raise typer.Exit(1)


def _show(name: str, rows: list[Row]) -> None:
    for line in as_table(name, rows, shutil.get_terminal_size().columns):
        typer.echo(line)


def as_table(name: str, rows: list[Row], width: int) -> list[str]:
    """Return a table, numbers first and descriptions wrapped, that is readable in 80 columns."""
    texts = [_texts(row) for row in rows]
    room = max([len("value"), *(len(value) for value, *_ in texts)])
    head = ("value".rjust(room), "unit", "target", "met", "what")
    return [f"bench {name}", *table([head, *((c[0].rjust(room), *c[1:]) for c in texts)], indent="  ", width=width), ""]


def one_line(row: Row) -> str:
    value, unit, target, met, what = _texts(row)
    return f"{what}: {value} {unit}" + (f" (target {target}, met: {met})" if target else "")


def _texts(row: Row) -> tuple[str, str, str, str, str]:
    unit, _, of_what = row.unit.partition(" ")  # "GB/s pushed and pulled" would take half of the line
    what = ", ".join(filter(None, [row.name, of_what, row.against and f"against {row.against}"]))
    target = "" if row.target is None else f"{row.target:g}"
    return short(row.value), unit, target, {None: "", True: "yes", False: "NO"}[row.met], what
