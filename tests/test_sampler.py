"""The samples of a batch: each sample once per epoch, the same on every worker, in flat memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest

from rainband.protocol.data_plan import DataPlan
from rainband.worker.sampler import MOST_LISTED, ComputedOrder, ListedOrder, Sampler


@dataclass(frozen=True)
class Place:
    """A batch, as far as the sampler looks at it."""

    portion: int
    k: int


def plan_of(num_samples: int, batch_size: int = 32, epochs: int = 2, seed: int = 0) -> DataPlan:
    return DataPlan(
        fingerprint="",
        layout="",
        num_samples=num_samples,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        portion_batches=4,
    )


@pytest.mark.parametrize("num_samples", [1, 2, 3, 31, 64, 65, 1000, 4097])
def test_a_computed_order_has_every_sample_once(num_samples: int) -> None:
    order = ComputedOrder(plan_of(num_samples), epoch=0)
    assert sorted(order.at(0, num_samples)) == list(range(num_samples))


def test_a_computed_order_is_the_same_in_pieces_and_another_in_each_epoch_and_for_each_seed() -> None:
    whole = ComputedOrder(plan_of(1000), epoch=0).at(0, 1000)
    again = ComputedOrder(plan_of(1000), epoch=0)
    assert np.array_equal(np.concatenate([again.at(first, first + 40) for first in range(0, 1000, 40)]), whole)
    for other in (ComputedOrder(plan_of(1000), epoch=1), ComputedOrder(plan_of(1000, seed=1), epoch=0)):
        assert np.mean(other.at(0, 1000) == whole) < 0.01


def test_a_computed_order_looks_random() -> None:
    """Compared with what independent draws give: means of batches, and how often neighbors stay neighbors."""
    size, n = 64, 1 << 16
    order = ComputedOrder(plan_of(n), epoch=0).at(0, n)
    means = order.reshape(-1, size).mean(1) / n
    assert abs(means.mean() - 0.5) < 1e-4
    assert np.isclose(means.std(), np.sqrt(1 / 12 / size), rtol=0.1)  # 1,024 batches: +- 2 % of the deviation
    assert np.mean(np.abs(np.diff(order)) <= 16) < 2 * 32 / n
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(n)


@pytest.mark.parametrize(("num_samples", "kind"), [(MOST_LISTED, ListedOrder), (MOST_LISTED + 1, ComputedOrder)])
def test_the_order_of_many_samples_is_computed(num_samples: int, kind: type) -> None:
    plan = plan_of(num_samples)
    sampler = Sampler(plan)
    last = Place(plan.portions_per_epoch - 1, plan.batches_in(plan.portions_per_epoch - 1) - 1)
    assert len(sampler.indices(last)) == (num_samples - 1) % 32 + 1  # type: ignore[arg-type]
    assert type(sampler.order) is kind


def test_twenty_million_samples_take_no_memory() -> None:
    sampler = Sampler(plan_of(20_000_000))
    tracemalloc.start()
    batches = [sampler.indices(Place(portion, 0)) for portion in (0, 1000, 150_000, 156_250)]  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20  # it was 160 MB
    assert len(np.unique(np.concatenate(batches))) == 4 * 32
