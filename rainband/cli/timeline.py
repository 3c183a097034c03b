"""`rainband timeline`: a picture of who computed, waited, pushed and pulled when; and the same for Chrome."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rainband.cli import complete
from rainband.cli.mistakes import mistakes_told
from rainband.cli.words import count

if TYPE_CHECKING:
    from rainband.worlds.spans import Span

COLOURS = {"compute": "#2f6f9f", "wait": "#e3b23c", "push": "#b5482a", "pull": "#4c9f70", "apply": "#6a4c93"}
HEIGHTS = {"compute": (0.3, 0.5), "wait": (0.3, 0.5), "apply": (0.3, 0.5), "push": (0.16, 0.1), "pull": (0.04, 0.1)}
MAX_SPANS = 50_000  # more cannot be told apart in an image


def register(app: typer.Typer) -> None:
    app.command("timeline")(command)


def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A directory, a name, the beginning of a name, or last.",
            autocompletion=complete.runs,
        ),
    ] = "last",
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where the runs are.")] = Path("runs"),
    begin: Annotated[float, typer.Option("--from", metavar="SECONDS", help="Begin here.")] = 0.0,
    end: Annotated[float | None, typer.Option("--to", metavar="SECONDS", help="End here.")] = None,
) -> None:
    """Draw timeline.png, and write timeline.json for chrome://tracing or ui.perfetto.dev, into the run's directory."""
    from rainband.history import find_run
    from rainband.worlds.spans import read_spans

    with mistakes_told():
        directory = find_run(runs, run)
        every = read_spans(directory)
        if not every:
            raise ValueError(
                f"{directory.name} has no timeline: runs in virtual time have one (--world sim), "
                "real ones if they were started with --timeline."
            )
        spans = within(every, begin, end)
        if not spans:
            raise ValueError(f"nothing happened from {begin} s to {end} s: the run took {_length(every):.3f} s.")
    json, image = directory / "timeline.json", directory / "timeline.png"
    json.write_bytes(chrome_trace(spans))
    typer.echo(f"{json}: {count(len(spans), 'span')}")
    if draw(spans, image):
        typer.echo(str(image))
    else:
        typer.echo("no image: matplotlib is not installed (pip install 'rainband[plots]').", err=True)


def within(spans: Sequence[Span], begin: float, end: float | None) -> list[Span]:
    return [span for span in spans if span.to_s >= begin and (end is None or span.from_s <= end)]


def _length(spans: Sequence[Span]) -> float:
    return max(span.to_s for span in spans)


def nodes_of(spans: Sequence[Span]) -> list[str]:
    """In the order of a picture: workers by number, then servers."""

    def place(name: str) -> tuple[bool, int, str]:
        number = name.split(" ")[-1].split("'")[0]
        return not name.startswith("worker"), int(number) if number.isdigit() else 0, name

    return sorted({span.node for span in spans}, key=place)


def chrome_trace(spans: Sequence[Span]) -> bytes:
    """The spans in the trace event format: a process per node, a thread for what it does, one for what travels."""
    import msgspec

    numbers = {node: number for number, node in enumerate(nodes_of(spans))}
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": node}} for node, number in numbers.items()
    ]
    for span in spans:
        lane = {"push": 1, "pull": 2}.get(span.what, 0)
        times = {"ts": round(span.from_s * 1e6, 3), "dur": round((span.to_s - span.from_s) * 1e6, 3)}
        named.append({"ph": "X", "name": span.what, "pid": numbers[span.node], "tid": lane, **times})
    return msgspec.json.encode({"traceEvents": named, "displayTimeUnit": "ms"})


def draw(spans: Sequence[Span], path: Path) -> bool:
    """One line per node; False: there is nothing to draw with."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return False
    nodes = nodes_of(spans)
    figure = Figure(figsize=(12, 1.2 + 0.35 * len(nodes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = spans[:MAX_SPANS]
    for what, colour in COLOURS.items():
        low, height = HEIGHTS[what]
        for number, node in enumerate(nodes):
            bars = [(s.from_s, s.to_s - s.from_s) for s in shown if s.what == what and s.node == node]
            axes.broken_barh(bars, (number + low, height), facecolors=colour, linewidth=0)
    axes.set_yticks([number + 0.5 for number in range(len(nodes))], nodes)
    axes.set_ylim(len(nodes), 0)  # the first at the top
    axes.set_xlabel("seconds")
    seen = [what for what in COLOURS if any(span.what == what for span in shown)]
    patches = [Patch(color=COLOURS[what], label=what) for what in seen]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(seen), frameon=False)
    figure.savefig(path, dpi=120)
    return True
