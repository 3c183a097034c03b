"""1F1B with a flush idles as long as GPipe and keeps S - s instead of M microbatches (Huang et al. 2019).

Idle time is that of a simulated schedule, for up to 6 stages and 12 microbatches, compared with (S - 1) / (M + S - 1).
Memory is measured: a model of equal stages trains for one batch, and the script counts the tensors that autograd saves
in each stage for the backward pass. (1F1B with a flush: Narayanan et al. 2021.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rainband.model_parallel.execution.in_process import Pipeline
from rainband.model_parallel.execution.stage import Stage
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import LossMicrobatch
from rainband.model_parallel.schedules.builders import gpipe, one_f_one_b
from rainband.model_parallel.schedules.check import Costs, check
from rainband.model_parallel.schedules.table import Table
from reproduce.claim import Check, Claim, Method, Values

SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b}
SIZES = [(stages, microbatches) for stages in range(1, 7) for microbatches in range(1, 13)]
COSTS = [(1.0, 2.0), (1.0, 1.0), (3.0, 4.0)]  # seconds of a forward and a backward
STAGES, MICROS = 6, 12  # of the measured model
WIDTH, SAMPLES = 64, 32


class Saved:
    """Counts the bytes that autograd has saved in one stage and not yet freed, without parameters."""

    def __init__(self, stage: Stage) -> None:
        self.now = self.peak = 0
        run = stage.forward

        def forward(*args: Any) -> Sequence[Any]:
            with saved_tensors_hooks(partial(_Kept, self), _Kept.tensor_of):
                return run(*args)

        stage.forward = forward  # type: ignore[method-assign]

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


class _Kept:
    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        is_parameter = tensor.shape[0] == WIDTH  # batches have fewer rows
        self.num_bytes = 0 if is_parameter else tensor.numel() * tensor.element_size()
        saved.add(self.num_bytes)

    def tensor_of(self) -> Tensor:
        return self.tensor

    def __del__(self) -> None:
        self.saved.add(-self.num_bytes)


def peak_bytes(schedule: Callable[[int, int], Table], stages: int, microbatches: int) -> list[int]:
    """Return the peak of the saved bytes of each stage, in one batch of training."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))
    batches = [torch.randn(SAMPLES, WIDTH) for _ in range(microbatches)]
    graph = cut(model, (batches[0],))
    stage_of = {unit: int(unit.split("_")[1]) for unit in graph.units}
    pipeline = Pipeline(graph, stage_of, schedule(stages, microbatches), partial(torch.optim.SGD, lr=0.1))
    saved = {number: Saved(stage) for (_, number), stage in pipeline.stages.items()}
    pipeline.run([LossMicrobatch((x,), lambda y: (y**2).mean(), SAMPLES) for x in batches])
    assert all(stage.now == 0 for stage in saved.values()), "something was not freed"
    return [saved[number].peak for number in range(stages)]


def largest_error() -> tuple[float, float]:
    """Return the largest error of the formula of idle time, and the largest difference between the two schedules."""
    from_formula = from_each_other = 0.0
    for stages, microbatches in SIZES:
        for forward_s, backward_s in COSTS:
            costs = Costs((forward_s,), (backward_s,))
            state = [check(make(stages, microbatches), costs) for make in SCHEDULES.values()]
            wanted = (stages - 1) / (microbatches + stages - 1)
            from_formula = max(from_formula, *(abs(fact.bubble - wanted) for fact in state))
            from_each_other = max(from_each_other, abs(state[0].total_s - state[1].total_s))
    return from_formula, from_each_other


def point(seed: int, x: float, schedule: str) -> Values:
    (one,) = peak_bytes(gpipe, 1, 1)  # of one microbatch in one stage
    kept = peak_bytes(SCHEDULES[schedule], STAGES, MICROS)[int(x)] / one
    from_formula, from_each_other = largest_error()
    return {"kept": kept, "from_formula": from_formula, "from_each_other": from_each_other}


def kept_beyond(schedule: str, stage: int, microbatches: int) -> Any:
    return lambda r: abs(r(schedule, "kept", stage) - microbatches)


CLAIM = Claim(
    paper="Huang et al. 2019; Narayanan et al. 2021",
    text="with a flush, 1F1B idles as long as GPipe, and keeps the activations of S - s microbatches instead of M",
    part="Model parallelism",
    methods=tuple(Method(name, {"schedule": name}) for name in SCHEDULES),
    tasks={"": {}},
    how="computation",
    repeated=False,
    point=point,
    x=tuple(range(STAGES)),
    x_label="stage s of 6; 12 microbatches",
    shown={"kept": "microbatches kept"},
    checks=(
        Check(
            f"idle time of {len(SIZES)} sizes, against (S - 1) / (M + S - 1)",
            lambda r: r("1F1B", "from_formula", 0),
            below=1e-9,
            unit="apart at most",
        ),
        Check("and against GPipe", lambda r: r("1F1B", "from_each_other", 0), below=1e-9, unit="s apart at most"),
        *(
            Check(f"1F1B, stage {stage} keeps {STAGES - stage}", kept_beyond("1F1B", stage, STAGES - stage), below=1e-9)
            for stage in range(STAGES)
        ),
        Check("GPipe, stage 0 keeps all 12", kept_beyond("GPipe", 0, MICROS), below=1e-9, control=True),
    ),
)
