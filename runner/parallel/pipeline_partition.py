"""Which layers form a stage of a pipeline: consecutive groups, balanced by parameters or by compute."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runner.input.pytree import map_tensors
from runner.objectives.supervised import call_model
from runner.training.model.deferred_init import probe


class Chain(nn.Sequential):
    """Modules called in order; the first one may have several arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        features = first(*args, **kwargs)
        for module in others:
            features = module(features)
        return features


def trainable_units(model_stages: Sequence[nn.Module]) -> list[Chain]:
    """Join each of the model's stages that has no parameter to train to the previous one, or at the start to the next.

    A rank of a pipeline needs something to train, and what it sends needs a gradient.
    """
    units: list[list[nn.Module]] = []
    has_weights = False  # whether the last unit has any
    for stage in model_stages:
        trains = any(parameter.requires_grad for parameter in stage.parameters())
        if not units or (trains and has_weights):
            units.append([])
            has_weights = False
        units[-1].append(stage)
        has_weights |= trains
    return [Chain(*unit) for unit in units]


def num_parameters(units: Sequence[nn.Module]) -> list[int]:
    return [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]


def num_operations(units: Sequence[nn.Module], inputs: Any) -> list[int]:
    """Count the floating-point operations of each unit. They are not timed, because all ranks must agree.

    inputs: those of one sample. The units should be in evaluation mode; they may be without memory.
    """
    counts = []
    features = map_tensors(torch.Tensor.cpu, inputs)
    with torch.no_grad():
        for unit in units:
            with FlopCounterMode(display=False) as counter:
                features = probe(unit, call_model, features)
            counts.append(counter.get_total_flops())
    return counts


def partition(costs: Sequence[int], num_groups: int) -> list[range]:
    """Split the costs into consecutive, non-empty groups, with the smallest possible largest sum.

    The slowest stage sets a pipeline's pace. Of several such partitions, the most even one is returned.
    """
    assert 1 <= num_groups <= len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    # best[end]: (largest sum, sum of squares, cuts) of costs[:end] in the number of groups so far
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [0])}
    for group in range(1, num_groups + 1):
        longer = {}
        for end in range(group, len(costs) - (num_groups - group) + 1):
            longer[end] = min(
                (max(largest, sums[end] - sums[start]), squares + (sums[end] - sums[start]) ** 2, [*cuts, end])
                for start, (largest, squares, cuts) in best.items()
                if start < end
            )
        best = longer
    return [range(start, end) for start, end in pairwise(best[len(costs)][2])]
