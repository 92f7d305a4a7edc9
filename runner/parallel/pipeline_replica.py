"""A rank of a pipeline: its stages, which torch's schedules run, and the parameters that it shares with other ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import _disable_current_modes

from runner.checkpoints.extra_state import copy_extra_state, load_extra_state, with_extra_state
from runner.checkpoints.saved_state import (
    MODEL,
    LocalState,
    SavedState,
    local_part,
    read_weights,
    tensor_hashes,
    without_extra_state,
)
from runner.checkpoints.shard_file import LocalChunk
from runner.distributed.collectives import sum_over
from runner.input.batch import MicroBatch, StepBatch
from runner.input.rng import derive_seed, seed_all
from runner.objectives.objective import LossGroup, Prediction
from runner.objectives.supervised import Supervised, call_model
from runner.optimization.parameter_patterns import names_of
from runner.parallel.fsdp import data_options, shard_together
from runner.parallel.optimizer_state import is_of_rank, optimizer_state
from runner.parallel.parameter_update import norm_over_meshes, scale_gradients, sum_gradients, weight_factor, whole
from runner.parallel.replica import Replica
from runner.training.mode import Recipe
from runner.training.model.submodules import attached_loss, stages_or_blocks


class Chain(nn.Sequential):
    """Modules called in order; the first one may have several arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        features = first(*args, **kwargs)
        for module in others:
            features = module(features)
        return features


@dataclass(frozen=True)
class StageOutput:
    """The shape, without the dim of samples, and the dtype of what a stage sends to the next one."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return torch.empty(num_samples, *self.shape, dtype=self.dtype, device=device)

    def check(self, features: torch.Tensor) -> None:
        if features.shape[1:] != self.shape:
            raise ValueError(
                f"a pipeline sends tensors of one shape, but outputs have shape {list(features.shape[1:])} here "
                f"and {list(self.shape)} for the first sample; pad all samples, or try parallel=ddp, fsdp or tp"
            )


class Stage(PipelineStage):
    """A stage that initializes connections only with other ranks.

    torch 2.11 lets a rank send to itself if it has two neighbors, as in the middle of a V, which gloo does not support.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc, unused-ignore]
        return [operation for operation in operations if operation.peer != dist.get_rank()]


class StageModule(nn.Module):
    """The layers of a stage, with inputs and outputs padded to one number of samples; the last stage returns the loss.

    A schedule requires fixed shapes, but the micro-batches of a step differ by one sample, and the last ones may be
    missing. Every rank of a pipeline reads the same micro-batches and so knows how many samples are real. Only those
    pass through the layers, because BatchNorm would count the padding. In evaluation mode, nothing is padded.
    """

    def __init__(
        self,
        layers: nn.Module,
        number: int,
        micro_batches: list[MicroBatch],
        recipe: Recipe,
        output: StageOutput | None,
        compute_loss: Callable[[Any, MicroBatch], torch.Tensor],
    ):
        """micro_batches: those of the current call of the schedule. output: None for the last stage."""
        super().__init__()
        self.layers, self.output, self.number, self.compute_loss = layers, output, number, compute_loss
        self.micro_batches, self.precision, self.draws = micro_batches, recipe.precision, recipe.draws
        self.num_samples = 0  # after padding
        self.position = 0  # of the next micro-batch: all schedules run their forwards in order

    def forward(self, received: Any) -> torch.Tensor:
        if not self.training:
            outputs: torch.Tensor = call_model(self.layers, received)
            return outputs
        position, self.position = self.position, self.position + 1
        if position >= len(self.micro_batches):
            # No rank has this micro-batch. Gradients of zero must still reach all parameters.
            ends = [t for t in (received, *self.parameters()) if t.requires_grad]
            zero = torch.stack([local_part(t).flatten()[:0].sum().real for t in ends]).sum()
            if self.output is None:
                return zero
            return zero + self.output.empty(self.num_samples, received.device).zero_()
        micro_batch = self.micro_batches[position]
        with self.precision.autocast(), self.draws.following(micro_batch, stage=self.number):
            # A copy, because the schedules pass a leaf of autograd, which an in-place operator must not change.
            inputs = micro_batch.inputs if self.number == 0 else received[: micro_batch.rows].clone()
            outputs = call_model(self.layers, inputs)
            if self.output is None:
                return self.compute_loss(outputs, micro_batch)
        self.output.check(outputs)
        # Always a copy: the schedules detach what they have sent, which fails for a view (of Flatten, for example).
        padding = outputs.new_zeros(self.num_samples - len(outputs), *outputs.shape[1:])
        return torch.cat([outputs, padding]).contiguous()  # channels_last cannot be sent


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of each pipeline of a mesh with the axis stage, in the order of the stages."""
    assert mesh.mesh_dim_names is not None
    with _disable_current_modes():  # see make_mesh
        ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index("stage"), -1)
        return ranks.reshape(-1, ranks.size(-1)).tolist()  # type: ignore[no-any-return]


class Tie(NamedTuple):
    """A parameter with several names or in several stages, and the ranks of a pipeline whose stages have it."""

    names: list[str]
    ranks: tuple[int, ...]


def find_ties(module: nn.Module, stages: Sequence[nn.Module], owners: Sequence[int]) -> list[Tie]:
    """Return the shared parameters. Must be called before stages are materialized, which unties them."""
    ranks: dict[nn.Parameter, set[int]] = {}
    for stage, owner in zip(stages, owners, strict=True):
        for parameter in stage.parameters():
            ranks.setdefault(parameter, set()).add(owner)
    names = names_of([*module.named_parameters(remove_duplicate=False)])
    ties = [Tie(names[parameter], tuple(sorted(of_parameter))) for parameter, of_parameter in ranks.items()]
    return [tie for tie in ties if len(tie.names) > 1 or len(tie.ranks) > 1]


class TiedParameters:
    """The tied parameters of this rank, after its stages were materialized. All ranks must construct it.

    All copies start with the weights of the model's constructor. They stay equal, because each gets the sum of all
    copies' gradients and is updated in the same way.
    """

    def __init__(self, module: nn.Module, ties: Sequence[Tie], own: Iterable[nn.Module], mesh: DeviceMesh):
        """own: this rank's stages. mesh: has the axis stage."""
        here = {parameter for stage in own for parameter in stage.parameters()}
        self._rank = rank = mesh.get_local_rank("stage")
        slots = [[_slot(module, name) for name in tie.names] for tie in ties]
        # The parameters' places in the model by tie: first those of this rank's stages.
        self._slots = [sorted(of_tie, key=lambda slot: slot[0][slot[1]] not in here) for of_tie in slots]
        self._ties = ties
        self.tie()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in dict.fromkeys(tie.ranks for tie in ties if len(tie.ranks) > 1):
            for pipeline in pipelines(mesh):
                group = dist.new_group([pipeline[stage] for stage in ranks])
                if dist.get_rank() in pipeline and rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    self._groups[ranks] = group

    def tie(self) -> None:
        """Tie the parameters. Must be called again after this rank's stages were sharded, which replaces parameters."""
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.on_lower_ranks: set[nn.Parameter] = set()  # this rank's copies of parameters that a lower rank has too
        for (_, ranks), slots in zip(self._ties, self._slots, strict=True):
            copy = slots[0][0][slots[0][1]]
            for parameters, key in slots:
                parameters[key] = copy
            if self._rank in ranks[1:]:
                self.on_lower_ranks.add(copy)
            if self._rank in ranks and len(ranks) > 1 and copy.requires_grad:
                self._shared.setdefault(ranks, []).append(copy)

    def sum_gradients(self) -> None:
        """Sum over the copies, after the sum over replicas. All ranks of a pipeline must call it."""
        for ranks, parameters in self._shared.items():
            group = self._groups[ranks]
            sum_gradients(parameters, lambda flat, group=group: dist.all_reduce(flat, group=group))  # type: ignore[misc]


def _slot(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter], str]:
    parent, _, key = name.rpartition(".")
    return module.get_submodule(parent)._parameters, key  # type: ignore[return-value]


class PipelineReplica(Replica):
    """This rank's stages of one replica of the model.

    `layers` has this rank's stages by number, and `owners` the pipeline's rank that has each stage. The mesh has the
    axis stage and any others.
    """

    def __init__(
        self,
        recipe: Recipe,
        layers: dict[int, Chain],
        owners: list[int],
        outputs: list[StageOutput],
        *,
        make_schedule: Callable[[Sequence[PipelineStage], Callable[..., torch.Tensor]], Any],
        num_micro_batches: int,
        sum_over: Callable[[torch.Tensor], torch.Tensor],
        mesh: DeviceMesh,
        tied: TiedParameters,
    ):
        assert isinstance(recipe.objective, Supervised)
        self._recipe, self._supervised = recipe, recipe.objective
        self._owners, self._outputs, self._last = owners, outputs, len(owners) - 1
        self._pipeline = mesh["stage"].get_group()
        self._first = pipelines(mesh)[0][mesh.get_local_rank("stage")]  # the first rank with these stages
        self._tied, self._make_schedule, self._num_micro_batches = tied, make_schedule, num_micro_batches
        self._micro_batches: list[MicroBatch] = []  # of the current call of the schedule
        self._stages: dict[int, StageModule] = {}
        for number, chain in layers.items():
            output = outputs[number] if number < self._last else None
            self._stages[number] = StageModule(chain, number, self._micro_batches, recipe, output, self._compute_loss)
        if (loss := attached_loss(recipe.module)) is not None and self._last in self._stages:
            self._stages[self._last].loss = loss  # trained with the last stage
        options = data_options(mesh, self._shard)
        tied.tie()
        self._schedule: Any = None
        self._num_samples = 0  # of the step, over all ranks and micro-batches
        self._local_loss = torch.zeros(())
        self._weight = torch.zeros((), dtype=torch.float64)
        own = {id(t) for stage in self._stages.values() for t in (*stage.parameters(), *stage.buffers())}
        tensors = without_extra_state(recipe.module.state_dict(keep_vars=True))
        self._local_tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) in own}
        self._all_names = list(tensors)
        parameters = list(dict.fromkeys(p for stage in self._stages.values() for p in stage.parameters()))
        loss_group, optimizer = LossGroup("loss", parameters, []), recipe.make_optimizer(parameters)
        options |= {"duplicates": mesh["tensor"].size() if "tensor" in (mesh.mesh_dim_names or ()) else 1}
        self._data_ranks = len(pipelines(mesh)) // options["duplicates"]
        super().__init__(recipe, optimizer, loss_group, sum_over=sum_over, **options)

    def _shard(self, mesh: DeviceMesh) -> nn.Module:
        """Shard each of this rank's stages as a whole, because a schedule keeps a stage gathered anyway."""
        for stage in self._stages.values():
            stage.to(memory_format=torch.contiguous_format)  # as in `shard`
            shard_together(stage, mesh)
        return nn.ModuleList(self._stages.values())

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the gradients of a step. Return this replica's part of the global batch's mean loss, detached, ().

        It is zero on ranks without the last stage. All ranks must call it.
        """
        rank, count = dist.get_rank(self._pipeline), self._num_micro_batches
        if rank > 0:  # otherwise, the dropout of all stages would draw the same random numbers
            seed_all(derive_seed(torch.initial_seed(), rank), self.device)
        self._local_loss = torch.zeros((), dtype=self.precision.parameter_dtype, device=self.device)
        self._weight = torch.zeros((), dtype=torch.float64, device=self.device)
        self._num_samples = batch.num_samples
        # The same number in all pipelines, because torch reshards the stages of a new schedule.
        most = math.ceil(batch.num_samples / (len(batch.micro_batches) * self._data_ranks))
        self._fit_schedule(max(most, *(m.rows for m in batch.micro_batches)))
        # The schedule only passes on the numbers of micro-batches; StageModule looks up inputs and targets.
        numbers = torch.arange(count)
        for start in range(0, len(batch.micro_batches), count):
            self._micro_batches[:] = batch.micro_batches[start : start + count]
            for stage in self._stages.values():
                stage.position = 0
            inputs = (numbers.to(self.device),) if 0 in self._stages else ()
            target = numbers if self._last in self._stages else None
            self._schedule.step(*inputs, target=target, return_outputs=False)
        self._micro_batches.clear()
        self._check_replaced()
        self._reduce(self.loss_group.parameters)
        self._tied.sum_gradients()
        if not self.objective.weighted_by_samples:
            factor = weight_factor(batch.num_samples, self._weight / self._duplicates, self._sum_over)
            scale_gradients(self.loss_group.parameters, factor)
            self._local_loss *= factor
        return self._local_loss / self._duplicates

    def _fit_schedule(self, num_samples: int) -> None:
        """Create the schedule, unless the current one fits micro-batches of this size. All ranks must call it."""
        if self._schedule is not None and num_samples <= next(iter(self._stages.values())).num_samples:
            return
        stages = []
        for number, stage in self._stages.items():
            stage.num_samples = num_samples
            # If shapes are given, torch does not run a forward to infer them, which BatchNorm would count.
            received = torch.empty(1, dtype=torch.int64, device="meta")
            if number > 0:
                received = self._outputs[number - 1].empty(num_samples, "meta").requires_grad_()
            if number < self._last:
                returned = self._outputs[number].empty(num_samples, "meta")
            else:
                returned = torch.empty((), dtype=self.precision.parameter_dtype, device="meta")
            stages.append(
                Stage(
                    stage,
                    number,
                    len(self._owners),
                    self.device,
                    input_args=received,
                    output_args=returned.requires_grad_(),
                    group=self._pipeline,
                )
            )
        self._schedule = self._make_schedule(stages, lambda local_loss, number: local_loss)

    def _compute_loss(self, outputs: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """Return this micro-batch's part of the global batch's mean loss, ()."""
        loss = self._supervised.local_loss(outputs, micro_batch)
        local_loss = loss.divided_by(self._num_samples)
        self._local_loss += local_loss.detach()
        self._weight += loss.weight
        # torch 2.11 checks the dtype, and the loss of no samples has another dtype.
        return (local_loss * self._loss_scale).to(self.precision.parameter_dtype)

    def norm(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        on_lower_ranks = {self._names[parameter] for parameter in self._tied.on_lower_ranks}
        counted = {name: tensor for name, tensor in tensors.items() if name not in on_lower_ranks}
        squares = norm_over_meshes(counted).to(self.device) ** 2
        sum_over(self._pipeline, squares)
        return squares.sqrt()

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """Run the model in evaluation mode. Return None on ranks without the last stage. All ranks must call it.

        A rank can receive the next inputs as soon as it has sent its outputs, so that the ranks overlap.
        """
        rank = dist.get_rank(self._pipeline)
        features: Any = None
        with self._draws.following(micro_batch), torch.no_grad(), self.precision.autocast():
            for number, stage in self._stages.items():
                stage.eval()
                if number > 0 and self._owners[number - 1] != rank:
                    features = self._outputs[number - 1].empty(micro_batch.rows, self.device)
                    dist.recv(features, group_src=self._owners[number - 1], group=self._pipeline)
                features = stage(micro_batch.inputs if number == 0 else features)
                if number < self._last and self._owners[number + 1] != rank:
                    self._outputs[number].check(features)
                    dist.send(features.contiguous(), group_dst=self._owners[number + 1], group=self._pipeline)
                stage.train()
            return self._supervised.prediction(features, micro_batch) if self._last in self._stages else None

    def state(self) -> LocalState:
        self._after_write()
        hashes = tensor_hashes(self.local_parameters()) if self._duplicates == 1 else {}
        model = {MODEL + name: LocalChunk.of(t) for name, t in self._local_tensors.items() if self.writes(t)}
        # An optimizer of all stages' parameters, which has no states but knows the groups of all parameters.
        options = {group["group"]: group for group in self.optimizer.param_groups}
        of_all_stages = self._recipe.make_optimizer(self.module.parameters())
        for group in of_all_stages.param_groups:
            group |= {key: value for key, value in options[group["group"]].items() if key != "params"}
        optimizer = optimizer_state(self.module, self.optimizer, self.writes, groups_of=of_all_stages)
        extra = self._extra_state() if dist.get_rank() == self._first else LocalState()
        return LocalState(model, {"scaler": self.precision.scaler.state_dict()}, hashes) | optimizer | extra

    def writes(self, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> bool:
        is_tied = (tensor if parameter is None else parameter) in self._tied.on_lower_ranks
        return not is_tied and is_of_rank(tensor, self._first)

    def _with_extra_state(self) -> dict[str, nn.Module]:
        """Return the modules of this rank's stages, and on ranks with the first stage those of no stage."""
        own = {id(module) for stage in self._stages.values() for module in stage.modules()}
        of_stages = {id(module) for stage in stages_or_blocks(self.module) for module in stage.modules()}
        return {
            name: part
            for name, part in with_extra_state(self.module).items()
            if id(part) in own or (0 in self._stages and id(part) not in of_stages)
        }

    def weights(self) -> dict[str, Any]:
        local: dict[str, Any] = {name: whole(tensor).detach().cpu() for name, tensor in self._local_tensors.items()}
        local |= copy_extra_state(self._with_extra_state())
        gathered: list[Any] = [local]
        if 0 in dist.get_process_group_ranks(self._pipeline):
            on_rank_0 = dist.get_rank() == 0
            gathered = [None] * dist.get_world_size(self._pipeline) if on_rank_0 else [local]
            dist.gather_object(local, gathered if on_rank_0 else None, group_dst=0, group=self._pipeline)
        model = {name: tensor for tensors in gathered for name, tensor in tensors.items()}
        return {name: model[name] for name in (*self._all_names, *with_extra_state(self.module)) if name in model}

    def load_weights(self, saved: SavedState) -> None:
        self._after_write()
        read_weights(saved, self._local_tensors, dict.fromkeys(self._all_names))
        load_extra_state(saved, with_extra_state(self.module))
