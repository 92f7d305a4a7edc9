"""Transforms of training samples: they depend on seed, epoch and index, and never change evaluated samples."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from runner.shipped.data.shapes import Shapes
from torch.utils.data import TensorDataset
from torchvision.transforms import v2
from torchvision.tv_tensors import TVTensor
from worlds import configure

from runner.config.schema import Config
from runner.errors import InputError
from runner.input.augmentation import Augmentation, augment
from runner.input.datasets import load_data
from runner.input.loader import Loader
from runner.input.sampler import Sampler
from runner.input.source import Source
from runner.paths import CONF

CPU = torch.device("cpu")
V2 = "torchvision.transforms.v2"
IMAGES = torch.rand(22, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Jitter:
    """A custom transform for samples of any kind, which draws from all three generators."""

    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, inputs: Any) -> Any:
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        return inputs + self.by * drawn


class Printing:
    def __call__(self, image: Any) -> Any:
        raise ValueError(f"cannot use {image}")


class Failing:
    def __call__(self, inputs: Any) -> Any:
        torch.rand(3), np.random.rand(), random.random()
        raise RuntimeError("no such colour\nat all")


class Whole(TensorDataset):
    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[list(indices)] for tensor in self.tensors)


def of(transforms: dict[str, Any], *words: str, **keys: Any) -> Config:
    return replace(configure("model=mlp", *words)[0], transforms=transforms, **keys)


def augmented(source: Source, nodes: dict[str, Any], transform_targets: Any = "auto") -> Any:
    return augment(source, nodes, 0, transform_targets, keeps_shapes=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_sample_depends_on_seed_epoch_and_index() -> None:
    transforms = {"crop": v2.RandomCrop(8, padding=4), "jitter": Jitter()}
    made = {}
    for key in itertools.product((0, 1), repeat=3):
        torch.manual_seed(sum(key))
        random.seed(sum(key))
        seed, epoch, index = key
        inputs, target = Augmentation(transforms, seed)((IMAGES[0], 3), epoch, index)
        again = Augmentation(transforms, seed)((IMAGES[0], 3), epoch, index)[0]
        assert torch.equal(inputs, again) and target == 3
        assert type(inputs) is torch.Tensor and inputs.shape == (1, 8, 8)
        made[key] = tuple(inputs.flatten().tolist())
    assert len(set(made.values())) == 8


def test_transforms_are_called_in_their_order() -> None:
    double, add = (lambda inputs: inputs * 2), (lambda inputs: inputs + 1)
    assert Augmentation({"a": double, "b": add}, 0)((torch.ones(3), 0), 0, 0)[0].tolist() == [3, 3, 3]
    assert Augmentation({"b": add, "a": double}, 0)((torch.ones(3), 0), 0, 0)[0].tolist() == [4, 4, 4]


def test_masks_move_with_their_images() -> None:
    data = Shapes("train", [1, 32, 32], 3, noise=0.0)
    transforms = {
        "crop": v2.RandomResizedCrop(32, interpolation=v2.InterpolationMode.NEAREST),
        "flip": v2.RandomHorizontalFlip(),
    }
    moved = 0
    for index in range(20):
        image, mask = Augmentation(transforms, 0, masks=True)(data[index], 0, index)
        assert torch.equal(image[0] > 0, mask > 0) and mask.dtype == torch.int64
        assert not isinstance(image, TVTensor) and not isinstance(mask, TVTensor)
        moved += not torch.equal(mask, data[index][1])
        assert torch.equal(Augmentation(transforms, 0)(data[index], 0, index)[1], data[index][1])
    assert moved > 15


@pytest.mark.parametrize("kind", [TensorDataset, Whole])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_same_for_any_ranks_and_workers_and_after_resuming(kind: type, num_workers: int) -> None:
    augmentation = Augmentation({"crop": v2.RandomCrop(8, padding=4)}, seed=3)
    data = replace(Source.of(kind(IMAGES, torch.arange(22))), transform=augmentation)
    expected = [torch.stack([augmentation((IMAGES[i], i), e, i)[0] for i in range(22)]) for e in range(2)]
    assert not torch.equal(expected[0], expected[1])
    for rank, num_ranks in ((0, 1), (0, 3), (2, 3)):
        sampler = Sampler(22, batch_size=5, micro_batches=2, data_rank=rank, data_ranks=num_ranks, seed=3)
        loader = Loader(data, sampler, torch.float32, CPU, num_workers=num_workers)
        try:
            for epoch, first_step in ((0, 0), (1, 0), (1, 3), (0, 2)):
                for step in loader.steps(epoch, first_step):
                    for batch in step.micro_batches:
                        assert torch.equal(batch.inputs[: len(batch.indices)], expected[epoch][list(batch.indices)])
                        assert batch.targets[: len(batch.indices)].tolist() == list(batch.indices)
        finally:
            loader.close()


def test_numpy_arrays_may_be_images_and_masks() -> None:
    image, mask = np.random.default_rng(0).random((1, 8, 8)).astype("f4"), np.arange(64).reshape(8, 8)
    flip = {"flip": {"_target_": f"{V2}.RandomHorizontalFlip", "p": 1.0}}
    data = augmented(Source.of([(image, mask)]), flip)
    assert torch.equal(data[0][0], torch.from_numpy(image[..., ::-1].copy()))
    assert torch.equal(data[0][1], torch.from_numpy(mask[:, ::-1].copy()))
    classes = augmented(Source.of([(image, np.int64(4))]), flip)
    assert torch.equal(classes[0][0], data[0][0]) and classes[0][1] == 4


@pytest.mark.parametrize("option", sorted(path.stem for path in (CONF / "transforms").glob("*.yaml")))
def test_every_option_is_instantiated(option: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg: Any = OmegaConf.to_container(compose("config", ["data=shapes", f"transforms={option}"]), resolve=True)
    data = Shapes("train", [3, 64, 64], 3)
    source = Source.of(data)
    made = augmented(source, cfg["transforms"])
    if option == "none":
        assert made is source
        return
    assert made.transform.masks and [tensor.shape for tensor in made[0]] == [(3, 64, 64), (64, 64)]
    assert any(not torch.equal(made[index][0], data[index][0]) for index in range(4))


def test_only_training_samples_are_transformed() -> None:
    jitter = {"jitter": {"_target_": f"{__name__}.Jitter"}}
    raw = load_data(of({}), {"data": "digits"}, None)  # type: ignore[arg-type]
    train, val = load_data(of(jitter), {"data": "digits"}, None)  # type: ignore[arg-type]
    assert torch.equal(val[0][0], raw[1][0][0]) and not torch.equal(train[0][0], raw[0][0][0])
    _, evaluated = load_data(of(jitter, split="train"), {"data": "digits"}, None)  # type: ignore[arg-type]
    assert torch.equal(evaluated[0][0], raw[0][0][0])


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (f"{__name__}.Failing", {}, "transforms=a: the first .* with: RuntimeError: no such colour .at .*test_aug"),
        (f"{V2}.RandomCrop", {"size": [5, 5]}, r"transforms=a returns .* \[1, 5, 5\] .* \[1, 8, 8\] .*, but"),
        (f"{V2}.RandomHorizontalFlip", {"p": 2}, "transforms.a=.*`p` should be"),
        ("builtins.dict", {}, "transforms=a: the first .* with: TypeError: 'dict' object is not callable"),
        (f"{__name__}.Printing", {}, r"transforms=a: .* with: ValueError: cannot use Image\(...\) \(at .*test_aug"),
        (f"{V2}.MixUp", {"num_classes": 3}, r"transforms\.a\._target_=.*MixUp mixes .* batch, .* custom objective$"),
        (f"{V2}.CutMix", {"num_classes": 3}, r"transforms\.a\._target_=.*CutMix mixes the samples of a batch"),
    ],
)
def test_unsuitable_transforms_are_refused(target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        augmented(Source.of(TensorDataset(IMAGES, torch.arange(22))), {"a": {"_target_": target, **options}})
    jitter = {"a": {"_target_": f"{__name__}.Jitter"}}
    with pytest.raises(InputError, match=r"^transform_targets=true needs images .*=auto$"):
        augmented(Source.of(TensorDataset(IMAGES, torch.arange(22))), jitter, transform_targets=True)
