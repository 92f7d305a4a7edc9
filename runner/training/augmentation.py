"""Augmentation: what becomes of a training sample anew in each epoch, drawn from seed, epoch and index alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.config.diagnostics.own_line import failed_with
from runner.config.instantiate import make_group
from runner.config.schema import Config
from runner.errors import InputError
from runner.training.drawing import TRANSFORMS, drawing_from
from runner.training.pytree import collate, known
from runner.training.reader import read_in

Transforms = Mapping[str, Callable[..., Any]]


class Augmented:
    """A data set of training samples that are transformed when they are read; `in_epoch` says how.

    masks: transform targets with their images, as masks.
    """

    reads_ahead = False  # whatever the data set says: transforms take longer than what it would save

    def __init__(self, dataset: Any, transforms: Transforms, seed: int, masks: bool):
        self.dataset, self.transforms, self.seed, self.masks = dataset, transforms, seed, masks

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """The sample as the first epoch has it."""
        return self.in_epoch(0)[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or (name.startswith("__") and name != "__getitems__"):  # while it is being unpickled, say
            raise AttributeError(name)
        return getattr(self.in_epoch(0), name)

    def in_epoch(self, epoch: int) -> "InEpoch":
        """The samples of an epoch, which has each of them once."""
        return InEpoch(self, epoch)


class InEpoch:
    """The data set in one epoch; whatever it offers besides samples is reached through it."""

    def __init__(self, augmented: Augmented, epoch: int):
        self._augmented, self._epoch, self._dataset = augmented, epoch, read_in(augmented.dataset, epoch)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._augment(self._dataset[index], index)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._dataset, name)
        return self._read if name == "__getitems__" else found

    def _read(self, indices: Sequence[int]) -> Any:
        """Of a data set that cuts whole batches, a batch, collated."""
        batch = self._dataset.__getitems__(indices)
        if not indices:
            return batch
        if _is_pair(batch) and all(isinstance(part, torch.Tensor) for part in batch):
            samples = list(zip(*batch, strict=True))
        else:  # it has collated them in a way of its own
            samples = [self._dataset[index] for index in indices]
        samples = [self._augment(sample, index) for sample, index in zip(samples, indices, strict=True)]
        return getattr(self._dataset, "collate", collate)(samples)

    def _augment(self, sample: Any, index: int) -> Any:
        whole = self._augmented
        return augmented(sample, whole.transforms, whole.seed, self._epoch, index, whole.masks)


def augmented(sample: Any, transforms: Transforms, seed: int, epoch: int, index: int, masks: bool = False) -> Any:
    """The sample after all transforms, in their order: of a pair (inputs, targets) the inputs, else the whole.

    Inputs of three dimensions are an image, (C, H, W); with `masks` the targets, (H, W), are a mask that changes its
    place as the image does. torch, numpy and random draw from (seed, epoch, index), and then go on as they were.
    """
    with drawing_from(seed, epoch, index, TRANSFORMS):
        for transform in transforms.values():
            sample = _transformed(sample, transform, masks)
    return sample


def _transformed(sample: Any, transform: Callable[..., Any], masks: bool) -> Any:
    from torchvision.tv_tensors import Image, Mask, TVTensor  # seconds, which only those with transforms spend

    inputs = sample[0] if _is_pair(sample) else sample
    if isinstance(inputs, np.ndarray):
        inputs = torch.from_numpy(inputs)
    if isinstance(inputs, torch.Tensor) and inputs.dim() == 3 and not isinstance(inputs, TVTensor):
        inputs = Image(inputs)
    if masks:
        return _plain(tuple(transform(inputs, Mask(torch.as_tensor(sample[1])))))
    inputs = _plain(transform(inputs))
    return type(sample)((inputs, sample[1])) if _is_pair(sample) else inputs


def augment(config: Config, dataset: Any) -> Any:
    """The training data with the transforms of the configuration; the data as they are where there are none.

    Raises InputError for a transform that refuses its options, cannot be called or fails on the first sample.
    """
    transforms: dict[str, Callable[..., Any]] = {}
    for name, node in config.transforms.items():
        key = f"transforms.{name}"
        transforms[name] = make_group({key: node["_target_"]}, key, node)
        if not callable(transforms[name]):
            raise InputError(f"{key}._target_={node['_target_']}: what it makes cannot be called with a sample")
    if not transforms:
        return dataset
    try:
        sample = dataset[0]
    except Exception as error:  # reading runs the user's code, which can fail in any way
        raise InputError(f"data: its first sample cannot be read{failed_with(error)}") from None
    masks = _are_masks(config.transform_targets, sample)
    for number, name in enumerate(transforms, start=1):
        try:
            tried = augmented(sample, dict(list(transforms.items())[:number]), config.seed, 0, 0, masks)
        except Exception as error:
            raise InputError(f"transforms.{name} fails on the first training sample{failed_with(error)}") from None
        if "sample_shape" in config.data and _shapes(tried) != _shapes(sample):
            raise InputError(
                f"transforms.{name} makes tensors of {_shapes(tried)} from those of {_shapes(sample)}, but validation "
                "samples are not transformed; keep the shapes, or set data.sample_shape"
            )
    return Augmented(dataset, transforms, config.seed, masks)


def _are_masks(wanted: bool | Literal["auto"], sample: Any) -> bool:
    """Whether the targets have a class for each pixel of the image."""
    parts = [torch.as_tensor(part) for part in sample] if _is_pair(sample) and _are_arrays(sample) else []
    fits = len(parts) == 2 and parts[0].dim() == 3 and parts[0].shape[1:] == parts[1].shape
    if wanted is True and not fits:
        raise InputError(
            "transform_targets=true needs images (C, H, W) with targets (H, W) of their size, and the data's are "
            f"{_shapes(parts) if parts else 'others'}; try transform_targets=auto"
        )
    return fits and (wanted is True or (wanted == "auto" and not parts[1].is_floating_point()))


def _shapes(sample: Any) -> str:
    """Of its tensors and of NumPy's arrays."""
    return " and ".join(str(list(leaf.shape)) for leaf in tree_leaves(known(sample)) if hasattr(leaf, "shape"))


def _are_arrays(sample: Sequence[Any]) -> bool:
    return all(isinstance(part, (torch.Tensor, np.ndarray, np.generic, int, float)) for part in sample)


def _is_pair(sample: Any) -> bool:
    return type(sample) in (tuple, list) and len(sample) == 2


def _plain(tree: Any) -> Any:
    """With torch's own tensors in the place of torchvision's."""
    from torchvision.tv_tensors import TVTensor

    return tree_map_only(TVTensor, lambda tensor: tensor.as_subclass(torch.Tensor), tree)
