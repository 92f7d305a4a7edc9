"""Pipelining: each rank has some consecutive stages of the model, and micro-batches go from rank to rank."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from runner.config.schema import Config
from runner.distributed.process_group import make_mesh
from runner.distributed.sync_batch_norm import has_batch_norm, use_group
from runner.distributed.world import World
from runner.parallel.pipeline_stage import Signal
from runner.parallel.pipeline_step import Pipelined
from runner.parallel.stage_balance import Chain, num_operations, num_parameters, partition, trainable_units
from runner.parallel.tied import TiedParameters, find_ties
from runner.training.deferred_init import probe
from runner.training.parts import attached_loss
from runner.training.strategy import Axes, Carries, Recipe
from runner.training.supervised import call

log = logging.getLogger(__name__)

SINGLE: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
LOOPED: dict[str, Any] = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, Any] = {"ZBV": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
SPLITTING = ("InterleavedZeroBubble", "ZBV", "DualPipeV")  # take the gradients of inputs and of weights apart


class Pipeline:
    """parallel=pipeline, over a mesh of replicate x stage: the ranks that `stages` leaves over are replicas.

    Its numbers are those of one process with micro_batches x parallel.micro_batches micro-batches.
    """

    needs_group = True
    meta_init = True  # no rank holds the whole model, at the start neither
    spans_devices = False
    carries: Carries = "supervised"
    fails_at_once = False

    def __init__(
        self,
        stages: int | None = None,
        schedule: Literal[
            "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "DualPipeV"
        ] = "GPipe",
        micro_batches: int = 4,
        virtual_stages: int | None = None,
        balance: Literal["parameters", "compute"] = "parameters",
    ):
        for key, value, least in (("stages", stages, 1), ("micro_batches", micro_batches, 1)):
            if value is not None and value < least:
                raise ValueError(f"parallel.{key}={value} must be at least {least}")
        if schedule in SINGLE and virtual_stages is not None:
            raise ValueError(
                f"parallel.virtual_stages={virtual_stages} has no effect on schedule={schedule}, which has one stage "
                f"per rank; try null, or parallel.schedule=Interleaved1F1B"
            )
        if schedule in LOOPED and virtual_stages is not None and virtual_stages < 2:
            raise ValueError(
                f"parallel.virtual_stages={virtual_stages} must be at least 2 for schedule={schedule}; try 2, or "
                f"parallel.schedule=1F1B"
            )
        if schedule in V_SHAPED and virtual_stages not in (None, 2):
            raise ValueError(f"parallel.virtual_stages={virtual_stages} must be 2 for schedule={schedule}, or null")
        self.stages, self.schedule, self.micro_batches, self.balance = stages, schedule, micro_batches, balance
        self.virtual_stages = 1 if schedule in SINGLE else virtual_stages or 2
        self._num_units: int | None = None  # of the model, when check has seen it
        self._synchronizes = False  # its BatchNorm, over replicas

    def axes(self, world_size: int) -> Axes:
        """stages=null is all ranks until `check` has seen the model; then as many as model and schedule take."""
        divisors = [size for size in range(world_size, 0, -1) if world_size % size == 0]
        wanted = self.stages
        if wanted is not None and wanted not in divisors:
            nearest = sorted(sorted(divisors, key=lambda size: abs(size - wanted))[:2])
            raise ValueError(
                f"parallel.stages={wanted} must divide the world of {world_size} rank{'s' * (world_size > 1)}; "
                f"try {' or '.join(map(str, nearest))}"
            )
        candidates = divisors if wanted is None else [wanted]
        stages = next((size for size in candidates if not self._objection(size, divisors)), None)
        if stages is None:
            raise ValueError(self._objection(candidates[-1], divisors))
        return Axes(replicate=world_size // stages, stage=stages, micro_batches=self.micro_batches)

    def _objection(self, stages: int, divisors: list[int]) -> str | None:
        """Why the model or the schedule cannot have so many stages."""
        groups, count = stages * self.virtual_stages, self.micro_batches
        if self._num_units is not None and groups > self._num_units:
            fitting = [size for size in divisors if size * self.virtual_stages <= self._num_units]
            fix = f"parallel.stages={fitting[0]}" if fitting else "parallel.schedule=1F1B"
            times = f" x {self.virtual_stages} per rank" if self.virtual_stages > 1 else ""
            offered = f"{self._num_units} stage" + "s" * (self._num_units > 1)
            return (
                f"parallel.stages={stages}{times} must be at most the {offered} with parameters that the model "
                f"offers; try {fix}, or a deeper model"
            )
        least = {"1F1B": stages, "DualPipeV": groups}.get(self.schedule, 1)
        if count < least:
            return (
                f"parallel.micro_batches={count} must be at least the {least} stages of schedule={self.schedule}; "
                f"try {least}"
            )
        rounds = max(1, count // stages)
        if self.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
            return (
                f"parallel.micro_batches={count} must be a multiple of {rounds}, the rounds in which "
                f"schedule={self.schedule} takes them over {stages} ranks; try {count // stages * stages}"
            )
        replicas = divisors[0] // stages
        splits_function = self._synchronizes and replicas > 1 and self.schedule in SPLITTING
        if splits_function and not _splits_backward_of_functions():
            return (
                f"parallel.schedule={self.schedule} with BatchNorm synchronized over {replicas} replicas needs a newer "
                f"torch than {torch.__version__} (2.15 will do); try parallel.schedule=1F1B"
            )
        return None

    def check(self, config: Config, module: nn.Module) -> list[str]:
        if not hasattr(module, "stages"):
            return ["parallel=pipeline needs a model that offers its stages(); try model=convnet or model=mlp"]
        messages = []
        if hasattr(module, "place"):
            messages.append(
                "parallel=pipeline gives each rank stages on one device, but this model spreads its own over several; "
                "try model=convnet, or parallel=ddp"
            )
        if config.precision == "fp16":
            messages.append("precision=fp16: parallel=pipeline has no gradient scaler over stages; try precision=bf16")
        if config.compile:
            messages.append("compile=true compiles a whole model, which no rank of parallel=pipeline has; set it false")
        units = trainable_units(_stages(module))
        names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        if (loss := attached_loss(module)) is not None:
            units[-1].add_module("loss", loss)  # to be counted as one of the last stage's
        seen = [id(tensor) for unit in units for tensor in (*unit.parameters(), *unit.buffers())]
        if left_out := [name for key, name in names.items() if key not in seen]:
            messages.append(
                f"parallel=pipeline needs stages() with all tensors, but the model's leave out {left_out[0]}"
            )
        buffers = {id(buffer) for buffer in module.buffers()}
        if tied := [names[key] for key in names if key in buffers and seen.count(key) > 1]:
            messages.append(
                f"parallel=pipeline runs each stage by itself, but the buffer {tied[0]} is in two; give each its own"
            )
        self._num_units = len(units)
        self._synchronizes = config.sync_batchnorm is not False and has_batch_norm(module)
        return messages

    def prepare(self, recipe: Recipe, world: World) -> Pipelined:
        axes = self.axes(world.world_size)
        mesh = make_mesh(world.device, replicate=axes.replicate, stage=axes.stage)
        replicas, pipeline = mesh["replicate"].get_group(), mesh["stage"].get_group()
        use_group(recipe.module, replicas)

        units = trainable_units(_stages(recipe.module))
        recipe.module.eval()
        costs = num_parameters(units) if self.balance == "parameters" else num_operations(units, recipe.sample[0])
        ranges = partition(costs, axes.stage * self.virtual_stages)
        groups = [Chain(*units[r.start : r.stop]) for r in ranges]
        owners = [self.owner(group, axes.stage) for group in range(len(groups))]
        if world.rank == 0:
            for line in _describe(ranges, num_parameters(groups), owners, axes):
                log.info("%s", line)
        own = {g: layers for g, layers in enumerate(groups) if owners[g] == mesh.get_local_rank("stage")}
        loss = attached_loss(recipe.module)
        ties = find_ties(recipe.module, groups, owners)
        signals = _probe(groups, own, recipe)
        tied = TiedParameters(recipe.module, ties, own.values(), mesh)
        recipe.module.train()
        held = [*own.values(), *([loss] if loss is not None and len(groups) - 1 in own else [])]
        for tensor in (t for layers in held for t in (*layers.parameters(), *layers.buffers())):
            dist.broadcast(tensor.data, group_src=0, group=replicas)
        return Pipelined(
            recipe,
            own,
            owners,
            signals,
            make_schedule=self._make_schedule,
            num_micro_batches=self.micro_batches,
            sum_over=world.collectives.sum,
            replicas=replicas,
            pipeline=pipeline,
            tied=tied,
        )

    def _make_schedule(self, stages: Sequence[PipelineStage], loss: Callable[..., torch.Tensor]) -> Any:
        options = {"n_microbatches": self.micro_batches, "loss_fn": loss, "scale_grads": False}
        if self.schedule in SINGLE:
            (stage,) = stages
            return SINGLE[self.schedule](stage, **options)
        return (LOOPED | V_SHAPED)[self.schedule]([*stages], **options)

    def owner(self, group: int, stages: int) -> int:
        """Which rank of a pipeline has the group of stages: round and round, or there and back again."""
        if self.schedule in V_SHAPED and group >= stages:
            return 2 * stages - 1 - group
        return group % stages


def _stages(module: Any) -> list[nn.Module]:
    stages: list[nn.Module] = module.stages()
    return stages


def _probe(groups: list[Chain], own: dict[int, Chain], recipe: Recipe) -> list[Signal]:
    """What each group of stages but the last gives for a sample, so that its neighbour knows what to expect.

    This rank's groups get their weights; those of others lose them, where they were built with them.
    """
    signals, features = [], recipe.sample[0]
    for number, group in enumerate(groups):
        if number in own:
            recipe.materialize([group])
        if number < len(groups) - 1:
            function = call if number == 0 else Chain.__call__
            with torch.no_grad(), recipe.precision.autocast():
                features = probe(group, function, features, device=recipe.device)
            signals.append(Signal(features.shape[1:], features.dtype))
        if number not in own:
            kept = (*own.values(), *groups[number + 1 :])  # which may share some of it
            still = {id(tensor) for other in kept for tensor in other.parameters()}
            for tensor in (*group.parameters(), *group.buffers()):
                if id(tensor) not in still and not tensor.is_meta:
                    tensor.data = tensor.data.new_empty(0)
    return signals


def _splits_backward_of_functions() -> bool:
    """Whether torch continues a backward from the node of an autograd.Function, as zero-bubble schedules need."""
    leaf = torch.zeros(1, requires_grad=True)
    node = _Copy.apply(leaf).grad_fn
    try:
        torch.autograd.grad([GradientEdge(node, 0)], [leaf], [torch.ones(1)])
    except RuntimeError:  # torch 2.11 has none of its metadata
        return False
    return True


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        return grad_output


def _describe(ranges: list[range], sizes: list[int], owners: list[int], axes: Axes) -> list[str]:
    lines = []
    for rank in range(axes.stage):
        own = [group for group, owner in enumerate(owners) if owner == rank]
        stages = ", ".join(
            f"{ranges[g].start}-{ranges[g][-1]}" if len(ranges[g]) > 1 else f"{ranges[g].start}" for g in own
        )
        share = sum(sizes[g] for g in own) / sum(sizes)
        ranks = " and ".join(str(replica * axes.stage + rank) for replica in range(axes.replicate))
        lines.append(f"pipeline rank {ranks}: stages {stages} of {ranges[-1].stop}, {share:.1%} of the parameters")
    return lines
