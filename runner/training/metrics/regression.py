"""Metrics of predicted numbers: the mean absolute error, and the fraction of the variance that is explained."""

import torch

from runner.training.metrics.shapes import as_pairs


class MAE:
    """Mean absolute error over all numbers of all samples, in the unit of the targets."""

    higher_is_better = False

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets (N, ...) -> (2,): sum of |output - target|, count of numbers."""
        predicted, wanted = as_pairs(outputs, targets)
        errors = (predicted - wanted).abs()
        return torch.stack([errors.sum(), errors.new_tensor(errors.numel())])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / sums[1]


class R2:
    """The coefficient of determination, 1 - residual sum of squares / total sum of squares.

    For several numbers per sample it is the mean over them, as scikit-learn's r2_score returns by default. It is NaN if
    one of them is constant over all samples.

    Source: Draper and Smith, "Applied Regression Analysis", 1998, section 1.3.
    """

    higher_is_better = True

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets (N, ...) -> (4, numbers per sample): sums of squared errors, t, t squared, and 1."""
        predicted, wanted = (side.reshape(len(side), -1) for side in as_pairs(outputs, targets))
        parts = ((predicted - wanted) ** 2, wanted, wanted**2, torch.ones_like(wanted))
        return torch.stack([part.sum(0) for part in parts])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        residual, total, squares, count = sums
        variance = squares - total**2 / count
        variance = variance.where(variance > 1e-12 * squares, torch.nan)  # a smaller value is a rounding error
        return torch.mean(1 - residual / variance)
