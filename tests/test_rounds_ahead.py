"""A loader's processes fetch ahead in rounds too, where the next batch is known only when its round begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, get_worker_info

from rainband.protocol.data_plan import DataPlan
from rainband.runtimes.training_loop.batches import fetched_ahead
from rainband.strategies.sync import Sync
from rainband.strategy import Batch
from rainband.worker.leases import HeldLease
from rainband.worker.worker import Sampler
from tests.one_process import OneProcess, joined


class Numbered(Dataset[tuple[Tensor, int]]):
    """Each sample is its own number, and says whether a loader's process has read it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), int(get_worker_info() is not None)


def drawn_by(num_workers: int, pause_after: int = -1, leave_after: int = -1) -> tuple[list[list[float]], set[int]]:
    """Return the samples of each batch of two passes, and whether loader processes have read them."""
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.0)
    member = OneProcess(Sync(batch_per_worker=True))
    batches: list[list[float]] = []
    readers: set[int] = set()
    with joined(model, optimizer, member) as run:
        for _ in run.epochs(2):
            for inputs, read_ahead in run.batches(Numbered(), batch_size=3, num_workers=num_workers):
                batches.append(inputs.flatten().tolist())
                readers |= set(read_ahead.tolist())
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
                if len(batches) == pause_after:
                    with run.paused():
                        pass
                if len(batches) == leave_after:
                    break
    assert member.accounting.applied == 28
    return batches, readers


@pytest.mark.parametrize("how", [{}, {"pause_after": 4}, {"leave_after": 6}], ids=["all", "paused", "left"])
def test_the_batches_are_the_same_and_only_loader_processes_read_them(how: dict[str, int]) -> None:
    """Also when leases are given back in the middle of a pass, or a pass is left with fetched batches."""
    alone, read_alone = drawn_by(0, **how)
    ahead, read_ahead = drawn_by(2, **how)
    assert ahead == alone
    assert sorted(number for batch in ahead for number in batch) == sorted([float(n) for n in range(40)] * 2)
    assert (read_alone, read_ahead) == ({0}, {1})


class Drawn:
    """The batches 0, 1, 3 and 2 of one lease: after the second the run takes back the third, and leases it again."""

    def __init__(self) -> None:
        self.plan = DataPlan(
            fingerprint="",
            layout="",
            num_samples=40,
            batch_size=3,
            epochs=1,
            seed=0,
            portion_batches=4,
            items_per_round=1,
        )
        lease = HeldLease(0, 1, deque([(0,), (1,), (2,), (3,)]), {0, 1, 2, 3})
        self.client = SimpleNamespace(plan=self.plan, leases=SimpleNamespace(held={0: lease}))
        self.passes = 1
        self.ahead: deque[Batch] = deque()

    def __iter__(self) -> Iterator[None]:
        for k, number in ((0, 1), (1, 1), (3, 1), (2, 2)):
            self.ahead.append(Batch(0, k, number))
            yield
            self.ahead.clear()


def test_fetched_batches_of_a_revoked_lease_are_left_out_and_others_fetched_when_drawn() -> None:
    drawn: Any = Drawn()
    sampler = Sampler(drawn.plan)
    found = [inputs.flatten().tolist() for inputs, _ in fetched_ahead(Numbered(), drawn, {"num_workers": 1})]
    assert found == [sampler.indices(Batch(0, k, 1)).tolist() for k in (0, 1, 3, 2)]
