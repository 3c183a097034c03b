"""The batch accounting: what became of every batch. One that was lost or applied twice must show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rainband.protocol.accounting import (
    MAX_REASON_LENGTH,
    MAX_REASONS,
    OTHER_REASONS,
    BatchAccounting,
    SkipReasons,
    balance,
    staleness_of,
    staleness_so_far,
)
from rainband.protocol.messages import COORDINATOR, Assign, InitBlock, Missed, Report, ReportRequest, Tally, encode
from rainband.rules import FirstArrivalsOfRound
from rainband.rules.rounds import TOO_LATE
from rainband.server.block import Block
from rainband.server.block_accounting import BlockAccounting
from rainband.server.server import Server
from tests.builders import (
    NUMEL,
    WORKERS,
    full,
    item_push,
    make_buffer,
    make_plan,
    make_push,
    make_server,
    make_server_part,
    named,
    rounds_plan,
    send,
    specs_of,
)


def report(*blocks: Tally, **others: Any) -> Report:
    return Report(
        first_open=0,
        full=(),
        accepted=min(b.accepted for b in blocks),
        updates=others.pop("updates", 0),
        blocks=blocks,
        **others,
    )


def accounting_of(*reports: Report, num_batches: int = 8) -> BatchAccounting:
    return balance(make_plan(num_batches=num_batches), reports, reassigned=0)


def test_eight_batches_applied_on_every_block_balance() -> None:
    accounting = accounting_of(report(Tally(8, 8, 0, 0), Tally(8, 8, 0, 0), updates=16))

    assert (accounting.batches, accounting.applied, accounting.not_processed, accounting.updates) == (8, 8, 0, 16)
    assert accounting.balanced and (accounting.lost, accounting.applied_twice) == (0, 0)


def test_a_batch_that_is_marked_and_neither_applied_nor_skipped_is_lost() -> None:
    accounting = accounting_of(report(Tally(8, 8, 0, 0), Tally(8, 7, 0, 0)))

    assert (accounting.lost, accounting.applied_twice, accounting.balanced) == (1, 0, False)


def test_a_batch_applied_more_often_than_marked_shows_as_twice() -> None:
    accounting = accounting_of(report(Tally(8, 10, 0, 0)), report(Tally(8, 8, 0, 0)))

    assert (accounting.lost, accounting.applied_twice, accounting.balanced) == (0, 2, False)


def test_what_one_block_lost_is_not_made_good_by_what_another_had_twice() -> None:
    accounting = accounting_of(report(Tally(8, 7, 0, 0), Tally(8, 9, 0, 0)))

    assert (accounting.lost, accounting.applied_twice, accounting.balanced) == (1, 1, False)


def test_what_is_buffered_is_not_lost() -> None:
    accounting = accounting_of(report(Tally(3, 1, 0, 2)))

    assert accounting.balanced and (accounting.applied, accounting.not_processed) == (1, 7)


@pytest.mark.parametrize(
    "tally, wrong",
    [
        (Tally(8, 8, 0, 0), ""),
        (Tally(8, 7, 1, 0), ""),
        (Tally(5, 3, 0, 2), ""),  # ended early: the round is not complete
        (Tally(8, 6, 0, 0), "2 of 8 batches were accepted, but neither applied nor skipped"),
        (Tally(8, 11, 0, 0), "3 of 8 batches were applied more than once"),
        (Tally(8, 6, 0, 2), "2 of 8 batches are still buffered"),
    ],
)
def test_a_run_that_does_not_balance_says_why(tally: Tally, wrong: str) -> None:
    broken = accounting_of(report(tally)).broken
    assert broken.startswith(wrong) and bool(broken) == bool(wrong)
    assert accounting_of(report(tally, lock_free=True)).broken == ""


def test_skipped_batches_are_counted_by_reason_and_once_for_all_blocks() -> None:
    skipped = {"not finite": 3, "asked to": 1}
    accounting = accounting_of(report(Tally(8, 4, 4, 0), skipped=skipped), report(Tally(8, 4, 4, 0), skipped=skipped))

    assert accounting.skipped == {"not finite": 3, "asked to": 1}
    assert accounting.balanced and (accounting.applied, accounting.not_processed) == (4, 0)


def test_a_run_that_ended_early_says_how_many_were_not_done() -> None:
    accounting = accounting_of(report(Tally(5, 5, 0, 0), Tally(3, 3, 0, 0)))

    assert (accounting.applied, accounting.not_processed) == (3, 5)


def test_a_server_without_blocks_says_nothing() -> None:
    empty = Report(first_open=0, full=(), accepted=0, updates=0)
    assert accounting_of(report(Tally(8, 8, 0, 0)), empty).applied == 8


def test_refusals_of_all_servers_are_added_up() -> None:
    accounting = accounting_of(
        report(Tally(8, 8, 0, 0), refused={"revoked": 2}), report(Tally(8, 8, 0, 0), refused={"revoked": 1, "late": 4})
    )
    assert accounting.refused == {"revoked": 3, "late": 4}


def test_staleness_is_weighted_by_how_often_it_was_seen() -> None:
    reports = [report(Tally(1, 1, 0, 0), staleness={0: {0: 3, 4: 1}}), report(Tally(1, 1, 0, 0), staleness={1: {2: 4}})]
    staleness = staleness_of(reports)

    assert staleness.histogram == {0: 3, 2: 4, 4: 1}
    assert staleness.mean == 12 / 8 and staleness.max == 4
    assert staleness.per_worker_mean == {0: 1.0, 1: 2.0}


def test_the_staleness_so_far_is_that_of_the_histograms() -> None:
    plan = make_plan(num_batches=8)
    server = make_server(plan=plan)
    for number in range(6):  # pushes that read versions 0, 0, 1, 1, 2, 2 miss 0, 1, 1, 2, 2 and 3 updates
        send(server, make_push(named(*divmod(number, plan.portion_batches)), version=number // 2))
    reports = [server.report(), report(Tally(1, 1, 0, 0), staleness={1: {9: 2}}, missed=(Missed(0, 2, 18, 9),))]
    exact, soon = staleness_of(reports), staleness_so_far(reports)

    assert (soon.mean, soon.max) == (exact.mean, exact.max) == ((0 + 1 + 1 + 2 + 2 + 3 + 18) / 8, 9)


def test_nothing_pushed_is_no_staleness() -> None:
    for staleness in (staleness_of([]), staleness_so_far([])):
        assert (staleness.mean, staleness.max, staleness.histogram) == (0.0, 0, {})


# ---- counted by a server that does what it must not ----


def accounting_after_three_pushes(server: Server) -> BatchAccounting:
    for k in range(3):
        send(server, make_push(named(0, k)))
    (out,) = server.receive(COORDINATOR, ReportRequest())
    assert isinstance(out.message, Report)
    return accounting_of(out.message)


def test_three_pushes_balance() -> None:
    accounting = accounting_after_three_pushes(make_server())
    assert accounting.balanced and (accounting.applied, accounting.not_processed) == (3, 5)


def test_a_server_that_applies_a_push_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    true_apply = Block.apply

    def apply_twice(block: Block, *given: Any) -> None:
        true_apply(block, *given)
        true_apply(block, *given)

    monkeypatch.setattr(Block, "apply", apply_twice)
    accounting = accounting_after_three_pushes(make_server())
    assert (accounting.lost, accounting.applied_twice, accounting.balanced) == (0, 3, False)


def test_a_server_that_marks_and_does_not_apply_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "apply", lambda *_: None)
    server = make_server()
    accounting = accounting_after_three_pushes(server)

    assert (accounting.lost, accounting.applied_twice, accounting.balanced) == (3, 0, False)
    assert torch.equal(server.blocks[0].values, full(0.0))


# ---- what a report costs ----


def long_run(rounds: int, reason: Callable[[int], str]) -> tuple[int, Server]:
    """Return the bytes of a server's report after many rounds in each of which one work item is skipped."""
    plan = rounds_plan(num_batches=2 * rounds, items_per_round=2, portion_batches=2)
    server, reasons = make_server(num_blocks=2, plan=plan), SkipReasons()
    for round_ in range(rounds):
        text = reasons.bounded(reason(round_))
        for block in range(2):
            send(server, item_push(plan, round_, 0, block=block, skip=text, samples=0), None)
            send(server, item_push(plan, round_, 1, block=block, worker=1, version=round_))
    return len(encode(report_of(server))), server


def test_a_report_does_not_grow_with_the_skipped_batches_of_the_run() -> None:
    size, server = long_run(400, lambda _: "not finite")
    assert size < 100 and report_of(server).skipped == {"not finite": 400}


def test_reasons_that_name_files_are_counted_together_after_the_first_sixteen() -> None:
    size, server = long_run(400, lambda number: f"cannot read {number}.png " + "x" * 500)
    skipped = report_of(server).skipped
    assert len(skipped) == MAX_REASONS + 1 and skipped[OTHER_REASONS] == 400 - MAX_REASONS
    assert {len(reason) for reason in skipped} == {MAX_REASON_LENGTH, len(OTHER_REASONS)}
    assert size < 6000


def test_the_blocks_of_a_server_count_staleness_in_one_histogram() -> None:
    server = make_server(num_blocks=3)
    for block in range(3):
        send(server, make_push(named(0, 0), block=block))
        send(server, make_push(named(0, 1), block=block, worker=1))

    assert report_of(server).staleness == {0: {0: 3}, 1: {1: 3}}
    assert len({id(block.accounting.staleness) for block in server.blocks.values()}) == 1


class Unwalked(dict[tuple[int, str], int]):
    """Skipped batches of a long run, which nobody may walk through."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        raise AssertionError("a walk through all skipped batches")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_neither_a_round_nor_a_report_walks_through_the_skipped_batches_of_the_run() -> None:
    plan = rounds_plan(num_batches=8, items_per_round=2, portion_batches=2)
    part = make_server_part(lambda: FirstArrivalsOfRound(1))
    server = Server(lambda _: part, lambda specs, buffers: [make_buffer(spec, buffers) for spec in specs])
    server.receive(COORDINATOR, Assign(plan, specs_of(1), ({},), num_replicas=2))
    server.receive(WORKERS[0], InitBlock(0, "float32", NUMEL), full(0.0))
    accounting = server.blocks[0].accounting
    accounting.skipped = Unwalked()

    for round_ in range(4):
        send(server, item_push(plan, round_, 0, version=round_))

    assert report_of(server).skipped == {"too late for its round": 4}
    assert {key: accounting.skipped[key] for key in ((1, TOO_LATE), (3, TOO_LATE))} == {
        (1, TOO_LATE): 0b11,
        (3, TOO_LATE): 0b11,
    }


def test_dropping_a_batch_looks_at_its_own_portion_only() -> None:
    accounting = BlockAccounting(make_plan())
    accounting.skip(named(0, 0, 2), "not finite")
    accounting.skipped = Unwalked(accounting.skipped)
    accounting.drop([named(0, 1)], "too late")
    assert accounting.num_skipped == {"not finite": 1, "too late": 1} and accounting.tally(0).skipped == 2


def report_of(server: Server) -> Report:
    (out,) = server.receive(COORDINATOR, ReportRequest())
    assert isinstance(out.message, Report)
    return out.message
