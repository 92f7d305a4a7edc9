"""The partition of a model's layers into the stages of a pipeline, and parameters that several ranks share."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from runner.input.pytree import map_tensors
from runner.objectives.supervised import call_model
from runner.optimization.parameter_patterns import names_of
from runner.parallel.parameter_update import sum_gradients
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
    """Join each stage without trained parameters to the previous stage, or at the start to the next one.

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

    inputs: those of one sample. The units should be in evaluation mode; they may be on the meta device.
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


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of each pipeline of a mesh with the axis stage, in the order of the stages."""
    assert mesh.mesh_dim_names is not None
    with _disable_current_modes():  # see make_mesh
        ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index("stage"), -1)
        return ranks.reshape(-1, ranks.size(-1)).tolist()  # type: ignore[no-any-return]


class Tie(NamedTuple):
    """A parameter with several names or in several stages, and the ranks of a pipeline whose stages have it."""

    names: list[str]
    ranks: tuple[int, ...]


def find_ties(module: nn.Module, stages: Sequence[nn.Module], owners: Sequence[int]) -> list[Tie]:
    """Return the shared parameters. Must be called before stages are materialized, which unties them."""
    ranks: dict[nn.Parameter, set[int]] = {}
    for stage, owner in zip(stages, owners, strict=True):
        for parameter in stage.parameters():
            ranks.setdefault(parameter, set()).add(owner)
    names = names_of([*module.named_parameters(remove_duplicate=False)])
    ties = [Tie(names[parameter], tuple(sorted(of_parameter))) for parameter, of_parameter in ranks.items()]
    return [tie for tie in ties if len(tie.names) > 1 or len(tie.ranks) > 1]


class TiedParameters:
    """The tied parameters of this rank, after its stages were materialized. All ranks must construct it.

    All copies start with the weights of the model's constructor. They stay equal, because each gets the sum of all
    copies' gradients and is updated in the same way.
    """

    def __init__(self, module: nn.Module, ties: Sequence[Tie], own: Iterable[nn.Module], mesh: DeviceMesh):
        """own: this rank's stages. mesh: has the axis stage."""
        here = {parameter for stage in own for parameter in stage.parameters()}
        self._rank = rank = mesh.get_local_rank("stage")
        slots = [[_slot(module, name) for name in tie.names] for tie in ties]
        # The parameters' places in the model by tie: first those of this rank's stages.
        self._slots = [sorted(of_tie, key=lambda slot: slot[0][slot[1]] not in here) for of_tie in slots]
        self._ties = ties
        self.tie()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in dict.fromkeys(tie.ranks for tie in ties if len(tie.ranks) > 1):
            for pipeline in pipelines(mesh):
                group = dist.new_group([pipeline[stage] for stage in ranks])
                if dist.get_rank() in pipeline and rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    self._groups[ranks] = group

    def tie(self) -> None:
        """Tie the parameters. Must be called again after this rank's stages were sharded, which replaces parameters."""
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.on_lower_ranks: set[torch.Tensor] = set()  # this rank's copies of parameters that a lower rank has too
        for (_, ranks), slots in zip(self._ties, self._slots, strict=True):
            copy = slots[0][0][slots[0][1]]
            for parameters, key in slots:
                parameters[key] = copy
            if self._rank in ranks[1:]:
                self.on_lower_ranks.add(copy)
            if self._rank in ranks and len(ranks) > 1 and copy.requires_grad:
                self._shared.setdefault(ranks, []).append(copy)

    def sum_gradients(self) -> None:
        """Sum over the copies, after the sum over replicas. All ranks of a pipeline must call it."""
        for ranks, parameters in self._shared.items():
            group = self._groups[ranks]
            sum_gradients(parameters, lambda flat, group=group: dist.all_reduce(flat, group=group))  # type: ignore[misc]


def _slot(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter], str]:
    parent, _, key = name.rpartition(".")
    return module.get_submodule(parent)._parameters, key  # type: ignore[return-value]
