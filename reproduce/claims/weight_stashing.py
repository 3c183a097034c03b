"""Without weight stashing, a pipeline that never flushes computes no valid gradient (Narayanan et al. 2019, 3.3).

A model of four stages trains on digits, with an update after every microbatch. With stashing, stage s must equal plain
SGD with gradients at the parameters of S - 1 - s updates ago, and with vertical sync of S - 1 updates ago in all
stages. Both references are implemented below without a pipeline. Without stashing, a backward pass uses newer
parameters than its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from rainband.model_parallel.execution.in_process import Pipeline
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import LossMicrobatch
from rainband.model_parallel.schedules.builders import pipedream
from rainband.model_parallel.schedules.table import Table
from rainband.tasks.digits import Digits
from reproduce.claim import Check, Claim, Method, Values

STAGES, WIDTH = 4, 48
MICROS, SIZE, CHUNK = 400, 16, 20  # microbatches, samples in one, and of how many the last losses are
LR = 0.1
SCHEDULES: dict[str, Callable[[int], Table]] = {
    "stashing": partial(pipedream, [1] * STAGES),
    "vertical sync": partial(pipedream, [1] * STAGES, vertical_sync=True),
    "no stashing": partial(pipedream, [1] * STAGES, stash=False),
}
Samples = Sequence[tuple[Tensor, Tensor]]


def net(seed: int) -> nn.Sequential:
    """Return a model with a linear layer and a tanh in each stage; the last stage computes the scores."""
    torch.manual_seed(seed)
    sizes = [64, *([WIDTH] * (STAGES - 1)), 10]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes[:-1])]
    return nn.Sequential(*layers, nn.Sequential(nn.Linear(*sizes[-2:]))).double()


def samples(seed: int, count: int) -> Samples:
    data = Digits().data()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    picked = [order[torch.arange(n * SIZE, (n + 1) * SIZE) % len(data)].tolist() for n in range(count)]
    batches = [data.batch(indices) for indices in picked]
    return [(x.flatten(1).double(), y) for x, y in batches]


def by_pipeline(model: nn.Sequential, batches: Samples, table: Table) -> list[float]:
    graph = cut(model, (batches[0][0],))
    stages = {unit: int(unit.split("_")[1]) for unit in graph.units}  # _2_0 is in the third of the stages
    pipeline = Pipeline(graph, stages, table, partial(torch.optim.SGD, lr=LR))
    return pipeline.run([LossMicrobatch((x,), partial(functional.cross_entropy, target=y), len(x)) for x, y in batches])


def by_delayed_sgd(model: nn.Sequential, batches: Samples, delay_of: Callable[[int], int]) -> list[float]:
    """Train by W_s(t+1) = W_s(t) - lr * gradient at (W_0(t - delay 0), W_1(t - delay 1), …)."""
    names = {name: int(name.split(".")[0]) for name, _ in model.named_parameters()}  # parameter -> its stage
    history = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for t, (x, y) in enumerate(batches):
        seen = {name: history[max(0, t - delay_of(s))][name].requires_grad_() for name, s in names.items()}
        loss = functional.cross_entropy(functional_call(model, seen, (x,)), y)
        gradients = torch.autograd.grad(loss, list(seen.values()))
        steps = dict(zip(seen, gradients, strict=True))
        history.append({name: history[t][name].detach().add(steps[name], alpha=-LR) for name in names})
        losses.append(float(loss.detach()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(history[-1][name])
    return losses


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the distance between the parameters of two models, relative to their length."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    squares = [(float(((a - b) ** 2).sum()), float((b**2).sum())) for a, b in pairs]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


def apart(name: str, seed: int, microbatches: int) -> tuple[float, float, float]:
    """Return the distance from the reference after some microbatches, the mean last losses, and the reference's."""
    torch.set_num_threads(1)
    batches = samples(seed, microbatches)
    ours, reference = net(seed), net(seed)
    losses = by_pipeline(ours, batches, SCHEDULES[name](microbatches))
    lateness = (lambda stage: STAGES - 1) if name == "vertical sync" else (lambda stage: STAGES - 1 - stage)
    expected = by_delayed_sgd(reference, batches, lateness)
    last = -min(CHUNK, microbatches)
    return distance(ours, reference), sum(losses[last:]) / -last, sum(expected[last:]) / -last


def point(seed: int, x: float, schedule: str) -> Values:
    distance, loss, delayed_loss = apart(schedule, seed, int(x))
    return {"distance": distance, "loss": loss, "delayed_loss": delayed_loss}


CLAIM = Claim(
    paper="Narayanan et al. 2019, section 3.3",
    text="with stashed weights a pipeline is delayed SGD, exactly; without, it is not",
    part="Model parallelism",
    methods=tuple(Method(name, {"schedule": name}) for name in SCHEDULES),
    tasks={"": {}},
    how="computation",
    point=point,
    x=(4, 25, 50, 100, 200, MICROS),
    x_label="microbatches",
    shown={"distance": "distance from delayed SGD, relative", "loss": "loss of the last microbatches"},
    checks=(
        Check("stashing", lambda r: r("stashing", "distance", MICROS), below=1e-12, unit="from delayed SGD"),
        Check("vertical sync", lambda r: r("vertical sync", "distance", MICROS), below=1e-12, unit="from delayed SGD"),
        Check(
            "no stashing",
            lambda r: r("no stashing", "distance", MICROS),
            above=1e-6,
            unit="from delayed SGD",
            control=True,
        ),
    ),
)
