"""Which stages of a model go together: consecutive groups, as even in parameters or in compute as can be."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runner.training.deferred_init import probe
from runner.training.pytree import map_tensors
from runner.training.supervised import call


class Chain(nn.Sequential):
    """Modules called in turn, the first with whatever arguments there are."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        features = first(*args, **kwargs)
        for module in others:
            features = module(features)
        return features


def trainable_units(stages: Sequence[nn.Module]) -> list[Chain]:
    """The stages, those without a parameter to train joined to the one before them (the first ones to the one behind).

    A rank of a pipeline needs something to train, and what it sends needs a gradient.
    """
    units: list[list[nn.Module]] = []
    has_weights = False  # whether the last unit does
    for stage in stages:
        trains = any(parameter.requires_grad for parameter in stage.parameters())
        if not units or (trains and has_weights):
            units.append([])
            has_weights = False
        units[-1].append(stage)
        has_weights |= trains
    return [Chain(*unit) for unit in units]


def num_parameters(units: Sequence[nn.Module]) -> list[int]:
    return [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]


def num_operations(units: Sequence[nn.Module], sample: Any) -> list[int]:
    """Floating-point operations of each unit for the sample: counted and not timed, for all ranks must agree.

    sample: the inputs of one. The units should be in evaluation mode; their weights need not be made yet.
    """
    counts = []
    sample = map_tensors(torch.Tensor.cpu, sample)
    with torch.no_grad():
        for unit in units:
            with FlopCounterMode(display=False) as counter:
                sample = probe(unit, call, sample)
            counts.append(counter.get_total_flops())
    return counts


def partition(costs: Sequence[int], num_groups: int) -> list[range]:
    """Cut the costs into consecutive groups, none empty: the largest sum as small as can be, then all as even.

    The slowest stage sets a pipeline's pace.
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
