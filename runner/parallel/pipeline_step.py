"""A model spread over a pipeline of ranks, ready to step: torch's schedules, fed with micro-batches of any size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from runner.distributed.collectives import sum_over
from runner.parallel.gradient_sum import sum_gradients
from runner.parallel.optimizer_state import load_optimizer_state, optimizer_state
from runner.parallel.parameter_update import ParameterUpdate, held_gradients, norm_of_gradients
from runner.parallel.pipeline_stage import Part, Signal, Stage
from runner.parallel.stage_balance import Chain
from runner.parallel.tied import TiedParameters
from runner.parallel.total_weight import factor_of, scale_gradients
from runner.training.batch import MicroBatch, StepBatch
from runner.training.drawing import seed_step
from runner.training.names import names_of
from runner.training.objective import Prediction
from runner.training.parts import attached_loss
from runner.training.sampler import mix
from runner.training.saved_state import MODEL, HeldState, Piece, SavedState, fingerprints, read_weights
from runner.training.strategy import Recipe, Stepping
from runner.training.supervised import Supervised, call


class Pipelined:
    """This rank's groups of stages of one replica of the model.

    groups: this rank's groups of stages by number. owners: the pipeline's rank that has each group.
    signals: what each group but the last gives. make_schedule: torch's schedule of these stages, with this loss.
    sum_over: sums a tensor over all ranks.
    replicas, pipeline: the ranks that have the same groups, and those that read the same samples.
    tied: what this rank's groups share with others.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: dict[int, Chain],
        owners: list[int],
        signals: list[Signal],
        *,
        make_schedule: Callable[[Sequence[PipelineStage], Callable[..., torch.Tensor]], Any],
        num_micro_batches: int,
        sum_over: Callable[[torch.Tensor], torch.Tensor],
        replicas: dist.ProcessGroup,
        pipeline: dist.ProcessGroup,
        tied: TiedParameters,
    ):
        self._recipe, self._module, self._precision = recipe, recipe.module, recipe.precision
        self._owners, self._signals = owners, signals
        self._replicas, self._pipeline, self._tied = replicas, pipeline, tied
        self._make_schedule, self._num_micro_batches, self._sum_over = make_schedule, num_micro_batches, sum_over
        self._objective = recipe.objective
        assert isinstance(self._objective, Supervised)
        self._feed: list[MicroBatch] = []
        self._parts = {
            g: Part(x, g == 0, self._feed, self._precision, signals[g] if g < len(signals) else None, self._finish)
            for g, x in groups.items()
        }
        if (loss := attached_loss(self._module)) is not None and len(owners) - 1 in self._parts:
            self._parts[len(owners) - 1].loss = loss  # trained with the last stage
        self._schedule: Any = None
        self._num_samples = 0  # of the step, over all ranks and micro-batches
        self._loss_share = torch.zeros(())
        self._weight = torch.zeros((), dtype=torch.float64)
        own = {id(t) for part in self._parts.values() for t in (*part.parameters(), *part.buffers())}
        names = self._module.state_dict(keep_vars=True)
        self._own_state = {name: tensor for name, tensor in names.items() if id(tensor) in own}
        self._names = list(names)
        self._parameters = list(dict.fromkeys(p for part in self._parts.values() for p in part.parameters()))
        self._optimizer = recipe.make_optimizer(self._parameters)
        self._update = ParameterUpdate(
            self._optimizer, self._parameters, recipe.precision, recipe.clip_grad_norm, self._total_norm
        )

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the step's gradients. Returns the global batch's mean loss from this replica's samples, detached, ().

        It is zero but on the rank with the last stage. All ranks must call it.
        """
        rank, count = dist.get_rank(self._pipeline), self._num_micro_batches
        if rank > 0:  # or the dropout of all stages would draw the same numbers
            seed_step(mix(torch.initial_seed(), rank), self._recipe.device)
        self._loss_share = torch.zeros((), dtype=self._precision.parameter_dtype, device=self._recipe.device)
        self._weight = torch.zeros((), dtype=torch.float64, device=self._recipe.device)
        self._num_samples = batch.num_samples
        self._fit_schedule(max(1, *(m.rows for m in batch.micro_batches)))
        # The schedule hands on which micro-batch it is about; inputs and targets are looked up in the feed.
        numbers = torch.arange(count)
        for start in range(0, len(batch.micro_batches), count):
            self._feed[:] = batch.micro_batches[start : start + count]
            for part in self._parts.values():
                part.position = 0
            inputs = (numbers.to(self._recipe.device),) if 0 in self._parts else ()
            target = numbers if len(self._owners) - 1 in self._parts else None
            self._schedule.step(*inputs, target=target, return_outputs=False)
        self._feed.clear()
        self._reduce()
        if not self._objective.counts_samples:
            factor = factor_of(batch.num_samples, self._weight, self._sum_over)
            scale_gradients(self._parameters, factor)
            self._loss_share *= factor
        return self._loss_share

    def _fit_schedule(self, num_samples: int) -> None:
        """Set the schedule up for micro-batches of at most so many samples, unless it is. All ranks must call it."""
        if self._schedule is not None and num_samples <= next(iter(self._parts.values())).num_samples:
            return
        stages = []
        for number, part in self._parts.items():
            part.num_samples = num_samples
            # Shapes given, torch tries none out: that would run BatchNorm on samples that are none.
            received = torch.empty(1, dtype=torch.int64, device="meta")
            if number > 0:
                received = self._signals[number - 1].empty(num_samples, "meta").requires_grad_()
            stages.append(
                Stage(
                    part,
                    number,
                    len(self._owners),
                    self._recipe.device,
                    input_args=received,
                    output_args=self._gives(number, num_samples).requires_grad_(),
                    group=self._pipeline,
                )
            )
        self._schedule = self._make_schedule(stages, lambda share, number: share)

    def _gives(self, number: int, num_samples: int) -> torch.Tensor:
        """What a group gives, without memory."""
        if number < len(self._signals):
            return self._signals[number].empty(num_samples, "meta")
        return torch.empty((), dtype=self._precision.parameter_dtype, device="meta")

    def _finish(self, outputs: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """The share of the loss of a micro-batch's outputs, ()."""
        assert isinstance(self._objective, Supervised)
        loss = self._objective.of_share(outputs, micro_batch)
        share = loss.share(self._num_samples)
        self._loss_share += share.detach()
        self._weight += loss.weight
        return share.to(
            self._precision.parameter_dtype
        )  # as `_gives`, which torch 2.11 checks; no samples have another

    def _reduce(self) -> None:
        """Sum the gradients over the replicas, each of which has its share of the mean, then over copies of one."""
        if dist.get_world_size(self._replicas) > 1:
            sum_gradients(self._parameters, lambda flat: dist.all_reduce(flat, group=self._replicas))
        self._tied.sum_gradients()

    def gradients(self) -> list[torch.Tensor]:
        """Of this rank's stages."""
        return held_gradients(self._parameters)

    def skip(self) -> None:
        """Drop the gradients in the place of `step`."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Update the parameters. Returns the norm of the whole gradient before clipping. All ranks must call it."""
        return self._update.step(lr_factor, want_norm)

    @property
    def turns(self) -> Mapping[str, Stepping]:
        return {"loss": self}

    @property
    def learning_rate(self) -> float:
        return self._update.learning_rate

    def _total_norm(self, groups: list[list[nn.Parameter]]) -> torch.Tensor:
        """Over the stages of all ranks of the pipeline, ()."""
        counted = (p for p in self._parameters if p not in self._tied.of_lower_ranks)
        squares = norm_of_gradients(counted).to(self._recipe.device) ** 2
        sum_over(self._pipeline, squares)
        return squares.sqrt()

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """The model in evaluation mode, on the rank with the last stage. All ranks must call it.

        A rank is free for the next inputs when it has sent its outputs on, so that the ranks overlap. Nothing is sent
        where there are no samples.
        """
        rank, last = dist.get_rank(self._pipeline), len(self._owners) - 1
        features: Any = None
        for number, part in self._parts.items():
            part.eval()
            if number > 0 and self._owners[number - 1] != rank:
                features = self._signals[number - 1].empty(micro_batch.rows, self._recipe.device)
                if micro_batch.rows:
                    dist.recv(features, group_src=self._owners[number - 1], group=self._pipeline)
            with torch.no_grad(), self._precision.autocast():
                features = call(part.layers, micro_batch.inputs) if number == 0 else part.layers(features)
            if number < last and self._owners[number + 1] != rank and micro_batch.rows:
                self._signals[number].check(features)
                dist.send(features.contiguous(), group_dst=self._owners[number + 1], group=self._pipeline)
            part.train()
        if last not in self._parts:
            return None
        assert isinstance(self._objective, Supervised)
        with torch.no_grad(), self._precision.autocast():
            return self._objective.prediction(features, micro_batch)

    def state(self) -> HeldState:
        """What this rank writes of everything that decides the future: in the first replica, its stages."""
        alike = fingerprints(self.held())
        if not self._is_first_replica:
            return HeldState(alike=alike)
        model = {
            MODEL + name: Piece.of(tensor)
            for name, tensor in self._own_state.items()
            if tensor not in self._tied.of_lower_ranks
        }
        optimizer = optimizer_state(
            self._module, self._optimizer, lambda parameter, tensor: parameter not in self._tied.of_lower_ranks
        )
        # An optimizer of all stages' parameters, which keeps nothing, knows in which groups those of other ranks are.
        options = {group["group"]: group for group in self._optimizer.param_groups}
        whole = self._recipe.make_optimizer(self._module.parameters())
        for group in whole.param_groups:
            group |= {key: value for key, value in options[group["group"]].items() if key != "params"}
        groups = optimizer_state(self._module, whole).facts["optimizer"]["param_groups"]
        optimizer.facts["optimizer"]["param_groups"] = groups
        scaler = self._precision.scaler.state_dict()
        return HeldState(model, {"scaler": scaler}, alike) | optimizer

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model by full names, on the CPU of rank 0. All ranks must call it."""
        own = {name: tensor.detach().cpu() for name, tensor in self._own_state.items()}
        model = {name: tensor for part in self._gather(own) for name, tensor in part.items()}
        return {name: model[name] for name in self._names if name in model}

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """What the ranks of rank 0's pipeline give, there; the own elsewhere. All ranks must call it."""
        if not self._is_first_replica:
            return [own]
        ranks = dist.get_process_group_ranks(self._pipeline)
        gathered: list[Any] | None = [None] * len(ranks) if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered, group_dst=0, group=self._pipeline)
        return gathered or [own]

    @property
    def _is_first_replica(self) -> bool:
        return 0 in dist.get_process_group_ranks(self._pipeline)

    def load_state(self, saved: SavedState) -> None:
        """Take over this rank's part of a checkpoint, of this or another mode."""
        self.load_weights(saved)
        load_optimizer_state(self._module, self._optimizer, saved)

    def load_weights(self, saved: SavedState) -> None:
        """Take over this rank's part of the model of a checkpoint alone."""
        read_weights(saved, self._own_state, dict.fromkeys(self._names))

    def held(self) -> dict[str, torch.Tensor]:
        """The trained parameters of this rank's stages, by name."""
        names = names_of(list(self._module.named_parameters()))
        return {names[p][0]: p.detach() for p in self._parameters if p.requires_grad}

    def changed(self) -> None:
        """Nothing is made of them ahead."""
