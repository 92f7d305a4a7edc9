"""Shared by the peers' scripts: the workload in plain torch, evaluation and results.

Each script is started as `python SCRIPT WORK ROOT STEPS`, or with torchrun if it does not start its ranks itself.
"""

import contextlib
import importlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meter import DEVICE, Meter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor
from works import ALL_WORKS, Data, Work

LOG_EVERY = 50
PRECISION = os.environ.get("BENCHMARK_PRECISION", "fp32")  # or bf16, by autocast
COMPILED = os.environ.get("BENCHMARK_COMPILED") == "1"


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of tokens with the tokens that follow them, one sample at a time."""

    def __init__(self, data: Data, train: bool) -> None:
        from runner.shipped.data.text import Text

        tokens = Text("train" if train else "val", data.sample_shape, data.num_outputs).tokens
        self.tokens, self.size = torch.from_numpy(tokens.astype("int64")), data.sample_shape[0]

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.size
        return self.tokens[start : start + self.size], self.tokens[start + 1 : start + self.size + 1]


@dataclass(frozen=True)
class Given:
    """The chosen workload."""

    work: Work
    root: str  # directory of the MNIST-format files
    steps: int

    @property
    def batch_size(self) -> int:
        return self.work.batch_size

    def model(self) -> nn.Module:
        module, _, name = self.work.model.rpartition(".")
        make = getattr(importlib.import_module(module), name)
        options = {"num_outputs": self.work.data.num_outputs, **self.work.model_options}
        model: nn.Module = make(list(self.work.data.sample_shape), **options).to(DEVICE)
        if COMPILED:
            model.compile()
        return model

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager of the forward pass. It caches no casts, so that a CUDA graph can contain it."""
        return torch.autocast(DEVICE, torch.bfloat16, enabled=PRECISION == "bf16", cache_enabled=False)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.work.optimizer)(parameters, **self.work.options)

    def data(self, train: bool) -> Dataset[tuple[Tensor, Tensor]]:
        return (
            Blocks(self.work.data, train)
            if self.work.data.name == "text"
            else MNIST(self.root, train=train, transform=ToTensor())
        )

    def val_loader(self, rank: int, world_size: int) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a loader of this rank's part of the validation data."""
        data = self.data(train=False)
        sampler = DistributedSampler(data, world_size, rank, shuffle=False) if world_size > 1 else None
        return DataLoader(data, self.batch_size // world_size, sampler=sampler)

    def meter(self) -> Meter:
        return Meter(self.batch_size, self.work.warmup_of(self.steps), self.steps)

    def finish(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Any], meter: Meter, rank: int
    ) -> None:
        """Evaluate, save on rank 0, and write the measurements. All ranks must call it."""
        model.eval().to(DEVICE)  # Lightning has moved it to the CPU
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for inputs, targets in itertools.islice(loader, self.work.eval_batches):
                loss = loss_of(model(inputs.to(DEVICE)), targets.to(DEVICE))
                sums += torch.tensor([loss.item() * len(targets), len(targets)])
        if dist.is_initialized():
            dist.all_reduce(sums)
        meter.evaluated()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": sums[0] / sums[1]}
            torch.save(state, Path(tempfile.mkdtemp(), "checkpoint.pt"))
            meter.write()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of (N, num_outputs) and (N,), or of sequences, (N, T, num_outputs) and (N, T)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def given() -> Given:
    """Parse the command line."""
    name, root, steps = sys.argv[1:4]
    return Given(ALL_WORKS[name], root, int(steps))
