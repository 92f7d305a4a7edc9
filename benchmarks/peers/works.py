"""The works that the runner and its peers are compared on: model, data, optimizer, sizes. No torch is imported here."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Data:
    """As the runner's group `data` has it; `num_train` samples are an epoch."""

    name: str
    sample_shape: tuple[int, ...]
    num_outputs: int
    num_train: int


MNIST = Data("mnist", (1, 28, 28), 10, 60_000)  # files in MNIST's format: mnist_files.py makes such
TEXT = Data("text", (128,), 96, 2_560)  # the English of Python's help: a few blocks more or less in each version


@dataclass(frozen=True)
class Work:
    """The same for all peers. `steps` take a few seconds on one core, and the first `warmup_steps` are not timed."""

    model: str  # the class, by its path
    data: Data
    batch_size: int  # of all ranks
    steps: int
    warmup_steps: int
    eval_batches: int
    optimizer: str  # of torch.optim
    options: Mapping[str, float]
    has_batch_norm: bool = False

    @property
    def steps_per_epoch(self) -> int:
        return self.data.num_train // self.batch_size

    def warmup_of(self, steps: int) -> int:
        """Of so many steps: at least one, and no more than a quarter."""
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
    """As argparse's type: names of works, separated by commas. Raises ArgumentTypeError for one that there is not."""
    works = words.split(",")
    if unknown := [work for work in works if work not in WORKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} must be one of {', '.join(WORKS)}")
    return works
