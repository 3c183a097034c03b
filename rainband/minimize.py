"""Full-batch minimization over many processes: `rainband.minimize(task)`, in the style of `scipy.optimize.minimize`.

The function is the mean loss over all samples, its argument the parameters of the task's model. The result has the
names of scipy.optimize.OptimizeResult.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rainband.errors import did_you_mean
from rainband.fit import FitResult, fit
from rainband.options import FitOptions, declared

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

    from rainband.protocol.accounting import BatchAccounting
    from rainband.protocol.events import AnyEvent, IterationDone
    from rainband.tasks.task import Task

METHODS = {"lbfgs": "sandblaster", "cg": "conjugate_gradient"}
OTHER_NAMES = {  # of scipy.optimize.minimize, and of rainband.fit
    "maxiter": "iterations",
    "epochs": "iterations",
    "gtol": "tol",
    "ftol": "loss_tolerance",
    "maxcor": "history",
}


@dataclass(frozen=True)
class MinimizeResult:
    """The result of `minimize`."""

    x: NDArray[Any]  # all parameters of the model as one vector, in the order of module.parameters()
    fun: float  # the loss at x
    gradient_norm: float
    success: bool  # it ended because a tolerance was reached
    status: int  # an EndCause: 0 converged, 1 out of iterations, 2 no lower loss was found, 3 not finite, 4 stopped
    message: str  # why it ended
    nit: int  # iterations
    nfev: int  # evaluations of the loss, each with its gradient
    njev: int
    history: list[IterationDone]  # each iteration: loss, gradient norm, step, evaluations, ...
    module: nn.Module  # with the parameters x
    metrics: dict[str, float]  # from the task's `evaluate`
    accounting: BatchAccounting  # batches applied, skipped, lost and applied twice
    directory: Path


def minimize(
    task: Task | str,
    method: str = "lbfgs",
    workers: int | None = None,
    servers: int | None = None,
    *,
    tol: float | None = None,
    callback: Callable[[IterationDone], None] | None = None,
    run: FitOptions | None = None,
    **settings: Any,
) -> MinimizeResult:
    """Minimize the loss of `task` over all its samples with "lbfgs" or "cg"; return when a tolerance is reached.

    `tol` is the gradient norm at which to stop. `callback` is called with every iteration. `settings` are those of the
    strategy (iterations, history, line_search, weight_decay, ...), which `rainband explain sandblaster` describes.
    `run` has the options of rainband.fit: {"batch_size": 64, "seed": 1, "threads": 2, ...}.
    """
    from rainband.plugins import load_strategy
    from rainband.protocol.events import IterationDone

    if not isinstance(method, str) or method not in METHODS:
        near = did_you_mean(method, METHODS) if isinstance(method, str) else ""
        allowed = " or ".join(f'"{known}"' for known in METHODS)
        raise ValueError(f"method={method!r}{near}: must be {allowed}.")
    if tol is not None:
        settings = {"loss_tolerance": 0.0, **settings, "gradient_tolerance": tol}
    history: list[IterationDone] = []

    def note(event: AnyEvent) -> None:
        if isinstance(event, IterationDone):
            history.append(event)
            if callback is not None:
                callback(event)

    _check_settings(method, settings)
    strategy = load_strategy(METHODS[method], settings)
    fitted = fit(task, strategy, workers, servers, on_event=note, **(run or {}))
    return _result(fitted, history)


def _check_settings(method: str, settings: Iterable[str]) -> None:
    """Raise if there is a setting that the method does not have."""
    from rainband.plugins import find_strategy
    from rainband.settings import fields_of

    known = [field.name for field in fields_of(find_strategy(METHODS[method]))]
    for name in settings:
        if name in known:
            continue
        if name in OTHER_NAMES:
            raise ValueError(f"minimize() has no setting {name}: use {OTHER_NAMES[name]}.")
        if name in declared():
            raise ValueError(f'{name} is an option of the run: use run={{"{name}": ...}}.')
        raise ValueError(
            f'minimize(method="{method}") has no setting {name}{did_you_mean(name, known)}: it has {", ".join(known)}.'
        )


def _result(fitted: FitResult, history: list[IterationDone]) -> MinimizeResult:
    from torch.nn.utils import parameters_to_vector

    from rainband.protocol.events import EndCause

    if not history:
        raise ValueError("the run was stopped before the loss was known: there is no result.")
    last = history[-1]
    cause = EndCause.STOPPED if last.end_cause is None else last.end_cause
    return MinimizeResult(
        x=parameters_to_vector(fitted.module.parameters()).detach().numpy(),
        fun=float("nan") if last.loss is None else last.loss,
        gradient_norm=float("nan") if last.gradient_norm is None else last.gradient_norm,
        success=cause is EndCause.CONVERGED,
        status=int(cause),
        message=last.end or "stopped",
        nit=last.iteration,
        nfev=last.evaluations,
        njev=last.evaluations,
        history=history,
        module=fitted.module,
        metrics=fitted.metrics,
        accounting=fitted.accounting,
        directory=fitted.directory,
    )
