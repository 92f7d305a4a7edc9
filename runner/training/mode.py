"""The contract of a parallel mode: what it declares, and what the training loop calls on the model that it prepares."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Protocol, Self

import torch
from torch import nn

from runner.checkpoints.saved_state import LocalState, SavedState
from runner.config.diagnostics.type_hints import show
from runner.config.schema import Config
from runner.config.validate import check_batch
from runner.distributed.world import World
from runner.errors import InputError, as_input_error
from runner.input.batch import MicroBatch, StepBatch
from runner.objectives.objective import Objective, Prediction
from runner.optimization.lr_schedules import Scheduled
from runner.optimization.precision import Precision
from runner.training.draws.following import Draws
from runner.training.model.activation_checkpointing import Extent
from runner.training.refusal import Refusal


@dataclass(frozen=True)
class Axes:
    """The mesh of a mode, slowest axis first. Ranks along replicate and shard read different samples.

    Ranks along sequence read the same samples, and compute different positions of them.
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    stage: int = 1
    tensor: int = 1
    servers: int = 0  # number of servers: the lowest ranks, which are outside the mesh and read no samples
    micro_batches: int = 1  # number of parts into which the mode splits each of the configuration's micro-batches

    @property
    def size(self) -> int:
        return self.data_ranks * self.ranks_per_sample + self.servers

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def ranks_per_sample(self) -> int:
        """The number of ranks that read the same samples."""
        return self.sequence * self.stage * self.tensor

    def counts(self, rank: int) -> bool:
        """Return True on the first rank of each group of ranks that compute the same outputs of the same samples."""
        return rank >= self.servers and (rank - self.servers) % self.tensor == 0

    def reads_first(self, rank: int) -> bool:
        """Return True on the first of the ranks that read the same samples."""
        return rank >= self.servers and (rank - self.servers) % self.ranks_per_sample == 0

    def data_rank(self, rank: int) -> int | None:
        """Return the number of the rank's data rank, below `data_ranks`; None for a server."""
        return None if rank < self.servers else (rank - self.servers) // self.ranks_per_sample


@dataclass(frozen=True)
class Recipe:
    """What a mode prepares: a model with the run's initial weights on this rank's device, and how it is trained."""

    module: nn.Module
    objective: Objective
    # Called with some of the module's parameters, or with the parameter groups of another such optimizer.
    make_optimizer: Callable[[Iterable[nn.Parameter] | Iterable[dict[str, Any]]], torch.optim.Optimizer]
    precision: Precision
    clip_grad_norm: float | None
    device: torch.device
    sample: Any  # a batch of training data on the device: one sample, or two if BatchNorm needs them
    # Creates the initial weights of submodules on the device, if the module was built on the meta device.
    materialize: Callable[[Iterable[nn.Module]], None] = lambda submodules: None
    differentiates: bool = False  # the forward computes gradients, so that a second backward needs all parameters
    written: Sequence[str] = ()  # names of parameters that the forward changes in training mode
    draws: Draws = field(default_factory=Draws)  # of the model and the objective


class Stepper(Protocol):
    """Computes the gradients of one of the objective's losses, and updates the parameters that this loss trains."""

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the gradients of a step. Return this rank's part of the global batch's mean loss, detached, ()."""

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients: whole, or its shards."""

    def step(self, scheduled: Scheduled, want_norm: bool) -> torch.Tensor | None:
        """Update the parameters as scheduled. Return the norm of the gradient before clipping, (), if requested.

        The norm is that of the whole gradient. Reading it would wait for the device.
        """

    def skip(self) -> None:
        """Drop the gradients. Called on all ranks, in place of `step` or to compute the gradients of a step again."""


class ParallelModel(Protocol):
    """A model prepared by its mode; `runner.parallel.replica.Replica` is the usual implementation."""

    @property
    def steppers(self) -> Mapping[str, Stepper]:
        """The steppers of the objective's losses, by name, in the order in which a step calls them."""

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate in the last step."""

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """Run the model in evaluation mode. Return None if another rank has the outputs. All ranks must call it."""

    def state(self) -> LocalState:
        """Return what this rank writes of a checkpoint: its tensors, not copies of them. All ranks must call it."""

    def load_state(self, saved: SavedState) -> None:
        """Load this rank's part of a checkpoint of any mode and world size. All ranks must call it."""

    def load_weights(self, saved: SavedState) -> None:
        """Load only the model; the optimizer is unchanged. All ranks must call it."""

    def weights(self) -> dict[str, Any]:
        """Return the whole model by full names, on the CPU of rank 0, as a state dict. All ranks must call it."""

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """Return this rank's trained parameters by full names, in a fixed order: whole, or DTensors.

        The caller may write them in place, and must then call `parameters_written` on all ranks.
        """

    def norm(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the norm over the whole model, (), of tensors that have the names of `local_parameters`.

        tensors: this rank's parts, such as the parameters themselves. All ranks must call it.
        """

    def parameters_written(self) -> None:
        """Drop everything that was computed from the old values of the parameters. All ranks must call it."""


class Parallel(ABC):
    """A parallel mode: a file of runner/parallel and a YAML file of conf/parallel.

    Derive from it and define `prepare`; everything else has a default. By default, each rank has a replica of the
    model and reads its own samples. A mode is immutable: `at` and `fit` return the mode in a world and for a model, and
    `prepare` is called on the result.

    Attributes:
        refusals: The options of the configuration that do not work in this mode with any model.
        resolved_axes: The mesh, known after `at` and final after `fit`.
        needs_group: A process group is also needed in a world of one.
        meta_init: The model is built on the meta device; `prepare` calls `Recipe.materialize`.
        is_placeholder: The mode is chosen later, and this one only checks the input. The model is built on the meta
            device, because it may be too large for one rank.
        spans_devices: A model may be spread over several devices of one rank.
        needs_all_gradients: Each loss of a step must depend on all parameters that it trains.
        shards_matrices: An optimizer updates shards of matrices.
        splits_parameters: An update cannot combine all parameters: each rank updates only some of them, or only some
            are sharded.
        can_recompute: A model may call torch.utils.checkpoint around random functions.
        draws_in_backward: The random numbers of a backward can follow the samples.
        supported_objectives: `supervised` (a loss of outputs and targets), `one_loss` (also an objective that calls
            the model itself), or `several_losses` (also several losses, each with its own optimizer, named terms of a
            loss, and losses that gather the rows of all ranks).
        round_steps: The number of steps of a round, such as between averages; all but the last are identical.
        normalizes_per_rank: BatchNorm uses only the samples of its rank in training, whatever `sync_batchnorm` is.
        splits_outputs: The option by which no rank has the whole outputs of a sample; empty if a rank has them.
        fails_at_once: If a rank fails, the others fail immediately, so that `micro_batches=auto` can restart the job.
            False if mesh groups or RPC make them wait for it until `backend.timeout_s`.
        is_elastic: The other ranks can continue without a lost one, because each has all parameters.
        splits_optimizer_state: Each rank has only a part of the optimizer's state.
        can_capture: A step can be captured in a CUDA graph: it does not communicate, and `prepare` reads `captures`.
        captures: Steps are captured, known after `resolve`; see `cuda_graph`.
    """

    refusals: Sequence[Refusal] = ()
    resolved_axes: Axes = Axes()
    needs_group: bool = False
    meta_init: bool = False
    is_placeholder: bool = False
    spans_devices: bool = False
    needs_all_gradients: bool = False
    shards_matrices: bool = False
    splits_parameters: bool = False
    can_recompute: bool = True
    draws_in_backward: bool = True
    supported_objectives: Literal["supervised", "one_loss", "several_losses"] = "one_loss"
    round_steps: int = 1
    normalizes_per_rank: bool = False
    splits_outputs: str = ""
    fails_at_once: bool = True
    is_elastic: bool = False
    splits_optimizer_state: bool = False
    can_capture: bool = False
    captures: bool = False

    def axes(self, world_size: int) -> Axes:
        """Return the mesh of a world of this size. Raises ValueError with the rule and the nearest sizes that fit."""
        return Axes(replicate=world_size)

    def at(self, world_size: int) -> Self:
        """Return this mode in a world of this size, before the model is built. Raises ValueError as `axes` does."""
        mode = copy.copy(self)
        mode.resolved_axes = self.axes(world_size)
        return mode

    def check(self, module: nn.Module, activation_checkpointing: Extent) -> list[str]:
        """Return a message for each reason why this mode does not work with this model; see also `refusals`.

        activation_checkpointing: The value of this key; the blocks are not yet recomputed.
        """
        return []

    def fit(self, module: nn.Module) -> Self:
        """Return this mode for the model, after `check`: with another mesh of the same size, if the model requires it.

        Raises ValueError if no mesh fits the model.
        """
        return self

    @abstractmethod
    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        """Prepare the model. All ranks must call it."""


def resolve(parallel: Parallel, config: Config, world_size: int) -> Parallel:
    """Return the mode in a world of this size.

    Raises InputError if no mesh fits the world, if the mode refuses an option, or if a micro-batch would have no
    sample.
    """
    with as_input_error():
        mode = parallel.at(world_size)
    mode.captures = config.cuda_graph
    refused = [
        refusal.message(show(value))
        for refusal in mode.refusals
        if refusal.applies(value := attrgetter(refusal.key)(config), config.parallel)
    ]
    if config.cuda_graph and not mode.can_capture:
        refused.append("cuda_graph=true needs a mode whose steps do not communicate; try parallel=none")
    if config.elastic_every_steps is not None and not mode.is_elastic:
        refused.append(
            f"elastic_every_steps={config.elastic_every_steps} needs a mode in which each rank has all parameters; "
            "try parallel=ddp, allreduce or zero"
        )
    if config.elastic_every_steps is not None and config.sync_batchnorm is False:
        refused.append(
            f"elastic_every_steps={config.elastic_every_steps} does not work with sync_batchnorm=false, because the "
            "statistics of a lost rank would be lost, and later ones depend on the number of ranks; try "
            "sync_batchnorm=auto"
        )
    messages = [*dict.fromkeys(refused)]  # two axes of a mesh may refuse the same
    messages += check_batch(config.batch_size, config.micro_batches, mode.resolved_axes.micro_batches)
    if messages:
        raise InputError(*messages)
    return mode


def check_divides(key: str, size: int, world_size: int) -> None:
    """Raise ValueError if an axis of this size does not divide the world."""
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    if size not in divisors:
        nearest = sorted(sorted(divisors, key=lambda number: abs(number - size))[:2])
        ranks = f"{world_size} rank" + "s" * (world_size > 1)
        raise ValueError(f"{key}={size} must divide the world of {ranks}; try {' or '.join(map(str, nearest))}")
