"""How far off predicted numbers are on average."""

import torch

from runner.training.metrics.numbers import as_pairs


class MAE:
    """Mean absolute error over all numbers of all samples, in the unit of the targets."""

    higher_is_better = False

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets (N, ...) -> (2,): sum of |output - target|, and how many numbers there are."""
        predicted, wanted = as_pairs("mae", outputs, targets)
        errors = (predicted - wanted).abs()
        return torch.stack([errors.sum(), errors.new_tensor(errors.numel())])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / sums[1]
