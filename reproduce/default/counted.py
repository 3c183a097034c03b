"""A loop whose parameters count: how often each sample was used, or how many steps were made at which rate.

With the loss `sum`, gradients are integers: each use of a sample subtracts one from the parameters of this sample, in
whichever batch it is. With `mean`, the rate changes with each step, and all parameters together change by the rate.
kills.py disturbs the workers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import rainband
from reproduce.default.loops import Plain

SAMPLES, BATCH, EPOCHS, WIDTH = 488, 16, 4, 400  # 30 batches of 16, and one of 8
STEPS = EPOCHS * -(-SAMPLES // BATCH)
JUDGED = 5  # batches after which the workers know whether a loss is a mean or a sum
LOSSES = ("mean", "sum")


def loss(which: str, weights: Tensor, samples: Tensor) -> Tensor:
    return weights[samples].sum() if which == "sum" else weights[samples].mean()


def rate(which: str, step: int) -> float:
    return 1.0 if which == "sum" else 0.5 ** (step % 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loss", choices=LOSSES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds of each step")
    asked = parser.parse_args()
    torch.manual_seed(0)
    alone = getattr(sys.modules["__main__"], "__rainband__", None) is None
    rank = 0 if alone else rainband.rank()
    join: Any = Plain if alone else rainband.join
    model = nn.Module()
    model.weights = weights = nn.Parameter(torch.zeros(SAMPLES, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    per_step = LambdaLR(optimizer, lambda step: rate(asked.loss, step))
    per_epoch = StepLR(optimizer, 1, 1.0)
    own_steps = 0
    with join(model, optimizer) as run:
        run.register(per_step, per_epoch)
        loader = run.loader(DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True))
        for _ in range(EPOCHS):
            for (samples,) in loader:
                optimizer.zero_grad()
                time.sleep(asked.step_s / 2)
                loss(asked.loss, weights, samples).backward()
                time.sleep(asked.step_s / 2)
                optimizer.step()
                per_step.step()
                own_steps += 1
                if own_steps == JUDGED:  # from now on, this process may be killed
                    (asked.out / f"{rank}.{os.getpid()}.begun").touch()
            per_epoch.step()
    found: dict[str, Any] = {"steps": per_step.last_epoch, "epochs": per_epoch.last_epoch}
    found["rate"] = optimizer.param_groups[0]["lr"]
    last = weights.detach()
    found["parameters"] = zlib.crc32(last.numpy().tobytes())
    found["total"], found["uses"] = -last.double().sum().item(), [-last.max().item(), -last.min().item()]
    (asked.out / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
