"""Train a cut model by any schedule table in one process: the machines are coroutines with links through memory."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from torch import Tensor

from rainband.model_parallel.execution.fragment_run import FragmentRun
from rainband.model_parallel.execution.microbatch_run import Microbatch as Task
from rainband.model_parallel.execution.microbatch_run import MicrobatchRun, ReplicaLinks, Shares
from rainband.model_parallel.execution.stage import AtVersion, Stage
from rainband.model_parallel.execution.versions import MakeOptimizer
from rainband.model_parallel.graph.fragments import as_module, by_stage
from rainband.model_parallel.graph.graph import Cut
from rainband.model_parallel.graph.split_loss import LossMicrobatch
from rainband.model_parallel.schedules.check import check
from rainband.model_parallel.schedules.table import Action, Table
from rainband.protocol.peer_inbox import Arrival, Inbox, Tag
from rainband.protocol.steps import Work


class MemoryPeers:
    """The links of one machine to the others of this process; `sent` counts values and gradients."""

    def __init__(self, here: int, inboxes: Sequence[Inbox]) -> None:
        self.here, self.inboxes, self.sent = here, inboxes, 0

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        self.sent += to != self.here and tag[-2] in ("value", "gradient")
        self.inboxes[to].arrived(self.here, tag, payload)

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.inboxes[self.here].ask(source, tag)


def run_together(machines: Sequence[Coroutine[Any, None, None]]) -> None:
    """Let each machine go on as far as it can, in turn, until all are done; raise if all wait."""
    waits: dict[int, Any] = dict.fromkeys(range(len(machines)))
    while waits:
        stuck = True
        for number in list(waits):
            while (wanted := waits[number]) is None or isinstance(wanted, Work) or wanted.ready():
                if isinstance(wanted, Work):
                    wanted.perform()
                stuck = False
                try:
                    waits[number] = machines[number].send(None)
                except StopIteration:
                    del waits[number]
                    break
        if stuck:
            raise RuntimeError(f"machines {', '.join(map(str, waits))} wait for each other.")


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
                    number, {number: module}, optimizer, own=own, replica=replica, seed=seed, recompute=recompute
                )
        self.sent = 0
        self.played = 0

    def run(self, microbatches: Sequence[LossMicrobatch]) -> list[float]:
        """Play the table with these microbatches; returns their losses. The module has the newest parameters.

        Every run begins and ends with an empty pipeline, and goes on where the one before it ended.
        """
        if len(microbatches) != self.table.num_microbatches:
            raise ValueError(
                f"the schedule has {self.table.num_microbatches} microbatches and was given {len(microbatches)}."
            )
        for stage in self.stages.values():
            stage.begin(self.played)
        self.played += len(microbatches)
        inboxes = [Inbox() for _ in self.table.rows]
        for inbox in inboxes:
            for other in range(len(inboxes)):
                inbox.opened(other)
        machines = [
            _Machine(self, number, MemoryPeers(number, inboxes), microbatches) for number in range(len(inboxes))
        ]
        run_together([machine.run() for machine in machines])
        self.sent = sum(machine.peers.sent for machine in machines)
        return [
            next(m.losses[microbatch] for m in machines if microbatch in m.losses)
            for microbatch in range(len(microbatches))
        ]

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

    def _module(self, stage: int) -> Any:
        return self.stages[self.table.homes[stage][0], stage].modules[stage]

    def with_gradients(self, stage: int, update: int) -> list[int]:
        """The machines that have microbatches of an update of a stage."""
        machines = [self.table.home(stage, microbatch) for microbatch in self.table.microbatches_of(stage, update)]
        return list(dict.fromkeys(machines))

    def summed(self, stage: int, totals: Mapping[tuple[int, int], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the gradients of a stage's update from those of (stage, machine): replicas and shared parameters."""
        sums = _added([total for (number, _), total in totals.items() if number == stage])
        for name, parameter in self._module(stage).named_parameters():
            for other in self.holders[id(parameter)]:
                if other != stage:
                    (theirs,) = [n for n, p in self._module(other).named_parameters() if p is parameter]
                    shared = [total for (number, _), total in totals.items() if number == other]
                    sums = _added([sums, *({name: total[theirs]} for total in shared if theirs in total)])
        return sums


class _Machine:
    """One machine of a table: does its row."""

    def __init__(
        self, pipeline: Pipeline, number: int, peers: MemoryPeers, microbatches: Sequence[LossMicrobatch]
    ) -> None:
        self.pipeline, self.number, self.peers, self.microbatches = pipeline, number, peers, microbatches
        self.table, self.layout = pipeline.table, pipeline.layout
        self.links = ReplicaLinks(peers, number, len(self.table.rows))
        self.passages: dict[tuple[int, int], MicrobatchRun] = {}  # (stage, microbatch)
        self.left: dict[tuple[int, int], int] = {}  # (stage, update) -> backwards of this machine still to come
        self.losses: dict[int, float] = {}

    async def run(self) -> None:
        for place, action in enumerate(self.table.rows[self.number]):
            match action.kind:
                case "F":
                    passage = self.passages[action.stage, action.microbatch] = self._passage(action)
                    await passage.forward([action.stage])
                case "B":
                    await self._backward(action)
                case "U":
                    await self._update(action, place)
            self._release(action, place)

    def _passage(self, action: Action) -> MicrobatchRun:
        microbatch, cut = self.microbatches[action.microbatch], self.pipeline.cut
        update = action.microbatch // self.table.microbatches_per_update[action.stage]
        together = self.table.microbatches_of(action.stage, update)
        weight = microbatch.samples / sum(self.microbatches[number].samples for number in together)
        stage = self.pipeline.stages[self.number, action.stage]
        compute = AtVersion(stage, action.microbatch, action.version, update, weight, self.table.stash)
        part = FragmentRun(cut, self.layout, action.stage, stage.modules, compute)
        task = Task(
            (action.microbatch,),
            cut.bind(microbatch.args, microbatch.kwargs),
            lambda outputs: microbatch.loss(cut.answer(outputs)),
            1.0,
            None,
        )
        shares = dict.fromkeys(range(len(self.layout.fragments)), 0.0)
        home = lambda stage: self.table.home(stage, action.microbatch)  # noqa: E731
        return MicrobatchRun(part, self.links, home, task, Shares(shares, shares))

    async def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        passage = self.passages.pop((stage, microbatch))
        await passage.backward([stage])
        if stage == self.layout.answer_fragment:
            self.losses[microbatch] = passage.loss
        update = microbatch // self.table.microbatches_per_update[stage]
        own = [m for m in self.table.microbatches_of(stage, update) if self.table.home(stage, m) == self.number]
        left = self.left[stage, update] = self.left.get((stage, update), len(own)) - 1
        if not left:  # all that need this machine's sum get it, before any update waits for others
            total = self.pipeline.stages[self.number, stage].totals.pop(update)
            for reader in [stage, *self.pipeline.sharing(stage)]:
                for home in self.table.homes[reader]:
                    self.links.send(home, (reader, update, "total", stage), total)

    async def _update(self, action: Action, place: int) -> None:
        stage, update = self.pipeline.stages[self.number, action.stage], action.microbatch
        totals = {}
        for other in [action.stage, *self.pipeline.sharing(action.stage)]:
            for home in self.pipeline.with_gradients(other, update):
                totals[other, home] = await self.links.receive(home, (action.stage, update, "total", other))
        last = self.table.last_use.get((self.number, action.stage, stage.versions.newest), -1)
        stage.update(self.pipeline.summed(action.stage, totals), overwrite=not self.table.stash or last < place)

    def _release(self, action: Action, place: int) -> None:
        """Versions that nobody on this machine needs any more."""
        versions = self.pipeline.stages[self.number, action.stage].versions
        for version in sorted(versions.live):
            last = self.table.last_use.get((self.number, action.stage, version), -1)
            if version != versions.newest and last <= place:
                versions.release(version)


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
