"""Train with the Hugging Face Trainer in a run.

    from rainband.adapters.hf import RainbandTrainerCallback
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[RainbandTrainerCallback()])

in a script started by `rainband run`. By default, the workers share each batch of per_device_train_batch_size samples,
and make the updates of one process. One worker writes checkpoints and logs; the loss in the logs is that of its parts.
With a strategy that has servers, each worker iterates over the whole dataset: pass
dataset.shard(rainband.num_workers(), rainband.rank()).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rainband.adapters.accelerate import SharedLoaders, check_one_process, set_main_process
from rainband.join import join, rank
from rainband.runtimes.training_loop.split.loop import SplitLoop


class RainbandTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Joins the run when the training begins; when it ends, the model has the final parameters."""

    run: Any = None
    loaders: SharedLoaders | None = None
    hook: RemovableHandle | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        check_one_process(args.world_size)
        if rank():
            set_main_process(False)  # before any callback begins a log

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        self.run = join(model, kwargs["optimizer"])
        if isinstance(self.run, SplitLoop):
            self.run.register(kwargs["lr_scheduler"], TrainerSteps(state))
        self.run.__enter__()
        train = kwargs["train_dataloader"]
        self.loaders = SharedLoaders(
            self.run, lambda loader: continues(loader, train), args.gradient_accumulation_steps
        )
        self.loaders.__enter__()
        if isinstance(self.run, SplitLoop):
            self.hook = model.register_forward_pre_hook(self._weigh, with_kwargs=True)
            self._choose_main(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        run, self.run = self.run, None
        if run is not None:
            if self.loaders is not None:
                self.loaders.__exit__()
            if self.hook is not None:
                self.hook.remove()
            run.__exit__(None, None, None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._choose_main(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.run is not None and self.run.stopped is not None:
            control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if isinstance(self.run, SplitLoop):
            self.run.mean(0.0)  # until the main process has written the checkpoint, which others may load at the end
            if state.best_global_step:
                state.best_model_checkpoint = f"{args.output_dir}/checkpoint-{state.best_global_step}"

    def _choose_main(self, state: TrainerState) -> None:
        if isinstance(self.run, SplitLoop):
            is_main = self.run.is_first
            set_main_process(is_main)
            for name in ("is_world_process_zero", "is_local_process_zero"):
                setattr(state, name, is_main)

    def _weigh(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Weight gradients by what the loss is a mean over: this worker's labels in all batches of the step."""
        if model.training and (items := kwargs.get("num_items_in_batch")) is not None:
            self.run.weight(float(items))


def continues(loader: Any, train: Any) -> bool:
    """Return True for the training loader, and for one that skips its first batches because training is resumed."""
    if loader is train:
        return True
    rest = getattr(loader, "skip_batches", 0) or getattr(loader.batch_sampler, "skip_batches", 0)
    return bool(rest) and loader.dataset is train.dataset


class TrainerSteps:
    """The steps that a Trainer has done, which a worker that returns receives."""

    def __init__(self, state: TrainerState) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.state.global_step, "epoch": float(self.state.epoch or 0.0)}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        self.state.global_step, self.state.epoch = given["global_step"], given["epoch"]
