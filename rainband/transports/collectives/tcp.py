"""A group of ranks that are connected by TCP.

One thread plays a rank's message program: it sends what may be sent, receives what arrives, and adds it while the
next messages are on their way. A message is a header and the bytes of a slice; both ends derive their order from the
table, so the header only says to which round and attempt it belongs.

With `on_lost="continue"`, every rank informs all others when it has done its part, and returns when all have. When a
connection breaks before, the survivors report to each other which ranks they have lost and which had done their parts,
until they agree on the lost ranks. If together they know that all had done their parts, the round counts: some rank may
have returned. Otherwise none has, and they start again, without the lost ranks.
"""

from __future__ import annotations

import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rainband.collectives.cost import LinkCosts, num_chunks
from rainband.collectives.group import Call, Group, MembersChanged, OnLost, RankLost, elements_of, table_of, view_of
from rainband.collectives.messages import MessageProgram, PartMessage, compile_messages
from rainband.collectives.program import Wait
from rainband.transports.collectives.rank_link import COMMITTED, DATA, DONE, PING, REPORT, Head, LossReport, RankLink
from rainband.transports.connect import STARTING_LIMIT_S

MAX_RANKS = 255
CHUNK_BYTES = 512 << 10  # larger ones save calls, smaller ones overlap sending with adding
PING_S = 1.0  # how often a rank that waits shows that it lives
LAST_WORDS_S = 1.0  # to report a lost rank to the others, before an error is raised
MAX_PLANS = 256  # of different vectors and sizes, that are kept


class SliceMessage(NamedTuple):
    """A message of a program, with its slice of the vector."""

    after_received: tuple[Wait, ...]
    after_sent: tuple[Wait, ...]
    values: Any  # as numpy has them, or torch if numpy lacks the dtype
    bytes: memoryview
    add: bool


class MessagePlan(NamedTuple):
    """One rank's messages for one vector, by rank."""

    sends: dict[int, list[SliceMessage]]
    receives: dict[int, list[SliceMessage]]
    add: Callable[[Any, memoryview], None]


# size: Group has the operations that a caller uses; the rest are rounds, losses, sending and receiving
class TcpGroup(Group):
    """One rank of a group that is connected by TCP."""

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        on_lost: OnLost = "error",
        timeout_s: float = STARTING_LIMIT_S,
        costs: LinkCosts | None = None,
    ) -> None:
        """`sockets` are connections to all other ranks, as `connect_ranks` makes them.

        A rank that others wait for counts as lost after `timeout_s` without a sign.
        """
        super().__init__(rank, len(sockets) + 1, on_lost, costs)
        if self.num_ranks > MAX_RANKS or sorted([rank, *sockets]) != list(range(self.num_ranks)):
            raise ValueError(
                f"rank {rank} has connections to {sorted(sockets)}: it needs one to every other rank, of {MAX_RANKS}."
            )
        self.timeout_s = timeout_s
        self.links = {other: RankLink(sock) for other, sock in sorted(sockets.items())}  # to ranks that are not lost
        self._plans: dict[tuple[Any, ...], MessagePlan] = {}
        self._lost = 0  # bit mask
        self._lost_ranks: list[int] = []  # the same, in the order in which they were noticed
        self._round = 0
        self._attempt = 0
        self._members = 0  # bit mask, of this attempt
        self._done = 0  # bit mask: members that have done their parts
        self._began_at = self._checked_at = 0.0  # this attempt; when others were last looked at
        self._messages: _Messages | None = None  # being played

    @property
    def lost(self) -> Sequence[int]:
        return self._lost_ranks

    def close(self) -> None:
        for link in self.links.values():
            link.sock.close()
        self.links.clear()

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._round += 1

    def _play(self, call: Call, vector: Tensor, members: tuple[int, ...]) -> None:
        self._attempt, self._done = self.num_ranks - len(members), 0
        self._members = sum(1 << rank for rank in members)
        messages = self._messages = _Messages(self._plan(call, vector, members))
        self._began_at = self._checked_at = time.monotonic()
        try:
            while not messages.is_over:
                if not self._pump():
                    self._wait()
                if self._lost & self._members and not messages.is_over:
                    self._handle_loss(messages)
        finally:
            self._messages = None
        self._done |= 1 << self.rank

    def _handle_loss(self, messages: _Messages) -> None:
        """Raise MembersChanged if this attempt cannot be finished."""
        if self.on_lost == "continue":
            self._agree()
            raise AssertionError("no attempt counts that this rank has not finished")
        told = any(link.report is not None for link in self.links.values())
        if told or any(self._lost >> rank & 1 for rank in messages.waits_for()):
            self._report_loss()
            raise MembersChanged

    def _commit(self) -> None:
        for link in self.links.values():
            link.queue(DONE, self._round, self._attempt)
        while self._members & ~self._done:
            if not self._pump():
                self._wait()
            if self._members & ~self._done and self._lost & self._members:
                self._agree()
                break
        for link in self.links.values():
            if link.report is not None and link.report.round == self._round:
                link.queue(COMMITTED, self._round, self._attempt)
        self._flush_all()

    def _agree(self) -> None:
        """Agree with all survivors on the lost ranks; return if the attempt counts, raise MembersChanged if not."""
        for link in self.links.values():
            link.drop_unsent()
        self._messages = None
        reported = 0
        while True:
            self._check_self()
            if reported != self._lost:
                reported = self._lost
                for link in self.links.values():
                    link.queue_report(LossReport(self._round, self._attempt, self._lost, self._done))
            reports = [link.report for link in self.links.values() if link.committed < self._round]
            if len(reports) < len(self.links):
                return  # a rank has returned from this round
            same = [r for r in reports if r is not None and (r.round, r.lost) == (self._round, self._lost)]
            if len(same) == len(reports) and self._flushed():
                return self._decide(same)
            if not self._pump():
                self._wait()

    def _decide(self, reports: list[LossReport]) -> None:
        done = self._done
        for report in reports:
            if report.attempt == self._attempt:
                done |= report.done
        if self._members & ~done or any(report.attempt != self._attempt for report in reports):
            raise MembersChanged

    def _report_loss(self) -> None:
        """Tell the others which rank is lost: those that wait for this one must not wait."""
        for link in self.links.values():
            link.drop_unsent()
            link.queue_report(LossReport(self._round, self._attempt, self._lost, self._done))
        self._messages = None
        deadline = time.monotonic() + LAST_WORDS_S
        # Until the others have answered: a connection that closes with unread data in it may lose the report.
        while not (self._flushed() and self._all_reported()) and time.monotonic() < deadline:
            if not self._pump():
                self._sleep(max(0.0, deadline - time.monotonic()))

    def _all_reported(self) -> bool:
        return self.on_lost == "continue" or all(link.report is not None for link in self.links.values())

    def _participants(self, call: Call) -> tuple[int, ...]:
        """Return all ranks: one that has ended may have done all that this call needs, and `_play` notices if not."""
        self._check_self()
        return tuple(range(self.num_ranks))

    def _whole_group(self, call: Call) -> tuple[int, ...]:
        try:
            return super()._whole_group(call)
        except RankLost:
            self._report_loss()
            raise

    def _flushed(self) -> bool:
        return not any(link.sending for link in self.links.values())

    # ---- sending and receiving --------------------------------------------------------------------------------------

    def _pump(self) -> bool:
        """Send and receive what can be now; return True if anything moved."""
        moved = False
        for rank, link in list(self.links.items()):
            try:
                if self._messages is not None:
                    moved |= self._messages.send(rank, link, self._round, self._attempt)
                else:
                    moved |= link.flush()
                moved |= self._read(rank, link)
            except OSError:
                self._read_last_words(rank, link)
                self._lose(rank)
                moved = True
        if self._messages is not None:
            moved |= self._messages.apply()
        return moved

    def _read(self, rank: int, link: RankLink) -> bool:
        moved = link.is_held = False
        while rank in self.links and (head := link.read_head()) is not None:
            if head.round > self._round:
                link.committed = head.round - 1
            before = link.got
            if self._take(rank, link, head):
                moved = True
            else:
                return moved or link.got > before
        return moved

    def _read_last_words(self, rank: int, link: RankLink) -> None:
        """Read the rest of a connection that is given up: it may say that this rank was excluded."""
        with suppress(OSError):
            while (head := link.read_head()) is not None:
                if not (link.discard() if head.kind == DATA else self._take(rank, link, head)):
                    return

    def _take(self, rank: int, link: RankLink, head: Head) -> bool:
        """Receive the rest of a message; return True when it is complete."""
        if head.kind == DATA:
            return self._take_data(rank, link, head)
        if head.kind == REPORT:
            return self._take_report(link)
        if head.kind == DONE:
            if head.round > self._round:
                link.is_held = True
                return False
            if (head.round, head.attempt) == (self._round, self._attempt):
                self._done |= 1 << rank
        elif head.kind == COMMITTED:
            link.committed = max(link.committed, head.round)
        return link.discard()

    def _take_report(self, link: RankLink) -> bool:
        if not link.read_report():
            return False
        assert link.report is not None
        for other in range(self.num_ranks):
            if link.report.lost >> other & 1:
                self._lose(other)
        if link.report.round < self._round and self.on_lost == "continue":
            link.queue(COMMITTED, link.report.round, link.report.attempt)
        return True

    def _take_data(self, rank: int, link: RankLink, head: Head) -> bool:
        if self._messages is None:
            # No attempt without a rank that is lost by now will count.
            is_stale = (head.round, head.attempt) < (self._round, self._lost.bit_count())
        else:
            is_stale = (head.round, head.attempt) < (self._round, self._attempt)
            if (head.round, head.attempt) == (self._round, self._attempt):
                return self._messages.receive(rank, link, head)
        if is_stale:
            return link.discard()
        link.is_held = True
        return False

    def _lose(self, rank: int) -> None:
        if self._lost >> rank & 1:
            return
        self._lost |= 1 << rank
        self._lost_ranks.append(rank)
        if (link := self.links.pop(rank, None)) is not None:
            link.drop_unsent()
            link.queue_report(LossReport(self._round, self._attempt, self._lost, self._done))
            with suppress(OSError):
                link.flush()  # if it lives, it should know
            link.sock.close()

    def _flush_all(self) -> None:
        """Send what is queued; what a full connection does not take leaves with the next operation."""
        for rank, link in list(self.links.items()):
            try:
                link.flush()
            except OSError:
                self._lose(rank)

    def _wait(self) -> None:
        """Sleep until something can be sent or received; a rank that is silent for too long is lost."""
        interval_s = min(PING_S, self.timeout_s / 4)
        self._sleep(interval_s)
        now = time.monotonic()
        if now < self._checked_at + interval_s:
            return
        self._checked_at = now
        for link in self.links.values():  # the others should know that this rank lives, and waits, too
            if not link.sending:
                link.queue(PING, self._round, self._attempt)
        if self._silent():  # perhaps this rank itself was stopped: then it must read first what has arrived meanwhile
            self._pump()
        for rank in self._silent():
            self._read_last_words(rank, self.links[rank])
            self._lose(rank)

    def _silent(self) -> list[int]:
        """Return the awaited ranks that have given no sign for too long."""
        now = time.monotonic()
        awaited = self._messages.waits_for() if self._messages is not None else set(self.links)
        # What a rank sends is not read while it is held: the others have time to find the one that is lost.
        limits_s = {rank: (1 + self.links[rank].is_held) * self.timeout_s for rank in awaited & self.links.keys()}
        heard_at = {rank: max(self.links[rank].heard_at, self._began_at) for rank in limits_s}
        return sorted(rank for rank, limit_s in limits_s.items() if now - heard_at[rank] > limit_s)

    def _sleep(self, timeout_s: float) -> None:
        poll = select.poll()
        for link in self.links.values():
            wanted = (0 if link.is_held else select.POLLIN) | (select.POLLOUT if link.sending else 0)
            if wanted:  # otherwise a closed connection would wake it all the time
                poll.register(link.sock, wanted)
        poll.poll(max(0.0, timeout_s) * 1000)

    # ---- plans ------------------------------------------------------------------------------------------------------

    def _plan(self, call: Call, vector: Tensor, members: tuple[int, ...]) -> MessagePlan:
        key = (call, members, vector.data_ptr(), vector.numel(), vector.dtype)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(call, vector, members)
        return plan

    def _make_plan(self, call: Call, vector: Tensor, members: tuple[int, ...]) -> MessagePlan:
        num_parts = table_of(len(members), call).num_parts
        chunks = num_chunks(vector.nbytes, num_parts, CHUNK_BYTES)
        program = _compiled(len(members), call, chunks)[members.index(self.rank)]
        memory = view_of(vector)  # a plan must not keep the vector alive
        raw = memoryview(memory.view(torch.uint8).numpy())  # type: ignore[arg-type]
        in_numpy = vector.dtype not in (torch.float16, torch.bfloat16)
        values: Any = memory.numpy() if in_numpy else memory
        size, item = vector.numel(), vector.element_size()

        def placed(message: PartMessage) -> SliceMessage:
            elements = elements_of(size, num_parts, chunks, message.first, message.last, message.chunk)
            return SliceMessage(
                tuple(Wait(members[wait.rank], wait.number) for wait in message.after_received),
                tuple(Wait(members[wait.rank], wait.number) for wait in message.after_sent),
                values[elements.start : elements.stop],
                raw[elements.start * item : elements.stop * item],
                message.add,
            )

        return MessagePlan(
            {members[to]: [placed(message) for message in messages] for to, messages in program.sends.items()},
            {
                members[source]: [placed(message) for message in messages]
                for source, messages in program.receives.items()
            },
            _numpy_add if in_numpy else _torch_add,
        )


def _numpy_add(values: Any, received: memoryview) -> None:
    if len(received):
        np.add(values, np.frombuffer(received, values.dtype), values)


def _torch_add(values: Tensor, received: memoryview) -> None:
    if len(received):
        values += torch.frombuffer(received, dtype=values.dtype)


@lru_cache(maxsize=64)
def _compiled(num_ranks: int, call: Call, chunks: int) -> tuple[MessageProgram, ...]:
    return compile_messages(table_of(num_ranks, call), chunks)


class _Messages:
    """The play of one rank's messages: how many were sent to, and applied from, each rank."""

    def __init__(self, plan: MessagePlan) -> None:
        self.plan, self.add = plan, plan.add
        self.sent: dict[int, int] = defaultdict(int)
        self.applied: dict[int, int] = defaultdict(int)
        self.on_the_way: set[int] = set()  # ranks to which a message is being sent
        self.direct: set[int] = set()  # ranks whose message is received in its slice
        self.waiting: dict[int, tuple[SliceMessage, memoryview]] = {}  # received, and not applied yet
        self.left = sum(map(len, plan.sends.values())) + sum(map(len, plan.receives.values()))

    @property
    def is_over(self) -> bool:
        return self.left == 0

    def waits_for(self) -> set[int]:
        """Return the ranks to which messages must be sent, or from which they must come."""
        to = {rank for rank, messages in self.plan.sends.items() if self.sent[rank] < len(messages)}
        return to | {rank for rank, messages in self.plan.receives.items() if self.applied[rank] < len(messages)}

    def send(self, rank: int, link: RankLink, round_number: int, attempt: int) -> bool:
        """Send messages as far as the connection takes them."""
        messages, moved = self.plan.sends.get(rank, ()), False
        while True:
            if link.sending:
                moved |= link.flush()
                if link.sending:
                    return moved
            if rank in self.on_the_way:
                self.on_the_way.discard(rank)
                self.sent[rank] += 1
                self.left -= 1
            number = self.sent[rank]
            if number == len(messages) or not self._may(messages[number]):
                return moved
            self.on_the_way.add(rank)
            link.queue(DATA, round_number, attempt, messages[number].bytes)

    def receive(self, rank: int, link: RankLink, head: Head) -> bool:
        """Receive a message; return True when it is complete."""
        number, messages = self.applied[rank], self.plan.receives.get(rank, [])
        if rank in self.waiting:
            link.is_held = True
            return False
        if number == len(messages) or head.num_bytes != len(messages[number].bytes):
            raise ValueError(
                f"rank {rank} sends {head.num_bytes} bytes that do not belong to this operation: all ranks must make "
                "the same calls, with vectors of the same size and dtype."
            )
        message = messages[number]
        if not message.add and link.got == 0 and self._may(message):
            self.direct.add(rank)
        if not link.read_body(message.bytes if rank in self.direct else link.scratch_of(head.num_bytes)):
            return False
        if rank in self.direct:
            self.direct.discard(rank)
            self._count(rank)
        else:
            self.waiting[rank] = message, link.scratch_of(head.num_bytes)
            self._apply(rank)
        return True

    def apply(self) -> bool:
        """Apply messages that had to wait; return True if one was applied."""
        return bool(self.waiting) and sum(map(self._apply, list(self.waiting))) > 0

    def _apply(self, rank: int) -> bool:
        message, received = self.waiting[rank]
        if not self._may(message):
            return False
        if message.add:
            self.add(message.values, received)
        else:
            message.bytes[:] = received
        del self.waiting[rank]
        self._count(rank)
        return True

    def _count(self, rank: int) -> None:
        self.applied[rank] += 1
        self.left -= 1

    def _may(self, message: SliceMessage) -> bool:
        return all(self.applied[wait.rank] >= wait.number for wait in message.after_received) and all(
            self.sent[wait.rank] >= wait.number for wait in message.after_sent
        )
