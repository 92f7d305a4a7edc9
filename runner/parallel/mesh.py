"""Several kinds of parallelism at once: a mesh of replicas, shards, positions, stages, and sharded layers."""

import math
from dataclasses import replace
from typing import Literal, Self

from torch import nn

from runner.distributed.process_group import make_mesh
from runner.distributed.world import World
from runner.parallel.allreduce import AllReduce
from runner.parallel.fsdp import FSDP, check_sparse
from runner.parallel.pipeline import Pipeline, Schedule, trainable_units
from runner.parallel.pipeline_replica import find_ties
from runner.parallel.sequence import prepare_positions
from runner.parallel.tp import TP, check_layers, prepare_layers
from runner.training.mode import Axes, Parallel, ParallelModel, Recipe, check_divides
from runner.training.model.activation_checkpointing import Extent
from runner.training.refusal import Refusal

_COMPILED = Refusal("compile", "{setting} has no effect with parallel.sequence=N, which calls stages()", "set it false")


class Mesh(Parallel):
    """parallel=mesh: the axes of allreduce, fsdp, pipeline and tp, and parts of sequences, combined in one mesh."""

    needs_group = True
    fails_at_once = False
    refusals = (
        *(each.of_axis("parallel=pipeline", "parallel.stage=N") for each in Pipeline.refusals),
        *(each.of_axis("parallel=tp", "parallel.tensor=N") for each in TP.refusals),
        _COMPILED,
    )

    def __init__(
        self,
        replicate: int | None = 1,
        shard: int | None = None,
        sequence: int | None = 1,
        stage: int | None = 1,
        tensor: int | None = 1,
        schedule: Schedule = "GPipe",
        micro_batches: int = 4,
        virtual_stages: int | None = None,
        balance: Literal["parameters", "compute"] = "parameters",
    ):
        self._sizes = {"replicate": replicate, "shard": shard, "sequence": sequence, "stage": stage, "tensor": tensor}
        free = [axis for axis, size in self._sizes.items() if size is None]
        if len(free) > 1:
            keys = " and ".join(f"parallel.{axis}=null" for axis in free)
            raise ValueError(f"{keys}: only one axis can be computed; try parallel.{free[-1]}=1")
        self.pipeline = Pipeline(None, schedule, micro_batches, virtual_stages, balance)
        options, defaults = vars(self.pipeline), vars(Pipeline())
        self._changed = [f"parallel.{key}={value}" for key, value in options.items() if value != defaults[key]]
        self.declare(Axes(**{axis: size or 1 for axis, size in self._sizes.items()}))

    def axes(self, world_size: int) -> Axes:
        sizes = {axis: size for axis, size in self._sizes.items() if size is not None}
        for axis, size in sizes.items():
            check_divides(f"parallel.{axis}", size, world_size)
        product = math.prod(sizes.values())
        is_free = len(sizes) < len(self._sizes)
        if world_size % product or (product != world_size and not is_free):
            factors = " x ".join(f"parallel.{axis}={size}" for axis, size in sizes.items() if size > 1)
            rule = "divide" if is_free else "equal"
            raise ValueError(
                f"{factors or 'parallel.shard=1'} must {rule} the number of ranks, {world_size}; start {product}, or "
                "change an axis"
            )
        axes = Axes(**{axis: sizes.get(axis, world_size // product) for axis in self._sizes})
        others = [f"parallel.{axis}={size}" for axis in ("stage", "tensor") if (size := getattr(axes, axis)) > 1]
        if axes.sequence > 1 and others:
            raise ValueError(
                f"parallel.sequence={axes.sequence} cannot be combined with {others[0]}; set one of them 1"
            )
        if axes.stage > 1:
            return replace(axes, micro_batches=self.pipeline.as_axis(axes.stage).axes(world_size).micro_batches)
        if self._changed:
            raise ValueError(f"{self._changed[0]} has no effect without a pipeline; try parallel.stage=2")
        return axes

    def at(self, world_size: int) -> Self:
        mode = super().at(world_size)
        mode.pipeline = self.pipeline.as_axis(mode.resolved_axes.stage)
        mode.declare(mode.resolved_axes)
        return mode

    def declare(self, axes: Axes) -> None:
        """Set the attributes of a mode with these axes, which determine what it supports."""
        kind = Pipeline if axes.stage > 1 else TP if axes.tensor > 1 else FSDP if axes.shard > 1 else AllReduce
        self.meta_init, self.supported_objectives = axes.stage > 1 or axes.shard > 1, kind.supported_objectives
        self.shards_matrices = axes.shard > 1 or axes.tensor > 1
        self.splits_parameters, self.draws_in_backward = axes.stage > 1 or axes.tensor > 1, axes.stage == 1
        of_stages = [each.of_axis("parallel=pipeline", f"parallel.stage={axes.stage}") for each in Pipeline.refusals]
        of_layers = [each.of_axis("parallel=tp", f"parallel.tensor={axes.tensor}") for each in TP.refusals]
        self.refusals = (*(of_stages if axes.stage > 1 else ()), *(of_layers if axes.tensor > 1 else ()))
        self.splits_outputs = f"parallel.sequence={axes.sequence}" if axes.sequence > 1 else ""
        if axes.sequence > 1:
            self.supported_objectives, self.refusals = "supervised", (_COMPILED.of_axis("=N", f"={axes.sequence}"),)

    def check(self, module: nn.Module, activation_checkpointing: Extent) -> list[str]:
        axes, messages = self.resolved_axes, list[str]()
        if axes.stage > 1:
            messages += self.pipeline.check(module, activation_checkpointing)
        if axes.tensor > 1:
            messages += check_layers(module, f"parallel.tensor={axes.tensor}", axes, activation_checkpointing)
        if axes.shard > 1:
            messages += check_sparse(module)
            if axes.stage > 1 and self.pipeline.virtual_stages > 1 and not messages:
                messages += self._check_ties(module)
        return messages

    def fit(self, module: nn.Module) -> Self:
        if self.resolved_axes.stage > 1:
            self.pipeline.at(self.resolved_axes.size).fit(module)  # raises ValueError for too many stages
        return self

    def _check_ties(self, module: nn.Module) -> list[str]:
        """Return a message if stages share a parameter. torch cannot shard it in two stages of one rank."""
        units = trainable_units(module.stages())  # type: ignore[operator]
        ties = find_ties(module, units, range(len(units)))
        return [
            f"parallel.shard={self.resolved_axes.shard}: two stages of a rank may share {tie.names[0]}, which FSDP "
            "cannot shard twice; try parallel.schedule=1F1B or parallel.shard=1"
            for tie in ties
            if len(tie.ranks) > 1
        ][:1]

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        axes = self.resolved_axes
        sizes = {"replicate": axes.replicate, "shard": axes.shard, "stage": axes.stage, "tensor": axes.tensor}
        if axes.stage > 1 or axes.tensor > 1:
            mesh = make_mesh(world.device, **{axis: size for axis, size in sizes.items() if size > 1})
            if axes.stage > 1:
                return self.pipeline.prepare_stages(recipe, world, mesh)
            return prepare_layers(recipe, world, mesh)
        if axes.sequence > 1:
            return prepare_positions(recipe, world, axes)
        single = FSDP(axes.replicate) if axes.shard > 1 else AllReduce()
        return single.at(axes.size).prepare(recipe, world)
