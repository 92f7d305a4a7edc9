"""The workloads of the comparison: model, data, optimizer, sizes. This module does not import torch."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Data:
    """An option of the runner's group `data`; `num_train` samples are an epoch."""

    name: str
    sample_shape: tuple[int, ...]
    num_outputs: int
    num_train: int


MNIST = Data("mnist", (1, 28, 28), 10, 60_000)  # files in MNIST's format, as mnist_files.py writes
TEXT = Data("text", (128,), 96, 2_560)  # the texts of Python's help, whose length depends on the version


@dataclass(frozen=True)
class Work:
    """A workload of all peers. `steps` take a few seconds on one core; the first `warmup_steps` are not timed."""

    model: str  # the dotted path of the class
    data: Data
    batch_size: int  # over all ranks
    steps: int
    warmup_steps: int
    eval_batches: int
    optimizer: str  # a class of torch.optim
    options: Mapping[str, float]
    has_batch_norm: bool = False

    @property
    def steps_per_epoch(self) -> int:
        return self.data.num_train // self.batch_size

    def warmup_of(self, steps: int) -> int:
        """Return the number of warm-up steps: at least one, and at most a quarter of `steps`."""
        return max(1, min(self.warmup_steps, steps // 4))


PLAIN, MOMENTUM, ADAMW = {"lr": 0.01, "momentum": 0.0}, {"lr": 0.01, "momentum": 0.9}, {"lr": 0.001}
WORKS = {
    "convnet": Work("models.convnet.ConvNet", MNIST, 200, 80, 20, 10, "SGD", PLAIN, has_batch_norm=True),
    "mlp": Work("models.mlp.MLP", MNIST, 200, 250, 50, 10, "SGD", PLAIN),
    "resnet18": Work("models.resnet18.ResNet18", MNIST, 32, 8, 2, 2, "SGD", MOMENTUM, has_batch_norm=True),
    "transformer": Work("models.transformer.Transformer", MNIST, 64, 40, 8, 5, "AdamW", ADAMW),
    "gpt": Work("models.gpt.GPT", TEXT, 16, 20, 4, 2, "AdamW", ADAMW),
}


def named(words: str) -> list[str]:
    """Parse names of workloads, separated by commas. Raise ArgumentTypeError if one is unknown."""
    works = words.split(",")
    if unknown := [work for work in works if work not in WORKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} must be one of {', '.join(WORKS)}")
    return works
