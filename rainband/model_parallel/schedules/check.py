"""Check a schedule table and play it: its times, idle time, activations and versions in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rainband.model_parallel.schedules.play import ScheduleDeadlock, Send, play
from rainband.model_parallel.schedules.table import Action, Table
from rainband.model_parallel.schedules.version_rule import LiveVersions


@dataclass(frozen=True)
class Costs:
    """Seconds of each action, by stage; a stage without a time of its own has that of stage 0."""

    forward_s: tuple[float, ...] = (1.0,)
    backward_s: tuple[float, ...] = (2.0,)
    update_s: float = 0.0
    send_s: float = 0.0  # from one machine to another
    links_s: Mapping[tuple[int, int], float] = field(default_factory=dict)  # the same by (stage, stage), where known

    def sending_s(self, source: int, target: int) -> float:
        return self.links_s.get((source, target), self.send_s)

    def of(self, action: Action) -> float:
        if action.kind == "U":
            return self.update_s
        seconds = self.forward_s if action.kind == "F" else self.backward_s
        return seconds[action.stage] if action.stage < len(seconds) else seconds[0]


@dataclass(frozen=True)
class ActionSpan:
    """The time at which a machine performs an action."""

    machine: int
    action: Action
    from_s: float
    to_s: float


@dataclass(frozen=True)
class ScheduleFacts:
    """The result of a check; tuples have one number per machine."""

    spans: tuple[ActionSpan, ...]
    total_s: float
    bubble: float  # fraction of the machines' time in which they are idle
    peak_activations: tuple[int, ...]  # forwards (of a microbatch through a stage) kept at the same time
    peak_versions: tuple[int, ...]  # versions in memory at the same time, of one stage


def check(table: Table, costs: Costs | None = None) -> ScheduleFacts:
    """Return the table's times and memory; raise ValueError, naming actions, if it is incomplete or deadlocks."""
    _check_complete(table)
    _check_versions(table)
    spans = _play(table, costs or Costs())
    total = max(span.to_s for span in spans)
    busy = sum(span.to_s - span.from_s for span in spans)
    return ScheduleFacts(
        spans=tuple(spans),
        total_s=total,
        bubble=1 - busy / (total * len(table.rows)) if total else 0.0,
        peak_activations=tuple(_peak_activations(row) for row in table.rows),
        peak_versions=tuple(_peak_versions(table, machine) for machine in range(len(table.rows))),
    )


def _check_complete(table: Table) -> None:
    counts = Counter((machine, *action[:3]) for machine, row in enumerate(table.rows) for action in row)
    wanted = set()
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            wanted |= {(table.machine_of(stage, microbatch), stage, kind, microbatch) for kind in ("F", "B")}
        for update in range(table.num_updates(stage)):
            wanted |= {(machine, stage, "U", update) for machine in table.machines[stage]}
    wrong = [
        *(f"machine {m} lacks {s}{k}{n}" for m, s, k, n in sorted(wanted - counts.keys())),
        *(f"machine {m} should not do {s}{k}{n}" for m, s, k, n in sorted(counts.keys() - wanted)),
        *(f"machine {m} does {s}{k}{n} {count} times" for (m, s, k, n), count in sorted(counts.items()) if count > 1),
    ]
    if wrong:
        raise ValueError(f"the schedule {table.name} is incomplete: {'; '.join(wrong[:5])}.")


def needs(table: Table, machine: int, action: Action) -> list[tuple[int, Action]]:
    """Return what an action waits for: (machine, action), of whose actions stage, kind and microbatch count."""
    stage, kind, microbatch, _ = action
    if kind == "F":
        return [(table.machine_of(stage - 1, microbatch), Action(stage - 1, "F", microbatch, 0))] if stage else []
    if kind == "B":
        own, after = (machine, Action(stage, "F", microbatch, 0)), stage + 1
        if after == table.num_stages:
            return [own]
        return [own, (table.machine_of(after, microbatch), Action(after, "B", microbatch, 0))]
    return [(table.machine_of(stage, m), Action(stage, "B", m, 0)) for m in table.microbatches_of(stage, microbatch)]


def _play(table: Table, costs: Costs) -> list[ActionSpan]:
    rows = [[(machine, *action[:3]) for action in row] for machine, row in enumerate(table.rows)]
    actions = {(machine, *action[:3]): action for machine, row in enumerate(table.rows) for action in row}
    sends = [
        Send(((other, *needed[:3]),), (task,), 0.0, costs.sending_s(needed.stage, action.stage))
        for task, action in actions.items()
        for other, needed in needs(table, task[0], action)
    ]
    try:
        times = play(rows, {task: costs.of(action) for task, action in actions.items()}, sends)
    except ScheduleDeadlock as stuck:
        waiting = ", ".join(f"machine {machine} at {actions[task]}" for machine, task in stuck.waiting.items())
        raise ValueError(f"the schedule {table.name} deadlocks: {waiting} wait for each other.") from None
    return [ActionSpan(task[0], action, times.start_s[task], times.end_s[task]) for task, action in actions.items()]


def _check_versions(table: Table) -> None:
    for machine, row in enumerate(table.rows):
        version: dict[tuple[int, int], int] = {}
        for action in row:
            _check_version(table, machine, action, version)


def _check_version(table: Table, machine: int, action: Action, version: dict[tuple[int, int], int]) -> None:
    """Raise ValueError if versions are not made in order, or are used before they are made."""
    key = (machine, action.stage)
    newest = version.get(key, 0)
    if action.kind == "U":
        if action.version != newest + 1 or action.microbatch != newest:
            raise ValueError(f"in {table.name}, {action} makes version {action.version} after version {newest}.")
        version[key] = action.version
    elif action.version > newest:
        raise ValueError(f"in {table.name}, {action} uses version {action.version}, but the newest is {newest}.")
    elif not table.stash and action.version != newest:
        raise ValueError(f"in {table.name}, {action} uses version {action.version}, which was overwritten by {newest}.")


def _peak_activations(row: tuple[Action, ...]) -> int:
    kept = peak = 0
    for action in row:
        kept += {"F": 1, "B": -1, "U": 0}[action.kind]
        peak = max(peak, kept)
    return peak


def _peak_versions(table: Table, machine: int) -> int:
    """Return the most memories of parameters that one stage of a machine needs at the same time."""
    live: dict[int, LiveVersions] = {}
    for number, action in enumerate(table.rows[machine]):
        versions = live.setdefault(action.stage, LiveVersions())
        later = table.later_versions(machine, number)
        if action.kind == "F" and table.stash:
            versions.hold(action.version)
        elif action.kind == "B" and table.stash:
            versions.drop(action.version)
        elif action.kind == "U":
            versions.update(later, table.stash)
        versions.release(later)
    return max((versions.peak for versions in live.values()), default=1)
