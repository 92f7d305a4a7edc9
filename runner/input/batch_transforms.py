"""Transforms of torchvision that are applied to a whole batch, with the random numbers that each sample draws alone."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.input.rng import CPU, isolated, seed_torch

Transform = Any  # of torchvision.transforms.v2
# Draws the parameters for one image, and applies those of N images to (N, C, H, W).
Parts = tuple[Callable[[Transform, Tensor], Any], Callable[[Transform, Tensor, list[Any]], Tensor]]


def supports(transform: Transform) -> bool:
    """Return True if `transform_images` applies the transform: only copies of pixels, whose values stay equal."""
    return type(transform) in _parts()


def transform_images(transforms: Sequence[Transform], images: Tensor, seeds: Iterable[int]) -> Tensor:
    """Return the transformed images, (N, C, H, W), equal to those of each image after seeding torch.

    seeds: One for each image.
    """
    from torchvision.tv_tensors import Image

    image = Image(torch.empty((), device="meta").expand(images.shape[1:]))
    inputs = []  # an image of the size that each transform gets
    for transform in transforms:
        inputs.append(image)
        size = transform.size if hasattr(transform, "size") else image.shape[-2:]
        image = Image(torch.empty((), device="meta").expand(*images.shape[1:-2], *size))
    drawn = []
    with isolated():
        for seed in seeds:
            seed_torch(seed, CPU)
            drawn.append([_parts()[type(each)][0](each, image) for each, image in zip(transforms, inputs, strict=True)])
    for transform, params in zip(transforms, zip(*drawn, strict=True), strict=True):
        images = _parts()[type(transform)][1](transform, images, list(params))
    return images


@functools.cache
def _parts() -> dict[type, Parts]:
    from torchvision.transforms import v2  # imported here, because that takes seconds

    return {
        v2.RandomHorizontalFlip: (_draw_flip, lambda _, images, flips: _flip(images, flips, -1)),
        v2.RandomVerticalFlip: (_draw_flip, lambda _, images, flips: _flip(images, flips, -2)),
        v2.RandomCrop: (lambda transform, image: transform.make_params([image]), _crop),
    }


def _draw_flip(transform: Transform, image: Tensor) -> bool:
    """Draw as the forward of torchvision's _RandomApplyTransform does."""
    return bool(torch.rand(1) < transform.p)


def _flip(images: Tensor, flips: list[bool], dim: int) -> Tensor:
    flipped = torch.tensor(flips).to(images.device, non_blocking=True)
    return torch.where(flipped[:, None, None, None], images.flip(dim), images)


def _crop(transform: Transform, images: Tensor, params: list[dict[str, Any]]) -> Tensor:
    from torchvision.tv_tensors import Image

    padded = transform.transform(Image(images), {**params[0], "needs_crop": False}).as_subclass(Tensor)
    windows = padded.unfold(-2, params[0]["height"], 1).unfold(-2, params[0]["width"], 1)  # (N, C, tops, lefts, h, w)
    numbers = [range(len(params)), *([each[key] for each in params] for key in ("top", "left"))]
    rows, tops, lefts = torch.tensor([list(each) for each in numbers]).to(images.device, non_blocking=True)
    cropped: Tensor = windows[rows, :, tops, lefts]
    return cropped
