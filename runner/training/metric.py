"""The contract of a metric: what is measured of a model's outputs, exact however the samples are spread over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# A tensor, or a pytree of tensors and Rows: tuples, lists and dicts, nested.
Sums = Any
Value = torch.Tensor | float | Mapping[str, torch.Tensor | float]


@dataclass(frozen=True)
class Rows:
    """Stands for a tensor in what `update` returns, where no sum can give the metric: all rows are kept.

    `compute` is given a tensor with the rows of all samples, in the order of the samples. A run keeps them in memory.
    """

    tensor: torch.Tensor  # (number of rows, ...): all but the first dim is the same for every batch


class Metric(Protocol):
    """A file of runner/training/metrics and a YAML file of conf/metrics; every rank has one."""

    @property
    def higher_is_better(self) -> bool | None:
        """Which end is the best; None: neither, so that a monitor needs monitor_direction. An attribute will do."""

    def update(self, outputs: Any, targets: Any) -> Sums:
        """Sums over the samples of one batch, whose shapes do not depend on it.

        outputs, targets: as the model gives and the data has them, first dim N. It is also called with one sample of
        the training data, and with that sample twice, before the run begins.
        """

    def compute(self, sums: Any) -> Value:
        """The metric, by what `update` returned, summed over all batches and ranks: tensors of float64.

        Of several numbers a mapping by name, with the same names always: NAME/KEY is how they are logged.
        """
