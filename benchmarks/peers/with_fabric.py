"""Lightning Fabric, DDP over gloo; it starts the ranks itself.

usage: with_fabric.py WORK ROOT STEPS NUM_RANKS, with the project's folder in PYTHONPATH
"""

import itertools
import sys
import tempfile

from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from training import DEVICE, LOG_EVERY, Given, given, loss_of


def main(given: Given, num_ranks: int) -> None:
    fabric = Fabric(accelerator=DEVICE, devices=num_ranks, strategy="ddp" if num_ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0)
    model = given.model()
    model, optimizer = fabric.setup(model, given.optimizer(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(given.data(train=True), given.batch_size // num_ranks, shuffle=True))
    val_loader = given.val_loader(fabric.global_rank, num_ranks)
    writer = SummaryWriter(tempfile.mkdtemp()) if fabric.global_rank == 0 else None
    meter = given.meter()
    for step, (inputs, targets) in enumerate(itertools.islice(loader, given.steps), start=1):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        meter.tick()
        if writer and step % LOG_EVERY == 0:
            writer.add_scalar("loss", loss.item(), step)
    given.finish(model, optimizer, val_loader, meter, fabric.global_rank)
    if writer:
        writer.close()


if __name__ == "__main__":
    main(given(), int(sys.argv[4]))
