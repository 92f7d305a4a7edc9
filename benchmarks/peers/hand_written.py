"""The baseline: the usual hand-written training loop.

usage: [torchrun --nproc-per-node N] hand_written.py WORK ROOT STEPS, with the repository in PYTHONPATH
DistributedDataParallel over gloo, DistributedSampler, ToTensor sample by sample, TensorBoard on rank 0, and BatchNorm
without synchronization.
"""

import itertools
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from training import DEVICE, LOG_EVERY, Given, given, loss_of


def main(given: Given) -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = given.model()
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = given.optimizer(model.parameters())
    data = given.data(train=True)
    sampler: DistributedSampler[Any] | None = DistributedSampler(data) if world_size > 1 else None
    loader = DataLoader(data, given.batch_size // world_size, shuffle=sampler is None, sampler=sampler)
    val_loader = given.val_loader(rank, world_size)
    writer = SummaryWriter(tempfile.mkdtemp()) if rank == 0 else None
    meter = given.meter()
    for step, (inputs, targets) in enumerate(itertools.islice(loader, given.steps), start=1):
        optimizer.zero_grad()
        with given.autocast():
            loss = loss_of(model(inputs.to(DEVICE)), targets.to(DEVICE))
        loss.backward()
        optimizer.step()
        meter.tick()
        if writer and step % LOG_EVERY == 0:
            writer.add_scalar("loss", loss.item(), step)
    given.finish(model, optimizer, val_loader, meter, rank)
    if writer:
        writer.close()
    del model, optimizer, loss  # a live DDP keeps the group alive: https://github.com/pytorch/pytorch/issues/190489
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(given())
