"""The data of a custom training loop: random transforms in a loader's processes, and the last batch of a pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

from rainband.protocol.data_plan import DataPlan
from rainband.runtimes.training_loop.single_process import SingleProcessLoop
from rainband.strategies.sync import Sync
from tests.one_process import PLAIN, OneProcess, joined


class Noisy(Dataset[Tensor]):
    """Sample i is (i, a random number of torch, one of numpy)."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand()], dtype=torch.float64)


def draws(together: bool, passes: int, **arguments: Any) -> list[Tensor]:
    """Return what each pass draws, in the order of the samples."""
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = []
    with joined(model, optimizer, OneProcess()) if together else nullcontext(SingleProcessLoop()) as run:
        for _ in run.epochs(passes):
            rows = []
            for batch in run.batches(Noisy(), batch_size=2, **arguments):
                rows.append(batch)
                model(torch.ones(1)).sum().backward()
                optimizer.step()
            seen.append(torch.cat(rows).sort(dim=0).values)
    return seen


@pytest.mark.parametrize("together", [True, False])
def test_random_transforms_in_a_loaders_process_differ_from_pass_to_pass(together: bool) -> None:
    torch.manual_seed(5)
    first, second, third = draws(together, passes=3, num_workers=1)
    for rows in (first, second, third):
        assert rows[:, 0].tolist() == list(range(8))
        assert all(len(set(rows[:, column].tolist())) == 8 for column in (1, 2))
    of_all = torch.cat([first, second, third])
    assert [len(set(of_all[:, column].tolist())) for column in (1, 2)] == [24, 24]
    torch.manual_seed(5)
    again = draws(together, passes=3, num_workers=1)
    assert all(torch.equal(a, b) for a, b in zip(again, (first, second, third), strict=True))
    torch.manual_seed(6)
    assert not torch.equal(draws(together, passes=1, num_workers=1)[0], first)


@pytest.mark.parametrize("together", [True, False])
def test_a_loader_leaves_the_scripts_own_random_numbers_alone(together: bool) -> None:
    torch.manual_seed(5)
    nn.Linear(1, 1)  # as `draws` does
    expected = torch.rand(3)
    torch.manual_seed(5)
    draws(together, passes=2, num_workers=1)
    assert torch.equal(torch.rand(3), expected)


# ---- the last batch ----


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)])
def test_drop_last_leaves_out_the_short_batch_of_each_pass(strategy: Any) -> None:
    data = torch.arange(9.0)  # nine samples in batches of four: BatchNorm refuses a batch of one

    def seen(run: Any, model: nn.Module, optimizer: SGD) -> list[list[float]]:
        passes = []
        for _ in run.epochs(2):
            batches = []
            for batch in run.batches(data, batch_size=4, drop_last=True):
                assert len(batch) == 4
                model(batch[:, None]).sum().backward()
                optimizer.step()
                batches += batch.tolist()
            passes.append(batches)
        return passes

    def build() -> tuple[nn.Module, SGD]:
        model = nn.BatchNorm1d(1)
        return model, SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    alone = seen(SingleProcessLoop(), model, optimizer)
    model, optimizer = build()
    member = OneProcess(strategy)
    with joined(model, optimizer, member) as run:
        together = seen(run, model, optimizer)
    for passes in (alone, together):
        assert [len(set(batches)) for batches in passes] == [8, 8]
    assert together == alone  # the seed is the same
    dropped = [set(range(9)) - set(batches) for batches in alone]
    assert dropped[0] != dropped[1]  # every sample is used in some pass
    accounting = member.accounting
    assert (accounting.batches, accounting.applied, accounting.not_processed) == (4, 4, 0)


def test_drop_last_must_be_the_same_in_each_pass() -> None:
    model = nn.Linear(1, 1)
    with joined(model, SGD(model.parameters()), OneProcess()) as run:
        run.batches(Noisy(), batch_size=3, drop_last=True)
        with pytest.raises(ValueError, match="drop_last=True: use the same"):
            run.batches(Noisy(), batch_size=3)


def test_samples_of_a_plan_with_drop_last() -> None:
    plan = DataPlan(
        fingerprint="", layout="", num_samples=9, batch_size=4, epochs=3, seed=0, portion_batches=1, drop_last=True
    )
    assert (plan.batches_per_epoch, plan.num_batches, plan.samples_per_epoch) == (2, 6, 8)
    assert [plan.samples_of(batches) for batches in range(7)] == [0, 4, 8, 12, 16, 20, 24]
    assert [plan.samples_in(portion, 0) for portion in range(6)] == [4] * 6


@pytest.mark.parametrize("strategy", ["alone", "downpour", "sync"])
def test_what_stands_for_a_data_loader_may_be_made_once_for_all_epochs(strategy: str) -> None:
    member = (
        None if strategy == "alone" else OneProcess(PLAIN if strategy == "downpour" else Sync(batch_per_worker=True))
    )
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(24.0)[:, None].expand(24, 5))
    seen: list[list[float]] = []
    with SingleProcessLoop() if member is None else joined(model, optimizer, member) as run:
        batches = run.batches(data, batch_size=5)
        assert (len(batches), batches.batch_size, batches.dataset) == (5, 5, data)
        for _ in range(3):
            seen.append([])
            for (x,) in batches:
                seen[-1] += x[:, 0].tolist()
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
    assert [sorted(one) for one in seen] == [list(range(24))] * 3
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("how", ["shuffle", "sampler", "batch_sampler"])
def test_a_script_in_one_process_takes_an_order_of_its_own(how: str) -> None:
    order = list(range(7))[::-1]
    given: dict[str, Any] = {"shuffle": {"shuffle": False}, "sampler": {"sampler": order}}.get(how, {})
    batched = {"batch_sampler": [[3, 4], [5]]} if how == "batch_sampler" else {"batch_size": 3, **given}
    with SingleProcessLoop() as run:
        batches = run.batches(TensorDataset(torch.arange(7)), **batched)
        found = [x.tolist() for (x,) in batches]
        assert len(batches) == len(found) and found == [x.tolist() for (x,) in batches]
    expected = {"shuffle": [[0, 1, 2], [3, 4, 5], [6]], "sampler": [[6, 5, 4], [3, 2, 1], [0]]}
    assert found == expected.get(how, [[3, 4], [5]])
