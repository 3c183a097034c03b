"""Train a cut model by any schedule table: machines are objects of this process, and take turns in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rainband.pipeline.check import check
from rainband.pipeline.fragments import as_module, by_stage
from rainband.pipeline.graph import Cut
from rainband.pipeline.stage import Stage
from rainband.pipeline.table import Table
from rainband.pipeline.turns import Turns
from rainband.pipeline.versions import MakeOptimizer


@dataclass(frozen=True)
class Micro:
    """A microbatch: the model's inputs, and the mean loss of its answer."""

    args: Sequence[Any]
    loss: Callable[[Any], Tensor]
    samples: int = 1
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Pipeline:
    """The stages of a model, on the machines of a table.

    `sent` counts messages: one for each value, microbatch and other machine that reads it, and one for its gradient.
    """

    def __init__(
        self,
        cut: Cut,
        stages: Mapping[str, int],
        table: Table,
        optimizer: MakeOptimizer,
        *,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        """`stages`: unit -> stage, as a plan says; `optimizer` is called with the parameters of one stage at a time."""
        check(table)
        self.cut, self.table = cut, table
        self.layout = by_stage(cut, stages)
        if len(self.layout.fragments) != table.num_stages:
            raise ValueError(
                f"the plan has {len(self.layout.fragments)} stages with units and the schedule {table.name} has "
                f"{table.num_stages}: make them equal."
            )
        _refuse_shared_memory(cut)
        self.holders = _holders(cut, [fragment.nodes for fragment in self.layout.fragments])
        self._refuse_ties_without_flush()
        self.stages: dict[tuple[int, int], Stage] = {}  # (machine, stage)
        for number, fragment in enumerate(self.layout.fragments):
            module = as_module(cut, fragment)
            for replica, machine in enumerate(table.homes[number]):
                own = [] if replica else [n for n, p in module.named_parameters() if self.holders[id(p)][0] == number]
                self.stages[machine, number] = Stage(
                    number, fragment, module, optimizer, own=own, replica=replica, seed=seed, recompute=recompute
                )
        self.sent = 0
        self.played = 0

    def run(self, micros: Sequence[Micro]) -> list[float]:
        """Play the table with these microbatches; returns their losses. The module has the newest parameters.

        Every run begins and ends with an empty pipeline, and goes on where the one before it ended.
        """
        if len(micros) != self.table.num_micros:
            raise ValueError(f"the schedule has {self.table.num_micros} microbatches and was given {len(micros)}.")
        for stage in self.stages.values():
            stage.begin(self.played)
        self.played += len(micros)
        turns = Turns(self, micros)
        turns.play()
        self.sent = turns.sent
        return turns.losses

    def sharing(self, stage: int) -> list[int]:
        """Other stages that use a parameter of this one."""
        return sorted({other for stages in self.holders.values() if stage in stages for other in stages} - {stage})

    def _refuse_ties_without_flush(self) -> None:
        tied = [stages for stages in self.holders.values() if len(stages) > 1]
        if tied and self.table.name not in ("gpipe", "one_f_one_b", "interleaved"):
            raise ValueError(
                f"a parameter is used in stages {tied[0]}, which {self.table.name} updates at different times: put its "
                "units into one stage, or take a schedule that flushes (gpipe, one_f_one_b, interleaved)."
            )

    def total(self, stage: int, update: int) -> dict[str, Tensor]:
        """The gradients of one update of a stage: summed over replicas, and over stages that share a parameter."""
        sums = _added([self.stages[machine, stage].totals[update] for machine in self._with_gradients(stage, update)])
        module = self.stages[self.table.homes[stage][0], stage].module
        for name, parameter in module.named_parameters():
            for other in self.holders[id(parameter)]:
                if other != stage:
                    (theirs,) = [n for n, p in self._module(other).named_parameters() if p is parameter]
                    shared = [self.stages[m, other].totals[update] for m in self._with_gradients(other, update)]
                    sums = _added([sums, *({name: total[theirs]} for total in shared if theirs in total)])
        return sums

    def _module(self, stage: int) -> Any:
        return self.stages[self.table.homes[stage][0], stage].module

    def _with_gradients(self, stage: int, update: int) -> list[int]:
        machines = [self.table.home(stage, micro) for micro in self.table.micros_of(stage, update)]
        return list(dict.fromkeys(machines))


def _refuse_shared_memory(cut: Cut) -> None:
    """Two objects over one memory are one value to the user; stages would give each its own."""
    seen: dict[tuple[str, int], str] = {}
    for name, parameter in cut.module.named_parameters():
        if parameter.numel():
            first = seen.setdefault((str(parameter.device), parameter.data_ptr()), name)
            if first != name:
                raise ValueError(
                    f"'{first}' and '{name}' are two objects over the same memory: assign one Parameter to both, or "
                    "give one a copy, p.data = p.data.clone()."
                )


def _holders(cut: Cut, nodes: Sequence[Sequence[str]]) -> dict[int, list[int]]:
    """Parameter (its id) -> the stages that use it."""
    holders: dict[int, list[int]] = {}
    for number, names in enumerate(nodes):
        for key in {id(parameter) for parameter in cut.parameters_of(names).values()}:
            holders.setdefault(key, []).append(number)
    return holders


def _added(totals: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums by name, in the order given; nothing that was given is changed."""
    sums: dict[str, Tensor] = {}
    for total in totals:
        for name, gradient in total.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
    return sums
