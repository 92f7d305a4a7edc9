"""What one optimizer step reads on a rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.training.pytree import num_rows


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share of one micro-batch.

    Where the share is empty, `data` is of one sample of the training data that counts nothing, so that whatever runs
    a model runs here too; under BatchNorm, which would see that sample, it is of no sample.
    """

    data: Any  # a pytree of tensors, as the data set and its collate make it; by default (inputs, targets)
    indices: Sequence[int]  # of the samples that count, in the data

    @property
    def num_samples(self) -> int:
        """How many count."""
        return len(self.indices)

    @property
    def rows(self) -> int:
        """How many are in `data`, those that count nothing too."""
        return num_rows(self.data)

    @property
    def inputs(self) -> Any:
        """What the model is called with, where the data's samples are (inputs, targets)."""
        return self.data[0]

    @property
    def targets(self) -> Any:
        return self.data[1]


@dataclass(frozen=True)
class StepBatch:
    """What one optimizer step reads on this rank."""

    micro_batches: list[MicroBatch]
    num_samples: int  # of the whole step, over all ranks and micro-batches
    wait_s: float  # how long the step waited for its data
