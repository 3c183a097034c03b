"""Train a cut model in one process, by a schedule table or at once: machines are coroutines with links in memory."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rainband.model_parallel.execution.engine import run_actions
from rainband.model_parallel.execution.fragment_run import FragmentMessage, FragmentRun
from rainband.model_parallel.execution.microbatch_run import Microbatch, MicrobatchRun, ReplicaLinks, TimeShares
from rainband.model_parallel.execution.stage import AtVersion, Stage
from rainband.model_parallel.execution.versions import MakeOptimizer
from rainband.model_parallel.graph.fragments import FragmentLayout, as_module, by_level, by_stage
from rainband.model_parallel.graph.graph import Cut
from rainband.model_parallel.graph.split_loss import LossMicrobatch
from rainband.model_parallel.schedules.check import check
from rainband.model_parallel.schedules.table import Action, Table
from rainband.protocol.peer_inbox import Arrival, Inbox, Tag
from rainband.protocol.steps import Steps


class MemoryNetwork:
    """The inboxes of machines in one process; `sent` lists the messages: source, destination, tag."""

    def __init__(self, size: int, on_send: Callable[[int, int, Tag, Any], None] | None = None) -> None:
        self.inboxes = [Inbox() for _ in range(size)]
        for inbox in self.inboxes:
            for machine in range(size):
                inbox.opened(machine)
        self.sent: list[tuple[int, int, Tag]] = []
        self.on_send = on_send

    def num_values(self) -> int:
        """Return how many values and gradients went from one machine to another."""
        return sum(source != to and tag[-2] in ("value", "gradient") for source, to, tag in self.sent)


class MemoryPeers:
    """The links of one machine to the others of its process."""

    def __init__(self, network: MemoryNetwork, machine: int) -> None:
        self.network, self.machine = network, machine

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        network = self.network
        network.sent.append((self.machine, to, tag))
        if network.on_send is not None:
            network.on_send(self.machine, to, tag, payload)
        copied = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), payload)
        network.inboxes[to].arrived(self.machine, tag, copied)

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.network.inboxes[self.machine].ask(source, tag)


def run_together(machines: Sequence[Coroutine[Any, Any, Any]], order: Sequence[int] | None = None) -> list[Any]:
    """Advance coroutines in turn, each until it has to wait, until all are done; return their results.

    Raises RuntimeError, which names them, if all wait for each other. `order`: of the turns.
    """
    workers = [Steps(machine) for machine in machines]
    turns = range(len(workers)) if order is None else order
    try:
        while sum(workers[number].advance() for number in turns):  # `any` would stop at the first
            pass
        waiting = {number: worker.needed for number, worker in enumerate(workers) if not worker.over}
        if waiting:
            numbers = ", ".join(map(str, waiting))
            raise RuntimeError(f"machines {numbers} wait for each other: {list(waiting.values())}.")
    finally:
        for worker in workers:
            worker.close()
    return [worker.result for worker in workers]


class Partitioned:
    """A cut model on several machines, which computes what the whole module computes, one batch at a time.

    `messages` are those of the last pass.
    """

    def __init__(self, cut: Cut, placement: Mapping[str, int]) -> None:
        self.cut = cut
        self.layout = by_level(cut, placement)
        machines = sorted({self.layout.answer_machine, *self.layout.machines()})
        self.runs = {machine: FragmentRun(cut, self.layout, machine) for machine in machines}
        self.messages: list[FragmentMessage] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's answer, without gradients."""
        self._pass(args, kwargs, lambda outputs: torch.zeros(()), backward=False)
        with torch.no_grad():
            return self.cut.answer(self.runs[self.layout.answer_machine].outputs())

    def loss_and_gradients(
        self, loss: Callable[[Any], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Return the loss of the answer, and add the gradients to those of the parameters."""
        found: list[Tensor] = []

        def loss_of(outputs: Mapping[str, Any]) -> Tensor:
            found.append(loss(self.cut.answer(outputs)))
            return found[0]

        self._pass(args, kwargs or {}, loss_of, backward=True)
        return found[0].detach()

    def _pass(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: Callable[[Mapping[str, Any]], Tensor],
        *,
        backward: bool,
    ) -> None:
        self.messages = []
        network = MemoryNetwork(max(self.runs) + 1, self._note)
        microbatch = Microbatch((0,), self.cut.bind(args, kwargs), loss, 1.0, None, goes_back=backward)
        run_together([self._machine(network, machine, microbatch) for machine in self.runs])

    async def _machine(self, network: MemoryNetwork, machine: int, microbatch: Microbatch) -> None:
        links = ReplicaLinks(MemoryPeers(network, machine), machine, len(network.inboxes))
        fragments = self.runs[machine]
        run = MicrobatchRun(fragments, links, lambda number: number, microbatch, no_shares(self.layout))
        await run.forward(fragments.mine)
        if microbatch.goes_back:
            await run.backward(fragments.mine)

    def _note(self, source: int, to: int, tag: Tag, payload: Any) -> None:
        kind, value = tag[-2:]
        if kind == "value":
            pytree_, wants = payload
            self.messages.append(FragmentMessage("value", str(value), source, to, pytree_, tuple(wants)))
        else:
            self.messages.append(FragmentMessage("gradient", str(value), source, to, payload))


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
        """`stages`: unit -> stage, from a placement; `optimizer` gets the parameters of one stage at a time."""
        check(table)
        self.cut, self.table = cut, table
        self.layout = by_stage(cut, stages)
        if len(self.layout.fragments) != table.num_stages:
            raise ValueError(
                f"the placement has {len(self.layout.fragments)} stages with units and the schedule {table.name} has "
                f"{table.num_stages}: they must be equal."
            )
        _refuse_shared_memory(cut)
        self.users = _users(cut, [fragment.nodes for fragment in self.layout.fragments])
        self._refuse_ties_without_flush()
        self.stages: dict[tuple[int, int], Stage] = {}  # (machine, stage)
        for number, fragment in enumerate(self.layout.fragments):
            module = as_module(cut, fragment)
            for replica, machine in enumerate(table.machines[number]):
                own = [] if replica else [n for n, p in module.named_parameters() if self.users[id(p)][0] == number]
                self.stages[machine, number] = Stage(
                    number, {number: module}, optimizer, own=own, replica=replica, seed=seed, recompute=recompute
                )
        self.sent = 0
        self.played = 0

    def run(self, microbatches: Sequence[LossMicrobatch]) -> list[float]:
        """Train with these microbatches, in the table's order; return their losses. The module has the newest values.

        Every run begins and ends with an empty pipeline, and continues from the one before.
        """
        if len(microbatches) != self.table.num_microbatches:
            raise ValueError(
                f"the schedule has {self.table.num_microbatches} microbatches, and {len(microbatches)} were given."
            )
        for stage in self.stages.values():
            stage.begin(self.played)
        self.played += len(microbatches)
        network = MemoryNetwork(len(self.table.rows))
        machines = [_TableMachine(self, number, network, microbatches) for number in range(len(self.table.rows))]
        run_together([run_actions(self.table.rows[machine.number], machine) for machine in machines])
        self.sent = network.num_values()
        losses = {number: loss for machine in machines for number, loss in machine.losses.items()}
        return [losses[number] for number in range(len(microbatches))]

    def sharing(self, stage: int) -> list[int]:
        """Return the other stages that use a parameter of this one."""
        return sorted({other for stages in self.users.values() if stage in stages for other in stages} - {stage})

    def _refuse_ties_without_flush(self) -> None:
        tied = [stages for stages in self.users.values() if len(stages) > 1]
        if tied and self.table.name not in ("gpipe", "one_f_one_b", "interleaved"):
            raise ValueError(
                f"a parameter is used in stages {tied[0]}, which {self.table.name} updates at different times: put its "
                "units into one stage, or use a schedule that flushes (gpipe, one_f_one_b, interleaved)."
            )

    def _module(self, stage: int) -> Any:
        return self.stages[self.table.machines[stage][0], stage].modules[stage]

    def with_gradients(self, stage: int, update: int) -> list[int]:
        """Return the machines that have microbatches of an update of a stage."""
        microbatches = self.table.microbatches_of(stage, update)
        return list(dict.fromkeys(self.table.machine_of(stage, microbatch) for microbatch in microbatches))

    def summed(self, stage: int, totals: Mapping[tuple[int, int], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the gradients of a stage's update from those of (stage, machine): replicas and shared parameters."""
        sums = _added([total for (number, _), total in totals.items() if number == stage])
        for name, parameter in self._module(stage).named_parameters():
            for other in self.users[id(parameter)]:
                if other != stage:
                    (theirs,) = [n for n, p in self._module(other).named_parameters() if p is parameter]
                    shared = [total for (number, _), total in totals.items() if number == other]
                    sums = _added([sums, *({name: total[theirs]} for total in shared if theirs in total)])
        return sums


class _TableMachine:
    """One machine of a table."""

    def __init__(
        self, pipeline: Pipeline, number: int, network: MemoryNetwork, microbatches: Sequence[LossMicrobatch]
    ) -> None:
        self.pipeline, self.number, self.microbatches = pipeline, number, microbatches
        self.table, self.layout = pipeline.table, pipeline.layout
        self.links = ReplicaLinks(MemoryPeers(network, number), number, len(self.table.rows))
        self.runs: dict[tuple[int, int], MicrobatchRun] = {}  # (stage, microbatch)
        self.left: dict[tuple[int, int], int] = {}  # (stage, update) -> backwards of this machine not done yet
        self.losses: dict[int, float] = {}
        self.position: dict[tuple[int, str, int], int] = {
            action[:3]: position for position, action in enumerate(self.table.rows[number])
        }

    def fragments(self, action: Action) -> list[int]:
        return [action.stage]

    def run_of(self, action: Action) -> MicrobatchRun:
        key = action.stage, action.microbatch
        if key not in self.runs:
            self.runs[key] = self._start(action)
        return self.runs[key]

    def _start(self, action: Action) -> MicrobatchRun:
        microbatch, cut = self.microbatches[action.microbatch], self.pipeline.cut
        update = action.microbatch // self.table.microbatches_per_update[action.stage]
        together = self.table.microbatches_of(action.stage, update)
        weight = microbatch.samples / sum(self.microbatches[number].samples for number in together)
        stage = self.pipeline.stages[self.number, action.stage]
        compute = AtVersion(stage, action.microbatch, action.version, update, weight, self.table.stash)
        return MicrobatchRun(
            FragmentRun(cut, self.layout, action.stage, stage.modules, compute),
            self.links,
            lambda stage: self.table.machine_of(stage, action.microbatch),
            Microbatch(
                (action.microbatch,),
                cut.bind(microbatch.args, microbatch.kwargs),
                lambda outputs: microbatch.loss(cut.answer(outputs)),
                1.0,
                None,
            ),
            no_shares(self.layout),
        )

    def finish(self, action: Action, run: MicrobatchRun) -> None:
        stage, microbatch = action.stage, action.microbatch
        del self.runs[stage, microbatch]
        if stage == self.layout.answer_fragment:
            self.losses[microbatch] = run.loss
        update = microbatch // self.table.microbatches_per_update[stage]
        own = [m for m in self.table.microbatches_of(stage, update) if self.table.machine_of(stage, m) == self.number]
        left = self.left[stage, update] = self.left.get((stage, update), len(own)) - 1
        if not left:  # every machine that needs this sum gets it before any update waits for others
            total = self.pipeline.stages[self.number, stage].totals.pop(update)
            for reader in [stage, *self.pipeline.sharing(stage)]:
                for machine in self.table.machines[reader]:
                    self.links.send(machine, (reader, update, "total", stage), total)
        self.pipeline.stages[self.number, stage].versions.release(self._later(action))

    async def update(self, action: Action) -> None:
        stage, update = self.pipeline.stages[self.number, action.stage], action.microbatch
        totals = {}
        for other in [action.stage, *self.pipeline.sharing(action.stage)]:
            for machine in self.pipeline.with_gradients(other, update):
                totals[other, machine] = await self.links.receive(machine, (action.stage, update, "total", other))
        later = self._later(action)
        stage.update(self.pipeline.summed(action.stage, totals), later, self.table.stash)
        stage.versions.release(later)

    def _later(self, action: Action) -> set[int]:
        return self.table.later_versions(self.number, self.position[action[:3]])


def no_shares(layout: FragmentLayout) -> TimeShares:
    """Return shares of a gradient's time for work that takes none, as in one process or for an evaluation."""
    none = dict.fromkeys(range(len(layout.fragments)), 0.0)
    return TimeShares(none, none)


def _refuse_shared_memory(cut: Cut) -> None:
    """Refuse two parameters over one memory: the user sees one value, and stages would give each its own."""
    seen: dict[tuple[str, int], str] = {}
    for name, parameter in cut.module.named_parameters():
        if parameter.numel():
            first = seen.setdefault((str(parameter.device), parameter.data_ptr()), name)
            if first != name:
                raise ValueError(
                    f"'{first}' and '{name}' are two objects over the same memory: assign one Parameter to both, or "
                    "give one a copy, p.data = p.data.clone()."
                )


def _users(cut: Cut, nodes: Sequence[Sequence[str]]) -> dict[int, list[int]]:
    """Return the stages that use each parameter, by its id."""
    users: dict[int, list[int]] = {}
    for number, names in enumerate(nodes):
        for key in {id(parameter) for parameter in cut.parameters_of(names).values()}:
            users.setdefault(key, []).append(number)
    return users


def _added(totals: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sums by name, in the order given; the arguments stay as they are."""
    sums: dict[str, Tensor] = {}
    for total in totals:
        for name, gradient in total.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
    return sums
