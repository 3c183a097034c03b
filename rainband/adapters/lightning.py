"""Train a LightningModule in a run.

    from rainband.adapters.lightning import RainbandCallback
    trainer = Trainer(max_epochs=3, callbacks=[RainbandCallback()])

in a script started by `rainband run`. By default, the workers share each batch of the train dataloader, and make the
updates of one process. Validation and test data are read by every worker. One worker writes checkpoints and logs;
training losses in the logs are those of its parts. With a strategy that has servers, each worker iterates over the
whole dataloader: to shard the data, use Subset(data, range(rainband.rank(), len(data), rainband.num_workers())).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import CheckpointIO
    from lightning.pytorch.utilities import rank_zero_only
except ModuleNotFoundError:  # its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.plugins import CheckpointIO
    from pytorch_lightning.utilities import rank_zero_only

from rainband.join import join, rank
from rainband.runtimes.training_loop.split.batches import SplitBatches
from rainband.runtimes.training_loop.split.loop import SplitLoop

if rank():
    rank_zero_only.rank = rank()  # before a logger makes its folder


class RainbandCallback(Callback):  # type: ignore[misc]
    """Joins the run when the training starts; when it ends, the model has the final parameters."""

    run: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = join(pl_module, trainer.optimizers)
        if isinstance(run, SplitLoop):
            run.register(*(config.scheduler for config in trainer.lr_scheduler_configs))
        self.run = run.__enter__()
        if isinstance(run, SplitLoop):
            self._agree(trainer)
            self._share(trainer, is_begun=True)
            self._choose_main()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(self.run, SplitLoop):
            self._share(trainer, is_begun=True)  # Lightning may have made new loaders

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, number: int) -> None:
        if isinstance(self.run, SplitLoop):
            self._choose_main()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(type(error) if error else None, error, None)

    # ---- workers that share each batch ----

    def _share(self, trainer: Trainer, is_begun: bool) -> None:
        """Replace the train dataloader by this worker's parts of its batches."""
        combined = trainer.fit_loop._combined_loader
        loaders = list(combined.flattened)
        if len(loaders) != 1 or isinstance(loaders[0], SharedLoader):
            return  # of several loaders, every worker reads all: a sentence says so
        if not hasattr(loaders[0], "__len__"):
            raise ValueError(
                f"the train dataloader ({type(loaders[0]).__name__}) has no length, so Lightning reads a batch ahead "
                "of the step, and workers cannot share it: give it a __len__."
            )
        combined.flattened = [SharedLoader(trainer, self.run, loaders[0], is_begun)]
        iter(trainer.fit_loop._data_fetcher)  # it has begun to iterate over the loader itself

    def _agree(self, trainer: Trainer) -> None:
        """Let all workers decide alike, for example to stop early, and one of them save."""
        run, strategy = self.run, trainer.strategy

        def decide(decision: bool, all: bool = True) -> bool:
            number = run.mean(float(decision), weight=1.0)
            return bool(number == 1.0 if all else number > 0.0)

        strategy.reduce_boolean_decision = decide
        strategy.checkpoint_io = SavedOnce(strategy.checkpoint_io)

    def _choose_main(self) -> None:
        rank_zero_only.rank = 0 if self.run.is_first else max(1, rank())


class SavedOnce(CheckpointIO):  # type: ignore[misc]
    """Writes checkpoints on the main process only."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def save_checkpoint(self, *given: Any, **named: Any) -> None:
        if rank_zero_only.rank == 0:
            self.inner.save_checkpoint(*given, **named)

    def load_checkpoint(self, *given: Any, **named: Any) -> Any:
        return self.inner.load_checkpoint(*given, **named)

    def remove_checkpoint(self, *given: Any, **named: Any) -> None:
        if rank_zero_only.rank == 0:
            self.inner.remove_checkpoint(*given, **named)

    def teardown(self) -> None:
        self.inner.teardown()


class SharedLoader:
    """Stands where a dataloader stood: the parts of one worker."""

    def __init__(self, trainer: Trainer, run: SplitLoop, loader: Any, is_begun: bool) -> None:
        self.trainer = trainer
        self.run = run
        self.loader = loader
        self.parts = run.loader(loader)
        self.parts.trains = True
        if is_begun and isinstance(self.parts, SplitBatches):
            self.parts.continue_iteration()

    def __len__(self) -> int:
        return len(self.parts)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.parts
        except KeyboardInterrupt:
            if self.run.stopped is None:
                raise
        if self.run.stopped is not None:
            self.trainer.should_stop = True
