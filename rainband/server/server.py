"""A server: a state machine that owns blocks. Message in, state change, messages out; no I/O, no clock, no threads.

Because it is deterministic, the same object serves real sockets, virtual time and the fault tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from torch import Tensor

from rainband.model.optimizer_state import as_parts
from rainband.protocol.accounting import merge, worst_limit
from rainband.protocol.data_plan import DataPlan, PushId, validate_push_id
from rainband.protocol.layout import BlockSpec
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import (
    COORDINATOR,
    AcceptedBatches,
    Ack,
    AdjustRule,
    Assign,
    BlockReady,
    Command,
    FetchState,
    Flush,
    Forget,
    Idle,
    InitBlock,
    Message,
    Params,
    Peer,
    Planned,
    Pull,
    PullDelayed,
    Push,
    PushResult,
    Ready,
    Report,
    ReportRequest,
    Revoke,
    RoundChosen,
    Skipped,
    StatePart,
)
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.server.block import Block
from rainband.server.commands import CommandExecutor
from rainband.strategy import ServerPart

if TYPE_CHECKING:
    from rainband.observer import Observer

DONE_WITH = frozenset(r for r in PushResult if r <= PushResult.LATE)  # whatever the answer, the sender goes on
REPORTS = 50  # about completed portions in a whole run, besides those that the coordinator asks for
Publish = Callable[[Sequence[BlockSpec], int], list[ParameterBuffer]]  # makes room for blocks in so many buffers each


class ServerOutput(NamedTuple):
    """A message to send. Where `read` is set, the payload is read when the bytes leave: see `Server.read`."""

    to: Peer
    message: Message
    read: bool = False


def _word(result: PushResult) -> str:
    """Return the name of a result as reports count it."""
    return result.name.lower()


class Server:
    """Owns its blocks; knows its term, and the lowest valid lease number of each portion."""

    def __init__(
        self, server_part: Callable[[int], ServerPart], publish: Publish, observer: Observer | None = None
    ) -> None:
        self.server_part = server_part
        self.observer = observer
        self.publish = publish
        self.term = 1
        self.assigned = False
        self.loads: list[tuple[Peer, InitBlock, Tensor | None]] = []  # that came before the blocks they are for
        self.blocks: dict[int, Block] = {}
        self.min_lease: dict[int, int] = {}
        self.report_every = 1  # portions completed between two reports: see `_follow`
        self.completed = 0
        self.unreported = False  # portions were completed of which the coordinator has not heard
        self.first_open = 0  # every portion below was complete at the last report
        self.complete: Counter[int] = Counter()  # portion -> blocks that have all of it
        self.refused: Counter[str] = Counter()
        self.updates = 0
        self.asks = False  # readers must ask the rule, also where they could read in place
        self.tuned = 0  # the last decision that was taken
        self.chooses_rounds = False  # block 0 chooses the cells of a round
        self.commands: CommandExecutor | None = None  # what the coordinator's commands have come to
        self.incarnations: dict[int, int] = {}  # worker -> the incarnation whose clock counts
        self.told_delays: dict[Peer, tuple[int, int]] = {}  # reader -> (its pull, for whom it waits), as it was told
        self.valid_push_id: tuple[PushId, int] = (
            (),
            -1,
        )  # checked last: a push comes as many messages with the same name

    def receive(self, sender: Peer, message: Message, payload: Tensor | None = None) -> list[ServerOutput]:
        """Take one message; returns what to send."""
        if self.observer is not None:
            self.observer.receiving(message)
        match message:
            case Push():
                outs = self._push(sender, message, payload)
            case Pull():
                outs = self._pull(sender, message)
            case InitBlock():
                outs = self._load(sender, message, payload)
            case FetchState():
                outs = self._fetch_state(sender)
            case Idle() if sender.role == "worker":
                outs = self._rest(sender)
            case _ if sender.role == "coordinator":
                outs = self._obey(message)
            case _:
                self.refused[f"{type(message).__name__} from a {sender.role}"] += 1
                outs = []
        if self.observer is not None:
            self.observer.received(message)
        return outs

    def _obey(self, message: Message) -> list[ServerOutput]:
        """Take a message of the coordinator."""
        match message:
            case Assign():
                return self._assign(message)
            case Planned():
                return self._planned(message)
            case Revoke():
                return self._revoke(message)
            case Forget():
                return self._forget(message)
            case RoundChosen():
                return self._named(message)
            case AdjustRule():
                return self._tune(message)
            case Command():
                return self._command(message)
            case ReportRequest():  # who was lost meanwhile may have been waited for
                return [*self._admit_all(), ServerOutput(COORDINATOR, self.report())]
            case Flush():
                for block in self.blocks.values():
                    block.rule.flush(block)
                return [*self._admit_all(), ServerOutput(COORDINATOR, self.report(flushed=True))]
        return []

    # ---- the accepting of a push, in this order, in one step per block -------------------------------------------

    def _push(self, sender: Peer, push: Push, payload: Tensor | None) -> list[ServerOutput]:
        block = self.blocks.get(push.block)
        if block is None:
            self.refused[_word(PushResult.WRONG_SERVER)] += 1
            if self.observer is not None:
                self.observer.answered(push, PushResult.WRONG_SERVER)
            return [
                ServerOutput(
                    sender,
                    Ack(push.block, push.sequence, PushResult.WRONG_SERVER, self.term, 0, push.slot, "not my block"),
                )
            ]
        result, reason = self._accept(sender, block, push, payload)
        if result > PushResult.DUPLICATE:
            self.refused[_word(result)] += 1
        if self.observer is not None:
            self.observer.answered(push, result)
        ack = Ack(push.block, push.sequence, result, self.term, block.version, push.slot, reason)
        outs = [ServerOutput(sender, ack)]
        if block.clocked and result in DONE_WITH and self.incarnations.get(push.worker) == sender.incarnation:
            block.rule.tick(block, push.worker, push.clock)
        if push.want:
            self._wait(block, sender, Pull(push.sequence, push.clock, push.at_version))
        if block.waiting:
            outs += self._admit(block)
        if self.chooses_rounds:  # before the report: others must hear of the last round before they are told to flush
            outs += self._name(block)
        if self.unreported:
            outs += self._report_progress(block)
        if self.commands is not None and result == PushResult.ACCEPTED:
            outs += [ServerOutput(COORDINATOR, message) for message in self.commands.evaluated()]
        return outs

    def _accept(self, sender: Peer, block: Block, push: Push, payload: Tensor | None) -> tuple[PushResult, str]:
        if push.term > self.term:
            return PushResult.WRONG_SERVER, f"term {push.term} has not begun here"
        # Also if the push itself comes to nothing: the sender does not say it again.
        if push.groups and sender.index == push.worker and (unfit := block.take_groups(push.worker, push.groups)):
            return PushResult.BAD, unfit
        if self.min_lease and any(self.min_lease.get(r.portion, 0) > r.lease for r in push.push_id):
            return PushResult.REVOKED, ""
        if sender.role != "worker" or sender.index != push.worker:
            return PushResult.BAD, f"a push of worker {push.worker} came from {sender}"
        if push.push_id != self.valid_push_id[0] or push.at_version != self.valid_push_id[1]:
            wrong = validate_push_id(block.plan, push.push_id, push.at_version)
            if wrong:
                return PushResult.BAD, wrong
            self.valid_push_id = push.push_id, push.at_version
        gradient, wrong = self._gradient(block, push, payload)
        if wrong:
            return PushResult.BAD, wrong
        if push.at_version >= 0 and push.at_version != block.version:
            return (
                (PushResult.LATE, "")
                if push.at_version < block.version
                else (PushResult.EARLY, f"at version {block.version}")
            )
        if self._has_accepted(sender, block, push):
            return PushResult.DUPLICATE, ""
        if block.accepted_set.has_some(push.push_id):
            return PushResult.OVERLAPS, ""
        self._take(sender, block, push, gradient)
        return PushResult.ACCEPTED, ""

    def _gradient(self, block: Block, push: Push, payload: Tensor | None) -> tuple[Tensor | None, str]:
        """The gradient in the block's working precision, or what is wrong with it."""
        if push.skip:
            return None, ""
        if push.samples < 1:
            return None, f"a gradient of {push.samples} samples has no weight"
        if push.numel != block.numel or push.dtype != block.spec.dtype:
            wanted = f"{block.spec.numel} x {block.spec.dtype}"
            return None, f"block {block.spec.index} is {wanted}, the push is {push.numel} x {push.dtype}"
        if payload is None or payload.nbytes != block.num_bytes:
            return None, f"the payload is not the {block.spec.num_bytes} bytes of block {block.spec.index}"
        gradient = payload if payload.dtype == block.dtype else payload.view(block.dtype)
        if gradient.dtype != block.master_dtype:
            gradient = gradient.to(block.master_dtype)
        return gradient, ""  # its sender has seen that it is finite, and checksums that it came as it was sent

    def _has_accepted(self, sender: Peer, block: Block, push: Push) -> bool:
        if push.push_id:
            return block.accepted_set.has_all(push.push_id)
        return push.sequence <= block.untracked_pushes.get((sender.index, sender.incarnation), -1)

    def _take(self, sender: Peer, block: Block, push: Push, gradient: Tensor | None) -> None:
        if push.push_id:
            self._mark(block, push.push_id)
            if self.commands is not None and block is next(iter(self.blocks.values())):
                self.commands.took(push)
        else:
            block.untracked_pushes[sender.index, sender.incarnation] = push.sequence
        if push.skip:
            block.skip(push.push_id, push.skip)
        before = block.version
        block.rule.absorb(block, push, gradient)
        self.updates += block.version - before
        if block.dropped:
            self._drop(block)

    def _mark(self, block: Block, name: PushId) -> None:
        for portion in block.accepted_set.add(name):
            self.complete[portion] += 1
            if self.complete[portion] == len(self.blocks):  # this was the last block that lacked it
                self.completed += 1
                self.unreported = self.commands is None
                if self.commands is not None:
                    self.commands.complete += 1

    def _drop(self, block: Block) -> None:
        """The rule has done with batches that may not have come."""
        dropped, block.dropped = block.dropped, []
        for name in dropped:
            self._mark(block, name)

    def _report_progress(self, block: Block) -> list[ServerOutput]:
        """Tell of portions that are complete: each, or where there are very many, every so many."""
        due = self.completed % self.report_every == 0 or block.accepted_set.first_open == block.plan.num_portions
        if not self.unreported or not due:
            return []
        self.unreported = False
        return [ServerOutput(COORDINATOR, self.report(measured=False))]

    # ---- rounds in which block 0 chooses ---------------------------------------------------------------------------

    def _name(self, block: Block) -> list[ServerOutput]:
        """If block 0 has just chosen the cells of a round: tell the other blocks, here and elsewhere."""
        chosen = [] if block.index else block.rule.take_chosen()
        if not chosen:
            return []
        outs = [out for named in chosen for out in self._named(named)]
        return [*(ServerOutput(COORDINATOR, named) for named in chosen), *outs]

    def _named(self, named: RoundChosen) -> list[ServerOutput]:
        for block in self.blocks.values():
            before = block.version
            block.rule.choose(block, named)
            self.updates += block.version - before
            self._drop(block)
        last = next(reversed(self.blocks.values()), None)
        return self._admit_all() + ([] if last is None else self._report_progress(last))

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _pull(self, sender: Peer, pull: Pull) -> list[ServerOutput]:
        outs: list[ServerOutput] = []
        for block in self.blocks.values():
            if block.part != pull.part:
                continue
            nobody_waits = block.loaded and not block.waiting and not block.clocked
            if nobody_waits and block.rule.admits(block, pull, sender.index):
                outs.append(ServerOutput(sender, self._params(block, pull, sender.index), True))
            else:
                self._wait(block, sender, pull)
                outs += self._admit(block)
        return outs

    def _wait(self, block: Block, sender: Peer, pull: Pull) -> None:
        """A reader's newest question counts: a late answer to an older one would land on top of its answer."""
        if block.clocked and pull.clock >= 0 and sender.role == "worker":
            self.incarnations[sender.index] = max(sender.incarnation, self.incarnations.get(sender.index, 0))
            block.rule.enter(block, sender.index, pull.base)
        block.waiting.pop(sender, None)
        block.waiting[sender] = pull

    def _admit_all(self) -> list[ServerOutput]:
        return [out for block in self.blocks.values() if block.waiting for out in self._admit(block)]

    def _admit(self, block: Block) -> list[ServerOutput]:
        if not block.loaded:
            return []
        admits = block.rule.admits
        admitted = [(to, pull) for to, pull in block.waiting.items() if admits(block, pull, to.index)]
        for to, _ in admitted:
            del block.waiting[to]
        outs = [ServerOutput(to, self._params(block, pull, to.index), read=True) for to, pull in admitted]
        if block.clocked and block.waiting:
            outs += self._hold(block)
        return outs

    def _params(self, block: Block, pull: Pull, reader: int) -> Params:
        if block.keeps_reads and pull.clock >= 0:
            block.rule.give(block, reader)
            kept = reader
        else:
            kept = -1
        clock = -1 if not block.clocked or pull.clock < 0 else block.rule.clock_of(reader)
        return Params(
            block.index,
            pull.sequence,
            self.term,
            block.version,
            pull.at_version,
            asks=self.asks,
            clock=clock,
            kept=kept,
        )

    def _hold(self, block: Block) -> list[ServerOutput]:
        """Tell those who have to wait for whom; once, unless it becomes somebody else."""
        outs = []
        for reader, pull in block.waiting.items():
            holder = block.rule.holder(block, pull, reader.index)
            if holder is not None and self.told_delays.get(reader) != (pull.sequence, holder):
                self.told_delays[reader] = pull.sequence, holder
                outs.append(ServerOutput(reader, PullDelayed(pull.sequence, holder)))
        return outs

    def read(self, params: Params) -> tuple[Params, Tensor | None]:
        """A block's parameters as they are at this moment, for a reply that is about to leave."""
        block = self.blocks[params.block]
        if block.keeps_reads and params.kept >= 0:
            copy = block.rule.copy_of(params.kept, params.version)
            if copy is not None:  # otherwise the reader was given up meanwhile
                return params, copy
        kept = len(block.buffer.tensors) - 1  # in rounds version r is kept beside r + 1, not longer
        late = params.at_version >= 0 and block.version > params.at_version + kept
        version = params.at_version if params.at_version >= 0 else block.version
        if late or version != params.version or self.term != params.term:
            params = msgspec.structs.replace(params, term=self.term, version=version, round_over=late)
        return params, None if late else block.buffer.at(version)

    def _fetch_state(self, sender: Peer) -> list[ServerOutput]:
        """The state of every block's optimizer: the large parts first, each read when it leaves, then the numbers."""
        outs = []
        for index, block in self.blocks.items():
            assert block.optimizer is not None
            parts, numbers = as_parts(block.spec, block.optimizer.state())
            outs += [ServerOutput(sender, StatePart(index, part), read=True) for part in parts]
            outs.append(ServerOutput(sender, StatePart(index, "", numbers=numbers), read=True))
        return outs

    def read_state(self, message: StatePart) -> tuple[StatePart, Tensor | None]:
        """One part of a block's state, as it is at this moment."""
        if not message.part:
            return message, None
        block = self.blocks[message.block]
        assert block.optimizer is not None
        parts, _ = as_parts(block.spec, {message.part: block.optimizer.state()[message.part]})
        values, absent = parts[message.part]
        return StatePart(message.block, message.part, absent), values

    # ---- what the coordinator says ---------------------------------------------------------------------------------

    def _assign(self, assign: Assign) -> list[ServerOutput]:
        self.term = assign.term
        server_part = self.server_part(assign.num_replicas)
        if assign.optimizer is not None:  # a user's own, with a schedule of its own
            server_part = replace(server_part, optimizer=assign.optimizer, schedule=Schedule())
        rule = server_part.rule()
        reads = rule.reads
        self.asks = reads == "admitted"
        self.chooses_rounds = rule.chooses
        self.commands = CommandExecutor(server_part.vectors) if server_part.vectors else None
        buffers = 2 if reads == "round" else 1
        parameter_buffers = self.publish(assign.blocks, buffers)
        self.blocks = {
            spec.index: Block(spec, buffer, assign.plan, server_part, assign.groups, self.observer)
            for spec, buffer in zip(assign.blocks, parameter_buffers, strict=True)
        }
        self.assigned = True
        if self.observer is not None:
            self.observer.assigned(self)
        self._follow(assign.plan)
        loads, self.loads = self.loads, []
        outs = [out for load in loads for out in self._load(*load)]
        return outs if self.blocks else [ServerOutput(COORDINATOR, Ready())]

    def _load(self, sender: Peer, load: InitBlock, payload: Tensor | None) -> list[ServerOutput]:
        if not self.assigned:  # a worker may hear of its servers before they hear of their blocks
            self.loads.append((sender, load, None if payload is None else payload.clone()))
            return []
        block = self.blocks.get(load.block)
        wanted = None if block is None else (block.spec.dtype, block.spec.numel, block.spec.num_bytes)
        given = None if payload is None else payload.numel() * payload.element_size()
        begun = block is not None and bool(block.accepted_set.count or block.version)
        if block is None or payload is None or wanted != (load.dtype, load.numel, given) or begun:
            self.refused["load"] += 1
            return (
                [] if block is None or not block.loaded else [ServerOutput(sender, BlockReady(load.block, load.slot))]
            )
        block.load(load, payload.view(block.dtype))
        outs = [ServerOutput(sender, BlockReady(load.block, load.slot))]
        if not load.part and all(b.loaded for b in self.blocks.values()):
            outs += [ServerOutput(COORDINATOR, Ready()), *self._admit_all()]
        return outs

    def _planned(self, planned: Planned) -> list[ServerOutput]:
        for block in self.blocks.values():
            block.replan(planned.plan)
        self._follow(planned.plan)
        return [ServerOutput(COORDINATOR, Ready())]

    def _follow(self, plan: DataPlan) -> None:
        """Where there are very many portions, tell of some at once; in rounds of each, others may wait for that."""
        self.report_every = 1 if plan.items_per_round else max(1, plan.num_portions // REPORTS)

    def _command(self, command: Command) -> list[ServerOutput]:
        if self.commands is None:
            self.refused["command"] += 1
            return []
        before = self.commands.version
        answers = self.commands.command(command, list(self.blocks.values()))
        if self.commands.version != before:
            self.complete.clear()
            self.updates += len(self.blocks)
        return [*(ServerOutput(COORDINATOR, answer) for answer in answers), *self._admit_all()]

    def _revoke(self, revoke: Revoke) -> list[ServerOutput]:
        self.min_lease[revoke.portion] = max(self.min_lease.get(revoke.portion, 0), revoke.lease)
        masks = tuple(block.accepted_set.of(revoke.portion) for block in self.blocks.values())
        return [ServerOutput(COORDINATOR, AcceptedBatches(revoke.portion, revoke.lease, masks))]

    def _forget(self, forget: Forget) -> list[ServerOutput]:
        for block in self.blocks.values():
            block.rule.forget(block, forget.worker)
        return self._admit_all()

    def _tune(self, tune: AdjustRule) -> list[ServerOutput]:
        if tune.number <= self.tuned:
            return []
        self.tuned = tune.number
        for block in self.blocks.values():
            block.lr_factor *= tune.lr_factor
            if tune.bound is not None:
                block.rule.retune(tune.bound)
        return self._admit_all()

    def _rest(self, worker: Peer) -> list[ServerOutput]:
        return self._forget(Forget(worker.index)) if self.incarnations.get(worker.index) == worker.incarnation else []

    def lost(self, peer: Peer) -> None:
        """A connection is gone: nobody waits there for an answer any more, or is waited for."""
        self.told_delays.pop(peer, None)
        for block in self.blocks.values():
            block.waiting.pop(peer, None)
            if block.clocked and self.incarnations.get(peer.index) == peer.incarnation and peer.role == "worker":
                block.rule.forget(block, peer.index)

    def report(self, flushed: bool = False, measured: bool = True) -> Report:
        """The marks; the measurements, which take longer, only when asked for."""
        blocks = list(self.blocks.values())
        first_open = min((b.accepted_set.first_open for b in blocks), default=0)
        if first_open != self.first_open:  # of portions below that nobody will ask again
            self.first_open = first_open
            self.min_lease = {portion: lease for portion, lease in self.min_lease.items() if portion >= first_open}
            for portion in [portion for portion in self.complete if portion < first_open]:
                del self.complete[portion]
        num_blocks = len(blocks)
        skipped: dict[tuple[int, str], int] = {}
        staleness: dict[int, dict[int, int]] = {}
        for block in blocks:
            for key, mask in block.skipped.items():
                skipped[key] = skipped.get(key, 0) | mask
            if measured:
                merge(staleness, block.staleness)
        return Report(
            first_open=first_open,
            full=tuple(sorted([portion for portion, times in self.complete.items() if times == num_blocks])),
            accepted=min((b.accepted_set.count for b in blocks), default=0),
            updates=self.updates,
            blocks=tuple(b.tally() for b in blocks),
            skipped=tuple(Skipped(p, mask, reason) for (p, reason), mask in sorted(skipped.items())),
            refused=dict(self.refused),
            staleness=staleness,
            flushed=flushed,
            measured=measured,
            missed=tuple(block.missed() for block in blocks) if measured else (),
            bound=next((b.rule.bound for b in blocks), None),
            gradients_per_update=next((b.rule.gradients_per_update for b in blocks), None),
            limit=worst_limit(block.limit() for block in blocks) if measured else None,
        )
