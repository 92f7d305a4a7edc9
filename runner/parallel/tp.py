"""Tensor parallel: the ranks along one axis hold slices of the same linear layers and read the same samples."""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.dropout import _DropoutNd

from runner.config.schema import Config
from runner.distributed.process_group import make_mesh
from runner.distributed.sync_batch_norm import use_group
from runner.distributed.world import World
from runner.parallel.fsdp import average_whole, check_divides, reshard, shard, without_sync
from runner.parallel.gradient_sum import sum_gradients
from runner.parallel.replica import Replica
from runner.training.activation_checkpointing import Extent, blocks_to_checkpoint
from runner.training.strategy import Axes, Carries, Recipe

Plan = dict[str, str]  # see models/__init__.py


class TP:
    """parallel=tp: torch's parallelize_module, by the model's tensor_plan().

    tensor: how many ranks share a layer; null is 2, or 1 in a world of one.
    rest: what the ranks do that hold the same slices and read other samples: `average` their gradients, or `fsdp`,
        which shards the slices over them too.
    """

    needs_group = True
    meta_init = False
    spans_devices = False
    carries: Carries = "one_loss"
    fails_at_once = False

    def __init__(self, tensor: int | None = None, rest: Literal["average", "fsdp"] = "average"):
        if tensor is not None and tensor < 1:
            raise ValueError(f"parallel.tensor={tensor} must be at least 1; try 2")
        self.tensor, self.rest = tensor, rest
        self._world_size = 1

    def axes(self, world_size: int) -> Axes:
        self._world_size = world_size
        tensor = self.tensor or min(2, world_size)
        check_divides("parallel.tensor", tensor, world_size)
        rest = world_size // tensor
        if self.rest == "fsdp" and rest == 1 and world_size > 1:
            raise ValueError(f"parallel.rest=fsdp has no effect where parallel.tensor={tensor} takes all ranks")
        return Axes(replicate=rest, tensor=tensor) if self.rest == "average" else Axes(shard=rest, tensor=tensor)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        if not hasattr(module, "tensor_plan"):
            return ["parallel=tp needs a model with tensor_plan(), and this one has none; try parallel=fsdp"]
        if config.precision == "fp16":
            # It unscales the gradients in one operator, which takes no whole and sliced ones together.
            return ["precision=fp16 does not go with parallel=tp; try precision=bf16"]
        tensor = self.axes(self._world_size).tensor
        plan: Plan = module.tensor_plan()  # type: ignore[operator]
        if messages := _check_plan(module, plan, tensor, self._world_size):
            return messages
        return _check_blocks(module, plan, config.activation_checkpointing)

    def prepare(self, recipe: Recipe, world: World) -> Replica:
        module, axes = recipe.module, self.axes(world.world_size)
        rest = "replicate" if self.rest == "average" else "shard"
        mesh = make_mesh(world.device, **{rest: axes.data_ranks, "tensor": axes.tensor})
        _slice(module, module.tensor_plan(), mesh["tensor"])  # type: ignore[operator]
        if axes.data_ranks > 1:
            use_group(module, mesh[rest].get_group())
        shared: dict[str, Any] = {"duplicates": axes.tensor, "sum_over": world.collectives.sum}
        if self.rest == "fsdp":
            for name in module.tensor_plan():  # type: ignore[operator]
                # A sliced layer gives a view, and an operator in place on it would undo FSDP's hook for backward.
                module.get_submodule(name).register_forward_hook(lambda layer, inputs, output: output.clone())
            root = shard(module, mesh[rest], recipe.materialize)
            shared |= {"within": root, "evaluate_within": root}
            shared |= {"loss_scale": axes.data_ranks, "without_sync": lambda: without_sync(root)}
            shared["after_change"] = lambda: reshard(root)
        optimizer = recipe.make_optimizer(module.parameters())

        def sum_over_rest(flat: torch.Tensor) -> None:
            dist.all_reduce(flat, group=mesh[rest].get_group())

        if self.rest == "fsdp":
            shared["reduce"] = lambda ps: average_whole(ps, sum_over_rest, axes.data_ranks)
        elif axes.data_ranks > 1:
            shared["reduce"] = lambda ps: sum_gradients(ps, sum_over_rest)
        return Replica(recipe, optimizer, **shared)


def _check_plan(module: nn.Module, plan: Plan, tensor: int, world_size: int) -> list[str]:
    """Why the layers of the plan cannot be cut into so many slices, a message each."""
    modules = dict(module.named_modules())
    names: dict[nn.Parameter, list[str]] = {}
    for full_name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(full_name)
    sizes: dict[str, int] = {}  # what the ranks must divide
    for name, style in plan.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear) or style not in ("colwise", "rowwise"):
            return [f"the model's tensor_plan() says {name}: {style}, but must name Linear layers, colwise or rowwise"]
        if tied := next((names[p] for p in layer.parameters() if len(names[p]) > 1), None):
            return [
                f"the model's tensor_plan() cuts {name}, but {tied[0]} and {tied[1]} are one parameter, which would no "
                "longer be; leave it out of the plan"
            ]
        if style == "rowwise":
            sizes[f"the {layer.in_features} inputs of {name}"] = layer.in_features
            continue
        # A layer whose output is viewed as heads goes to the ranks by whole heads.
        unit = getattr(modules[name.rpartition(".")[0]], "head_dim", 1)
        what = "outputs" if unit == 1 else "heads"
        sizes[f"the {layer.out_features // unit} {what} of {name}"] = layer.out_features // unit
    fitting = [n for n in range(1, world_size + 1) if all(size % n == 0 for size in (world_size, *sizes.values()))]
    nearest = min(fitting, key=lambda number: abs(number - tensor))
    return [
        f"parallel.tensor={tensor} must divide {what}; try parallel.tensor={nearest}, or another size of the layer"
        for what, size in sizes.items()
        if size % tensor
    ][:1]


def _check_blocks(module: nn.Module, plan: Plan, extent: Extent) -> list[str]:
    """Why no block can be computed again by itself: where it begins or ends, activations would have to be whole."""
    block_of = {part: block for block in blocks_to_checkpoint(module, extent) for part in block.modules()}
    opened: str | None = None  # the colwise layer after which activations are cut
    for position, (name, style) in enumerate(plan.items()):
        if opened and block_of.get(module.get_submodule(opened)) is not block_of.get(module.get_submodule(name)):
            return [
                f"activation_checkpointing={extent}: the model's tensor_plan() cuts activations from {opened} to "
                f"{name}, which are not in one block; try activation_checkpointing=none"
            ]
        opened = name if style == "colwise" and "rowwise" in list(plan.values())[position:] else None
    return []


def _slice(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Cut the plan's layers over the mesh. All its ranks must call it, with the same weights.

    The output of a colwise layer stays cut until the next rowwise layer; one that no rowwise layer follows is gathered.
    """
    names = list(plan)
    styles: dict[str, Any] = {}
    opening: list[nn.Module] = []  # the layers of pairs, between which activations are cut
    closing: list[nn.Module] = []
    for position, (name, style) in enumerate(plan.items()):
        if style == "colwise":
            is_paired = "rowwise" in [plan[later] for later in names[position:]]
            styles[name] = ColwiseParallel(output_layouts=None if is_paired else Replicate())
        else:
            is_paired = position > 0 and plan[names[position - 1]] == "colwise"
            styles[name] = RowwiseParallel(input_layouts=None if is_paired else Replicate())
        if is_paired:
            (opening if style == "colwise" else closing).append(module.get_submodule(name))
    # Every rank has made the same weights, so that none needs to send them.
    parallelize_module(module, mesh, styles, src_data_rank=None)
    _draw_whole_masks(module, opening, closing, mesh)


def _draw_whole_masks(module: nn.Module, opening: list[nn.Module], closing: list[nn.Module], mesh: DeviceMesh) -> None:
    """Let a Dropout between the layers of a pair draw for all units and use what this rank's get, as one process would.

    The ranks of the mesh share their random stream: if each drew for its own units, all would draw the same.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    is_cut = False

    def cut(*_: Any) -> None:
        nonlocal is_cut
        is_cut = True

    def join(*_: Any) -> None:
        nonlocal is_cut
        is_cut = False

    def widen(dropout: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor | None:
        width = inputs[0].size(-1)
        return F.pad(inputs[0], (rank * width, (size - 1 - rank) * width)) if is_cut and dropout.training else None

    def narrow(dropout: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        width = output.size(-1) // size
        return output.narrow(-1, rank * width, width) if is_cut and dropout.training else None

    for dropout in (part for part in module.modules() if isinstance(part, _DropoutNd)):
        dropout.register_forward_pre_hook(widen)
        dropout.register_forward_hook(narrow)
    for layer in opening:
        layer.register_forward_hook(cut)
    for layer in closing:
        layer.register_forward_pre_hook(join)
