"""Runs with random faults in virtual time: the oracle, its scripts, and proof that it notices what is broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rainband.block import Block
from rainband.coordinator import Coordinator
from rainband.messages import Params, Push
from rainband.portions import Marks
from rainband.rules import MeanOfRound
from rainband.server import Server
from rainband.sim.faults import Chances, Fault, Script, parse, random_script, shrink, text
from rainband.sim.trace import table
from rainband.worlds.sim_oracle import STRATEGIES, Case, Verdict, check, random_case, shortest

SCHEDULES = 1000
CHUNK = 50


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told(verdict: Verdict) -> str:
    return f"{verdict.command}\n{text(verdict.case.script)}\n" + "\n".join(verdict.wrong)


# ---- a thousand schedules ----


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_every_batch_is_applied_exactly_once_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        verdict = check(random_case(seed))
        assert not verdict.wrong, told(verdict)


def test_the_schedules_do_what_they_are_for() -> None:
    """Workers die in the middle of a push, pauses outlast the timeout, leases are taken back, late pushes refused."""
    faults = [fault for seed in range(SCHEDULES) for fault in random_case(seed).script]
    assert {fault.what for fault in faults} == {"kill", "crash", "start", "pause", "cut", "slow", "repeat"}
    assert {random_case(seed).strategy for seed in range(50)} == set(STRATEGIES)
    results = [check(random_case(seed), keep_trace=True) for seed in range(60)]
    words = {line.what.split(" ")[0] for verdict in results for line in verdict.trace.lines or []}
    assert {"revoke", "sets", "revoked", "had", "late", "killed", "paused"} <= words
    assert {verdict.outcome for verdict in results} >= {"finished", "failed"}


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_the_same_seed_is_the_same_run(strategy: str) -> None:
    case = random_case(7, strategy)
    assert check(case).trace.digest() == check(case).trace.digest()
    assert check(case).trace.digest() != check(replace(case, seed=8)).trace.digest()


def test_without_faults_nothing_is_refused() -> None:
    verdict = check(Case(seed=0, strategy="sync", num_workers=4, num_servers=2, script=()), keep_trace=True)
    assert verdict.wrong == [] and verdict.outcome == "finished"
    assert not {line.what.split(" ")[0] for line in verdict.trace.lines or []} & {"revoked", "crossed", "late", "early"}


def test_a_lost_server_ends_the_run_cleanly() -> None:
    verdict = check(Case(0, "downpour", 2, 2, parse("0.2 kill server 1")))
    assert (verdict.outcome, verdict.wrong) == ("failed", [])


def test_a_worker_killed_between_two_blocks_of_one_push_is_made_up_for() -> None:
    """At some of these instants one server has the push and the other has not."""
    torn = 0
    for ms in range(100, 400, 7):
        verdict = check(Case(1, "downpour", 2, 2, parse(f"{ms / 1000} kill worker 0")), keep_trace=True)
        assert not verdict.wrong, told(verdict)
        sets = [line.what.split(" ")[2] for line in verdict.trace.lines or [] if line.what.startswith("sets")]
        torn += len(set(sets)) > 1
    assert torn > 0


# ---- scripts ----


def test_a_script_is_text_and_back() -> None:
    script = parse(
        """
        0.250 kill worker 1          # a comment
        0.9 start worker 1
        0.4 pause server 0 for 2.5
        0.1 cut worker 0 > coordinator for 3
        0.1 slow worker 0 > server 1 for 1 by 0.2
        """
    )
    assert [fault.what for fault in script] == ["kill", "start", "pause", "cut", "slow"]
    assert script[3] == Fault(0.1, "cut", "worker 0", "coordinator", 3.0)
    assert parse(text(script)) == script


@given(st.integers(0, 10_000))
def test_a_random_script_reads_back_the_same(seed: int) -> None:
    script = random_script(Random(seed), 3, 2, Chances(length_s=2.0, timeout_s=1.0, servers_die=True))
    assert parse(text(script)) == script
    assert [fault.at_s for fault in script] == sorted(fault.at_s for fault in script)


@pytest.mark.parametrize(
    "line, told",
    [
        ("kill worker 1", "is no fault: write for example"),
        ("0.1 hurt worker 1", "no fault named 'hurt': choose from kill, crash"),
        ("0.1 cut worker 1 for 2", "write  cut worker 0 > server 0"),
        ("0.1 pause worker 1", "pause, cut, slow and repeat need `for`"),
    ],
)
def test_a_wrong_line_says_what_would_be_right(line: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(line)


def test_shrinking_leaves_what_is_needed() -> None:
    script = tuple(Fault(i / 10, "pause", f"worker {i}", for_s=8.0) for i in range(9))
    needed = {"worker 2", "worker 7"}

    def fails(candidate: Script) -> bool:
        return needed <= {fault.node for fault in candidate} and all(fault.for_s >= 2 for fault in candidate)

    assert shrink(script, fails) == (
        Fault(0.2, "pause", "worker 2", for_s=2.0),
        Fault(0.7, "pause", "worker 7", for_s=2.0),
    )


# ---- the oracle notices ----


Mutation = Callable[[pytest.MonkeyPatch], None]


def no_dedup(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "_has_had", lambda *_: False)
    patch.setattr(Marks, "has_some", lambda *_: False)


def the_lost_are_not_asked_about(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_gather", lambda *_: [])


def nobody_is_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_why_late", lambda *_: "")


def forget_drops_buffer(patch: pytest.MonkeyPatch) -> None:
    def forget(rule: MeanOfRound, block: Block, worker: int) -> None:
        rule.early = {column: kept for column, kept in rule.early.items() if kept[0].worker != worker}

    patch.setattr(MeanOfRound, "forget", forget)


def each_server_forgets_the_dead(patch: pytest.MonkeyPatch) -> None:
    def forget(rule: MeanOfRound, block: Block, worker: int) -> None:
        for column in sorted(rule.early):
            rule._add(*rule.early.pop(column))
        if rule.pushes:
            rule._finish(block)

    patch.setattr(MeanOfRound, "forget", forget)


def sum_for_mean(patch: pytest.MonkeyPatch) -> None:
    finish = MeanOfRound._finish

    def finish_with_sum(rule: MeanOfRound, block: Block) -> None:
        rule.samples = 1
        finish(rule, block)

    patch.setattr(MeanOfRound, "_finish", finish_with_sum)


def a_batch_applied_but_not_in_the_parameters(patch: pytest.MonkeyPatch) -> None:
    apply = Block.apply

    def lose_one(block: Block, gradient: Tensor, pushes: list[Push], absent: Any) -> None:
        apply(block, gradient * 0 if block.version == 3 else gradient, pushes, absent)

    patch.setattr(Block, "apply", lose_one)


def version_r_dropped_early(patch: pytest.MonkeyPatch) -> None:
    read = Server.read

    def forgetful(server: Server, params: Params) -> tuple[Params, Tensor | None]:
        if params.point >= 0 and server.blocks[params.block].version > params.point:
            fields = (params.block, params.sequence, server.term, params.point, params.point)
            return Params(*fields, late=True), None
        return read(server, params)

    patch.setattr(Server, "read", forgetful)


@pytest.mark.parametrize(
    "strategy, mutation",
    [
        ("downpour", no_dedup),
        ("downpour2", no_dedup),
        ("downpour", the_lost_are_not_asked_about),
        ("downpour", a_batch_applied_but_not_in_the_parameters),
        ("sync", nobody_is_given_up),
        ("sync", forget_drops_buffer),
        ("sync", each_server_forgets_the_dead),
        ("sync", sum_for_mean),
        ("sync", version_r_dropped_early),
    ],
)
def test_a_broken_protocol_fails_some_schedule(
    strategy: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    for seed in range(300):
        if check(random_case(seed, strategy)).wrong:
            return
    pytest.fail(f"{mutation.__name__} ran through 300 schedules of {strategy} and nobody noticed.")


def test_a_failing_seed_is_replayed_by_its_command_and_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    the_lost_are_not_asked_about(monkeypatch)
    case = next(case for seed in range(100) if check(case := random_case(seed, "downpour")).wrong)
    short = shortest(case)
    assert 1 <= len(short.script) <= len(case.script)
    verdict = check(short, keep_trace=True)
    assert verdict.wrong and verdict.command == f"rainband simtest {case.seed} --strategy downpour"
    shown = table(verdict.trace.lines or []).splitlines()
    assert any(re.search(r"worker \d +> server \d +push \d+ block \d", line) for line in shown)
    assert not any("beat" in line for line in shown)
