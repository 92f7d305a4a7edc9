"""The data of one optimizer step on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, dtype

from runner.input.pytree import num_rows


def cast_floating(tensor: Tensor, to: dtype) -> Tensor:
    """Convert floating-point data to a dtype, and complex data to its counterpart; integers, as of classes, stay."""
    return tensor.to(cast_type(tensor.dtype, to))


def cast_type(of: dtype, to: dtype) -> dtype:
    """Return the dtype to which `cast_floating` converts data of the dtype `of`."""
    if of.is_complex:
        return to.to_complex()
    return to if of.is_floating_point else of


def widen_integers(tensor: Tensor) -> Tensor:
    """Convert integers and bools to int64: in narrower dtypes, comparisons wrap around and products overflow."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.to(torch.int64)


@dataclass(frozen=True)
class MicroBatch:
    """This rank's samples of one micro-batch, the local micro-batch.

    If the rank has no samples, `data` contains one sample of the training data that is not counted, so that the model
    can run on every rank.
    """

    data: Any  # a pytree of tensors, as the dataset collates it; by default (inputs, targets)
    indices: Sequence[int]  # positions in the split of the samples that are counted; see Source.dataset_indices

    @property
    def num_samples(self) -> int:
        """The number of samples that are counted."""
        return len(self.indices)

    @property
    def rows(self) -> int:
        """The number of samples in `data`, including one that is not counted."""
        return num_rows(self.data)

    @property
    def inputs(self) -> Any:
        """The model's inputs, if samples are (inputs, targets)."""
        return self.data[0]

    @property
    def targets(self) -> Any:
        """The targets, if samples are (inputs, targets)."""
        return self.data[1]


@dataclass(frozen=True)
class StepBatch:
    """The data of one optimizer step on this rank."""

    micro_batches: list[MicroBatch]
    num_samples: int  # of the whole step, over all ranks and micro-batches
    wait_s: float  # time that the step waited for its data
    ends_epoch: bool = False
    checksum: float | None = None  # of this rank's samples; None for most steps (runner.input.checksum)
