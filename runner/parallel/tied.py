"""Parameters that stages of several ranks of a pipeline share: each rank has a copy, and the copies stay the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runner.parallel.gradient_sum import sum_gradients


@dataclass(frozen=True)
class Tie:
    """One parameter under several names, and the ranks of a pipeline whose stages have it."""

    names: list[str]
    ranks: tuple[int, ...]


def find_ties(module: nn.Module, groups: Sequence[nn.Module], owners: Sequence[int]) -> list[Tie]:
    """What is shared, while it is: to be asked before the groups of stages get their weights one by one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    held = [set(group.parameters()) for group in groups]
    return [
        Tie(aliases, tuple(sorted({owner for owner, own in zip(owners, held, strict=True) if parameter in own})))
        for parameter, aliases in names.items()
        if len(aliases) > 1
    ]


class TiedParameters:
    """The ties of this rank's model after its groups of stages got their weights. All ranks must make it.

    The weights that a group gets are those of the constructor, so that copies start alike. They stay so, because every
    copy is given the sum of all copies' gradients and takes the same step.
    """

    def __init__(self, module: nn.Module, ties: Sequence[Tie], own: Iterable[nn.Module], mesh: DeviceMesh):
        """mesh: replicate x stage."""
        here = {parameter for group in own for parameter in group.parameters()}
        rank = mesh.get_local_rank("stage")
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.of_lower_ranks: set[torch.Tensor] = set()  # a lower rank has a copy
        for tie in ties:
            slots = [_slot(module, name) for name in tie.names]
            of_names = [holder[key] for holder, key in slots]
            copy = next((parameter for parameter in of_names if parameter in here), of_names[0])
            for holder, key in slots:
                holder[key] = copy
            if rank in tie.ranks[1:]:
                self.of_lower_ranks.add(copy)
            if rank in tie.ranks and len(tie.ranks) > 1 and copy.requires_grad:
                self._shared.setdefault(tie.ranks, []).append(copy)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in dict.fromkeys(tie.ranks for tie in ties if len(tie.ranks) > 1):
            for pipeline in mesh.mesh.tolist():
                group = dist.new_group([pipeline[stage] for stage in ranks])
                if dist.get_rank() in pipeline and rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    self._groups[ranks] = group

    def sum_gradients(self) -> None:
        """Over the copies. All ranks of a pipeline must call it, when gradients are summed over its replicas."""
        for ranks, parameters in self._shared.items():
            group = self._groups[ranks]
            sum_gradients(parameters, lambda flat, group=group: dist.all_reduce(flat, group=group))  # type: ignore[misc]


def _slot(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter], str]:
    parent, _, key = name.rpartition(".")
    return module.get_submodule(parent)._parameters, key  # type: ignore[return-value]
