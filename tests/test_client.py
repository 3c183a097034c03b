"""A worker part of the protocol: what it sends, and what it makes of the answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rainband.errors import Refused
from rainband.model.gradient import Gradient
from rainband.protocol.data_plan import BatchRange, DataPlan
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    Ack,
    Finish,
    Halt,
    InitBlock,
    Lease,
    LeaseEnd,
    LeaseRequest,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    PushResult,
    Return,
    Revoke,
)
from rainband.protocol.ports import BlockValues
from rainband.strategy import Batch, WorkItem
from rainband.worker.client import Client
from rainband.worker.pulls import PullHandle
from tests.builders import NUMEL, full, layout_of, make_plan, named, rounds_plan, specs_of


class FakePort:
    """Writes down what is sent; what can be read in place is set by the test."""

    def __init__(self, direct: bool = False) -> None:
        self.direct = direct
        self.sent: list[Message] = []
        self.payloads: list[Tensor] = []
        self.readable: dict[int, tuple[int, float] | None] = {}  # block -> (version, value), None: gone

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        payload = torch.full((message.numel,), math.nan, dtype=getattr(torch, message.dtype))
        values.write(payload)
        self.sent.append(message)
        self.payloads.append(payload)

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        found = self.readable[spec.index]
        if found is None:
            return None
        out.fill_(found[1])
        return found[0]

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class FakeFlat:
    """One parameter per block."""

    def __init__(self, num_blocks: int) -> None:
        self.layout = layout_of(num_blocks)
        self.vector = torch.zeros(num_blocks * NUMEL)

    def view(self, block: BlockSpec) -> Tensor:
        return self.vector[block.start : block.stop]

    def write(self, block: BlockSpec, tensors: list[Tensor | None], out: Tensor) -> None:
        tensor = tensors[block.index]
        if tensor is not None:
            out.copy_(tensor)

    def absent(self, block: BlockSpec, tensors: list[Tensor | None]) -> tuple[int, ...]:
        return (block.index,) if tensors[block.index] is None else ()


class Setting:
    """A client with two blocks on one port each, and what it told the coordinator."""

    def __init__(self, plan: DataPlan | None = None, direct: bool = False) -> None:
        self.ports = [FakePort(direct), FakePort(direct)]
        self.told: list[Message] = []
        self.flat = FakeFlat(2)
        self.client = Client(
            Peer("worker", 3),
            plan or make_plan(),
            self.flat,  # type: ignore[arg-type]
            specs_of(2),
            (0, 1),
            self.ports,
            self.told.append,
        )

    def lease(self, portion: int, *groups: tuple[int, ...], number: int = 1) -> None:
        self.client.receive(Lease(portion, number, groups))

    def next_batches(self) -> list[tuple[int, int]]:
        """The next work item, as (portion, k)."""
        work_item = self.client.next_item()
        return [] if work_item is None else [(b.portion, b.k) for b in work_item.batches]

    def push(self, portion: int, *ks: int, number: int = 1, values: tuple[float | None, ...] = (1.0, 2.0)) -> Any:
        tensors = [None if value is None else full(value) for value in values]
        batches = tuple(Batch(portion, k, number) for k in ks)
        return self.client.push(Gradient(tensors, batches, samples=len(ks), loss=0.0))

    def ack(self, block: int, sequence: int, result: str = PushResult.ACCEPTED, reason: str = "") -> None:
        self.client.receive(Ack(block, sequence, result, term=1, version=1, reason=reason))

    def params(self, block: int, sequence: int, value: float = 0.0, **others: Any) -> None:
        late = others.get("round_over", False)
        message = Params(block, sequence, 1, others.get("version", 0), others.get("at_version", -1), late)
        self.client.receive(message, None if late or self.ports[block].direct else full(value))

    def values(self) -> list[float]:
        return [self.flat.vector[0].item(), self.flat.vector[NUMEL].item()]

    def returned(self) -> list[Return]:
        return [message for message in self.told if isinstance(message, Return)]


# ---- leases ----


def test_a_worker_asks_once_and_keeps_one_lease_ahead() -> None:
    s = Setting(make_plan(num_batches=8, portion_batches=2))

    assert s.next_batches() == [] and s.next_batches() == []
    assert s.told == [LeaseRequest()]
    s.lease(0, (0, 1))
    assert s.next_batches() == [(0, 0)]
    assert s.told == [LeaseRequest()] * 2
    s.lease(1, (0, 1))
    assert s.next_batches() == [(0, 1)] and s.told == [LeaseRequest()] * 2  # one to go on with, one ahead
    assert [s.next_batches() for _ in range(3)] == [[(1, 0)], [(1, 1)], []]
    assert s.told == [LeaseRequest()] * 3


def test_a_lease_is_cut_into_work_items_that_never_mix_groups() -> None:
    s = Setting(make_plan(num_batches=8, portion_batches=8, batches_per_item=2))
    s.lease(0, (0, 1, 2), (4, 7), number=3)

    work_items = [s.client.next_item() for _ in range(3)]

    assert work_items == [
        WorkItem((Batch(0, 0, 3), Batch(0, 1, 3))),
        WorkItem((Batch(0, 2, 3),)),
        WorkItem((Batch(0, 4, 3), Batch(0, 7, 3)), more=False),
    ]


@pytest.mark.parametrize("items_per_round", [0, 2])
def test_a_work_item_says_whether_another_one_is_at_hand(items_per_round: int) -> None:
    s = Setting(make_plan(num_batches=8, portion_batches=2, items_per_round=items_per_round))
    s.lease(0, (0,))
    s.lease(1, (0,))
    work_items = [s.client.next_item()]
    for block in range(2 if items_per_round else 0):  # the round it has asked for begins
        s.params(block, s.client.pushes.sequence, at_version=0)
    work_items += [s.client.next_item(), s.client.next_item()]
    assert [work_item.more for work_item in work_items if work_item is not None] == [True, False]


def test_a_lease_is_given_back_as_done_when_every_block_has_answered_for_every_batch() -> None:
    s = Setting()
    s.lease(0, (0, 1))
    s.push(0, 0)
    s.push(0, 1)

    for block, sequence in ((0, 1), (1, 1), (0, 2)):
        s.ack(block, sequence)
        assert s.returned() == []
    s.ack(1, 2, PushResult.DUPLICATE)

    assert s.returned() == [Return(0, 1, LeaseEnd.DONE)]
    assert s.client.leases.held == {} and s.client.pushes.in_flight == {} and s.client.stats.acked == 2


@pytest.mark.parametrize("result", [PushResult.REVOKED, PushResult.OVERLAPS])
def test_a_worker_that_is_fenced_gives_the_lease_back_and_drops_its_work(result: str) -> None:
    s = Setting()
    s.lease(0, (0, 1, 2, 3))
    assert s.next_batches() == [(0, 0)]
    s.push(0, 0)

    s.ack(1, 1, result)
    s.ack(0, 1, result)

    assert s.returned() == [Return(0, 1, LeaseEnd[result.name])]
    assert s.next_batches() == [] and s.client.pushes.in_flight == {}


def test_a_lease_that_is_taken_back_is_left_to_others_without_a_word() -> None:
    s = Setting()
    s.lease(0, (0, 1))
    s.lease(1, (0, 1), number=2)
    for portion in (0, 1, 7):
        s.client.receive(Revoke(portion, 2))

    assert s.next_batches() == [(1, 0)] and s.returned() == []  # the one that is leased under that number is kept


def test_answers_under_an_old_lease_do_not_touch_the_new_one() -> None:
    s = Setting()
    s.lease(0, (0, 1))
    s.push(0, 0)
    s.lease(0, (0, 1), number=2)

    s.ack(0, 1, PushResult.ACCEPTED)
    s.ack(1, 1, PushResult.ACCEPTED)
    s.push(0, 1)
    s.ack(0, 2, PushResult.REVOKED)

    assert s.returned() == []
    assert s.next_batches() == [(0, 0)] and s.client.leases.held[0].unsettled == {0, 1}


def test_a_lease_that_comes_twice_or_too_late_is_the_one_that_is_held() -> None:
    s = Setting()
    s.lease(0, (0, 1, 2, 3), number=2)
    s.next_batches()

    for number in (2, 1):
        s.lease(0, (0, 1, 2, 3), number=number)

    assert s.next_batches() == [(0, 1)]
    assert s.client.leases.held[0].number == 2


def test_at_the_end_nothing_more_is_asked_for_and_what_is_left_is_given_back() -> None:
    s = Setting()
    s.lease(0, (0, 1))
    s.client.receive(Finish())

    s.next_batches()
    s.client.leases.give_all_back(LeaseEnd.STOPPED)

    assert s.told == [Return(0, 1, LeaseEnd.STOPPED)]


def test_news_is_whatever_comes() -> None:
    s = Setting()
    for message in (Lease(0, 1, ((0,),)), Finish(), Halt("enough")):
        state_changed = s.client.state_changed()
        assert not state_changed.ready()
        s.client.receive(message)
        assert state_changed.ready()
    assert s.client.stopping and s.client.finished


# ---- pushing ----


def test_a_push_goes_to_every_block_under_one_number_with_its_own_slice() -> None:
    s = Setting()
    s.client.pulls.versions[:] = [5, 6]
    s.push(1, 2, 3, number=4)

    (first,), (second,) = s.ports[0].sent, s.ports[1].sent
    assert isinstance(first, Push) and isinstance(second, Push)
    assert first.push_id == second.push_id == (BatchRange(1, 2, 4, lease=4),)
    assert (first.worker, first.sequence, first.clock, first.samples) == (3, 1, 1, 2)
    assert (first.block, first.version, second.block, second.version) == (0, 5, 1, 6)
    assert torch.equal(s.ports[0].payloads[0], full(1.0)) and torch.equal(s.ports[1].payloads[0], full(2.0))


def test_a_parameter_without_gradient_is_named_as_absent() -> None:
    s = Setting()
    s.push(0, 0, values=(None, 2.0))

    assert s.ports[0].all(Push)[0].absent == (0,)
    assert s.ports[1].all(Push)[0].absent == ()  # a block is told of its own parameters only
    assert (s.ports[0].all(Push)[0].numel, s.ports[0].payloads[0].tolist()) == (0, [])


def test_one_nan_anywhere_skips_the_batches_on_every_block() -> None:
    s = Setting()
    handle = s.push(0, 0, 1, values=(1.0, math.nan))

    for port in s.ports:
        (skip,) = port.all(Push)
        assert (skip.skip, skip.push_id, skip.samples) == ("not finite", named(0, 0, 2), 0)
        assert port.payloads == []
    s.ack(0, 1)
    s.ack(1, 1)
    assert handle.ready()


def test_what_a_server_finds_bad_is_skipped_on_that_block_alone() -> None:
    s = Setting()
    s.lease(0, (0,))
    handle = s.push(0, 0)
    s.ack(0, 1)

    s.ack(1, 1, PushResult.BAD, "not finite")

    assert not handle.ready()
    assert len(s.ports[0].all(Push)) == 1
    skip = s.ports[1].all(Push)[1]
    assert (skip.skip, skip.push_id, skip.sequence, skip.block) == ("refused: not finite", named(0, 0), 1, 1)
    s.ack(1, 1)
    assert handle.ready() and s.returned() == [Return(0, 1, LeaseEnd.DONE)]


def test_an_answer_that_comes_twice_counts_once() -> None:
    s = Setting()
    handle = s.push(0, 0)
    for _ in range(3):
        s.ack(0, 1)
    assert handle.left == 1 and not handle.ready()


@pytest.mark.parametrize("result", [PushResult.WRONG_SERVER, PushResult.EARLY])
def test_an_answer_that_cannot_be_is_an_error(result: str) -> None:
    s = Setting()
    s.push(0, 0)
    with pytest.raises(Refused, match=f"block 0 answered {result.name}"):
        s.ack(0, 1, result)


# ---- pulling ----


def test_a_pull_becomes_the_parameters_only_when_it_is_asked_for() -> None:
    s = Setting()
    pull = s.client.pull()
    assert [port.all(Pull)[0].sequence for port in s.ports] == [pull.sequence] * 2

    s.params(0, pull.sequence, 7.0, version=4)
    s.params(1, pull.sequence, 8.0, version=5)
    assert s.values() == [0.0, 0.0]

    assert pull.ready()
    assert s.values() == [7.0, 8.0] and s.client.pulls.versions == [4, 5]


def test_a_block_that_is_answered_twice_counts_once() -> None:
    s = Setting()
    pull = s.client.pull()
    s.params(0, pull.sequence)
    s.params(0, pull.sequence)

    assert not pull.ready() and pull.left == 1


def test_answers_to_an_older_pull_are_not_this_ones() -> None:
    """Not even if no push lies between the two: the old answers may be older than the last pushes of others."""
    s = Setting()
    old = s.client.pull()
    s.params(0, old.sequence, 1.0)
    new = s.client.pull_latest()

    s.params(1, old.sequence, 1.0)
    assert not new.ready() and new.left == 2
    s.params(0, new.sequence, 9.0)
    s.params(1, new.sequence, 9.0)

    assert new.ready() and s.values() == [9.0, 9.0]


def test_shared_memory_is_read_without_asking_once_ones_own_pushes_are_in() -> None:
    s = Setting(direct=True)
    s.client.pulls.asks = False  # as the first answer said
    s.ports[0].readable[0], s.ports[1].readable[1] = (3, 7.0), (4, 8.0)
    s.push(0, 0)
    s.ack(0, 1)
    pull = s.client.pull()

    assert not pull.ready() and s.values() == [7.0, 0.0]
    s.ack(1, 1)

    assert pull.ready() and s.values() == [7.0, 8.0] and s.client.pulls.versions == [3, 4]
    assert s.ports[0].all(Pull) == []


def test_an_exchange_takes_each_block_over_as_it_comes() -> None:
    s = Setting()
    gradient = Gradient([full(1.0), full(2.0)], (Batch(0, 0, 1),), 1, 0.0)
    exchange = s.client.exchange(gradient)

    assert [port.all(Push)[0].want for port in s.ports] == [True, True]
    s.params(1, exchange.sequence, 8.0)
    assert s.values() == [0.0, 8.0] and not exchange.ready()
    s.params(0, exchange.sequence, 7.0)

    assert s.values() == [7.0, 8.0] and exchange.ready()


def test_an_exchange_of_a_gradient_that_is_not_finite_still_brings_the_parameters() -> None:
    s = Setting()
    gradient = Gradient([full(math.inf), full(2.0)], (Batch(0, 0, 1),), 1, 0.0)
    exchange = s.client.exchange(gradient)

    assert [(p.skip, p.want) for port in s.ports for p in port.all(Push)] == [("not finite", True)] * 2
    for block in (0, 1):
        s.params(block, exchange.sequence, 5.0)
    assert exchange.ready() and s.values() == [5.0, 5.0]


# ---- rounds ----


def in_rounds(direct: bool = False) -> Setting:
    """Two columns of four rounds; this worker has the second column."""
    s = Setting(rounds_plan(num_batches=8, items_per_round=2, portion_batches=4), direct)
    s.lease(1, (0, 1, 2, 3))
    return s


def pull_of(s: Setting) -> PullHandle:
    assert s.client.pulls.current is not None
    return s.client.pulls.current


def test_a_work_item_is_handed_out_when_every_block_has_its_rounds_version() -> None:
    s = in_rounds()
    assert s.next_batches() == []
    assert [port.all(Pull)[-1].at_version for port in s.ports] == [0, 0]

    s.params(0, pull_of(s).sequence, at_version=0)
    assert s.next_batches() == []
    s.params(1, pull_of(s).sequence, at_version=0)

    work_item = s.client.next_item()
    assert work_item == WorkItem((Batch(1, 0, 1),), round=0)
    assert s.client.pull(0).ready() and len(s.ports[0].all(Pull)) == 1


def test_a_push_in_rounds_says_which() -> None:
    s = in_rounds()
    s.push(1, 2)
    assert s.ports[0].all(Push)[0].at_version == 2


def test_of_several_leases_the_lowest_round_comes_first() -> None:
    s = in_rounds()
    s.lease(0, (2, 3), number=2)  # what a dead worker left of the first column
    for block in (0, 1):
        s.next_batches()
        s.params(block, pull_of(s).sequence, at_version=0)
    assert s.next_batches() == [(1, 0)]
    s.client.leases.held[1].todo.popleft()  # round 1 is done as well

    s.next_batches()
    assert pull_of(s).at_version == 2


def test_a_missing_work_item_of_a_lower_round_is_asked_for_though_a_later_one_was() -> None:
    s = in_rounds()
    s.next_batches()
    s.client.leases.held[1].todo.popleft()
    s.next_batches()
    assert pull_of(s).at_version == 1

    s.lease(0, (0,), number=2)
    s.next_batches()

    assert pull_of(s).at_version == 0


def test_a_round_that_is_over_is_not_ours_to_do_any_more() -> None:
    s = in_rounds()
    s.next_batches()
    s.params(0, pull_of(s).sequence, at_version=0, round_over=True)

    assert not s.returned()
    s.next_batches()
    assert pull_of(s).at_version == 1 and s.client.leases.held[1].unsettled == {1, 2, 3}


def test_a_lease_whose_rounds_are_all_over_is_given_back() -> None:
    s = Setting(rounds_plan(num_batches=8, items_per_round=2, portion_batches=4))
    s.lease(1, (0,))
    s.next_batches()
    s.params(1, pull_of(s).sequence, at_version=0, round_over=True)

    assert s.returned() == [Return(1, 1, LeaseEnd.DONE)] and s.next_batches() == []


def test_a_version_that_goes_while_it_is_read_in_place_is_late() -> None:
    s = in_rounds(direct=True)
    s.ports[0].readable[0], s.ports[1].readable[1] = (0, 1.0), None
    s.next_batches()
    for block in (0, 1):
        s.params(block, pull_of(s).sequence, at_version=0)

    assert s.next_batches() == [(1, 0)]
    pull = s.client.pull(0)
    assert pull.ready() and pull.late


def test_late_answers_to_a_push_settle_it() -> None:
    s = Setting(rounds_plan(num_batches=8, items_per_round=2, portion_batches=4))
    s.lease(1, (0,))
    s.push(1, 0)
    s.ack(0, 1, PushResult.LATE)
    s.ack(1, 1, PushResult.ACCEPTED)
    assert s.returned() == [Return(1, 1, LeaseEnd.DONE)]


# ---- first values ----


def test_the_first_values_are_this_workers_parameters() -> None:
    s = Setting()
    s.flat.vector[:NUMEL] = 3.0
    s.client.load()

    assert [port.all(InitBlock)[0].block for port in s.ports] == [0, 1]
    assert torch.equal(s.ports[0].payloads[0], full(3.0)) and torch.equal(s.ports[1].payloads[0], full(0.0))
