"""How a run in stages should go, by the numbers of a profile: what each worker computes and sends, and when.

What is not in a profile is not in here: reading data, the loss, updates, servers. That replicas of a stage exchange
their gradients is in here, because it decides where a plan has replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import msgspec

from rainband.model_parallel.placement.placement import Placement
from rainband.model_parallel.placement.predict import PartitionClock, Step, ring_bytes
from rainband.model_parallel.placement.profile import LinkSpeed, Profile, Resources
from rainband.model_parallel.schedules.check import Costs, check
from rainband.model_parallel.schedules.play import Times
from rainband.model_parallel.schedules.rates import costs_of, full_after, steady_s, table_of
from rainband.model_parallel.schedules.table import Table

NEVER_FLUSHED = "pipedream"
PARTITION = "partition"  # in the place of a schedule: one microbatch after the other, fragments as soon as they can


class TimeShare(NamedTuple):
    """Of one batch: what the workers of one or more stages compute and send, all of them together."""

    workers: int  # among whom batches are dealt
    compute_s: float
    sent_bytes: float


class ForecastSpan(NamedTuple):
    """A stretch of a worker's time."""

    place: int  # of the worker in its team
    label: str  # F3, B3: forward and backward of microbatch 3
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Forecast:
    """A plan, and how batches go through it."""

    plan: Placement
    profile: Profile  # of one batch
    schedule: str  # or PARTITION
    microbatches: int
    network: LinkSpeed

    @cached_property
    def batch_s(self) -> float:
        """Seconds between two batches, once it runs."""
        if self.schedule == PARTITION:
            return self._partition(2).total_s - self._partition(1).total_s
        return steady_s(self.schedule, self.plan, self.microbatches, self._costs)

    @property
    def alone_s(self) -> float:
        """Seconds of a batch on one machine, without any waiting."""
        return self.profile.seconds(self.profile.names)

    @property
    def busy(self) -> float:
        """The part of the workers' time in which they compute."""
        return self.alone_s / (self.batch_s * sum(share.workers for share in self.shares)) if self.batch_s else 1.0

    @cached_property
    def shares(self) -> list[TimeShare]:
        """In the order of the workers; stages that are on the same machines are one share."""
        return [
            TimeShare(len(machines), self.profile.seconds(units), self._sent_bytes(machines, units))
            for machines, units in self._homes.items()
        ]

    @property
    def _homes(self) -> dict[tuple[int, ...], list[str]]:
        homes: dict[tuple[int, ...], list[str]] = {}
        for stage in self.plan.stages:
            homes.setdefault(stage.machines, []).extend(stage.units)
        return homes

    def _sent_bytes(self, machines: tuple[int, ...], units: list[str]) -> float:
        """A value goes once to each machine that reads it, and its gradient back; replicas exchange gradients."""
        home = {unit: where for where, those in self._homes.items() for unit in those}
        sent = 0.0
        for value in self.profile.values:
            readers = {home[reader] for reader in value.readers} - {home[value.maker]}
            sent += value.forward_bytes * len(readers) if home[value.maker] == machines else 0
            sent += value.backward_bytes if machines in readers else 0
        return sent + ring_bytes(len(machines), self.profile.parameter_bytes(units))

    def _table(self, batches: int) -> Table:
        return table_of(self.schedule, self.plan, self.microbatches, batches)

    @property
    def _costs(self) -> Costs:
        """Replicas of a stage wait for each other's gradients: two messages, in turn."""
        resources = Resources(num_machines=self.plan.num_machines, network=self.network)
        costs = costs_of(self.schedule, self.plan, self.profile, resources, self.microbatches)
        links = dict(costs.links_s)
        for number, stage in enumerate(self.plan.stages):
            if len(stage.machines) > 1:
                size = ring_bytes(len(stage.machines), self.profile.parameter_bytes(stage.units))
                seconds, latency_s = self.network.sending_s(int(size), *stage.machines[:2])
                links[number, number] = seconds + 2 * latency_s
        return replace(costs, links_s=links)

    @property
    def _micro(self) -> Profile:
        return self.profile.scaled(1 / self.microbatches, 1 / self.microbatches)

    # ---- when who does what ----------------------------------------------------------------------------------------

    def doings(self, batches: int, first: int = 0) -> list[ForecastSpan]:
        """Some batches in the middle of a run, from the moment on when the first of them begins.

        Where a pipeline is never flushed, batches on the way before and after them are there, too, and labels count
        from `first`.
        """
        if self.schedule == PARTITION:
            return self._of_a_partition(batches)
        if self.schedule == NEVER_FLUSHED:
            return self._never_flushed(batches, first)
        spans = check(self._table(batches), self._costs).spans
        return [
            ForecastSpan(s.machine, f"{s.action.kind}{s.action.microbatch % self.microbatches}", s.from_s, s.to_s)
            for s in spans
            if s.action.kind != "U"
        ]

    def _never_flushed(self, batches: int, first: int) -> list[ForecastSpan]:
        ahead = full_after(self.schedule, self.plan)
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
    """A batch of so many samples, computed in microbatches like this one."""
    times = samples / microbatch.batch_size
    return msgspec.structs.replace(microbatch.scaled(times, times), batch_size=samples)
