"""A parameter server: a state machine that owns blocks. A message in, messages out; no I/O, no clock, no threads.

It is deterministic, so the same class runs behind sockets, in simulations and in tests with injected faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

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
    Failed,
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
    Push,
    PushResult,
    Ready,
    RelayedPush,
    Report,
    ReportRequest,
    Revoke,
    RoundChosen,
    RuleChange,
    Saved,
    StatePart,
    TakeSnapshot,
)
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.protocol.saved_state import SavedBlock, SavedCommands
from rainband.server.block import Block
from rainband.server.commands import CommandExecutor
from rainband.server.progress_report import ProgressReport
from rainband.server.readers import ReadableBlock, Readers, ServerOutput
from rainband.server.relay import Relay, samples_of
from rainband.server.snapshots import Snapshots, restore
from rainband.server.validation import PushValidator
from rainband.strategy import ServerPart

if TYPE_CHECKING:
    from rainband.codecs.codec import Codec
    from rainband.observer import Observer

ACCEPTED, DUPLICATE = PushResult.ACCEPTED, PushResult.DUPLICATE  # read for every push: members of enums are slow
DONE_WITH = frozenset(r for r in PushResult if r <= PushResult.LATE)  # the sender goes on after these answers
Publish = Callable[[Sequence[BlockSpec], int], list[ParameterBuffer]]  # (blocks, tensors per block) -> buffers


# size: a method for each kind of message
class Server:
    """Owns blocks: accepts pushes, answers pulls, and follows the coordinator."""

    def __init__(
        self,
        server_part: Callable[[int], ServerPart],
        publish: Publish,
        observer: Observer | None = None,
        codec: Codec | None = None,
        pull_codec: Codec | None = None,
    ) -> None:
        """`codec`: with which workers may encode their pushes; `pull_codec`: with which parameters are sent to them."""
        self.server_part = server_part
        self.publish = publish
        self.observer = observer
        self.term = 1
        self.began: dict[int, int] = {}  # block -> its version when the term began
        self.assigned = False
        self.blocks: dict[int, Block] = {}
        self.early_loads: list[tuple[Peer, InitBlock, Tensor | None]] = []  # received before the blocks were assigned
        self.validator = PushValidator(codec)
        self.readers = Readers(self.blocks, pull_codec)
        self.progress = ProgressReport(self.blocks)
        self.commands: CommandExecutor | None = None  # of a coordinated run
        self.adjusted = 0  # the number of the last AdjustRule that was followed
        self.chooses_rounds = False  # block 0 chooses the work items of each round
        self.snapshots = Snapshots(self.blocks)  # copies for checkpoints, which the runtime writes
        self.relay: Relay | None = None  # of an inner server of a tree, which owns no blocks

    @property
    def updates(self) -> int:
        """Updates of all blocks so far."""
        return self.progress.updates

    def receive(self, sender: Peer, message: Message, payload: Tensor | None = None) -> list[ServerOutput]:
        """Take one message; return the messages to send."""
        if self.observer is not None:
            self.observer.receiving(message)
        match message:
            case _ if self.relay is not None and sender.role != "coordinator":
                outs = self.relay.receive(sender, message, payload)
            case Push():
                outs = self._push(sender, message, payload)
            case RelayedPush():
                outs = self._push_sum(sender, message, payload)
            case Pull():
                outs = self.readers.pull(sender, message)
            case InitBlock():
                outs = self._load(sender, message, payload)
            case FetchState():
                outs = self._fetch_state(sender)
            case Idle() if sender.role == "worker":
                outs = self._change_rules(Forget(sender.index)) if self.readers.is_current(sender) else []
            case _ if sender.role == "coordinator":
                outs = self._obey(message)
            case _:
                self.progress.refused[f"{type(message).__name__} from a {sender.role}"] += 1
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
                return self._replan(message)
            case Revoke():
                return self._revoke(message)
            case Forget():
                return self._change_rules(message)
            case RoundChosen():
                return self._round_chosen(message)
            case AdjustRule():
                return self._adjust_rule(message)
            case TakeSnapshot():
                passed = self.snapshots.begin(message)
                return [] if passed is None else [ServerOutput(COORDINATOR, Saved(message.number, newest=passed))]
            case Command():
                return self._command(message)
            case ReportRequest():  # readers may have waited for a worker that is lost
                return [*self.readers.admit_all(), ServerOutput(COORDINATOR, self.report())]
            case Flush():
                self.validator.refuse(message.lost)
                return [*self._change_rules(message), ServerOutput(COORDINATOR, self.report(flushed=True))]
        return []

    def promote(self, term: int) -> None:
        """Begin a term: the server of which this one was a copy is lost."""
        self.term = self.readers.term = term
        self.began = {block.index: block.version for block in self.blocks.values()}
        self.readers.told_delays.clear()

    def lost(self, peer: Peer) -> None:
        """Forget a peer whose connection is closed."""
        (self.relay or self.readers).lost(peer)

    def report(self, flushed: bool = False, measured: bool = True) -> Report:
        """Return the accounting of all blocks; `measured`: with measurements, which take longer."""
        before = self.progress.first_open
        report = self.progress.report(flushed, measured)
        if report.first_open != before:
            self.validator.forget_below(report.first_open)
        return report

    def _push(self, sender: Peer, push: Push, payload: Tensor | None) -> list[ServerOutput]:
        block = self.blocks.get(push.block)
        if block is None:
            self._count(push, PushResult.WRONG_SERVER)
            ack = Ack(push.block, push.sequence, PushResult.WRONG_SERVER, self.term, 0, push.slot, "not my block")
            return [ServerOutput(sender, ack)]
        if push.term < self.term:  # what it read may have had updates that were lost with the server before
            push = msgspec.structs.replace(push, version=min(push.version, self.began.get(push.block, 0)))
        result, reason, gradient = self.validator.check(sender, block, push, payload, self.term)
        if result == ACCEPTED:
            self._accept(sender, block, push, gradient)
        self._count(push, result)
        ack = Ack(push.block, push.sequence, result, self.term, block.version, push.slot, reason)
        outs = [ServerOutput(sender, ack)]
        if block.clocked and result in DONE_WITH and self.readers.incarnations.get(push.worker) == sender.incarnation:
            block.rule.tick(block, push.worker, push.clock)
        if push.want:
            self.readers.wait(block, sender, Pull(push.sequence, push.clock, push.at_version))
        outs += self._after_push(block)
        if self.commands is not None and result == ACCEPTED:
            outs += [ServerOutput(COORDINATOR, message) for message in self.commands.evaluated()]
        return outs

    def _push_sum(self, sender: Peer, message: RelayedPush, payload: Tensor | None) -> list[ServerOutput]:
        """Take a sum of gradients from an inner server of a tree: all of it, or nothing."""
        block = self.blocks.get(message.block)
        if block is None:
            ack = Ack(message.block, message.sequence, PushResult.WRONG_SERVER, self.term, 0, reason="not my block")
            return [ServerOutput(sender, ack)]
        result, reason, total = self.validator.check_sum(sender, block, message, payload, self.term)
        pushes = [member.push for member in message.members]
        if result == ACCEPTED:
            for member in message.members:
                self._note_accepted(Peer("worker", member.push.worker, member.incarnation), block, member.push)
            if total is not None:  # of 16 bits it is the mean
                weight = 1 if block.parameters.dtype == block.parameters.working_dtype else samples_of(message.members)
                total = total * weight
            before = block.version
            block.rule.absorb_sum(block, pushes, total, message.absent)
            self.progress.updates += block.version - before
        if result == ACCEPTED or len(pushes) == 1:  # otherwise each of them is sent by itself
            for push in pushes:
                self._count(push, result)
        ack = Ack(message.block, message.sequence, result, self.term, block.version, reason=reason)
        return [ServerOutput(sender, ack), *self._after_push(block)]

    def _after_push(self, block: Block) -> list[ServerOutput]:
        """Return what follows from a push: replies to readers that waited for it, and reports."""
        outs: list[ServerOutput] = []
        if block.waiting:
            outs += self.readers.admit(block)
        if self.snapshots.current is not None:
            self.snapshots.changed(block)
        if self.chooses_rounds:  # before the report: other servers must learn of the last round before they flush
            outs += self._choose_rounds(block)
        if self.progress.unreported:
            outs += self._report_progress(block)
        return outs

    def _count(self, push: Push, result: PushResult) -> None:
        if result > DUPLICATE:
            self.progress.refused[result.name.lower()] += 1
        if self.observer is not None:
            self.observer.answered(push, result)

    def _accept(self, sender: Peer, block: Block, push: Push, gradient: Tensor | None) -> None:
        if push.residual:
            block.accounting.last_untracked[sender.index, sender.incarnation] = push.sequence
            block.apply_residual(gradient, push)
            return
        self._note_accepted(sender, block, push)
        before = block.version
        block.rule.absorb(block, push, gradient)
        self.progress.updates += block.version - before
        if block.accounting.dropped:
            self.progress.accept_dropped(block)

    def _note_accepted(self, sender: Peer, block: Block, push: Push) -> None:
        if push.push_id:
            self.progress.accept(block, push.push_id)
            if self.commands is not None and block is next(iter(self.blocks.values())):
                self.commands.took(push)
        else:
            block.accounting.last_untracked[sender.index, sender.incarnation] = push.sequence
        if push.skip:
            block.accounting.skip(push.push_id, push.skip)

    def _report_progress(self, block: Block) -> list[ServerOutput]:
        if not self.progress.is_due(block):
            return []
        return [ServerOutput(COORDINATOR, self.report(measured=False))]

    def _choose_rounds(self, block: Block) -> list[ServerOutput]:
        """If block 0 has chosen the work items of a round, announce them to the other blocks here and elsewhere."""
        chosen = [] if block.index else block.rule.take_chosen()
        if not chosen:
            return []
        outs = [out for round_chosen in chosen for out in self._round_chosen(round_chosen)]
        return [*(ServerOutput(COORDINATOR, round_chosen) for round_chosen in chosen), *outs]

    def _round_chosen(self, chosen: RoundChosen) -> list[ServerOutput]:
        for block in self.blocks.values():
            before = block.version
            block.rule.choose(block, chosen)
            self.progress.updates += block.version - before
            self.progress.accept_dropped(block)
            self.snapshots.changed(block)
        last = next(reversed(self.blocks.values()), None)
        return self.readers.admit_all() + ([] if last is None else self._report_progress(last))

    def fill(self, message: Message) -> tuple[Message, Tensor | None]:
        """Return a message that is about to leave, with the values of this moment."""
        if isinstance(message, StatePart):
            return self.read_state(message)
        if self.relay is not None:
            return self.relay.fill(message)
        assert isinstance(message, Params)
        return self.read(message)

    def read(self, params: Params) -> tuple[Params, Tensor | None]:
        """Return a reply that is about to leave with the parameters of this moment."""
        return self.readers.read(params)

    @property
    def readable(self) -> Mapping[int, ReadableBlock]:
        """Return the blocks that workers can read here."""
        return self.blocks if self.relay is None else self.relay.blocks

    def _fetch_state(self, sender: Peer) -> list[ServerOutput]:
        """Send every block's optimizer state: the tensors first, each read when it leaves, then the numbers."""
        outs = []
        for index, block in self.blocks.items():
            parts, numbers = block.parameters.state()
            outs += [ServerOutput(sender, StatePart(index, part), read=True) for part in parts]
            outs.append(ServerOutput(sender, StatePart(index, "", numbers=numbers), read=True))
        return outs

    def read_state(self, message: StatePart) -> tuple[StatePart, Tensor | None]:
        """Return one part of a block's optimizer state as it is at this moment."""
        if not message.part:
            return message, None
        values, absent = self.blocks[message.block].parameters.state_part(message.part)
        return StatePart(message.block, message.part, absent), values

    def _assign(self, assign: Assign) -> list[ServerOutput]:
        self.term = self.readers.term = assign.term
        server_part = self.server_part(assign.num_replicas)
        if assign.optimizer is not None:  # of a custom training loop, which has its own schedule
            server_part = replace(server_part, optimizer=assign.optimizer, schedule=Schedule())
        rule = server_part.rule()
        if assign.parent >= 0:
            self.relay = Relay(assign, rule.reads == "round", self.publish)
            return [ServerOutput(COORDINATOR, Ready())]
        self.readers.asks = rule.reads == "admitted"
        self.chooses_rounds = rule.chooses
        self.commands = self.progress.commands = CommandExecutor(server_part.vectors) if server_part.vectors else None
        buffers = self.publish(assign.blocks, 2 if rule.reads == "round" else 1)
        self.blocks.clear()
        self.progress.staleness.clear()
        for spec, buffer in zip(assign.blocks, buffers, strict=True):
            self.blocks[spec.index] = Block(
                spec, buffer, assign.plan, server_part, assign.groups, self.observer, self.progress.staleness
            )
        self.assigned = True
        if self.observer is not None:
            self.observer.assigned(self)
        self.progress.follow(assign.plan)
        loads, self.early_loads = self.early_loads, []
        outs = [out for load in loads for out in self._load(*load)]
        return outs if self.blocks or assign.restores else [ServerOutput(COORDINATOR, Ready())]

    def restore(self, saved: SavedBlock, tensors: Mapping[str, Tensor]) -> None:
        """Give a block its state of a checkpoint; ValueError if it does not fit."""
        restore(self.blocks[saved.index], saved, tensors)

    def restore_commands(self, saved: SavedCommands) -> None:
        """Continue after the commands of a full-batch strategy that the blocks of a checkpoint have executed."""
        if self.commands is None:
            raise ValueError("it is of a full-batch strategy, and this one is none.")
        self.commands.restore(saved, list(self.blocks.values()))

    def restored(self) -> list[ServerOutput]:
        """Report that all blocks have their state of a checkpoint."""
        self.progress.restored()
        return [ServerOutput(COORDINATOR, self.report()), ServerOutput(COORDINATOR, Ready()), *self.readers.admit_all()]

    def _load(self, sender: Peer, load: InitBlock, payload: Tensor | None) -> list[ServerOutput]:
        if not self.assigned:  # the worker got its servers before this server got its blocks
            self.early_loads.append((sender, load, None if payload is None else payload.clone()))
            return []
        block = self.blocks.get(load.block)
        wanted = None if block is None else (block.spec.dtype, block.spec.numel, block.spec.num_bytes)
        given = None if payload is None else payload.numel() * payload.element_size()
        begun = block is not None and bool(block.accounting.accepted_set.count or block.version)
        if block is None or payload is None or wanted != (load.dtype, load.numel, given) or begun:
            self.progress.refused["load"] += 1
            ready = block is not None and block.loaded
            return [ServerOutput(sender, BlockReady(load.block, load.slot))] if ready else []
        try:
            block.load(load, payload.view(block.parameters.dtype))
        except ValueError as error:  # optimizer state that does not fit: the run ends with this reason
            return [ServerOutput(COORDINATOR, Failed(0, f"block {load.block} was not loaded: {error}", ""))]
        outs = [ServerOutput(sender, BlockReady(load.block, load.slot))]
        if not load.part and all(b.loaded for b in self.blocks.values()):
            outs += [ServerOutput(COORDINATOR, Ready()), *self.readers.admit_all()]
        return outs

    def _replan(self, planned: Planned) -> list[ServerOutput]:
        for block in self.blocks.values():
            block.replan(planned.plan)
        self.progress.follow(planned.plan)
        return [ServerOutput(COORDINATOR, Ready())]

    def _command(self, command: Command) -> list[ServerOutput]:
        if self.commands is None:
            self.progress.refused["command"] += 1
            return []
        before = self.commands.version
        answers = self.commands.command(command, list(self.blocks.values()))
        if self.commands.version != before:
            self.progress.new_evaluation()
        return [*(ServerOutput(COORDINATOR, answer) for answer in answers), *self.readers.admit_all()]

    def _revoke(self, revoke: Revoke) -> list[ServerOutput]:
        self.validator.revoke(revoke.portion, revoke.lease)
        masks = tuple(block.accounting.accepted_set.of(revoke.portion) for block in self.blocks.values())
        return [ServerOutput(COORDINATOR, AcceptedBatches(revoke.portion, revoke.lease, masks))]

    def _adjust_rule(self, adjust: AdjustRule) -> list[ServerOutput]:
        if adjust.number <= self.adjusted:
            return []
        self.adjusted = adjust.number
        return self._change_rules(adjust)

    def _change_rules(self, message: RuleChange) -> list[ServerOutput]:
        if self.observer is not None:
            self.observer.rules_changed(message)
        for block in self.blocks.values():
            block.change_rule(message)
        return self.readers.admit_all()
