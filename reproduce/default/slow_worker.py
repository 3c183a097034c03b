"""One of four workers 5 times slower: samples/s as a fraction of the sum of the four speeds.

rainband run --workers 4 reproduce/default/slow_worker.py
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import rainband

SAMPLES, BATCH, EPOCHS, SLOW, FACTOR = 6400, 160, 4, 2, 5
SAMPLE_S = 0.001  # sleeping, so that all workers have a core


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)))
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sample_s = SAMPLE_S * (FACTOR if rainband.rank() == SLOW else 1)
    steps, of_half = 0, [0.0, 0.0]
    with rainband.join(model, optimizer) as run:
        loader = run.loader(DataLoader(data, BATCH, shuffle=True))
        for epoch in range(EPOCHS):
            began = time.perf_counter()
            for x, y in loader:
                optimizer.zero_grad()
                time.sleep(sample_s * len(x))
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
            of_half[epoch * 2 // EPOCHS] += time.perf_counter() - began
    if rainband.rank() == 0:
        speeds = (rainband.num_workers() - 1 + 1 / FACTOR) / SAMPLE_S
        for name, seconds in zip(("first", "second"), of_half, strict=True):
            rate = SAMPLES * EPOCHS / 2 / seconds
            print(f"{name} half: {rate:.0f} samples/s, {rate / speeds:.1%} of {speeds:.0f}; {steps} steps in all")


if __name__ == "__main__":
    main()
