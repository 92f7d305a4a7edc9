"""A stage of a pipeline for torch's schedules: it sends tensors of one shape, whatever the size of the micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from runner.checkpoints.saved_state import local_part
from runner.input.batch import MicroBatch
from runner.objectives.supervised import call_model
from runner.training.mode import Recipe


@dataclass(frozen=True)
class StageOutput:
    """The shape, without the dim of samples, and the dtype of what a stage sends to the next one."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return torch.empty(num_samples, *self.shape, dtype=self.dtype, device=device)

    def check(self, features: torch.Tensor) -> None:
        if features.shape[1:] != self.shape:
            raise ValueError(
                f"a pipeline sends tensors of one shape, but outputs have shape {list(features.shape[1:])} here "
                f"and {list(self.shape)} for the first sample; pad all samples, or try parallel=ddp, fsdp or tp"
            )


class Stage(PipelineStage):
    """A stage that initializes connections only with other ranks.

    torch 2.11 lets a rank send to itself if it has two neighbors, as in the middle of a V, which gloo does not support.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc, unused-ignore]
        return [operation for operation in operations if operation.peer != dist.get_rank()]


class StageModule(nn.Module):
    """The layers of a stage, with inputs and outputs padded to one number of samples; the last stage returns the loss.

    A schedule requires fixed shapes, but the micro-batches of a step differ by one sample, and the last ones may be
    missing. Every rank of a pipeline reads the same micro-batches and so knows how many samples are real. Only those
    pass through the layers, because BatchNorm would count the padding. In evaluation mode, nothing is padded.
    """

    def __init__(
        self,
        layers: nn.Module,
        number: int,
        micro_batches: list[MicroBatch],
        recipe: Recipe,
        output: StageOutput | None,
        compute_loss: Callable[[Any, MicroBatch], torch.Tensor],
    ):
        """micro_batches: those of the current call of the schedule. output: None for the last stage."""
        super().__init__()
        self.layers, self.output, self.number, self.compute_loss = layers, output, number, compute_loss
        self.micro_batches, self.precision, self.draws = micro_batches, recipe.precision, recipe.draws
        self.num_samples = 0  # after padding
        self.position = 0  # of the next micro-batch: all schedules run their forwards in order

    def forward(self, received: Any) -> torch.Tensor:
        if not self.training:
            outputs: torch.Tensor = call_model(self.layers, received)
            return outputs
        position, self.position = self.position, self.position + 1
        if position >= len(self.micro_batches):
            # No rank has this micro-batch. Gradients of zero must still reach all parameters.
            ends = [t for t in (received, *self.parameters()) if t.requires_grad]
            zero = torch.stack([local_part(t).flatten()[:0].sum() for t in ends]).sum()
            if self.output is None:
                return zero
            return zero + self.output.empty(self.num_samples, received.device).zero_()
        micro_batch = self.micro_batches[position]
        with self.precision.autocast(), self.draws.following(micro_batch, stage=self.number):
            # A copy, because the schedules pass a leaf of autograd, which an in-place operator must not change.
            inputs = micro_batch.inputs if self.number == 0 else received[: micro_batch.rows].clone()
            outputs = call_model(self.layers, inputs)
            if self.output is None:
                return self.compute_loss(outputs, micro_batch)
        self.output.check(outputs)
        # Always a copy: the schedules detach what they have sent, which fails for a view (of Flatten, for example).
        padding = outputs.new_zeros(self.num_samples - len(outputs), *outputs.shape[1:])
        return torch.cat([outputs, padding]).contiguous()  # channels_last cannot be sent
