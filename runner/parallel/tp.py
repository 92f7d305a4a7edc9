"""Tensor parallel: the ranks along one axis keep shards of the same linear layers, and read the same samples."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.dropout import _DropoutNd

from runner.distributed.process_group import make_mesh
from runner.distributed.sync_batch_norm import use_group
from runner.distributed.world import World
from runner.optimization.parameter_patterns import names_of
from runner.parallel.fsdp import check_sparse, data_group, data_options, shard
from runner.parallel.replica import Replica
from runner.training.draws.following import Draws
from runner.training.mode import Axes, Parallel, Recipe, check_divides
from runner.training.model.activation_checkpointing import Extent, blocks_to_checkpoint
from runner.training.model.adapters import is_adapted
from runner.training.model.submodules import offered
from runner.training.refusal import Refusal

Plan = dict[str, str]  # see models/__init__.py


class TP(Parallel):
    """parallel=tp: torch's parallelize_module, by the model's tensor_plan()."""

    needs_group = True
    shards_matrices = True
    splits_parameters = True
    fails_at_once = False
    refusals = (
        # The scaler unscales all gradients in one operator, which does not accept plain tensors and DTensors.
        Refusal("precision", "{setting} does not work with parallel=tp", "try precision=bf16", values=("fp16",)),
        Refusal("precision", "{setting}: torchao does not split layers", "try precision=bf16", values=("float8",)),
    )

    def __init__(self, tensor: int | None = None, rest: Literal["average", "fsdp"] = "average"):
        self.tensor, self.rest, self.meta_init = tensor, rest, rest == "fsdp"

    def axes(self, world_size: int) -> Axes:
        tensor = min(2, world_size) if self.tensor is None else self.tensor
        check_divides("parallel.tensor", tensor, world_size)
        rest = world_size // tensor
        if self.rest == "fsdp" and rest == 1 and world_size > 1:
            raise ValueError(f"parallel.rest=fsdp has no effect, because parallel.tensor={tensor} uses all ranks")
        return Axes(replicate=rest, tensor=tensor) if self.rest == "average" else Axes(shard=rest, tensor=tensor)

    def check(self, module: nn.Module, activation_checkpointing: Extent) -> list[str]:
        messages = check_layers(module, "parallel=tp", self.resolved_axes, activation_checkpointing)
        return messages or (check_sparse(module) if self.rest == "fsdp" else [])

    def prepare(self, recipe: Recipe, world: World) -> Replica:
        axes = self.resolved_axes
        rest = "replicate" if self.rest == "average" else "shard"
        return prepare_layers(recipe, world, make_mesh(world.device, **{rest: axes.data_ranks, "tensor": axes.tensor}))


def prepare_layers(recipe: Recipe, world: World, mesh: DeviceMesh) -> Replica:
    """Prepare the model over a mesh with the axis tensor, and with replicate, shard or both. All ranks must call it."""
    module = recipe.module
    shard_layers(module, module, mesh["tensor"], recipe.draws)
    if (group := data_group(mesh)) is not None:
        use_group(module, group)

    def shard_model(data: DeviceMesh) -> nn.Module:
        for name in module.tensor_plan():  # type: ignore[operator]
            # A sharded layer returns a view, and an in-place operator on it would drop FSDP's hook for backward.
            module.get_submodule(name).register_forward_hook(lambda layer, inputs, output: output.clone())
        return shard(replace(recipe, materialize=lambda parts: _materialize(parts, recipe)), data)

    options = data_options(mesh, shard_model)
    optimizer = recipe.make_optimizer(module.parameters())
    return Replica(recipe, optimizer, sum_over=world.collectives.sum, duplicates=mesh["tensor"].size(), **options)


def _materialize(parts: Iterable[nn.Module], recipe: Recipe) -> None:
    """Create the weights of submodules whose layers were sharded on the meta device, and shard them again."""
    modules = [*dict.fromkeys(module for part in parts for module in part.modules())]
    before = [dict[str, Any](module._parameters) for module in modules]
    recipe.materialize(modules)
    for module, parameters in zip(modules, before, strict=True):
        for key, meta in parameters.items():
            if isinstance(meta, DTensor) and meta.is_meta:
                whole: Any = module._parameters[key]
                weight = distribute_tensor(whole, meta.device_mesh, meta.placements, src_data_rank=None)
                module._parameters[key] = nn.Parameter(weight, meta.requires_grad)


def check_layers(module: nn.Module, mode: str, axes: Axes, activation_checkpointing: Extent) -> list[str]:
    """Return a message if the model's layers cannot be sharded along the axis tensor. mode: as in a message."""
    if not offered(module, "tensor_plan"):
        return [f"{mode} needs a model with tensor_plan(); try parallel=fsdp"]
    if is_adapted(module):
        return [f"{mode} cannot shard layers that have adapters; try parallel=fsdp"]
    plan: Plan = module.tensor_plan()  # type: ignore[operator]
    if messages := _check_plan(module, plan, axes.tensor, axes.size):
        return messages
    return _check_blocks(module, plan, activation_checkpointing)


def _check_plan(module: nn.Module, plan: Plan, tensor: int, world_size: int) -> list[str]:
    """Return a message if the layers of the plan cannot be sharded over this number of ranks."""
    modules = dict(module.named_modules())
    names = names_of([*module.named_parameters(remove_duplicate=False)])
    sizes: dict[str, int] = {}  # which the number of ranks must divide
    for name, style in plan.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear) or style not in ("colwise", "rowwise"):
            return [f"the model's tensor_plan() has {name}: {style}, but must map Linear layers to colwise or rowwise"]
        if tied := next((names[p] for p in layer.parameters() if len(names[p]) > 1), None):
            return [f"the model's tensor_plan() shards {name}, which would untie {tied[0]} and {tied[1]}; remove it"]
        if style == "rowwise":
            size, what = layer.in_features, "inputs"
        else:  # a layer whose output is viewed as heads is sharded by whole heads
            unit = getattr(modules[name.rpartition(".")[0]], "head_dim", 1)
            size, what = layer.out_features // unit, "outputs" if unit == 1 else "heads"
        sizes[f"the {size} {what} of {name}"] = size
    fitting = [n for n in range(1, world_size + 1) if all(size % n == 0 for size in (world_size, *sizes.values()))]
    nearest = min(fitting, key=lambda number: abs(number - tensor))
    return [
        f"parallel.tensor={tensor} must divide {what}; try parallel.tensor={nearest}, or another size of the layer"
        for what, size in sizes.items()
        if size % tensor
    ][:1]


def _check_blocks(module: nn.Module, plan: Plan, extent: Extent) -> list[str]:
    """Return a message if activations are sharded at the beginning or end of a block that is to be recomputed."""
    block_of = {part: block for block in blocks_to_checkpoint(module, extent) for part in block.modules()}
    opened: str | None = None  # the colwise layer after which activations are sharded
    for position, (name, style) in enumerate(plan.items()):
        if opened and block_of.get(module.get_submodule(opened)) is not block_of.get(module.get_submodule(name)):
            return [
                f"activation_checkpointing={extent}: the model's tensor_plan() shards activations from {opened} to "
                f"{name}, which are not in one block; try activation_checkpointing=none"
            ]
        opened = name if style == "colwise" and "rowwise" in list(plan.values())[position:] else None
    return []


def shard_layers(module: nn.Module, part: nn.Module, mesh: DeviceMesh, draws: Draws) -> None:
    """Shard the layers of the module's plan that are in a part of it. All ranks of the mesh must call it.

    All of them must have the same weights. The output of a colwise layer stays sharded until the next rowwise layer of
    the part. If none follows, the output is gathered.
    """
    parts = {*part.modules()}
    plan: Plan = module.tensor_plan()  # type: ignore[operator]
    plan = {name: style for name, style in plan.items() if module.get_submodule(name) in parts}
    styles: dict[str, Any] = {}
    opening: list[nn.Module] = []  # the layers of pairs, between which activations are sharded
    closing: list[nn.Module] = []
    previous = ""
    for position, (name, style) in enumerate(plan.items()):
        layer = module.get_submodule(name)
        if style == "colwise":
            is_paired = "rowwise" in [*plan.values()][position:]
            styles[name] = ColwiseParallel(output_layouts=None if is_paired else Replicate())
            if is_paired:
                opening.append(layer)
        else:
            is_paired = previous == "colwise"
            styles[name] = RowwiseParallel(input_layouts=None if is_paired else Replicate())
            if is_paired:
                closing.append(layer)
        previous = style
    # src_data_rank=None: every rank has the same weights, so that none needs to send them.
    parallelize_module(module, mesh, styles, src_data_rank=None)
    _draw_whole_masks(part, opening, closing, mesh, draws)


def _draw_whole_masks(
    module: nn.Module, opening: list[nn.Module], closing: list[nn.Module], mesh: DeviceMesh, draws: Draws
) -> None:
    """Let draws between the layers of a pair be this rank's part of the draws for all units, as one process would draw.

    The ranks of the mesh have the same random stream: if each drew only for its own units, all masks would be equal. If
    the draws do not follow the samples, only Dropout draws for all units.
    """
    rank, size = mesh.get_local_rank(), mesh.size()

    def mark(shard: tuple[int, int] | None) -> Callable[..., None]:
        return lambda *_: setattr(draws, "shard", shard)

    def widen(dropout: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor | None:
        width = inputs[0].size(-1)
        return F.pad(inputs[0], (rank * width, (size - 1 - rank) * width)) if draws.shard and dropout.training else None

    def narrow(dropout: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        width = output.size(-1) // size
        return output.narrow(-1, rank * width, width) if draws.shard and dropout.training else None

    for dropout in (part for part in module.modules() if isinstance(part, _DropoutNd) and not draws.follows):
        dropout.register_forward_pre_hook(widen)
        dropout.register_forward_hook(narrow)
    for layer in opening:
        layer.register_forward_hook(mark((rank, size)))
    for layer in closing:
        layer.register_forward_pre_hook(mark(None))
