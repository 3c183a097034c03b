"""Join a run from a custom training loop: `with rainband.join(model, optimizer) as run:`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rainband.runtimes.training_loop.loop import TrainingLoop
    from rainband.runtimes.training_loop.single_process import SingleProcessLoop
    from rainband.runtimes.training_loop.split.loop import SplitLoop

MEMBERSHIP = "__rainband__"  # the name in __main__ under which `rainband run` gives a script its link to the run


@cache
def _say_single_process() -> None:
    print("rainband: training in one process; rainband run --workers 4 SCRIPT trains with several.", file=sys.stderr)


def rank() -> int:
    """Return the number of this worker, from 0: to divide the data of your own loader among the workers."""
    member = getattr(sys.modules["__main__"], MEMBERSHIP, None)
    if member is None:
        return 0
    member.asked_rank = True
    index: int = member.index
    return index


def num_workers() -> int:
    """Return the number of workers of the run; 1 in a script that trains alone."""
    member = getattr(sys.modules["__main__"], MEMBERSHIP, None)
    return 1 if member is None else int(member.num_workers)


def join(model: Any, optimizer: Any) -> SplitLoop | TrainingLoop | SingleProcessLoop:
    """Train this model with the other workers, in a script started by `rainband run`.

        with rainband.join(model, optimizer) as run:
            for epoch in run.epochs(10):
                for x, y in run.batches(dataset, batch_size=64):
                    ...  # zero_grad, forward, backward, optimizer.step(): as ever

    `optimizer` is a torch optimizer, a wrapper of one from another library, or a list of several; `model` a module, or
    a list of them. After the `with`
    block every worker has the final parameters. Started with `python`, the script trains in one process and says so.
    """
    optimizers: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not optimizers:
        raise ValueError("optimizer=[]: rainband.join(model, optimizer) requires one optimizer or more.")
    main = sys.modules["__main__"]
    member = getattr(main, MEMBERSHIP, None)
    if member is None:
        from rainband.runtimes.training_loop.single_process import SingleProcessLoop

        _say_single_process()
        return SingleProcessLoop()
    if getattr(member, "joined", False):
        raise ValueError("a script can join its run only once: train everything inside one `with rainband.join(...)`.")
    member.joined = True
    if member.strategy.requires.split_batches:
        from rainband.runtimes.training_loop.split.loop import joined_loop

        return joined_loop(model, optimizers, member)
    if member.strategy.requires.local_steps:
        from rainband.runtimes.training_loop.local_steps import LocalStepsLoop

        return LocalStepsLoop(model, optimizers, member)
    from rainband.runtimes.training_loop.loop import TrainingLoop

    return TrainingLoop(model, optimizers, member)
