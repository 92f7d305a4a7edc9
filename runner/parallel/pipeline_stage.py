"""A stage of a pipeline as torch's schedules take it: what it sends on is of one shape, whatever the micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from runner.training.batch import MicroBatch
from runner.training.precision import Precision
from runner.training.supervised import call


@dataclass(frozen=True)
class Signal:
    """What a group of stages gives for each sample."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return torch.empty(num_samples, *self.shape, dtype=self.dtype, device=device)

    def check(self, features: torch.Tensor) -> None:
        """Raises ValueError for what a neighbour does not expect."""
        if features.shape[1:] != self.shape:
            raise ValueError(
                f"parallel=pipeline sends tensors of one shape from stage to stage, but these samples give "
                f"{list(features.shape[1:])} and the first {list(self.shape)}; pad all to one length, or try "
                "parallel=ddp, fsdp or tp"
            )


class Stage(PipelineStage):
    """A stage that shakes hands with other ranks only.

    Where two neighbours are on one rank, as at the turn of a V, torch 2.11 has the rank send to itself, which gloo does
    not. Later ones do not shake hands so.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [operation for operation in operations if operation.peer != dist.get_rank()]


class Part(nn.Module):
    """A group of stages as a schedule's stage: what it is given and gives is padded to one number of samples.

    The last one gives the micro-batch's share of the loss instead, by `finish`.

    A schedule fixes the shapes that are sent, but a step's micro-batches differ by a sample, and its last ones may be
    missing. Every rank of a pipeline reads the same micro-batches, so that it knows how many samples are real; only
    those go through the layers, for BatchNorm would see any others.
    """

    def __init__(
        self,
        layers: nn.Module,
        is_first: bool,
        feed: list[MicroBatch],
        precision: Precision,
        signal: Signal | None,
        finish: Callable[[Any, MicroBatch], torch.Tensor],
    ):
        super().__init__()
        self.layers, self.signal, self.is_first, self.finish = layers, signal, is_first, finish
        self.feed, self.precision = feed, precision
        self.num_samples = 0  # what it is padded to
        self.position = 0  # of the next micro-batch in the feed: all schedules go forward in order

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        position, self.position = self.position, self.position + 1
        if position >= len(self.feed):
            # No rank has such a micro-batch. Gradients of zero must yet find their way back.
            ends = [t for t in (received, *self.parameters()) if t.requires_grad]
            nothing = torch.stack([t.flatten()[:0].sum() for t in ends]).sum()
            if self.signal is None:
                return nothing
            return nothing + self.signal.empty(self.num_samples, received.device).zero_()
        micro_batch = self.feed[position]
        with self.precision.autocast():
            outputs = (
                call(self.layers, micro_batch.inputs) if self.is_first else self.layers(received[: micro_batch.rows])
            )
            if self.signal is None:
                return self.finish(outputs, micro_batch)
        self.signal.check(outputs)
        # Always a copy: the schedules detach what they have sent, which a view (of Flatten, say) does not allow.
        padding = outputs.new_zeros(self.num_samples - len(outputs), *outputs.shape[1:])
        return torch.cat([outputs, padding]).contiguous()  # nor can channels_last be sent
