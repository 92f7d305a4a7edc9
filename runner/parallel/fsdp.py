"""Fully sharded data parallel: each rank keeps a shard of every parameter, and gathers a block's parameters for use."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from runner.distributed.process_group import make_mesh
from runner.distributed.sync_batch_norm import is_batch_norm
from runner.distributed.world import World
from runner.input.pytree import map_tensors
from runner.objectives.objective import ForwardWrapper, LossGroup
from runner.optimization.parameter_patterns import counted
from runner.parallel.loss_groups import prepare_loss_groups
from runner.parallel.parameter_update import sum_gradients
from runner.parallel.replica import Replica
from runner.training.mode import Axes, Parallel, ParallelModel, Recipe, check_divides
from runner.training.model.activation_checkpointing import Extent
from runner.training.model.submodules import called_modules, is_divided, offered, stages_or_blocks, whole_modules
from runner.training.refusal import Refusal


class FSDP(Parallel):
    """parallel=fsdp: torch's fully_shard (FSDP2) over each of the model's stages, then over the rest of the model.

    On a CPU, the allocator keeps freed memory; set the variable MALLOC_MMAP_THRESHOLD_=1048576 to return it.
    """

    needs_group = True
    shards_matrices = True
    supported_objectives = "several_losses"
    fails_at_once = False
    refusals = (
        Refusal(
            "precision",
            "parallel.mixed_precision=true computes in bfloat16",
            "try precision=bf16",
            values=("fp64", "fp32", "fp16"),
            given="mixed_precision=true",
        ),
    )

    def __init__(
        self,
        replicate: int = 1,
        reshard_after_forward: bool = True,
        mixed_precision: bool = False,
        meta_init: bool = True,
    ):
        self.replicate, self.reshard_after_forward = replicate, reshard_after_forward
        self.mixed_precision, self.meta_init = mixed_precision, meta_init

    def axes(self, world_size: int) -> Axes:
        check_divides("parallel.replicate", self.replicate, world_size)
        return Axes(replicate=self.replicate, shard=world_size // self.replicate)

    def check(self, module: nn.Module, activation_checkpointing: Extent) -> list[str]:
        return check_sparse(module)

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        axes = self.resolved_axes
        mesh = make_mesh(world.device, replicate=axes.replicate, shard=axes.shard)
        mesh = mesh if axes.replicate > 1 else mesh["shard"]
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward}
        if self.mixed_precision:
            for layer in [part for part in recipe.module.modules() if is_batch_norm(part) and not is_divided(part)]:
                # Its statistics are float32, and then its weights cannot be bfloat16.
                recipe.materialize([layer])
                fully_shard(layer, mesh=mesh, **options)
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        root = shard(recipe, mesh, **options)

        def prepare_group(loss_group: LossGroup) -> Replica:
            return Replica(
                recipe,
                recipe.make_optimizer(loss_group.parameters),
                loss_group,
                sum_over=world.collectives.sum,
                **shard_options(root, axes.data_ranks, world.collectives.sum),
            )

        return prepare_loss_groups(recipe, prepare_group)


def shard(recipe: Recipe, mesh: DeviceMesh, **options: Any) -> ForwardWrapper:
    """Shard the recipe's model over the mesh, unit by unit. All ranks must call it.

    A unit is whole in memory while it is created, gathered or reduced. Parameters outside of all units are gathered for
    each forward of the returned wrapper, through which the model must be called. If that forward computes gradients,
    there are no units, because backward would drop the parameters of a unit before a second backward needs them.
    """
    model, materialize = recipe.module, recipe.materialize
    # fully_shard does not accept channels_last parameters. Activations stay channels_last, because the inputs are.
    model.to(memory_format=torch.contiguous_format)
    for unit in [] if recipe.differentiates else _units(model):
        materialize(unit)
        for submodule in unit:
            submodule.register_forward_hook(_copy_views)
        fully_shard(unit, mesh=mesh, **options, **_ignore_others(unit))
    materialize([model])
    root = ForwardWrapper(model)
    shard_together(root, mesh, **options)
    return root


def shard_together(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Shard all of a module's parameters that are not sharded yet, as one unit. All ranks must call it."""
    fully_shard(module, mesh=mesh, **options, **_ignore_others([module]))


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of this rank's peers along replicate and shard; None if it has none. All ranks must call it."""
    data = _data_mesh(mesh)
    if data is None or data.size() == 1:
        return None
    return (data if data.ndim == 1 else data._flatten()).get_group()


def data_options(mesh: DeviceMesh, shard_model: Callable[[DeviceMesh], nn.Module]) -> dict[str, Any]:
    """Return the options of Replica that combine gradients along the axes replicate and shard. All ranks must call it.

    shard_model: shards the model over a mesh, if there is an axis shard, and returns the sharded module.
    """
    group = data_group(mesh)

    def sum_over(flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=group)

    data = _data_mesh(mesh)
    if data is not None and "shard" in (data.mesh_dim_names or ()):
        if "tensor" in (mesh.mesh_dim_names or ()):
            mesh["shard", "tensor"]._flatten()  # otherwise DTensor reduces along each axis, and logs a warning
        return shard_options(shard_model(data), data.size(), sum_over)
    return {} if group is None else {"reduce": lambda parameters: sum_gradients(parameters, sum_over)}


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    axes = tuple(axis for axis in ("replicate", "shard") if axis in (mesh.mesh_dim_names or ()))
    return mesh[axes] if axes else None


def shard_options(root: nn.Module, num_ranks: int, sum_over: Callable[[torch.Tensor], object]) -> dict[str, Any]:
    """Return the options of Replica for a model that `shard` has sharded, with this number of data ranks."""
    return {
        "wrapper": root,
        "evaluation_wrapper": root,
        "loss_scale": num_ranks,  # FSDP averages gradients over the ranks, but the loss is summed
        "without_sync": lambda: _without_sync(root),
        "reduce": lambda parameters: _average_unsharded(parameters, sum_over, num_ranks),
        "after_write": lambda: _reshard(root),
    }


def check_sparse(module: nn.Module) -> list[str]:
    """Return a message if the model has an embedding with sparse gradients, which fully_shard cannot reduce."""
    embeddings = [
        (name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    names = [name for name, part in embeddings if part.sparse and part.weight.requires_grad]
    return [f"fully_shard cannot reduce the sparse gradients of {counted(names)}; try parallel=ddp"] if names else []


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    # torch loses updates of uneven complex shards, because view_as_real of such a DTensor is a copy.
    return parameter.dim() > 0 and parameter.numel() > 0 and not parameter.is_complex()


def _ignore_others(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the option of fully_shard that leaves scalar, empty and complex parameters whole on every rank."""
    others = {parameter for module in modules for parameter in module.parameters() if not _can_be_sharded(parameter)}
    return {"ignored_params": others} if others else {}


def _average_unsharded(
    parameters: Iterable[nn.Parameter], sum_over: Callable[[torch.Tensor], object], num_ranks: int
) -> None:
    """Average the gradients of parameters that are not sharded, as FSDP does the others'. All ranks must call it."""
    if whole := [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]:
        sum_gradients(whole, lambda flat: sum_over(flat.div_(num_ranks)))


def _copy_views(unit: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Copy outputs that are views (of Flatten, for example): an in-place operator on a view drops FSDP's hook."""
    return map_tensors(lambda tensor: tensor.clone() if tensor._is_view() else tensor, outputs)


@contextmanager
def _without_sync(model: nn.Module) -> Iterator[None]:
    """Let backward add up unsharded gradients on this rank; the next backward outside reduces them too."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _reshard(model: nn.Module) -> None:
    """Drop gathered parameters that remain after a forward without backward, such as those of the root."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(model: nn.Module) -> list[list[nn.Module]]:
    """Return the modules to gather together: those of a stage, or each module alone if the model offers no stages.

    All of them are modules that forward uses only by calls, because parameters are gathered before such a call and
    dropped after it. Modules that share parameters with others, or that are in several stages, are left to the root,
    whose parameters stay gathered during the forward.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    units: list[list[nn.Module]] = []
    for stage in stages_or_blocks(model):
        whole = [
            part for part in dict.fromkeys(whole_modules(model, stage)) if any(map(_can_be_sharded, part.parameters()))
        ]
        # Backward gathers a unit at the output of its last module. Only in a stage has each output a gradient.
        is_chain = offered(model, "stages") and set(whole) <= set(called_modules(model, stage))
        units += [whole] if is_chain else [[part] for part in whole]
    uses = Counter(parameter for unit in units for part in unit for parameter in part.parameters())
    units = [
        [part for part in unit if all(uses[p] == 1 and owners[p] <= {*part.modules()} for p in part.parameters())]
        for unit in units
    ]
    return [unit for unit in units if unit]
