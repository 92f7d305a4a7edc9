"""Hugging Face Accelerate, DDP over gloo.

usage: [torchrun --nproc-per-node N] with_accelerate.py WORK ROOT STEPS, with the project's folder in PYTHONPATH
"""

import itertools
import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from training import DEVICE, LOG_EVERY, Given, given, loss_of


def main(given: Given) -> None:
    accelerator = Accelerator(cpu=DEVICE == "cpu")
    torch.manual_seed(0)
    model = given.model()
    optimizer = given.optimizer(model.parameters())
    loader = DataLoader(given.data(train=True), given.batch_size // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    val_loader = given.val_loader(accelerator.process_index, accelerator.num_processes)
    writer = SummaryWriter(tempfile.mkdtemp()) if accelerator.is_main_process else None
    meter = given.meter()
    for step, (inputs, targets) in enumerate(itertools.islice(loader, given.steps), start=1):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        meter.tick()
        if writer and step % LOG_EVERY == 0:
            writer.add_scalar("loss", loss.item(), step)
    given.finish(model, optimizer, val_loader, meter, accelerator.process_index)
    if writer:
        writer.close()
    del model, optimizer, loss
    accelerator.end_training()


if __name__ == "__main__":
    main(given())
