"""A large classification dataset that needs no memory, because each sample is computed from its number."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_counts, check_rows, check_sizes
from .hashing import MASK, hash_numbers
from .tensors import BatchDataset

MOST = 2**62  # samples, so that an int64 can represent their numbers


class Counting(BatchDataset):
    """Sample i is a hash of i, float32 of `sample_shape`, uniform on [-1, 1).

    Its class is the index of the largest of its first `num_outputs` features. Classes are equally likely and free
    of label noise, and a linear model can learn them.

    Training samples are numbered from 0, and validation samples from `num_train`, so they never overlap.
    An index outside of [0, len) raises IndexError. Raises ValueError if a size or count is below 1, if there are more
    classes than features, or more than 2^62 samples.
    """

    def __init__(
        self,
        train: bool,
        sample_shape: Sequence[int],
        num_outputs: int,
        num_train: int = 1_048_576,
        num_val: int = 16_384,
        seed: int = 0,
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        check_counts(num_train=num_train, num_val=num_val)
        num_features = math.prod(sample_shape)
        if num_outputs > num_features:
            raise ValueError(
                f"num_outputs={num_outputs} must be at most the {num_features} features of a sample; try {num_features}"
            )
        if num_train + num_val > MOST:
            raise ValueError(
                f"num_train={num_train} must leave at most 2^62 samples together with num_val={num_val}; "
                f"try {MOST - num_val}"
            )
        self.num_samples = num_train if train else num_val
        self.start = 0 if train else num_train
        self.sample_shape = tuple(sample_shape)
        self.num_outputs = num_outputs
        # One key per feature; hashing the seed separates the keys of similar seeds.
        self.keys = hash_numbers(torch.arange(1, num_features + 1) ^ hash_numbers(torch.tensor(seed & MASK)))  # (F,)

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: (len(indices), *sample_shape) samples and (len(indices),) int64 classes."""
        rows = check_rows(indices, self.num_samples)
        numbers = rows + self.start
        high, keys = (numbers >> 32)[:, None], self.keys
        if bool(high.any()):  # a hash has 32 bits, so the higher bits change the keys of the features
            keys = torch.where(high > 0, hash_numbers(keys ^ hash_numbers(high)), keys)  # (N, F)
        bits = hash_numbers(hash_numbers(numbers & MASK)[:, None] ^ keys)  # (N,) -> (N, F)
        # A float32 represents 24 bits exactly, so the values are the same on every machine.
        features = (bits >> 8).to(torch.float32).div_(2**23).sub_(1)
        targets = features[:, : self.num_outputs].argmax(1)
        return features.reshape(len(rows), *self.sample_shape), targets
