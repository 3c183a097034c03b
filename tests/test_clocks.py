"""Bounded asynchrony: readers are admitted exactly when the paper admits them, and what they missed is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import (
    COORDINATOR,
    Assign,
    Forget,
    Idle,
    InitBlock,
    Message,
    Params,
    Peer,
    Pull,
    PullDelayed,
    PushResult,
    ReportRequest,
    Revoke,
    StalenessLimit,
)
from rainband.rules import Clocks, StalenessBound, TaskBound
from rainband.server.server import Server
from rainband.strategies.stale_sync import StaleSync
from tests.builders import WORKERS, full, make_buffer, make_plan, make_push, make_server_part, named, specs_of
from tests.harness import Faults, Node, SimulatedCluster, run
from tests.ledger import LR, Case, Ledger, number_of
from tests.random_runs import run_seed
from tests.test_rules import Recorder, number

# ---- clocks by themselves ----


def test_a_clock_ticks_when_all_before_it_are_in() -> None:
    clocks = Clocks()
    clocks.enter(0, base=0, version=0)

    clocks.tick(0, 2, version=1)
    clocks.tick(0, 3, version=2)
    assert clocks.of == {0: 0}

    clocks.tick(0, 1, version=3)
    assert clocks.of == {0: 3} and clocks.slowest == 3


def test_who_comes_late_starts_at_the_slowest_clock() -> None:
    clocks = Clocks()
    for worker, clock in ((0, 5), (1, 7)):
        clocks.enter(worker, base=clock, version=0)

    clocks.enter(2, base=0, version=0)
    clocks.enter(3, base=6, version=0)

    assert clocks.of == {0: 5, 1: 7, 2: 5, 3: 6} and clocks.slowest == 5


def test_who_comes_back_starts_at_the_slowest_clock() -> None:
    clocks = Clocks()
    for worker, clock in ((0, 5), (1, 7)):
        clocks.enter(worker, base=clock, version=0)

    clocks.leave(0, version=0)
    assert clocks.slowest == 7
    clocks.enter(0, base=5, version=0)

    assert clocks.of[0] == 7


def test_with_nobody_left_to_wait_for_the_furthest_counts() -> None:
    clocks = Clocks()
    for worker, clock in ((0, 5), (1, 7)):
        clocks.enter(worker, base=clock, version=0)
        clocks.leave(worker, version=0)

    clocks.enter(2, base=0, version=0)
    assert clocks.slowest == 7 and clocks.of[2] == 7


def test_the_slowest_clock_is_known_for_every_version() -> None:
    clocks = Clocks()
    for worker in (0, 1):
        clocks.enter(worker, base=0, version=0)
    clocks.tick(0, 1, version=1)
    clocks.tick(1, 1, version=2)  # from version 2 on everyone has done one
    clocks.tick(1, 2, version=3)
    clocks.tick(0, 2, version=4)

    assert [clocks.slowest_at(version) for version in range(5)] == [0, 0, 1, 1, 2]


def test_the_laggard_is_the_slowest_and_never_the_one_who_asks() -> None:
    clocks = Clocks()
    for worker, clock in ((1, 1), (2, 1), (0, 2)):
        clocks.enter(worker, base=clock, version=0)

    assert clocks.laggard(but=0) == 1 and clocks.laggard(but=1) == 2
    clocks.leave(2, version=0)
    assert clocks.laggard(but=1) is None


# ---- against the definition ----


@dataclass
class Brute:
    """The definition, written out: who has pushed what, who reads at which clock, and what it must have seen."""

    bound: int
    began: dict[int, int] = field(default_factory=dict)  # member -> its clock when it began
    sent: dict[int, int] = field(default_factory=dict)  # worker -> its own clock
    on_the_way: dict[int, list[int]] = field(default_factory=dict)  # worker -> work items not arrived, in any order
    arrived: dict[int, set[int]] = field(default_factory=dict)

    def clock_here(self, worker: int) -> int:
        """Return the clock up to which all work items of the worker have arrived."""
        clock = self.began[worker]
        while clock + 1 in self.arrived[worker]:
            clock += 1
        return clock

    def admits(self, reader: int) -> bool:
        """Return True if every member's work items up to clock c - bound have arrived, and all of the reader's own."""
        c = self.sent[reader]
        return self.clock_here(reader) >= c and all(self.clock_here(i) >= c - self.bound for i in self.began)

    def may_start(self, reader: int, task: int) -> bool:
        """Everyone's tasks before the last `bound` have finished, the reader's own too."""
        return all(self.clock_here(i) >= task - self.bound for i in self.began)


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=120))
def test_a_reader_is_admitted_exactly_when_the_definition_admits_it(bound: int, moves: list[tuple[int, int]]) -> None:
    """Random schedules: work items arrive in any order; workers join, become idle and return."""
    rule, tasks, block, brute = StalenessBound(bound), TaskBound(bound), Recorder(make_plan(64)), Brute(bound)
    tasks.clocks = rule.clocks
    for worker, move in moves:
        if move == 0 and worker not in brute.began:
            rule.enter(block, worker, base=brute.sent.get(worker, 0))
            brute.sent[worker] = brute.began[worker] = rule.clock_of(worker)  # as the answer tells it
            brute.on_the_way[worker], brute.arrived[worker] = [], set()
            assert brute.began[worker] >= min(map(brute.clock_here, brute.began))
        elif move == 1 and worker in brute.began and not brute.on_the_way[worker]:
            del brute.began[worker]  # only who has nothing on the way has nothing to do
            rule.forget(block, worker)
        elif move in (2, 3) and worker in brute.began and len(brute.on_the_way[worker]) < 3:
            brute.sent[worker] += 1
            brute.on_the_way[worker].append(brute.sent[worker])
        elif move >= 4 and worker in brute.began and brute.on_the_way[worker]:
            work_item = brute.on_the_way[worker].pop(0 if move == 4 else -1)
            brute.arrived[worker].add(work_item)
            rule.absorb(block, make_push(named(0, 0), worker, clock=work_item, version=block.version), number(1.0))
            rule.tick(block, worker, work_item)
        for reader in brute.began:
            pull = Pull(1, clock=brute.sent[reader])
            assert rule.admits(block, pull, reader) == brute.admits(reader)
            for ahead in (0, 1, 2):
                task = brute.sent[reader] + ahead
                assert tasks.admits(block, Pull(1, clock=task), reader) == brute.may_start(reader, task)


# ---- what was missed ----


def test_a_gradient_of_a_reader_that_was_too_far_ahead_is_counted_with_how_far() -> None:
    rule, block = StalenessBound(bound=1), Recorder(make_plan())
    for worker in (0, 1):
        rule.enter(block, worker, base=0)

    for clock in (1, 2, 3, 4):  # nobody has asked the rule: worker 0 reads at clocks 0, 1, 2, 3 as it likes
        rule.absorb(block, make_push(named(0, clock - 1), 0, clock=clock, version=block.version), number(1.0))
        rule.tick(block, 0, clock)

    assert rule.limit() == StalenessLimit(bound=1, unit="clocks", largest=3, exceeded=2)


def test_it_counts_what_the_reader_had_seen_not_what_is_there_now() -> None:
    """The slow one has caught up when the gradient comes, but the gradient was computed without it."""
    rule, block = StalenessBound(bound=0), Recorder(make_plan())
    for worker in (0, 1):
        rule.enter(block, worker, base=0)
    rule.absorb(block, make_push(named(0, 0), 0, clock=1, version=0), number(1.0))
    rule.tick(block, 0, 1)
    rule.absorb(block, make_push(named(0, 1), 1, clock=1, version=0), number(1.0))
    rule.tick(block, 1, 1)

    rule.absorb(block, make_push(named(0, 2), 0, clock=2, version=1), number(1.0))
    assert rule.exceeded == 1
    rule.absorb(block, make_push(named(0, 3), 1, clock=2, version=2), number(1.0))
    assert rule.exceeded == 1


def test_a_bound_goes_from_first_to_last_as_the_data_is_done_and_each_reader_is_held_to_the_one_it_was_given() -> None:
    rule, block = TaskBound(4, last=0), Recorder(make_plan(num_batches=8))
    rule.enter(block, 0, base=0)
    rule.enter(block, 1, base=0)
    assert rule.admits(block, Pull(1, clock=4), reader=0)

    bounds = []
    for clock in range(1, 9):
        push = make_push(named((clock - 1) // 4, (clock - 1) % 4), 1, clock=clock, version=block.version)
        rule.absorb(block, push, number(1.0))
        bounds.append(rule.bound)
    assert bounds == [4, 3, 2, 2, 2, 1, 0, 0]

    assert not rule.admits(block, Pull(2, clock=5), reader=0)
    exceeded = rule.exceeded
    rule.absorb(block, make_push(named(0, 0), 0, clock=5, began=4, version=0), number(1.0))
    assert rule.exceeded == exceeded  # it was admitted under 4


# ---- a server ----


def make_server(bound: int, num_blocks: int = 1) -> Server:
    server_part = make_server_part(lambda: StalenessBound(bound))
    server = Server(lambda _: server_part, lambda specs, buffers: [make_buffer(spec, buffers) for spec in specs])
    server.receive(COORDINATOR, Assign(make_plan(16), specs_of(num_blocks), ({},), num_replicas=2))
    for block in range(num_blocks):
        server.receive(WORKERS[0], InitBlock(block, "float32", 32), full(0.0))
    return server


def told(server: Server, sender: Peer, message: Message) -> list[tuple[str, object]]:
    """Return the messages to all nodes but the coordinator, without the answers to pushes."""
    payload = full(1.0) if type(message).__name__ == "Push" else None
    return [
        (str(out.to), out.message)
        for out in server.receive(sender, message, payload)
        if isinstance(out.message, Params | PullDelayed)
    ]


def test_a_pull_is_held_back_and_says_for_whom_and_goes_out_when_that_one_has_pushed() -> None:
    server = make_server(bound=0)
    for worker in (0, 1):
        ((_, params),) = told(server, WORKERS[worker], Pull(1, clock=0))
        assert isinstance(params, Params) and params.asks and params.clock == 0

    told(server, WORKERS[0], make_push(named(0, 0), 0, clock=1))
    assert told(server, WORKERS[0], Pull(2, clock=1)) == [("worker 0", PullDelayed(2, worker=1))]
    assert told(server, WORKERS[0], Pull(2, clock=1)) == []  # it knows

    (((to, params)),) = told(server, WORKERS[1], make_push(named(0, 1), 1, clock=1))
    assert to == "worker 0" and isinstance(params, Params) and (params.sequence, params.version) == (2, 2)


@pytest.mark.parametrize("message", [Forget(1), PushResult.REVOKED, PushResult.DUPLICATE, "skip", Idle()])
def test_whatever_becomes_of_the_slow_ones_push_or_of_itself_the_others_go_on(message: Message | str) -> None:
    server = make_server(bound=0)
    for worker in (0, 1):
        told(server, WORKERS[worker], Pull(1, clock=0))
    told(server, WORKERS[0], make_push(named(0, 0), 0, clock=1))
    told(server, WORKERS[0], Pull(2, clock=1))

    sender, push = WORKERS[1], make_push(named(0, 1), 1, clock=1)
    match message:
        case PushResult.REVOKED:
            server.receive(COORDINATOR, Revoke(0, 2))
            answers = told(server, sender, push)
        case PushResult.DUPLICATE:
            answers = told(server, sender, make_push(named(0, 0), 1, clock=1))
        case "skip":
            answers = told(server, sender, make_push(named(0, 1), 1, clock=1, skip="not finite"))
        case Forget():
            answers = told(server, COORDINATOR, message)
        case _:
            assert isinstance(message, Idle)
            answers = told(server, sender, message)
    assert [to for to, _ in answers] == ["worker 0"]


def test_a_lost_connection_is_not_waited_for_from_the_next_look_on() -> None:
    server = make_server(bound=0)
    for worker in (0, 1):
        told(server, WORKERS[worker], Pull(1, clock=0))
    told(server, WORKERS[0], make_push(named(0, 0), 0, clock=1))
    told(server, WORKERS[0], Pull(2, clock=1))

    server.lost(WORKERS[1])
    assert [to for to, _ in told(server, COORDINATOR, ReportRequest())] == ["worker 0"]


def test_an_earlier_life_of_a_worker_does_not_tick_its_clock() -> None:
    server = make_server(bound=0)
    told(server, Peer("worker", 1, 1), Pull(1, clock=0))
    told(server, Peer("worker", 1, 0), make_push(named(0, 1), 1, clock=1))

    assert server.blocks[0].rule.clock_of(1) == 0  # type: ignore[attr-defined]


def test_the_worst_block_is_reported() -> None:
    server = make_server(bound=0, num_blocks=2)
    for worker in (0, 1):
        told(server, WORKERS[worker], Pull(1, clock=0))
    for clock in (1, 2, 3):
        told(server, WORKERS[0], make_push(named(0, clock), 0, block=1, clock=clock, version=clock - 1))

    report = server.report()
    assert report.limit == StalenessLimit(bound=0, unit="clocks", largest=2, exceeded=2)
    assert [(m.block, m.pushes, m.total, m.most) for m in report.missed] == [(0, 0, 0, 0), (1, 3, 0, 0)]


# ---- whole runs ----


@dataclass(frozen=True)
class Seen:
    """One read of one block: who, at which clock, and which batches were in it."""

    reader: int
    clock: int
    block: int
    batches: frozenset[int]


class Reader(Node):
    """Writes down what each gradient was computed from, and each push by its clock: the parameters are a ledger."""

    reads: ClassVar[list[Seen]] = []
    pushed: ClassVar[dict[tuple[int, int], int]] = {}  # (worker, clock) -> batch

    def _compute(self, client, batch):  # type: ignore[no-untyped-def]
        plan: DataPlan = client.plan
        for block, parameter in enumerate(self.memory.parameters):
            first = Ledger(self.case).first(block)
            seen = frozenset((parameter.double() != first).nonzero().flatten().tolist())
            self.reads.append(Seen(self.rank, client.pushes.clock, block, seen))
        self.pushed[self.rank, client.pushes.clock + 1] = number_of(plan, batch.portion, batch.k)
        return super()._compute(client, batch)


@pytest.mark.parametrize("direct", [False, True], ids=["asked", "in place"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_every_read_has_what_the_paper_promises_on_every_block(bound: int, direct: bool) -> None:
    """A read at clock c has every push numbered c - bound or less of everyone, and all its own."""
    furthest = 0
    for seed in range(6):
        Reader.reads, Reader.pushed = [], {}
        cluster = SimulatedCluster(
            seed, Case(StaleSync(bound=bound, lr=LR), 3, num_servers=2, num_samples=60, direct=direct), node=Reader
        )
        cluster.time_passes = 0.0  # so nobody is given up
        cluster.run()
        for read in Reader.reads:
            for (worker, clock), batch in Reader.pushed.items():
                must = read.clock if worker == read.reader else read.clock - bound
                assert clock > must or batch in read.batches, (seed, read, worker, clock)
                if clock > must and batch not in read.batches and worker != read.reader:
                    furthest = max(furthest, read.clock - clock + 1)
        staleness = cluster.coordinator.reporting.staleness()
        assert (staleness.bound, staleness.unit, staleness.exceeded) == (bound, "clocks", 0)
        assert staleness.largest <= bound and staleness.max <= 2 * (2 * bound + 1)  # (P-1)(2s+1), for P = 3
    assert furthest == bound or direct or bound == 0  # so far may they be ahead, and so far they do come


def test_a_run_that_breaks_its_bound_fails_and_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessBound, "admits", lambda self, block, pull, reader: True)
    for seed in range(10):
        cluster = SimulatedCluster(seed, Case(StaleSync(bound=0, lr=LR), 3, num_servers=2, num_samples=60))
        outcome = cluster.run()
        if outcome.coordinator.reporting.staleness().exceeded:
            assert outcome.coordinator.state.outcome == "failed"
            assert "readers may miss 0 clocks, and" in outcome.coordinator.state.reason
            return
    pytest.fail("with everyone admitted, nobody ever ran ahead")


def test_a_late_joiner_does_not_hold_up_those_who_are_far_ahead() -> None:
    for seed in range(8):
        outcome = run(seed, Case(StaleSync(bound=0, lr=LR), 1, num_servers=2, num_samples=60), Faults(latecomers=2))
        assert outcome.coordinator.reporting.staleness().exceeded == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_goes_wrong_nobody_waits_for_ever(seed: int) -> None:
    run_seed(1000 + seed, "stale_sync")


def test_it_is_lock_step_with_bound_0_and_two_workers() -> None:
    """No worker begins its second work item before the other has done its first."""
    Reader.reads, Reader.pushed = [], {}
    SimulatedCluster(3, Case(StaleSync(bound=0, lr=LR), 2, num_samples=40), node=Reader).run()
    for read in Reader.reads:
        others = [b for (w, k), b in Reader.pushed.items() if w != read.reader and k <= read.clock]
        assert set(others) <= read.batches


def test_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="bound=-1: choose 0 .lock-step. or more"):
        StaleSync(bound=-1)
    with pytest.raises(ValueError, match="n_push=65"):
        StaleSync(n_push=65)


def test_a_bound_is_continued_unless_the_settings_are_others() -> None:
    rule = TaskBound(4)
    rule.retune(7)
    rule.done = 3
    same, forced = TaskBound(4), TaskBound(9)
    same.state(rule.state())
    forced.state(rule.state())
    assert (same.bound, same.limit().bound, same.done) == (7, 7, 3)
    assert (forced.bound, forced.limit().bound, forced.done) == (9, 9, 3)
