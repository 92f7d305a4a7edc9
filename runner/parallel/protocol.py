"""What the loop knows of a way of spreading one model over the world."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from runner.config import Config
from runner.loader import StepBatch
from runner.precision import Precision
from runner.world import World


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

    def data_rank(self, rank: int) -> int | None:
        """Which share of the samples the rank reads; None for a server."""
        return None if rank < self.servers else (rank - self.servers) // (self.stage * self.tensor)


@dataclass(frozen=True)
class Recipe:
    """What a mode spreads: a model with the run's initial weights on this rank's device, and how it is trained."""

    module: nn.Module
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: nn.Module  # (outputs, targets) -> the mean over the samples
    precision: Precision
    clip_grad_norm: float | None
    device: torch.device
    sample: torch.Tensor  # (1, *sample_shape), one of the training data's on the device
    # Gives parts of a module that was built without memory their initial weights, on the device; see runner.deferred.
    materialize: Callable[[Iterable[nn.Module]], None] = lambda parts: None


class Spread(Protocol):
    """A model spread and ready to step; runner.parallel.replica has the usual one."""

    def forward_backward(self, batch: StepBatch) -> torch.Tensor: ...

    def step(self, lr_factor: float, want_norm: bool) -> float | None: ...

    def predict(self, inputs: torch.Tensor) -> torch.Tensor | None: ...  # None: another rank has these outputs

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Parallel(Protocol):
    """One way of spreading a model; a file of runner/parallel and a YAML file of conf/parallel."""

    needs_group: bool  # also in a world of one
    # What a mode may leave out: meta_init (true: the model is built without memory, see Recipe.materialize) and
    # spans_devices (true: a model may be on several devices of one rank).

    def axes(self, world_size: int) -> Axes:
        """The mesh of a world of this size. Raises ValueError with the rule and the nearest sizes that fit.

        It is asked before the model is built and again after `check`, which may have fitted it to the model.
        """

    def check(self, config: Config, module: nn.Module) -> list[str]:
        """Why this mode cannot do what else is chosen for this model, a message each."""

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        """Spread the model. All ranks must call it."""
