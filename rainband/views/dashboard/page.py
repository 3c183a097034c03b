"""The data of a run's page: what is so now, and how it came about. Encoded as JSON for the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rainband.protocol.events import STALENESS_BINS, Absence, NodesMeasured
from rainband.views.dashboard.findings import (
    Sentence,
    WorkerFacts,
    accounting_of,
    held_up,
    sentences,
    workers_of,
)
from rainband.views.dashboard.fold import Folded, LogLine, Mark, RunFile
from rainband.views.dashboard.series import Column, Point, readable
from rainband.views.spans import FILES

MAX_ROWS = 64  # workers that are shown one by one
LATE_COLUMNS = 8  # before a heartbeat, whose waiting it may report
MAX_OF_A_KIND = 16  # lost, slow, waiting or waited for, of many workers
MAX_SERVERS = 16
MAX_BLOCKS = 16
MAX_TEXT = 2000  # characters of a text of the user's
MAX_REASON = 200  # characters
MAX_SETTINGS = 40
MAX_METRICS = 8
DIGITS = 5  # significant ones of a number in a series


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker on the page."""

    rank: int
    per_s: float
    waiting: float
    waited_s: float
    waits_now: bool
    slow: bool
    lost: str  # why it takes no part; "": it does
    absence: Absence | Literal[""]
    stage: int | None  # of a model in stages
    missed_mean: float | None
    missed_max: int | None
    staleness: tuple[int, ...]  # gradients in each bin
    pushed_bytes: int | None
    pulled_bytes: int | None
    sent_bytes: int | None
    cpu_s: float | None


class ServerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One server on the page."""

    rank: int
    lost: str
    updates: int | None


# size: one field for each number on the page
class Now(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run."""

    name: str
    state: str  # starting, running, finished, stopped, failed, killed
    phase: str
    stopping: str
    task: str
    strategy: str
    settings: dict[str, str]
    version: str
    started_at: str
    virtual: bool
    at_s: float
    began_s: float  # the first step
    training_s: float
    unit: str
    samples: int
    samples_done: int
    done: int
    per_s: float
    left_s: float | None
    loss: float | None
    metrics: dict[str, float]
    epochs: int
    parameters: int
    shares_batches: bool
    num_workers: int  # that the columns have rows of, and others
    num_servers: int
    num_joined: int
    replica_size: int
    staleness_mean: float | None
    staleness_max: int | None
    staleness_bound: float | None
    staleness_unit: str
    pushed_bytes: int
    pulled_bytes: int
    cpu_s: float
    workers: list[WorkerRow]
    servers: list[ServerRow]
    all_staleness: tuple[int, ...]
    blocks: list[tuple[float, int]]
    waited_for: list[tuple[int, int, float]]
    held_up: list[tuple[int, float]]  # worker, seconds that others waited for it; the most first
    accounting: dict[str, Any]
    sentences: list[Sentence]
    error: str
    traceback: str
    unreadable: int
    has_spans: bool


class WorkerStrip(msgspec.Struct, frozen=True):
    """A worker over time; an entry for each column, none where nothing is known."""

    rank: int
    missed_mean: list[float | None]
    waiting: list[float | None]
    per_s: list[float | None]


class PageHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The run over time, from some point and some column on."""

    version: tuple[int, ...]  # when it changes, what was sent before is out of date
    from_point: int = 0
    curve: dict[str, list[float | None]]
    metric: str
    from_column: int = 0
    column_s: list[tuple[float, float]]
    strips: list[WorkerStrip]
    marks: list[Mark]
    log: list[LogLine]
    bins: list[str]


class Sent(msgspec.Struct, frozen=True):
    """The part of the history that a page has received."""

    version: tuple[int, ...] = ()
    points: int = 0
    columns: int = 0
    offset: int = -1  # of the last line of the log


NOTHING = Sent()


def bin_names() -> list[str]:
    """Return the names of the bins of staleness: 0, 1, 2, 3–4, 5–8, ..., 129+."""
    names = []
    for low, after in zip(STALENESS_BINS, [*STALENESS_BINS[1:], None], strict=True):
        names.append(f"{low}+" if after is None else str(low) if after == low + 1 else f"{low}–{after - 1}")
    return names


class RunPage:
    """Computes the page of a run from its folded events."""

    def __init__(self, file: RunFile) -> None:
        self.file = file
        self.counted: tuple[tuple[int, bool], dict[int, WorkerFacts]] = (-1, False), {}  # the last ones, and of when

    @property
    def folded(self) -> Folded:
        return self.file.folded

    def _workers(self) -> dict[int, WorkerFacts]:
        moment = self.folded.num_events, self.file.is_over
        if self.counted[0] != moment:
            self.counted = moment, workers_of(self.folded, is_over=self.file.is_over)
        return self.counted[1]

    def now(self) -> Now:
        """Return the state of the run."""
        folded, so_far, state = self.folded, self.folded.so_far, self.file.state
        started, plan, last, ended, nodes = so_far.started, so_far.plan, so_far.last, so_far.ended, folded.nodes
        workers = self._workers()
        chosen = chosen_ranks(folded, workers)
        num_servers = started.num_servers if started else 0
        at_s = ended.seconds if ended else so_far.at_s
        training_s = so_far.training.seconds or max(0.0, at_s - (so_far.training.began_s or at_s))
        has_staleness = bool(nodes and any(nodes.all_staleness))
        return Now(
            name=self.file.directory.name,
            state=state,
            phase=so_far.phase,
            stopping=so_far.stopping[:MAX_TEXT],
            task=started.task[:MAX_TEXT] if started else "",
            strategy=started.strategy[:MAX_TEXT] if started else "",
            settings=_settings(started.settings) if started else {},
            version=started.version if started else "",
            started_at=started.started_at if started else "",
            virtual=so_far.is_virtual,
            at_s=at_s,
            began_s=so_far.training.began_s or 0.0,
            training_s=training_s,
            unit=so_far.unit,
            samples=so_far.samples,
            samples_done=so_far.samples_done,
            done=so_far.done,
            per_s=so_far.per_s if state == "running" or not training_s else so_far.done / training_s,
            left_s=so_far.left_s if state == "running" else None,
            loss=so_far.loss,
            metrics=dict(list(folded.evaluated.items())[:MAX_METRICS]),
            epochs=plan.epochs if plan else 0,
            parameters=plan.num_parameters if plan else 0,
            shares_batches=bool(started and started.shares_batches),
            num_workers=max(len(workers), nodes.num_workers if nodes else 0, started.num_workers if started else 0),
            num_servers=num_servers,
            num_joined=len(so_far.joined),
            replica_size=plan.workers_per_replica if plan else 1,
            staleness_mean=last.staleness_mean if last and has_staleness else None,
            staleness_max=last.staleness_max if last and has_staleness else None,
            staleness_bound=last.staleness_bound if last else None,
            staleness_unit=last.staleness_unit if last else "",
            pushed_bytes=last.pushed_bytes if last else 0,
            pulled_bytes=last.pulled_bytes if last else 0,
            cpu_s=ended.cpu_s if ended else sum(nodes.cpu_s) if nodes else 0.0,
            workers=self._rows(workers, chosen),
            servers=self._servers(num_servers),
            all_staleness=nodes.all_staleness if nodes else (),
            blocks=list(nodes.blocks[:MAX_BLOCKS]) if nodes else [],
            waited_for=[wait for wait in nodes.waited_for if {wait[0], wait[1]} <= set(chosen)] if nodes else [],
            held_up=sorted(held_up(folded).items(), key=lambda held: -held[1])[:8],
            accounting=_bounded(accounting_of(folded)),
            sentences=[
                Sentence(sentence.level, sentence.text[:MAX_TEXT]) for sentence in sentences(folded, workers, state)
            ],
            error=so_far.error.error[:MAX_TEXT] if so_far.error else "",
            traceback=so_far.error.traceback[-MAX_TEXT:] if so_far.error else "",
            unreadable=self.file.unreadable,
            has_spans=any(True for _ in self.file.directory.glob(FILES)),
        )

    def _rows(self, workers: Mapping[int, WorkerFacts], chosen: list[int]) -> list[WorkerRow]:
        nodes, plan = self.folded.nodes, self.folded.so_far.plan
        size = plan.workers_per_replica if plan else 1
        positions = {rank: k for k, rank in enumerate(nodes.workers)} if nodes else {}
        return [_row(workers[rank], rank % size if size > 1 else None, nodes, positions.get(rank)) for rank in chosen]

    def _servers(self, number: int) -> list[ServerRow]:
        nodes = self.folded.nodes
        lost = {node: lost.why for node, lost in self.folded.so_far.lost.items()}
        updates = nodes.updates if nodes else ()
        return [
            ServerRow(
                rank=rank, lost=lost.get(f"server {rank}", ""), updates=updates[rank] if rank < len(updates) else None
            )
            for rank in range(min(number, MAX_SERVERS))
        ]

    def history(self, sent: Sent = NOTHING) -> tuple[PageHistory, Sent]:
        """Return the history that a page has not received yet, and what it has with it."""
        folded = self.folded
        chosen = chosen_ranks(folded, self._workers())
        columns, joins = readable(folded.strips.columns, len(chosen))
        version = (folded.curve.thinned, folded.strips.per_column, joins, *chosen)
        if version != sent.version:
            sent = Sent(version)
        from_point = max(0, sent.points - 1)  # the last one may have changed
        from_column = max(0, sent.columns - 1 - LATE_COLUMNS)
        points, log = folded.curve.points[from_point:], [line for line in folded.log if line.offset > sent.offset]
        shown = columns[from_column:]
        history = PageHistory(
            version=version,
            from_point=from_point,
            curve={name: [_short(point[k]) for point in points] for k, name in enumerate(Point._fields)},
            metric=folded.metric,
            from_column=from_column,
            column_s=[(_short(column.begin_s), _short(column.end_s)) for column in shown],
            strips=[strip_of(rank, columns, from_column) for rank in chosen],
            marks=list(folded.marks),
            log=log,
            bins=bin_names(),
        )
        last = log[-1].offset if log else sent.offset
        return history, Sent(version, len(folded.curve.points), len(columns), last)


def _row(facts: WorkerFacts, stage: int | None, nodes: NodesMeasured | None, k: int | None) -> WorkerRow:
    """Return the row of a worker, whose numbers are in this position of the columns."""
    known = nodes if k is not None else None
    at = k or 0
    return WorkerRow(
        rank=facts.rank,
        per_s=_short(facts.per_s),
        waiting=_short(facts.waiting),
        waited_s=_short(facts.waited_s),
        waits_now=known is not None and facts.rank in known.waiting and not facts.lost,
        slow=facts.slow,
        lost=facts.lost.why[:MAX_REASON] if facts.lost else "",
        absence=facts.lost.state if facts.lost else "",
        stage=stage,
        missed_mean=None if facts.missed_mean is None else _short(facts.missed_mean),
        missed_max=known.max_missed[at] if known and sum(known.staleness[at]) else None,
        staleness=known.staleness[at] if known else (),
        pushed_bytes=known.pushed_bytes[at] if known else None,
        pulled_bytes=known.pulled_bytes[at] if known else None,
        sent_bytes=known.sent_bytes[at] if known else None,
        cpu_s=known.cpu_s[at] if known else None,
    )


def strip_of(rank: int, columns: Sequence[Column], first: int = 0) -> WorkerStrip:
    """Return a worker's mean staleness, waiting and rate in each column from the first one on."""
    missed: list[float | None] = []
    per_s: list[float | None] = []
    for column in columns[first:]:
        shares, length_s = column.shares.get(rank), column.end_s - column.begin_s
        missed.append(_ratio(shares.missed, shares.gradients) if shares else None)
        per_s.append(_ratio(shares.samples, length_s) if shares else None)
    return WorkerStrip(rank, missed, _waiting(rank, columns)[first:], per_s)


def _waiting(rank: int, columns: Sequence[Column]) -> list[float | None]:
    """Return the share of each column that a worker waited.

    A heartbeat comes later than what it reports: seconds that do not fit into its column are of the columns before.
    """
    seconds: list[float] = []
    shares: list[float | None] = []
    for k, column in enumerate(columns):
        own, length_s = column.shares.get(rank), column.end_s - column.begin_s
        late_s = max(0.0, own.waited_s - length_s) if own else 0.0
        seconds.append(own.waited_s - late_s if own else 0.0)
        shares.append((_ratio(seconds[k], length_s) or 0.0) if own else None)
        for j in range(k - 1, max(-1, k - 1 - LATE_COLUMNS), -1):
            if late_s <= 0 or shares[j] is None:
                break
            length_s = columns[j].end_s - columns[j].begin_s
            fits_s = min(late_s, length_s - seconds[j])
            seconds[j], late_s = seconds[j] + fits_s, late_s - fits_s
            shares[j] = _ratio(seconds[j], length_s) or 0.0
    return shares


def chosen_ranks(folded: Folded, workers: Mapping[int, WorkerFacts]) -> list[int]:
    """Return all workers; of many, those that stand out and some others, whose choice changes little over time."""
    if len(workers) <= MAX_ROWS:
        return list(workers)
    measured = [rank for rank in (folded.nodes.workers if folded.nodes else ()) if rank in workers] or list(workers)
    facts = [workers[rank] for rank in measured]
    lost = [worker.rank for worker in workers.values() if worker.lost][-MAX_OF_A_KIND:]
    slow = [worker.rank for worker in facts if worker.slow and not worker.lost][:MAX_OF_A_KIND]
    held = sorted(held_up(folded).items(), key=lambda held: -held[1])[: MAX_OF_A_KIND // 2]
    standing_out = {*lost, *slow, *(rank for rank, _ in held if rank in workers)}
    room = MAX_ROWS - len(standing_out)
    even = measured[:: max(1, -(-len(measured) // room))]
    return sorted({*standing_out, *even})[:MAX_ROWS]


def _settings(settings: Mapping[str, object]) -> dict[str, str]:
    return {str(name)[:MAX_REASON]: str(value)[:MAX_REASON] for name, value in list(settings.items())[:MAX_SETTINGS]}


def _bounded(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accounting with texts of bounded length."""
    return {
        name: {str(reason)[:200]: number for reason, number in list(value.items())[:20]}
        if isinstance(value, Mapping)
        else value
        for name, value in counts.items()
    }


def _ratio(number: float, of: float) -> float | None:
    return _short(number / of, 3) if of else None


def _short(value: Any, digits: int = DIGITS) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
