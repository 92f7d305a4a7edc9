"""The parameter server in a plan: gradients and weights of the right size arrive at once, without RPC."""

from collections.abc import Callable
from typing import Any

import torch

from runner.distributed.traffic import RPC, count_tensors
from runner.distributed.world import World
from runner.errors import InputError
from runner.optimization.lr_schedules import Scheduled
from runner.parallel.parameter_server import ParameterServer
from runner.parallel.parameter_server_rpc import Server, push
from runner.parallel.parameter_update import flatten_gradients
from runner.training.mode import ParallelModel, Recipe


class ImaginedServer(Server):
    """A server that receives the gradients of all trainers at the start of its step."""

    def step(self, scheduled: Scheduled, want_norm: bool) -> float | None:
        flat = flatten_gradients(self.trained, [None] * len(self.trained))
        size, dtype = flat.numel(), flat.dtype
        del flat  # which a real server does not have
        for rank in self.trainers:
            self._receive(rank, torch.empty(size, dtype=dtype))
        return super().step(scheduled, want_norm)

    def _receive(self, rank: int, gradient: torch.Tensor) -> None:
        count_tensors(RPC, gradient)
        self.receive(rank, gradient)


_prepare = ParameterServer.prepare
_trained: list[torch.Tensor] = []  # the parameters for which the server of a trainer would reply


def prepare(mode: ParameterServer, recipe: Recipe, world: World) -> ParallelModel:
    """Prepare the model as ParameterServer.prepare does."""
    if mode.is_remote or mode.is_async:
        raise InputError("parallel=ps can be planned only with updates=sync and forward=local")
    _trained[:] = [parameter for parameter in recipe.module.parameters() if parameter.requires_grad]
    world.group.on_leave(lambda went_well: _trained.clear())
    return _prepare(mode, recipe, world)


def join_rpc(world: World, server: Server | None, allow_network: bool) -> None:
    """Do nothing: an imagined rank has no connections."""


def request(function: Callable[..., Any], *args: Any) -> Any:
    """Return weights as the server would, and count the bytes sent and received."""
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in _trained])
    reply = (weights, 0.0) if function is push else weights
    count_tensors(RPC, args, reply)
    return reply
