"""An optimizer's state by full names of parameters: what a checkpoint has of it, whatever the mode and its groups."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Momentum and the like, whole, on the CPU: {"state": {name: {key: value}}, "param_groups": [{..., "params"}]}.

    Named by hand and not by torch.distributed.checkpoint.state_dict: that asks for a state of every parameter that
    could have one, and takes no two empty groups, of which a rank of a pipeline may have more. Parts of one
    configured group are one group again. Where parameters are cut over ranks, rank 0 alone has values. All ranks must
    call it.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    held = {names[p]: tree_map_only(torch.Tensor, _whole, optimizer.state[p]) for p in names if p in optimizer.state}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": held, "param_groups": join_groups(groups, list(names.values()))}


def join_groups(groups: Iterable[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """Parts of the same configured group as one, its parameters in the order of the names given."""
    joined: dict[int, dict[str, Any]] = {}
    for group in groups:
        same = joined.setdefault(group.get("group", 0), {**group, "params": []})
        same["params"] = sorted({*same["params"], *group["params"]}, key=order.index)
    return list(joined.values())


@torch.no_grad()
def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take over momentum and the like, by full names: of any mode, world and groups. All ranks must call it.

    The state brings its own learning rate, momentum and so on; those of this run's configuration hold.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed["state"] = {
        number: {key: _as_held(value, parameter) for key, value in state["state"][names[parameter]].items()}
        for number, parameter in zip(numbers, parameters, strict=True)
        if names[parameter] in state["state"]
    }
    optimizer.load_state_dict(packed)


def _whole(tensor: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    whole: torch.Tensor = tensor.full_tensor().detach()
    return whole.cpu() if dist.get_rank() == 0 else None


def _as_held(value: Any, parameter: nn.Parameter) -> Any:
    """A tensor as large as its parameter is cut as that is, where it is cut."""
    if not (isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.dim()):
        return value
    if value.shape != parameter.shape:
        raise ValueError(
            f"the optimizer keeps a tensor of {list(value.shape)} for a parameter of {list(parameter.shape)}: how "
            "that is cut over the ranks is not known; resume with parallel=ddp"
        )
    # Every rank has read the same checkpoint, so that none needs to send it.
    device, mesh = parameter.to_local().device, parameter.device_mesh
    return distribute_tensor(value.to(device), mesh, parameter.placements, src_data_rank=None)
