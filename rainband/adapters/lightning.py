"""Train a LightningModule in a run.

    from rainband.adapters.lightning import RainbandCallback
    trainer = Trainer(max_epochs=3, callbacks=[RainbandCallback()])

in a script started by `rainband run`. Each worker iterates over the whole dataloader, in its own order if that
shuffles. To shard the data, use Subset(data, range(rank, len(data), num_workers)), where `rank` is
`rainband.rank()` and `num_workers` is `rainband.num_workers()`.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:  # its older name
    from pytorch_lightning import Callback, LightningModule, Trainer

from rainband.join import join


class RainbandCallback(Callback):  # type: ignore[misc]
    """Joins the run when the training starts; when it ends, the model has the final parameters."""

    run: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run = join(pl_module, trainer.optimizers).__enter__()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(type(error) if error else None, error, None)
