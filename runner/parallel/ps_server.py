"""The parameter server: what trainers call on it by RPC, and how its loop waits for them."""

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rendezvous import register_rendezvous_handler

from runner.distributed.network import GLOO, TENSORPIPE, listening_on, loopback
from runner.distributed.peer_failure import PeerMissing
from runner.distributed.traffic import count_rpc
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.parallel.gradient_sum import flatten_gradients, set_gradients
from runner.parallel.replica import Replica
from runner.training.objective import Within
from runner.training.pytree import map_tensors
from runner.training.strategy import Recipe
from runner.training.supervised import call

SERVER = "rank0"
GIVE_UP_S = 5.0  # for the server to hear that a trainer has failed
Reply = tuple[torch.Tensor, float | None]  # the weights after a step, flat, and the norm of its gradient


class Server:
    """Weights and optimizer, and what trainers sent. RPC threads and the loop's thread share it."""

    def __init__(self, recipe: Recipe, num_trainers: int, timeout_s: float):
        optimizer = recipe.make_optimizer(recipe.module.parameters())
        self.replica = Replica(recipe, optimizer)
        self.module, self.optimizer, self.device = recipe.module, optimizer, recipe.device
        self.trained = [p for p in recipe.module.parameters() if p.requires_grad]
        self.num_trainers, self.timeout_s = num_trainers, timeout_s
        self.distributed: DistributedOptimizer | None = None
        self.update_lock = threading.Lock()  # no reader sees half an update
        self._changed = threading.Condition()
        self._closed, self._why = False, "the parameter server has left"
        self._arrived: dict[int, tuple[torch.Tensor | None, torch.futures.Future[Reply]]] = {}
        self._allowed = self._taken = self._applied = 0  # asynchronous updates
        self._wants_norm = False
        self._norm: float | None = None
        self._num_threads = torch.get_num_threads()

    # -- in the loop's thread --------------------------------------------------------------------------------------

    def step_together(self, lr_factor: float, want_norm: bool) -> float | None:
        """Wait for all trainers' gradients, make one update of their sum, and send the weights to all."""
        with self._changed:
            trainers = range(1, self.num_trainers + 1)
            self._wait(
                lambda: len(self._arrived) == self.num_trainers,
                lambda: f"a gradient of ranks {[rank for rank in trainers if rank not in self._arrived]}",
            )
            arrived, self._arrived = self._arrived, {}
        # In the order of ranks, whatever that of arrival was: the sum is the same to the bit.
        gradients = [gradient for _, (gradient, _) in sorted(arrived.items()) if gradient is not None]
        set_gradients(self.trained, functools.reduce(torch.add, gradients).to(self.device))
        norm = self.replica.step(lr_factor, want_norm)
        reply = self.weights().detach(), norm
        for _, future in arrived.values():
            count_rpc(reply)
            future.set_result(reply)
        return norm

    def step_apart(self, lr_factor: float, want_norm: bool) -> float | None:
        """Let as many updates happen as there are trainers. Returns the norm of the last one's gradient."""
        with self._changed:
            self.replica.update.set_learning_rate(lr_factor)
            self._wants_norm = want_norm
            self._allowed += self.num_trainers
            self._changed.notify_all()
            self._wait(lambda: self._applied == self._allowed, lambda: "an update of every trainer")
        return self._norm

    def give_up(self, why: str) -> None:
        """Another rank has died or failed: RPC does not tell who waits for it."""
        with self._changed:
            self._closed, self._why = True, why
            self._changed.notify_all()

    def close(self) -> None:
        """Let no RPC thread wait any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.distributed = None

    # -- in RPC threads --------------------------------------------------------------------------------------------

    def receive(self, rank: int, gradient: torch.Tensor | None) -> torch.futures.Future[Reply]:
        future: torch.futures.Future[Reply] = torch.futures.Future()
        with self._changed:
            self._arrived[rank] = gradient, future
            self._changed.notify_all()
        return future

    def apply(self, context: int | None) -> None:
        """Update by the gradients of a distributed autograd context; without one, only count."""
        with self._changed:  # the learning rate is that of the loop's step
            self._wait(lambda: self._taken < self._allowed, lambda: "the server's next step")
            self._taken += 1
        if context is not None:
            assert self.distributed is not None
            self.distributed.step(context)
        with self._changed:
            self._applied += 1
            self._changed.notify_all()

    def step(self) -> None:
        """What DistributedOptimizer calls when it has put a context's gradients in place, one at a time."""
        with self.update_lock:
            self._norm = self.replica.update.apply(self._wants_norm)

    def weights(self) -> torch.Tensor:
        """A copy of what is trained, flat, on the CPU; gradients of it reach the parameters."""
        with self.update_lock:
            return torch.cat([parameter.reshape(-1) for parameter in self.trained]).cpu()

    def forward(self, inputs: Any) -> Any:
        torch.set_num_threads(self._num_threads)  # each thread has its own number
        with self.update_lock, self.replica.precision.autocast():
            # Of a copy: another trainer's update may come before this one's backward, which needs these weights.
            copies = {f"model.{name}": parameter.clone() for name, parameter in self.module.named_parameters()}
            inputs = map_tensors(lambda tensor: tensor.to(self.device), inputs)
            outputs = torch.func.functional_call(Within(self.module), copies, (call, inputs))
            return map_tensors(torch.Tensor.cpu, outputs)

    def gradients(self, context: int) -> torch.Tensor:
        """Of what is trained, flat (`flatten_gradients`)."""
        found = dist_autograd.get_gradients(context)
        return flatten_gradients(self.trained, [found.get(parameter) for parameter in self.trained])

    def _wait(self, holds: Callable[[], bool], what: Callable[[], str]) -> None:
        if not self._changed.wait_for(lambda: self._closed or holds(), self.timeout_s):
            raise PeerMissing(f"{what()} did not come within backend.timeout_s={self.timeout_s:g}")
        if self._closed:
            raise JobFailed(self._why, follows=True)


# -- what trainers call: RPC finds functions by name, so this process's server has one ---------------------------------

_servers: list[Server] = []
_stores: list[torch.distributed.Store] = []


@rpc.functions.async_execution
def push(rank: int, gradient: torch.Tensor | None) -> torch.futures.Future[Reply]:
    """Hand in a trainer's gradient. The reply comes when the server has made its step."""
    count_rpc(gradient)
    return _servers[0].receive(rank, gradient)


@rpc.functions.async_execution
def push_context(rank: int, context: int | None) -> torch.futures.Future[Reply]:
    """As `push`, the gradient being on the server already."""
    return _servers[0].receive(rank, None if context is None else _servers[0].gradients(context))


def apply(context: int | None) -> None:
    _servers[0].apply(context)


def weights(with_gradient: bool) -> torch.Tensor:
    flat = _servers[0].weights()
    reply = flat if with_gradient else flat.detach()
    count_rpc(reply, returning(reply))
    return reply


def give_up() -> None:
    """A trainer has failed."""
    for server in _servers:
        server.close()


def forward(inputs: Any) -> Any:
    outputs = _servers[0].forward(inputs)
    count_rpc(inputs, outputs, returning(outputs))
    return outputs


def returning(reply: object) -> torch.Tensor | None:
    """What distributed autograd sends back of a reply: its gradient, as large as it is."""
    return reply if isinstance(reply, torch.Tensor) and reply.requires_grad else None


def _the_server(parameters: list[nn.Parameter]) -> Server:
    """In the place of an optimizer's class: the one optimizer of all trainers."""
    return _servers[0]


# -- the RPC world -----------------------------------------------------------------------------------------------------


def join_rpc(world: World, server: Server | None, allow_network: bool) -> None:
    """Connect the ranks for the rest of the job; this rank is the server if it has one. All ranks must call it."""
    _servers[:], _stores[:] = [server] if server else [], [world.store.topic("rpc")]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="runner://",  # its own store would listen on all interfaces
        rpc_timeout=world.backend.timeout_s,
        num_worker_threads=max(16, 2 * world.world_size),  # a trainer's update may wait in one, and needs another
    )
    with nullcontext() if allow_network else listening_on(loopback(), [GLOO, TENSORPIPE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch does, inside
        rpc.init_rpc(f"rank{world.rank}", rank=world.rank, world_size=world.world_size, rpc_backend_options=options)
    if server is not None:
        world.watch.at_alarm(server.give_up)
    world.group.at_leave(functools.partial(_leave_rpc, timeout_s=world.backend.timeout_s))
    if server is not None:
        # It stays on the server: a second job in this process could pass no reference to a remote object around,
        # because torch binds those to the first job's agent.
        with _quiet("torch.distributed.optim.optimizer"):
            references = [rpc.RRef(parameter) for parameter in server.trained]
            server.distributed = DistributedOptimizer(_the_server, references)


def _leave_rpc(went_well: bool, timeout_s: float) -> None:
    for server in _servers:
        server.close()
    if not went_well and not _servers:
        with suppress(RuntimeError):  # the server would wait for this trainer's gradient until its timeout
            rpc.rpc_sync(SERVER, give_up, timeout=GIVE_UP_S)
    with suppress(RuntimeError):  # a peer is gone; what there is on this rank is shut down all the same
        rpc.shutdown(graceful=went_well, timeout=timeout_s)
    _servers.clear()
    _stores.clear()


def _rendezvous(url: str, **options: object) -> Iterator[tuple[torch.distributed.Store, int, int]]:
    yield _stores[0], -1, -1  # init_rpc knows rank and world_size


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the advice to use TorchScript's optimizers, which are deprecated."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


register_rendezvous_handler("runner", _rendezvous)
