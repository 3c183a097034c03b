"""The plan of a run: made from what the first worker brings, or for own loops when the first of them draws a batch."""

from __future__ import annotations

import msgspec

from rainband.coordinator.state import Facts, Out, WorkerState
from rainband.protocol import events
from rainband.protocol.data_plan import MAX_PORTION_BATCHES, Plan, choose_portion_batches
from rainband.protocol.layout import cut, deal
from rainband.protocol.messages import Assign, Bye, Dataset, Join, Peer, Planned, Welcome

OPEN_ENDED = 1 << 20  # epochs in the plan of loops that have not said how many passes they make


class Planning:
    """Makes the plan, once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def make(self, join: Join, now: float) -> list[Out]:
        """The plan and the blocks; every server is told its own."""
        facts, settings = self.facts, self.facts.settings
        facts.join = join
        # An own loop tells what it draws from when it draws; until then there is one batch that nobody is given.
        data = Dataset("", 1, 1, 1) if join.own_loop else _data_of(join)
        facts.plan = self._plan_for(join, data)
        blocks = cut(join.layout, max(1, settings.num_servers))
        dealt = deal(blocks, settings.num_servers) if settings.num_servers else ()
        owners = {block: server for server, mine in enumerate(dealt) for block in mine}
        facts.welcome = Welcome(
            plan=facts.plan,
            servers=tuple(facts.servers[i].address for i in sorted(facts.servers)),
            owners=tuple(owners[block.index] for block in blocks) if dealt else (),
            blocks=blocks,
        )
        if facts.has_data():
            self._note(now)
        facts.phase = "loading" if dealt else "running"
        return [
            Out(
                facts.servers[server].peer,
                Assign(
                    facts.plan,
                    tuple(blocks[b] for b in mine),
                    join.layout.groups,
                    settings.num_replicas,
                    optimizer=join.optimizer,
                ),
            )
            for server, mine in enumerate(dealt)
        ]

    def _plan_for(self, join: Join, data: Dataset) -> Plan:
        num_workers = self.facts.settings.num_replicas
        per_epoch = -(-data.num_samples // data.batch_size)
        columns = min(num_workers, per_epoch) if join.rounds else 0
        return Plan(
            fingerprint=data.fingerprint,
            layout=join.layout.digest(),
            num_samples=data.num_samples,
            batch_size=data.batch_size,
            epochs=1 if join.led else data.epochs or OPEN_ENDED,
            seed=self.facts.settings.seed,
            portion_batches=_portion_batches(join, columns, per_epoch, num_workers, self.facts.settings.team_size),
            cell_batches=join.cell_batches,
            columns=columns,
            led=join.led,
        )

    def _note(self, now: float) -> None:
        facts = self.facts
        plan = facts.plan
        assert plan and facts.join and facts.welcome
        known = facts.leader is None and (facts.dataset is None or facts.dataset.epochs > 0)  # or it is told as 0
        facts.events.append(
            events.PlanMade(
                at_s=now,
                num_samples=plan.num_samples,
                num_batches=plan.num_batches if known else 0,
                num_portions=plan.num_portions if known else 0,
                num_parameters=sum(p.numel for p in facts.join.layout.parameters),
                num_blocks=len(facts.welcome.blocks),
                batch_size=plan.batch_size,
                epochs=plan.epochs if known else 0,
            )
        )

    # ---- own loops: their data comes later ---------------------------------------------------------------------------

    def draws_from(self, worker: WorkerState, dataset: Dataset, now: float) -> list[Out]:
        """A loop asks for its first batch. The first to say what it draws from makes the plan."""
        facts = self.facts
        assert facts.join and facts.plan and facts.welcome
        if facts.dataset is not None:
            if dataset != facts.dataset:
                what = f"draws from {_described(dataset)}, the others from {_described(facts.dataset)}"
                return [Out(worker.peer, Bye(f"{worker.peer} {what}."))]
            return [] if facts.planning else [Out(worker.peer, Planned(facts.plan))]
        facts.dataset = dataset
        facts.plan = self._plan_for(facts.join, dataset)
        facts.welcome = msgspec.structs.replace(facts.welcome, plan=facts.plan)
        self._note(now)
        facts.planning = {index for index, server in facts.servers.items() if server.peer.role == "server"}
        if not facts.planning:
            return self._tell()
        return [Out(facts.servers[index].peer, Planned(facts.plan)) for index in sorted(facts.planning)]

    def server_knows(self, server: Peer) -> list[Out]:
        self.facts.planning.discard(server.index)
        return [] if self.facts.planning else self._tell()

    def _tell(self) -> list[Out]:
        assert self.facts.plan
        return [Out(w.peer, Planned(self.facts.plan)) for w in self.facts.connected()]


def _data_of(join: Join) -> Dataset:
    return Dataset(join.fingerprint, join.num_samples, join.batch_size, join.epochs)


def _portion_batches(join: Join, columns: int, per_epoch: int, num_workers: int, team_size: int) -> int:
    if join.led:
        return join.cell_batches  # a portion is what is handed out: one cell
    if columns:
        return 16
    chosen = choose_portion_batches(per_epoch, num_workers, join.cell_batches)
    if num_workers > 1 or team_size == 1:
        return chosen
    # Long enough that the next lease is there before the last batch of this one enters a pipeline.
    cells = min(4 * team_size, MAX_PORTION_BATCHES // join.cell_batches)
    return max(chosen, cells * join.cell_batches)


def _described(dataset: Dataset) -> str:
    passes = f"{dataset.epochs} passes over " if dataset.epochs else ""
    return f"{passes}{dataset.num_samples} samples {dataset.fingerprint} in batches of {dataset.batch_size}"
