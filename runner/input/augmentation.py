"""Random transforms of training samples, which depend only on seed, epoch and index."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.config.instantiate import make_group
from runner.errors import InputError, failed_with
from runner.input.batch_transforms import supports, transform_images
from runner.input.pytree import map_tensors, register_types, tensors
from runner.input.rng import TRANSFORMS, derive_seed, seeded
from runner.input.source import Source

MIXING = ("MixUp", "CutMix")  # transforms of torchvision that need a batch and its targets


@dataclass(frozen=True)
class Augmentation:
    """The transforms of a sample, in the order in which they are applied.

    If the sample is a pair (inputs, targets), only the inputs are transformed. Inputs of three dimensions are an image,
    (C, H, W). torch, NumPy and random are seeded with (seed, epoch, index); their previous state is restored.
    """

    transforms: Mapping[str, Callable[..., Any]]
    seed: int
    masks: bool = False  # the targets, (H, W), are a mask that moves with the image

    def __call__(self, sample: Any, epoch: int, index: int) -> Any:
        with seeded(self.seed, epoch, index, TRANSFORMS):
            for transform in self.transforms.values():
                sample = _apply(transform, sample, self.masks)
        return sample

    def of_batch(self, batch: Any, epoch: int, indices: Sequence[int]) -> Any:
        """Return the batch of the transformed samples. Every transform must be one that `batch_transforms` supports."""
        seeds = (derive_seed(self.seed, epoch, index, TRANSFORMS) for index in indices)
        images, *targets = batch if _is_pair(batch) else [batch]
        images = transform_images([*self.transforms.values()], torch.as_tensor(images), seeds)
        return [images, torch.as_tensor(targets[0])] if targets else images

    def supports_batches(self, sample: Any) -> bool:
        """Return True if `of_batch` transforms batches of such samples: images, or pairs of an image and a tensor."""
        image, *targets = sample if _is_pair(sample) else [sample]
        arrays = (torch.Tensor, np.ndarray, np.generic, int, float)
        return (
            not self.masks
            and type(image) in (torch.Tensor, np.ndarray)
            and image.ndim == 3
            and all(isinstance(target, arrays) for target in targets)
            and all(map(supports, self.transforms.values()))
        )


def _apply(transform: Callable[..., Any], sample: Any, masks: bool) -> Any:
    from torchvision.tv_tensors import Image, Mask, TVTensor  # imported here, because that takes seconds

    inputs = sample[0] if _is_pair(sample) else sample
    if isinstance(inputs, np.ndarray):
        inputs = torch.from_numpy(inputs)
    if isinstance(inputs, torch.Tensor) and inputs.dim() == 3 and not isinstance(inputs, TVTensor):
        inputs = Image(inputs)
    if masks:
        return _as_plain_tensors(tuple(transform(inputs, Mask(torch.as_tensor(sample[1])))))
    inputs = _as_plain_tensors(transform(inputs))
    return type(sample)((inputs, sample[1])) if _is_pair(sample) else inputs


def augment(
    source: Source,
    nodes: Mapping[str, Any],
    seed: int,
    transform_targets: bool | Literal["auto"] = "auto",
    keeps_shapes: bool = False,
    device: torch.device | None = None,
) -> Source:
    """Return the data with the transforms, which `nodes` configures by name.

    keeps_shapes: The configuration declares the shape of a sample, so that a transform must not change it. Raises
    InputError if a transform refuses its options or fails. device: where the samples are kept and transformed; None for
    the CPU, without keep_samples=device.
    """
    transforms: dict[str, Callable[..., Any]] = {}
    for name, node in nodes.items():
        key = f"transforms.{name}"
        transforms[name] = make_group({key: node["_target_"]}, key, node)
    if not transforms:
        return source
    sample = source[0]
    augmentation = Augmentation(transforms, seed, _are_masks(transform_targets, sample))
    key = f"transforms={','.join(transforms)}"
    try:
        transformed = augmentation(sample, 0, 0)
    except Exception as error:  # of a transform
        if mixing := [name for name, each in transforms.items() if type(each).__name__ in MIXING]:
            target = nodes[mixing[0]]["_target_"]
            raise InputError(
                f"transforms.{mixing[0]}._target_={target} mixes the samples of a batch, but a transform gets a single "
                "sample; mix them in the method `loss` of a custom objective"
            ) from None
        raise InputError(f"{key}: the first training sample cannot be transformed{failed_with(error)}") from None
    if keeps_shapes and _shapes(transformed) != _shapes(sample):
        raise InputError(
            f"{key} returns tensors of shape {_shapes(transformed)} for those of {_shapes(sample)}, but validation "
            "samples are not transformed; keep the shapes, or set data.sample_shape"
        )
    if device is not None and device.type != "cpu":
        _check_on(device, augmentation, sample)
    batch = augmentation.of_batch if augmentation.supports_batches(sample) else None
    return replace(source, transform=augmentation, transform_batch=batch)


def _check_on(device: torch.device, augmentation: Augmentation, sample: Any) -> None:
    """Raise InputError unless each transform computes on the device what it computes on the CPU."""
    for name, transform in augmentation.transforms.items():
        key = f"keep_samples=device: transforms.{name}"
        alone = replace(augmentation, transforms={name: transform})
        moved = map_tensors(lambda tensor: tensor.to(device), sample)
        before = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            moved = alone(moved, 0, 0)
        except Exception as error:  # of a transform
            raise InputError(f"{key} fails on {device}{failed_with(error)}; try keep_samples=true") from None
        if any(tensor.device.type != device.type for tensor in tensors(moved)):
            raise InputError(f"{key} computes on the CPU, and the samples are on {device}; try keep_samples=true")
        if before is not None and not torch.equal(before, torch.cuda.get_rng_state(device)):
            problem = f"draws random numbers on {device}, which are not those of the CPU"
            raise InputError(f"{key} {problem}; try keep_samples=true")
        sample = alone(sample, 0, 0)


def _are_masks(wanted: bool | Literal["auto"], sample: Any) -> bool:
    """Return True if the targets are transformed as a mask of the image. Raise InputError if that is impossible."""
    arrays = (torch.Tensor, np.ndarray, np.generic, int, float)
    is_pair_of_arrays = _is_pair(sample) and all(isinstance(item, arrays) for item in sample)
    tensors = [torch.as_tensor(item) for item in sample] if is_pair_of_arrays else []
    fits = len(tensors) == 2 and tensors[0].dim() == 3 and tensors[0].shape[1:] == tensors[1].shape
    if wanted is True and not fits:
        raise InputError(
            "transform_targets=true needs images (C, H, W) with targets (H, W) of their size; "
            "try transform_targets=auto"
        )
    return fits and (wanted is True or (wanted == "auto" and not tensors[1].is_floating_point()))


def _shapes(sample: Any) -> str:
    """Describe the shapes of the tensors and arrays."""
    return " and ".join(str(list(leaf.shape)) for leaf in tree_leaves(register_types(sample)) if hasattr(leaf, "shape"))


def _is_pair(sample: Any) -> bool:
    return type(sample) in (tuple, list) and len(sample) == 2


def _as_plain_tensors(tree: Any) -> Any:
    """Replace torchvision's tensor classes by torch.Tensor."""
    from torchvision.tv_tensors import TVTensor

    return tree_map_only(TVTensor, lambda tensor: tensor.as_subclass(torch.Tensor), tree)
