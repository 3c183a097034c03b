"""Checks, when a script joins, whether the servers can run its optimizer with this strategy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from rainband.model.block_optimizer import blockwise_obstacle
from rainband.model.optimizer_state import settings_of, spec_of
from rainband.plugins import find_strategy, strategy_names, typed_name
from rainband.protocol.optimizer_spec import TAKERS, OptimizerSpec
from rainband.runtimes.advice import warnings_for
from rainband.runtimes.configure import check_custom_loop
from rainband.strategy import Strategy


def takes_any_optimizer(strategy: Strategy) -> bool:
    """Return True if the user's optimizer runs on the workers, and may thus be any."""
    return strategy.requires.optimizer == "workers"


def following(strategy: Strategy, optimizers: Sequence[Optimizer]) -> Strategy:
    """Return the strategy with the user's optimizer, learning rate and momentum: for own steps and warnings."""
    name, settings = spec_of(optimizers[:1]).name, settings_of(optimizers)[0]
    taken = {key: settings[key] for key in ("lr", "momentum") if name in TAKERS[key]}
    return strategy.with_optimizer(OptimizerSpec(name, {"lr": settings["lr"], **taken}))


def print_warnings(strategy: Strategy, num_workers: int) -> None:
    """Print what `rainband train` prints before a run, which is known here only when the script joins."""
    for text in warnings_for(strategy, num_workers):
        print(f"WARNING: {text}", file=sys.stderr)


def check(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, importable: Sequence[str]) -> None:
    """Raise or warn if these cannot be joined; `importable` are optimizers that servers may import besides torch's."""
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if left_out:
        warnings.warn(
            f"{len(left_out)} parameters of the model are in no group of the optimizer ({left_out[0]}, ...), and are "
            "not shared between workers. If another optimizer trains them: rainband.join(model, [first, second]).",
            stacklevel=5,
        )
    check_custom_loop(typed_name(strategy), strategy.requires)
    if not takes_any_optimizer(strategy):
        _check_optimizer(spec_of(optimizers), optimizers, strategy, importable)


def _check_optimizer(
    spec: OptimizerSpec, optimizers: Sequence[Optimizer], strategy: Strategy, importable: Sequence[str]
) -> None:
    kind, name = type(optimizers[0]), typed_name(strategy)
    reason = blockwise_obstacle(kind, settings_of(optimizers)[0])
    if reason:
        raise ValueError(
            f"{kind.__name__} cannot run block by block on the servers of {name}: {reason}. "
            f"Use a strategy that runs it on the workers (--strategy {', '.join(_strategies_for_any())}), "
            "or an element-wise optimizer, such as SGD, Adam or Adagrad."
        )
    if ":" in spec.name and spec.name not in importable:
        where = "" if not spec.name.startswith("__main__") else " Move it to a module beside the script first."
        raise ValueError(
            f"{kind.__name__} is not in torch.optim, and servers import other optimizers only if the command allows "
            f"it: type rainband run --optimizer {spec.name.replace('__main__', 'module')} ...{where}"
        )


def _strategies_for_any() -> list[str]:
    names = []
    for name in strategy_names():
        try:
            strategy = find_strategy(name)()
            if takes_any_optimizer(strategy) and strategy.requires.custom_loop and strategy.requires.stages is None:
                names.append(name)
        except (ValueError, TypeError):  # it requires settings
            continue
    return names
