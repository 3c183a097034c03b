"""Random schedules with faults: every batch once on every block, to the last bit, and every run ends.

What is promised is in `tests.harness.check`; a failing seed is run again with `tests.random_runs.run_seed(seed, kind)`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import pytest

from rainband.protocol.messages import Peer
from rainband.strategies.bounded_delay import BoundedDelay
from rainband.strategies.downpour import Downpour
from rainband.strategies.stale_sync import StaleSync
from rainband.strategies.sync import Sync
from rainband.strategy import Strategy
from tests.harness import Faults, SimulatedCluster, run
from tests.ledger import LR, Case
from tests.random_runs import Ragged, Softly, draw, run_seed

KINDS = ("downpour", "ragged", "per_worker", "stale_sync", "soft_sync", "bounded_delay", "backup")
FEW, MANY, CHUNK = 50, 2_000, 200

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "downpour": lambda: Downpour(lr=LR, optimizer="sgd", guard=False),
    "downpour, in step": lambda: Downpour(lr=LR, optimizer="sgd", overlap=False, guard=False),
    "downpour, two at a time": lambda: Downpour(lr=LR, optimizer="sgd", n_push=2, guard=False),
    "ragged": Ragged,
    "sync": lambda: Sync(batch_per_worker=True, lr=LR),
    "stale_sync": lambda: StaleSync(bound=1, lr=LR, guard=False),
    "soft_sync": lambda: Softly(n=1),
    "bounded_delay": lambda: BoundedDelay(tau=1, lr=LR, guard=False),
    "sync, one backup worker": lambda: Sync(batch_per_worker=True, lr=LR, backup_workers=1),
}
every_strategy = pytest.mark.parametrize("name", list(STRATEGIES))
every_way_to_read = pytest.mark.parametrize("direct", [False, True], ids=["asked", "in place"])


# ---- whatever goes wrong ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(FEW))
def test_whatever_goes_wrong_every_batch_counts_once(kind: str, seed: int) -> None:
    run_seed(seed, kind)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", range(1_000, 1_000 + MANY, CHUNK))
def test_thousands_of_schedules(kind: str, first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_seed(seed, kind)


def test_the_schedules_are_not_too_quiet_to_tell_anything() -> None:
    """Revoked leases, repeated batches and missed rounds do happen in them."""
    seen: Counter[str] = Counter()
    for kind in KINDS:
        for seed in range(15):
            accounting = run_seed(seed, kind).coordinator.reporting.accounting()
            if accounting is not None:
                seen.update(accounting.refused)
                seen.update({"reassigned": accounting.reassigned, f"skipped, {kind}": len(accounting.skipped)})
    assert min(seen["revoked"], seen["late"], seen["reassigned"]) > 10
    assert all(seen[f"skipped, {kind}"] for kind in KINDS)


def test_a_seed_is_the_same_run_for_ever() -> None:
    traces: list[deque[tuple[object, ...]]] = []

    def keep_all(cluster: SimulatedCluster) -> None:
        cluster.trace = deque()
        traces.append(cluster.trace)

    for _ in range(2):
        run(7, *draw(7, "ragged"), prepare=keep_all)
    assert traces[0] == traces[1] and len(traces[0]) > 50


# ---- one thing at a time ----


def case_of(name: str, direct: bool, **others: int) -> Case:
    return Case(STRATEGIES[name](), num_servers=2, direct=direct, **others)  # type: ignore[arg-type]


@every_way_to_read
@every_strategy
def test_when_nothing_goes_wrong_nothing_waits_for_a_clock(name: str, direct: bool) -> None:
    """No tick, no heartbeat, no timeout is needed to come to the end."""

    def stop_the_clock(cluster: SimulatedCluster) -> None:
        cluster.time_passes = 0.0

    for num_workers in (1, 2, 3):
        for seed in range(3):
            outcome = run(seed, case_of(name, direct, num_workers=num_workers), prepare=stop_the_clock)
            accounting = outcome.coordinator.reporting.accounting()
            assert accounting is not None and accounting.reassigned == 0 and outcome.seconds == 0.0


@every_way_to_read
@every_strategy
def test_a_worker_may_die_at_any_frame(name: str, direct: bool) -> None:
    """Also between two blocks of one push; what it had sent arrives up to some point, on each line by itself."""
    for frame in range(1, 26):

        def dies(cluster: SimulatedCluster, frame: int = frame) -> None:
            cluster.workers[Peer("worker", 0)].dies_at = frame

        run(frame, case_of(name, direct), prepare=dies)


@every_strategy
def test_a_killed_worker_may_come_back_under_its_own_number(name: str) -> None:
    for seed in range(8):
        run(seed, case_of(name, direct=False), Faults(kills=2, restarts=2))


@every_strategy
def test_a_worker_may_sleep_and_wake_when_others_have_its_work(name: str) -> None:
    for seed in range(8):
        run(seed, case_of(name, direct=seed % 2 == 0, num_workers=3), Faults(pauses=3))


@every_strategy
def test_a_worker_may_be_suspected_though_it_works(name: str) -> None:
    """So safety never rests on the detector of failures."""
    for seed in range(8):
        run(seed, case_of(name, direct=False), Faults(suspicions=6))


@every_strategy
def test_half_of_all_messages_may_come_twice(name: str) -> None:
    for seed in range(5):
        run(seed, case_of(name, direct=seed % 2 == 0), Faults(duplicates=0.5))


@every_strategy
def test_connections_may_break_and_what_is_unanswered_come_again_in_any_order(name: str) -> None:
    for seed in range(8):
        run(seed, case_of(name, direct=False, num_samples=32), Faults(reconnects=8))


@every_strategy
def test_workers_may_join_late(name: str) -> None:
    for seed in range(5):
        run(seed, case_of(name, direct=False, num_workers=1), Faults(latecomers=3))


@every_strategy
def test_a_run_may_be_stopped_at_any_time(name: str) -> None:
    for seed in range(12):
        run(seed, case_of(name, direct=seed % 2 == 0), Faults(stop=True))


@pytest.mark.parametrize("name", ["downpour", "sync"])
def test_a_gradient_that_is_not_finite_is_skipped_on_every_block_and_the_rest_goes_on(name: str) -> None:
    for seed in range(5):
        case = Case(STRATEGIES[name](), num_servers=2, not_finite=frozenset({0, 3, 4, 5}))
        accounting = run(seed, case, Faults(kills=1)).coordinator.reporting.accounting()
        assert accounting is not None and (accounting.applied, accounting.skipped) == (4, {"not finite": 4})


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7, 8, 9])
@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_odd_sizes_more_workers_than_batches_short_last_rounds_short_last_batches(
    num_samples: int, num_workers: int
) -> None:
    for name in ("downpour, two at a time", "sync"):
        case = Case(STRATEGIES[name](), num_workers, num_servers=3, num_samples=num_samples, epochs=2)
        run(num_samples, case)


def test_one_block_of_each_dtype() -> None:
    for name in ("downpour", "sync"):
        run(0, Case(STRATEGIES[name](), dtypes=("float32", "float64", "bfloat16", "float16")), Faults(kills=1))
