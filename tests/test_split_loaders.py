"""The DataLoader that loads a worker's parts of batches."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from rainband.rounds.exchange import Part
from rainband.runtimes.training_loop.split.parts import PartLoader


def test_arguments_of_loader_processes_are_not_used_in_this_process() -> None:
    """A DataLoader with processes has a prefetch factor, which one without them refuses."""
    dataset = TensorDataset(torch.arange(8.0))
    own = DataLoader(dataset, num_workers=2, persistent_workers=True, timeout=60)
    names = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
    loader = PartLoader(dataset, {name: getattr(own, name) for name in names})
    loader.ahead = False
    (loaded,) = loader.load(Part((2, 5), 0, 2, 4), iter(()))
    assert loaded.tolist() == [2.0, 5.0]


def test_processes_of_a_loader_do_not_draw_from_its_generator() -> None:
    """The order of the next pass is drawn from it."""
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    loader = PartLoader(TensorDataset(torch.arange(8.0)), {"num_workers": 1, "generator": generator})
    (loaded,) = loader.load(Part((2, 5), 0, 2, 4), iter([[2, 5, 1, 7]]))
    assert loaded.tolist() == [2.0, 5.0]
    assert torch.equal(generator.get_state(), before)
    loader.end_pass()
