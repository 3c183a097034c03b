"""The costs of each unit of a cut model: time, parameters, activations, and the values between units."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec


class Unit(msgspec.Struct, frozen=True):
    """A node that a placement places, with the nodes that stay with it."""

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0  # kept between its forward and its backward
    what: str = ""  # Conv2d, relu, …: for display
    layer: str = ""  # its name in the model; empty: it is no module

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


class CutValue(msgspec.Struct, frozen=True):
    """A tensor, or a pytree of them, that one unit makes and others read."""

    name: str
    maker: str
    readers: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int  # of its gradient; 0 for integers

    @property
    def num_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


class Profile(msgspec.Struct, frozen=True, dict=True):
    """The costs of a model for one batch size; units are in an order in which they can compute."""

    model: str
    batch_size: int
    units: tuple[Unit, ...]
    values: tuple[CutValue, ...]
    counted: bool = False  # the model has no values: times are those of its multiplications at 10 billion per second

    def __post_init__(self) -> None:
        position = {unit.name: number for number, unit in enumerate(self.units)}
        for value in self.values:
            if value.maker not in position or not position.keys() >= set(value.readers):
                raise ValueError(f"value {value.name} goes from or to a unit that the profile does not have.")
            if any(position[reader] <= position[value.maker] for reader in value.readers):
                raise ValueError(f"value {value.name} is read before {value.maker} has made it: sort the units.")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units)

    @cached_property
    def by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def position(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def crossing_bytes(self, end: int) -> int:
        """Return the bytes forward and backward between the first `end` units and the rest; each value counts once."""
        position = self.position
        return sum(
            value.num_bytes
            for value in self.values
            if position[value.maker] < end and any(position[reader] >= end for reader in value.readers)
        )

    @cached_property
    def _made(self) -> dict[str, list[CutValue]]:
        made: dict[str, list[CutValue]] = {name: [] for name in self.names}
        for value in self.values:
            made[value.maker].append(value)
        return made

    def made_by(self, unit: str) -> list[CutValue]:
        """Return the values of a unit that others read."""
        return self._made[unit]

    def only(self, names: Iterable[str]) -> Unit:
        """Return the costs of some units together."""
        units = [self.by_name[name] for name in names]
        return Unit(
            "",
            sum(unit.forward_s for unit in units),
            sum(unit.backward_s for unit in units),
            sum(unit.parameter_bytes for unit in units),
            sum(unit.activation_bytes for unit in units),
        )

    def seconds(self, names: Iterable[str]) -> float:
        return sum(self.by_name[name].seconds for name in names)

    def parameter_bytes(self, names: Iterable[str]) -> int:
        return sum(self.by_name[name].parameter_bytes for name in names)

    def activation_bytes(self, names: Iterable[str]) -> int:
        return sum(self.by_name[name].activation_bytes for name in names)

    def scaled(self, seconds: float = 1.0, num_bytes: float = 1.0) -> Profile:
        """Return the profile with times, and the bytes of values, multiplied by these factors."""
        units = [
            msgspec.structs.replace(u, forward_s=u.forward_s * seconds, backward_s=u.backward_s * seconds)
            for u in self.units
        ]
        values = [
            msgspec.structs.replace(
                v, forward_bytes=int(v.forward_bytes * num_bytes), backward_bytes=int(v.backward_bytes * num_bytes)
            )
            for v in self.values
        ]
        return msgspec.structs.replace(self, units=tuple(units), values=tuple(values))


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The network's speed inside a group of machines and between groups."""

    bytes_per_s: float = 1e9
    latency_s: float = 100e-6
    machines_per_group: int = 0  # 0: there is one group
    between_bytes_per_s: float = 0.0  # between groups; 0: as inside a group
    between_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or min(self.latency_s, self.between_bytes_per_s, self.between_latency_s) < 0:
            raise ValueError(
                f"bytes_per_s={self.bytes_per_s} latency_s={self.latency_s} between_bytes_per_s="
                f"{self.between_bytes_per_s} between_latency_s={self.between_latency_s}: the first must be above 0, "
                "the others at least 0."
            )
        if self.machines_per_group < 0:
            raise ValueError(f"machines_per_group={self.machines_per_group}: give 1 or more, or 0 for one group.")

    def group(self, machine: int) -> int:
        return machine // self.machines_per_group if self.machines_per_group else 0

    def speed(self, same_group: bool) -> float:
        """Return the bytes per second between two machines."""
        return self.bytes_per_s if same_group else self.between_bytes_per_s or self.bytes_per_s

    def transfer_s(self, num_bytes: int, source: int, destination: int) -> float:
        return 0.0 if source == destination else sum(self.sending_s(num_bytes, source, destination))

    def sending_s(self, num_bytes: int, source: int, destination: int) -> tuple[float, float]:
        """Return how long a message occupies a NIC, and its additional latency."""
        near = self.group(source) == self.group(destination)
        latency_s = self.latency_s if near else self.between_latency_s or self.latency_s
        return num_bytes / self.speed(near), latency_s


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that a partitioner may use."""

    num_machines: int
    memory_bytes: int = 0  # of each machine; 0: no limit
    network: LinkSpeed = LinkSpeed()
    state_copies: int = 2  # vectors per version of the parameters: the gradient, and one of the optimizer

    def __post_init__(self) -> None:
        if self.num_machines < 1:
            raise ValueError(f"num_machines={self.num_machines}: must be at least 1.")
        if self.memory_bytes < 0 or self.state_copies < 0:
            raise ValueError(
                f"memory_bytes={self.memory_bytes} state_copies={self.state_copies}: both must be at least 0."
            )
        per_group = self.network.machines_per_group
        if per_group and self.num_machines % per_group:
            raise ValueError(
                f"{self.num_machines} machines are not a multiple of {per_group} machines per group: use "
                f"{-(-self.num_machines // per_group) * per_group} machines, or groups of another size."
            )

    def fits(self, parameter_bytes: int, activation_bytes: int, in_flight: int) -> bool:
        return not self.memory_bytes or self.needed(parameter_bytes, activation_bytes, in_flight) <= self.memory_bytes

    def needed(self, parameter_bytes: int, activation_bytes: int, in_flight: int) -> int:
        """Return the bytes of a machine: parameters and activations for each batch in flight."""
        return parameter_bytes * (in_flight + self.state_copies) + activation_bytes * in_flight
