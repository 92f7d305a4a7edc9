"""Random samples with random targets, as in tutorials on distributed training; there is nothing to learn."""

from collections.abc import Sequence

import torch

from .checks import check_counts, check_sizes
from .tensors import TensorData


class RandomRegression(TensorData):
    """Samples of `sample_shape` and targets (num_outputs,), float32, all from the uniform distribution on [0, 1).

    The best prediction is the constant 0.5, with a mean squared error of 1/12.
    Raises ValueError if a size or count is below 1.
    Source: https://github.com/pytorch/examples/tree/main/distributed/ddp-tutorial-series
    """

    def __init__(
        self,
        train: bool,
        sample_shape: Sequence[int],
        num_outputs: int,
        num_train: int = 2048,
        num_val: int = 256,
        seed: int = 0,
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        check_counts(num_train=num_train, num_val=num_val)
        # Each split has its own seed, so that it does not change with the size of the other.
        generator = torch.Generator().manual_seed(seed)
        split_seeds = torch.randint(2**62, (2,), generator=generator)
        generator.manual_seed(int(split_seeds[0 if train else 1]))
        num_samples = num_train if train else num_val
        samples = torch.rand(num_samples, *sample_shape, generator=generator)
        super().__init__(samples, torch.rand(num_samples, num_outputs, generator=generator))
