"""Parameters shared by stages on several ranks of a pipeline: each rank has a copy, and all copies stay equal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runner.optimization.parameter_patterns import names_of
from runner.parallel.parameter_update import sum_gradients


@dataclass(frozen=True)
class Tie:
    """A parameter with several names, and the ranks of a pipeline whose stages have it."""

    names: list[str]
    ranks: tuple[int, ...]


def find_ties(module: nn.Module, stages: Sequence[nn.Module], owners: Sequence[int]) -> list[Tie]:
    """Return the shared parameters. Must be called before stages are materialized, which unties them."""
    parameters = [set(stage.parameters()) for stage in stages]
    return [
        Tie(aliases, tuple(sorted({owner for owner, own in zip(owners, parameters, strict=True) if parameter in own})))
        for parameter, aliases in names_of([*module.named_parameters(remove_duplicate=False)]).items()
        if len(aliases) > 1
    ]


class TiedParameters:
    """The tied parameters of this rank, after its stages were materialized. All ranks must construct it.

    The constructor's weights make all copies equal. They stay equal, because each copy gets the sum of the gradients of
    all copies and is updated in the same way.
    """

    def __init__(self, module: nn.Module, ties: Sequence[Tie], own: Iterable[nn.Module], mesh: DeviceMesh):
        """own: this rank's stages. mesh: replicate x stage."""
        here = {parameter for stage in own for parameter in stage.parameters()}
        rank = mesh.get_local_rank("stage")
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.on_lower_ranks: set[torch.Tensor] = set()  # this rank's copies of parameters that a lower rank has too
        for tie in ties:
            slots = [_slot(module, name) for name in tie.names]
            candidates = [parameters[key] for parameters, key in slots]
            copy = next((parameter for parameter in candidates if parameter in here), candidates[0])
            for parameters, key in slots:
                parameters[key] = copy
            if rank in tie.ranks[1:]:
                self.on_lower_ranks.add(copy)
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
        """Sum over the copies, after the sum over replicas. All ranks of a pipeline must call it."""
        for ranks, parameters in self._shared.items():
            group = self._groups[ranks]
            sum_gradients(parameters, lambda flat, group=group: dist.all_reduce(flat, group=group))  # type: ignore[misc]


def _slot(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter], str]:
    parent, _, key = name.rpartition(".")
    return module.get_submodule(parent)._parameters, key  # type: ignore[return-value]
