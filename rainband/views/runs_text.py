"""Text of past runs: a list of them, one in full, the settings and results of two."""

from __future__ import annotations

import datetime
import shlex
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from rainband.protocol import events
from rainband.views import predicted_stages as predicted
from rainband.views.charts import curve, histogram, ink_for
from rainband.views.event_text import links, num_nodes, plan_made, progress_line, user_error
from rainband.views.formatting import assignment, count, duration, percent, short, size, table, whole
from rainband.views.history import PastRun, RunSoFar, loss_curve
from rainband.views.summary import results, summary

if TYPE_CHECKING:
    from rainband.runtimes.config import RunConfig

CHART_WIDTH = 72
MEASURES = {  # as people read them -> in the record
    "seconds": "seconds",
    "training seconds": "training_s",
    "samples": "samples",
    "samples/s": "samples_per_s",
}
TASK_DEFAULTS = ("batch_size", "epochs")  # settings that each task has a default for


def to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def as_record(run: PastRun) -> dict[str, Any]:
    """Return the run as a record for programs."""
    so_far = run.so_far
    ended = so_far.ended
    return {
        "name": run.name,
        "directory": str(run.directory),
        "state": run.state,
        "reason": ended.reason if ended else "",
        "started_at": so_far.started.started_at if so_far.started else "",
        "config": run.config,
        "samples": so_far.samples_done,
        "seconds": ended.seconds if ended else so_far.at_s,
        "training_s": so_far.training.seconds if ended else None,
        "runtime": "sim" if so_far.is_virtual else "processes",
        "samples_per_s": _rate(run),
        "metrics": ended.metrics if ended else {},
        "loss": so_far.loss,
        "accounting": ended.accounting if ended else {},
        "staleness": ended.staleness if ended else {},
        "pipeline": predicted.as_facts(so_far),
        "model": str(run.model) if run.model else None,
        "unreadable": run.unreadable,
    }


def _rate(run: PastRun) -> float:
    """Return samples per second of training time, or of the whole time where the former is unknown."""
    so_far, ended = run.so_far, run.so_far.ended
    seconds = so_far.training.seconds or (ended.seconds if ended else so_far.at_s - (so_far.training.began_s or 0.0))
    return so_far.samples_done / seconds if seconds else 0.0


def listed(runs: list[PastRun], width: int = 0) -> list[str]:
    """Return a table of runs, with fewer columns if it would be wider than the terminal."""
    rows = [("run", "state", "nodes", "samples", "time", "result"), *map(_row, runs)]
    lines = table(rows)
    if not width or max(map(len, lines)) <= width:
        return lines
    return table([(row[0], row[1], row[-1]) for row in rows], width=width)


def _row(run: PastRun) -> tuple[str, ...]:
    so_far = run.so_far
    started = so_far.started
    return (
        run.name,
        run.state,
        f"{started.num_workers} + {started.num_servers}" if started else "",
        whole(so_far.done) if so_far.unit == "sample" else count(so_far.done, so_far.unit),
        duration(so_far.at_s) + (" (simulated)" if so_far.is_virtual else ""),
        _result(run),
    )


def _result(run: PastRun) -> str:
    ended = run.so_far.ended
    if ended and ended.metrics:
        return results(ended.metrics)
    return "" if run.so_far.loss is None else f"training loss {short(run.so_far.loss)}"


def shown(run: PastRun) -> list[str]:
    """Return the run in full: settings, summary, staleness histogram, loss curve."""
    so_far = run.so_far
    width = max(40, min(CHART_WIDTH, shutil.get_terminal_size().columns - 2))
    ink = ink_for(typer.get_text_stream("stdout").encoding)
    lines = [f"{run.name}: {run.state}", *table(_about(run), indent="  ", width=width), ""]
    if so_far.error:
        lines += [*user_error(so_far.error), ""]
    lines += summary(so_far, run.directory) if so_far.ended else _without_end(run)
    if staleness := _histogram_of(run):
        lines += ["", "staleness histogram (updates missed: number of gradients)"]
        lines += [f"  {line}" for line in histogram(staleness, width, ink)]
    if plotted := curve(loss_curve(so_far.progress), width, ink=ink):
        lines += ["", "training loss over the samples done", *(f"  {line}" for line in plotted)]
    if plotted and so_far.is_virtual:
        timed = curve(loss_curve(so_far.progress, over_time=True), width, ink=ink)
        lines += ["", "training loss over simulated seconds", *(f"  {line}" for line in timed)]
    return lines


def _about(run: PastRun) -> list[tuple[str, str]]:
    so_far, rows = run.so_far, []
    if started := so_far.started:
        settings = " ".join(assignment(name, value) for name, value in started.settings.items())
        rows.append(("task", f"{started.task} with {started.strategy} {settings}".rstrip()))
        rows.append(("nodes", num_nodes(started.num_workers, started.num_servers)))
        if so_far.is_virtual:
            rows.append(("time", "simulated: all seconds are virtual (--runtime sim)"))
        if started.started_at:
            rows.append(("started", _local_time(started.started_at)))
    if so_far.linked:
        rows += _machines(so_far)
    if so_far.plan:
        rows.append(("plan", plan_made(so_far.plan)))
        if so_far.plan.workers_per_replica > 1 and so_far.started and so_far.started.num_servers:
            workers, servers = so_far.plan.workers_per_replica, so_far.started.num_servers
            pairs = f"{count(so_far.plan.server_pairs, 'pair')} of a worker and a server that holds its parameters"
            held = f"servers hold the same bytes within {percent(so_far.plan.server_imbalance)}"
            rows.append(("shards", f"in each replica {pairs}, of {workers * servers} possible; {held}"))
    if run.unreadable:
        rows.append(("note", f"{run.unreadable} lines of events.jsonl could not be read"))
    if run.config:
        rows.append(("repeat", _command_to_repeat(run)))
    return rows


def _machines(so_far: RunSoFar) -> list[tuple[str, str]]:
    """Return each machine with its workers, and how they reach the servers, or each other."""
    to = "the other workers" if so_far.started is not None and so_far.started.shares_batches else "the servers"
    groups: dict[tuple[str, str], list[int]] = {}
    for worker, linked in sorted(so_far.linked.items()):
        groups.setdefault((linked.machine, links(linked.links)), []).append(worker)
    lines = [
        f"{machine}: {'worker' if len(workers) == 1 else 'workers'} {', '.join(map(str, workers))}"
        + (f" ({transport} to {to})" if transport else "")
        for (machine, transport), workers in groups.items()
    ]
    rows = [("machines" if number == 0 else "", line) for number, line in enumerate(lines)]
    return rows + _worker_links(so_far)


def _worker_links(so_far: RunSoFar) -> list[tuple[str, str]]:
    """Return how the workers of replicas reach each other, and what passed through the run's machine."""
    pairs: dict[str, list[str]] = {}
    for worker, linked in sorted(so_far.linked.items()):
        for other, transport in linked.peers:
            through = so_far.tunneled.get((worker, other))
            passed = f" ({size(through)})" if through else ""
            pairs.setdefault(transport, []).append(f"{other}-{worker}{passed}")
    names = {"tunnel": "through the run's machine"}
    lines = [f"workers {', '.join(of_one)}: {names.get(transport, transport)}" for transport, of_one in pairs.items()]
    return [("links" if number == 0 else "", line) for number, line in enumerate(lines)]


def _command_to_repeat(run: PastRun) -> str:
    if run.config.get("script"):
        return command_of(run.config)
    return f"rainband train --config {run.directory / 'config.json'}"


def _without_end(run: PastRun) -> list[str]:
    if run.state == "running":
        return ["still running:", f"  {progress_line(run.so_far).strip()}"]
    last = progress_line(run.so_far).strip() if run.so_far.last else "no batch was done"
    lines = [
        "The run was killed, or its machine stopped: it has no summary and no model. Its last progress:",
        f"  {last}",
    ]
    if written := [event for event in run.events if isinstance(event, events.CheckpointWritten)]:
        lines.append(f"To continue from its checkpoint of step {written[-1].step:,}: rainband resume {run.directory}")
    return lines


def _histogram_of(run: PastRun) -> dict[int, int]:
    ended = run.so_far.ended
    counts: Any = ended.staleness.get("histogram", {}) if ended else {}
    return {int(value): number for value, number in counts.items()}


def _local_time(text: str) -> str:
    return datetime.datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def compared(a: PastRun, b: PastRun) -> list[str]:
    """Return the results of both runs and the settings that differ."""
    settings = _differing(a.config, b.config)
    rows = [("", "first", "second", "second / first"), *_outcome_rows(a, b)]
    lines = [*table([("first", a.name), ("second", b.name)]), "", *table(rows), ""]
    if not settings:
        return [*lines, "All settings are equal."]
    return [*lines, "Settings that differ:", *table([("", "first", "second"), *settings], indent="  ")]


def settings_that_differ(a: RunConfig, b: RunConfig) -> list[tuple[str, str, str]]:
    """Return the names and both values of settings, but for the directory."""
    return _differing(*(msgspec.json.decode(msgspec.json.encode(one)) for one in (a, b)))


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    flat_a, flat_b = _flat(a), _flat(b)
    names = [name for name in {**flat_a, **flat_b} if name != "directory"]
    rows = [(name, _text(name, flat_a.get(name, "-")), _text(name, flat_b.get(name, "-"))) for name in names]
    return [row for row in rows if row[1] != row[2]]


def _text(name: str, value: object) -> str:
    if value is None and name in TASK_DEFAULTS:
        return "the task's default"
    return assignment(name, value).partition("=")[2]


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return all settings by name: those of the strategy as they are, the others as task.name and sim.name."""
    plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
    of_task = {f"task.{name}": value for name, value in config.get("task_settings", {}).items()}
    of_sim = {f"sim.{name}": value for name, value in config.get("sim", {}).items()}
    return {
        **plain,
        **config.get("strategy_settings", {}),
        **of_task,
        **(of_sim if config.get("runtime") == "sim" else {}),
    }


def _outcome_rows(a: PastRun, b: PastRun) -> list[tuple[str, str, str, str]]:
    both = [as_record(a), as_record(b)]
    rows = [("state", a.state, b.state, "")]
    rows += [_ratio(label, *(fact[name] for fact in both)) for label, name in MEASURES.items()]
    names = [*both[0]["metrics"], *(n for n in both[1]["metrics"] if n not in both[0]["metrics"])]
    rows += [_ratio(name, *(fact["metrics"].get(name) for fact in both)) for name in names]
    rows.append(_ratio("training loss", both[0]["loss"], both[1]["loss"]))
    for name in ("mean", "max"):
        rows.append(_ratio(f"staleness, {name}", *(fact["staleness"].get(name) for fact in both)))
    samples = [fact["accounting"].get("samples") or {} for fact in both]
    for name in ("applied", "carried_over", "not_seen") if any(samples) else ():
        rows.append(_ratio(f"samples {name}".replace("_", " "), *(one.get(name) for one in samples)))
    for name in ("applied", "not_processed", "reassigned", "lost", "applied_twice"):
        rows.append(_ratio(f"batches {name}".replace("_", " "), *(fact["accounting"].get(name) for fact in both)))
    return [row for row in rows if row[1] != "-" or row[2] != "-"]


def _ratio(name: str, a: float | None, b: float | None) -> tuple[str, str, str, str]:
    ratio = f"{b / a:.2f}" if a and b is not None else ""
    return name, "-" if a is None else short(a), "-" if b is None else short(b), ratio


def command_of(config: Mapping[str, Any]) -> str:
    """Return the command that runs a script with the settings of its config.json."""
    options = {"workers": "num_workers", "servers": "num_servers", "strategy": "strategy", "seed": "seed"}
    if not config.get("num_servers"):
        del options["servers"]
    words = [f"--{option} {config[field]}" for option, field in options.items() if config.get(field) is not None]
    words += [f"--optimizer {name}" for name in config.get("optimizers", ())]
    words += [assignment(name, value) for name, value in config.get("strategy_settings", {}).items()]
    return " ".join(["rainband run", *words, shlex.join([config["script"], *config.get("arguments", ())])])
