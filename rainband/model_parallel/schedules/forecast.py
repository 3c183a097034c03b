"""Predict a run in stages from a profile: what each worker computes and sends, and when.

Reading data, the loss, updates and servers are left out, because a profile does not measure them. The exchange of
gradients between stage replicas is included, because it decides where a placement has replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import msgspec

from rainband.model_parallel.placement.partitioners import Partitioner, make_plan
from rainband.model_parallel.placement.pipedream_planner import interleaved, one_machine_per_stage, pipedream
from rainband.model_parallel.placement.placement import Placement, is_interleaved
from rainband.model_parallel.placement.predict import PartitionClock, Step, ring_bytes
from rainband.model_parallel.placement.profile import LinkSpeed, Profile, Resources
from rainband.model_parallel.schedules import builders as schedules
from rainband.model_parallel.schedules.builders import SCHEDULES
from rainband.model_parallel.schedules.check import Costs, ScheduleFacts, check
from rainband.model_parallel.schedules.play import Times
from rainband.model_parallel.schedules.table import Table, need

FLUSHES = ("gpipe", "one_f_one_b", "interleaved")  # the result is that of one process on the whole batch
# Other schedules: one_machine_per_stage.
PLAN_WITH: dict[str, Partitioner] = {"pipedream": pipedream, "interleaved": interleaved}


@dataclass(frozen=True)
class Played:
    """A placement's schedule, and its times."""

    plan: Placement
    table: Table
    facts: ScheduleFacts
    batch_s: float  # between two batches in the steady state
    late: int  # maximum number of updates between a gradient's parameters and those it is applied to


def partitioner_for(schedule: str | None) -> Partitioner:
    """Return the default partitioner of a schedule."""
    return pipedream if schedule is None else PLAN_WITH.get(schedule, one_machine_per_stage)


def check_schedule(name: str, plan: Placement | None = None) -> None:
    """Raise ValueError if there is no such schedule, or not for this placement."""
    need(name in SCHEDULES, f"no schedule named '{name}': choose from {', '.join(SCHEDULES)}, or all.")
    if plan is None:
        return
    need(
        plan.kind == "pipeline",
        "a schedule needs a pipeline, and the placement is a partition: omit --partitioner, or use "
        "one_machine_per_stage.",
    )
    replicas = plan.replicas()
    need(
        name != "pipedream_2bw" or max(replicas) == 1,
        f"the placement has stage replicas {replicas}, which pipedream_2bw does not support: omit --partitioner, or "
        "use one_machine_per_stage.",
    )
    several = is_interleaved(plan)
    need(
        name != "interleaved" or several or len(replicas) == 1,
        "interleaved requires several stages per machine, and the placement has one: omit --partitioner and "
        "--placement.",
    )
    need(
        name == "interleaved" or not several,
        f"the placement has several stages on a machine, which only the schedule interleaved supports, not {name}.",
    )


def played(name: str, plan: Placement, profile: Profile, resources: Resources, microbatches: int) -> Played:
    """Play a schedule with the placement's stages and `microbatches` per batch."""
    check_schedule(name, plan)
    costs = costs_of(name, plan, profile, resources, microbatches)
    table = table_of(name, plan, microbatches, batches=1)
    batch_s = steady_s(name, plan, microbatches, costs)
    return Played(plan, table, check(table, costs), batch_s, _late(table))


def steady_s(name: str, plan: Placement, microbatches: int, costs: Costs) -> float:
    """Return the seconds between two batches once the pipeline is full: the time that doubling the batches adds."""
    if name == "pipedream":
        microbatches = 1  # each microbatch is a batch
    full = full_after(name, plan)
    once, twice = (check(table_of(name, plan, microbatches, batches), costs).total_s for batches in (full, 2 * full))
    return (twice - once) / full


def full_after(name: str, plan: Placement) -> int:
    """Return after how many batches a pipeline is full and all replicas of a stage have computed equally many."""
    if name == "pipedream":
        return 2 * math.lcm(*plan.replicas()) * len(plan.stages)
    return 1 if name in FLUSHES else 2


def every_schedule(
    profile: Profile, resources: Resources, microbatches: int, stages_per_worker: int = 2
) -> dict[str, Played | ValueError]:
    """Return each schedule with the placement of its default partitioner, or the error if there is none."""
    found: dict[str, Played | ValueError] = {}
    for name in SCHEDULES:
        try:
            planner = partitioner_for(name)
            planner = partial(interleaved, stages_per_worker=stages_per_worker) if planner is interleaved else planner
            plan = make_plan(planner, profile, resources)
            found[name] = played(name, plan, profile, resources, microbatches)
        except ValueError as error:
            found[name] = error
    return found


def table_of(name: str, plan: Placement, microbatches: int, batches: int) -> Table:
    """Return the schedule's table for a number of batches, and of microbatches in each."""
    stages = len(plan.stages)
    match name:
        case "gpipe":
            return schedules.gpipe(stages, microbatches, batches)
        case "one_f_one_b":
            return schedules.one_f_one_b(stages, microbatches, batches)
        case "interleaved":
            machines = len({stage.machines for stage in plan.stages})
            return schedules.interleaved(machines, stages // machines, microbatches, batches)
        case "pipedream_2bw":
            return schedules.pipedream_2bw(stages, microbatches, max(2, batches))
        case _:
            return schedules.pipedream(plan.replicas(), microbatches * batches)


def costs_of(name: str, plan: Placement, profile: Profile, resources: Resources, microbatches: int) -> Costs:
    """Return the costs of a microbatch: a fraction of a batch's, except where each microbatch is a batch.

    The exchange of gradients between stage replicas is two messages, one after the other.
    """
    share = 1 if name == "pipedream" else microbatches
    # In a schedule that flushes, replicas share the microbatches of a batch, as if a stage were faster by their number.
    divided = [share * (stage.replicas if name in FLUSHES else 1) for stage in plan.stages]
    shared = [
        max((profile.only(stage.units_of(way)) for way in range(stage.ways)), key=lambda units: units.seconds)
        for stage in plan.stages
    ]
    return Costs(
        forward_s=tuple(unit.forward_s / by for unit, by in zip(shared, divided, strict=True)),
        backward_s=tuple(unit.backward_s / by for unit, by in zip(shared, divided, strict=True)),
        links_s=_links(plan, profile, resources.network, share) | _exchanges(plan, profile, resources.network),
    )


def _exchanges(plan: Placement, profile: Profile, network: LinkSpeed) -> dict[tuple[int, int], float]:
    """Return the seconds in which the replicas of a stage sum their gradients; they wait for that."""
    links: dict[tuple[int, int], float] = {}
    for number, stage in enumerate(plan.stages):
        if stage.replicas > 1:
            share = max(profile.parameter_bytes(stage.units_of(way)) for way in range(stage.ways))
            size = ring_bytes(stage.replicas, share)
            seconds, latency_s = network.sending_s(int(size), *stage.machines[:2])
            links[number, number] = seconds + 2 * latency_s
    return links


def _links(plan: Placement, profile: Profile, network: LinkSpeed, share: int) -> dict[tuple[int, int], float]:
    """Return the seconds of a microbatch's values between neighboring stages; values that skip a stage are ignored."""
    links: dict[tuple[int, int], float] = {}
    for a, (stage, after) in enumerate(pairwise(plan.stages)):
        made, read = set(stage.units), set(after.units)
        values = [value for value in profile.values if value.maker in made and read & set(value.readers)]
        here, there = stage.machines[0], after.machines[0]
        if values:
            links[a, a + 1] = network.transfer_s(sum(v.forward_bytes for v in values) // share, here, there)
        if any(value.backward_bytes for value in values):
            links[a + 1, a] = network.transfer_s(sum(v.backward_bytes for v in values) // share, there, here)
    return links


def _late(table: Table) -> int:
    """Return the age, in updates, of the oldest gradient in an update."""
    late = 0
    for row in table.rows:
        for action in row:
            if action.kind == "B":
                update = action.microbatch // table.microbatches_per_update[action.stage]
                late = max(late, update - action.version)
    return late


NEVER_FLUSHED = ("pipedream", "pipedream_2bw")  # each batch of a run is one of the table's microbatches
PARTITION = "partition"  # instead of a schedule: microbatches in order, each fragment as early as possible


class TimeShare(NamedTuple):
    """The computation and traffic of all workers of one or more stages, for one batch."""

    workers: int  # that take batches in turn
    compute_s: float
    sent_bytes: float


class ForecastSpan(NamedTuple):
    """A stretch of a worker's predicted time."""

    rank: int  # of the worker in its replica
    label: str  # F3, B3: forward and backward of microbatch 3
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Forecast:
    """The prediction for a placement and a schedule."""

    plan: Placement
    profile: Profile  # of one batch
    schedule: str  # or PARTITION
    microbatches: int
    network: LinkSpeed

    @cached_property
    def batch_s(self) -> float:
        """Seconds between two batches in the steady state."""
        if self.schedule == PARTITION:
            return self._partition(2).total_s - self._partition(1).total_s
        return steady_s(self._played_as, self.plan, self.microbatches, self._costs)

    @property
    def _played_as(self) -> str:
        """Return the schedule to play: 2BW only updates at other times, and updates are left out."""
        return "pipedream" if self.schedule in NEVER_FLUSHED else self.schedule

    @property
    def alone_s(self) -> float:
        """Seconds of a batch on one machine, without waits."""
        return self.profile.seconds(self.profile.names)

    @property
    def busy(self) -> float:
        """The fraction of the workers' time in which they compute."""
        return self.alone_s / (self.batch_s * sum(share.workers for share in self.shares)) if self.batch_s else 1.0

    @cached_property
    def shares(self) -> list[TimeShare]:
        """By rank; stages on the same machines are one entry."""
        return [
            TimeShare(len(machines), self.profile.seconds(units), self._sent_bytes(machines, units))
            for machines, units in self._units_of.items()
        ]

    @property
    def _units_of(self) -> dict[tuple[int, ...], list[str]]:
        units_of: dict[tuple[int, ...], list[str]] = {}
        for stage in self.plan.stages:
            units_of.setdefault(stage.machines, []).extend(stage.units)
        return units_of

    def _sent_bytes(self, machines: tuple[int, ...], units: list[str]) -> float:
        """Count each value once per reading machine, its gradient once, and the replicas' exchange of gradients."""
        machines_of = {unit: where for where, those in self._units_of.items() for unit in those}
        sent = 0.0
        for value in self.profile.values:
            readers = {machines_of[reader] for reader in value.readers} - {machines_of[value.maker]}
            sent += value.forward_bytes * len(readers) if machines_of[value.maker] == machines else 0
            sent += value.backward_bytes if machines in readers else 0
        return sent + ring_bytes(len(machines), self.profile.parameter_bytes(units))

    def _table(self, batches: int) -> Table:
        return table_of(self._played_as, self.plan, self.microbatches, batches)

    @property
    def _costs(self) -> Costs:
        resources = Resources(num_machines=self.plan.num_machines, network=self.network)
        return costs_of(self._played_as, self.plan, self.profile, resources, self.microbatches)

    @property
    def _micro(self) -> Profile:
        return self.profile.scaled(1 / self.microbatches, 1 / self.microbatches)

    def spans(self, batches: int, first: int = 0) -> list[ForecastSpan]:
        """Return the spans of some batches in the middle of a run, from the start of the first of them.

        If the pipeline is never flushed, they include those of batches in flight before and after, and labels count
        from `first`.
        """
        if self.schedule == PARTITION:
            return self._of_a_partition(batches)
        if self.schedule in NEVER_FLUSHED:
            return self._never_flushed(batches, first)
        spans = check(self._table(batches), self._costs).spans
        return [
            ForecastSpan(s.machine, f"{s.action.kind}{s.action.microbatch % self.microbatches}", s.from_s, s.to_s)
            for s in spans
            if s.action.kind != "U"
        ]

    def _never_flushed(self, batches: int, first: int) -> list[ForecastSpan]:
        ahead = full_after(self._played_as, self.plan)
        spans = check(self._table(2 * ahead + batches), self._costs).spans
        begin = min(s.from_s for s in spans if s.action.stage == 0 and s.action.microbatch == ahead)
        end = min(s.from_s for s in spans if s.action.stage == 0 and s.action.microbatch == ahead + batches)
        return [
            ForecastSpan(
                s.machine, f"{s.action.kind}{s.action.microbatch - ahead + first}", s.from_s - begin, s.to_s - begin
            )
            for s in spans
            if s.action.kind != "U" and begin <= s.from_s < end
        ]

    def _of_a_partition(self, batches: int) -> list[ForecastSpan]:
        times = self._partition(batches)
        return [
            ForecastSpan(
                step.fragment[1], f"{step.kind}{step.microbatch % self.microbatches}", start, times.end_s[step]
            )
            for step, start in times.start_s.items()
        ]

    def _partition(self, batches: int) -> Times[Step]:
        return PartitionClock(self._micro, self.network).play(self.plan.stage_of(), batches * self.microbatches)


def as_batch(microbatch: Profile, samples: int) -> Profile:
    """Scale the profile of a microbatch to a batch of `samples`, computed in such microbatches."""
    times = samples / microbatch.batch_size
    return msgspec.structs.replace(microbatch.scaled(times, times), batch_size=samples)
