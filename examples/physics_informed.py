"""Solve a differential equation with a small network: L-BFGS, Adam and SGD, for the same number of passes.

    python examples/physics_informed.py

    -u''(x) = pi^2 (sin(pi x) + 4 sin(4 pi x)) on [-1, 1],   u(-1) = u(1) = 0,   so   u = sin(pi x) + sin(4 pi x) / 4

It starts its own workers and servers, so start it without `rainband run`. The plot is physics_informed.png.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import rainband

tiny = "--tiny" in sys.argv[1:]  # a few seconds of work, to see that it runs
PI = torch.pi


def exact(x: Tensor) -> Tensor:
    return torch.sin(PI * x) + torch.sin(4 * PI * x) / 4


class Solution(nn.Module):
    """A network that is zero at both ends for any weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x: Tensor) -> Tensor:
        u: Tensor = (1 - x**2) * self.layers(x)
        return u


@dataclass(frozen=True)
class Equation:
    """A task whose loss is the squared residual of the equation at points of the interval."""

    points: int = 128 if tiny else 512
    batch_size: int = 32
    epochs: int = 1

    def model(self) -> Solution:
        return Solution()

    def data(self) -> rainband.TensorData:
        return rainband.TensorData(torch.linspace(-1, 1, self.points, dtype=torch.float64)[:, None])

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        x = batch[0].requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
        residual = bend + PI**2 * (torch.sin(PI * x) + 4 * torch.sin(4 * PI * x))
        return residual.square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x = torch.linspace(-1, 1, 1001, dtype=torch.float64)[:, None]
        return {"error": (model(x) - exact(x)).abs().max().item()}


task = Equation()
found = rainband.minimize(task, workers=2, servers=1, iterations=5 if tiny else 800, history=30, tol=1e-4, n_push=2)
tuned = (("Adam", 1e-3), ("SGD", 3e-4))  # the best of 1e-3, 3e-3, 1e-2, and of 3e-5, 1e-4, 3e-4, 1e-3, in one process
by_batches = {name: rainband.Downpour(optimizer=name.lower(), lr=lr) for name, lr in tuned}
fitted = {name: rainband.fit(task, how, workers=2, servers=1, epochs=found.nfev) for name, how in by_batches.items()}

print(f"L-BFGS: {found.nit} iterations, {found.nfev} passes: largest error {found.metrics['error']:.2g}")
for name, one in fitted.items():
    print(f"{name + ':':7s} {found.nfev} passes: largest error {one.metrics['error']:.2g}")
print(f"{found.accounting.applied} batches, {found.accounting.applied_twice} applied twice")


def plot(path: Path) -> None:
    import matplotlib.pyplot as pyplot

    pyplot.switch_backend("Agg")

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), dpi=120, layout="constrained")
    left.semilogy([i.evaluations for i in found.history], [i.loss for i in found.history], label="L-BFGS")
    for name, one in fitted.items():
        done = [p for p in one.history if p.loss is not None and p.samples_done]
        left.semilogy([p.samples_done / task.points for p in done], [p.loss for p in done], label=name)
    left.set(xlabel="passes over the points", ylabel="loss")
    left.legend()
    x = torch.linspace(-1, 1, 401, dtype=torch.float64)[:, None]
    for module in (found.module, *(one.module for one in fitted.values())):
        right.semilogy(x[1:-1], (module(x) - exact(x)).abs().detach()[1:-1])  # at both ends it is zero
    right.set(xlabel="x", ylabel="error of u", xticks=[-1, -0.5, 0, 0.5, 1])
    figure.savefig(path)


plot(Path("physics_informed.png"))
