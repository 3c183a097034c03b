"""The progress of a run on a terminal: a few lines, redrawn in place at each event."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rainband.protocol.events import AnyEvent, RunEnded
from rainband.views import event_text
from rainband.views.charts import BLOCKS, Ink, bar, ink_for, progress_bar, spark
from rainband.views.formatting import count, cut, duration, percent, short, whole
from rainband.views.history import MOST_LIVE, RunSoFar, WorkerNow, loss_curve

MAX_BAR = 60
MAX_SPARK = 60
LINES_ABOVE_WORKERS = 5
LEFT_WIDTH = len("59 min 59 s left")
NOTE_WIDTH = 6  # "slow" and two spaces


class LiveView:
    """Redraws a frame in place; lasting lines scroll above it."""

    def __init__(self, stream: TextIO, verbose: bool = False) -> None:
        self.console = Console(file=stream, highlight=False)
        self.ink = ink_for(self.console.encoding)
        self.verbose = verbose
        self.so_far = RunSoFar(most_progress=MOST_LIVE)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.live.start()
        # The cursor stays visible: if this process were killed, it would stay hidden.
        self.console.show_cursor(True)

    def __call__(self, event: AnyEvent) -> None:
        self.so_far.absorb(event)
        for line in event_text.lasting_lines(event, self.so_far, self.verbose):
            self.say(line)
        if not isinstance(event, RunEnded):
            self._draw()

    def say(self, line: str) -> None:
        self.console.print(Text(line))

    def close(self) -> None:
        """Remove the frame; the cursor is then where it would be without it."""
        self.live.stop()

    def _draw(self) -> None:
        width, height = self.console.size
        self.live.update(Group(*frame(self.so_far, width, height, self.ink)), refresh=True)


def frame(so_far: RunSoFar, width: int, height: int, ink: Ink = BLOCKS) -> list[Text]:
    """Return the whole frame, with lines shorter than `width` and fewer lines than `height`."""
    width -= 1  # a full last column makes some terminals wrap
    clock = duration(so_far.at_s) + (" simulated" if so_far.is_virtual else "")
    title = _spread(event_text.headline(so_far), clock, width, "bold")
    if so_far.last is None or not (so_far.samples or so_far.last.batches_done):
        return [title, Text(cut(event_text.waiting_for(so_far), width))]
    lines = [title, _progress(so_far, width, ink), _measures(so_far, width, ink)]
    rows = height - LINES_ABOVE_WORKERS
    if rows >= 2:
        lines += [Text(""), *_workers(so_far.workers(), so_far.unit, width, rows, ink)]
    return lines[: max(1, height - 1)]


def _spread(left: str, right: str, width: int, style: str = "") -> Text:
    left = cut(left, max(0, width - len(right) - 1))
    return Text.assemble((left, style), " " * (width - len(left) - len(right)), right)


def _progress(so_far: RunSoFar, width: int, ink: Ink) -> Text:
    if not so_far.samples:
        done = event_text.iteration(so_far) or event_text.done(so_far)
        return Text(cut(f"{done}  {_time_left(so_far)}", width))
    share = so_far.samples_done / so_far.samples
    total = count(so_far.samples, "sample")
    done = whole(so_far.samples_done).rjust(len(whole(so_far.samples)))
    # Fixed widths, so that nothing moves from one drawing to the next.
    text = f"{percent(share):>5}  {done} of {total}  {_time_left(so_far):<{LEFT_WIDTH}}"
    room = min(MAX_BAR, width - len(text) - 1)
    if room < 8:
        return Text(cut(text, width))
    return Text.assemble((progress_bar(share, room, ink), "cyan"), " ", text)


def _time_left(so_far: RunSoFar) -> str:
    if so_far.stopping and so_far.phase != "running":
        return "stopping"
    if so_far.phase == "concluding":
        return "saving"
    return event_text.time_left(so_far)


def _measures(so_far: RunSoFar, width: int, ink: Ink) -> Text:
    if so_far.last_iteration is not None:  # its line has the loss
        parts = event_text.evaluations(so_far), event_text.done(so_far), event_text.rate(so_far)
    else:
        loss = "" if so_far.loss is None else f"loss {short(so_far.loss)}"
        parts = event_text.rate(so_far), event_text.staleness(so_far), loss
    text = "   ".join(part for part in (*parts, event_text.metrics(so_far)) if part)
    losses = [y for _, y in loss_curve(so_far.progress)]
    room = min(MAX_SPARK, width - len(text) - 1)
    if len(losses) > 1 and room >= 5:
        text += f" {spark(losses, room, ink)}"
    return Text(cut(text, width))


def _workers(workers: list[WorkerNow], unit: str, width: int, rows: int, ink: Ink) -> list[Text]:
    """Return a line per worker; of too many, the lost and slow ones, and one line about the others."""
    shown, rest = _choose(workers, rows - 1)
    fastest = max((worker.per_s for worker in workers), default=0.0)
    head = f"{'worker':>6}  {f'{unit}s/s':>9}"
    room = max(0, min(MAX_BAR, width - len(head) - 2 - len(_waiting("waiting", "in total")) - NOTE_WIDTH))
    header = f"{head}  {'':<{room}}{_waiting('waiting', 'in all')}"
    lines = [Text(cut(header, width), style="dim")]
    lines += [_worker(worker, fastest, room, width, ink) for worker in shown]
    if rest:
        mean = sum(worker.per_s for worker in rest) / len(rest)
        lines.append(Text(cut(f"   and {len(rest)} more, {short(mean)} {unit}s/s each on average", width)))
    return lines


def _choose(workers: list[WorkerNow], rows: int) -> tuple[list[WorkerNow], list[WorkerNow]]:
    if len(workers) <= rows:
        return workers, []
    ordered = sorted(workers, key=lambda w: (not w.lost, not w.slow, w.index))
    shown = ordered[: max(0, rows - 1)]
    return sorted(shown, key=lambda w: w.index), ordered[len(shown) :]


def _worker(worker: WorkerNow, fastest: float, room: int, width: int, ink: Ink) -> Text:
    if worker.lost:
        return Text(cut(f"{worker.index:>6}  {worker.lost.state:>9}  {worker.lost.why}", width), style="red")
    share = worker.per_s / fastest if fastest else 0.0
    rate = short(worker.per_s) if worker.per_s else "-"
    head = f"{worker.index:>6}  {rate:>9}  "
    tail = _waiting(percent(worker.waiting), duration(worker.waited_s))
    line = Text.assemble(head, (f"{bar(share, room, ink):<{room}}", "green"), tail)
    if worker.slow:
        line.append("  slow", style="yellow")
    line.truncate(width)
    return line


def _waiting(share: str, total: str) -> str:
    return f"  {share:>7}  {total:>10}"
