"""Exchanges of CPU tensors between the ranks of one machine; for small ones, gloo takes many times as long."""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from runner.distributed.local.shared_memory import SharedMemory, size_for
from runner.distributed.local.sockets import LARGEST, LocalSockets, Tag
from runner.distributed.traffic import count

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
MAX_ALL_TO_ALL = 4  # ranks that send to each other directly; more of them would send too many messages
_DESCRIPTOR = struct.Struct("<qq")  # process, file


class LocalExchange:
    """The exchanges of a group of ranks on one machine. All of them must call each, in the same order.

    Up to MAX_ALL_TO_ALL ranks send to each other; more ranks send to the lowest one, which sends the result to all.
    Each method raises PeerMissing if a rank does not respond.
    """

    def __init__(self, rank: int, ranks: Sequence[int], name: str, sockets: LocalSockets):
        self._rank, self._sockets = rank, sockets
        self._ranks = sorted(ranks)
        self._others = [other for other in self._ranks if other != rank]
        self._group = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        self._count = 0
        self._memory: SharedMemory | None = None

    def sum_large(self, tensor: torch.Tensor) -> None:
        """Sum a tensor of any size in place, through shared memory."""
        if not tensor.numel():
            return
        if self._memory is None:
            file = self.share_file(size_for(len(self._ranks)))
            try:
                self._memory = SharedMemory(file, self._ranks.index(self._rank), len(self._ranks), self._wait_for_all)
            finally:
                os.close(file)
        count("all_reduce", tensor.nbytes)
        with _profiled("all_reduce"):
            flat = tensor.detach().contiguous().view(-1)
            self._memory.sum(flat)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def gather(self, tensor: torch.Tensor, kind: str = "all_gather") -> torch.Tensor:
        """Return the tensors of all ranks, in their order.  (...) -> (N, ...)  kind: all_gather or all_reduce."""
        count(kind, tensor.nbytes * (len(self._ranks) if kind == "all_gather" else 1))
        own = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        with _profiled(kind):
            gathered = self._gather(own)
        flat = torch.frombuffer(gathered, dtype=tensor.dtype) if gathered else tensor.new_empty(0)
        return flat.view(len(self._ranks), *tensor.shape)

    def any_of_async(self, flags: Iterable[bool]) -> Callable[[], list[bool]]:
        """Send the flags now. Return a function that returns for each flag whether it is set on any rank."""
        own = bytes(flags)
        count("all_reduce", len(own))
        tag, deadline = self._next_tag(), self._sockets.deadline()
        for other in self._others:  # directly, so that no rank waits until another one passes the flags on
            self._sockets.send(other, tag, own, deadline)

        def result() -> list[bool]:
            with _profiled("all_reduce"):
                deadline = self._sockets.deadline()
                received = [self._receive(other, tag, len(own), deadline) for other in self._others]
            return [any(votes) for votes in zip(own, *received, strict=True)]

        return result

    def share_file(self, num_bytes: int) -> int:
        """Return a descriptor of a file in memory that the lowest rank creates. The caller has to close it."""
        file = -1
        if self._rank == self._ranks[0]:
            file = os.memfd_create("runner")
            os.ftruncate(file, num_bytes)  # pages that are never written take no memory
        pid, number = _DESCRIPTOR.unpack_from(self._gather(_DESCRIPTOR.pack(os.getpid(), file)))
        if file < 0:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        self._gather(b"")  # until all ranks have opened it
        return file

    def _gather(self, own: bytes | memoryview) -> bytearray:
        """Return the data of all ranks in their order. Each rank has the same number of bytes."""
        tag, deadline = self._next_tag(), self._sockets.deadline()
        if len(self._ranks) <= MAX_ALL_TO_ALL:
            for other in self._others:
                self._sockets.send(other, tag, own, deadline)
            received = {other: self._receive(other, tag, len(own), deadline) for other in self._others}
            return bytearray().join(received.get(rank, own) for rank in self._ranks)
        root, *leaves = self._ranks
        if self._rank != root:
            self._sockets.send(root, tag, own, deadline)
            return self._receive(root, tag, len(own) * len(self._ranks), deadline)
        gathered = bytearray().join([own, *(self._receive(leaf, tag, len(own), deadline) for leaf in leaves)])
        for leaf in leaves:
            self._sockets.send(leaf, tag, gathered, deadline)
        return gathered

    def _receive(self, rank: int, tag: Tag, size: int, deadline: float) -> bytearray:
        data = self._sockets.receive(rank, tag, deadline)
        if len(data) != size:
            raise RuntimeError(f"rank {rank} exchanges {len(data)} bytes, but this rank exchanges {size}")
        return data

    def _next_tag(self) -> Tag:
        self._count += 1
        return self._group, self._count

    def _wait_for_all(self, num_bytes: int) -> None:
        sizes = struct.unpack(f"<{len(self._ranks)}q", self._gather(struct.pack("<q", num_bytes)))
        for rank, size in zip(self._ranks, sizes, strict=True):
            if size != num_bytes:
                raise RuntimeError(f"rank {rank} sums {size} bytes, but this rank sums {num_bytes}")


class LocalExchanges:
    """The exchanges of all groups whose ranks this rank's sockets reach, while the process group exists."""

    def __init__(self, rank: int, sockets: LocalSockets):
        self._rank, self._sockets = rank, sockets
        self._reached = {rank, *sockets.ranks}
        self._of_group: dict[str, LocalExchange | None] = {}
        is_alone = self._reached == {rank}  # on this machine
        self.on_machine = None if is_alone else LocalExchange(rank, sorted(self._reached), "machine", sockets)

    def of(self, group: dist.ProcessGroup | None) -> LocalExchange | None:
        """Return the exchange of a group, or of all ranks; None if this rank's sockets do not reach all of them."""
        name = "" if group is None else group.group_name
        if name not in self._of_group:
            ranks = dist.get_process_group_ranks(group)
            is_reached = len(ranks) > 1 and self._reached.issuperset(ranks)
            self._of_group[name] = LocalExchange(self._rank, ranks, name, self._sockets) if is_reached else None
        return self._of_group[name]


def is_small(tensor: torch.Tensor, num_ranks: int) -> bool:
    """Return True if the tensors of all `num_ranks` ranks together fit into one message."""
    return is_plain(tensor) and tensor.dtype in DTYPES and tensor.nbytes * num_ranks <= LARGEST


# A global, as torch's default process group is: a layer of a model knows its group, but not the world.
_current: LocalExchanges | None = None


def use(exchanges: LocalExchanges | None) -> None:
    """Use these exchanges for the groups of this process from now on."""
    global _current
    _current = exchanges


def exchange_of(group: dist.ProcessGroup | None = None) -> LocalExchange | None:
    """Return the exchange of a group, or of all ranks; None if only the process group reaches all of them."""
    return None if _current is None else _current.of(group)


def exchange_on_machine() -> LocalExchange | None:
    """Return the exchange of this machine's ranks; None if this rank is the only one, or nothing connects them."""
    return None if _current is None else _current.on_machine


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _profiled(name: str) -> AbstractContextManager[object]:
    is_enabled = torch.autograd._profiler_enabled()
    return torch.autograd.profiler.record_function(f"local:{name}") if is_enabled else nullcontext()
