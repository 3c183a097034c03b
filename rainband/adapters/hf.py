"""Train with the Hugging Face Trainer in a run.

    from rainband.adapters.hf import RainbandTrainerCallback
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[RainbandTrainerCallback()])

in a script started by `rainband run`. Each worker iterates over the whole dataset, in the same order for the same seed.
To shard it, pass dataset.shard(rainband.num_workers(), rainband.rank()).
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rainband.join import join


class RainbandTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Joins the run when the training begins; when it ends, the model has the final parameters."""

    run: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.run = join(kwargs["model"], kwargs["optimizer"]).__enter__()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(None, None, None)
