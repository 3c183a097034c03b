"""Join a run from a loop written with Accelerate.

from rainband.adapters.accelerate import join
model, optimizer = accelerator.prepare(model, optimizer)
with join(accelerator, model, optimizer) as run:
    ...  # the loop as it is, with accelerator.backward(loss)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rainband.join import join as join_plainly

if TYPE_CHECKING:
    from accelerate import Accelerator

    from rainband.runtimes.training_loop.loop import TrainingLoop
    from rainband.runtimes.training_loop.single_process import SingleProcessLoop
    from rainband.runtimes.training_loop.split.loop import SplitLoop


def join(accelerator: Accelerator, model: Any, optimizer: Any) -> SplitLoop | TrainingLoop | SingleProcessLoop:
    """Call rainband.join for the model and the optimizer that accelerator.prepare(...) returned."""
    if accelerator.num_processes > 1:
        raise ValueError(
            f"Accelerate has started {accelerator.num_processes} processes, but a worker has one: start the script "
            "with `rainband run`, not with `accelerate launch`."
        )
    return join_plainly(accelerator.unwrap_model(model), optimizer)
