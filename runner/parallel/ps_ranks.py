"""The ranks of a parameter server in the loop: the one that serves, and the trainers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import rpc

from runner.distributed.traffic import count_rpc
from runner.distributed.world import World
from runner.parallel import ps_server
from runner.parallel.gradient_sum import flatten_gradients
from runner.parallel.ps_server import SERVER, Server
from runner.parallel.replica import Replica
from runner.parallel.total_weight import factor_of
from runner.training.batch import MicroBatch, StepBatch
from runner.training.objective import Prediction
from runner.training.pytree import map_tensors
from runner.training.saved_state import HeldState, SavedState
from runner.training.strategy import Recipe, Stepping
from runner.training.supervised import Supervised


class Mode(Protocol):
    """What the ranks go by of the options of parallel=ps."""

    updates: Literal["sync", "async"]
    forward: Literal["local", "remote"]


class Serving:
    """Rank 0 in the loop: without samples, its step is where the trainers' updates happen."""

    def __init__(self, server: Server, world: World, mode: Mode):
        self._server, self._world, self._mode = server, world, mode
        self._settled = True

    @property
    def turns(self) -> Mapping[str, Stepping]:
        return {self._server.replica.turn.name: self}

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Nothing; the trainers' sum of what their losses weigh is over all ranks."""
        if not self._server.replica.objective.counts_samples:
            self._world.collectives.sum(torch.zeros((), dtype=torch.float64, device=self._world.device))
        return torch.zeros((), dtype=self._server.replica.precision.parameter_dtype, device=self._world.device)

    def gradients(self) -> list[torch.Tensor]:
        """None yet: the trainers have theirs."""
        return []

    def skip(self) -> None:
        """No trainer sends anything."""

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        self._settled = False
        step = self._server.step_together if self._mode.updates == "sync" else self._server.step_apart
        return step(lr_factor, want_norm)

    @property
    def learning_rate(self) -> float:
        return self._server.replica.learning_rate

    def predict(self, micro_batch: MicroBatch) -> None:
        """All ranks must call it as often after a step."""
        self._settled = _settle(self._world, self._settled)

    def state(self) -> HeldState:
        """As Replica.state, with the trainers' buffers. All ranks must call it."""
        _share_buffers(self._server.module, self._mode)
        state = self._server.replica.state()
        if self._mode.forward == "remote":  # the next step's may write buffers before they are copied
            buffers = {buffer.data_ptr() for buffer in self._server.module.buffers()}
            state.pieces |= {
                name: replace(piece, tensor=piece.tensor.clone())
                for name, piece in state.pieces.items()
                if piece.tensor.data_ptr() in buffers
            }
        _settle(self._world, False)  # else the next remote forward would put its copies in the module meanwhile
        return state

    def weights(self) -> dict[str, torch.Tensor]:
        """As Replica.weights, with the trainers' buffers. All ranks must call it."""
        _share_buffers(self._server.module, self._mode)
        weights = self._server.replica.weights()
        _settle(self._world, False)
        return weights

    def load_state(self, saved: SavedState) -> None:
        self._server.replica.load_state(saved)
        _settle(self._world, False)

    def load_weights(self, saved: SavedState) -> None:
        self._server.replica.load_weights(saved)
        _settle(self._world, False)

    def held(self) -> dict[str, torch.Tensor]:
        return self._server.replica.held()

    def changed(self) -> None:
        """Trainers read the server's weights for what comes next. All ranks must call it."""
        _settle(self._world, False)


class Training:
    """A trainer in the loop."""

    def __init__(self, recipe: Recipe, world: World, mode: Mode):
        self._recipe, self._world, self._mode = recipe, world, mode
        # The optimizer is never stepped here and so holds nothing.
        optimizer = recipe.make_optimizer(recipe.module.parameters())
        self._replica = Replica(recipe, optimizer, sum_over=world.collectives.sum)
        self._trained = [p for p in recipe.module.parameters() if p.requires_grad]
        self._fetched: torch.Tensor | None = None  # whose gradient reaches the server
        self._context: int | None = None  # of distributed autograd, from forward_backward to step
        self._contexts = ExitStack()
        self._num_samples = 0  # of this step on this rank
        self._fresh = self._settled = True

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Compute this rank's gradients. Returns its share of the global batch's mean loss, detached, ()."""
        self._num_samples = sum(m.num_samples for m in batch.micro_batches)
        if self._mode.forward == "remote" or self._mode.updates == "async":
            self._context = self._contexts.enter_context(dist_autograd.context())
        if self._mode.forward == "remote":
            assert self._context is not None
            return self._forward_remotely(batch, self._context)
        if self._context is not None:
            self._fetched = _ask(ps_server.weights, True)
            self._set_weights(self._fetched)
        return self._replica.forward_backward(batch)

    def gradients(self) -> list[torch.Tensor]:
        """Of this rank's samples; under remote forwards they are the server's."""
        return self._replica.gradients()

    def skip(self) -> None:
        """Drop them, and with them the autograd context that a step would have used."""
        self._replica.skip()
        self._fetched = self._context = None
        self._contexts.close()

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        """Send the gradients. The norm is told to the server, and here only where the server's reply has it."""
        self._replica.update.set_learning_rate(lr_factor)
        context = self._context if self._num_samples else None  # RPC told the server of it only if it was used
        norm: float | None = 0.0 if want_norm else None
        if self._mode.updates == "async":
            if context is not None and self._fetched is not None:
                # dist_autograd takes a scalar: this one's gradient by the fetched weights is the gradient computed.
                dist_autograd.backward(context, [torch.dot(self._fetched, self._take_gradient())])
            _ask(ps_server.apply, context)
        else:
            if self._mode.forward == "remote":
                weights, norm = _ask(ps_server.push_context, self._world.rank, context)
            else:
                gradients = flatten_gradients(self._trained, [parameter.grad for parameter in self._trained])
                weights, norm = _ask(ps_server.push, self._world.rank, gradients.cpu())
            self._set_weights(weights)
        self._recipe.module.zero_grad(set_to_none=True)
        self._fetched = self._context = None
        self._contexts.close()
        self._fresh = self._mode.updates == "sync"
        self._settled = False
        return norm

    @property
    def turns(self) -> Mapping[str, Stepping]:
        return {self._replica.turn.name: self}

    @property
    def learning_rate(self) -> float:
        """The server's: this rank's optimizer follows its schedule, though it never steps."""
        return self._replica.learning_rate

    def predict(self, micro_batch: MicroBatch) -> Prediction:
        """By the server's weights. All ranks must call it as often after a step."""
        self._settled = _settle(self._world, self._settled)
        if not self._fresh:
            self._set_weights(_ask(ps_server.weights, False))
            self._fresh = True
        return self._replica.predict(micro_batch)

    def state(self) -> HeldState:
        """Nothing: the server has it all but for the buffers. All ranks must call it."""
        _share_buffers(self._recipe.module, self._mode)
        _settle(self._world, False)
        return HeldState()

    def weights(self) -> dict[str, torch.Tensor]:
        """Nothing either. All ranks must call it."""
        _share_buffers(self._recipe.module, self._mode)
        _settle(self._world, False)
        return {}

    def load_state(self, saved: SavedState) -> None:
        self.load_weights(saved)

    def load_weights(self, saved: SavedState) -> None:
        self._replica.load_weights(saved)
        self._fresh = True
        _settle(self._world, False)

    def held(self) -> dict[str, torch.Tensor]:
        """Nothing that lasts under asynchronous updates: there the weights are the server's alone."""
        return self._replica.held() if self._mode.updates == "sync" else {}

    def changed(self) -> None:
        """All ranks must call it."""
        self._fresh = self._mode.updates == "sync"
        _settle(self._world, False)

    def _forward_remotely(self, batch: StepBatch, context: int) -> torch.Tensor:
        """The server's forward and backward. Its activations of all micro-batches wait for the one backward."""
        objective, device = self._recipe.objective, self._recipe.device
        assert isinstance(objective, Supervised)
        total = torch.zeros((), dtype=self._recipe.precision.parameter_dtype, device=device)
        weight = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch in batch.micro_batches:
            if micro_batch.num_samples:
                outputs = _ask(ps_server.forward, map_tensors(torch.Tensor.cpu, micro_batch.inputs))
                with self._recipe.precision.autocast():
                    loss = objective.of_share(map_tensors(lambda tensor: tensor.to(device), outputs), micro_batch)
                total = total + loss.share(batch.num_samples)
                weight += loss.weight
        if not objective.counts_samples:
            total = total * factor_of(batch.num_samples, weight, self._world.collectives.sum).to(total)
        if self._num_samples:
            # One per context: a second one would wait for gradients of all that the context has ever sent.
            dist_autograd.backward(context, [total])
        return total.detach()

    def _take_gradient(self) -> torch.Tensor:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._trained]
        return _flatten_dense_tensors(gradients).cpu()

    @torch.no_grad()
    def _set_weights(self, flat: torch.Tensor) -> None:
        weights = _unflatten_dense_tensors(flat.detach().to(self._recipe.device), self._trained)
        for parameter, weight in zip(self._trained, weights, strict=True):
            parameter.copy_(weight)


def _ask(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on the server."""
    reply = rpc.rpc_sync(SERVER, function, args=args)
    count_rpc(args, reply, ps_server.returning(reply))
    return reply


def _settle(world: World, settled: bool) -> bool:
    """Unless it was done, wait until all ranks are here, their updates applied. All ranks must call it."""
    if not settled:
        world.collectives.sum(torch.zeros(1, device=world.device))
    return True


def _share_buffers(module: nn.Module, mode: Mode) -> None:
    """The first trainer's buffers (BatchNorm's statistics) to all; remote forwards leave them on the server."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=1 if mode.forward == "local" else 0)
