r"""PipeDream's dynamic program: cut a chain of units into stages, and replicate stages (Narayanan et al. 2019).

With the units in their order, T_l the time of unit l, w_l its parameters, a_s what crosses behind unit s,

    T(i..j, m)  =  ( sum T_l + 2 (m-1)/m sum |w_l| / B ) / m                     one stage on m machines
    A(j, m)     =  min( T(0..j, m) ,  min over s, m' of max( A(s, m-m') , 2 a_s / B , T(s+1..j, m') ) )

gives the time of the slowest stage or link of the best pipeline for the first j units on m machines. With groups of
machines it runs twice: first inside a group, for all stretches i..j; then over groups, where sum T_l is replaced by A
of the stretch inside one group, and |w_l| divided by the replicas that its stage has there.

We depart from the paper in six points. An update's bytes are those of a ring, and replicas wait while they exchange
them (predict.py says why). 2 a_s are the
bytes measured, both ways, so integers go one way only; in a graph that is no chain, a_s is all values that cross. A
plan may leave machines idle when that is no slower. A stage must fit its machines: it keeps a version of its
parameters and the activations of each batch on the way,

    in flight  =  floor( (R - 1 - machines before it) / m' ) + 1                 R machines in all

known exactly in one level; with groups the largest number it could be is taken, so a plan near the limit may be
overlooked but never promised. And plans of one level, which ignore groups while searching, compete with those of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate

from rainband.model_parallel.placement.merge_units import Coarse, along_order
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.predict import predicted, ring_bytes
from rainband.model_parallel.placement.profile import Profile, Resources

Shape = tuple[tuple[int, int], ...]  # stages as (end, replicas): the units up to `end`, and the number of machines
Placed = list[tuple[int, tuple[int, ...]]]  # stages as (end, machines)
NEVER: tuple[float, Shape] = (float("inf"), ())
MAX_UNITS = 40  # neighbors are merged until at most this many are left


def pipedream(profile: Profile, resources: Resources) -> Placement:
    """Return the pipeline with the most batches per second; of equals, the one on the fewest machines."""
    return _best_plan(profile, resources, "pipedream", resources.num_machines)


def one_machine_per_stage(profile: Profile, resources: Resources) -> Placement:
    """Return the best pipeline without replicas, as schedules that flush require."""
    return _best_plan(profile, resources, "one_machine_per_stage", 1)


def num_units(profile: Profile) -> str:
    """Return the number of units with its noun, for messages."""
    return "1 unit" if len(profile.units) == 1 else f"{len(profile.units)} units"


def in_stages(profile: Profile, resources: Resources) -> Placement:
    """Return a pipeline with exactly one stage per machine, even where fewer stages would be faster."""
    coarse = along_order(profile, MAX_UNITS)
    stages = resources.num_machines
    sums = _Sums(coarse.profile, resources.network.bytes_per_s, resources, stages, exact=True)
    sums.most_replicas = 1
    found = _best_from(sums, 0, sums.stage_s)(len(coarse.profile.units), stages)
    if found == NEVER:
        raise ValueError(
            f"{profile.model or 'the model'} has {num_units(profile)}, too few for {stages} stages: use fewer stages, "
            "or split its modules into smaller ones."
        )
    plan = _plan(profile, coarse, resources, _consecutive(found[1]), "one_machine_per_stage")
    return predicted(plan, profile, resources)


def interleaved(profile: Profile, resources: Resources, stages_per_worker: int = 2) -> Placement:
    """Return a pipeline with several stages per machine, dealt in turn, without replicas."""
    if resources.num_machines == 1:
        return one_machine_per_stage(profile, resources)
    stages = stages_per_worker * resources.num_machines
    if len(profile.units) < stages:
        raise ValueError(
            f"{profile.model or 'the model'} has {num_units(profile)}, and {stages_per_worker} stages on each of "
            f"{resources.num_machines} machines are {stages}: use fewer machines or fewer "
            "stages per worker."
        )
    coarse = along_order(profile, max(MAX_UNITS, stages))
    sums = _Sums(coarse.profile, resources.network.bytes_per_s, Resources(num_machines=stages), stages, exact=True)
    sums.most_replicas = 1
    _, shape = _best_from(sums, 0, sums.stage_s)(len(coarse.profile.units), stages)
    placed: Placed = [(end, (number % resources.num_machines,)) for number, (end, _) in enumerate(shape)]
    return predicted(_plan(profile, coarse, resources, placed, "interleaved"), profile, resources)


def _best_plan(profile: Profile, resources: Resources, name: str, most_replicas: int) -> Placement:
    coarse = along_order(profile, MAX_UNITS)
    shapes = _candidates(coarse.profile, resources, most_replicas)
    plans = [predicted(_plan(profile, coarse, resources, placed, name), profile, resources) for placed in shapes]
    if not plans:
        raise ValueError(
            f"{profile.model or 'the model'} does not fit on {resources.num_machines} machines of "
            f"{resources.memory_bytes:,} bytes, cut between units: use more machines, larger ones, or a "
            "smaller batch."
        )
    return min(plans, key=_cost)


def _cost(plan: Placement) -> tuple[float, int]:
    assert plan.predicted is not None
    return plan.predicted.batch_s, sum(plan.replicas())


def _candidates(profile: Profile, resources: Resources, most_replicas: int) -> Iterator[Placed]:
    network = resources.network
    slowest = min(network.speed(True), network.speed(False)) if network.machines_per_group else network.bytes_per_s
    for used in range(1, resources.num_machines + 1):
        sums = _Sums(profile, slowest, resources, used, exact=True)
        sums.most_replicas = most_replicas
        if (found := _best_from(sums, 0, sums.stage_s)(len(profile.units), used)) != NEVER:
            yield _consecutive(found[1])
    if network.machines_per_group > 1 and most_replicas > 1:
        yield from _two_levels(profile, resources)


class _Sums:
    """Prefix sums over the units, and the cost of one stage."""

    def __init__(self, profile: Profile, bytes_per_s: float, resources: Resources, used: int, exact: bool) -> None:
        self.bytes_per_s, self.resources = bytes_per_s, resources
        self.used = used  # machines in all
        self.exact = exact  # True if the machines before a stage are known
        self.most_replicas = used
        units = profile.units
        self.seconds = list(accumulate((unit.seconds for unit in units), initial=0.0))
        self.parameters = list(accumulate((unit.parameter_bytes for unit in units), initial=0))
        self.activations = list(accumulate((unit.activation_bytes for unit in units), initial=0))
        self.link_s = [profile.crossing_bytes(end) / bytes_per_s for end in range(len(units) + 1)]

    def fits(self, begin: int, end: int, replicas: int, before: int) -> bool:
        in_flight = (self.used - 1 - (before if self.exact else 0)) // replicas + 1
        parameters = self.parameters[end] - self.parameters[begin]
        return self.resources.fits(parameters, self.activations[end] - self.activations[begin], in_flight)

    def stage_s(self, begin: int, end: int, replicas: int, before: int) -> float:
        if replicas > self.most_replicas or not self.fits(begin, end, replicas, before):
            return NEVER[0]
        alone_s = self.seconds[end] - self.seconds[begin]
        sync_s = ring_bytes(replicas, self.parameters[end] - self.parameters[begin]) / self.bytes_per_s
        return (alone_s + sync_s) / replicas

    def over_groups_s(self, inner: tuple[float, Shape], begin: int, groups: int) -> float:
        """A pipeline inside one group, replicated in several groups: one update per round of its replicas."""
        alone_s, shape = inner
        sync_s = 0.0
        for end, replicas in shape:
            sync_s += ring_bytes(groups, self.parameters[end] - self.parameters[begin]) / replicas / self.bytes_per_s
            begin = end
        return max(alone_s, sync_s) / groups


def _best_from(
    sums: _Sums, begin: int, stage_s: Callable[[int, int, int, int], float]
) -> Callable[[int, int], tuple[float, Shape]]:
    """Return A(end, machines) for the units from `begin` on: (seconds, stages)."""

    @cache
    def best(end: int, machines: int) -> tuple[float, Shape]:
        seconds = stage_s(begin, end, machines, 0)
        found = (seconds, ((end, machines),)) if seconds < NEVER[0] else NEVER
        for middle in range(begin + 1, end):
            for last in range(1, machines):
                seconds = max(stage_s(middle, end, last, machines - last), sums.link_s[middle])
                if seconds >= found[0]:
                    continue
                first_s, shape = best(middle, machines - last)
                if max(seconds, first_s) < found[0]:
                    found = (max(seconds, first_s), (*shape, (end, last)))
        return found

    return best


def _two_levels(profile: Profile, resources: Resources) -> Iterator[Placed]:
    """Run the dynamic program over groups, on top of that inside a group."""
    network = resources.network
    size, count = network.machines_per_group, len(profile.units)
    for groups in range(1, resources.num_machines // size + 1):
        inside = _Sums(profile, network.speed(True), resources, groups * size, exact=False)
        between = _Sums(profile, network.speed(False), resources, groups * size, exact=False)
        starts = [_best_from(inside, begin, inside.stage_s) for begin in range(count)]

        def stage_s(
            begin: int,
            end: int,
            replicas: int,
            before: int,
            starts: list[Callable[[int, int], tuple[float, Shape]]] = starts,
            between: _Sums = between,
        ) -> float:
            return between.over_groups_s(starts[begin](end, size), begin, replicas)

        seconds, outer = _best_from(between, 0, stage_s)(count, groups)
        if seconds < NEVER[0]:
            yield _nested(outer, starts, size)


def _consecutive(shape: Shape) -> Placed:
    placed, machine = [], 0
    for end, replicas in shape:
        placed.append((end, tuple(range(machine, machine + replicas))))
        machine += replicas
    return placed


def _nested(outer: Shape, starts: list[Callable[[int, int], tuple[float, Shape]]], size: int) -> Placed:
    """Return the stages: those inside an outer stage have replicas in all of its groups."""
    placed: Placed = []
    begin = group = 0
    for end, groups in outer:
        for inner_end, machines in _consecutive(starts[begin](end, size)[1]):
            # Groups in turn, so that a batch stays in its group from one inner stage to the next.
            every = tuple((group + g) * size + machine for machine in machines for g in range(groups))
            placed.append((inner_end, every))
        begin, group = end, group + groups
    return placed


def _plan(profile: Profile, coarse: Coarse, resources: Resources, placed: Placed, name: str) -> Placement:
    stages, begin = [], 0
    for end, machines in placed:
        units = [unit for name in coarse.profile.names[begin:end] for unit in coarse.members[name]]
        stages.append(PlacedStage(machines, tuple(units)))
        begin = end
    number = resources.num_machines
    return Placement(model=profile.model, kind="pipeline", partitioner=name, num_machines=number, stages=tuple(stages))
