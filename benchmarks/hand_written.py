"""The yardstick: the training loop as people write it by hand, for one epoch of the ConvNet on MNIST-format files.

usage: torchrun --nproc-per-node N benchmarks/hand_written.py ROOT [BATCH_SIZE]
DistributedDataParallel over gloo, DistributedSampler, ToTensor sample by sample, TensorBoard from rank 0.
"""

import json
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

WARMUP_STEPS, LOG_EVERY = 20, 50


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


def main(root: str, batch_size: int) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    criterion = nn.CrossEntropyLoss()
    data = MNIST(root, train=True, transform=ToTensor())
    loader = DataLoader(data, batch_size // world_size, sampler=DistributedSampler(data))
    writer = SummaryWriter(tempfile.mkdtemp()) if rank == 0 else None
    start = 0.0
    for step, (inputs, targets) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step == WARMUP_STEPS:
            start = time.perf_counter()
        if writer and step % LOG_EVERY == 0:
            writer.add_scalar("loss", loss.item(), step)
    if writer:
        writer.close()
        print(json.dumps({"samples_per_second": (step - WARMUP_STEPS) * batch_size / (time.perf_counter() - start)}))
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
