"""Pipelining: each rank has some consecutive layers of the model, and micro-batches pass from rank to rank."""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.flop_counter import FlopCounterMode

from runner.distributed.process_group import make_mesh
from runner.distributed.sync_batch_norm import use_group
from runner.distributed.world import World
from runner.input.pytree import map_tensors
from runner.objectives.supervised import call_model
from runner.parallel.fsdp import data_group
from runner.parallel.pipeline_replica import (
    Chain,
    PipelineReplica,
    StageOutput,
    TiedParameters,
    find_ties,
    pipelines,
)
from runner.parallel.tp import shard_layers
from runner.training.mode import Axes, Parallel, Recipe, check_divides
from runner.training.model.activation_checkpointing import Extent
from runner.training.model.deferred_init import probe
from runner.training.model.submodules import attached_loss, offered
from runner.training.refusal import Refusal

log = logging.getLogger(__name__)

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "DualPipeV"]
SINGLE = ("GPipe", "1F1B")
V_SHAPED = ("ZBV", "DualPipeV")


class Pipeline(Parallel):
    """parallel=pipeline, over a mesh of replicate x stage: `stages` ranks form a pipeline; further ranks are replicas.

    Its numbers are those of one process with micro_batches x parallel.micro_batches micro-batches.
    """

    needs_group = True
    meta_init = True
    splits_parameters = True
    draws_in_backward = False
    supported_objectives = "supervised"
    fails_at_once = False
    mode, stages_key = "parallel=pipeline", "parallel.stages"  # as in messages
    refusals = (
        Refusal(
            "precision",
            "{setting}: parallel=pipeline has no gradient scaler over stages",
            "try precision=bf16",
            values=("fp16",),
        ),
        Refusal(
            "compile",
            "{setting} compiles a whole model, which no rank of parallel=pipeline has",
            "set it false",
        ),
    )

    def __init__(
        self,
        stages: int | None = None,
        schedule: Schedule = "GPipe",
        micro_batches: int = 4,
        virtual_stages: int | None = None,
        balance: Literal["parameters", "compute"] = "parameters",
    ):
        if micro_batches < 1:
            raise ValueError(f"parallel.micro_batches={micro_batches} must be at least 1")
        least, most = (1, 1) if schedule in SINGLE else (2, math.inf)
        if schedule in V_SHAPED:
            most = 2
        if virtual_stages is not None and not least <= virtual_stages <= most:
            rule = f"{least}" if least == most else f"at least {least}"
            raise ValueError(
                f"parallel.virtual_stages={virtual_stages} must be {rule} for schedule={schedule}; try null"
            )
        self.stages, self.schedule, self.micro_batches, self.balance = stages, schedule, micro_batches, balance
        self.virtual_stages = virtual_stages or least

    def axes(self, world_size: int) -> Axes:
        """Return the mesh. stages=null: as many as the schedule allows."""
        return self._axes(world_size)

    def fit(self, module: nn.Module) -> Self:
        """Return this mode for the model. stages=null: as many as model and schedule allow."""
        pipeline = copy.copy(self)
        num_units = len(trainable_units(module.stages()))  # type: ignore[operator]
        pipeline.resolved_axes = self._axes(self.resolved_axes.size, num_units)
        return pipeline

    def as_axis(self, stages: int) -> Self:
        """Return this pipeline as the axis stage of a mesh, which its messages then name."""
        pipeline = copy.copy(self)
        pipeline.stages, pipeline.stages_key, pipeline.mode = stages, "parallel.stage", f"parallel.stage={stages}"
        return pipeline

    def _axes(self, world_size: int, num_units: int | None = None) -> Axes:
        """Return the mesh. num_units: of the model, which is None before the model is known."""
        divisors = [size for size in range(world_size, 0, -1) if world_size % size == 0]
        if self.stages is not None:
            check_divides(self.stages_key, self.stages, world_size)
        candidates = divisors if self.stages is None else [self.stages]
        stages = next((size for size in candidates if not self._objection(size, divisors, num_units)), None)
        if stages is None:
            raise ValueError(self._objection(candidates[-1], divisors, num_units))
        return Axes(replicate=world_size // stages, stage=stages, micro_batches=self.micro_batches)

    def _objection(self, stages: int, divisors: list[int], num_units: int | None) -> str | None:
        """Return a message if the model or the schedule does not allow this number of ranks in a pipeline."""
        total, count = stages * self.virtual_stages, self.micro_batches
        if num_units is not None and total > num_units:
            fitting = [size for size in divisors if size * self.virtual_stages <= num_units]
            fix = f"{self.stages_key}={fitting[0]}" if fitting else "parallel.schedule=1F1B"
            return (
                f"{self.stages_key}={stages} x {self.virtual_stages} per rank must be at most {num_units}, the "
                f"number of the model's stages with parameters; try {fix}, or a deeper model"
            )
        least = {"1F1B": stages, "DualPipeV": total}.get(self.schedule, 1)
        if count < least:
            return f"parallel.micro_batches={count} must be at least {least} for schedule={self.schedule}"
        rounds = max(1, count // stages)
        if self.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
            return (
                f"parallel.micro_batches={count} must be a multiple of {rounds} for schedule={self.schedule} on "
                f"{stages} ranks; try {count // stages * stages}"
            )
        return None

    def check(self, module: nn.Module, activation_checkpointing: Extent) -> list[str]:
        if not offered(module, "stages"):
            return [f"{self.mode} needs a model that offers its stages(); try model=convnet or model=mlp"]
        messages = []
        if offered(module, "place", []):
            messages.append(f"{self.mode} does not support a model that is spread over devices; try parallel=ddp")
        units = trainable_units(module.stages())  # type: ignore[operator]
        names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        if (loss := attached_loss(module)) is not None:
            units[-1].add_module("loss", loss)  # counts as part of the last stage
        seen = [id(tensor) for unit in units for tensor in (*unit.parameters(), *unit.buffers())]
        if left_out := [name for key, name in names.items() if key not in seen]:
            messages.append(f"{self.mode} needs all tensors in stages(), but the model's leave out {left_out[0]}")
        buffers, saved = {id(buffer) for buffer in module.buffers()}, module.state_dict()
        # A buffer that is not saved, such as the frequencies of rotary positions, is constant and equal on all ranks.
        if tied := [name for key, name in names.items() if key in buffers and name in saved and seen.count(key) > 1]:
            messages.append(f"{self.mode}: two stages share the buffer {tied[0]}; give each a separate one")
        return messages

    def prepare(self, recipe: Recipe, world: World) -> PipelineReplica:
        axes = self.resolved_axes
        return self.prepare_stages(recipe, world, make_mesh(world.device, replicate=axes.replicate, stage=axes.stage))

    def prepare_stages(self, recipe: Recipe, world: World, mesh: DeviceMesh) -> PipelineReplica:
        """Prepare the model over a mesh with the axis stage, and any of the other axes. All ranks must call it."""
        module, num_ranks, replicas = recipe.module, mesh["stage"].size(), data_group(mesh)
        if replicas is not None:
            use_group(module, replicas)

        units = trainable_units(module.stages())  # type: ignore[operator]
        module.eval()
        costs = num_parameters(units) if self.balance == "parameters" else num_operations(units, recipe.sample[0])
        ranges = partition(costs, num_ranks * self.virtual_stages)
        stages = [Chain(*units[r.start : r.stop]) for r in ranges]
        owners = [self.owner(stage, num_ranks) for stage in range(len(stages))]
        if world.rank == 0:
            _log_stages(ranges, num_parameters(stages), owners, mesh)
        own = {n: stage for n, stage in enumerate(stages) if owners[n] == mesh.get_local_rank("stage")}
        loss = attached_loss(module)
        ties = find_ties(module, stages, owners)
        outputs = _materialize(stages, own, recipe)
        tied = TiedParameters(module, ties, own.values(), mesh)
        module.train()
        local = [*own.values(), *([loss] if loss is not None and len(stages) - 1 in own else [])]
        for tensor in (t for submodule in local for t in (*submodule.parameters(), *submodule.buffers())):
            if replicas is not None:
                dist.broadcast(tensor.data, group_src=0, group=replicas)
        if "tensor" in (mesh.mesh_dim_names or ()):
            for stage in own.values():
                shard_layers(module, stage, mesh["tensor"], recipe.draws)
        options: dict[str, Any] = {"make_schedule": self._make_schedule, "num_micro_batches": self.micro_batches}
        options |= {"sum_over": world.collectives.sum, "mesh": mesh, "tied": tied}
        return PipelineReplica(recipe, own, owners, outputs, **options)

    def _make_schedule(self, stages: Sequence[PipelineStage], loss: Callable[..., torch.Tensor]) -> Any:
        options = {"n_microbatches": self.micro_batches, "loss_fn": loss, "scale_grads": False}
        kind: Any = get_schedule_class("ZBVZeroBubble" if self.schedule == "ZBV" else self.schedule)
        return kind(stages[0] if self.schedule in SINGLE else [*stages], **options)

    def owner(self, stage: int, num_ranks: int) -> int:
        """Return the rank of a pipeline that has the stage: round-robin, or back and forth in a V-shaped schedule."""
        if self.schedule in V_SHAPED and stage >= num_ranks:
            return 2 * num_ranks - 1 - stage
        return stage % num_ranks


def _materialize(stages: list[Chain], own: dict[int, Chain], recipe: Recipe) -> list[StageOutput]:
    """Create the weights of this rank's stages, and return the outputs that the stages except the last send."""
    outputs, features = [], recipe.sample[0]
    for number, stage in enumerate(stages):
        if number in own:
            recipe.materialize([stage])
        if number < len(stages) - 1:
            with torch.no_grad(), recipe.precision.autocast():
                features = probe(stage, call_model, features, device=recipe.device)
            outputs.append(StageOutput(features.shape[1:], features.dtype))
    return outputs


def _log_stages(ranges: list[range], sizes: list[int], owners: list[int], mesh: DeviceMesh) -> None:
    for rank, ranks_of_stage in enumerate(zip(*pipelines(mesh), strict=True)):
        own = [stage for stage, owner in enumerate(owners) if owner == rank]
        units = ", ".join("-".join(dict.fromkeys((str(ranges[n][0]), str(ranges[n][-1])))) for n in own)
        fraction = sum(sizes[n] for n in own) / sum(sizes)
        ranks = " and ".join(map(str, ranks_of_stage))
        log.info(
            "pipeline rank %s: stages %s of %s, %.1f%% of the parameters", ranks, units, ranges[-1].stop, 100 * fraction
        )


def trainable_units(model_stages: Sequence[nn.Module]) -> list[Chain]:
    """Join each stage without trained parameters to the previous stage, or at the start to the next one.

    A rank of a pipeline needs something to train, and what it sends needs a gradient.
    """
    units: list[list[nn.Module]] = []
    has_weights = False  # whether the last unit has any
    for stage in model_stages:
        trains = any(parameter.requires_grad for parameter in stage.parameters())
        if not units or (trains and has_weights):
            units.append([])
            has_weights = False
        units[-1].append(stage)
        has_weights |= trains
    return [Chain(*unit) for unit in units]


def num_parameters(units: Sequence[nn.Module]) -> list[int]:
    return [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]


def num_operations(units: Sequence[nn.Module], inputs: Any) -> list[int]:
    """Count the floating-point operations of each unit. They are not timed, because all ranks must agree.

    inputs: those of one sample. The units should be in evaluation mode; they may be on the meta device.
    """
    counts = []
    features = map_tensors(torch.Tensor.cpu, inputs)
    with torch.no_grad():
        for unit in units:
            with FlopCounterMode(display=False) as counter:
                features = probe(unit, call_model, features)
            counts.append(counter.get_total_flops())
    return counts


def partition(costs: Sequence[int], num_groups: int) -> list[range]:
    """Split the costs into consecutive, non-empty groups, with the smallest possible largest sum.

    The slowest stage sets a pipeline's pace. Of several such partitions, the most even one is returned.
    """
    assert 1 <= num_groups <= len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    # best[end]: (largest sum, sum of squares, cuts) of costs[:end] in the number of groups so far
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [0])}
    for group in range(1, num_groups + 1):
        longer = {}
        for end in range(group, len(costs) - (num_groups - group) + 1):
            longer[end] = min(
                (max(largest, sums[end] - sums[start]), squares + (sums[end] - sums[start]) ** 2, [*cuts, end])
                for start, (largest, squares, cuts) in best.items()
                if start < end
            )
        best = longer
    return [range(start, end) for start, end in pairwise(best[len(costs)][2])]
