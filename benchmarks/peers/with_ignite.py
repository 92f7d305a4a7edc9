"""PyTorch Ignite, DDP over gloo.

usage: [torchrun --nproc-per-node N] with_ignite.py WORK ROOT STEPS, with the project's folder in PYTHONPATH
"""

import os
import tempfile
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from torch.utils.tensorboard import SummaryWriter
from training import DEVICE, LOG_EVERY, Given, given, loss_of


def main(local_rank: int, given: Given) -> None:
    torch.manual_seed(0)
    model = idist.auto_model(given.model())
    optimizer = idist.auto_optim(given.optimizer(model.parameters()))
    # The global batch, which ignite divides among the ranks.
    loader = idist.auto_dataloader(given.data(train=True), batch_size=given.batch_size, shuffle=True, num_workers=0)
    val_loader = given.val_loader(idist.get_rank(), idist.get_world_size())
    writer = SummaryWriter(tempfile.mkdtemp()) if idist.get_rank() == 0 else None
    meter = given.meter()

    def update(engine: Engine, batch: Any) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = loss_of(model(inputs.to(DEVICE)), targets.to(DEVICE))
        loss.backward()
        optimizer.step()
        meter.tick()
        if writer and engine.state.iteration % LOG_EVERY == 0:
            writer.add_scalar("loss", loss.item(), engine.state.iteration)

    Engine(update).run(loader, max_epochs=1, epoch_length=given.steps)
    given.finish(model, optimizer, val_loader, meter, idist.get_rank())
    if writer:
        writer.close()


if __name__ == "__main__":
    with idist.Parallel(backend="gloo" if "WORLD_SIZE" in os.environ else None) as parallel:
        parallel.run(main, given())
