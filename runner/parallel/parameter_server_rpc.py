"""The server of parallel=ps: what trainers call on it by RPC, and how the training loop of rank 0 waits for them."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from runner.distributed.failures.peer_failure import PeerMissing
from runner.distributed.network import environment_variables, loopback_only
from runner.distributed.traffic import RPC, count_tensors
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.input.batch import MicroBatch
from runner.input.pytree import map_tensors
from runner.objectives.supervised import call_model
from runner.optimization.lr_schedules import Scheduled
from runner.parallel.parameter_update import ParameterUpdate, flatten_gradients, set_gradients
from runner.training.mode import Recipe
from runner.training.model.deferred_init import call_with

SERVER = "rank0"
Reply = tuple[torch.Tensor | None, float | None]  # the weights after a synchronous step, flat, and the norm


class Server:
    """Weights, optimizer, and the gradients that trainers sent. RPC threads call `receive` and the methods below it."""

    def __init__(self, recipe: Recipe, update: ParameterUpdate, num_trainers: int, is_async: bool, timeout_s: float):
        self.module, self.device, self.precision, self.update = recipe.module, recipe.device, recipe.precision, update
        self.trained, self.draws = [p for p in recipe.module.parameters() if p.requires_grad], recipe.draws
        self.trainers, self.is_async, self.timeout_s = range(1, num_trainers + 1), is_async, timeout_s
        self._update_lock = threading.Lock()  # so that no thread reads partially updated weights
        self._forward_lock = threading.Lock()
        self._changed, self._allows_forwards = threading.Condition(), False
        self._closed, self._reason = False, "the parameter server has exited"
        self._arrived: dict[int, tuple[torch.Tensor | None, torch.futures.Future[Reply]]] = {}
        self._num_threads = torch.get_num_threads()

    def step(self, scheduled: Scheduled, want_norm: bool) -> float | None:
        """Apply the sum of the trainers' gradients, or, if asynchronous, each as it arrives. Return the last norm."""
        norm = 0.0 if want_norm else None
        missing = [*self.trainers]
        while missing:
            with self.allowing_forwards(), self._changed:
                self._wait_for(missing)
                here = [rank for rank in self._arrived if rank in missing]
                # Summed in the order of ranks, not of arrival, so that the sum is bit-identical in each run.
                ranks = here[:1] if self.is_async else sorted(here)
                arrived = [self._arrived.pop(rank) for rank in ranks]
            missing = [rank for rank in missing if rank not in ranks]
            if gradients := [gradient for gradient, _ in arrived if gradient is not None]:
                with self._update_lock:
                    set_gradients(self.trained, functools.reduce(torch.add, gradients).to(self.device))
                    found = self.update.step(scheduled, want_norm)
                    norm = None if found is None else found.item()  # the reply is on the CPU anyway
            reply = None if self.is_async else self.weights(), norm
            for _, future in arrived:
                count_tensors(RPC, reply)
                future.set_result(reply)
        return norm

    @contextmanager
    def allowing_forwards(self) -> Iterator[None]:
        """Let RPC threads call the model in this block, in which the thread of the training loop only waits.

        Elsewhere both threads could draw from the process's random generators, or use the model, at the same time.
        """
        with self._changed:
            self._allows_forwards = True
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._forward_lock:
                self._allows_forwards = False

    def close(self, reason: str | None = None) -> None:
        """End the waiting of all threads, for example after another rank has failed, which RPC does not detect."""
        with self._changed:
            self._closed, self._reason = True, reason or self._reason
            self._changed.notify_all()

    def _wait_for(self, ranks: list[int]) -> None:
        """Wait for the gradients of all of these ranks, or under asynchronous updates of one of them."""
        is_met = any if self.is_async else all
        if not self._changed.wait_for(
            lambda: self._closed or is_met(rank in self._arrived for rank in ranks), self.timeout_s
        ):
            late = [rank for rank in ranks if rank not in self._arrived]
            raise PeerMissing(f"a gradient of ranks {late} did not arrive within backend.timeout_s={self.timeout_s:g}")
        if self._closed:
            raise JobFailed(self._reason, follows=True)

    def receive(self, rank: int, gradient: torch.Tensor | None) -> torch.futures.Future[Reply]:
        future: torch.futures.Future[Reply] = torch.futures.Future()
        with self._changed:
            self._arrived[rank] = gradient, future
            self._changed.notify_all()
        return future

    @torch.no_grad()
    def weights(self) -> torch.Tensor:
        """Return a flat copy of the trained parameters on the CPU."""
        with self._update_lock:
            return torch.cat([parameter.reshape(-1) for parameter in self.trained]).cpu()

    def forward(self, inputs: Any, indices: Sequence[int], key: int) -> Any:
        torch.set_num_threads(self._num_threads)  # each thread has its own number
        with self._forward_lock, self.precision.autocast():
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._allows_forwards)
            # With copies of the parameters: another trainer's update may precede this forward's backward.
            copies = {parameter: parameter.clone() for parameter in self.module.parameters()}
            inputs = map_tensors(lambda tensor: tensor.to(self.device), inputs)
            with self.draws.following(MicroBatch(inputs, indices), key=key):
                outputs = call_with(copies, self.module, call_model, inputs)
            return map_tensors(torch.Tensor.cpu, outputs)

    def gradients(self, context: int) -> torch.Tensor:
        """Return the gradients of a distributed autograd context, flat (`flatten_gradients`)."""
        found = dist_autograd.get_gradients(context)
        return flatten_gradients(self.trained, [found.get(parameter) for parameter in self.trained])


# RPC looks up the functions that trainers call by name, so that they can only use a global server.
_servers: list[Server] = []
_stores: list[torch.distributed.Store] = []


def request(function: Callable[..., Any], *args: Any) -> Any:
    """Call one of the functions below on the server, and count the bytes sent and received."""
    reply = rpc.rpc_sync(SERVER, function, args=args)
    count_tensors(RPC, args, reply, _gradient_of(reply))
    return reply


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(rank: int, gradient: torch.Tensor | int | None) -> torch.futures.Future[Reply]:
    """Send a trainer's gradient, or the autograd context that has it. The future completes when it is applied."""
    count_tensors(RPC, gradient)
    if isinstance(gradient, int):
        gradient = _servers[0].gradients(gradient)
    return _servers[0].receive(rank, gradient)


def weights() -> torch.Tensor:
    flat = _servers[0].weights()
    count_tensors(RPC, flat)
    return flat


def forward(inputs: Any, indices: Sequence[int], key: int) -> Any:
    """Call the server's model. key: of the random numbers of the step."""
    outputs = _servers[0].forward(inputs, indices, key)
    count_tensors(RPC, inputs, outputs, _gradient_of(outputs))
    return outputs


def _gradient_of(reply: object) -> torch.Tensor | None:
    """Return a tensor as large as the gradient that distributed autograd sends back for a reply, if it does."""
    return reply if isinstance(reply, torch.Tensor) and reply.requires_grad else None


def join_rpc(world: World, server: Server | None, allow_network: bool) -> None:
    """Connect the ranks for the rest of the job. server: None except on rank 0. All ranks must call it."""
    _servers[:] = [server] if server else []
    _stores[:] = [torch.distributed.PrefixStore("torch", world.store.namespace("rpc"))]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="runner://",  # torch's own store would listen on all interfaces
        rpc_timeout=world.backend.timeout_s,
        num_worker_threads=max(16, world.world_size),
    )
    with environment_variables({} if allow_network else loopback_only()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # raised by torch's own code
        rpc.init_rpc(f"rank{world.rank}", rank=world.rank, world_size=world.world_size, rpc_backend_options=options)
    if server is not None:
        world.watchdog.on_peer_failure(server.close)
    world.group.on_leave(functools.partial(_leave_rpc, timeout_s=world.backend.timeout_s))


def _leave_rpc(went_well: bool, timeout_s: float) -> None:
    for server in _servers:
        server.close()
    with suppress(RuntimeError):  # a peer has exited; this rank still shuts down
        rpc.shutdown(graceful=went_well, timeout=timeout_s)
    _servers.clear()
    _stores.clear()


def _rendezvous(url: str, **options: object) -> Iterator[tuple[torch.distributed.Store, int, int]]:
    yield _stores[0], -1, -1  # init_rpc knows rank and world_size


register_rendezvous_handler("runner", _rendezvous)
