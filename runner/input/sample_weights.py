"""`loader.weights`: how often each sample of the training data is drawn."""

from pathlib import Path

import numpy as np
import torch

from runner.input.source import Source

OF_DATA = "data"  # the value of the option that selects the dataset's weights


def read_sample_weights(option: str, source: Source) -> torch.Tensor:
    """Return one weight per sample, (N,) float64, from the dataset's attribute `sample_weights` or a .npy file.

    A file contains one weight for each sample of the training split, including those that `val_fraction` moves to the
    validation split. Raise ValueError if the weights are missing or invalid.
    """
    key = f"loader.weights={option}"
    if option == OF_DATA:
        found = getattr(source, "sample_weights", None)
        if found is None:
            raise ValueError(f"{key}: the dataset has no sample_weights; add that attribute, or name a .npy file")
        weights, num_samples = np.asarray(found), len(source)
    else:
        path = Path(option).expanduser()
        if path.suffix != ".npy":
            raise ValueError(f"{key} must be {OF_DATA} (the dataset's sample_weights) or a .npy file")
        try:
            weights, num_samples = np.load(path, allow_pickle=False), len(source.dataset)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{key} cannot be read: {error}") from None
    if weights.shape != (num_samples,) or weights.dtype.kind not in "fiub":
        raise ValueError(
            f"{key} must contain one number for each of the {num_samples} training samples, not {weights.dtype} of "
            f"shape {list(weights.shape)}"
        )
    if option != OF_DATA and source.rows is not None:
        weights = weights[source.rows.numpy()]
    weights = weights.astype(np.float64)
    if not np.isfinite(weights).all() or weights.min() < 0 or weights.sum() <= 0:
        raise ValueError(f"{key} must be finite and at least 0, and one weight must be above 0")
    return torch.from_numpy(weights)
