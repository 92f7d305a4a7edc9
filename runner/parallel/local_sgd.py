"""Local SGD: ranks step separately on their own samples; every few steps their weights are averaged."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _NormBase

from runner.checkpoints.saved_state import MODEL, LocalState, SavedState
from runner.checkpoints.shard_file import LocalChunk
from runner.distributed.collectives import max_over
from runner.distributed.sync_batch_norm import is_batch_norm, use_group
from runner.distributed.world import World
from runner.input.batch import MicroBatch, StepBatch
from runner.objectives.losses import Loss
from runner.objectives.objective import Prediction
from runner.optimization.lr_schedules import Scheduled
from runner.parallel.optimizer_state import optimizer_state
from runner.parallel.parameter_update import sum_gradients
from runner.parallel.replica import Replica
from runner.training.mode import Parallel, Recipe
from runner.training.refusal import Refusal

_REASON = "{setting}: under parallel=local_sgd the ranks do not communicate in each step"


class LocalSGD(Parallel):
    """parallel=local_sgd (Stich, "Local SGD Converges Fast and Communicates Little", 2019).

    With an outer learning rate and momentum it is DiLoCo (Douillard et al. 2023): the difference between the last
    average and the new one is the gradient of an outer SGD. Its numbers differ from those of parallel=none, except with
    every=1, SGD without momentum and no BatchNorm.
    """

    normalizes_per_rank = True
    refusals = (
        Refusal("ema.decay", _REASON, "try ema.decay=null"),
        Refusal("on_nonfinite", _REASON, "try on_nonfinite=stop", values=("skip",)),
        Refusal("loss_spike", _REASON, "try loss_spike=null"),
        Refusal("replay_every_steps", _REASON, "try replay_every_steps=null, or use ddp"),
        Refusal(
            "sync_batchnorm", _REASON, "try sync_batchnorm=auto, which averages the running statistics", values=(True,)
        ),
    )

    def __init__(
        self,
        every: int = 4,
        warmup_steps: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
    ):
        if every < 1 or warmup_steps < 0:
            raise ValueError(f"every={every} must be at least 1, and warmup_steps={warmup_steps} at least 0")
        if outer_lr <= 0:
            raise ValueError(f"outer_lr={outer_lr} must be above 0; try 1.0")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum} must be at least 0 and below 1; try 0.9")
        if nesterov and outer_momentum == 0:
            raise ValueError("nesterov=true has no effect without momentum; try parallel.outer_momentum=0.9")
        self.round_steps = every
        self.warmup_steps = warmup_steps
        self.outer = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": nesterov}

    def prepare(self, recipe: Recipe, world: World) -> "LocalReplica":
        if world.world_size > 1:
            use_group(recipe.module, dist.new_subgroups(1)[0])  # BatchNorm sees only this rank's batch
            for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
                dist.broadcast(tensor.data, src=0)
        return LocalReplica(recipe, world, self)


class LocalReplica(Replica):
    """One rank's model between two averagings.

    A round is `every` local steps. In a local step, the gradient is that of the mean over this rank's samples, and a
    rank without a sample does not step. At the end of a round, parameters and floating-point buffers are averaged, each
    rank weighted by its samples of the round, and the outer step follows. Optimizer states stay local.

    In mid-round, the model that is evaluated and saved is the average that would be computed now, without an outer
    step; training continues from the local weights. The gradient's norm and clipping are local.
    """

    def __init__(self, recipe: Recipe, world: World, mode: LocalSGD):
        optimizer = recipe.make_optimizer(recipe.module.parameters())
        super().__init__(recipe, optimizer, sum_over=self._sum_in_warm_up, reduce=self._sum_gradients_in_warm_up)
        self._world, self._mode = world, mode
        # Frozen tensors are equal on all ranks; an average would round them.
        self._parameters = [p for p in recipe.module.parameters() if p.requires_grad]
        norms = [m for m in recipe.module.modules() if isinstance(m, _NormBase) or is_batch_norm(m)]
        frozen = {buffer for norm in norms if not norm.training for buffer in norm.buffers()}
        written = [recipe.module.get_parameter(name) for name in recipe.written]
        self._buffers = [buffer for buffer in recipe.module.buffers() if buffer not in frozen]
        self._buffers += [parameter for parameter in written if not parameter.requires_grad]
        self._averaged = [*self._parameters, *self._buffers]
        self._anchor = [p.detach().clone() for p in self._parameters]  # the parameters at the start of the round
        self._outer = torch.optim.SGD(self._anchor, **mode.outer)  # type: ignore[arg-type]
        self._shared = {f"local_sgd.anchor.{number}": tensor for number, tensor in enumerate(self._anchor)}
        if mode.outer["momentum"]:
            for number, anchor in enumerate(self._anchor):
                self._outer.state[anchor]["momentum_buffer"] = velocity = torch.zeros_like(anchor)
                self._shared[f"local_sgd.outer.{number}.momentum_buffer"] = velocity
        self._local: list[torch.Tensor] = []  # this rank's tensors while the module has the average of a mid-round
        self._steps = 0  # of the whole run
        self._round_steps = 0
        self._round_samples = 0  # of this rank
        self._step_samples = 0

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        self._hide_average()
        present = [m for m in batch.micro_batches if m.num_samples]
        self._step_samples = sum(m.num_samples for m in present)
        if self._warms_up:
            return super().forward_backward(StepBatch(present, batch.num_samples, batch.wait_s))
        mean = super().forward_backward(StepBatch(present, self._step_samples, batch.wait_s))
        return Loss(mean, self._step_samples, is_mean=True).divided_by(batch.num_samples)

    def step(self, scheduled: Scheduled, want_norm: bool) -> torch.Tensor | None:
        """Update this rank's parameters. In warm-up and at the end of a round, all ranks must call it."""
        norm = torch.zeros((), device=self.device) if want_norm else None
        if self._warms_up or self._step_samples:
            norm = super().step(scheduled, want_norm)
        self._round_samples += self._step_samples
        if self._warms_up:
            self._average(self._buffers)
            self._begin_round()
        else:
            self._round_steps += 1
            if self._round_steps >= self._mode.round_steps:
                self._average(self._averaged)
                self._step_outer()
                self._begin_round()
        self._steps += 1
        return norm

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """Run the average model. All ranks must call it the same number of times, even without samples."""
        self._show_average()
        return super().predict(micro_batch)

    def state(self) -> LocalState:
        """Return the state of the average, and what each rank needs to resume exactly. All ranks must call it."""
        self._hide_average()
        rank = self._world.rank
        own = optimizer_state(self.module, self.optimizer, lambda parameter, tensor: True)
        own |= self._extra_state()
        own.facts |= {"scaler": self.precision.scaler.state_dict(), "round_samples": self._round_samples}
        self._show_average()
        if self._round_steps:
            local = dict(zip(map(id, self._averaged), self._local, strict=True))
            tensors = self.module.state_dict(keep_vars=True).items()
            own.chunks |= {f"{MODEL}{name}": LocalChunk.of(local.get(id(tensor), tensor)) for name, tensor in tensors}
        counts = {"steps": self._steps, "round_steps": self._round_steps, "num_ranks": self._world.world_size}
        state = super().state() | LocalState(facts={"local_sgd": counts})
        state |= own.under(f"local_sgd.rank_{rank}")
        if rank == 0:
            state.chunks |= {name: LocalChunk.of(tensor) for name, tensor in self._shared.items()}
        return state

    def load_state(self, saved: SavedState) -> None:
        """Resume exactly on the same number of ranks; on another number, from the average and rank 0's optimizer state.

        Raises ValueError in mid-round on another number of ranks. From a checkpoint of another mode, the run starts
        with the warm-up. All ranks must call it.
        """
        local = saved.facts.get("local_sgd")
        if local is None:
            super().load_state(saved)
            self._steps = 0
            return
        same = local["num_ranks"] == self._world.world_size
        if local["round_steps"] and not same:
            raise ValueError(
                f"parallel=local_sgd: the checkpoint was saved {local['round_steps']} steps after an averaging; "
                f"resume on {local['num_ranks']} ranks"
            )
        own = saved.under(f"local_sgd.rank_{self._world.rank}") if same else saved
        average = {name: tensor for name, tensor in saved.tensors.items() if name.startswith(MODEL)}
        own = replace(own, tensors={**average, **own.tensors})  # replicas are stored only between two averages
        self.load_weights(own)
        self.load_optimizer(own)
        self._steps = local["steps"]
        for velocity in (tensor for name, tensor in self._shared.items() if name not in saved.tensors):
            velocity.zero_()
        saved.read({name: tensor for name, tensor in self._shared.items() if name in saved.tensors})
        if same:
            self._round_steps = local["round_steps"]
            self._round_samples = own.facts["round_samples"]

    def weights(self) -> dict[str, Any]:
        self._show_average()
        return super().weights()

    def load_weights(self, saved: SavedState) -> None:
        """Load the weights and begin a round. All ranks must call it."""
        self._local = []
        super().load_weights(saved)
        self._begin_round()

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

    def _sum_in_warm_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; after the warm-up each rank keeps its own tensor. All ranks must call it."""
        return self._world.collectives.sum(tensor) if self._warms_up else tensor

    def _sum_gradients_in_warm_up(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._warms_up:
            sum_gradients(parameters, self._world.collectives.sum)

    def _show_average(self) -> None:
        """In mid-round, replace the module's tensors by their averages. All ranks must call it."""
        if self._round_steps and not self._local:
            self._local = [tensor.detach().clone() for tensor in self._averaged]
            self._average(self._averaged)

    @torch.no_grad()
    def _hide_average(self) -> None:
        """Restore this rank's tensors."""
        for tensor, local in zip(self._averaged, self._local, strict=bool(self._local)):
            tensor.copy_(local)
        self._local = []

    @torch.no_grad()
    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Set the tensors to their means, weighted by the ranks' samples of the round. All ranks must call it.

        Counts, such as BatchNorm's number of batches, are set to the largest one.
        """
        if self._world.world_size == 1 or not tensors:
            return
        num_samples = torch.full((), float(self._round_samples), dtype=torch.float64, device=tensors[0].device)
        weight = self._round_samples / self._world.collectives.sum(num_samples)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            same = [t for t in tensors if t.dtype == dtype]
            if not (dtype.is_floating_point or dtype.is_complex):
                for tensor in same:
                    max_over(None, tensor)
                continue
            flat = self._world.collectives.sum(_flatten_dense_tensors(same) * weight)
            for tensor, average in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
                tensor.copy_(average)
