"""Lightning's Trainer, DDP over gloo; it starts the ranks itself.

usage: with_lightning.py WORK ROOT STEPS NUM_RANKS, with the project's folder in PYTHONPATH
"""

import sys
import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader
from training import DEVICE, LOG_EVERY, Given, given, loss_of


class Module(lightning.LightningModule):
    def __init__(self, given: Given) -> None:
        super().__init__()
        self.net, self.given, self.meter = given.model(), given, given.meter()

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        loss = loss_of(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.meter.tick()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.given.optimizer(self.parameters())


def main(given: Given, num_ranks: int) -> None:
    lightning.seed_everything(0)
    module = Module(given)
    loader = DataLoader(given.data(train=True), given.batch_size // num_ranks, shuffle=True)
    trainer = lightning.Trainer(
        accelerator=DEVICE,
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        max_steps=given.steps,
        log_every_n_steps=LOG_EVERY,
        logger=TensorBoardLogger(tempfile.mkdtemp()),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    val_loader = given.val_loader(trainer.global_rank, num_ranks)
    trainer.fit(module, loader)
    given.finish(module.net, trainer.optimizers[0], val_loader, module.meter, trainer.global_rank)


if __name__ == "__main__":
    main(given(), int(sys.argv[4]))
