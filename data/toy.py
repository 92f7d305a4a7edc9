"""A small regression that a linear model can learn."""

import math
from collections.abc import Sequence

import torch

from .checks import check_counts, check_sizes
from .tensors import TensorData


class ToyRegression(TensorData):
    """Samples from N(0, 1); targets are a fixed random linear map of them, with variance 1, plus noise.

    A sample has `sample_shape`, a target (num_outputs,), both float32. `noise` is the standard deviation of the
    noise, so its square is the lowest mean squared error that a model can reach.
    Raises ValueError if a size or count is below 1, or the noise is negative.
    """

    def __init__(
        self,
        train: bool,
        sample_shape: Sequence[int],
        num_outputs: int,
        num_train: int = 1024,
        num_val: int = 256,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        check_counts(num_train=num_train, num_val=num_val)
        if not 0 <= noise < math.inf:
            raise ValueError(f"noise={noise} must be at least 0 and finite; try 0.1")
        num_samples = num_train if train else num_val
        num_features = math.prod(sample_shape)
        # In float64 and rounded once, because a sum in float32 depends on the number of threads.
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(num_features, num_outputs, dtype=torch.float64, generator=generator)
        # Each split has its own seed, so that it does not change with the size of the other.
        split_seeds = torch.randint(2**62, (2,), generator=generator)
        generator.manual_seed(int(split_seeds[0 if train else 1]))
        samples = torch.randn(num_samples, num_features, generator=generator)
        error = torch.randn(num_samples, num_outputs, generator=generator) * noise
        targets = samples.to(torch.float64) @ weight / math.sqrt(num_features) + error  # (N, F) -> (N, num_outputs)
        super().__init__(samples.reshape(num_samples, *sample_shape), targets.to(torch.float32))
