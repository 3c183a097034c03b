"""`rainband bench`: measure the claims of speed, each a ratio in one run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.mistakes import give_up, mistakes_told

if TYPE_CHECKING:
    from rainband.bench.rows import Row

NOT_BENCHMARKS = {"__init__", "rows", "rig", "limit", "opponents", "processes"}


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def names() -> list[str]:
    """The benchmarks, by their files."""
    folder = Path(__file__).parent.parent / "bench"
    return sorted({file.stem for file in folder.glob("*.py")} - NOT_BENCHMARKS)


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

    with mistakes_told():
        chosen = names() if name == "all" else [name]
        if name not in names() and name != "all":
            give_up(f"no benchmark named {name!r}: choose from {', '.join(names())}, or all.", 2)
    rows: list[Row] = []
    for one in chosen:
        typer.echo(f"measuring {one} ...", err=True)
        found = importlib.import_module(f"rainband.bench.{one}").run("quick" if quick else "full")
        rows += found
        if not as_json:
            _show(one, found)
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    if any(row.met is False for row in rows):
        raise typer.Exit(1)


def _show(name: str, rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bench {name}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("against")
    table.add_column("bar", justify="right")
    table.add_column("met")
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:g}"
        met = {None: "", True: "yes", False: "NO"}[row.met]
        table.add_row(
            row.name,
            f"{row.value:.3g}" if row.value < 1000 else f"{row.value:,.0f}",
            row.unit,
            row.against,
            bar,
            met,
        )
    Console().print(table)
