"""A worker's work items: it requests them in time, reports when it is idle, and skips those that others delivered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rainband.protocol.messages import AssignItems, ItemsDelivered, LeaseRequest, Message
from rainband.runtimes.processes.compute import Prefetch, prefetched
from rainband.strategy import Batch
from rainband.tasks.task import DatasetData
from rainband.worker.work_items import ItemsInHand
from rainband.worker.worker import Sampler
from tests.builders import make_plan

PLAN = make_plan(portion_batches=2, batches_per_item=2, coordinated=True)  # four work items of two batches


def hand() -> tuple[ItemsInHand, list[Message]]:
    told: list[Message] = []
    return ItemsInHand(told.append), told


def test_it_asks_while_it_computes_the_last_work_item_and_says_when_it_has_none() -> None:
    handed, told = hand()
    assert handed.next(PLAN) is None and told == [LeaseRequest(idle=True)]
    handed.take(AssignItems(1, (0, 1)))
    assert handed.next(PLAN) is not None and told == [LeaseRequest(idle=True)]
    assert handed.next(PLAN) is not None and told == [LeaseRequest(idle=True), LeaseRequest()]
    assert handed.next(PLAN) is None and told == [LeaseRequest(idle=True), LeaseRequest(), LeaseRequest(idle=True)]
    assert handed.next(PLAN) is None and len(told) == 3  # once


def test_a_work_item_is_its_batches_at_the_point_of_the_evaluation() -> None:
    handed, _ = hand()
    handed.take(AssignItems(7, (3,)))
    work_item = handed.next(PLAN)
    assert work_item is not None and work_item.round == 7 and work_item.batches == (Batch(3, 0, 7), Batch(3, 1, 7))


def test_what_others_have_delivered_is_neither_begun_nor_ended() -> None:
    handed, _ = hand()
    handed.take(AssignItems(1, (0, 1, 2)))
    begun = handed.next(PLAN)
    assert begun is not None and handed.wants(begun)
    handed.leave_off(ItemsDelivered(1, (0, 1)))
    assert not handed.wants(begun)
    following = handed.next(PLAN)
    assert following is not None and following.batches[0].portion == 2 and handed.wants(following)


def test_work_items_of_the_next_evaluation_end_those_of_this_one() -> None:
    handed, _ = hand()
    handed.take(AssignItems(1, (0, 1)))
    begun = handed.next(PLAN)
    handed.take(AssignItems(2, (0,)))
    assert begun is not None and not handed.wants(begun)
    following = handed.next(PLAN)
    assert following is not None and (following.round, handed.next(PLAN)) == (2, None)


def test_words_of_an_evaluation_that_is_over_change_nothing() -> None:
    handed, _ = hand()
    handed.take(AssignItems(2, (0,)))
    handed.take(AssignItems(1, (3,)))
    handed.leave_off(ItemsDelivered(1, (0,)))
    assert list(handed.work_items) == [0]


def test_what_comes_next_is_the_rest_of_the_work_item_and_then_the_next_one() -> None:
    handed, _ = hand()
    handed.take(AssignItems(1, (0, 2)))
    handed.next(PLAN)
    assert handed.after(Batch(0, 0, 1), PLAN) == Batch(0, 1, 1)
    assert handed.after(Batch(0, 1, 1), PLAN) == Batch(2, 0, 1)
    handed.next(PLAN)
    assert handed.after(Batch(2, 1, 1), PLAN) is None


# ---- data prepared ahead ----


class Files:
    """Data that notes who reads what."""

    prefetch = True

    def __init__(self) -> None:
        self.read: list[tuple[str, list[int]]] = []
        self.second = threading.Event()  # the second batch is being read

    def __len__(self) -> int:
        return 8

    def batch(self, indices: Sequence[int] | np.ndarray) -> Any:
        self.read.append((threading.current_thread().name, [int(i) for i in indices]))
        if len(self.read) == 2:
            self.second.set()
        return [int(i) for i in indices]


def reader(data: Any, *work_items: int) -> Any:
    handed, _ = hand()
    handed.take(AssignItems(1, work_items))
    handed.next(PLAN)
    worker = SimpleNamespace(plan=PLAN, data=data, sampler=Sampler(PLAN), client=SimpleNamespace(items=handed))
    worker.fetch = prefetched(worker)  # type: ignore[arg-type]
    return worker


def test_the_next_batch_is_read_while_nobody_has_asked_for_it_yet() -> None:
    files = Files()
    worker = reader(files, 0)
    order = [int(i) for k in range(8) for i in Sampler(PLAN).indices(Batch(k // 2, k % 2, 1))]
    assert worker.fetch(Batch(0, 0, 1)) == order[:1]
    assert files.second.wait(10)  # without being asked
    assert worker.fetch(Batch(0, 1, 1)) == order[1:2]
    assert [indices for _, indices in files.read] == [order[:1], order[1:2]]
    assert {name.partition("_")[0] for name, _ in files.read} == {"prefetch"}


def test_a_batch_that_was_not_foreseen_is_read_all_the_same() -> None:
    worker = reader(Files(), 0)
    order = [int(i) for k in range(8) for i in Sampler(PLAN).indices(Batch(k // 2, k % 2, 1))]
    worker.fetch(Batch(0, 0, 1))
    assert worker.fetch(Batch(3, 0, 2)) == order[6:7]


def test_data_is_prepared_ahead_only_if_it_says_that_it_may_be() -> None:
    plain = DatasetData([0, 1, 2])
    assert reader(plain, 0).fetch is None
    plain.dataset = Files()  # type: ignore[assignment]
    assert isinstance(reader(plain, 0).fetch, Prefetch)
