"""The parallel models of parallel=ps in the training loop: that of the server, and that of a trainer."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runner.checkpoints.saved_state import LocalState, SavedState
from runner.distributed.world import World
from runner.input.batch import MicroBatch, StepBatch
from runner.input.pytree import map_tensors
from runner.objectives.objective import Prediction
from runner.objectives.supervised import Supervised
from runner.parallel import parameter_server_rpc as server_rpc
from runner.parallel.parameter_server_rpc import Server, request
from runner.parallel.parameter_update import flatten_gradients, weight_factor
from runner.parallel.replica import Replica
from runner.training.mode import Recipe


class ServerModel(Replica):
    """The parallel model of rank 0: it reads no samples, and in its step the trainers' updates are applied."""

    def __init__(self, recipe: Recipe, world: World, updates: str, forward: str):
        super().__init__(recipe, recipe.make_optimizer(recipe.module.parameters()))
        self.server = Server(recipe, self.update, world.world_size - 1, world.backend.timeout_s)
        self._world, self._updates, self._forward = world, updates, forward

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Do nothing but take part in the sum of the trainers' weights, which is over all ranks."""
        if not self.objective.weighted_by_samples:
            self._world.collectives.sum(torch.zeros((), dtype=torch.float64, device=self._world.device))
        return torch.zeros((), dtype=self.precision.parameter_dtype, device=self._world.device)

    def gradients(self) -> list[torch.Tensor]:
        """Return nothing: only the trainers have gradients."""
        return []

    def skip(self) -> None:
        """Do nothing: the trainers do not send their gradients."""

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        step = self.server.step_sync if self._updates == "sync" else self.server.step_async
        return step(lr_factor, want_norm)

    def predict(self, micro_batch: MicroBatch) -> None:
        """Wait for all updates of the last step. All ranks must call it equally often."""
        _settle(self._world)

    def state(self) -> LocalState:
        """Return the state with the trainers' buffers. All ranks must call it."""
        _broadcast_buffers(self.module, self._forward)
        state = super().state()
        if self._forward == "remote":  # the next step may write buffers before they are copied
            buffers = {buffer.data_ptr() for buffer in self.module.buffers()}
            state.chunks |= {
                name: replace(piece, tensor=piece.tensor.clone())
                for name, piece in state.chunks.items()
                if piece.tensor.data_ptr() in buffers
            }
        _settle(self._world)  # otherwise, the next remote forward could replace parameters meanwhile
        return state

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights with the trainers' buffers. All ranks must call it."""
        _broadcast_buffers(self.module, self._forward)
        weights = super().weights()
        _settle(self._world)
        return weights

    def load_weights(self, saved: SavedState) -> None:
        super().load_weights(saved)
        _settle(self._world)

    def parameters_written(self) -> None:
        """Let the trainers fetch the new weights only after this call. All ranks must call it."""
        _settle(self._world)


class TrainerModel(Replica):
    """The parallel model of a trainer."""

    def __init__(self, recipe: Recipe, world: World, updates: str, forward: str):
        # The optimizer has no states, because it is never stepped.
        super().__init__(recipe, recipe.make_optimizer(recipe.module.parameters()), sum_over=world.collectives.sum)
        self._device, self._world, self._updates, self._forward = recipe.device, world, updates, forward
        self._trained = [p for p in recipe.module.parameters() if p.requires_grad]
        self._fetched: torch.Tensor | None = None  # weights whose gradient reaches the server
        self._context: int | None = None  # of distributed autograd, from forward_backward to step
        self._contexts = ExitStack()
        self._num_samples = 0  # of this step on this rank
        self._fresh = True

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Compute this rank's gradients. Return its part of the global batch's mean loss, detached, ()."""
        self._num_samples = sum(m.num_samples for m in batch.micro_batches)
        if self._forward == "remote" or self._updates == "async":
            self._context = self._contexts.enter_context(dist_autograd.context())
        if self._forward == "remote":
            assert self._context is not None
            return self._forward_remotely(batch, self._context)
        if self._context is not None:
            self._fetched = request(server_rpc.weights, True)
            self._set_weights(self._fetched)
        return super().forward_backward(batch)

    def skip(self) -> None:
        """Drop the gradients, and the autograd context that a step would have used."""
        super().skip()
        self._end_step()

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Send the gradients. Return the norm if the server's reply has it, else 0."""
        self.update.set_learning_rate(lr_factor)
        context = self._context if self._num_samples else None  # unused contexts are unknown to the server
        norm: float | None = 0.0 if want_norm else None
        if self._updates == "async":
            if context is not None and self._fetched is not None:
                # dist_autograd needs a scalar; the gradient of this one by the fetched weights is the computed one.
                gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._trained]
                dist_autograd.backward(context, [torch.dot(self._fetched, _flatten_dense_tensors(gradients).cpu())])
            request(server_rpc.apply, context)
        else:
            gradient: torch.Tensor | int | None = context  # the server has the gradient of a remote forward
            if self._forward == "local":
                gradient = flatten_gradients(self._trained, [parameter.grad for parameter in self._trained]).cpu()
            weights, norm = request(server_rpc.push, self._world.rank, gradient)
            self._set_weights(weights)
        self.module.zero_grad(set_to_none=True)
        self._end_step()
        self._fresh = self._updates == "sync"
        return norm

    def _end_step(self) -> None:
        self._fetched = self._context = None
        self._contexts.close()

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """Run the model with the server's weights. All ranks must call it equally often."""
        _settle(self._world)
        if not self._fresh:
            self._set_weights(request(server_rpc.weights, False))
            self._fresh = True
        return super().predict(micro_batch)

    def state(self) -> LocalState:
        """Return nothing: the server writes everything, with this rank's buffers. All ranks must call it."""
        _broadcast_buffers(self.module, self._forward)
        _settle(self._world)
        return LocalState()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return nothing: the server returns the weights, with this rank's buffers. All ranks must call it."""
        _broadcast_buffers(self.module, self._forward)
        _settle(self._world)
        return {}

    def load_weights(self, saved: SavedState) -> None:
        super().load_weights(saved)
        self._fresh = True
        _settle(self._world)

    def load_optimizer(self, saved: SavedState) -> None:
        """Do nothing: the optimizer is the server's."""

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters, but none under asynchronous updates, in which only the server's weights count."""
        return super().local_parameters() if self._updates == "sync" else {}

    def parameters_written(self) -> None:
        """Fetch the server's new weights before the next use, if updates are asynchronous. All ranks must call it."""
        self._fresh = self._updates == "sync"
        _settle(self._world)

    def _forward_remotely(self, batch: StepBatch, context: int) -> torch.Tensor:
        """Run forward and backward on the server, which keeps the activations of all micro-batches for one backward."""
        assert isinstance(self.objective, Supervised)
        total = torch.zeros((), dtype=self.precision.parameter_dtype, device=self._device)
        weight = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro_batch in batch.micro_batches:
            if micro_batch.num_samples:
                outputs: Any = request(server_rpc.forward, map_tensors(torch.Tensor.cpu, micro_batch.inputs))
                outputs = map_tensors(lambda tensor: tensor.to(self._device), outputs)
                with self.precision.autocast():
                    loss = self.objective.local_loss(outputs, micro_batch)
                total = total + loss.divided_by(batch.num_samples)
                weight += loss.weight
        if not self.objective.weighted_by_samples:
            total = total * weight_factor(batch.num_samples, weight, self._sum_over).to(total)
        if self._num_samples:
            # Once per context: a second backward would wait for the gradients of everything the context has sent.
            dist_autograd.backward(context, [total])
        return total.detach()

    @torch.no_grad()
    def _set_weights(self, flat: torch.Tensor) -> None:
        weights = _unflatten_dense_tensors(flat.detach().to(self._device), self._trained)
        for parameter, weight in zip(self._trained, weights, strict=True):
            parameter.copy_(weight)


def _settle(world: World) -> None:
    """Wait until all ranks are here and their updates are applied. All ranks must call it."""
    world.collectives.sum(torch.zeros(1, device=world.device))


def _broadcast_buffers(module: nn.Module, forward: str) -> None:
    """Send the first trainer's buffers (BatchNorm's statistics) to all; under remote forwards, the server's."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=1 if forward == "local" else 0)
