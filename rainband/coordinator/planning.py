"""Makes the data plan of a run, once: when the first worker joins, or when the first custom loop draws a batch."""

from __future__ import annotations

import msgspec

from rainband.coordinator.state import CoordinatorOutput, Phase, RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.data_plan import MAX_PORTION_BATCHES, OPEN_ENDED, DataPlan, choose_portion_batches
from rainband.protocol.layout import Layout, PlacedBlocks, cut, place, place_again
from rainband.protocol.messages import Assign, Dataset, Join, Peer, Planned, Welcome
from rainband.protocol.saved_state import Restore, begun_epochs
from rainband.server import tree

EQUAL_DATA = "The samples must be equal on all workers: seed the random numbers that make them."
NO_DATA = Dataset("", 1, 1, 1)  # of custom loops that have not drawn a batch yet


class Planning:
    """Makes the data plan and cuts the model into blocks."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.first: Dataset | None = None  # the first one of loops that share each batch
        self.placed = PlacedBlocks((), ())

    def make(self, join: Join, now: float) -> list[CoordinatorOutput]:
        """Make the plan and the blocks; assign the blocks to the servers."""
        state, settings = self.state, self.state.settings
        state.join = join
        # A custom loop describes its data at its first batch; until then there is one batch, which is never leased.
        data = NO_DATA if join.custom_loop else _data_of(join)
        state.plan = self._first_plan(join, data)
        placed = self._place(join.layout)
        self.placed = placed
        state.welcome = Welcome(
            plan=state.plan,
            servers=tuple(state.servers[i].address for i in sorted(state.servers)),
            owners=placed.owners,
            blocks=placed.blocks,
            copies=settings.copies,
        )
        if state.has_data():
            self._report(now)
        state.enter(Phase.LOADING if settings.num_servers else Phase.RUNNING)
        return [
            CoordinatorOutput(state.servers[server].peer, self._assignment(server, placed, join))
            for server in range(settings.num_servers)
        ]

    def _assignment(self, server: int, placed: PlacedBlocks, join: Join) -> Assign:
        """Return the blocks that a server owns, or, of an inner server of a tree, all blocks and its parent."""
        state = self.state
        assert state.plan
        owned = Assign(
            state.plan,
            placed.of_server(server),
            join.layout.groups,
            self._num_replicas(join),
            optimizer=join.optimizer,
            restores=state.settings.restore is not None,
        )
        if server < state.settings.num_owners:
            return owned
        parent = tree.parent(server, state.settings.tree_arity)
        address = state.servers[parent].address
        return msgspec.structs.replace(
            owned, blocks=placed.blocks, restores=False, parent=parent, parent_address=address
        )

    def _place(self, layout: Layout) -> PlacedBlocks:
        """Return the blocks and their servers: in a run that continues, those that it had, or parts of them."""
        settings = self.state.settings
        if not settings.num_servers:
            return PlacedBlocks(cut(layout), ())
        if settings.restore is None:
            return place(layout, settings.num_owners)
        edges: list[list[int]] = [[0] for _ in layout.vectors]
        for saved in settings.restore.blocks:
            edges[saved.vector].append(saved.stop)
        return place_again(layout, edges, settings.num_owners)

    def _num_replicas(self, join: Join) -> int:
        """Return the replicas for which update rules are made: rounds stay those with which the run began."""
        settings = self.state.settings
        return settings.restore.num_replicas if settings.restore and join.rounds else settings.num_replicas

    def unlike_checkpoint(self, join: Join, now: float) -> str:
        """Return in what a worker's task differs from that of the checkpoint; "" if it is the same."""
        restore = self.state.settings.restore
        if restore is None:
            return ""
        if join.layout.digest() != restore.layout.digest():
            return _other_model(join.layout, restore.layout)
        return "" if join.custom_loop else self.unlike_data(_data_of(join), now)

    def unlike_data(self, data: Dataset, now: float) -> str:
        """Return in what the data differs from that of the checkpoint; "" if it is the same.

        With --force, other samples are a warning, but not another number of them: it decides which batches there are.
        """
        restore = self.state.settings.restore
        if restore is None or (restore.plan.num_samples, restore.plan.fingerprint) == (NO_DATA.num_samples, ""):
            return ""
        plan = restore.plan
        pairs: dict[str, tuple[object, object]] = {
            "the number of samples": (data.num_samples, plan.num_samples),
            "the batch size": (data.batch_size, plan.batch_size),
            "drop_last": (data.drop_last, plan.drop_last),
        }
        if data.fingerprint and plan.fingerprint:  # one worker alone has nothing to compare
            pairs["the data"] = (data.fingerprint, plan.fingerprint)
        if data.epochs and not plan.coordinated and (beyond := self._beyond(restore, data)):
            return beyond
        differing = {what: sides for what, sides in pairs.items() if sides[0] != sides[1]}
        if restore.force and list(differing) == ["the data"]:
            text = f"continuing although the data is {data.fingerprint}, and there it was {plan.fingerprint}"
            self.state.events.append(events.Warned(at_s=now, text=text))
            return ""
        return "; ".join(f"{what} is {here}, there it was {there}" for what, (here, there) in differing.items())

    def _beyond(self, restore: Restore, data: Dataset) -> str:
        """Return why a run ends before the batches that the checkpoint has; "" if it does not."""
        epochs = begun_epochs(restore.plan, restore.step, restore.blocks)
        if epochs <= data.epochs:
            return ""
        return (
            f"it has {restore.step:,} batches, some of them of epoch {epochs}, and this run is to end after epoch "
            f"{data.epochs}: train for {epochs} epochs or more"
        )

    def _first_plan(self, join: Join, data: Dataset) -> DataPlan:
        """Return the plan; of a loop that continues, the one that its blocks have accepted batches of."""
        restore = self.state.settings.restore
        if restore is not None and join.custom_loop and not join.shares_batches:
            return restore.plan
        return self._plan_for(join, data)

    def _plan_for(self, join: Join, data: Dataset) -> DataPlan:
        restore = self.state.settings.restore
        if restore is not None and (restore.plan.num_samples, restore.plan.batch_size) == (
            data.num_samples,
            data.batch_size,
        ):
            epochs = 1 if join.coordinated else data.epochs or OPEN_ENDED
            return msgspec.structs.replace(restore.plan, epochs=epochs, fingerprint=data.fingerprint)
        num_workers = self.state.settings.num_replicas
        per_epoch = (data.num_samples + (0 if data.drop_last else data.batch_size - 1)) // data.batch_size
        items_per_round = min(num_workers, per_epoch) if join.rounds else 0
        return DataPlan(
            fingerprint=data.fingerprint,
            layout=join.layout.digest(),
            num_samples=data.num_samples,
            batch_size=data.batch_size,
            epochs=1 if join.coordinated else data.epochs or OPEN_ENDED,
            seed=self.state.settings.seed,
            portion_batches=_portion_batches(
                join, items_per_round, per_epoch, num_workers, self.state.settings.workers_per_replica
            ),
            batches_per_item=join.batches_per_item,
            items_per_round=items_per_round,
            drop_last=data.drop_last,
            coordinated=join.coordinated,
        )

    def _report(self, now: float) -> None:
        state = self.state
        plan = state.plan
        assert plan and state.join and state.welcome
        known = state.full_batch is None and (state.dataset is None or state.knows_its_end())
        state.events.append(
            events.PlanMade(
                at_s=now,
                num_samples=plan.samples_per_epoch,
                num_batches=plan.num_batches if known else 0,
                num_portions=plan.num_portions if known else 0,
                num_parameters=sum(p.numel for p in state.join.layout.parameters),
                num_blocks=len(state.welcome.blocks),
                batch_size=plan.batch_size,
                epochs=plan.epochs if known else 0,
                workers_per_replica=state.settings.workers_per_replica,
                server_pairs=self.placed.num_pairs(),
                server_imbalance=self.placed.imbalance(state.settings.num_owners),
            )
        )
        if plan.batch_size > plan.num_samples:
            of_all = f"batches of {plan.batch_size:,} are larger than the data ({plan.num_samples:,} samples)"
            state.events.append(events.Warned(at_s=now, text=f"{of_all}: each pass is one batch"))

    # ---- custom loops: their data is known later ---------------------------------------------------------------------

    def shared(self, worker: WorkerState, dataset: Dataset, now: float) -> None:
        """Take the data of a loop whose workers share each batch; after a second dataset its end is not known."""
        assert self.state.join
        if self.state.dataset is None:
            self.state.dataset = dataset
            self.state.plan = self._plan_for(self.state.join, dataset)
            self._report(now)
            self.first = dataset
        elif worker.described and self.state.dataset.epochs:
            self.state.dataset = msgspec.structs.replace(dataset, epochs=0)
            self._report(now)
        worker.described = True

    def difference(self, worker: WorkerState, dataset: Dataset) -> str:
        """Return why a loop's data does not fit this run; "" if it does."""
        others = self.first or self.state.dataset
        if others is None or dataset == others:
            return ""
        advice = f" {EQUAL_DATA}" if dataset.fingerprint != others.fingerprint else ""
        return f"{worker.peer} loads {_described(dataset)}, the other workers {_described(others)}.{advice}"

    def described(self, worker: WorkerState, dataset: Dataset, now: float) -> list[CoordinatorOutput]:
        """Take the description of a loop's data; the first one makes the plan."""
        state = self.state
        assert state.join and state.plan and state.welcome
        if state.dataset is not None:
            return [] if state.planning else [CoordinatorOutput(worker.peer, Planned(state.plan))]
        state.dataset = dataset
        state.plan = self._plan_for(state.join, dataset)
        state.welcome = msgspec.structs.replace(state.welcome, plan=state.plan)
        self._report(now)
        state.planning = {index for index, server in state.servers.items() if server.peer.role == "server"}
        if not state.planning:
            return self._announce()
        return [CoordinatorOutput(state.servers[index].peer, Planned(state.plan)) for index in sorted(state.planning)]

    def server_knows(self, server: Peer) -> list[CoordinatorOutput]:
        self.state.planning.discard(server.index)
        return [] if self.state.planning else self._announce()

    def _announce(self) -> list[CoordinatorOutput]:
        assert self.state.plan
        return [CoordinatorOutput(w.peer, Planned(self.state.plan)) for w in self.state.connected()]


def _other_model(here: Layout, there: Layout) -> str:
    """Return the first parameter in which two models differ."""
    shapes = [{spec.name: list(spec.shape) for spec in layout.parameters} for layout in (here, there)]
    for name in (*shapes[0], *shapes[1]):
        mine, other = (f"is {of[name]}" if name in of else "is missing" for of in shapes)
        if mine != other:
            return f"the model's {name} {mine}, there it {other.replace('is', 'was', 1)}"
    return "the model's parameters have another order or another dtype there"


def _data_of(join: Join) -> Dataset:
    return Dataset(join.fingerprint, join.num_samples, join.batch_size, join.epochs, join.drop_last)


def _portion_batches(
    join: Join, items_per_round: int, per_epoch: int, num_workers: int, workers_per_replica: int
) -> int:
    if join.coordinated:
        return join.batches_per_item  # a portion is one work item
    if items_per_round:
        return 16
    chosen = choose_portion_batches(per_epoch, num_workers, join.batches_per_item)
    if num_workers > 1 or workers_per_replica == 1:
        return chosen
    # Long enough that the next lease arrives before the last batch of this one enters the pipeline.
    work_items = min(4 * workers_per_replica, MAX_PORTION_BATCHES // join.batches_per_item)
    return max(chosen, work_items * join.batches_per_item)


def _described(dataset: Dataset) -> str:
    epochs = f"{dataset.epochs} epochs of " if dataset.epochs else ""
    last = " with drop_last" if dataset.drop_last else ""
    return f"{epochs}{dataset.num_samples} samples ({dataset.fingerprint}) in batches of {dataset.batch_size}{last}"
