"""Refactoring changes no result: the seeded simulated runs have the hashes that are stored."""

from __future__ import annotations

import pytest

from rainband.protocol.messages import LeaseEnd, Message, Push, PushResult, Return
from rainband.runtimes.simulation.models.trace import Trace
from tests.hashed_runs import arithmetic, configurations, outcome_of, stored


@pytest.mark.parametrize("name", configurations())
def test_a_seeded_simulated_run_has_its_stored_results(name: str) -> None:
    expected, found = stored().runs[name], outcome_of(configurations()[name])
    assert found.without_values(name) == expected.without_values(name)
    # Otherwise this processor rounds differently from the one that recorded, or the values were not recorded.
    if stored().arithmetic == arithmetic() and expected.trace_hash:
        assert found == expected


def test_every_stored_run_is_still_made() -> None:
    assert set(stored().runs) == set(configurations())


def hash_of(*messages: Message) -> str:
    trace = Trace()
    for message in messages:
        trace.message(0.5, "worker 0", "server 0", message)
    return trace.digest()


def test_a_hash_depends_on_what_a_schedule_is_made_of_and_not_on_measurements() -> None:
    push = Push(0, 1, 2, (), 4, 0, 1, 3, "float32", 8)
    assert hash_of(push) != hash_of(Push(1, 1, 2, (), 4, 0, 1, 3, "float32", 8))
    assert hash_of(push) == hash_of(Push(0, 1, 2, (), 4, 0, 1, 3, "float32", 8, loss=9.0))
    assert hash_of(Return(0, 1, LeaseEnd.DONE)) != hash_of(Return(0, 1, LeaseEnd.STOPPED))
    assert PushResult.ACCEPTED == 1
