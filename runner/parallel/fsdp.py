"""Fully sharded data parallel: each rank keeps a shard of every parameter and gathers a block's when it is needed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.schema import Config
from runner.distributed.process_group import make_mesh
from runner.distributed.world import World
from runner.parallel.gradient_sum import sum_gradients
from runner.parallel.replica import Replica
from runner.parallel.turns import take_turns
from runner.training.objective import Turn, Within
from runner.training.parts import stages_or_children, what_forward_calls
from runner.training.pytree import map_tensors
from runner.training.strategy import Axes, Carries, Recipe, Spread


class FSDP:
    """parallel=fsdp: torch's fully_shard (FSDP2) over each of the model's stages, then over what is left.

    replicate: hybrid sharding: the world is this many copies of the model, each sharded over the other ranks.
    reshard_after_forward: drop the gathered parameters after forward, and gather them again in backward.
    mixed_precision: gather the parameters in bfloat16 and reduce the gradients in float32.
    meta_init: no rank holds the whole model, at the start neither; build.py reads it.
    On a CPU, what is freed is kept for later; MALLOC_MMAP_THRESHOLD_=1048576 in the environment gives it back.
    """

    needs_group = True
    spans_devices = False
    carries: Carries = "several_losses"
    fails_at_once = False

    def __init__(
        self,
        replicate: int = 1,
        reshard_after_forward: bool = True,
        mixed_precision: bool = False,
        meta_init: bool = True,
    ):
        if replicate < 1:
            raise ValueError(f"parallel.replicate={replicate} must be at least 1")
        self.replicate, self.reshard_after_forward = replicate, reshard_after_forward
        self.mixed_precision, self.meta_init = mixed_precision, meta_init

    def axes(self, world_size: int) -> Axes:
        check_divides("parallel.replicate", self.replicate, world_size)
        return Axes(replicate=self.replicate, shard=world_size // self.replicate)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        if self.mixed_precision and config.precision != "bf16":
            # Another precision says that products are computed in another type, and they would not be.
            return [
                f"parallel.mixed_precision=true computes in bfloat16, but precision={config.precision} does not; "
                "try precision=bf16"
            ]
        if config.precision == "fp16" and (scalars := [n for n, p in module.named_parameters() if p.dim() == 0]):
            # It unscales the gradients in one operator, which takes no whole and sharded ones together.
            return [
                f"precision=fp16: parallel=fsdp keeps {scalars[0]} whole, a scalar, and cannot scale its gradient with "
                "those of shards; try precision=bf16, or give it the shape [1]"
            ]
        return []

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        axes = self.axes(world.world_size)
        mesh = make_mesh(world.device, replicate=axes.replicate, shard=axes.shard)
        mesh = mesh if axes.replicate > 1 else mesh["shard"]
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward}
        if self.mixed_precision:
            for layer in [part for part in recipe.module.modules() if isinstance(part, _BatchNorm)]:
                # Its statistics are float32, and with those it takes no weights in bfloat16.
                recipe.materialize([layer])
                fully_shard(layer, mesh=mesh, **options)
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        root = shard(recipe.module, mesh, recipe.materialize, **options)

        def spread(turn: Turn) -> Replica:
            return Replica(
                recipe,
                recipe.make_optimizer(turn.parameters),
                turn,
                sum_over=world.collectives.sum,
                within=root,
                evaluate_within=root,
                loss_scale=axes.data_ranks,  # FSDP averages over the ranks, the loss is summed over them
                without_sync=lambda: without_sync(root),
                reduce=lambda parameters: average_whole(parameters, world.collectives.sum, axes.data_ranks),
                after_change=lambda: reshard(root),
            )

        return take_turns(recipe, spread)


def check_divides(key: str, size: int, world_size: int) -> None:
    """Raises ValueError unless an axis of this size fits the world."""
    if world_size % size == 0:
        return
    fitting = [number for number in range(1, world_size + 1) if world_size % number == 0]
    nearest = sorted(sorted(fitting, key=lambda number: abs(number - size))[:2])
    ranks = f"{world_size} rank" + "s" * (world_size > 1)
    raise ValueError(f"{key}={size} must divide the world of {ranks}; try {' or '.join(map(str, nearest))}")


def shard(
    model: nn.Module, mesh: DeviceMesh, materialize: Callable[[Iterable[nn.Module]], None], **options: Any
) -> Within:
    """Shard the model over the mesh, unit by unit: a unit is whole in memory while it is made, gathered or reduced.

    What is in no unit is gathered for each forward of what is returned, which all that calls the model goes through.
    All ranks must call it.
    """
    # fully_shard takes no channels_last parameter. Activations stay so: the inputs are, and convolutions go by them.
    model.to(memory_format=torch.contiguous_format)
    for unit in _units(model):
        materialize(unit)
        for part in unit:
            part.register_forward_hook(_without_views)
        fully_shard(unit, mesh=mesh, **options, **_leave_scalars(unit))
    materialize([model])
    root = Within(model)
    fully_shard(root, mesh=mesh, **options, **_leave_scalars([model]))
    return root


def _leave_scalars(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """An option of fully_shard, which takes no parameter without a dimension: every rank keeps those whole."""
    scalars = {parameter for module in modules for parameter in module.parameters() if parameter.dim() == 0}
    return {"ignored_params": scalars} if scalars else {}


def average_whole(
    parameters: Iterable[nn.Parameter], sum_over: Callable[[torch.Tensor], object], num_ranks: int
) -> None:
    """Of what is not sharded, average the gradients as FSDP does the others'. All ranks must call it."""
    if whole := [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]:
        sum_gradients(whole, lambda flat: sum_over(flat.div_(num_ranks)))


def _without_views(unit: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Copies of what is a view (of Flatten, say): an operator in place on one would drop FSDP's hook for backward."""
    return map_tensors(lambda tensor: tensor.clone() if tensor._is_view() else tensor, outputs)


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Let backward add up unsharded gradients on this rank; the next one outside reduces them too."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def reshard(model: nn.Module) -> None:
    """Drop the gathered parameters that a forward without backward has left, as of the root."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _units(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules to gather together: those of a stage, or each child where the model offers no stages.

    They are modules that the forward calls, for it is before and after a call that parameters are gathered and dropped.
    What shares parameters with others is left to the root, whose are whole as long as the model runs.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    for stage in stages_or_children(model):
        unit = [part for part in what_forward_calls(model, stage) if any(p.dim() for p in part.parameters())]
        inside = {module for part in unit for module in part.modules()}
        if unit and all(owners[parameter] <= inside for part in unit for parameter in part.parameters()):
            yield unit
