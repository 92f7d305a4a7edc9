"""Pipelining: each rank has some consecutive layers of the model, and micro-batches pass from rank to rank."""

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
from runner.objectives.supervised import call_model
from runner.parallel.pipeline_partition import Chain, num_operations, num_parameters, partition, trainable_units
from runner.parallel.pipeline_replica import PipelineReplica
from runner.parallel.pipeline_stage import StageOutput
from runner.parallel.pipeline_ties import TiedParameters, find_ties
from runner.training.mode import Axes, Parallel, Recipe, check_divides
from runner.training.model.deferred_init import probe
from runner.training.model.submodules import attached_loss

log = logging.getLogger(__name__)

SINGLE: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
LOOPED: dict[str, Any] = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, Any] = {"ZBV": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
# Schedules that compute the gradients of inputs and of weights separately.
SPLITTING = ("InterleavedZeroBubble", "ZBV", "DualPipeV")


class Pipeline(Parallel):
    """parallel=pipeline, over a mesh of replicate x stage: `stages` ranks form a pipeline, of which there are replicas.

    Its numbers are those of one process with micro_batches x parallel.micro_batches micro-batches.
    """

    needs_group = True
    meta_init = True
    supported_objectives = "supervised"
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
        for key, value in (("stages", stages), ("micro_batches", micro_batches)):
            if value is not None and value < 1:
                raise ValueError(f"parallel.{key}={value} must be at least 1")
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
        self._num_units: int | None = None  # of the model, known after `check`
        self._synchronizes = False  # its BatchNorm over replicas, known after `check`

    def axes(self, world_size: int) -> Axes:
        """Return the mesh. stages=null is as many as model and schedule allow; before `check`, it is all ranks."""
        divisors = [size for size in range(world_size, 0, -1) if world_size % size == 0]
        if self.stages is not None:
            check_divides("parallel.stages", self.stages, world_size)
        candidates = divisors if self.stages is None else [self.stages]
        stages = next((size for size in candidates if not self._objection(size, divisors)), None)
        if stages is None:
            raise ValueError(self._objection(candidates[-1], divisors))
        return Axes(replicate=world_size // stages, stage=stages, micro_batches=self.micro_batches)

    def _objection(self, stages: int, divisors: list[int]) -> str | None:
        """Return a message if the model or the schedule does not allow this number of ranks in a pipeline."""
        total, count = stages * self.virtual_stages, self.micro_batches
        if self._num_units is not None and total > self._num_units:
            fitting = [size for size in divisors if size * self.virtual_stages <= self._num_units]
            fix = f"parallel.stages={fitting[0]}" if fitting else "parallel.schedule=1F1B"
            times = f" x {self.virtual_stages} per rank" if self.virtual_stages > 1 else ""
            offered = f"{self._num_units} stage" + "s" * (self._num_units > 1)
            return (
                f"parallel.stages={stages}{times} must be at most the {offered} with parameters that the model "
                f"offers; try {fix}, or a deeper model"
            )
        least = {"1F1B": stages, "DualPipeV": total}.get(self.schedule, 1)
        if count < least:
            return (
                f"parallel.micro_batches={count} must be at least the {least} stages of schedule={self.schedule}; "
                f"try {least}"
            )
        rounds = max(1, count // stages)
        if self.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
            return (
                f"parallel.micro_batches={count} must be a multiple of {rounds}, the number of rounds in which "
                f"schedule={self.schedule} processes them on {stages} ranks; try {count // stages * stages}"
            )
        replicas = divisors[0] // stages
        splits_function = self._synchronizes and replicas > 1 and self.schedule in SPLITTING
        if splits_function and not _splits_backward_of_functions():
            return (
                f"parallel.schedule={self.schedule} with BatchNorm synchronized over {replicas} replicas needs a newer "
                f"torch than {torch.__version__}, such as 2.15; try parallel.schedule=1F1B"
            )
        return None

    def check(self, config: Config, module: nn.Module) -> list[str]:
        if not hasattr(module, "stages"):
            return ["parallel=pipeline needs a model that offers its stages(); try model=convnet or model=mlp"]
        messages = []
        if hasattr(module, "place"):
            messages.append(
                "parallel=pipeline puts each stage on one device, but this model spreads its submodules over several; "
                "try model=convnet, or parallel=ddp"
            )
        if config.precision == "fp16":
            messages.append("precision=fp16: parallel=pipeline has no gradient scaler over stages; try precision=bf16")
        if config.compile:
            messages.append("compile=true compiles a whole model, which no rank of parallel=pipeline has; set it false")
        units = trainable_units(module.stages())  # type: ignore[operator]
        names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        if (loss := attached_loss(module)) is not None:
            units[-1].add_module("loss", loss)  # counts as part of the last stage
        seen = [id(tensor) for unit in units for tensor in (*unit.parameters(), *unit.buffers())]
        if left_out := [name for key, name in names.items() if key not in seen]:
            messages.append(f"parallel=pipeline needs all tensors in stages(), but the model's leave out {left_out[0]}")
        buffers = {id(buffer) for buffer in module.buffers()}
        if tied := [names[key] for key in names if key in buffers and seen.count(key) > 1]:
            messages.append(
                f"parallel=pipeline runs each stage separately, but two share the buffer {tied[0]}; "
                "give each a buffer of its own"
            )
        self._num_units = len(units)
        self._synchronizes = config.sync_batchnorm is not False and has_batch_norm(module)
        return messages

    def prepare(self, recipe: Recipe, world: World) -> PipelineReplica:
        axes, module = self.axes(world.world_size), recipe.module
        mesh = make_mesh(world.device, replicate=axes.replicate, stage=axes.stage)
        replicas, pipeline = mesh["replicate"].get_group(), mesh["stage"].get_group()
        use_group(module, replicas)

        units = trainable_units(module.stages())  # type: ignore[operator]
        module.eval()
        costs = num_parameters(units) if self.balance == "parameters" else num_operations(units, recipe.sample[0])
        ranges = partition(costs, axes.stage * self.virtual_stages)
        stages = [Chain(*units[r.start : r.stop]) for r in ranges]
        owners = [self.owner(stage, axes.stage) for stage in range(len(stages))]
        if world.rank == 0:
            for line in _describe(ranges, num_parameters(stages), owners, axes):
                log.info("%s", line)
        own = {n: stage for n, stage in enumerate(stages) if owners[n] == mesh.get_local_rank("stage")}
        loss = attached_loss(module)
        ties = find_ties(module, stages, owners)
        outputs = _materialize(stages, own, recipe)
        tied = TiedParameters(module, ties, own.values(), mesh)
        module.train()
        local = [*own.values(), *([loss] if loss is not None and len(stages) - 1 in own else [])]
        for tensor in (t for submodule in local for t in (*submodule.parameters(), *submodule.buffers())):
            dist.broadcast(tensor.data, group_src=0, group=replicas)
        return PipelineReplica(
            recipe,
            own,
            owners,
            outputs,
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

    def owner(self, stage: int, num_ranks: int) -> int:
        """Return the rank of a pipeline that has the stage: round-robin, or forth and back in a V-shaped schedule."""
        if self.schedule in V_SHAPED and stage >= num_ranks:
            return 2 * num_ranks - 1 - stage
        return stage % num_ranks


def _materialize(stages: list[Chain], own: dict[int, Chain], recipe: Recipe) -> list[StageOutput]:
    """Create the weights of this rank's stages, and return what each stage but the last sends.

    The weights of other ranks' stages are dropped, if the model was built with them.
    """
    outputs, features = [], recipe.sample[0]
    for number, stage in enumerate(stages):
        if number in own:
            recipe.materialize([stage])
        if number < len(stages) - 1:
            function = call_model if number == 0 else Chain.__call__
            with torch.no_grad(), recipe.precision.autocast():
                features = probe(stage, function, features, device=recipe.device)
            outputs.append(StageOutput(features.shape[1:], features.dtype))
        if number not in own:
            kept = (*own.values(), *stages[number + 1 :])  # which may share some of its parameters
            shared = {id(tensor) for other in kept for tensor in other.parameters()}
            for tensor in (*stage.parameters(), *stage.buffers()):
                if id(tensor) not in shared and not tensor.is_meta:
                    tensor.data = tensor.data.new_empty(0)
    return outputs


def _splits_backward_of_functions() -> bool:
    """Return True if torch can continue a backward from the node of an autograd.Function, as SPLITTING schedules do."""
    leaf = torch.zeros(1, requires_grad=True)
    node = _Copy.apply(leaf).grad_fn
    try:
        torch.autograd.grad([GradientEdge(node, 0)], [leaf], [torch.ones(1)])
    except RuntimeError:  # torch 2.11 has no metadata of such a node
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
        own = [stage for stage, owner in enumerate(owners) if owner == rank]
        units = ", ".join(
            f"{ranges[n].start}-{ranges[n][-1]}" if len(ranges[n]) > 1 else f"{ranges[n].start}" for n in own
        )
        fraction = sum(sizes[n] for n in own) / sum(sizes)
        ranks = " and ".join(str(replica * axes.stage + rank) for replica in range(axes.replicate))
        lines.append(f"pipeline rank {ranks}: stages {units} of {ranges[-1].stop}, {fraction:.1%} of the parameters")
    return lines
