"""A model spread over a pipeline of ranks, ready to step: torch's schedules, fed with micro-batches of any size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from runner.parallel.gradient_sum import sum_gradients
from runner.parallel.optimizer_state import join_groups, load_optimizer_state, optimizer_state
from runner.parallel.parameter_update import ParameterUpdate, norm_of_gradients
from runner.training.batch import MicroBatch, StepBatch
from runner.training.losses import weighted_loss
from runner.training.precision import Precision
from runner.training.sampler import mix
from runner.training.strategy import Recipe


@dataclass(frozen=True)
class Signal:
    """What a group of stages gives for each sample."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return torch.empty(num_samples, *self.shape, dtype=self.dtype, device=device)


class Stage(PipelineStage):
    """A stage that shakes hands with other ranks only.

    Where two neighbours are on one rank, as at the turn of a V, torch 2.11 has the rank send to itself, which gloo does
    not. Later ones do not shake hands so.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [operation for operation in operations if operation.peer != dist.get_rank()]


class Part(nn.Module):
    """A group of stages as a schedule's stage: what it is given and gives is padded to one number of samples.

    A schedule fixes the shapes that are sent, but a step's micro-batches differ by a sample, and its last ones may be
    missing. Every rank of a pipeline reads the same micro-batches, so that it knows how many samples are real; only
    those go through the layers, for BatchNorm would see any others.
    """

    def __init__(self, layers: nn.Module, signal: Signal, is_first: bool, feed: list[MicroBatch], precision: Precision):
        super().__init__()
        self.layers, self.signal, self.is_first = layers, signal, is_first
        self.feed, self.precision = feed, precision
        self.num_samples = 0  # what it is padded to
        self.position = 0  # of the next micro-batch in the feed: all schedules go forward in order

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        position, self.position = self.position, self.position + 1
        if position >= len(self.feed):
            # No rank has such a micro-batch. Gradients of zero must yet find their way back.
            ends = (t for t in (received, *self.parameters()) if t.requires_grad)
            return self.signal.empty(self.num_samples, received.device).zero_() + sum(
                t.flatten()[:0].sum() for t in ends
            )
        inputs = self.feed[position].inputs
        with self.precision.autocast():
            outputs = self.layers(inputs if self.is_first else received[: len(inputs)])
        # Always a copy: the schedules detach what they have sent, which a view (of Flatten, say) does not allow.
        padding = outputs.new_zeros(self.num_samples - len(outputs), *outputs.shape[1:])
        return torch.cat([outputs, padding]).contiguous()  # nor can channels_last be sent


class Pipelined:
    """This rank's groups of stages of one replica of the model.

    groups: this rank's groups of stages by number. owners: the pipeline's rank that has each group.
    signals: what each group gives. make_schedule: torch's schedule of these stages, with this loss.
    replicas, pipeline: the ranks that have the same groups, and those that read the same samples.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: dict[int, nn.Sequential],
        owners: list[int],
        signals: list[Signal],
        *,
        make_schedule: Callable[[Sequence[PipelineStage], Callable[..., torch.Tensor]], Any],
        num_micro_batches: int,
        replicas: dist.ProcessGroup,
        pipeline: dist.ProcessGroup,
    ):
        self._recipe, self._module, self._precision = recipe, recipe.module, recipe.precision
        self._owners, self._signals = owners, signals
        self._replicas, self._pipeline = replicas, pipeline
        self._make_schedule, self._num_micro_batches = make_schedule, num_micro_batches
        self._feed: list[MicroBatch] = []
        self._parts = {g: Part(x, signals[g], g == 0, self._feed, self._precision) for g, x in groups.items()}
        self._schedule: Any = None
        self._num_samples = 0  # of the step, over all ranks and micro-batches
        self._loss_share = torch.zeros(())
        own = {id(t) for part in self._parts.values() for t in (*part.parameters(), *part.buffers())}
        names = self._module.state_dict(keep_vars=True)
        self._own_state = {name: tensor for name, tensor in names.items() if id(tensor) in own}
        self._names = list(names)
        self._parameters = [p for part in self._parts.values() for p in part.parameters()]
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
            torch.manual_seed(mix(torch.initial_seed(), rank))
        self._loss_share = torch.zeros((), dtype=self._precision.parameter_dtype, device=self._recipe.device)
        self._num_samples = batch.num_samples
        self._fit_schedule(max(1, *(len(m.inputs) for m in batch.micro_batches)))
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
                    output_args=self._signals[number].empty(num_samples, "meta").requires_grad_(),
                    group=self._pipeline,
                )
            )
        self._schedule = self._make_schedule(stages, self._loss)

    def _loss(self, outputs: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        position = int(number)
        if position >= len(self._feed):
            return outputs.flatten()[:0].sum()
        inputs, targets = self._feed[position].inputs, self._feed[position].targets
        with self._precision.autocast():
            loss = weighted_loss(self._recipe.loss, outputs[: len(inputs)], targets)
        share = loss.share(self._num_samples)
        self._loss_share += share.detach()
        return share

    def _reduce(self) -> None:
        """Sum the gradients over the replicas, each of which has its share of the mean."""
        if dist.get_world_size(self._replicas) > 1:
            sum_gradients(self._parameters, lambda flat: dist.all_reduce(flat, group=self._replicas))

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Update the parameters. Returns the norm of the whole gradient before clipping. All ranks must call it."""
        return self._update.step(lr_factor, want_norm)

    @property
    def learning_rate(self) -> float:
        return self._update.learning_rate

    def _total_norm(self, groups: list[list[nn.Parameter]]) -> torch.Tensor:
        """Over the stages of all ranks of the pipeline, ()."""
        squares = norm_of_gradients(self._parameters).to(self._recipe.device) ** 2
        dist.all_reduce(squares, group=self._pipeline)
        return squares.sqrt()

    def predict(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """The model's outputs in evaluation mode, on the rank with the last stage. All ranks must call it.

        A rank is free for the next inputs when it has sent its outputs on, so that the ranks overlap. Nothing is sent
        where there are no samples.
        """
        rank, last = dist.get_rank(self._pipeline), len(self._owners) - 1
        features: torch.Tensor | None = None
        for number, part in self._parts.items():
            part.eval()
            if number == 0:
                features = inputs
            elif self._owners[number - 1] != rank:
                features = self._signals[number - 1].empty(len(inputs), self._recipe.device)
                if len(inputs):
                    dist.recv(features, group_src=self._owners[number - 1], group=self._pipeline)
            with torch.no_grad(), self._precision.autocast():
                features = part.layers(features)
            if number < last and self._owners[number + 1] != rank and len(inputs):
                dist.send(features.contiguous(), group_dst=self._owners[number + 1], group=self._pipeline)
            part.train()
        return features if last in self._parts else None

    def state(self) -> dict[str, Any]:
        """Everything that decides the future, by full names, on the CPU of rank 0. All ranks must call it."""
        own = {
            "model": {name: tensor.detach().cpu() for name, tensor in self._own_state.items()},
            "optimizer": optimizer_state(self._module, self._optimizer),
        }
        states: list[dict[str, Any]] = [own]
        if dist.get_rank() in (ranks := dist.get_process_group_ranks(self._pipeline)) and 0 in ranks:
            gathered: list[Any] | None = [None] * len(ranks) if dist.get_rank() == 0 else None
            dist.gather_object(own, gathered, group_dst=0, group=self._pipeline)
            states = gathered or states
        model = {name: tensor for state in states for name, tensor in state["model"].items()}
        groups = [group for state in states for group in state["optimizer"]["param_groups"]]
        return {
            "model": {name: model[name] for name in self._names if name in model},
            "optimizer": {
                "state": {name: value for state in states for name, value in state["optimizer"]["state"].items()},
                "param_groups": join_groups(groups, self._names),
            },
            "scaler": self._precision.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take this rank's part of what `state` returned, in this or another mode. All ranks must call it."""
        with torch.no_grad():
            for name, tensor in self._own_state.items():
                tensor.copy_(state["model"][name])
        load_optimizer_state(self._module, self._optimizer, state["optimizer"])
