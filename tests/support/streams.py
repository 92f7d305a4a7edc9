"""Streams of samples: datasets that are only iterated, some with a state or in parts."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from parity import COMMON
from runner.shipped.data.toy import ToyRegression
from torch.utils.data import IterableDataset, get_worker_info

NUM_TRAIN = 181  # with steps of 90, the last one has a single sample, so that other ranks have none


class Toy(IterableDataset[Any]):
    """The samples of data=toy, without a length."""

    def __init__(self, train: bool):
        self.samples = ToyRegression(train, [10], 5, num_train=NUM_TRAIN, num_val=50)

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None  # a dataset that splits itself among workers reads everything
        return (self.samples[index] for index in range(len(self.samples)))


class Walk(IterableDataset[Any]):
    """A random walk, endless in training. Each sample depends on all earlier ones."""

    def __init__(self, train: bool):
        self.limit = None if train else 20

    def __iter__(self) -> Iterator[Any]:
        position, number = torch.zeros(10), 0
        while number != self.limit:
            position = 0.9 * position + torch.randn(10)
            yield position, number
            number += 1

    def decode(self, sample: Any) -> Any:
        position, number = sample
        return position + 0.1 * torch.rand(10), torch.cat([position[:4], torch.tensor([float(number)])])


class Stateful(Walk):
    """The same, with the protocol of torchdata. The file `resumed` forbids that read samples are read again."""

    def __init__(self, train: bool):
        super().__init__(train)
        self.number, self.position = 0, torch.zeros(10)

    def __iter__(self) -> Iterator[Any]:
        while self.number != self.limit:
            assert not (self.limit is None and 2 < self.number < 20 and os.path.exists("resumed"))
            self.position = 0.9 * self.position + torch.randn(10)
            self.number += 1
            yield self.position, self.number - 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.position = state["number"], state["position"]


class Split(Toy):
    """The samples of data=toy, which parts read without reading the others; the file `parts` lists the samples."""

    part = (0, 1)

    def split(self, index: int, count: int) -> "Split":
        part = copy.copy(self)
        part.part = (index, count)
        return part

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.part[0], len(self.samples), self.part[1]):
            if self.part[1] > 2:
                with Path(f"part-{self.part[0]}-{self.part[1]}-{os.getpid()}").open("a") as file:
                    file.write(f"{number}\n")
            yield self.samples[number]


def overrides(conf: Path, target: str, *more: str) -> list[str]:
    (conf / "data").mkdir(parents=True, exist_ok=True)
    (conf / "data" / "mine.yaml").write_text(f"_target_: {target}\nsample_shape: [10]\nnum_outputs: 5\n")
    return [f"--config-dir={conf}", "model=toy", "data=mine", "eval_batches=9", *COMMON, *more]
