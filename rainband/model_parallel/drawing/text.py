"""Placements and schedules as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rainband.model_parallel.placement.placement import Placement, memory
from rainband.model_parallel.placement.predict import crossings
from rainband.model_parallel.placement.profile import Profile, Resources
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.model_parallel.schedules.check import ActionSpan, ScheduleFacts
from rainband.model_parallel.schedules.forecast import Played
from rainband.model_parallel.schedules.table import Table

Memory = tuple[int, int, int]  # bytes of a worker's parameters, and of all it needs: predicted, measured
MOST_UNITS = 40  # in the list
MOST_VALUES = 12  # the largest crossing values, in the list


def profile_lines(profile: Profile) -> list[str]:
    """Return a row for each unit, as measured; of many units, those that take longest."""
    rows = [("unit", "what", "forward ms", "backward ms", "parameters kB", "activations kB")]
    longest = sorted(profile.units, key=lambda unit: -unit.seconds)[:MOST_UNITS]
    for unit in [unit for unit in profile.units if unit in longest]:
        times = (f"{unit.forward_s * 1e3:.3f}", f"{unit.backward_s * 1e3:.3f}")
        rows.append((unit.name, unit.what, *times, _kilobytes(unit.parameter_bytes), _kilobytes(unit.activation_bytes)))
    rest_s = sum(unit.seconds for unit in profile.units) - sum(unit.seconds for unit in longest)
    rest = len(profile.units) - len(longest)
    return _columns(rows) + ([f"and {rest} units that take {rest_s * 1e3:.3f} ms together"] if rest else [])


def plan_lines(plan: Placement, profile: Profile, resources: Resources, played: bool = False) -> list[str]:
    """Return the placement as text: stages, crossing values, prediction.

    A schedule that was `played` is predicted by itself: the planner knows nothing of its idle times.
    """
    rows = [("stage", "machines", "units", "ms", "parameters kB", "memory kB", "from", "to")]
    needed = memory(plan, profile, resources)
    for number, stage in enumerate(plan.stages):
        units = sorted(stage.units, key=profile.position.__getitem__)
        figures = (f"{profile.seconds(units) * 1e3:.3f}", _kilobytes(profile.parameter_bytes(units)))
        machines = ",".join(map(str, stage.machines))
        rows.append((str(number), machines, str(len(units)), *figures, _kilobytes(needed[number]), units[0], units[-1]))
    lines = [f"{plan.kind} of {plan.model or 'the model'} on {plan.num_machines} machines, by {plan.partitioner}", ""]
    return lines + _columns(rows) + _crossing_lines(plan, profile) + _predicted_lines(plan, played)


def _crossing_lines(plan: Placement, profile: Profile) -> list[str]:
    crossing = sorted(crossings(plan, profile), key=lambda found: -found[2])
    if not crossing:
        return ["", "nothing crosses machines"]
    stage = plan.stage_of()
    rows = [("value", "from stage", "to stage", "kB, both ways")]
    rows += [(v.name, str(stage[v.maker]), str(to), _kilobytes(count)) for v, to, count in crossing[:MOST_VALUES]]
    total = sum(count for _, _, count in crossing)
    rest = len(crossing) - MOST_VALUES
    more = [f"and {rest} smaller ones"] if rest > 0 else []
    return ["", *_columns(rows), *more, f"{len(crossing)} values cross, {_kilobytes(total)} kB for each batch"]


def _predicted_lines(plan: Placement, played: bool) -> list[str]:
    if plan.predicted is None:
        return []
    faster = plan.predicted.alone_s / plan.predicted.batch_s if plan.predicted.batch_s else 1.0
    batch_ms, alone_ms = plan.predicted.batch_s * 1e3, plan.predicted.alone_s * 1e3
    lines = ["", f"predicted: a batch every {batch_ms:.3f} ms, alone {alone_ms:.3f} ms: {faster:.2f} times as fast"]
    lines = [] if played else lines
    if len(plan.stages) == 1 and (machines := len(plan.stages[0].machines)) > 1:
        lines.append(
            f"One stage on all {machines} machines is data parallelism: rainband train {plan.model} sync --workers "
            f"{machines} needs no placement. Choose --partitioner one_machine_per_stage to split the model."
        )
    return lines


def memory_lines(plan: StagePlan, memory: Sequence[Memory]) -> list[str]:
    """Return a row for each worker of a replica: its memory for a batch, predicted and measured."""
    if not memory:
        return []
    rows: list[tuple[str, ...]] = [("worker", "stage", "parameters kB", "predicted kB", "measured kB")]
    for rank, (parameters, predicted, measured) in enumerate(memory):
        stage = "several" if plan.stages_per_worker > 1 else str(plan.stage(plan.machine_and_replica(rank)[0]))
        rows.append((str(rank), stage, *map(_kilobytes, (parameters, predicted, measured))))
    how = f"{plan.microbatches} microbatches" + (f", {plan.schedule}" if plan.plan.kind == "pipeline" else "")
    how += ", recomputed" if plan.recompute else ""
    return [f"memory of each worker for a batch ({how}), with gradients, without the optimizer:", "", *_columns(rows)]


def schedule_lines(table: Table, facts: ScheduleFacts, width: int = 100) -> list[str]:
    """Return a timeline with a line for each machine, and the schedule's memory."""
    lines = timeline(facts.spans, len(table.rows), facts.total_s, width)
    kept = ", ".join(map(str, facts.peak_activations))
    versions = ", ".join(map(str, facts.peak_versions))
    return [
        f"{table.name}: {table.num_stages} stages, {table.num_microbatches} microbatches",
        "",
        *lines,
        "",
        f"idle {facts.bubble:.1%} of the time; each machine keeps activations of {kept} microbatches",
        f"and {versions} versions of its parameters",
    ]


def rate_lines(play: Played, profile: Profile) -> list[str]:
    """Return the predicted rate of a schedule, and the age of its gradients."""
    ms, rate, faster = _figures(play, profile)
    late = f"gradients are up to {play.late} update{'s' * (play.late > 1)} late" if play.late else "no gradient is late"
    return [late, f"predicted: a batch every {ms} ms, {rate} samples/s, {faster} times as fast as alone"]


def compared_lines(compared: Mapping[str, Played | ValueError], profile: Profile) -> list[str]:
    """Return a row for each schedule with its placement, or the reason why there is none."""
    rows = [("schedule", "machines", "ms a batch", "samples/s", "times alone", "kept", "versions", "late")]
    reasons = []
    for name, play in compared.items():
        if isinstance(play, ValueError):
            reasons.append(f"no {name}: {play}")
            continue
        facts = play.facts
        shape = "-".join(map(str, play.plan.replicas()))
        needs = (str(max(facts.peak_activations)), str(max(facts.peak_versions)), str(play.late))
        rows.append((name, shape, *_figures(play, profile), *needs))
    explained = [
        "machines: of each stage; kept: microbatches whose activations a machine keeps, at most; late: updates between",
        "the parameters a gradient was computed at and those it is applied to, at most.",
        "In pipedream every microbatch is a batch of its own; the others have a batch of several.",
    ]
    return [*_columns(rows), "", *explained, *reasons]


def _figures(play: Played, profile: Profile) -> tuple[str, str, str]:
    alone_s = profile.seconds(profile.names)
    rate, faster = (profile.batch_size / play.batch_s, alone_s / play.batch_s) if play.batch_s else (0.0, 1.0)
    return f"{play.batch_s * 1e3:.3f}", f"{rate:,.0f}", f"{faster:.2f}"


def timeline(spans: Sequence[ActionSpan], machines: int, total_s: float, width: int) -> list[str]:
    """Return forwards as digits (the last of the microbatch's number), backwards as letters (a is 0), idle as dots."""
    lines = []
    for machine in range(machines):
        line = ["."] * width
        for span in spans:
            if span.machine == machine and span.action.kind != "U":
                first = round(span.from_s / total_s * width)
                last = max(first + 1, round(span.to_s / total_s * width))
                digit = span.action.microbatch % 10
                line[first:last] = (str(digit) if span.action.kind == "F" else "abcdefghij"[digit]) * (last - first)
        lines.append(f"machine {machine:<3} {''.join(line)[:width]}")
    return lines


def _kilobytes(count: int) -> str:
    return f"{count / 1000:,.1f}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[position]) for row in rows) for position in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
