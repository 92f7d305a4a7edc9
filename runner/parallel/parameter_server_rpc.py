"""The server of parallel=ps: what trainers call on it by RPC, and how the training loop of rank 0 waits for them."""

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rendezvous import register_rendezvous_handler

from runner.distributed.failures.peer_failure import PeerMissing
from runner.distributed.network import environment_variables, loopback_only
from runner.distributed.traffic import RPC, count_tensors
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.pytree import map_tensors
from runner.objectives.objective import ForwardWrapper
from runner.objectives.supervised import call_model
from runner.parallel.parameter_update import ParameterUpdate, flatten_gradients, set_gradients
from runner.training.mode import Recipe

SERVER = "rank0"
CLOSE_TIMEOUT_S = 5.0  # for a failed trainer's last call
Reply = tuple[torch.Tensor, float | None]  # the weights after a step, flat, and the norm of its gradient


class Server:
    """Weights and optimizer, and the gradients that trainers sent. The loop's thread and RPC threads call it."""

    def __init__(self, recipe: Recipe, update: ParameterUpdate, num_trainers: int, timeout_s: float):
        self.module, self.device, self.precision, self.update = recipe.module, recipe.device, recipe.precision, update
        self.trained = [p for p in recipe.module.parameters() if p.requires_grad]
        self.num_trainers, self.timeout_s = num_trainers, timeout_s
        self.distributed: DistributedOptimizer | None = None
        self._update_lock = threading.Lock()  # no reader sees half an update
        self._changed = threading.Condition()
        self._closed, self._reason = False, "the parameter server has exited"
        self._arrived: dict[int, tuple[torch.Tensor | None, torch.futures.Future[Reply]]] = {}
        self._allowed = self._started = self._applied = 0  # asynchronous updates
        self._want_norm = False
        self._norm: float | None = None
        self._num_threads = torch.get_num_threads()

    # -- called by the loop's thread -------------------------------------------------------------------------------

    def step_sync(self, lr_factor: float, want_norm: bool) -> float | None:
        """Wait for the gradients of all trainers, apply their sum, and send the weights to all."""
        with self._changed:
            trainers = range(1, self.num_trainers + 1)
            self._wait(
                lambda: len(self._arrived) == self.num_trainers,
                lambda: f"a gradient of ranks {[rank for rank in trainers if rank not in self._arrived]}",
            )
            arrived, self._arrived = self._arrived, {}
        # Summed in the order of ranks, not of arrival, so that the sum is the same to the bit.
        gradients = [gradient for _, (gradient, _) in sorted(arrived.items()) if gradient is not None]
        set_gradients(self.trained, functools.reduce(torch.add, gradients).to(self.device))
        norm = self.update.step(lr_factor, want_norm)
        reply = self.weights().detach(), norm
        for _, future in arrived.values():
            count_tensors(RPC, reply)
            future.set_result(reply)
        return norm

    def step_async(self, lr_factor: float, want_norm: bool) -> float | None:
        """Let each trainer make one update. Return the norm of the last one's gradient."""
        with self._changed:
            self.update.set_learning_rate(lr_factor)
            self._want_norm = want_norm
            self._allowed += self.num_trainers
            self._changed.notify_all()
            self._wait(lambda: self._applied == self._allowed, lambda: "an update of every trainer")
        return self._norm

    def close(self, reason: str | None = None) -> None:
        """Let no thread wait any longer, for example because another rank has failed, which RPC does not detect."""
        with self._changed:
            self._closed, self._reason = True, reason or self._reason
            self._changed.notify_all()

    # -- called by RPC threads -------------------------------------------------------------------------------------

    def receive(self, rank: int, gradient: torch.Tensor | None) -> torch.futures.Future[Reply]:
        future: torch.futures.Future[Reply] = torch.futures.Future()
        with self._changed:
            self._arrived[rank] = gradient, future
            self._changed.notify_all()
        return future

    def apply(self, context: int | None) -> None:
        """Update by the gradients of a distributed autograd context; if there is none, only count the update."""
        with self._changed:  # until the loop's step has set the learning rate
            self._wait(lambda: self._started < self._allowed, lambda: "the server's next step")
            self._started += 1
        if context is not None:
            assert self.distributed is not None
            self.distributed.step(context)
        with self._changed:
            self._applied += 1
            self._changed.notify_all()

    def step(self) -> None:
        """Apply the gradients that DistributedOptimizer has set, one context at a time."""
        with self._update_lock:
            self._norm = self.update.apply(self._want_norm)

    def weights(self) -> torch.Tensor:
        """Return a flat copy of the trained parameters on the CPU, through which gradients reach them."""
        with self._update_lock:
            return torch.cat([parameter.reshape(-1) for parameter in self.trained]).cpu()

    def forward(self, inputs: Any) -> Any:
        torch.set_num_threads(self._num_threads)  # each thread has its own number
        with self._update_lock, self.precision.autocast():
            # With copies of the parameters: another trainer's update may precede this forward's backward.
            copies = {f"model.{name}": parameter.clone() for name, parameter in self.module.named_parameters()}
            inputs = map_tensors(lambda tensor: tensor.to(self.device), inputs)
            outputs = torch.func.functional_call(ForwardWrapper(self.module), copies, (call_model, inputs))
            return map_tensors(torch.Tensor.cpu, outputs)

    def gradients(self, context: int) -> torch.Tensor:
        """Return the gradients of a distributed autograd context, flat (`flatten_gradients`)."""
        found = dist_autograd.get_gradients(context)
        return flatten_gradients(self.trained, [found.get(parameter) for parameter in self.trained])

    def _wait(self, is_met: Callable[[], bool], what: Callable[[], str]) -> None:
        if not self._changed.wait_for(lambda: self._closed or is_met(), self.timeout_s):
            raise PeerMissing(f"{what()} did not arrive within backend.timeout_s={self.timeout_s:g}")
        if self._closed:
            raise JobFailed(self._reason, follows=True)


# -- functions that trainers call; RPC finds them by name, so that the server of this process is a global --------------

_servers: list[Server] = []
_stores: list[torch.distributed.Store] = []


def request(function: Callable[..., Any], *args: Any) -> Any:
    """Call one of the functions below on the server, and count the bytes sent and received."""
    reply = rpc.rpc_sync(SERVER, function, args=args)
    count_tensors(RPC, args, reply, _gradient_of(reply))
    return reply


@rpc.functions.async_execution
def push(rank: int, gradient: torch.Tensor | int | None) -> torch.futures.Future[Reply]:
    """Send a trainer's gradient, or the distributed autograd context in which the server has it.

    The future completes after the server's step.
    """
    count_tensors(RPC, gradient)
    if isinstance(gradient, int):
        gradient = _servers[0].gradients(gradient)
    return _servers[0].receive(rank, gradient)


def apply(context: int | None) -> None:
    _servers[0].apply(context)


def weights(with_gradient: bool) -> torch.Tensor:
    flat = _servers[0].weights()
    reply = flat if with_gradient else flat.detach()
    count_tensors(RPC, reply, _gradient_of(reply))
    return reply


def forward(inputs: Any) -> Any:
    outputs = _servers[0].forward(inputs)
    count_tensors(RPC, inputs, outputs, _gradient_of(outputs))
    return outputs


def close() -> None:
    """Stop the server, because a trainer has failed."""
    for server in _servers:
        server.close()


def _gradient_of(reply: object) -> torch.Tensor | None:
    """Return a tensor as large as the gradient that distributed autograd sends back for a reply, if it does."""
    return reply if isinstance(reply, torch.Tensor) and reply.requires_grad else None


def _the_server(parameters: list[nn.Parameter]) -> Server:
    """Return the server, which serves as the only optimizer of all trainers; called like an optimizer's class."""
    return _servers[0]


# -- the RPC world -----------------------------------------------------------------------------------------------------


def join_rpc(world: World, server: Server | None, allow_network: bool) -> None:
    """Connect the ranks for the rest of the job. server: that of rank 0. All ranks must call it."""
    _servers[:], _stores[:] = [server] if server else [], [world.store.namespace("rpc")]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="runner://",  # torch's own store would listen on all interfaces
        rpc_timeout=world.backend.timeout_s,
        num_worker_threads=max(16, 2 * world.world_size),  # a waiting update occupies a thread and needs another
    )
    with environment_variables({} if allow_network else loopback_only()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # raised by torch's own code
        rpc.init_rpc(f"rank{world.rank}", rank=world.rank, world_size=world.world_size, rpc_backend_options=options)
    if server is not None:
        world.watchdog.on_peer_failure(server.close)
    world.group.on_leave(functools.partial(_leave_rpc, timeout_s=world.backend.timeout_s))
    if server is not None:
        # Created on the server: in a second job of this process, trainers could not send remote references, because
        # torch binds those to the first job's agent.
        logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)  # advises deprecated classes
        references = [rpc.RRef(parameter) for parameter in server.trained]
        server.distributed = DistributedOptimizer(_the_server, references)


def _leave_rpc(went_well: bool, timeout_s: float) -> None:
    for server in _servers:
        server.close()
        server.distributed = None
    if not went_well and not _servers:
        with suppress(RuntimeError):  # otherwise the server would wait for this trainer's gradient until its timeout
            rpc.rpc_sync(SERVER, close, timeout=CLOSE_TIMEOUT_S)
    with suppress(RuntimeError):  # a peer has exited; this rank still shuts down
        rpc.shutdown(graceful=went_well, timeout=timeout_s)
    _servers.clear()
    _stores.clear()


def _rendezvous(url: str, **options: object) -> Iterator[tuple[torch.distributed.Store, int, int]]:
    yield _stores[0], -1, -1  # init_rpc knows rank and world_size


register_rendezvous_handler("runner", _rendezvous)
