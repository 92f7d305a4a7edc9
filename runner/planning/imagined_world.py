"""A world of imagined ranks: one process runs the code of one of them, with fake tensors and a fake process group."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from runner.distributed.backend import Backend
from runner.distributed.environment import IMAGINED, RankInfo
from runner.distributed.local import exchange
from runner.distributed.traffic import count
from runner.distributed.world import World
from runner.optimization import float8
from runner.parallel import ddp, parameter_server
from runner.planning import imagined_server
from runner.planning.imagined_buckets import ImaginedBuckets

SHAPES = "_propagate_tensor_meta_non_cached"
PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


@contextmanager
def imagined_world(rank: int, world_size: int, backend: Backend, on_gpu: bool) -> Iterator[World]:
    """Create the world and its process group. Tensors that are created in this context are fake.

    They are CPU tensors also with `on_gpu`, because torch creates no streams without a GPU.
    """
    logging.disable()  # each rank of each mode would log its warnings
    world = World(
        RankInfo(rank, rank, world_size=world_size, local_world_size=world_size, source=IMAGINED), None, backend
    )
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (nn.Module, "_apply", _convert),
        (_fsdp_param, "_chunk_with_empty", _chunk_with_empty),
        # A mesh needs the values of its tensor, and DTensor computes shapes with whole tensors that no rank has.
        (DeviceMesh, "__init__", _outside_modes(DeviceMesh.__init__)),
        (ShardingPropagator, SHAPES, _outside_modes(getattr(ShardingPropagator, SHAPES))),
        (ddp, "FixedBuckets", ImaginedBuckets),
        (parameter_server, "Server", imagined_server.ImaginedServer),
        (parameter_server, "join_rpc", imagined_server.join_rpc),
        (parameter_server, "request", imagined_server.request),
        (parameter_server.ParameterServer, "prepare", imagined_server.prepare),
    ]
    if on_gpu:  # bfloat16 attention runs in bfloat16, and float8 is not emulated
        replacements.append((torch.cpu, "_is_amx_tile_supported", lambda: True))
        replacements.append((float8, "is_emulated", lambda device: False))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    exchange.use(_Exchanges())  # type: ignore[arg-type]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        with _FakeTensorMode(allow_non_fake_inputs=True):
            yield world
    finally:
        logging.disable(logging.NOTSET)
        for owner, name, original in originals:
            setattr(owner, name, original)
        exchange.use(None)
        _clear_sharding_prop_cache()  # its meshes contain the groups of this rank, but equal those of other ranks
        world.group.leave(went_well=True)


class _FakeTensorMode(FakeTensorMode):
    """A mode whose cache identifies arguments in a third of the time, because none of them has symbolic sizes."""

    def _prep_args_for_hash(self, result: list[Any], args: Any, *rest: Any) -> None:
        """Append what the result of an operator depends on to its key in the cache."""
        if isinstance(args, dict):
            return super()._prep_args_for_hash(result, args, *rest)
        result.append((type(args), len(args)))
        for arg in args:
            if type(arg) in PLAIN:
                result.append((type(arg), arg))
            elif (
                type(arg) is FakeTensor
                and arg.fake_mode is self
                and arg.constant is None
                and arg.layout is torch.strided
                and not arg.is_quantized
            ):
                memory = arg.stride(), arg.storage_offset(), arg.untyped_storage().nbytes()
                flags = arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference()
                result.append((arg.dtype, arg.fake_device, arg.shape, *memory, *flags))
            elif type(arg) in (list, tuple):
                self._prep_args_for_hash(result, arg, *rest)
            else:  # for example a tensor whose results torch does not keep
                super()._prep_args_for_hash(result, (arg,), *rest)


class _Exchanges:
    """A replacement of the exchanges between ranks of one machine. All other ranks send the same as this rank."""

    on_machine = None

    def of(self, group: dist.ProcessGroup | None) -> "_Exchange | None":
        num_ranks = dist.get_world_size(group)
        return _Exchange(num_ranks) if num_ranks > 1 else None


class _Exchange:
    """A replacement of runner.distributed.local.exchange.LocalExchange."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks

    def sum_large(self, tensor: torch.Tensor) -> None:
        count("all_reduce", tensor.nbytes)

    def gather(self, tensor: torch.Tensor, kind: str = "all_gather") -> torch.Tensor:
        count(kind, tensor.nbytes * (self._num_ranks if kind == "all_gather" else 1))
        return tensor.detach().new_empty(self._num_ranks, *tensor.shape)

    def any_of_async(self, flags: Iterable[bool]) -> Callable[[], list[bool]]:
        given = [*flags]
        count("all_reduce", len(given))
        return lambda: given


def _chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Split a tensor as torch's function of the same name, with one tensor in place of all chunks of the same shape.

    A thousand fake tensors take a quarter of a second, for each parameter.
    """
    size = tensor.size(dim)
    length = math.ceil(size / num_chunks)
    num_whole, rest = divmod(size, max(1, length))
    chunks = [tensor.narrow(dim, 0, length)] * num_whole
    chunks += [tensor.narrow(dim, size - rest, rest)] if rest else []
    return chunks + [tensor.new_empty(0)] * (num_chunks - len(chunks))


def _outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, called outside of all modes: its tensors are real, and are not counted."""

    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return call


def _convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Convert a module as nn.Module._apply does, which fails for fake tensors to which weak references exist."""
    replace_tensors(module.modules() if recurse else [module], function)
    return module


def replace_tensors(modules: Iterable[nn.Module], function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer by the result of the function. Tensors that the modules share remain shared."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        both: list[dict[str, Any]] = [module._parameters, module._buffers]  # type: ignore[list-item]
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in replaced:
                    with torch.no_grad():
                        result = function(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter) and result is not tensor
                    replaced[tensor] = nn.Parameter(result, tensor.requires_grad) if is_parameter else result
                if tensor is not None:
                    tensors[name] = replaced[tensor]
