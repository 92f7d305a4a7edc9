"""A parameter server: rank 0 keeps the weights and the optimizer, the other ranks compute gradients for it."""

from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch._utils import _unflatten_dense_tensors

from runner.checkpoints.extra_state import copy_extra_state, with_extra_state
from runner.checkpoints.saved_state import LocalState, SavedState
from runner.distributed.sync_batch_norm import has_batch_norm, use_group
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.batch import MicroBatch, StepBatch
from runner.input.pytree import map_tensors
from runner.objectives.objective import Prediction
from runner.objectives.supervised import Supervised
from runner.optimization.lr_schedules import Scheduled
from runner.parallel import parameter_server_rpc as server_rpc
from runner.parallel.parameter_server_rpc import Server, join_rpc, request
from runner.parallel.parameter_update import flatten_gradients, weight_factor
from runner.parallel.replica import Replica
from runner.training.mode import Axes, Parallel, ParallelModel, Recipe
from runner.training.model.activation_checkpointing import Extent
from runner.training.model.submodules import attached_loss
from runner.training.refusal import Refusal


class ParameterServer(Parallel):
    """parallel=ps (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014).

    updates=sync computes the same numbers as parallel=none. With updates=async, each trainer's part of the global
    gradient is a separate update, at weights that the others may have changed since they were fetched. No trainer gets
    more than one step ahead of another, because all ranks vote after each step whether to stop.
    """

    needs_group = True
    fails_at_once = False
    refusals = (
        Refusal("precision", "{setting}: parallel=ps has no loss scale that ranks share", "try bf16", values=("fp16",)),
        Refusal(
            "clip_grad_norm",
            "{setting}: parallel.updates=async has no whole gradient",
            "try sync",
            given="updates=async",
        ),
        Refusal(
            "on_nonfinite",
            "{setting}: parallel.updates=async applies gradients at once",
            "try stop",
            values=("skip",),
            given="updates=async",
        ),
        Refusal("replay_every_steps", "{setting} needs updates=sync and forward=local", given="updates=async"),
        Refusal("replay_every_steps", "{setting} needs updates=sync and forward=local", given="forward=remote"),
        Refusal(
            "on_nonfinite",
            "{setting}: parallel.forward=remote has no gradients on trainers",
            "try stop",
            values=("skip",),
            given="forward=remote",
        ),
        Refusal(
            "compile",
            "{setting}: parallel.forward=remote replaces the model's weights at each call",
            given="forward=remote",
        ),
        Refusal(
            "activation_checkpointing",
            "parallel.forward=remote: activation_checkpointing may use other weights in backward",
            given="forward=remote",
        ),
    )

    def __init__(
        self,
        updates: Literal["sync", "async"] = "sync",
        forward: Literal["local", "remote"] = "local",
        allow_network: bool = False,
    ):
        self.is_async, self.is_remote, self.allow_network = updates == "async", forward == "remote", allow_network
        self.supported_objectives = "supervised" if self.is_remote else "one_loss"
        self.can_recompute = self.draws_in_backward = not self.is_remote

    def axes(self, world_size: int) -> Axes:
        if world_size < 2:
            raise ValueError(
                f"parallel=ps needs at least 2 ranks, a server and a trainer, but the world has {world_size}; "
                "try launcher=spawn launcher.nproc_per_node=2"
            )
        return Axes(replicate=world_size - 1, servers=1)

    def check(self, module: nn.Module, activation_checkpointing: Extent) -> list[str]:
        messages = []
        if self.is_remote and has_batch_norm(module):
            messages.append("parallel.forward=remote: BatchNorm would see only one trainer's samples")
        if self.is_remote and attached_loss(module) is not None:
            messages.append("parallel.forward=remote: no rank would update the loss")
        return messages

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        if not self.allow_network and world.rank_info.local_world_size < world.world_size:
            raise ValueError(
                "parallel.allow_network=false: the ranks are on several machines, and RPC executes any code that it "
                "receives; in a network that you trust set parallel.allow_network=true"
            )
        for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
            dist.broadcast(tensor.data, src=0)
        trainers: Any = dist.new_group(list(range(1, world.world_size)))
        if world.rank == 0:
            model = ServerModel(recipe, world, self)
            join_rpc(world, model.server, self.allow_network)
            return model
        join_rpc(world, None, self.allow_network)
        use_group(recipe.module, trainers)  # for SyncBatchNorm: the server calls no forward
        return TrainerModel(recipe, world, self)


class SynchronizedReplica(Replica):
    """A parallel model that waits for all ranks whenever weights are read or written between two steps."""

    def __init__(self, recipe: Recipe, world: World, mode: ParameterServer, **options: Any):
        super().__init__(recipe, recipe.make_optimizer(recipe.module.parameters()), **options)
        self._world, self._is_async, self._is_remote = world, mode.is_async, mode.is_remote
        # Only these exist on all ranks: the server calls no forward, which may create others.
        self._written = recipe.written
        self._buffer_shapes = {name: buffer.shape for name, buffer in recipe.module.named_buffers()}

    def load_weights(self, saved: SavedState) -> None:
        super().load_weights(saved)
        self._wait_for_all()

    def parameters_written(self) -> None:
        """Let the trainers fetch the new weights only after this call. All ranks must call it."""
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Wait for all ranks, so that the updates of all are applied. All ranks must call it."""
        self._world.collectives.sum(torch.zeros(1, device=self._world.device))

    def _broadcast_state(self) -> None:
        """Send what the first trainer's forward changes to all: buffers, parameters that it writes, and extra states.

        Under remote forwards, it is the server's forward that changes them. All ranks must call it.
        """
        source = 0 if self._is_remote else 1
        for name, shape in self._buffer_shapes.items():
            buffer = self.module.get_buffer(name)
            if buffer.shape != shape:
                raise JobFailed(
                    f"forward has changed the shape of the buffer {name} from {list(shape)} to {list(buffer.shape)}, "
                    "but the ranks of parallel=ps need equal shapes; create the buffer with its final shape"
                )
            dist.broadcast(buffer, src=source)
        for name in self._written:
            dist.broadcast(self.module.get_parameter(name).data, src=source)
        if modules := with_extra_state(self.module):
            states = self._world.collectives.gather_objects(copy_extra_state(modules))
            for part, state in zip(modules.values(), (states or [{}] * 2)[source].values(), strict=states is not None):
                part.set_extra_state(state)


class ServerModel(SynchronizedReplica):
    """The parallel model of rank 0: it reads no samples, and in its step the trainers' updates are applied."""

    def __init__(self, recipe: Recipe, world: World, mode: ParameterServer):
        super().__init__(recipe, world, mode)
        self.server = Server(recipe, self.update, world.world_size - 1, mode.is_async, world.backend.timeout_s)

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Take part in the sum of the trainers' loss weights, which all ranks must call."""
        if not self.objective.weighted_by_samples:
            with self.server.allowing_forwards():
                self._world.collectives.sum(torch.zeros((), dtype=torch.float64, device=self._world.device))
        return torch.zeros((), dtype=self.precision.parameter_dtype, device=self._world.device)

    def step(self, scheduled: Scheduled, want_norm: bool) -> torch.Tensor | None:
        return _as_tensor(self.server.step(scheduled, want_norm))

    def predict(self, micro_batch: MicroBatch) -> None:
        self._wait_for_all()

    def state(self) -> LocalState:
        self._broadcast_state()
        return super().state()

    def weights(self) -> dict[str, Any]:
        self._broadcast_state()
        return super().weights()


class TrainerModel(SynchronizedReplica):
    """The parallel model of a trainer."""

    def __init__(self, recipe: Recipe, world: World, mode: ParameterServer):
        # The optimizer has no states, because it is never stepped.
        super().__init__(recipe, world, mode, sum_over=world.collectives.sum)
        self._device = recipe.device
        self._trained = [p for p in recipe.module.parameters() if p.requires_grad]
        self._context: int | None = None  # of distributed autograd, from a remote forward to the step
        self._contexts = ExitStack()
        self._num_samples = 0  # of this step on this rank
        self._fresh = True  # this rank has the server's weights

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        self._num_samples = sum(m.num_samples for m in batch.micro_batches)
        if self._is_remote:
            self._context = self._contexts.enter_context(dist_autograd.context())
            return self._forward_remotely(batch, self._context)
        if self._is_async:
            self._fetch()
        return super().forward_backward(batch)

    def skip(self) -> None:
        """Drop the gradients, and the autograd context that a step would have used."""
        super().skip()
        self._contexts.close()

    def step(self, scheduled: Scheduled, want_norm: bool) -> torch.Tensor | None:
        """Send the gradients. Return the norm in the server's reply."""
        self.update.set_scheduled(scheduled)
        gradient: torch.Tensor | int | None = None  # without samples
        if self._num_samples and self._is_remote:
            gradient = self._context  # the server has the gradient of a remote forward
        elif self._num_samples:
            gradient = flatten_gradients(self._trained, [parameter.grad for parameter in self._trained]).cpu()
        weights, norm = request(server_rpc.push, self._world.rank, gradient)
        self._fresh = weights is not None
        if weights is not None:
            self._set_weights(weights)
        self.module.zero_grad(set_to_none=True)
        self._contexts.close()
        return _as_tensor(norm) if want_norm else None

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """Run the model with the server's weights. All ranks must call it the same number of times."""
        self._wait_for_all()
        if not self._fresh:
            self._fetch()
        return super().predict(micro_batch)

    def state(self) -> LocalState:
        self.weights()
        return LocalState()

    def weights(self) -> dict[str, Any]:
        """Return nothing: the server returns the weights, with this rank's state. All ranks must call it."""
        self._broadcast_state()
        return {}

    def load_weights(self, saved: SavedState) -> None:
        self._fresh = True
        super().load_weights(saved)

    def load_optimizer(self, saved: SavedState) -> None:
        """Do nothing: only the server's optimizer has states."""

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters, or none under asynchronous updates, because only the server's weights are current."""
        return {} if self._is_async else super().local_parameters()

    def parameters_written(self) -> None:
        self._fresh = not self._is_async
        super().parameters_written()

    def _forward_remotely(self, batch: StepBatch, context: int) -> torch.Tensor:
        """Run forward and backward on the server, which keeps the activations of all micro-batches for one backward."""
        assert isinstance(self.objective, Supervised)
        total = torch.zeros((), dtype=self.precision.parameter_dtype, device=self._device)
        weight = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro_batch in batch.micro_batches:
            if micro_batch.num_samples:
                inputs = map_tensors(torch.Tensor.cpu, micro_batch.inputs)
                outputs: Any = request(server_rpc.forward, inputs, list(micro_batch.indices), self._draws.key)
                outputs = map_tensors(lambda tensor: tensor.to(self._device), outputs)
                with self.precision.autocast(), self._draws.following(micro_batch):
                    loss = self.objective.local_loss(outputs, micro_batch)
                total = total + loss.divided_by(batch.num_samples)
                weight += loss.weight
        if not self.objective.weighted_by_samples:
            total = total * weight_factor(batch.num_samples, weight, self._sum_over).to(total)
        if self._num_samples:
            # Once per context: a second backward would wait for the gradients of all tensors that the context has sent.
            dist_autograd.backward(context, [total])
        return total.detach()

    def _fetch(self) -> None:
        self._set_weights(request(server_rpc.weights))
        self._fresh = True

    @torch.no_grad()
    def _set_weights(self, flat: torch.Tensor) -> None:
        weights = _unflatten_dense_tensors(flat.to(self._device), self._trained)
        for parameter, weight in zip(self._trained, weights, strict=True):
            parameter.copy_(weight if parameter.is_complex() else weight.real)


def _as_tensor(norm: float | None) -> torch.Tensor | None:
    return None if norm is None else torch.tensor(norm, dtype=torch.float64)
