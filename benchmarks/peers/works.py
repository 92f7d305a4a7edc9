"""The workloads of the comparison: model, data, optimizer, sizes. This module does not import torch."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Data:
    """An option of the runner's group `data`; `num_train` samples are an epoch."""

    name: str
    sample_shape: tuple[int, ...]
    num_outputs: int
    num_train: int


MNIST = Data("mnist", (1, 28, 28), 10, 60_000)  # files in MNIST's format, as mnist_files.py writes
TEXT = Data("text", (128,), 96, 2_560)  # the texts of Python's help, whose length depends on the version
LONG_TEXT = Data("text", (1024,), 96, 320)


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
    model_options: Mapping[str, int] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The runner's option of the group `model`."""
        return self.model.split(".")[1]

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
# Sizes for GPUs (gpu.py). The output layer of gpt has as many units as that of GPT-2.
GPT_124M = {"dim": 768, "depth": 12, "heads": 12, "num_outputs": 50257}
GPU_WORKS = {
    "convnet-512": Work("models.convnet.ConvNet", MNIST, 512, 110, 30, 2, "SGD", PLAIN, has_batch_norm=True),
    "resnet18-512": Work("models.resnet18.ResNet18", MNIST, 512, 60, 15, 2, "SGD", MOMENTUM, has_batch_norm=True),
    "transformer-512": Work("models.transformer.Transformer", MNIST, 512, 110, 30, 2, "AdamW", ADAMW),
    "gpt-124m": Work("models.gpt.GPT", LONG_TEXT, 8, 40, 10, 2, "AdamW", ADAMW, model_options=GPT_124M),
}
ALL_WORKS = {**WORKS, **GPU_WORKS}


def named(words: str) -> list[str]:
    """Parse names of workloads, separated by commas. Raise ArgumentTypeError if one is unknown."""
    works = words.split(",")
    if unknown := [work for work in works if work not in WORKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} must be one of {', '.join(WORKS)}")
    return works
