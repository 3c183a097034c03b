"""Predict a number from a table (442 patients, ten measurements each), with your own DataLoader and scheduler.

    python examples/table_regression.py                                    one process
    rainband run --workers 2 examples/table_regression.py      two workers, which share each batch

The three lines that are added or changed for Rainband are marked.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import rainband  # <-


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict the progression of diabetes.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="a few seconds of work, to see that it runs")
    args = parser.parse_args()
    epochs = 2 if args.tiny else args.epochs

    torch.manual_seed(0)  # the same initial parameters and split on every worker
    train, test = split(*table())
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    with rainband.join(model, optimizer) as run:  # <-
        for _ in range(epochs):
            for rows, targets in run.loader(DataLoader(train, batch_size=32, shuffle=True)):  # <-
                optimizer.zero_grad()
                functional.mse_loss(model(rows).squeeze(1), targets).backward()
                optimizer.step()
            scheduler.step()

    model.eval()
    with torch.no_grad():
        rows, targets = test
        explained = 1 - functional.mse_loss(model(rows).squeeze(1), targets) / targets.var()
    if run.rank == 0:  # every worker runs this, with the same model
        print(f"explains {100 * explained.item():.0f} % of the variance")


def table() -> tuple[Tensor, Tensor]:
    """Return inputs and targets, standardized to mean 0 and deviation 1."""
    columns, targets = load_diabetes(return_X_y=True, scaled=False)
    x, y = torch.tensor(columns, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def split(x: Tensor, y: Tensor) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    order = torch.randperm(len(x))
    train, test = order[:352], order[352:]
    return TensorDataset(x[train], y[train]), (x[test], y[test])


main()
