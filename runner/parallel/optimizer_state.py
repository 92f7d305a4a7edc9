"""An optimizer's state by full names of parameters: what a checkpoint has of it, whatever the mode and its groups."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from runner.training.checkpoint_tensors import OPTIMIZER, SavedTensor, fill_skeleton, flatten_optimizer
from runner.training.saved_state import HeldState, Piece, SavedState


def pieces_of_rank(tensors: dict[str, torch.Tensor]) -> dict[str, Piece]:
    """What this rank writes of tensors that all ranks have: of those that are whole on each, rank 0 writes.

    Of one that is cut, each piece is written by the first rank that has it. Nobody is asked.
    """
    return {name: Piece.of(tensor) for name, tensor in tensors.items() if is_of_rank(tensor)}


def is_of_rank(tensor: torch.Tensor) -> bool:
    """Whether this rank writes what it has of a tensor."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or 0 not in mesh.mesh:  # of the replicas of a mesh of parts, the first one writes
        return False
    is_first = all(coordinate[axis] == 0 for axis, kind in enumerate(tensor.placements) if kind.is_replicate())
    return is_first and (tensor.to_local().numel() > 0 or (tensor.numel() == 0 and not any(coordinate)))


def optimizer_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    is_written: Callable[[nn.Parameter, torch.Tensor], bool] = lambda parameter, tensor: is_of_rank(tensor),
) -> HeldState:
    """Momentum and the like, as this rank holds and writes it, and its parameter groups.

    is_written: whether this rank writes a tensor that belongs to a parameter.
    Named by hand and not by torch.distributed.checkpoint.state_dict: that asks for a state of every parameter that
    could have one, and takes no two empty groups, of which a rank of a pipeline may have more. Parts of one
    configured group are one group again.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = {name: parameter for parameter, name in names.items()}
    state = {names[p]: optimizer.state[p] for p in names if p in optimizer.state}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    tensors, facts = flatten_optimizer(state, join_groups(groups, list(names.values())))
    return HeldState(
        {n: Piece.of(t) for n, t in tensors.items() if is_written(parameters[_parameter_of(n, parameters)], t)}, facts
    )


def join_groups(groups: Iterable[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """Parts of the same configured group as one, its parameters in the order of the names given."""
    joined: dict[int, dict[str, Any]] = {}
    for group in groups:
        same = joined.setdefault(group.get("group", 0), {**group, "params": []})
        same["params"] = sorted({*same["params"], *group["params"]}, key=order.index)
    return list(joined.values())


@torch.no_grad()
def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedState) -> None:
    """Take over momentum and the like of this rank's parameters, by full names: of any mode, world and groups.

    The state brings its own learning rate, momentum and so on; those of this run's configuration hold.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = {names[parameter]: parameter for parameter in own}
    of_parameter: dict[str, dict[str, torch.Tensor]] = {}
    targets: dict[str, torch.Tensor] = {}
    for name, tensor in saved.tensors.items():
        if name.startswith(OPTIMIZER) and (parameter := _parameter_of(name, parameters)):
            targets[name] = _allocate(tensor, parameters[parameter])
            of_parameter.setdefault(parameter, {})[name] = targets[name]
    saved.read(targets)
    skeletons = saved.facts.get("optimizer", {}).get("state", {})
    packed["state"] = {
        number: _kept(name, of_parameter.get(name, {}), skeletons.get(name))
        for number, name in zip(numbers, map(names.__getitem__, own), strict=True)
        if name in of_parameter or name in skeletons
    }
    optimizer.load_state_dict(packed)


def _kept(parameter: str, tensors: dict[str, torch.Tensor], skeleton: dict[str, Any] | None) -> dict[str, Any]:
    """What the optimizer keeps for a parameter, by key."""
    if skeleton is None:
        return {name.removeprefix(f"{OPTIMIZER}{parameter}."): tensor for name, tensor in tensors.items()}
    return {key: fill_skeleton(inner, tensors) for key, inner in skeleton.items()}


def _parameter_of(name: str, parameters: dict[str, nn.Parameter]) -> str:
    """Whose state it is, empty where none of these parameters': no parameter's name begins another's and a dot."""
    name = name.removeprefix(OPTIMIZER)
    while name and name not in parameters:
        name = name.rpartition(".")[0]
    return name


def _allocate(saved: SavedTensor, parameter: nn.Parameter) -> torch.Tensor:
    """Memory for this rank's part: a tensor as large as its parameter is cut as that is, where it is cut."""
    if not saved.shape:
        return torch.empty((), dtype=saved.dtype)  # a count of steps, which the optimizer keeps on the CPU or moves
    if not isinstance(parameter, DTensor):
        if saved.shape == tuple(parameter.shape):  # channels_last too: a fused update goes through memory, not places
            return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
        return torch.empty(saved.shape, dtype=saved.dtype, device=parameter.device)
    if saved.shape != tuple(parameter.shape):
        raise ValueError(
            f"the optimizer keeps a tensor of {list(saved.shape)} for a parameter of {list(parameter.shape)}: how "
            "that is cut over the ranks is not known; resume with parallel=ddp"
        )
    return like(parameter, torch.empty_like(parameter.to_local(), dtype=saved.dtype, requires_grad=False))


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The local tensor as this rank's part of one that is cut as the other is; itself where that is whole."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
