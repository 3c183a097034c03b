"""Assigning the work items of an evaluation: each is delivered, copies only of late ones, neighbors together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rainband.coordinator.work_queue import WorkerPace, WorkQueue


def done(hand_out: WorkQueue, worker: int, work_items: tuple[int, ...], now: float) -> None:
    for work_item in work_items:
        hand_out.returned(worker, work_item, now)


def test_work_items_that_follow_each_other_go_to_one_worker_many_at_first() -> None:
    """24 work items and 2 workers: a third of its half are 4, then 20 / 6 = 3."""
    hand_out = WorkQueue(range(24), WorkerPace())
    assert hand_out.give(0, 2, now=0.0) == (0, 1, 2, 3)
    assert hand_out.give(1, 2, now=0.0) == (12, 13, 14)
    done(hand_out, 0, (0, 1, 2, 3), 1.0)
    assert hand_out.give(0, 2, now=1.0) == (4, 5)


def test_the_last_work_items_are_given_one_at_a_time() -> None:
    hand_out = WorkQueue(range(4), WorkerPace())
    assert [hand_out.give(0, 1, now=0.0, idle=False) for _ in range(3)] == [(0,), (1,), (2,)]
    hand_out = WorkQueue(range(4), WorkerPace())
    assert [hand_out.give(0, 2, now=0.0) for _ in range(5)] == [(0,), (1,), (2,), (3,), ()]


def test_in_the_next_evaluation_a_worker_begins_where_it_began_before() -> None:
    pace = WorkerPace()
    first = WorkQueue(range(24), pace)
    first.give(1, 2, now=0.0)
    assert WorkQueue(range(24), pace).give(1, 2, now=9.0)[0] == 12


def test_an_idle_worker_gets_a_copy_only_of_what_is_late() -> None:
    """Work items take 1 s: one that was begun at 0 is late at 2."""
    pace = WorkerPace()
    pace.times_s.append(1.0)
    hand_out = WorkQueue(range(2), pace)
    hand_out.give(0, 2, now=0.0)
    done(hand_out, 1, hand_out.give(1, 2, now=0.0), 1.0)
    assert hand_out.give(1, 2, now=1.9) == () and hand_out.next_due([1]) == 2.0
    assert hand_out.give(1, 2, now=2.0) == (0,)
    assert hand_out.backups == 1


def test_nobody_waits_for_a_copy_of_what_it_has_itself() -> None:
    hand_out = WorkQueue([0], WorkerPace())
    hand_out.give(0, 1, now=0.0)
    assert hand_out.next_due([0]) is None and hand_out.next_due([0, 1]) is not None


def test_the_last_work_items_are_not_given_ahead_to_those_who_are_at_work() -> None:
    """Two workers, three work items: the first that is done gets the third, not the first that asks."""
    hand_out = WorkQueue(range(3), WorkerPace())
    assert hand_out.give(0, 2, now=0.0, idle=False) == (0,)
    assert hand_out.give(1, 2, now=0.0, idle=False) == (1,)
    assert hand_out.give(0, 2, now=0.1, idle=False) == ()
    assert hand_out.give(1, 2, now=1.0, idle=True) == (2,)  # it has computed the first; that it came is not known yet


def test_a_worker_with_a_copy_learns_when_it_is_not_needed_any_more() -> None:
    pace = WorkerPace()
    pace.times_s.append(1.0)
    hand_out = WorkQueue([0], pace)
    for worker in (0, 1):
        assert hand_out.give(worker, 2, now=2.0 * worker) == (0,)
    assert hand_out.copied() == {0: (0,), 1: (0,)}
    assert hand_out.returned(1, 0, 3.0) == [0]
    assert not hand_out.has(0) and hand_out.copied() == {} and list(pace.times_s) == [1.0, 1.0]


def test_a_second_copy_waits_twice_as_long() -> None:
    pace = WorkerPace()
    pace.times_s.append(1.0)
    hand_out = WorkQueue([0], pace)
    assert [hand_out.give(w, 3, now=2.0 if w else 0.0) for w in range(3)] == [(0,), (0,), ()]
    assert hand_out.give(2, 3, now=4.0) == (0,)


def test_of_what_a_slow_worker_has_the_last_is_copied_first() -> None:
    pace = WorkerPace()
    pace.times_s.append(1.0)
    hand_out = WorkQueue(range(9), pace)
    assert hand_out.give(0, 1, now=0.0) == (0, 1, 2)
    hand_out.fresh.clear()
    assert hand_out.give(1, 1, now=99.0) == (2,)


def test_what_a_lost_worker_had_not_delivered_is_done_again_and_nothing_else() -> None:
    hand_out = WorkQueue(range(9), WorkerPace())
    work_items = hand_out.give(0, 1, now=0.0)
    done(hand_out, 0, work_items[:1], 1.0)
    assert hand_out.forget(0) == 1
    assert hand_out.fresh == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_work_item_is_delivered_once() -> None:
    hand_out = WorkQueue([0], WorkerPace())
    hand_out.give(0, 1, now=0.0)
    for _ in range(2):
        hand_out.returned(0, 0, 1.0)
    assert hand_out.delivered == {0: 1} and not hand_out.open


@given(st.integers(1, 40), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_work_item_is_delivered_with_slow_and_lost_workers(
    num_items: int, num_workers: int, random: object
) -> None:
    choose = random.choice  # type: ignore[attr-defined]
    hand_out, now = WorkQueue(range(num_items), WorkerPace()), 0.0
    todo: dict[int, list[int]] = {worker: [] for worker in range(num_workers)}
    alive = list(todo)
    for _ in range(2000):
        if not hand_out.open:
            break
        now += 1.0
        worker = choose(alive)
        if len(alive) > 1 and choose(range(30)) == 0:
            alive.remove(worker)
            hand_out.forget(worker)
        elif todo[worker] and choose((True, False)):
            hand_out.returned(worker, todo[worker].pop(0), now)
        else:
            todo[worker] += hand_out.give(worker, len(alive), now)
    assert not hand_out.open
    assert sum(hand_out.delivered.values()) == num_items


def test_a_replica_has_delivered_an_item_when_all_its_workers_have() -> None:
    """Workers 0 and 1 are a replica, 2 and 3 another: what 0 and 1 delivered in part is handed out again."""
    hand_out = WorkQueue([0], WorkerPace())
    assert hand_out.give(0, 2, now=0.0) == (0,)
    assert not hand_out.has_every_part(0, 1, 0, replica_size=2)
    hand_out.forget(0)
    assert hand_out.give(2, 2, now=1.0) == (0,)
    assert not hand_out.has_every_part(2, 1, 0, replica_size=2)
    assert not hand_out.has_every_part(2, 1, 0, replica_size=2)
    assert hand_out.has_every_part(2, 0, 0, replica_size=2)
    assert hand_out.give(0, 2, now=2.0) == ()
    hand_out.returned(2, 0, now=2.0)
    assert hand_out.open == set()


def test_a_replica_that_delivers_again_delivers_all_parts_again() -> None:
    """It was inactive when one of its workers had delivered: the copy of the item may be of other workers."""
    hand_out = WorkQueue([0], WorkerPace())
    hand_out.give(0, 1, now=0.0)
    assert not hand_out.has_every_part(0, 0, 0, replica_size=2)
    hand_out.forget(0)
    hand_out.give(0, 1, now=1.0)
    assert not hand_out.has_every_part(0, 1, 0, replica_size=2)
