"""keep_samples=device: samples in the memory of the rank's device, which is the CPU here, and equal to the bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import worlds
from torch.utils.data import Dataset
from torchvision.transforms import v2

from runner.errors import InputError
from runner.input import device_samples
from runner.input.augmentation import augment
from runner.input.datasets import load_data
from runner.input.loader import Loader
from runner.input.pytree import tensors
from runner.input.sample_cache import CannotCache
from runner.input.sampler import Sampler
from runner.input.source import Source
from runner.records.run_files import TRAIN_CHECKSUMS

CPU = torch.device("cpu")
KEPT = "keep_samples=device"
# Shuffled, with dropout, and an uneven last batch.
PLAIN = (*parity.COMMON, *parity.EXPERIMENTS["mlp"], "model.dropout=0.2", "micro_batches=2")


class Images(Dataset[Any]):
    """(1, 4, 4) images and classes, which count how often they are read."""

    def __init__(self, num_samples: int = 23, sample: Callable[[int], Any] | None = None) -> None:
        self.num_samples, self.sample, self.reads = num_samples, sample, list[int]()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        image = torch.from_numpy(np.random.default_rng(index).standard_normal((1, 4, 4), np.float32))
        return (image, torch.tensor(index % 2)) if self.sample is None else self.sample(index)


def kept(dataset: Any, rows: torch.Tensor | None = None) -> Source:
    source = replace(Source.of(dataset), rows=rows)
    source.keep_on(CPU)
    return source


def allocate(source: Source) -> None:
    assert isinstance(source.cache, device_samples.DeviceSamples)
    source.cache.prepare(None)


@pytest.mark.parametrize("transformed", [False, True])
def test_kept_samples_are_read_once_and_equal_those_of_the_dataset(transformed: bool) -> None:
    nodes = {"crop": {"_target_": "torchvision.transforms.v2.RandomCrop", "size": [4, 4], "padding": 2}}
    rows = torch.tensor([*range(3, 20), 1, 0])
    both = [kept(Images(), rows), replace(Source.of(Images()), rows=rows)]
    sources = [augment(each, nodes, 5, device=CPU) if transformed else each for each in both]
    allocate(sources[0])
    sources[0].dataset.reads.clear()
    loaders = [Loader(source, Sampler(19, 4, 2), torch.float64, CPU) for source in sources]
    loaders[0].checksum_steps = loaders[1].checksum_steps = 2
    for epoch in range(3):
        one, other = ([*loader.steps(epoch)] for loader in loaders)
        assert [step.checksum for step in one] == [step.checksum for step in other]
        pairs = zip(*([m for step in steps for m in step.micro_batches] for steps in (one, other)), strict=True)
        for found, expected in pairs:
            assert found.indices == expected.indices
            assert all(map(torch.equal, tensors(found.data), tensors(expected.data)))
    assert sorted(sources[0].dataset.reads) == sorted(rows.tolist())


MODES = ["none", "ddp"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        *((mode, PLAIN) for mode in MODES),
        ("ddp", (*parity.COMMON, *parity.EXPERIMENTS["convnet"], "transforms=flip_crop")),
        *(pytest.param(mode, PLAIN, marks=pytest.mark.thorough) for mode in worlds.MODES if mode not in MODES),
    ],
)
def test_runs_are_equal_to_the_bit_and_after_a_resume(mode: str, words: tuple[str, ...], tmp_path: Path) -> None:
    num_ranks = 1 if mode in ("none", "dp", "split") else 2
    if mode == "tp":
        words = tuple(word for word in words if word != "model.batch_norm=true")
    args = (*words, f"parallel={mode}", "checkpoint.every_steps=1", "checkpoint.keep=9")
    plain = worlds.run(tmp_path / "plain", num_ranks, *args)
    (tmp_path / "part").mkdir()
    part = worlds.run(tmp_path / "part", num_ranks, *args, KEPT, "max_steps=7")
    resumed = worlds.run(tmp_path / "part", num_ranks, f"resume={part.path}", KEPT, "max_steps=10")
    parity.assert_equal(resumed, plain, 0.0 if worlds.DEVICE == "cpu" else 1e-9)
    runs = [[line[TRAIN_CHECKSUMS] for line in each.lines if TRAIN_CHECKSUMS in line] for each in (resumed, plain)]
    assert runs[0] == runs[1] and runs[0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Images(sample=lambda index: (torch.rand(3), 0)), "sample 0 draws random numbers, which would be the same in"),
        (Images(sample=lambda index: (torch.zeros(3), "no")), "samples must be tensors and numbers, but the first"),
        (type("Collating", (Images,), {"collate": list})(), r"it collates batches itself \(collate\); leave it out"),
        (type("Epochs", (Images,), {"in_epoch": print})(), r"its samples change from epoch to epoch \(in_epoch\)"),
        (Images(10**12), r"the samples need 67,055\.2 GiB, but cpu has .* GiB left; leave it out"),
    ],
)
def test_unsuitable_samples_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(CannotCache, match=f"^{KEPT}: {message}"):
        kept(dataset)


def test_a_sample_of_another_shape_is_refused_when_it_is_read() -> None:
    growing = kept(Images(sample=lambda index: torch.zeros(1 + index // 5)))
    allocate(growing)
    assert growing.read([3, 4]).shape == (2, 1)
    with pytest.raises(CannotCache, match=r"sample 5 is tensor \[1, 2\]|sample 5 is .*; leave it out"):
        growing.read([5])


def test_streams_are_refused() -> None:
    config, request = worlds.configure("model=linear", "data=random", KEPT)
    node = {"_target_": f"{__name__}.Streamed", "sample_shape": [3], "num_outputs": 2}
    with pytest.raises(InputError, match=f"^{KEPT} needs map-style datasets, and data=mine is a stream; leave it out"):
        load_data(replace(config, data=node), {**request.command.choices, "data": "mine"}, worlds.unconnected())


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __init__(self, train: bool) -> None:
        self.train = train

    def __iter__(self) -> Any:
        return iter([])


class OnHost(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.zeros(image.shape)


class Failing(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image.sum().item()
        return image


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (OnHost, "transforms.it computes on the CPU, and the samples are on meta; try keep_samples=true"),
        (Failing, "transforms.it fails on meta .*; try keep_samples=true"),
    ],
)
def test_transforms_that_need_the_cpu_are_refused(target: type, message: str) -> None:
    """The meta device represents a GPU."""
    nodes = {
        "flip": {"_target_": f"{v2.__name__}.RandomHorizontalFlip"},
        "it": {"_target_": f"{__name__}.{target.__name__}"},
    }
    with pytest.raises(InputError, match=f"^{KEPT}: {message}"):
        augment(Source.of(Images()), nodes, 0, device=torch.device("meta"))
    assert augment(Source.of(Images()), {"flip": nodes["flip"]}, 0, device=torch.device("meta")).transform is not None
