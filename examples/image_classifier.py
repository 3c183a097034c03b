"""Recognize handwritten digits, in a custom training loop.

    python examples/image_classifier.py                                     one process
    rainband run --workers 2 examples/image_classifier.py      two workers, which share each batch

The lines added for Rainband are marked.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rainband  # <-


def main() -> None:
    parser = argparse.ArgumentParser(description="Recognize handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--tiny", action="store_true", help="a few seconds of work, to see that it runs")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, (test_images, test_labels) = load(num_train=320 if args.tiny else 1437)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    with rainband.join(model, optimizer) as run:  # <-
        for _ in run.epochs(1 if args.tiny else args.epochs):  # <- instead of range(...)
            for images, labels in run.batches(train, batch_size=32):  # <- instead of a DataLoader
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                run.log(loss=loss)  # <- to show the loss while it trains

    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if run.rank == 0:  # every worker runs this, with the same model
        print(f"accuracy {right:.3f}")


def load(num_train: int) -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Return 1,797 images of 8 x 8 pixels, the last 360 of them for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:num_train], labels[:num_train]), (images[1437:], labels[1437:])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


main()
