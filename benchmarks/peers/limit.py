"""The limit: the same steps on batches sliced from memory, without loader and logger; channels_last for convolutions.

usage: [torchrun --nproc-per-node N] limit.py WORK ROOT STEPS, with the project's folder in PYTHONPATH
It neither evaluates nor saves. On one GPU, the whole step is captured in a CUDA graph.
"""

import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import DEVICE, Given, given, loss_of

NUM_BATCHES = 10  # in memory, used in rotation


def make_step(
    given: Given, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    optimizer.zero_grad()
    with given.autocast():
        loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()


def captured(
    step: Callable[[Tensor, Tensor], None], optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> Callable[[Tensor, Tensor], None]:
    """Return the step as a CUDA graph, as torch's documentation describes (Notes, "CUDA semantics")."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    inputs, targets = inputs.clone(), targets.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(inputs, targets)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step(inputs, targets)

    def replay(new_inputs: Tensor, new_targets: Tensor) -> None:
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        graph.replay()

    return replay


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
    step: Callable[[Tensor, Tensor], None] = functools.partial(make_step, given, model, optimizer)
    if DEVICE == "cuda" and world_size == 1:
        step = captured(step, optimizer, inputs[:size], targets[:size])
    meter = given.meter()
    for number in range(given.steps):
        cut = slice(number % NUM_BATCHES * size, (number % NUM_BATCHES + 1) * size)
        step(inputs[cut], targets[cut])
        meter.tick()
    if rank == 0:
        meter.write()
    # A live DDP keeps the group alive: https://github.com/pytorch/pytorch/issues/190489
    del model, optimizer, step
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(given())
