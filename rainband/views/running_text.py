"""Text of the runs that run now, and of what the processes of one do: which waits for which, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rainband.protocol.events import NodesMeasured
from rainband.runtimes.running.processes import NodeProcess, RunningRun
from rainband.views.dashboard.findings import Level, Sentence, WorkerFacts, held_up, sentences, workers_of
from rainband.views.dashboard.fold import Folded
from rainband.views.event_text import headline, links, progress_line, waiting_for
from rainband.views.formatting import count, cut, duration, percent, short, size, table
from rainband.views.history import PastRun, RunSoFar

UNKNOWN = "-"
Processes = Mapping[str, NodeProcess]


def as_record(run: RunningRun, past: PastRun, processes: Processes) -> dict[str, Any]:
    """Return a running run as a record for programs."""
    so_far = past.so_far
    return {
        "name": run.name,
        "directory": str(run.directory),
        "pid": run.pid,
        "phase": so_far.phase,
        "samples_done": so_far.samples_done,
        "samples": so_far.samples,
        "samples_per_s": so_far.per_s,
        "loss": so_far.loss,
        "left_s": so_far.left_s,
        "processes": {node: process.pid for node, process in processes.items()},
    }


def listed(runs: Sequence[tuple[RunningRun, PastRun, Processes]], width: int = 0) -> list[str]:
    """Return a table of running runs."""
    rows = [("run", "pid", "processes", "state", "done", "left", "directory")]
    for run, past, processes in runs:
        so_far = past.so_far
        done = percent(so_far.samples_done / so_far.samples) if so_far.samples else count(so_far.done, so_far.unit)
        left = UNKNOWN if so_far.left_s is None or so_far.phase != "running" else duration(so_far.left_s)
        rows.append(
            (run.name, str(run.pid), _counted(processes), _state(so_far), done, left, str(run.directory.parent))
        )
    lines = table(rows)
    if not width or max(map(len, lines)) <= width:
        return lines
    return table([(row[0], row[1], row[3], row[4]) for row in rows], width=width)


def _counted(processes: Processes) -> str:
    """Return how many workers and servers have a process here, such as 4 + 2."""
    roles = [node.split()[0] for node in processes]
    return f"{roles.count('worker')} + {roles.count('server')}"


def _state(so_far: RunSoFar) -> str:
    if so_far.stopping:
        return "stopping"
    return so_far.phase + (f", {count(len(so_far.lost), 'node')} lost" if so_far.lost else "")


# ---- one run --------------------------------------------------------------------------------------------------------


def top(folded: Folded, state: str, name: str, processes: Processes, height: int = 0) -> list[str]:
    """Return what each process of a run does; of too many workers, with `height`, those that stand out."""
    so_far, workers = folded.so_far, workers_of(folded, is_over=state not in ("starting", "running"))
    lines = [f"{name}: {headline(so_far)}", f"{state}: {progress_line(so_far).strip() or waiting_for(so_far)}"]
    if so_far.started is None:
        return lines
    remarks = [f"{remark.level}: {remark.text}" for remark in _remarks(folded, workers, processes, state)]
    servers = _columns(_server_rows(folded, processes, state))
    rows = list(_worker_rows(folded, workers, processes, state))
    if height:
        rows = _fewer(rows, workers, height - len(lines) - len(remarks) - len(servers) - 5)
    tables = [_columns(rows), servers]
    return [*lines, *([""] if remarks else []), *remarks, *(line for one in tables if one for line in ("", *one))]


def records(folded: Folded, state: str, name: str, processes: Processes) -> dict[str, Any]:
    """Return the same for programs."""
    workers = workers_of(folded, is_over=state not in ("starting", "running"))
    return {
        "name": name,
        "state": state,
        "remarks": [
            {"level": str(remark.level), "text": remark.text} for remark in _remarks(folded, workers, processes, state)
        ],
        "workers": list(_worker_rows(folded, workers, processes, state)),
        "servers": list(_server_rows(folded, processes, state)),
    }


def _remarks(folded: Folded, workers: Mapping[int, WorkerFacts], processes: Processes, state: str) -> list[Sentence]:
    """Return what stands out: what events say, and which processes are stopped now."""
    stopped = [node for node, process in processes.items() if process.is_stopped]
    found = sentences(folded, workers, state)
    if not stopped:
        return found
    halted = Sentence(Level.BAD, f"Stopped by a signal: {', '.join(stopped)}.")
    return [halted, *(remark for remark in found if remark.level is not Level.GOOD)]


def _columns(rows: Sequence[Mapping[str, str]] | Iterator[Mapping[str, str]]) -> list[str]:
    """Return a table of the columns of which something is known."""
    rows = list(rows)
    names = [name for name in (rows[0] if rows else ()) if any(row.get(name, UNKNOWN) != UNKNOWN for row in rows)]
    return table([names, *([row.get(name, UNKNOWN) for name in names] for row in rows)]) if rows else []


def _fewer(rows: list[dict[str, str]], workers: Mapping[int, WorkerFacts], room: int) -> list[dict[str, str]]:
    """Return at most `room` rows: lost and slow workers first, then those that wait."""
    room = max(1, room)
    if len(rows) <= room:
        return rows

    def calm(row: dict[str, str]) -> tuple[bool, bool, float]:
        facts = workers[int(row["worker"])]
        return not facts.lost, not facts.slow, -facts.waiting

    kept = sorted(rows, key=calm)[: room - 1]
    more = {"worker": "...", "does": f"and {count(len(rows) - len(kept), 'other worker')}"}
    return [*(row for row in rows if row in kept), more]


def _worker_rows(
    folded: Folded, workers: Mapping[int, WorkerFacts], processes: Processes, state: str
) -> Iterator[dict[str, str]]:
    so_far, nodes = folded.so_far, folded.nodes
    positions = {rank: k for k, rank in enumerate(nodes.workers)} if nodes else {}
    in_all = sum(nodes.samples) if nodes else 0
    for rank, facts in workers.items():
        k, process, linked = positions.get(rank), processes.get(f"worker {rank}"), so_far.linked.get(rank)
        measured = nodes if k is not None else None
        at = k or 0
        memory = process.memory_bytes if process else _at(measured.memory_bytes, at) if measured else 0
        sent = measured.pushed_bytes[at] + measured.sent_bytes[at] if measured else 0
        known_samples = measured is not None and in_all > 0
        yield {
            "worker": str(rank),
            "work": percent(measured.samples[at] / in_all) if measured and known_samples else UNKNOWN,
            f"{so_far.unit}s/s": short(facts.per_s) if facts.per_s else UNKNOWN,
            "waits": percent(facts.waiting),
            "in all": duration(facts.waited_s),
            "staleness": _staleness(facts, measured, at),
            "processor": duration(measured.cpu_s[at]) if measured and measured.cpu_s[at] else UNKNOWN,
            "memory": size(memory) if memory else UNKNOWN,
            "link": links(linked.links) or UNKNOWN if linked else UNKNOWN,
            "sent": size(sent) if sent else UNKNOWN,
            "received": size(measured.pulled_bytes[at]) if measured and measured.pulled_bytes[at] else UNKNOWN,
            "pid": str(process.pid) if process else UNKNOWN,
            "does": _does(folded, facts, process, state),
        }


def _staleness(facts: WorkerFacts, nodes: NodesMeasured | None, k: int) -> str:
    if facts.missed_mean is None or nodes is None:
        return UNKNOWN
    return f"{facts.missed_mean:.1f}, max {nodes.max_missed[k]}"


def _at(column: Sequence[int], k: int) -> int:
    return column[k] if k < len(column) else 0


def _server_rows(folded: Folded, processes: Processes, state: str) -> Iterator[dict[str, str]]:
    so_far, nodes = folded.so_far, folded.nodes
    has_copies = so_far.started is not None and so_far.started.copies > 1
    for rank in range(so_far.started.num_servers if so_far.started else 0):
        node = f"server {rank}"
        process, lost = processes.get(node), so_far.lost.get(node)
        updates = _at(nodes.updates, rank) if nodes else 0
        cpu_s = nodes.server_cpu_s[rank] if nodes and rank < len(nodes.server_cpu_s) else 0.0
        memory = process.memory_bytes if process else _at(nodes.server_memory_bytes, rank) if nodes else 0
        yield {
            "server": str(rank),
            "updates": f"{updates:,}" if updates else UNKNOWN,
            "copy": UNKNOWN if not has_copies else "complete" if rank in so_far.copied else "none",
            "processor": duration(cpu_s) if cpu_s else UNKNOWN,
            "memory": size(memory) if memory else UNKNOWN,
            "pid": str(process.pid) if process else UNKNOWN,
            "does": STOPPED
            if process and process.is_stopped
            else f"{lost.state}: {lost.why}"
            if lost
            else "serves"
            if state == "running"
            else UNKNOWN,
        }


STOPPED = "is stopped by a signal: kill -CONT continues it"


def _does(folded: Folded, facts: WorkerFacts, process: NodeProcess | None, state: str) -> str:
    """Return what a worker does now: it computes, or for which process it waits, and why."""
    so_far, nodes = folded.so_far, folded.nodes
    if process is not None and process.is_stopped:
        return STOPPED
    if facts.lost is not None:
        return f"{facts.lost.state}: {facts.lost.why}"
    if state != "running":
        return _waited_for(nodes, facts.rank)
    if nodes is not None and facts.rank in nodes.waiting:
        holder = so_far.last.waiting_for.get(facts.rank) if so_far.last else None
        return f"waits for {_holder(so_far, holder)}: {why_it_waits(so_far)}"
    slow = "computes slowly" if facts.slow else "computes"
    holds_s = held_up(folded).get(facts.rank, 0.0)
    return slow + (f"; others have waited {duration(holds_s)} for it" if holds_s >= 1.0 else "")


def _holder(so_far: RunSoFar, holder: int | None) -> str:
    """Return which process is waited for."""
    if holder is not None:
        return f"worker {holder}"
    silent = [node for node in so_far.lost if node.startswith("server ")]
    if silent:
        return f"{silent[0]} ({so_far.lost[silent[0]].why})"
    return "servers" if so_far.started and so_far.started.num_servers and not _in_step(so_far) else "other workers"


def _in_step(so_far: RunSoFar) -> bool:
    """Return True if workers wait for each other, not only for servers."""
    last = so_far.last
    replicas = so_far.plan is not None and so_far.plan.workers_per_replica > 1
    return replicas or (last is not None and (last.staleness_bound is not None or last.disagreement is not None))


def why_it_waits(so_far: RunSoFar) -> str:
    """Return why workers of this run wait."""
    last, started, plan = so_far.last, so_far.started, so_far.plan
    if so_far.phase != "running":
        return f"the run is {so_far.phase}"
    if plan is not None and plan.workers_per_replica > 1:
        return "its stage needs their tensors"
    if started is not None and started.shares_batches:
        return "each batch needs the parts of all"
    if last is not None and last.disagreement is not None:
        return "a mean needs the models of all"
    if last is not None and last.staleness_bound is not None:
        unit = f" {last.staleness_unit}".rstrip()
        return f"it is ahead by the bound of {last.staleness_bound:g}{unit}"
    return "for parameters, or for batches to compute"


def _waited_for(nodes: NodesMeasured | None, rank: int) -> str:
    """Return for which worker one has waited longest."""
    waits = [(seconds, holder) for worker, holder, seconds in (nodes.waited_for if nodes else ()) if worker == rank]
    if not waits:
        return UNKNOWN
    seconds, holder = max(waits)
    return cut(f"waited longest for worker {holder}: {duration(seconds)}", 60)
