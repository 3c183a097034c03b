"""`rainband bench`: measure the claims of speed, each a ratio in one run."""

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


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def names() -> list[str]:
    """The benchmarks, by their files."""
    folder = Path(__file__).parents[1] / "bench" / "cases"
    return sorted({file.stem for file in folder.glob("*.py")} - {"__init__"})


def bench(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"One of {', '.join(names())}, or all.", autocompletion=names),
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions: a rough idea, sooner.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A list of rows, for programs.")] = False,
) -> None:
    """Measure speed against the physical limit and against what users have (gloo, DDP, bare sockets)."""
    import msgspec

    with report_errors():
        chosen = names() if name == "all" else [name]
        if name not in names() and name != "all":
            give_up(f"no benchmark named {name!r}: choose from {', '.join(names())}, or all.", 2)
    rows: list[Row] = []
    broken_off = ""
    for one in chosen:
        typer.echo(f"measuring {one} ...", err=True)
        found: list[Row] = []
        try:
            for row in importlib.import_module(f"rainband.bench.cases.{one}").run("quick" if quick else "full"):
                found.append(row)
                typer.echo("  " + in_a_line(row), err=True)  # minutes may go by before the table
        except KeyboardInterrupt:
            broken_off = "interrupted"
        except RuntimeError as error:  # a run that was measured did not come to its end
            broken_off = str(error)
        rows += found  # what was measured is not lost
        if found and not as_json:
            _show(one, found)
        if broken_off:
            break
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    if broken_off:
        give_up(f"bench {one} was broken off: {broken_off}", 1)
    if any(row.met is False for row in rows):
        raise typer.Exit(1)


def _show(name: str, rows: list[Row]) -> None:
    for line in shown(name, rows, shutil.get_terminal_size().columns):
        typer.echo(line)


def shown(name: str, rows: list[Row], width: int) -> list[str]:
    """Numbers first, then what they are, wrapped: readable in 80 columns."""
    texts = [_texts(row) for row in rows]
    room = max([len("value"), *(len(value) for value, *_ in texts)])
    head = ("value".rjust(room), "unit", "target", "met", "what")
    return [
        f"bench {name}",
        *table([head, *((c[0].rjust(room), *c[1:]) for c in texts)], indent="  ", width=width),
        "",
    ]


def in_a_line(row: Row) -> str:
    value, unit, target, met, what = _texts(row)
    return f"{what}: {value} {unit}" + (f" (target {target}, met: {met})" if target else "")


def _texts(row: Row) -> tuple[str, str, str, str, str]:
    unit, _, of_what = row.unit.partition(" ")  # "GB/s pushed and pulled" would take half of the line
    what = ", ".join(filter(None, [row.name, of_what, row.against and f"against {row.against}"]))
    target = "" if row.target is None else f"{row.target:g}"
    return short(row.value), unit, target, {None: "", True: "yes", False: "NO"}[row.met], what
