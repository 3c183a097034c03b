"""One worker's share of a model that a team computes together: its fragments, its parameters, what it has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from rainband.model.flat_parameters import Flat
from rainband.model_parallel.execution.fragment_run import FragmentRun
from rainband.model_parallel.execution.init_parameters import fill
from rainband.model_parallel.execution.microbatch_run import Shares
from rainband.model_parallel.graph.eval_graph import cut_for_evaluation, placed_alike
from rainband.model_parallel.graph.fragments import (
    LEVELS,
    FragmentLayout,
    by_level,
    by_stage,
    by_stage_and_level,
    dealt,
)
from rainband.model_parallel.graph.split_loss import cut_task
from rainband.model_parallel.placement.stage_plan import machine_of

if TYPE_CHECKING:
    from rainband.model_parallel.graph.graph import Cut
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.model_parallel.schedules.table import Action
    from rainband.tasks.task import Data, Task


@dataclass(frozen=True)
class Answering:
    """With what one machine computes its part of the model's answer."""

    cut: Cut
    layout: FragmentLayout
    machine: int
    modules: Mapping[int, fx.GraphModule]

    def part(self) -> FragmentRun:
        return FragmentRun(self.cut, self.layout, self.machine, self.modules)

    @property
    def shares(self) -> Shares:
        """Answers take no time of training."""
        return Shares(dict.fromkeys(range(len(self.layout.fragments)), 0.0), {})


@dataclass(frozen=True)
class Tie:
    """A parameter that several machines use: the first of them holds it, and gives it to the others for each batch."""

    parameter: nn.Parameter
    owner: int
    others: tuple[int, ...]


class Submodel:
    """What one machine of a plan holds and computes."""

    def __init__(self, task: Task, model: nn.Module, data: Data, plan: StagePlan, place: int) -> None:
        """`place`: of the worker in its team; where a stage has no replicas, that is its machine in the plan."""
        self.plan = plan
        self.place = place
        self.machine, self.replica = plan.seat(place)
        self.model = model
        self.cut, args, kwargs = cut_task(task, model, data, plan.example_size)
        plan.check(self.cut.units)
        self.layout = layout_of(self.cut, plan, plan.plan.stage_of())
        evaluation = cut_for_evaluation(model, self.cut, args, kwargs)  # now: later nobody has the whole model
        fill(model, self.cut, self.layout, self.machine, plan.seed, None if evaluation is None else evaluation.module)
        self.first = FragmentRun(self.cut, self.layout, self.machine)
        self.modules = self.first.modules
        self._trained = Answering(self.cut, self.layout, self.machine, self.modules)
        self._evaluated = self._trained if evaluation is None else self._for_evaluation(evaluation)
        self.module = nn.ModuleList(self.modules.values())  # what is computed here; its buffers are ours
        users = _users(self.cut, self.layout)
        self.owner = {id(p): min(users.get(id(p), {0})) for p in model.parameters()}
        self.ties = [
            Tie(p, min(users[id(p)]), tuple(sorted(users[id(p)])[1:]))
            for p in model.parameters()
            if len(users.get(id(p), ())) > 1
        ]
        self.shares = _shares(self.layout, plan)

    def flat(self, groups: Sequence[Mapping[str, Any]]) -> Flat:
        """Put the parameters that are held here in one memory, and give back that of the others."""
        flat = Flat(self.model, groups, self.owner, self.machine)
        needed = {id(p) for p in self.module.parameters()} | {id(flat.parameters[number]) for number in flat.own}
        for parameter in self.model.parameters():
            if id(parameter) not in needed and not parameter.is_meta:
                parameter.data = parameter.data.new_empty(0)
        return flat

    def answers(self, training: bool) -> Answering:
        """With what the model answers: for evaluation that may be a graph of its own."""
        return self._trained if training else self._evaluated

    def _for_evaluation(self, evaluation: Cut) -> Answering:
        stages = self.plan.plan.stage_of()
        placed = placed_alike(evaluation, self.cut, stages, self.plan.plan.kind == "pipeline")
        layout = layout_of(evaluation, self.plan, placed)
        return Answering(evaluation, layout, self.machine, FragmentRun(evaluation, layout, self.machine).modules)

    def part(self) -> FragmentRun:
        """Room for one more microbatch."""
        return FragmentRun(self.cut, self.layout, self.machine, self.modules)

    def fragments(self, action: Action) -> list[int]:
        """What an action runs: one stage; in a partition everything that is here."""
        if self.plan.plan.kind == "partition":
            return self.first.mine
        if any(stage.split for stage in self.plan.plan.stages):
            return [index for index in self.first.mine if self.layout.fragments[index].level // LEVELS == action.stage]
        return [action.stage]

    def held(self) -> dict[str, Tensor]:
        """What is saved from here: parameters and buffers under the model's own names, each once."""
        if self.replica:
            return {}
        parameters = {name: p.data for name, p in self.model.named_parameters() if self.owner[id(p)] == self.machine}
        return parameters | {name: self.model.get_buffer(name) for name in self._buffers()}

    def _buffers(self) -> list[str]:
        """Buffers that are used here; those that nobody uses are saved by the first machine."""
        mine = {id(buffer) for buffer in self.module.buffers()}
        used = {id(buffer) for buffer in self.cut.buffers_of(tuple(self.cut.nodes))}
        saved = self.model.state_dict(keep_vars=True)
        return [
            name
            for name, buffer in self.model.named_buffers()
            if name in saved and (id(buffer) in mine or (self.machine == 0 and id(buffer) not in used))
        ]


def layout_of(cut: Cut, plan: StagePlan, stages: Mapping[str, int]) -> FragmentLayout:
    if plan.plan.kind == "partition":
        return by_level(cut, stages)
    if any(stage.split for stage in plan.plan.stages):
        return by_stage_and_level(cut, stages, machine_of(plan.plan))
    return dealt(by_stage(cut, stages), len(plan.workers))


def _users(cut: Cut, layout: FragmentLayout) -> dict[int, set[int]]:
    """Parameter (its id) -> the machines that use it."""
    users: dict[int, set[int]] = {}
    for fragment in layout.fragments:
        for parameter in cut.parameters_of(fragment.nodes).values():
            users.setdefault(id(parameter), set()).add(fragment.machine)
    return users


def _shares(layout: FragmentLayout, plan: StagePlan) -> Shares:
    """Each fragment's share of the time of a whole gradient, as it was measured, or by the number of its nodes."""
    units = plan.profile.units if plan.profile is not None else ()
    forward_s, backward_s = {u.name: u.forward_s for u in units}, {u.name: u.backward_s for u in units}
    whole = sum(unit.seconds for unit in units)
    count = sum(len(fragment.nodes) for fragment in layout.fragments)

    def share(times: Mapping[str, float], nodes: Sequence[str], part: float) -> float:
        return sum(times.get(n, 0.0) for n in nodes) / whole if whole else part * len(nodes) / count

    fragments = list(enumerate(layout.fragments))
    return Shares(
        {index: share(forward_s, fragment.nodes, 1 / 3) for index, fragment in fragments},
        {index: share(backward_s, fragment.nodes, 2 / 3) for index, fragment in fragments},
    )


@torch.no_grad()
def same_on_all(tensor: Tensor, values: Tensor) -> None:
    """Take over what its owner sends of a parameter that is held elsewhere."""
    if tensor.shape != values.shape:
        raise ValueError(f"a parameter of shape {tuple(tensor.shape)} came with shape {tuple(values.shape)}.")
    tensor.data.copy_(values)
