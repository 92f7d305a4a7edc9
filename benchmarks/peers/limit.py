"""The limit: the same steps on batches sliced from memory, without loader and logger; channels_last for convolutions.

usage: [torchrun --nproc-per-node N] limit.py WORK ROOT STEPS, with the project's folder in PYTHONPATH
It neither evaluates nor saves.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import DEVICE, Given, given, loss_of

NUM_BATCHES = 10  # in memory, used in rotation


def main(given: Given) -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = given.model()
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        model = model.to(memory_format=torch.channels_last)
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = given.optimizer(model.parameters())
    data, size = given.data(train=True), given.batch_size // world_size
    rows = [data[rank + world_size * index] for index in range(NUM_BATCHES * size)]
    inputs = torch.stack([sample for sample, _ in rows]).to(DEVICE)
    targets = torch.stack([torch.as_tensor(target) for _, target in rows]).to(DEVICE)
    meter = given.meter()
    for step in range(given.steps):
        cut = slice(step % NUM_BATCHES * size, (step % NUM_BATCHES + 1) * size)
        loss = loss_of(model(inputs[cut]), targets[cut])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.tick()
    if rank == 0:
        meter.write()
    del model, optimizer, loss  # a live DDP keeps the group alive: https://github.com/pytorch/pytorch/issues/190489
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(given())
