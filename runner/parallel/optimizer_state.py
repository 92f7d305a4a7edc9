"""The optimizer's state by full names of parameters, as checkpoints store it: independent of mode and world size."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_with_path

from runner.checkpoints.saved_state import MODEL, LocalState, SavedState
from runner.checkpoints.shard_file import LocalChunk, SavedTensor
from runner.checkpoints.snapshot import writes_all

OPTIMIZER = "optimizer."  # the state of a parameter is stored as optimizer.PARAMETER.KEY
TENSOR = "__tensor__"  # the key of a mapping that stands for a tensor, whose name is its value


def own_rank() -> int:
    """Return the rank as which this process writes: rank 0 in a single process, and within `writing_all`."""
    return dist.get_rank() if dist.is_initialized() and not writes_all() else 0


def is_first_rank() -> bool:
    """Return True on rank 0, and in a single process."""
    return own_rank() == 0


def is_of_rank(tensor: torch.Tensor, first: int = 0) -> bool:
    """Return True if this rank writes its part of the tensor.

    first: the rank that writes what all ranks have. Each shard is written by the first rank that has it.
    """
    rank = own_rank()
    if not isinstance(tensor, DTensor):
        return rank == first
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or first not in mesh.mesh:  # a submesh of another replica
        return False
    is_first = all(coordinate[axis] == 0 for axis, kind in enumerate(tensor.placements) if kind.is_replicate())
    return is_first and (tensor.to_local().numel() > 0 or (tensor.numel() == 0 and not any(coordinate)))


def optimizer_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    is_written: Callable[[torch.Tensor, nn.Parameter], bool] = lambda tensor, parameter: is_of_rank(tensor),
    groups_of: torch.optim.Optimizer | None = None,
) -> LocalState:
    """Return what this rank writes of the optimizer: the states of its parameters, and the parameter groups.

    torch.distributed.checkpoint.state_dict is not used: it requires a state of every parameter that could have one, and
    rejects two empty groups, which a rank of a pipeline may have. Groups that a mode split are joined again.
    `groups_of` is an optimizer of all ranks' parameters, from which the parameter groups are read instead.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = {name: parameter for parameter, name in names.items()}
    state = {names[p]: optimizer.state[p] for p in names if p in optimizer.state}
    all_groups = (groups_of or optimizer).param_groups
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in all_groups]
    tensors, facts = flatten_optimizer(state, _join_groups(groups, list(names.values())))
    return LocalState(
        {n: LocalChunk.of(t) for n, t in tensors.items() if is_written(t, parameters[_parameter_of(n, parameters)])},
        facts,
    )


def _join_groups(groups: Iterable[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """Join groups that are parts of one configured group. Parameters are in the order of the names given."""
    joined: dict[int, dict[str, Any]] = {}
    for group in groups:
        same = joined.setdefault(group.get("group", 0), {**group, "params": []})
        same["params"] = sorted({*same["params"], *group["params"]}, key=order.index)
    return list(joined.values())


@torch.no_grad()
def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedState) -> None:
    """Load the states of this rank's parameters by full names, from any mode, world size and parameter groups.

    The learning rate, momentum and other options stay those of this run's configuration.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = {names[parameter]: parameter for parameter in own}
    state: dict[str, dict[str, torch.Tensor]] = {}
    targets: dict[str, torch.Tensor] = {}
    for name, tensor in saved.tensors.items():
        if name.startswith(OPTIMIZER) and (parameter := _parameter_of(name, parameters)):
            targets[name] = _allocate(tensor, parameters[parameter])
            state.setdefault(parameter, {})[name.removeprefix(f"{OPTIMIZER}{parameter}.")] = targets[name]
    saved.read(targets)
    for name, structure in saved.facts.get("optimizer", {}).get("state", {}).items():
        if name in parameters:
            state[name] = fill_structure(structure, targets)
    packed["state"] = {number: state[name] for number, name in zip(numbers, parameters, strict=True) if name in state}
    optimizer.load_state_dict(packed)
    for number, (name, parameter) in zip(numbers, parameters.items(), strict=True):
        weight = saved.tensors.get(MODEL + name)
        if name in state and weight is not None and weight.dtype == parameter.dtype:
            # torch has converted the state to the parameter's dtype, but some optimizers use float32 for parts of it.
            optimizer.state[parameter] = tree_map(_with_dtype, optimizer.state[parameter], packed["state"][number])


def _with_dtype(loaded: Any, given: Any) -> Any:
    """Return the loaded value of an optimizer's state, with the dtype of the given one if it is a tensor."""
    is_converted = isinstance(loaded, torch.Tensor) and loaded.dtype != given.dtype
    return given.to(loaded.device) if is_converted else loaded


def _parameter_of(name: str, parameters: dict[str, nn.Parameter]) -> str:
    """Return the name of the parameter to whose state a tensor belongs; empty if it is none of these parameters."""
    name = name.removeprefix(OPTIMIZER)
    while name and name not in parameters:
        name = name.rpartition(".")[0]
    return name


def _allocate(saved: SavedTensor, parameter: nn.Parameter) -> torch.Tensor:
    """Allocate this rank's part of a tensor. A tensor of the parameter's shape is sharded like the parameter."""
    if not saved.shape:
        return torch.empty((), dtype=saved.dtype)  # a count of steps: the optimizer keeps it on the CPU or moves it
    if not isinstance(parameter, DTensor):
        if saved.shape == tuple(parameter.shape):  # with its strides: a fused update iterates over the memory of both
            return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
        return torch.empty(saved.shape, dtype=saved.dtype, device=parameter.device)
    if saved.shape != tuple(parameter.shape):
        raise ValueError(
            f"the optimizer's tensors of shape {list(saved.shape)} cannot be sharded; resume with parallel=ddp"
        )
    return as_local_part_of(parameter, torch.empty_like(parameter.to_local(), dtype=saved.dtype, requires_grad=False))


def as_local_part_of(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the tensor's placements and this local part; the local tensor itself if that is whole."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def flatten_optimizer(
    state: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by their full names, and everything else as JSON can represent it.

    If the state of a parameter consists of more than tensors, everything else contains its structure, in which
    {TENSOR: name} stands for each tensor; see `fill_structure`. The parameter groups are only stored for information.
    """
    tensors: dict[str, torch.Tensor] = {}

    def strip(path: tuple[Any, ...], value: Any) -> Any:
        name = OPTIMIZER + ".".join(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path)
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            return {TENSOR: name}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ValueError(
            f"the optimizer's state contains a {type(value).__name__} as {name}, which a checkpoint cannot store"
        )

    structures = {
        parameter: tree_map_with_path(lambda path, value, name=parameter: strip((name, *path), value), {**of_parameter})
        for parameter, of_parameter in state.items()
    }
    mixed = [name for name in state if not all(isinstance(value, torch.Tensor) for value in state[name].values())]
    plain = json.loads(json.dumps(groups, default=repr))
    return tensors, {"optimizer": {"param_groups": plain, "state": {name: structures[name] for name in mixed}}}


def fill_structure(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `flatten_optimizer` received, with lists in place of tuples."""

    def is_tensor(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {TENSOR}

    return tree_map(lambda node: tensors[node[TENSOR]] if is_tensor(node) else node, structure, is_leaf=is_tensor)
