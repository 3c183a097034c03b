r"""Choose data or model parallelism for each layer, as in "one weird trick" (Krizhevsky 2014).

Of a layer with weights w, inputs x and outputs y (bytes for one batch), m machines exchange, forward and backward,

    data parallel     2 (m - 1) w               every machine sums its gradient with the others', in a ring
    model parallel    2 (m - 1) (x + y / m)     every machine gets all inputs, and has 1 / m of the outputs

A linear layer is split where that is less. The layers before the first split one are a stage whose machines compute
different samples; from there on, machines share every sample, and one of them computes the layers that are not split.
"""

from __future__ import annotations

from typing import NamedTuple

from rainband.model_parallel.placement.profile import Profile, Unit

SPLITTABLE = ("Linear",)


class LayerChoice(NamedTuple):
    """A layer, the number of machines that share it, and the bytes of one batch in each way."""

    unit: Unit
    ways: int  # 1: data parallel
    data_bytes: float
    model_bytes: float
    obstacle: str = ""  # why the layer cannot be split

    def text(self, after_split: bool) -> str:
        """Return the choice and its reason. `after_split`: a layer before it is split."""
        name = f"{self.unit.layer or self.unit.name} ({self.unit.what})"
        costs = f"{self.data_bytes / 1000:,.1f} kB of gradients"
        values = f"{self.model_bytes / 1000:,.1f} kB of values"
        if self.ways > 1:
            return f"{name}: model parallel, split {self.ways} ways: {values} a batch instead of {costs}"
        how = "whole, on one machine" if after_split else "data parallel"
        if self.obstacle:
            return f"{name}: {how}: {self.obstacle}"
        if self.unit.what not in SPLITTABLE:
            return f"{name}: {how}: only linear layers are split ({costs} a batch)"
        return f"{name}: {how}: split, it would exchange {values} a batch instead of {costs}"


def explained(choices: list[LayerChoice]) -> list[str]:
    """Return a line for each layer."""
    first = next((number for number, choice in enumerate(choices) if choice.ways > 1), len(choices))
    return [choice.text(number > first) for number, choice in enumerate(choices)]


def choose(profile: Profile, machines: int) -> list[LayerChoice]:
    """Return the choice for each layer with parameters, on this number of machines."""
    return [_choice(profile, unit, machines) for unit in profile.units if unit.parameter_bytes]


def _choice(profile: Profile, unit: Unit, machines: int) -> LayerChoice:
    inputs = sum(value.forward_bytes for value in profile.values if unit.name in value.readers)
    outputs = sum(value.forward_bytes for value in profile.made_by(unit.name)) or unit.activation_bytes
    data_bytes = 2.0 * (machines - 1) * unit.parameter_bytes
    model_bytes = 2.0 * (machines - 1) * (inputs + outputs / machines)
    splits = unit.what in SPLITTABLE and bool(unit.layer) and model_bytes < data_bytes
    return LayerChoice(unit, machines if splits else 1, data_bytes, model_bytes)


def refused(choice: LayerChoice, obstacle: str) -> LayerChoice:
    """Return the choice for a layer that cannot be split, for this reason."""
    return choice._replace(ways=1, obstacle=obstacle)


def has_data_parallel_stage(choices: list[LayerChoice]) -> bool:
    """Return True if layers come before the first one that is split: they are a stage of their own."""
    return bool(choices) and choices[0].ways == 1 and any(choice.ways > 1 for choice in choices)
