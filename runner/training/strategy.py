"""What the loop knows of a way of spreading one model over the world."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from runner.config.schema import Config
from runner.config.validate import check_batch
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.batch import MicroBatch, StepBatch
from runner.training.objective import Objective, Prediction
from runner.training.precision import Precision
from runner.training.saved_state import HeldState, SavedState


@dataclass(frozen=True)
class Axes:
    """The mesh of a mode, slowest axis first. Ranks along replicate and shard read different samples."""

    replicate: int = 1
    shard: int = 1
    stage: int = 1
    tensor: int = 1
    servers: int = 0  # the lowest ranks, beside the mesh: they read no samples
    micro_batches: int = 1  # into which the mode cuts each of the configuration's micro-batches

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.stage * self.tensor + self.servers

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    def counts(self, rank: int) -> bool:
        """Whether what the rank computes of its samples counts: of those that compute the very same, the first."""
        return rank >= self.servers and (rank - self.servers) % self.tensor == 0

    def data_rank(self, rank: int) -> int | None:
        """Which share of the samples the rank reads; None for a server."""
        return None if rank < self.servers else (rank - self.servers) // (self.stage * self.tensor)


@dataclass(frozen=True)
class Recipe:
    """What a mode spreads: a model with the run's initial weights on this rank's device, and how it is trained."""

    module: nn.Module
    objective: Objective
    # Of some of the module's parameters, or of another such optimizer's groups; see runner.training.optimizers.
    make_optimizer: Callable[[Iterable[nn.Parameter] | Iterable[dict[str, Any]]], torch.optim.Optimizer]
    precision: Precision
    clip_grad_norm: float | None
    device: torch.device
    sample: Any  # one of the training data's, a batch of one on the device
    # Gives parts of a module that was built without memory their initial weights, on the device; see deferred_init.
    materialize: Callable[[Iterable[nn.Module]], None] = lambda parts: None


# Which objectives a mode carries: a loss of outputs and targets; one that calls the model itself; several, in turn.
Carries = Literal["supervised", "one_loss", "several_losses"]


class Stepping(Protocol):
    """Steps by one of the objective's losses."""

    def forward_backward(self, batch: StepBatch) -> torch.Tensor: ...

    def gradients(self) -> list[torch.Tensor]: ...  # what this rank has of them: whole, or its slices

    def step(self, lr_factor: float, want_norm: bool) -> float | None: ...

    def skip(self) -> None: ...  # in the place of `step`, on all ranks: the gradients are dropped


class Spread(Protocol):
    """A model spread and ready to step; runner.parallel.replica has the usual one."""

    @property
    def turns(self) -> Mapping[str, Stepping]: ...  # of a step, by the names of the objective's losses

    @property
    def learning_rate(self) -> float: ...  # of the last step, as the optimizer has it

    def predict(self, micro_batch: MicroBatch) -> Prediction | None: ...  # None: another rank has these outputs

    def state(self) -> HeldState: ...  # what this rank writes of a checkpoint: its own memory, not copies

    def load_state(self, saved: SavedState) -> None: ...  # this rank's part of a checkpoint, of any mode and world

    def load_weights(self, saved: SavedState) -> None: ...  # the model's alone: the optimizer stays as it is

    def weights(self) -> dict[str, torch.Tensor]: ...  # the whole model by full names, on the CPU of rank 0

    # What this rank has of the trained parameters, by full names, in a fixed order: whole, or a DTensor. They may be
    # written in place, if `changed` is called afterwards, on all ranks.
    def held(self) -> dict[str, torch.Tensor]: ...

    def changed(self) -> None: ...


class Parallel(Protocol):
    """One way of spreading a model; a file of runner/parallel and a YAML file of conf/parallel."""

    needs_group: bool  # also in a world of one
    meta_init: bool  # the model is built without memory, see Recipe.materialize
    spans_devices: bool  # a model may be on several devices of one rank
    carries: Carries
    # A rank that fails frees the others at once. Where groups of a mesh, or RPC, let them wait for it until
    # backend.timeout_s, a job that is out of memory cannot begin again with more micro-batches.
    fails_at_once: bool

    def axes(self, world_size: int) -> Axes:
        """The mesh of a world of this size. Raises ValueError with the rule and the nearest sizes that fit.

        It is asked before the model is built and again after `check`, which may have fitted it to the model.
        """

    def check(self, config: Config, module: nn.Module) -> list[str]:
        """Why this mode cannot do what else is chosen for this model, a message each."""

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        """Spread the model. All ranks must call it."""


def lay_out(config: Config, parallel: Parallel, world_size: int) -> Axes:
    """The mode's mesh of such a world. Raises InputError where there is none, or not a sample for each of its ranks."""
    try:
        axes = parallel.axes(world_size)
    except ValueError as error:
        raise InputError(str(error)) from None
    if messages := check_batch(config, axes.data_ranks, axes.micro_batches):
        raise InputError(*messages)
    return axes
