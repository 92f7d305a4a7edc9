"""Local SGD: ranks step alone on their own samples; every few steps their weights are averaged, weighted by samples."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from runner.config.schema import Config
from runner.distributed.sync_batch_norm import use_group
from runner.distributed.world import World
from runner.parallel.gradient_sum import sum_gradients
from runner.parallel.optimizer_state import optimizer_state
from runner.parallel.replica import Replica
from runner.parallel.weighted_average import average_in_place
from runner.training.batch import MicroBatch, StepBatch
from runner.training.losses import MeanLoss
from runner.training.objective import Prediction
from runner.training.saved_state import MODEL, HeldState, Piece, SavedState
from runner.training.strategy import Axes, Carries, Recipe, Stepping


class LocalSGD:
    """parallel=local_sgd (Stich, "Local SGD Converges Fast and Communicates Little", 2019).

    With an outer learning rate and momentum it is DiLoCo (Douillard et al. 2023): the move from the last average to
    the new one is the gradient of an outer SGD. Not the numbers of parallel=none, except with every=1, SGD without
    momentum and no BatchNorm.
    """

    needs_group = False
    meta_init = False
    spans_devices = False
    carries: Carries = "one_loss"
    fails_at_once = True

    def __init__(
        self,
        every: int = 4,
        warmup_steps: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
    ):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1; try 4")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be at least 0")
        if outer_lr <= 0:
            raise ValueError(f"outer_lr={outer_lr} must be above 0; try 1.0")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum} must be at least 0 and below 1; try 0.9")
        if nesterov and outer_momentum == 0:
            raise ValueError("nesterov=true has no effect without momentum; try parallel.outer_momentum=0.9")
        self.every, self.warmup_steps = every, warmup_steps
        self.outer = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": nesterov}

    def axes(self, world_size: int) -> Axes:
        return Axes(replicate=world_size)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        if config.ema.decay is not None:
            return [
                f"ema.decay={config.ema.decay:g}: under parallel=local_sgd no rank has the weights between two "
                "averagings, of which a mean over the steps could be kept; try parallel=ddp, or ema.decay=null"
            ]
        if config.on_nonfinite == "skip" or config.loss_spike is not None:
            key = f"loss_spike={config.loss_spike}" if config.on_nonfinite != "skip" else "on_nonfinite=skip"
            fix = "loss_spike=null" if config.on_nonfinite != "skip" else "on_nonfinite=stop"
            return [f"{key}: under parallel=local_sgd the ranks do not ask each other in each step; try {fix}"]
        if config.sync_batchnorm is True:
            return [
                "sync_batchnorm=true: under parallel=local_sgd no rank waits for another within a step; try "
                "sync_batchnorm=auto, which averages the running statistics with the weights"
            ]
        return []

    def prepare(self, recipe: Recipe, world: World) -> "LocalReplica":
        if world.world_size > 1:
            use_group(recipe.module, dist.new_subgroups(1)[0])  # BatchNorm sees this rank's batch alone
            for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
                dist.broadcast(tensor.data, src=0)
        return LocalReplica(recipe, world, self)


class LocalReplica:
    """One rank's model between two averagings.

    A round is `every` local steps. In a local step the gradient is that of the mean over this rank's samples, and a
    rank without a sample does not step. The round's end averages parameters and floating-point buffers, each rank
    weighted by its samples of the round, and the outer step follows. Optimizer states stay each rank's own. The
    model that is evaluated and saved is, in mid-round, the average that would be taken now, without outer step;
    training continues from the ranks' own. Gradients are clipped by, and the norm told is, that of a rank's own.
    """

    def __init__(self, recipe: Recipe, world: World, mode: LocalSGD):
        self._world, self._mode = world, mode
        self._module, self._optimizer = recipe.module, recipe.make_optimizer(recipe.module.parameters())
        self._replica = Replica(recipe, self._optimizer, sum_over=self._sum_in_warm_up, reduce=self._reduce)
        # What is frozen is the same on all ranks, and would not be any more when it was averaged with weights.
        self._parameters = [p for p in recipe.module.parameters() if p.requires_grad]
        still = {b for m in recipe.module.modules() if isinstance(m, _NormBase) and not m.training for b in m.buffers()}
        self._buffers = [b for b in recipe.module.buffers() if b not in still]
        self._anchor = [p.detach().clone() for p in self._parameters]  # where the round began
        self._outer = torch.optim.SGD(self._anchor, **mode.outer)  # type: ignore[arg-type]
        self._own: list[torch.Tensor] = []  # this rank's tensors while the module holds the average of a mid-round
        self._steps = 0  # of the whole run
        self._round_steps = 0
        self._round_samples = 0  # of this rank
        self._step_samples = 0
        self._refused = ""

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Add up the step's gradients. Returns this rank's share of the global batch's mean loss, detached, ()."""
        if self._refused:
            raise ValueError(self._refused)
        self._hide_average()
        present = [m for m in batch.micro_batches if m.num_samples]
        self._step_samples = sum(m.num_samples for m in present)
        if self._warms_up:
            return self._replica.forward_backward(StepBatch(present, batch.num_samples, batch.wait_s))
        mean = self._replica.forward_backward(StepBatch(present, self._step_samples, batch.wait_s))
        return MeanLoss(mean, self._step_samples).share(batch.num_samples)

    def gradients(self) -> list[torch.Tensor]:
        """Of this rank's samples, but in warm-up."""
        return self._replica.gradients()

    def skip(self) -> None:
        raise NotImplementedError("refused by check: the ranks do not ask each other in each step")

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Update this rank's parameters; in warm-up and at a round's end all ranks must call it."""
        norm: float | None = 0.0 if want_norm else None
        if self._warms_up or self._step_samples:
            norm = self._replica.step(lr_factor, want_norm)
        self._round_samples += self._step_samples
        if self._warms_up:
            self._average(self._buffers)
            self._begin_round()
        else:
            self._round_steps += 1
            if self._round_steps >= self._mode.every:
                self._average(self._averaged)
                self._step_outer()
                self._begin_round()
        self._steps += 1
        return norm

    @property
    def learning_rate(self) -> float:
        return self._replica.learning_rate

    @property
    def turns(self) -> Mapping[str, Stepping]:
        return {self._replica.turn.name: self}

    def predict(self, micro_batch: MicroBatch) -> Prediction:
        """The average's outputs. All ranks must call it equally often, one whose part of the data is empty too."""
        self._show_average()
        return self._replica.predict(micro_batch)

    def state(self) -> HeldState:
        """As Replica.state, of the average; besides, what each rank needs to resume exactly. All ranks must call it."""
        self._hide_average()
        rank = self._world.rank
        own = optimizer_state(self._module, self._optimizer, lambda parameter, tensor: True)
        own.facts |= {"scaler": self._replica.precision.scaler.state_dict(), "round_samples": self._round_samples}
        self._show_average()
        if self._round_steps:  # what this rank has itself is kept aside meanwhile
            tensors = dict(zip(map(id, self._averaged), self._own, strict=True))
            held = self._module.state_dict(keep_vars=True).items()
            own.pieces |= {f"{MODEL}{name}": Piece.of(tensors.get(id(tensor), tensor)) for name, tensor in held}
        counted = {"steps": self._steps, "round_steps": self._round_steps, "num_ranks": self._world.world_size}
        state = self._replica.state() | HeldState(facts={"local_sgd": counted})
        state |= own.under(f"local_sgd.rank_{rank}")
        if rank == 0:
            state.pieces |= {f"local_sgd.anchor.{i}": Piece.of(tensor) for i, tensor in enumerate(self._anchor)}
            state.pieces |= {name: Piece.of(tensor) for name, tensor in self._outer_state().items()}
        return state

    def _outer_state(self) -> dict[str, torch.Tensor]:
        """What the outer optimizer keeps, by full names."""
        return {
            f"local_sgd.outer.{number}.{key}": tensor
            for number, kept in self._outer.state_dict()["state"].items()
            for key, tensor in kept.items()
            if tensor is not None
        }

    def load_state(self, saved: SavedState) -> None:
        """Resume exactly on as many ranks; on another number from the average, with rank 0's optimizer state.

        In mid-round another number of ranks can evaluate, but the next step raises ValueError. A checkpoint of another
        mode begins with the warm-up. All ranks must call it.
        """
        self._own, self._refused = [], ""
        local = saved.facts.get("local_sgd")
        if local is None:
            self._replica.load_state(saved)
            self._begin_round()
            self._steps = 0
            return
        same = local["num_ranks"] == self._world.world_size
        own = saved.under(f"local_sgd.rank_{self._world.rank}") if same else saved
        self._replica.load_weights(own if same and own.model() else saved)
        self._replica.load_optimizer(own)
        self._begin_round()
        self._steps = local["steps"]
        outer = {
            number: {"momentum_buffer": torch.empty_like(anchor)}
            for number, anchor in enumerate(self._anchor)
            if f"local_sgd.outer.{number}.momentum_buffer" in saved.tensors
        }
        groups = self._outer.state_dict()["param_groups"]
        self._outer.load_state_dict({"state": outer, "param_groups": groups})
        saved.read(self._outer_state())
        if same:
            self._round_steps = local["round_steps"]
            self._round_samples = own.facts["round_samples"]
            saved.read({f"local_sgd.anchor.{i}": tensor for i, tensor in enumerate(self._anchor)})
        elif local["round_steps"]:
            self._refused = (
                f"the checkpoint of {local['num_ranks']} local_sgd ranks was taken {local['round_steps']} steps after "
                f"an averaging, and {self._world.world_size} ranks cannot share them out; resume on "
                f"{local['num_ranks']} ranks"
            )

    def weights(self) -> dict[str, torch.Tensor]:
        """The average. All ranks must call it."""
        self._show_average()
        return self._replica.weights()

    def load_weights(self, saved: SavedState) -> None:
        """Begin a round with them. All ranks must call it."""
        self._own = []
        self._replica.load_weights(saved)
        self._begin_round()

    def held(self) -> dict[str, torch.Tensor]:
        return self._replica.held()

    def changed(self) -> None:
        self._replica.changed()

    @property
    def _warms_up(self) -> bool:
        return self._steps < self._mode.warmup_steps

    def _begin_round(self) -> None:
        self._round_steps = self._round_samples = 0
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            anchor.copy_(parameter.detach())

    @torch.no_grad()
    def _step_outer(self) -> None:
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            anchor.grad = anchor - parameter
        self._outer.step()
        self._outer.zero_grad()
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            parameter.copy_(anchor)

    def _reduce(self, parameters: Any) -> None:
        """In warm-up, sum the gradients over the ranks. All ranks must call it."""
        if self._warms_up:
            sum_gradients(parameters, self._sum_in_warm_up)

    def _sum_in_warm_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the ranks; outside of the warm-up each rank's is its own. All ranks must call it."""
        return self._world.collectives.sum(tensor) if self._warms_up else tensor

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Average in place, weighted by the ranks' samples of the round. All ranks must call it."""
        average_in_place(tensors, self._round_samples, self._world)

    def _show_average(self) -> None:
        if self._round_steps and not self._own:
            self._own = [tensor.detach().clone() for tensor in self._averaged]
            self._average(self._averaged)

    @property
    def _averaged(self) -> list[torch.Tensor]:
        return [*self._parameters, *self._buffers]

    @torch.no_grad()
    def _hide_average(self) -> None:
        for tensor, own in zip(self._averaged, self._own, strict=bool(self._own)):
            tensor.copy_(own)
        self._own = []
