"""A parallel model whose layers are spread over the ranks of a pipeline, run by torch's schedules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from runner.checkpoints.extra_state import copy_extra_state, load_extra_state, with_extra_state
from runner.checkpoints.saved_state import (
    MODEL,
    LocalState,
    SavedState,
    read_weights,
    tensor_hashes,
    without_extra_state,
)
from runner.checkpoints.shard_file import LocalChunk
from runner.distributed.collectives import sum_over
from runner.input.batch import MicroBatch, StepBatch
from runner.input.rng import derive_seed, seed_all
from runner.objectives.objective import LossGroup, Prediction
from runner.objectives.supervised import Supervised
from runner.parallel.fsdp import data_options, shard_together
from runner.parallel.optimizer_state import is_of_rank, optimizer_state
from runner.parallel.parameter_update import norm_over_meshes, scale_gradients, weight_factor, whole
from runner.parallel.pipeline_partition import Chain, TiedParameters, pipelines
from runner.parallel.pipeline_stage import Stage, StageModule, StageOutput
from runner.parallel.replica import Replica
from runner.training.mode import Recipe
from runner.training.model.submodules import attached_loss, stages_or_children


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
        self._tied = tied
        self._make_schedule, self._num_micro_batches = make_schedule, num_micro_batches
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
        state = recipe.module.state_dict(keep_vars=True)
        tensors = without_extra_state(state)
        self._local_tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) in own}
        self._all_names = list(tensors)
        parameters = list(dict.fromkeys(p for stage in self._stages.values() for p in stage.parameters()))
        loss_group, optimizer = LossGroup("loss", parameters, []), recipe.make_optimizer(parameters)
        options |= {"duplicates": mesh["tensor"].size() if "tensor" in (mesh.mesh_dim_names or ()) else 1}
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
        self._fit_schedule(max(1, *(m.rows for m in batch.micro_batches)))
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

    def norm(self, tensors: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        counted = {parameter: tensors[parameter] for parameter in tensors if parameter not in self._tied.on_lower_ranks}
        squares = norm_over_meshes(counted).to(self.device) ** 2
        sum_over(self._pipeline, squares)
        return squares.sqrt()

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """Run the model in evaluation mode. Return None on ranks without the last stage. All ranks must call it.

        A rank can receive the next inputs as soon as it has sent its outputs, so that the ranks overlap. Nothing is
        sent for a micro-batch without rows.
        """
        rank = dist.get_rank(self._pipeline)
        features: Any = None
        with self._draws.following(micro_batch), torch.no_grad(), self.precision.autocast():
            for number, stage in self._stages.items():
                stage.eval()
                if number > 0 and self._owners[number - 1] != rank:
                    features = self._outputs[number - 1].empty(micro_batch.rows, self.device)
                    if micro_batch.rows:
                        dist.recv(features, group_src=self._owners[number - 1], group=self._pipeline)
                features = stage(micro_batch.inputs if number == 0 else features)
                if number < self._last and self._owners[number + 1] != rank and micro_batch.rows:
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
        of_stages = {id(module) for stage in stages_or_children(self.module) for module in stage.modules()}
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
