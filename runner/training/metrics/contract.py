"""The contract of a metric: sums over samples, which are exact however the samples are distributed over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# A tensor, or a pytree of tensors and Rows: tuples, lists and dicts, nested.
Sums = Any
Value = torch.Tensor | float | Mapping[str, torch.Tensor | float]


@dataclass(frozen=True)
class Rows:
    """A tensor in the result of `update` whose rows are kept, for metrics that cannot be computed from sums.

    `compute` receives a tensor with the rows of all samples, in the order of the samples. A run keeps them in memory.
    """

    tensor: torch.Tensor  # (number of rows, ...): all dims except the first are the same for every batch


class Metric(Protocol):
    """A metric: a file of runner/training/metrics and a YAML file of conf/metrics. Every rank has its own instance.

    Derive from it, or define the same members.
    """

    @property
    def higher_is_better(self) -> bool | None:
        """Whether a higher value is better. None: a monitor needs `monitor_direction`. May be an attribute."""

    def update(self, outputs: Any, targets: Any) -> Sums:
        """Return sums over the samples of one batch; their shapes must not depend on the batch.

        `outputs` are the model's and `targets` the data's, both with first dim N. Before the run starts, it is also
        called with one sample of the training data, and with that sample twice.
        """

    def compute(self, sums: Any) -> Value:
        """Return the metric, given the results of `update` summed over all batches and ranks, as float64 tensors.

        A metric of several numbers returns a mapping, always with the same names; they are logged as NAME/KEY.
        """
