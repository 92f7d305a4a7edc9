"""How often each sample of the training data is drawn."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.training.augmentation import Augmented
from runner.training.part import Part

OF_DATA = "data"  # the word for the data set's own


def read_weights(source: str, dataset: Any) -> torch.Tensor:
    """(N,) float64, one for each sample of the data set: its attribute `sample_weights`, or those of a .npy file.

    A file has one for each sample of the training split, also for those that were cut off it to validate on.
    Raises ValueError where there are none, or none that can be drawn by.
    """
    typed = f"loader.weights={source}"
    if source == OF_DATA:
        found = getattr(dataset, "sample_weights", None)
        if found is None:
            raise ValueError(
                f"{typed}: the data set has no sample_weights; give it that attribute, or name a .npy file"
            )
        weights, num_samples = np.asarray(found), len(dataset)
    else:
        weights, num_samples = _read(source, typed), len(_whole(dataset))
    if weights.shape != (num_samples,) or weights.dtype.kind not in "fiub":
        raise ValueError(
            f"{typed} must be one number for each of the {num_samples} training samples, not {weights.dtype} of shape "
            f"{list(weights.shape)}"
        )
    if source != OF_DATA and isinstance(part := _part(dataset), Part):
        weights = weights[part.rows.numpy()]
    weights = weights.astype(np.float64)
    if not np.isfinite(weights).all() or weights.min() < 0 or weights.sum() <= 0:
        raise ValueError(f"{typed} must be finite and at least 0, and one of them above 0")
    return torch.from_numpy(weights)


def _read(source: str, typed: str) -> np.ndarray:
    path = Path(source).expanduser()
    if path.suffix != ".npy":
        raise ValueError(f"{typed} must be {OF_DATA} (the data set's sample_weights) or a .npy file")
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{typed} cannot be read: {reason}") from None
    assert isinstance(array, np.ndarray)
    return array


def _part(dataset: Any) -> Any:
    """What is under the transforms."""
    return dataset.dataset if isinstance(dataset, Augmented) else dataset


def _whole(dataset: Any) -> Any:
    """The training split before a validation split was cut off."""
    part = _part(dataset)
    return part.dataset if isinstance(part, Part) else part
