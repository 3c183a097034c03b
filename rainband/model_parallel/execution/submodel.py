"""One worker's submodel of a model that a replica computes together: its fragments, parameters and ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from rainband.model.flat_parameters import Flat
from rainband.model_parallel.execution.fragment_run import FragmentRun, Recomputing
from rainband.model_parallel.execution.init_parameters import init_parameters
from rainband.model_parallel.execution.microbatch_run import TimeShares
from rainband.model_parallel.graph.eval_graph import cut_for_evaluation, placed_alike
from rainband.model_parallel.graph.fragments import (
    LEVELS,
    FragmentLayout,
    by_level,
    by_stage,
    by_stage_and_level,
    dealt,
)
from rainband.model_parallel.graph.split_loss import LossCall, cut_task, split_layers
from rainband.model_parallel.placement.stage_plan import machine_of

if TYPE_CHECKING:
    from rainband.model_parallel.graph.graph import Cut
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.model_parallel.schedules.table import Action
    from rainband.tasks.task import Data, Task


@dataclass(frozen=True)
class AnswerGraph:
    """The graph with which one machine computes its part of the model's answer."""

    cut: Cut
    layout: FragmentLayout
    machine: int
    modules: Mapping[int, fx.GraphModule]

    def new_run(self) -> FragmentRun:
        return FragmentRun(self.cut, self.layout, self.machine, self.modules)

    @property
    def shares(self) -> TimeShares:
        """Return no time: an evaluation is not part of training."""
        none = dict.fromkeys(range(len(self.layout.fragments)), 0.0)
        return TimeShares(none, none)


@dataclass(frozen=True)
class Tie:
    """A parameter that several workers use. The first of them holds it and sends it to the others for each batch.

    They have different stages, tiles of one convolution, or are replicas of one stage.
    """

    parameter: nn.Parameter
    owner: int  # rank
    others: tuple[int, ...]


class Submodel:
    """The part of a model that one machine of a placement holds and computes."""

    def __init__(self, task: Task, model: nn.Module, data: Data, plan: StagePlan, rank: int) -> None:
        """`rank`: of the worker in its replica; where no stage has replicas, that is its machine."""
        self.plan, self.rank = plan, rank
        self.machine, self.replica = plan.machine_and_replica(rank)
        self.model = model
        self.whole_tensors = split_layers(task, model, data, plan.plan.splits)
        self.cut, args, kwargs = cut_task(task, model, data, plan.example_size)
        plan.check(self.cut.units)
        self.layout = layout_of(self.cut, plan, plan.plan.stage_of())
        evaluation = cut_for_evaluation(model, self.cut, args, kwargs)  # now: later no worker has the whole model
        init_parameters(
            model, self.cut, self.layout, self.machine, plan.seed, None if evaluation is None else evaluation.module
        )
        self.first = FragmentRun(self.cut, self.layout, self.machine)
        self.modules = self.first.modules
        self._trained = AnswerGraph(self.cut, self.layout, self.machine, self.modules)
        self._evaluated = self._trained if evaluation is None else self._for_evaluation(evaluation)
        self.module = nn.ModuleList(self.modules.values())  # its buffers are those saved from here
        users = _users(self.cut, self.layout, plan)
        self.owner = {id(p): min(users.get(id(p), {0})) for p in model.parameters()}
        self.ties = [
            Tie(p, min(users[id(p)]), tuple(sorted(users[id(p)])[1:]))
            for p in model.parameters()
            if len(users.get(id(p), ())) > 1
        ]
        self.shares = _time_shares(self.layout, plan)

    def flat(self, groups: Sequence[Mapping[str, Any]]) -> Flat:
        """Put the parameters that are held here into one memory, and free that of the others."""
        flat = Flat(self.model, groups, self.owner, self.rank)
        needed = {id(p) for p in self.module.parameters()} | {id(flat.parameters[number]) for number in flat.own}
        for parameter in self.model.parameters():
            if id(parameter) not in needed and not parameter.is_meta:
                parameter.data = parameter.data.new_empty(0)
        return flat

    def answers(self, training: bool) -> AnswerGraph:
        """Return the graph that computes answers: evaluation may have one of its own."""
        return self._trained if training else self._evaluated

    def _for_evaluation(self, evaluation: Cut) -> AnswerGraph:
        stages = self.plan.plan.stage_of()
        placed = placed_alike(evaluation, self.cut, stages, self.plan.plan.kind == "pipeline")
        layout = layout_of(evaluation, self.plan, placed)
        return AnswerGraph(evaluation, layout, self.machine, FragmentRun(evaluation, layout, self.machine).modules)

    def loss_call(self, task: Task, batch: Any) -> LossCall:
        """Return the loss of a microbatch, as this machine needs it."""
        return LossCall(task, batch, gets_answer=self.machine == self.layout.answer_machine)

    def new_run(self) -> FragmentRun:
        """Return a run for one more microbatch at the same time."""
        compute = Recomputing(self.modules) if self.plan.recompute else None
        return FragmentRun(self.cut, self.layout, self.machine, self.modules, compute)

    def fragments(self, action: Action) -> list[int]:
        """Return the fragments of an action: those of a stage, or in a partition all that are here."""
        if self.plan.plan.kind == "partition":
            return self.first.mine
        if any(stage.split for stage in self.plan.plan.stages):
            return [index for index in self.first.mine if self.layout.fragments[index].level // LEVELS == action.stage]
        return [action.stage]

    def held(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are saved from here, under the model's names, each once."""
        return {} if self.replica else self.held_parameters() | self.buffers()

    def held_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that are saved from here, under the model's names, each once."""
        if self.replica:
            return {}
        return {name: p.data for name, p in self.model.named_parameters() if self.owner[id(p)] == self.rank}

    def used(self) -> set[str]:
        """Return the names of the parameters that have values here, also those that another worker holds."""
        return {name for name, p in self.model.named_parameters() if p.numel() and not p.is_meta}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are used here; on the first machine also those that no machine uses."""
        mine = {id(buffer) for buffer in self.module.buffers()}
        used = {id(buffer) for buffer in self.cut.buffers_of(tuple(self.cut.nodes))}
        saved = self.model.state_dict(keep_vars=True)
        return {
            name: buffer
            for name, buffer in self.model.named_buffers()
            if name in saved and (id(buffer) in mine or (self.machine == 0 and id(buffer) not in used))
        }


def layout_of(cut: Cut, plan: StagePlan, stages: Mapping[str, int]) -> FragmentLayout:
    if plan.plan.kind == "partition":
        return by_level(cut, stages)
    if any(stage.split for stage in plan.plan.stages):
        return by_stage_and_level(cut, stages, machine_of(plan.plan))
    return dealt(by_stage(cut, stages), len(plan.workers))


def _users(cut: Cut, layout: FragmentLayout, plan: StagePlan) -> dict[int, set[int]]:
    """Return the ranks of the workers that use each parameter, by its id."""
    users: dict[int, set[int]] = {}
    for fragment in layout.fragments:
        for parameter in cut.parameters_of(fragment.nodes).values():
            users.setdefault(id(parameter), set()).update(plan.ranks_of(fragment.machine))
    return users


def _time_shares(layout: FragmentLayout, plan: StagePlan) -> TimeShares:
    """Return each fragment's fraction of a whole gradient's time, as measured, or by its number of nodes."""
    units = plan.profile.units if plan.profile is not None else ()
    forward_s, backward_s = {u.name: u.forward_s for u in units}, {u.name: u.backward_s for u in units}
    whole = sum(unit.seconds for unit in units)
    count = sum(len(fragment.nodes) for fragment in layout.fragments)

    def fraction(times: Mapping[str, float], nodes: Sequence[str], usual: float) -> float:
        return sum(times.get(n, 0.0) for n in nodes) / whole if whole else usual * len(nodes) / count

    fragments = list(enumerate(layout.fragments))
    return TimeShares(
        {index: fraction(forward_s, fragment.nodes, 1 / 3) for index, fragment in fragments},
        {index: fraction(backward_s, fragment.nodes, 2 / 3) for index, fragment in fragments},
    )


@torch.no_grad()
def copy_tied(tensor: Tensor, values: Tensor) -> None:
    """Copy the values that the owner of a tied parameter has sent."""
    if tensor.shape != values.shape:
        raise ValueError(f"a parameter of shape {tuple(tensor.shape)} arrived with shape {tuple(values.shape)}.")
    tensor.data.copy_(values)
