"""The data of a custom training loop: random transforms in a loader's processes, and the last batch of a pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset

from rainband.runtimes.training_loop.single_process import SingleProcessLoop
from tests.one_process import OneProcess, joined


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
