"""The coordinator, message by message: who gets which lease, what is done, and how a run ends."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rainband.coordinator.coordinator import Coordinator, CoordinatorOutput, RunSettings
from rainband.coordinator.leases import PositionCounts
from rainband.protocol import events
from rainband.protocol.layout import Layout
from rainband.protocol.messages import (
    AcceptedBatches,
    Address,
    Assign,
    Conclude,
    Concluded,
    Ended,
    Failed,
    Finish,
    Flush,
    Forget,
    Go,
    Halt,
    Heartbeat,
    Join,
    Lease,
    LeaseEnd,
    LeaseRequest,
    Message,
    Params,
    Peer,
    Pull,
    Ready,
    Report,
    ReportRequest,
    Return,
    Revoke,
    ServerJoin,
    Shutdown,
    StalenessLimit,
    Tally,
    Welcome,
)
from rainband.protocol.optimizer_spec import OptimizerSpec
from tests.builders import layout_of

TIMEOUT_S = 5.0


class Run:
    """A coordinator, and what it has said to whom."""

    def __init__(self, num_workers: int = 2, num_servers: int = 2, **join: Any) -> None:
        self.coordinator = Coordinator(
            RunSettings(
                num_workers=num_workers, num_servers=num_servers, failure_timeout_s=TIMEOUT_S, model_path="model"
            )
        )
        self.join = {
            "fingerprint": "data",
            "num_samples": 8,
            "layout": layout_of(num_servers or 1),
            "batch_size": 1,
            "epochs": 1,
            "batches_per_item": 1,
            "rounds": False,
            **join,
        }
        self.num_servers = num_servers
        self.now = 0.0
        self.said: list[tuple[str, Message]] = []
        self.accepted = [0] * num_servers

    # ---- what others do ----

    def take(self, outs: list[CoordinatorOutput]) -> list[Message]:
        self.said += [(str(out.to), out.message) for out in outs]
        return [out.message for out in outs]

    def from_worker(self, index: int, message: Message, body: Any = None, incarnation: int = 0) -> list[Message]:
        peer = Peer("worker", index, incarnation)
        return self.take(self.coordinator.receive(peer, message, self.now, body))

    def from_server(self, index: int, message: Message) -> list[Message]:
        return self.take(self.coordinator.receive(Peer("server", index), message, self.now))

    def server_joins(self, index: int) -> list[Message]:
        return self.from_server(index, ServerJoin(Address("here", index)))

    def joins(self, index: int, incarnation: int = 0, **changes: Any) -> list[Message]:
        return self.from_worker(index, Join(**{**self.join, **changes}), incarnation=incarnation)

    def lost(self, role: str, index: int, incarnation: int = 0) -> list[Message]:
        return self.take(self.coordinator.lost(Peer(role, index, incarnation), self.now, "killed"))

    def wants(self, index: int) -> list[Lease]:
        return [m for m in self.from_worker(index, LeaseRequest()) if isinstance(m, Lease)]

    def returns(self, index: int, lease: Lease, reason: LeaseEnd = LeaseEnd.DONE) -> list[Message]:
        return self.from_worker(index, Return(lease.portion, lease.lease, reason))

    def report(self, server: int, accepted: int, full: tuple[int, ...] = (), **others: Any) -> list[Message]:
        given = {"first_open": 0, "updates": accepted, "blocks": (Tally(accepted, accepted, 0, 0),), **others}
        return self.from_server(server, Report(full=full, accepted=accepted, **given))

    def reports(self, accepted: int, full: tuple[int, ...] = (), **others: Any) -> list[Message]:
        return [m for server in range(self.num_servers) for m in self.report(server, accepted, full, **others)]

    def ticks(self, seconds: float = 1.0) -> list[Message]:
        self.now += seconds
        return self.take(self.coordinator.tick(self.now))

    def heartbeats(self, index: int, **numbers: Any) -> list[Message]:
        return self.from_worker(index, Heartbeat(**numbers))

    # ---- what came of it ----

    def told(self, who: str) -> list[Message]:
        return [message for to, message in self.said if to == who]

    @property
    def phase(self) -> str:
        return self.coordinator.state.phase

    def events(self, kind: type) -> list[Any]:
        return [event for event in self.coordinator.state.events if isinstance(event, kind)]


def running(num_workers: int = 2, num_servers: int = 2, **join: Any) -> Run:
    """Eight batches in portions of one each (two workers, free-running), unless told otherwise."""
    run = Run(num_workers, num_servers, **join)
    for server in range(num_servers):
        run.server_joins(server)
    for worker in range(num_workers):
        run.joins(worker)
    for server in range(num_servers):
        run.from_server(server, Ready())
    assert run.phase == "running"
    run.said.clear()
    return run


def test_a_worker_whose_replica_lost_a_worker_before_it_joined_is_dismissed() -> None:
    run = Run(num_workers=4)
    run.coordinator = Coordinator(
        RunSettings(num_workers=4, num_servers=2, failure_timeout_s=TIMEOUT_S, model_path="", workers_per_replica=2)
    )
    for server in range(2):
        run.server_joins(server)
    for worker in range(2):
        run.joins(worker, address=Address("here", worker))
    run.take(run.coordinator.liveness.never_joins(Peer("worker", 3), run.now, "killed"))
    assert any(isinstance(message, Shutdown) for message in run.joins(2, address=Address("here", 2)))
    lost = {event.node: event.why for event in run.events(events.Lost)}
    assert lost["worker 3"] == "before it joined: killed"
    assert lost["worker 2"] == "worker 3 of the same replica was lost"
    assert run.phase == "loading"  # the other replica goes on


# ---- forming ----


@pytest.mark.parametrize("custom_loop", [False, True])
def test_a_worker_that_ended_before_it_joined_is_not_waited_for(custom_loop: bool) -> None:
    run = Run(num_workers=3, custom_loop=custom_loop)
    run.server_joins(0)
    run.server_joins(1)
    for worker in (0, 1):
        run.joins(worker)
    run.take(run.coordinator.never_joins(Peer("worker", 2), run.now, "killed"))
    assert run.phase == "loading"
    assert {who for who, message in run.said if isinstance(message, Welcome)} == {"worker 0", "worker 1"}
    assert [(lost.node, lost.why) for lost in run.events(events.Lost)] == [("worker 2", "before it joined: killed")]


def test_when_every_worker_ended_before_it_joined_the_run_fails_with_the_last_reason() -> None:
    run = Run(num_workers=2)
    for worker in (0, 1):
        assert run.phase == "forming"
        run.take(run.coordinator.never_joins(Peer("worker", worker), run.now, f"exit code {worker + 1}"))
    assert (run.phase, run.coordinator.state.reason) == (
        "over",
        "no worker is left: worker 1 was the last (before it joined: exit code 2)",
    )


def test_nothing_is_planned_before_every_server_is_there() -> None:
    run = Run()
    assert run.joins(0) == [] and run.server_joins(0) == []

    kinds = [type(message) for message in run.server_joins(1)]

    assert kinds == [Assign, Assign, Welcome] and run.phase == "loading"


def test_the_first_worker_gives_the_first_values_and_all_begin_when_the_servers_are_ready() -> None:
    run = Run()
    for server in range(2):
        run.server_joins(server)
    run.joins(0)
    run.joins(1)

    assert [m.load for m in run.told("worker 0") if isinstance(m, Welcome)] == [True]
    assert [m.load for m in run.told("worker 1") if isinstance(m, Welcome)] == [False]
    assert run.from_server(0, Ready()) == []
    assert run.from_server(1, Ready()) == [Go(), Go()] and run.phase == "running"


def test_a_server_that_cannot_load_a_block_ends_the_run_with_its_reason() -> None:
    run = Run(1, 1)
    run.server_joins(0)
    run.joins(0)

    run.from_server(0, Failed(0, "block 0 was not loaded: no", ""))

    state = run.coordinator.state
    assert (state.phase, state.outcome, state.reason) == ("over", "failed", "server 0: block 0 was not loaded: no")


@pytest.mark.parametrize(("batch_size", "warned"), [(8, []), (1000, ["batches of 1,000 are larger than the data"])])
def test_batches_larger_than_the_data_are_warned_of(batch_size: int, warned: list[str]) -> None:
    run = Run(1, 1, batch_size=batch_size)
    run.server_joins(0)
    run.joins(0)
    texts = [event.text for event in run.events(events.Warned)]
    assert texts == [f"{text} (8 samples): each pass is one batch" for text in warned]


def test_blocks_are_shared_out_and_every_worker_knows_the_owners() -> None:
    run = Run()
    run.server_joins(1)
    run.server_joins(0)
    run.joins(0)

    assigned = {to: [b.index for b in m.blocks] for to, m in run.said if isinstance(m, Assign)}
    (welcome,) = run.told("worker 0")
    assert isinstance(welcome, Welcome)
    assert assigned == {"server 0": [0], "server 1": [1]} and welcome.owners == (0, 1)
    assert [address.port for address in welcome.servers] == [0, 1]


@pytest.mark.parametrize("died_in", ["forming", "loading"])
def test_when_the_worker_with_the_first_values_dies_another_gives_them(died_in: str) -> None:
    run = Run(num_servers=1)
    run.joins(0)
    run.joins(1)
    if died_in == "forming":
        run.lost("worker", 0)
        run.server_joins(0)
    else:
        run.server_joins(0)
        run.lost("worker", 0)

    assert [m.load for m in run.told("worker 1") if isinstance(m, Welcome)][-1] is True


@pytest.mark.parametrize(
    "changes, differs",
    [
        ({"fingerprint": "other"}, "the data is other, not data"),
        ({"num_samples": 9}, "the number of samples is 9, not 8"),
        ({"layout": layout_of(5)}, "the model is"),
        ({"batch_size": 2}, "the batch size is 2, not 1"),
        ({"rounds": True}, "the strategy is"),
    ],
)
def test_a_worker_with_another_plan_is_refused_with_what_differs(changes: dict[str, Any], differs: str) -> None:
    run = running()
    (bye,) = run.joins(2, **changes)
    assert isinstance(bye, Shutdown) and f"worker 2 does not fit this run: {differs}" in bye.reason


def test_a_run_that_refused_a_worker_fails_at_its_end_and_says_why() -> None:
    run = Run()
    run.server_joins(0)
    run.server_joins(1)
    run.joins(0)
    [bye] = [message for message in run.joins(1, fingerprint="other") if isinstance(message, Shutdown)]
    assert bye.reason == (
        "worker 1 does not fit this run: the data is other, not data. The samples must be equal on all workers: seed "
        "the random numbers that make them."
    )
    [lost] = run.events(events.Lost)
    assert (lost.node, lost.why) == ("worker 1", bye.reason)
    for server in (0, 1):
        run.from_server(server, Ready())
    run.wants(0)
    run.reports(8, first_open=8)
    run.reports(8, first_open=8, flushed=True)
    assert Conclude("model") in run.from_worker(0, Ended(8))
    run.from_worker(0, Concluded({}))
    run.reports(8, first_open=8)
    state = run.coordinator.state
    assert (state.phase, state.outcome) == ("over", "failed")
    assert state.reason == f"1 of 2 workers were refused: {bye.reason}"


def test_optimizer_settings_that_cannot_change_must_be_those_of_the_first_worker() -> None:
    optimizer = OptimizerSpec("sgd")

    def layout(**settings: Any) -> Layout:
        return msgspec.structs.replace(layout_of(4), groups=(settings,))

    run = running(custom_loop=True, optimizer=optimizer, layout=layout(lr=0.5, momentum=0.0))
    others: dict[str, Any] = {"custom_loop": True, "optimizer": optimizer}

    (welcome, _) = run.joins(2, **others, layout=layout(lr=0.25, momentum=0.0))
    assert isinstance(welcome, Welcome)
    (bye,) = run.joins(3, **others, layout=layout(lr=0.5, momentum=0.9))
    assert isinstance(bye, Shutdown)
    assert bye.reason == "worker 3 does not fit this run: momentum of parameter group 0 is 0.9, not 0.0."


def test_who_comes_late_begins_at_once() -> None:
    run = running()
    assert [type(m) for m in run.joins(2)] == [Welcome, Go]
    assert run.wants(2)


@pytest.mark.parametrize("phase", ["flushing", "finishing", "concluding"])
def test_who_comes_when_all_is_done_is_sent_away_and_not_waited_for(phase: str) -> None:
    run = running(num_workers=1)
    run.reports(8, first_open=8)
    if phase != "flushing":
        run.reports(8, first_open=8, flushed=True)
    if phase == "concluding":
        run.from_worker(0, Ended(8))
    assert run.phase == phase

    (bye,) = run.joins(1)

    assert isinstance(bye, Shutdown) and 1 not in run.coordinator.state.workers


# ---- leases ----


def test_portions_are_leased_in_order_and_exclusively() -> None:
    run = running()
    leases = [run.wants(worker)[0] for worker in (0, 1, 0)]
    assert leases == [Lease(portion, 1, ((0,),)) for portion in range(3)]


def test_the_last_portions_go_to_those_who_have_nothing_to_do() -> None:
    run = running(num_workers=2, num_samples=3)
    (first,), (second,) = run.wants(0), run.wants(1)
    assert (first.portion, second.portion) == (0, 1)

    assert run.wants(0) == []
    assert run.returns(0, first) == [Lease(2, 1, ((0,),))]  # at once, not with the next tick


def test_a_portion_is_done_when_the_marks_say_so_not_when_a_worker_does() -> None:
    run = running(num_samples=2)
    (first,), (second,) = run.wants(0), run.wants(1)

    run.returns(0, first)
    run.returns(1, second)
    assert run.coordinator.state.batches_done() == 0 and run.phase == "running"
    run.report(0, accepted=2, first_open=2)
    assert run.phase == "running"
    run.report(1, accepted=2, first_open=2)

    assert run.phase == "flushing"


def test_what_was_returned_as_done_and_is_not_in_the_marks_in_time_is_asked_for() -> None:
    run = running()
    (lease,) = run.wants(0)
    run.returns(0, lease)
    run.reports(0)

    run.now += TIMEOUT_S + 1
    for worker in (0, 1):
        run.heartbeats(worker)
    assert Revoke(0, 2) in run.ticks(0.0)


def test_nobody_takes_a_servers_answer_from_a_worker() -> None:
    run = running(num_workers=1, num_servers=1)
    run.from_worker(0, Report(first_open=8, full=(), accepted=8, updates=8, blocks=(Tally(8, 8, 0, 0),)))
    assert run.coordinator.state.batches_done() == 0


@pytest.mark.parametrize("how", ["killed", "silent", "revoked", "overlaps", "stopped"])
def test_a_lease_is_revoked_by_a_fence_and_missing_batches_are_reassigned(how: str) -> None:
    run = running(num_samples=64)
    (lease,) = run.wants(0)
    assert len(lease.groups[0]) == 8
    run.said.clear()
    if how == "killed":
        run.lost("worker", 0)
    elif how == "silent":
        run.now = TIMEOUT_S + 1
        run.heartbeats(1)
        run.ticks(0.0)
    else:
        run.returns(0, lease, LeaseEnd[how.upper()])

    for server in ("server 0", "server 1"):
        assert Revoke(0, 2) in run.told(server)
        assert (Forget(0) in run.told(server)) == (how in ("killed", "silent"))
    assert all(found.portion != 0 for found in run.wants(1))  # not before all have answered
    run.from_server(0, AcceptedBatches(0, 2, masks=(0b0000_0111,)))
    assert not [m for m in run.told("worker 1") if isinstance(m, Lease) and m.portion == 0]
    outs = run.from_server(1, AcceptedBatches(0, 2, masks=(0b0000_0001,))) + run.wants(1)

    assert Lease(0, 2, ((1, 2), (3, 4, 5, 6, 7)), partly_accepted=(1, 2)) in outs  # by server 0
    assert run.coordinator.state.reassigned == 1
    assert [(e.portion, e.batches, e.from_worker) for e in run.events(events.BatchesReassigned)] == [(0, 7, 0)]


def test_answers_to_an_earlier_fence_do_not_count() -> None:
    run = running(num_samples=64)
    (lease,) = run.wants(0)
    run.returns(0, lease, LeaseEnd.REVOKED)
    run.from_server(0, AcceptedBatches(0, 1, masks=(0xFF,)))
    run.from_server(1, AcceptedBatches(0, 1, masks=(0xFF,)))
    assert 0 in run.coordinator.leases.gathering


def test_a_fence_that_is_not_answered_is_asked_for_again() -> None:
    run = running(num_samples=64)
    (lease,) = run.wants(0)
    run.returns(0, lease, LeaseEnd.OVERLAPS)
    run.from_server(0, AcceptedBatches(0, 2, masks=(0,)))
    run.said.clear()

    run.ticks()

    assert Revoke(0, 2) in run.told("server 1") and Revoke(0, 2) not in run.told("server 0")


def test_lease_numbers_of_portions_that_are_done_are_forgotten() -> None:
    run = running(num_samples=8)
    leases = [run.wants(worker)[0] for worker in (0, 1, 0, 1)]
    run.returns(1, leases[1], LeaseEnd.UNUSED)
    assert sorted(run.coordinator.leases.numbers) == [0, 1, 2, 3]
    run.reports(3, full=(0, 2, 3), first_open=1)
    run.ticks()
    assert sorted(run.coordinator.leases.numbers) == [1, 2, 3]
    assert run.wants(0)[0].portion == 1
    run.reports(4, full=(), first_open=4)
    run.ticks()
    assert run.coordinator.leases.numbers == {}


def test_the_number_of_a_portion_is_not_forgotten_while_its_accepted_sets_are_requested() -> None:
    run = running(num_samples=8)
    lease = run.wants(0)[0]
    run.lost("worker", 0)
    run.report(0, 1, first_open=1)
    run.report(1, 1, first_open=1)
    run.ticks()
    assert run.coordinator.leases.numbers == {lease.portion: 2}  # until both servers have answered
    for server in (0, 1):
        run.from_server(server, AcceptedBatches(lease.portion, 2, (1,)))
    run.ticks()
    assert run.coordinator.leases.numbers == {}


def test_a_portion_that_lacks_nothing_is_not_reassigned() -> None:
    run = running(num_samples=64)
    (lease,) = run.wants(0)
    run.lost("worker", 0)
    for server in range(2):
        run.from_server(server, AcceptedBatches(lease.portion, 2, masks=(0xFF,)))

    assert run.coordinator.leases.again == {} and run.coordinator.state.reassigned == 0


def test_a_lease_that_was_taken_back_cannot_be_returned() -> None:
    run = running(num_samples=64)
    (lease,) = run.wants(0)
    run.now = TIMEOUT_S + 1
    run.heartbeats(1)
    run.ticks(0.0)

    assert run.returns(0, lease, LeaseEnd.DONE) == []
    assert run.coordinator.leases.unconfirmed == {}


# ---- who is here ----


def suspected(**join: Any) -> Run:
    """Worker 0 has been silent too long."""
    run = running(num_samples=64, **join)
    run.wants(0)
    run.now = TIMEOUT_S + 1
    run.heartbeats(1)
    run.ticks(0.0)
    assert not run.coordinator.state.workers[0].active
    return run


def test_who_is_not_heard_of_is_given_up_and_gets_nothing() -> None:
    run = suspected()
    run.coordinator.leases.wanting[0] = None
    assert [e.why for e in run.events(events.Lost)] == ["no heartbeat for 6.0 s"]
    assert not [m for m in run.ticks(0.0) if isinstance(m, Lease)]


@pytest.mark.parametrize(
    "sign", [LeaseRequest(), Return(0, 1, LeaseEnd.REVOKED), Heartbeat(waiting=True), Heartbeat(acked=1), Ended(0)]
)
def test_who_works_or_waits_for_work_is_here_again(sign: Message) -> None:
    run = suspected()
    run.from_worker(0, sign)
    assert run.coordinator.state.workers[0].active
    assert [e.node for e in run.events(events.Returned)] == ["worker 0"]


def test_a_heartbeat_alone_says_alive_and_not_working() -> None:
    run = suspected()
    run.heartbeats(0, acked=0)
    assert not run.coordinator.state.workers[0].active


def test_a_worker_that_acknowledged_long_ago_and_hangs_now_does_not_come_back_by_its_heartbeat() -> None:
    run = running(num_samples=64)
    run.wants(0)
    run.heartbeats(0, acked=7)
    run.now = TIMEOUT_S + 1
    run.heartbeats(1)
    run.ticks(0.0)

    run.heartbeats(0, acked=7)

    assert not run.coordinator.state.workers[0].active


def test_who_beats_and_pushes_nothing_is_away() -> None:
    run = running(num_samples=64)
    run.wants(0)
    for acked in range(1, 4):  # a second for each push is what is usual here
        run.now += 1.0
        run.heartbeats(0, acked=acked)
        run.heartbeats(1)
    assert run.coordinator.state.workers[0].slowest_s == 1.0

    for _ in range(20):  # up to twice the timeout and ten times what is usual
        run.heartbeats(0, acked=3)
        run.heartbeats(1)
        run.ticks()
    assert run.coordinator.state.workers[0].active
    run.heartbeats(0, acked=3)
    run.heartbeats(1)
    run.ticks()

    assert not run.coordinator.state.workers[0].active
    assert "inactive: heartbeats, but no push for 21.0 s" in [e.why for e in run.events(events.Lost)]


def test_who_hangs_before_its_first_push_is_away_after_ten_times_what_the_first_one_of_others_took() -> None:
    run = running(num_samples=64)
    run.wants(0)
    run.wants(1)
    run.now += 2.0
    run.heartbeats(0, acked=1)
    for acked in range(2, 40):  # from then on it is quick, and only its first one counts
        run.heartbeats(1, acked=0)
        run.heartbeats(0, acked=acked)
        run.ticks(1.0)
        late = run.now > 2 * TIMEOUT_S + 10 * 2.0
        assert run.coordinator.state.workers[1].active is not late
    assert run.coordinator.state.workers[0].active


def test_nobody_is_away_before_anyone_has_pushed() -> None:
    run = running(num_samples=64)
    run.wants(0)
    run.wants(1)
    for _ in range(100):
        run.heartbeats(0, acked=0)
        run.heartbeats(1, acked=0)
        run.ticks()
    assert run.coordinator.state.workers[0].active and run.coordinator.state.workers[1].active


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_loop_that_hangs_in_a_loader_of_its_own_is_away_when_others_wait_for_it(waited_for: bool) -> None:
    """It has no leases, so only who waits can say that it is missed."""
    run = running(custom_loop=True)
    for acked in range(1, 4):
        run.now += 1.0
        run.heartbeats(0, acked=acked)
        run.heartbeats(1, acked=acked)
    for _ in range(int(2 * TIMEOUT_S + 10) + 2):
        run.heartbeats(0, acked=3)
        run.heartbeats(1, acked=3, waiting=waited_for)
        run.ticks()

    assert run.coordinator.state.workers[0].active is not waited_for
    assert run.coordinator.state.workers[1].active
    run.heartbeats(0, acked=4)
    assert run.coordinator.state.workers[0].active


def ahead_of_a_worker_that_has_not_begun(limit: StalenessLimit | None) -> Run:
    """Worker 0 pushes every second, from 3 s on it waits for worker 1, which has read the parameters and no lease."""
    run = running(num_samples=64)
    run.wants(0)
    for second in range(1, 25):
        run.heartbeats(0, acked=min(second, 3), waiting=second > 3, held_by=1 if second > 3 else None)
        run.heartbeats(1)
        run.reports(min(second, 3), limit=limit, missed=())
        run.ticks()
    return run


def test_who_hangs_before_its_first_batch_is_not_waited_for_with_a_bound() -> None:
    """More than 2 x 5 s + 10 x 1 s, the longest interval between two pushes of the other."""
    run = ahead_of_a_worker_that_has_not_begun(StalenessLimit(1, "clocks", 0, 0))
    [lost] = run.events(events.Lost)
    assert (lost.node, lost.why) == ("worker 1", "inactive: heartbeats, but no push for 21.0 s")
    assert Forget(1) in run.told("server 0") and Forget(1) in run.told("server 1")


def test_without_a_bound_nobody_waits_for_who_has_not_begun() -> None:
    assert ahead_of_a_worker_that_has_not_begun(None).events(events.Lost) == []


def test_progress_names_the_worker_that_is_waited_for() -> None:
    """From the third heartbeat on with the same worker and without a step between them."""
    run = running(num_samples=64)
    run.reports(0)
    for held_by, steps in [(1, 1), (1, 2), (1, 2), (1, 2), (None, 2)]:
        run.heartbeats(0, waiting=held_by is not None, held_by=held_by, steps=steps)
        run.ticks()
    assert [event.waiting_for for event in run.events(events.Progress)] == [{}, {}, {}, {0: 1}, {}]


def test_who_waits_for_others_is_not_to_blame() -> None:
    run = running(num_samples=64)
    run.wants(0)
    run.now = 1.0
    run.heartbeats(0, acked=1)
    for _ in range(50):
        run.ticks()
        run.heartbeats(0, acked=1, waiting=True)
        run.heartbeats(1)
    assert run.coordinator.state.workers[0].active


def test_a_worker_that_was_started_again_is_another_one() -> None:
    run = running(num_samples=64)
    (lease,) = run.wants(0)

    outs = run.joins(0, incarnation=1)

    assert Revoke(lease.portion, 2) in outs and Forget(0) in outs
    assert [type(m) for m in outs if isinstance(m, Welcome | Go)] == [Welcome, Go]
    assert Shutdown("worker 0 was started again.") in outs  # for its earlier life, which may only have been cut off
    assert run.lost("worker", 0, incarnation=0) == []
    assert run.from_worker(0, LeaseRequest(), incarnation=0) == []
    assert run.coordinator.state.workers[0].connected
    assert run.joins(0, incarnation=0) == [Shutdown("worker 0 was started again.")]  # its earlier life, late


def test_the_only_worker_may_be_started_again() -> None:
    run = running(num_workers=1)
    run.joins(0, incarnation=1)
    assert run.phase == "running"


def test_a_portion_that_cost_three_workers_their_lives_ends_the_run() -> None:
    run = running(num_workers=4, num_samples=64)
    for death, worker in enumerate((0, 1, 2)):
        (lease,) = run.wants(worker)
        assert lease.portion == 0
        run.lost("worker", worker)
        for server in range(2):
            run.from_server(server, AcceptedBatches(0, death + 2, masks=(0,)))

    assert run.phase == "finishing"  # the fourth one saves the model so far
    assert (run.coordinator.state.outcome, run.coordinator.state.reason) == (
        "failed",
        "3 workers died on the same batches (portion 0)",
    )


def test_a_portion_that_was_only_leased_ahead_is_not_to_blame() -> None:
    run = running(num_samples=64)
    assert [run.wants(0)[0].portion for _ in range(2)] == [0, 1]
    run.lost("worker", 0)
    assert run.coordinator.liveness.deaths == {0: 1}


def test_in_rounds_all_columns_of_the_first_group_may_be_to_blame_and_no_later_one() -> None:
    run = running(num_workers=2, num_samples=128, rounds=True)
    run.lost("worker", 1)
    portions = [run.wants(0)[0].portion for _ in range(3)]
    assert portions == [0, 1, 2]  # two columns of the first 16 rounds, one of the next

    run.joins(2)
    run.lost("worker", 0)

    assert run.coordinator.liveness.deaths == {0: 1, 1: 1}


def test_a_server_that_is_started_again_does_not_replace_the_one_with_the_parameters() -> None:
    run = running(num_samples=64)
    again = Peer("server", 1, 1)
    outs = run.coordinator.receive(again, ServerJoin(Address("here", 9)), run.now)
    assert CoordinatorOutput(again, Shutdown("the run began before this server joined.")) in outs
    assert (run.phase, run.coordinator.state.outcome) == ("over", "failed")
    assert run.coordinator.state.reason.startswith("server 1 was lost (it was started again, without its blocks).")


def test_a_join_of_a_server_that_arrives_twice_changes_nothing() -> None:
    run = running(num_samples=64)
    run.report(1, accepted=3)
    assert run.server_joins(1) == [] and run.phase == "running"
    assert run.coordinator.state.servers[1].report is not None


# ---- servers that fall silent ----


def test_a_server_that_falls_silent_is_asked_and_reported_once_and_again_when_it_answers() -> None:
    run = running(num_samples=64)
    for _ in range(8):
        run.ticks()
        run.report(0, accepted=0)
        for worker in (0, 1):
            run.heartbeats(worker)
    assert [(e.node, e.why) for e in run.events(events.Lost)] == [
        ("server 1", "no message for 6.0 s; all workers wait for it")
    ]
    run.report(1, accepted=0)
    assert [e.node for e in run.events(events.Returned)] == ["server 1"] and run.phase == "running"


@pytest.mark.parametrize(
    ("timeout_s", "tick_s", "reported"), [(5.0, 0.125, "5.1"), (5.0, 1.0, "6.0"), (20.0, 1.0, "21.0")]
)
def test_silence_is_measured_in_seconds_however_often_the_coordinator_ticks(
    timeout_s: float, tick_s: float, reported: str
) -> None:
    run = running(num_samples=64)
    run.coordinator.state.settings = msgspec.structs.replace(
        run.coordinator.state.settings, failure_timeout_s=timeout_s
    )
    for _ in range(200):
        run.ticks(tick_s)
        run.report(0, accepted=0)
        for worker in (0, 1):
            run.heartbeats(worker)
    assert run.phase == "running"
    assert [(e.node, e.why) for e in run.events(events.Lost)] == [
        ("server 1", f"no message for {reported} s; all workers wait for it")
    ]


def test_a_server_that_is_silent_for_ten_minutes_ends_the_run() -> None:
    run = running(num_samples=64)
    for _ in range(601):
        assert run.phase == "running"
        run.ticks()
        run.report(0, accepted=0)
        for worker in (0, 1):
            run.heartbeats(worker)
    assert (run.phase, run.coordinator.state.outcome) == ("over", "failed")
    assert run.coordinator.state.reason.startswith("server 1 was lost (no message for 601 s). It held the only copy of")


def test_a_clock_that_jumps_ends_no_run() -> None:
    run = running(num_samples=64)
    for _ in range(3):
        run.ticks(1000.0)
    assert run.phase == "running"


# ---- warm start ----


def test_one_worker_warms_up_alone() -> None:
    run = running(num_samples=64, warm_start_batches=8)
    assert run.wants(1) == []
    (lease,) = run.wants(0)
    run.returns(0, lease)

    outs = run.reports(8, first_open=1)

    assert [m.portion for m in outs if isinstance(m, Lease)] == [1]


def test_when_the_one_that_warms_up_dies_the_next_goes_on() -> None:
    run = running(num_samples=64, warm_start_batches=8)
    run.wants(1)
    run.wants(0)
    run.lost("worker", 0)
    outs = [m for server in range(2) for m in run.from_server(server, AcceptedBatches(0, 2, masks=(0,)))]
    assert [m.portion for m in outs if isinstance(m, Lease)] == [0]


# ---- rounds ----


def test_columns_are_shared_evenly() -> None:
    run = running(num_workers=4, num_samples=64, rounds=True)
    leases = {worker: run.wants(worker)[0].portion for worker in range(4)}
    assert leases == {0: 0, 1: 1, 2: 2, 3: 3}
    assert run.coordinator.state.plan is not None and run.coordinator.state.plan.items_per_round == 4


def test_a_dead_workers_column_goes_to_one_that_waits() -> None:
    run = running(num_workers=2, num_samples=8, rounds=True)
    run.wants(0)
    run.wants(1)
    run.from_worker(1, LeaseRequest())

    run.lost("worker", 0)
    outs = [m for server in range(2) for m in run.from_server(server, AcceptedBatches(0, 2, masks=(0b1,)))]

    assert Lease(0, 2, ((1, 2, 3),)) in outs


def test_who_comes_later_gets_its_columns_from_those_who_came_first() -> None:
    """Four columns of a group of 16 rounds, and of the next. The first worker is alone, and takes all eight."""
    run = Run(num_workers=4, num_servers=1, num_samples=128, rounds=True)
    run.server_joins(0)
    run.joins(0)
    run.from_server(0, Ready())
    assert [run.wants(0)[0].portion for _ in range(8)] == list(range(8)) and run.wants(0) == []
    run.joins(1)
    run.said.clear()

    run.from_worker(1, LeaseRequest())
    fences = [Revoke(3, 2), Revoke(7, 2)]
    assert run.told("server 0") == fences == run.told("worker 0")  # of each group the last one
    run.from_server(0, AcceptedBatches(3, 2, masks=(0b1,)))
    # To who has fewest of them, though another has waited for longer; and without what was done already.
    assert run.told("worker 1") == [Lease(3, 2, (tuple(range(1, 16)),))]

    def settled() -> dict[int, list[int]]:
        for _ in range(8):
            for worker in run.coordinator.state.workers:
                run.from_worker(worker, LeaseRequest())
            for portion in list(run.coordinator.leases.gathering):
                run.from_server(0, AcceptedBatches(portion, run.coordinator.leases.numbers[portion], masks=(0,)))
        return {index: sorted(worker.leases) for index, worker in run.coordinator.state.workers.items()}

    assert settled() == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    run.joins(2)
    assert sorted(len(mine) for mine in settled().values()) == [2, 2, 4]
    run.joins(3)
    in_first_group = {index: [p for p in mine if p < 4] for index, mine in settled().items()}
    assert sorted(in_first_group.values()) == [[0], [1], [2], [3]]
    assert run.coordinator.state.reassigned == 0  # nobody was lost, and nothing is done twice


def test_a_request_for_another_position_looks_at_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty positions for forty workers: those that have one and ask for more find none, as nobody has three."""
    run = Run(num_workers=60, num_servers=1, num_samples=60 * 32, rounds=True)
    run.server_joins(0)
    for worker in range(40):
        run.joins(worker)
    run.from_server(0, Ready())
    counts, looked_at = run.coordinator.leases.counts, list[int]()
    has = PositionCounts.has
    monkeypatch.setattr(
        PositionCounts, "has", lambda self, worker, group: looked_at.append(group) or has(self, worker, group)
    )
    for _ in range(4):
        for worker in range(40):
            looked_at.clear()
            run.wants(worker)
    assert len(looked_at) <= 2  # the asking worker's own number, in two groups; it was 120
    for worker in (0, 7):
        run.lost("worker", worker)
    run.returns(1, Lease(*next(iter(run.coordinator.state.workers[1].leases.items())), ()))
    groups, counted = counts.groups(), counts.of
    counts.forget()
    assert (groups, counted) == (counts.groups(), counts.of) and sum(map(len, counted.values())) == 2 * 38


def test_who_has_as_many_columns_as_it_can_takes_none_from_others() -> None:
    """Three columns for two workers: one has two of them, and keeps them."""
    run = Run(num_workers=3, num_servers=1, num_samples=96, rounds=True)
    run.server_joins(0)
    for worker in (0, 1):
        run.joins(worker)
    run.from_server(0, Ready())
    for worker in (0, 1, 0, 1, 0, 1, 0, 1):
        run.wants(worker)
    assert run.coordinator.leases.gathering == {}
    assert sorted(len(worker.leases) for worker in run.coordinator.state.workers.values()) == [3, 3]


def test_there_are_no_more_columns_than_batches() -> None:
    run = running(num_workers=4, num_samples=3, rounds=True)
    assert run.coordinator.state.plan is not None and run.coordinator.state.plan.items_per_round == 3


# ---- the end ----


def finished() -> Run:
    """All is in the marks; the servers were asked to flush."""
    run = running()
    run.wants(0)
    run.reports(8, first_open=8)
    assert run.phase == "flushing"
    assert Flush() in run.told("server 0") and Flush() in run.told("server 1")
    return run


def test_a_run_ends_step_by_step() -> None:
    run = finished()
    assert run.report(0, 8, first_open=8, flushed=True) == []
    assert run.report(1, 8, first_open=8, flushed=True) == [Finish(), Finish()] and run.phase == "finishing"
    assert run.from_worker(0, Ended(5)) == []
    assert Conclude("model") in run.from_worker(1, Ended(3)) and run.phase == "concluding"
    assert ReportRequest() in run.told("server 0")
    run.from_worker(0, Concluded({"accuracy": 0.5}))
    outs = run.reports(8, first_open=8)

    assert outs == [Shutdown("")] * 4 and run.phase == "over"
    assert run.coordinator.shutdown.metrics == {"accuracy": 0.5} and run.coordinator.state.outcome == "finished"
    accounting = run.coordinator.reporting.accounting()
    assert accounting is not None and accounting.balanced and (accounting.applied, accounting.not_processed) == (8, 0)


def test_a_report_that_was_asked_for_meanwhile_does_not_undo_the_flush() -> None:
    run = finished()
    run.report(0, 8, first_open=8, flushed=True)
    run.report(0, 8, first_open=8)  # the answer to a tick
    assert run.report(1, 8, first_open=8, flushed=True) == [Finish(), Finish()]


def test_the_saved_buffers_are_the_mean_weighted_by_samples() -> None:
    run = finished()
    run.reports(8, first_open=8, flushed=True)
    run.from_worker(0, Ended(3), np.array([2.0, 4.0]).tobytes())
    outs = run.coordinator.receive(Peer("worker", 1), Ended(1), run.now, np.array([6.0, 0.0]).tobytes())

    (body,) = [out.body for out in outs if isinstance(out.message, Conclude)]
    assert body is not None and np.frombuffer(body).tolist() == [3.0, 3.0]


def concluding() -> Run:
    run = finished()
    run.reports(8, first_open=8, flushed=True)
    for worker in (0, 1):
        run.from_worker(worker, Ended(4))
    assert run.phase == "concluding" and run.coordinator.shutdown.concluder == 0
    return run


def test_when_the_worker_that_saves_the_model_dies_another_saves_it() -> None:
    run = concluding()
    assert Conclude("model") in run.lost("worker", 0)
    assert run.coordinator.shutdown.concluder == 1


def test_when_the_worker_that_saves_the_model_falls_silent_another_saves_it() -> None:
    run = concluding()
    run.now += TIMEOUT_S + 1
    run.heartbeats(1)
    assert Conclude("model") in run.ticks(0.0)
    assert run.coordinator.shutdown.concluder == 1


def test_when_all_that_could_save_the_model_fall_silent_one_of_them_is_asked_again() -> None:
    run = concluding()
    run.now += TIMEOUT_S + 1
    run.heartbeats(1)
    run.ticks(0.0)

    assert Conclude("model") in run.ticks(TIMEOUT_S + 1)
    assert run.phase == "concluding" and run.coordinator.state.outcome == "finished"


def test_who_falls_silent_while_the_run_ends_is_not_waited_for() -> None:
    run = finished()
    run.reports(8, first_open=8, flushed=True)
    run.from_worker(1, Ended(4))
    run.now += TIMEOUT_S + 1
    run.heartbeats(1)

    assert Conclude("model") in run.ticks(0.0)


def test_several_may_fall_silent_at_once() -> None:
    run = running(num_workers=3)
    run.reports(8, first_open=8)
    run.reports(8, first_open=8, flushed=True)
    run.from_worker(2, Ended(8))
    run.now += TIMEOUT_S + 1
    run.heartbeats(2)

    assert Conclude("model") in run.ticks(0.0)


def test_if_all_are_silent_the_run_waits_for_one_of_them() -> None:
    run = finished()
    run.reports(8, first_open=8, flushed=True)
    run.ticks(TIMEOUT_S + 1)
    assert run.phase == "finishing" and run.coordinator.state.outcome == "finished"

    run.from_worker(1, Ended(4))

    assert run.phase == "concluding" and run.coordinator.shutdown.concluder == 1


def test_without_workers_a_run_fails() -> None:
    run = running()
    run.lost("worker", 0)
    assert run.phase == "running"
    run.lost("worker", 1)
    assert (run.phase, run.coordinator.state.outcome) == ("finishing", "failed")
    assert run.coordinator.state.reason.startswith("no worker is left")
    assert run.told("server 0")[-1] == run.told("server 1")[-1] == Flush(((0, 0), (1, 0)))


def test_without_workers_the_coordinator_fetches_the_model_from_the_servers() -> None:
    run = running()
    run.lost("worker", 0)
    run.lost("worker", 1)
    run.report(0, 3, flushed=True)
    assert run.report(1, 3, flushed=True) == [Pull(1), Pull(1)]
    assert run.phase == "concluding"
    rescue = run.coordinator.shutdown.rescue
    for block in range(2):
        assert not rescue.is_complete
        run.take(run.coordinator.receive(Peer("server", block), Params(block, 1, 1, 7), run.now, bytes([block] * 64)))
    assert (run.phase, rescue.is_complete) == ("over", True)
    assert rescue.values == {0: bytes(64), 1: bytes([1] * 64)}
    assert {type(run.told(f"server {i}")[-1]) for i in range(2)} == {Shutdown}


def test_if_no_worker_can_save_the_model_the_coordinator_fetches_it() -> None:
    run = concluding()
    assert Conclude("model") in run.from_worker(0, Failed(step=9, error="NotSaved: disk full", traceback=""))
    assert run.from_worker(1, Failed(step=9, error="NotSaved: disk full", traceback="")) == [Pull(1), Pull(1)]
    assert run.coordinator.state.reason == "no worker is left: worker 1 was the last (NotSaved: disk full)"


def test_of_a_torn_round_the_coordinator_fetches_the_version_that_all_blocks_have() -> None:
    run = running(rounds=True)
    run.lost("worker", 0)
    run.lost("worker", 1)
    run.reports(2, flushed=True)
    run.coordinator.receive(Peer("server", 0), Params(0, 1, 1, version=4), run.now, b"new")
    outs = run.coordinator.receive(Peer("server", 1), Params(1, 1, 1, version=3), run.now, b"old")
    assert [out.message for out in outs] == [Pull(2, at_version=3)] * 2
    run.coordinator.receive(Peer("server", 0), Params(0, 2, 1, version=3), run.now, b"old")
    run.coordinator.receive(Peer("server", 1), Params(1, 2, 1, version=3), run.now, b"old")
    assert run.coordinator.shutdown.rescue.values == {0: b"old", 1: b"old"}


def test_after_an_error_of_the_user_the_other_workers_save_the_model() -> None:
    run = running()
    outs = run.from_worker(0, Failed(step=3, error="ValueError: no", traceback="..."))
    assert Halt("worker 0 failed at step 3: ValueError: no") in run.told("worker 1")
    assert Shutdown("worker 0 failed at step 3: ValueError: no") in outs
    assert run.from_worker(1, Ended(3)) == [Flush(((0, 0),))] * 2
    assert run.report(0, 3, flushed=True) == []
    assert Conclude("model") in run.report(1, 3, flushed=True)
    run.from_worker(1, Concluded({"accuracy": 0.5}))
    run.reports(3)
    assert (run.phase, run.coordinator.state.outcome) == ("over", "failed")
    assert run.coordinator.state.reason == "worker 0 failed at step 3: ValueError: no"


def without_servers() -> Run:
    """Two workers that have the parameters themselves."""
    run = Run(num_workers=2, num_servers=0)
    for worker in range(2):
        run.joins(worker)
    assert run.phase == "running"
    return run


BROKEN = Failed(step=3, error="OSError: the file is broken", traceback="...")


def test_without_servers_the_last_worker_whose_code_raises_saves_the_model() -> None:
    run = without_servers()
    assert Shutdown("worker 0 failed at step 3: OSError: the file is broken") in run.from_worker(0, BROKEN)
    assert run.from_worker(1, BROKEN) == [Conclude("model")]
    run.from_worker(1, Concluded({}))
    assert (run.phase, run.coordinator.state.outcome) == ("over", "failed")
    assert run.coordinator.state.reason == "worker 0 failed at step 3: OSError: the file is broken"


@pytest.mark.parametrize("end", ["it cannot save", "it is killed"])
def test_a_last_worker_that_cannot_save_ends_the_run(end: str) -> None:
    run = without_servers()
    run.from_worker(0, BROKEN)
    run.from_worker(1, BROKEN)
    outs = run.lost("worker", 1) if end == "it is killed" else run.from_worker(1, Failed(0, "NotSaved: full", ""))
    assert not [m for m in outs if isinstance(m, Conclude)] and run.phase == "over"


def test_a_worker_that_fails_before_it_trains_saves_nothing() -> None:
    run = without_servers()
    run.lost("worker", 0)
    outs = run.from_worker(1, Failed(step=0, error="ImportError: no", traceback="..."))
    assert not [m for m in outs if isinstance(m, Conclude)] and run.phase == "over"


def test_an_error_in_the_evaluation_comes_after_the_model_is_saved() -> None:
    run = concluding()
    outs = run.from_worker(0, Failed(step=4, error="ValueError: no", traceback="..."))
    assert not [m for m in outs if isinstance(m, Conclude | Pull)]
    run.reports(8, first_open=8)
    assert (run.phase, run.coordinator.state.outcome) == ("over", "failed")


def test_without_copies_a_lost_server_is_the_end_and_the_reason_says_what_is_gone() -> None:
    run = running()
    run.reports(3)
    run.lost("server", 1)

    assert (run.phase, run.coordinator.state.outcome) == ("over", "failed")
    assert "server 1 was lost (killed). It held the only copy of 1 blocks" in run.coordinator.state.reason


def test_the_batches_that_were_applied_are_still_known_when_the_only_server_is_lost() -> None:
    run = running(num_servers=1)
    run.reports(3)
    run.lost("server", 0)

    assert "with 3 batches applied" in run.coordinator.state.reason
    assert run.coordinator.reporting.samples_done() == 3


def test_a_loss_is_reported_once_with_the_samples_that_were_new_then() -> None:
    run = running()
    run.now = 1.0
    run.heartbeats(0, loss=4.0, loss_samples=1)
    run.heartbeats(1, loss=1.0, loss_samples=2)
    run.reports(3)
    run.ticks(0.0)
    run.ticks()  # no heartbeat since
    run.heartbeats(1, loss=0.5, loss_samples=2)
    run.ticks()

    assert [event.loss for event in run.events(events.Progress)] == [2.0, None, 0.5]  # (4 + 2 * 1) / 3


def test_rounds_of_several_batches_at_a_time_are_refused() -> None:
    run = Run()
    for server in (0, 1):
        run.server_joins(server)
    outs = run.joins(0, rounds=True, batches_per_item=2)

    assert [
        m for m in outs if isinstance(m, Shutdown) and "pushes one batch at a time, and this one requests 2" in m.reason
    ]
    assert run.coordinator.state.outcome == "failed"


def test_a_stopped_run_lets_its_workers_finish_and_saves_what_there_is() -> None:
    run = running()
    run.reports(3)
    assert run.take(run.coordinator.shutdown.stop("stopped", "interrupted")) == [Halt("interrupted")] * 2
    run.from_worker(0, Ended(2))
    assert run.from_worker(1, Ended(1)) == [Flush(), Flush()]  # what rules have gathered is part of the model
    assert run.report(0, 3, flushed=True) == []  # the other one has been asked
    assert Conclude("model") in run.report(1, 3, flushed=True)
    assert run.coordinator.state.outcome == "stopped"


def test_a_stopped_run_has_no_pushes_of_lost_workers_after_the_flush() -> None:
    """They could arrive after the model was read, and would be counted without being in it."""
    run = running()
    run.reports(3)
    run.take(run.coordinator.shutdown.stop("stopped", "interrupted"))
    run.from_worker(0, Ended(2))
    run.heartbeats(0)
    run.ticks(6.0)
    run.heartbeats(0)
    assert [e.node for e in run.events(events.Lost)] == ["worker 1"]
    assert run.told("server 0")[-1] == run.told("server 1")[-1] == Flush(((1, 0),))
    assert run.report(0, 3, flushed=True) == []
    run.from_worker(1, Heartbeat(steps=3, acked=3))  # it returns, and is waited for
    assert run.report(1, 3, flushed=True) == []
    assert Conclude("model") in run.from_worker(1, Ended(1))


def test_the_users_error_is_shown_once_and_ends_the_run() -> None:
    run = running()
    outs = run.from_worker(0, Failed(step=3, error="ValueError: no", traceback="..."))
    run.from_worker(1, Failed(step=4, error="ValueError: no", traceback="..."))

    assert [m for m in outs if isinstance(m, Shutdown | Halt)]
    assert [(e.worker, e.step, e.error) for e in run.events(events.UserError)] == [(0, 3, "ValueError: no")]
    assert run.coordinator.state.outcome == "failed"
    assert run.coordinator.state.reason == "worker 0 failed at step 3: ValueError: no"


def test_one_worker_without_servers_is_done_when_its_own_marks_say_so() -> None:
    run = Run(num_workers=1, num_servers=0)
    assert [type(m) for m in run.joins(0)] == [Welcome, Go]
    own = Report(first_open=2, full=(), accepted=8, updates=8, blocks=(Tally(8, 8, 0, 0),))

    assert run.wants(0) and Finish() in run.from_worker(0, own)
    assert Conclude("model") in run.from_worker(0, Ended(8))
    run.from_worker(0, Concluded({}))
    assert run.phase == "over"
