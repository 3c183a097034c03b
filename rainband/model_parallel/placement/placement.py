"""A placement: the machine of each unit of a model, as data that is printed, drawn, saved, edited and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rainband.model_parallel.placement.profile import Profile, Resources

SUFFIXES = (".json", ".toml")


class PlacedStage(msgspec.Struct, frozen=True):
    """Units that run together. Machines are replicas, which take batches in turn, or share each one (`split`).

    If units are on `ways` machines, machine w * replicas + r is the replica r of the units with index w.
    """

    machines: tuple[int, ...]
    units: tuple[str, ...]
    split: dict[str, int] = {}  # unit -> which of the machines that share a batch; absent: the first

    @property
    def ways(self) -> int:
        """Machines that share a batch."""
        return 1 + max(self.split.values(), default=0)

    @property
    def replicas(self) -> int:
        return len(self.machines) // self.ways

    def machine_of(self, unit: str) -> int:
        """Return the machine of a unit, in the first replica."""
        return self.machines[self.split.get(unit, 0) * self.replicas]

    def units_of(self, way: int) -> tuple[str, ...]:
        """Return the units on one of the machines that share a batch."""
        return tuple(unit for unit in self.units if self.split.get(unit, 0) == way)


class Prediction(msgspec.Struct, frozen=True):
    """The prediction of a partitioner for its placement."""

    batch_s: float  # between two finished batches, in the steady state
    alone_s: float  # on one machine
    crossing_bytes: int  # in one batch, forward and backward
    memory_bytes: tuple[int, ...]  # on each stage's machine


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Stages of a model on machines.

    partition   one batch at a time; any unit may be on any machine, and every stage is one machine
    pipeline    many batches in flight; values go only from earlier stages to later ones

    A pipeline's stage may be on several machines, or a machine may have several stages, dealt in turn.
    """

    model: str
    kind: Literal["partition", "pipeline"]
    partitioner: str
    num_machines: int
    stages: tuple[PlacedStage, ...]
    splits: dict[str, str] = {}  # layer -> how it is split into shards, as in --split LAYER=HOW
    predicted: Prediction | None = None

    def placement(self) -> dict[str, int]:
        """Return the (first) machine of each unit."""
        return {unit: stage.machine_of(unit) for stage in self.stages for unit in stage.units}

    def stage_of(self) -> dict[str, int]:
        """Return the number of each unit's stage."""
        return {unit: number for number, stage in enumerate(self.stages) for unit in stage.units}

    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)


def is_interleaved(plan: Placement) -> bool:
    """Return True if a machine has several stages."""
    return len({stage.machines for stage in plan.stages}) < len(plan.stages)


def in_flight(replicas: tuple[int, ...], stage: int) -> int:
    """Return the most batches that a machine of this stage has in flight: one, and those of the warm-up."""
    return (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage] + 1


def check(plan: Placement, profile: Profile, resources: Resources | None = None) -> None:
    """Raise ValueError, which says what to change, if the placement does not fit the model or the machines."""
    _check_units(plan, profile)
    _check_machines(plan)
    if plan.kind == "pipeline":
        _check_direction(plan, profile)
    if resources is not None:
        _check_memory(plan, profile, resources)


def _check_units(plan: Placement, profile: Profile) -> None:
    placed = [unit for stage in plan.stages for unit in stage.units]
    if twice := sorted({unit for unit in placed if placed.count(unit) > 1}):
        raise ValueError(f"the placement has {', '.join(twice)} more than once: give each unit one stage.")
    if unknown := [unit for unit in placed if unit not in profile.position]:
        raise ValueError(
            f"the placement has {', '.join(unknown)}, which {profile.model or 'the model'} does not have: its units "
            f"are {', '.join(profile.names)}. If the model has changed, make a new placement (rainband placement)."
        )
    if missing := [unit for unit in profile.names if unit not in placed]:
        raise ValueError(f"the placement lacks {', '.join(missing)}: give each unit a stage.")


def _check_machines(plan: Placement) -> None:
    used = [machine for stage in plan.stages for machine in stage.machines]
    for number, stage in enumerate(plan.stages):
        if not stage.machines:
            raise ValueError(f"stage {number} has no machine: give it one, or remove it.")
        if not stage.units:
            raise ValueError(f"stage {number} has no units: give it one, or remove it.")
        _check_ways(number, stage)
        if plan.kind == "partition" and len(stage.machines) > 1:
            raise ValueError(
                f"stage {number} is on {len(stage.machines)} machines, and in a partition each is on one: give it one "
                'machine, or set kind to "pipeline".'
            )
    twice = sorted({machine for machine in used if used.count(machine) > 1})
    if twice and (plan.kind == "partition" or not _are_dealt_in_turn(plan)):
        raise ValueError(
            f"machine {twice[0]} has more than one stage: put their units into one, or deal the stages of a pipeline "
            "to all its machines in turn (0, 1, 0, 1)."
        )
    if outside := [machine for machine in used if not 0 <= machine < plan.num_machines]:
        raise ValueError(
            f"the placement uses machine {outside[0]} of {plan.num_machines}: use 0 to {plan.num_machines - 1}, or "
            "raise num_machines."
        )


def _check_ways(number: int, stage: PlacedStage) -> None:
    """Raise ValueError unless a stage with split layers has equally many machines for each of their shards."""
    if min(stage.split.values(), default=0) < 0 or len(stage.machines) % stage.ways:
        raise ValueError(
            f"stage {number} divides its units among {stage.ways} machines and has {len(stage.machines)}: give it a "
            f"multiple of {stage.ways}."
        )
    if empty := [way for way in range(stage.ways) if not stage.units_of(way)]:
        raise ValueError(f"stage {number} has no unit for its machine {empty[0]} (from 0): assign one in split.")
    if unknown := [unit for unit in stage.split if unit not in stage.units]:
        raise ValueError(f"stage {number} splits {', '.join(unknown)}, which it does not have: remove it from split.")


def _are_dealt_in_turn(plan: Placement) -> bool:
    """Return True if stage s is on machine s mod P and all machines have equally many stages."""
    machines = [stage.machines for stage in plan.stages]
    count = len(set(machines))
    rounds = len(machines) // count
    return max(map(len, machines)) == 1 and count > 1 and machines == machines[:count] * rounds


def _check_direction(plan: Placement, profile: Profile) -> None:
    stage = plan.stage_of()
    for value in profile.values:
        for reader in value.readers:
            if stage[reader] < stage[value.maker]:
                raise ValueError(
                    f"{reader} in stage {stage[reader]} reads {value.name} of stage {stage[value.maker]}: in a "
                    "pipeline values go to later stages only. Move one of them, or make the plan a partition."
                )


def _check_memory(plan: Placement, profile: Profile, resources: Resources) -> None:
    of_machine: dict[int, int] = {}
    for number, (stage, needed) in enumerate(zip(plan.stages, memory(plan, profile, resources), strict=True)):
        first = stage.machines[0]
        of_machine[first] = of_machine.get(first, 0) + needed
        if resources.memory_bytes and of_machine[first] > resources.memory_bytes:
            raise ValueError(
                f"stage {number} ({', '.join(stage.units[:3])}{', …' if len(stage.units) > 3 else ''}) needs "
                f"{of_machine[first]:,} bytes and a machine has {resources.memory_bytes:,}: move a unit to another "
                "stage, or use more machines."
            )


def memory(plan: Placement, profile: Profile, resources: Resources) -> tuple[int, ...]:
    """Return the bytes that a machine of each stage needs for it.

    In a pipeline, as much as a schedule without a flush requires: a version and activations for each batch in
    flight. Stages that share a machine require a schedule that flushes: one version, the activations of one batch.
    """
    replicas, one_batch = plan.replicas(), plan.kind == "partition" or is_interleaved(plan)
    return tuple(
        max(
            resources.needed(
                profile.parameter_bytes(units),
                profile.activation_bytes(units),
                1 if one_batch else in_flight(replicas, number),
            )
            for units in map(stage.units_of, range(stage.ways))
        )
        for number, stage in enumerate(plan.stages)
    )


def from_placement(profile: Profile, placement: Mapping[str, int], partitioner: str, num_machines: int) -> Placement:
    """Return the partition for a map of units to machines."""
    machines = sorted(set(placement.values()))
    stages = [PlacedStage((m,), tuple(unit for unit in profile.names if placement[unit] == m)) for m in machines]
    return Placement(
        model=profile.model, kind="partition", partitioner=partitioner, num_machines=num_machines, stages=tuple(stages)
    )


def save(plan: Placement, path: Path) -> None:
    check_file_name(path)
    text = _to_toml(plan) if path.suffix == ".toml" else msgspec.json.format(msgspec.json.encode(plan)).decode() + "\n"
    path.write_text(text, encoding="utf-8")


def load(path: Path) -> Placement:
    check_file_name(path)
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(path.read_bytes(), type=Placement)
    except msgspec.MsgspecError as error:
        hint = f"`rainband placement TASK --out {path.name}` writes one."
        raise ValueError(f"{path} is not a placement: {error}. {hint}") from None


def check_file_name(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a placement is a file that ends in {' or '.join(SUFFIXES)}, not {path.name}.")


def _to_toml(plan: Placement) -> str:
    """Return the placement as TOML: one table per stage, easy to edit."""
    word = msgspec.json.encode  # strings and lists of them are written as in JSON
    lines = [f"{name} = {word(getattr(plan, name)).decode()}" for name in ("model", "kind", "partitioner")]
    lines.append(f"num_machines = {plan.num_machines}")
    for stage in plan.stages:
        lines += ["", "[[stages]]", f"machines = {word(stage.machines).decode()}"]
        lines += ["units = [", *(f"    {word(unit).decode()}," for unit in stage.units), "]"]
        if stage.split:
            lines += ["[stages.split]", *(f"{word(unit).decode()} = {way}" for unit, way in stage.split.items())]
    if plan.splits:
        lines += [
            "",
            "[splits]",
            *(f"{word(layer).decode()} = {word(how).decode()}" for layer, how in plan.splits.items()),
        ]
    if plan.predicted is not None:
        lines += ["", "[predicted]"]
        lines += [f"{k} = {word(v).decode()}" for k, v in msgspec.structs.asdict(plan.predicted).items()]
    return "\n".join(lines) + "\n"
