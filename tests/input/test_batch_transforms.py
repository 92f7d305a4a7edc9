"""Transforms of whole batches, whose values and random numbers equal those of each sample."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from runner.input.augmentation import augment
from runner.input.pytree import tensors
from runner.input.source import Source

FLIP = {"_target_": "torchvision.transforms.v2.RandomHorizontalFlip"}
UP = {"_target_": "torchvision.transforms.v2.RandomVerticalFlip", "p": 0.3}
CROP = {"_target_": "torchvision.transforms.v2.RandomCrop"}


class InMemory(Dataset[Any]):
    """20 images and classes, of which batches are read at once."""

    reads_ahead = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.images = (256 * torch.rand(20, 3, 6, 8, generator=torch.Generator().manual_seed(0))).to(dtype)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.images[index], index

    def __getitems__(self, indices: list[int]) -> Any:
        return self.images[indices], torch.tensor(indices)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "transforms",
    [
        [FLIP],
        [FLIP, {**CROP, "size": [6, 8], "padding": 2}],
        [{**CROP, "size": [5, 4], "padding": [1, 2], "padding_mode": "reflect"}, UP, {**CROP, "size": [5, 3]}],
        [{**CROP, "size": [9, 9], "pad_if_needed": True, "fill": 7}, FLIP],
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_batches_equal_their_samples(dtype: torch.dtype, transforms: list[dict[str, Any]], kept: bool) -> None:
    source = Source.of(InMemory(dtype))
    if kept:
        source.keep_on(torch.device("cpu"))
    at_once = augment(source, {str(number): node for number, node in enumerate(transforms)}, 5)
    assert at_once.transform_batch is not None
    one_by_one = replace(at_once, transform_batch=None)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for epoch in range(3):
        indices = torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).tolist()
        found, expected = (each.read(indices, epoch) for each in (at_once, one_by_one))
        assert type(found) is type(expected)
        for tensor, other in zip(tensors(found), tensors(expected), strict=True):
            assert tensor.dtype == other.dtype and torch.equal(tensor, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_transforms_are_called_for_each_sample() -> None:
    jitter = {"_target_": "torchvision.transforms.v2.ColorJitter", "brightness": 0.2}
    source = augment(Source.of(InMemory(torch.float32)), {"flip": FLIP, "jitter": jitter}, 5)
    assert source.transform_batch is None and source.transform is not None


class Changing(InMemory):
    """Images that change from epoch to epoch."""

    def in_epoch(self, epoch: int) -> InMemory:
        dataset = InMemory(torch.float32)
        dataset.images += epoch
        return dataset


class Collating(InMemory):
    def collate(self, samples: list[Any]) -> torch.Tensor:
        return torch.stack([image for image, _ in samples]).double()


@pytest.mark.parametrize("dataset", [Changing, Collating])
def test_datasets_that_change_or_collate_are_read_as_before(dataset: type[InMemory]) -> None:
    source = augment(Source.of(dataset(torch.float32)), {"flip": FLIP}, 5)
    found, expected = (each.read([3, 1], 2) for each in (source, replace(source, transform_batch=None)))
    assert all(map(torch.equal, tensors(found), tensors(expected)))
