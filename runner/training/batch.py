"""What one optimizer step reads on a rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share of one micro-batch; it may be empty."""

    inputs: torch.Tensor  # (N, *sample_shape)
    targets: torch.Tensor  # (N,) classes or (N, num_outputs) numbers
    indices: Sequence[int] = ()  # of the samples in the data, N


@dataclass(frozen=True)
class StepBatch:
    """What one optimizer step reads on this rank."""

    micro_batches: list[MicroBatch]
    num_samples: int  # of the whole step, over all ranks and micro-batches
    wait_s: float  # how long the step waited for its data
