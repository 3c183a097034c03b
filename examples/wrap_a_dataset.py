"""Train a module on a dataset with one call: the five lines of the task are marked.

    python examples/wrap_a_dataset.py

It starts its own workers and servers, so start it without `rainband run`.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rainband

tiny = "--tiny" in sys.argv[1:]  # a few seconds of work, to see that it runs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(pixels)
        return scores


digits = load_digits()
pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train = TensorDataset(pixels[:1437], labels[:1437])


def accuracy(net: nn.Module) -> dict[str, float]:
    right = net(pixels[1437:]).argmax(1) == labels[1437:]
    return {"accuracy": right.float().mean().item()}


task = rainband.ModuleTask(  # 1
    module=Net,  # 2  builds the model
    dataset=train,  # 3  any map-style torch Dataset of (input, target)
    loss_fn=functional.cross_entropy,  # 4  (outputs, targets) -> mean loss
    evaluate_fn=accuracy,  # 5  (model) -> metrics on held-out data
)
downpour = rainband.Downpour(n_push=2)
result = rainband.fit(task, strategy=downpour, workers=2, servers=1, epochs=1 if tiny else 10)

counts = result.accounting
print(f"accuracy {result.metrics['accuracy']:.3f}")
print(f"{counts.applied} of {counts.batches} batches applied, {counts.lost} lost, {counts.applied_twice} applied twice")
print(f"the module is a {type(result.module).__name__}; the run directory is {result.directory}")
