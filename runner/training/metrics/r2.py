"""How much of the variance of the targets is explained."""

import torch

from runner.training.metrics.numbers import as_pairs


class R2:
    """The coefficient of determination, 1 - residual sum of squares / total sum of squares.

    Of several numbers per sample the mean over them, as scikit-learn's r2_score does by default; nan where one of them
    is the same for all samples. Source: Draper and Smith, "Applied Regression Analysis", 1998, section 1.3.
    """

    higher_is_better = True

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets (N, ...) -> (4, numbers per sample): sums of squared errors, t, t squared, and 1."""
        predicted, wanted = (side.reshape(len(side), -1) for side in as_pairs("r2", outputs, targets))
        parts = ((predicted - wanted) ** 2, wanted, wanted**2, torch.ones_like(wanted))
        return torch.stack([part.sum(0) for part in parts])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        residual, total, squares, count = sums
        spread = squares - total**2 / count
        spread = spread.where(spread > 1e-12 * squares, torch.nan)  # what is left then is rounding
        return (1 - residual / spread).mean()
