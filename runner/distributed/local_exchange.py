"""Exchanges between ranks of one machine, which cost gloo's threads many times what they move."""

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from runner.distributed.local_sockets import LARGEST, LocalSockets
from runner.distributed.shared_memory import SharedMemory, new_file, size_for
from runner.distributed.traffic import count

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
FEW = 4  # ranks of which each tells each: of more the messages are too many
Merge = Callable[[torch.Tensor, torch.Tensor], object]  # adds the second to the first, in place


class LocalExchange:
    """The exchanges of a group of ranks. All of them must call each, in the same order.

    What is summed is so in the order of the ranks: the result is the same to the bit on all, and in each run. Of a few
    ranks each tells each; of more all tell the lowest, which tells them. Raises PeerMissing where one does not come.
    """

    def __init__(self, rank: int, ranks: Sequence[int], topic: str, sockets: LocalSockets):
        self._rank, self._sockets = rank, sockets
        self._ranks = sorted(ranks)
        self._others = [other for other in self._ranks if other != rank]
        self._topic = int.from_bytes(hashlib.sha256(topic.encode()).digest()[:8], "little")
        self._count = 0
        self._memory: SharedMemory | None = None
        self._has_asked_for_memory = False

    def sum(self, tensor: torch.Tensor) -> None:
        """In place."""
        self._merge(tensor, torch.Tensor.add_)

    def sum_large(self, tensor: torch.Tensor) -> bool:
        """In place, of any size on the CPU. Returns whether it could: on all ranks, or on none."""
        if not _is_plain(tensor):
            return False
        if not tensor.numel():
            return True
        if not self._has_asked_for_memory:
            self._memory, self._has_asked_for_memory = self._shared_memory(), True
        if self._memory is None:
            return False
        count("all_reduce", tensor.nbytes)
        with _told_to_profiler("all_reduce"):
            flat = tensor.detach().contiguous().view(-1)
            self._memory.sum(flat)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))
        return True

    def max(self, tensor: torch.Tensor) -> None:
        """In place."""
        self._merge(tensor, lambda total, other: torch.maximum(total, other, out=total))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all ranks, in their order.  (...) -> (N, ...)"""
        count("all_gather", tensor.nbytes * len(self._ranks))
        with _told_to_profiler("all_gather"):
            gathered = self._gather(_bytes(tensor.detach().contiguous()))
        return _tensor(gathered, tensor.dtype).view(len(self._ranks), *tensor.shape)

    def any_of_later(self, flags: Iterable[bool]) -> Callable[[], list[bool]]:
        """Of each flag, whether it is set on any rank: asked now, and answered when the result is called."""
        own = bytes(flags)
        count("all_reduce", len(own))
        tag, deadline = self._next(), self._sockets.deadline()
        for other in self._others:  # each tells each, so that nobody waits for a rank that is busy after this
            self._sockets.send(other, tag, own, deadline)

        def answer() -> list[bool]:
            with _told_to_profiler("all_reduce"):
                deadline = self._sockets.deadline()
                told = [self._received(other, tag, len(own), deadline) for other in self._others]
            return [any(votes) for votes in zip(own, *told, strict=True)]

        return answer

    def shared_file(self, make: Callable[[], int]) -> int | None:
        """What the lowest rank has made, open on each, which has to close it; None where it, or this rank, has none."""
        root, *leaves = self._ranks
        tag, deadline = self._next(), self._sockets.deadline()
        if self._rank != root:
            return self._sockets.receive_file(root, tag, deadline)
        file = None
        with contextlib.suppress(OSError):  # no such memory, or too many files are open
            file = make()
        for leaf in leaves:
            self._sockets.send(leaf, tag, b"", deadline, file)
        return file

    def _merge(self, tensor: torch.Tensor, merge: Merge) -> None:
        count("all_reduce", tensor.nbytes)
        own = tensor.detach().contiguous()
        with _told_to_profiler("all_reduce"):
            gathered = self._gather(_bytes(own))
        merged, *others = _tensor(gathered, tensor.dtype).view(len(self._ranks), *tensor.shape)
        for other in others:
            merge(merged, other)
        tensor.detach().copy_(merged)

    def _gather(self, own: bytes | memoryview) -> bytearray:
        """What each rank gives, as many bytes, in their order."""
        tag, deadline = self._next(), self._sockets.deadline()
        if len(self._ranks) <= FEW:
            for other in self._others:
                self._sockets.send(other, tag, own, deadline)
            told = {other: self._received(other, tag, len(own), deadline) for other in self._others}
            return bytearray().join(told.get(rank, own) for rank in self._ranks)
        root, *leaves = self._ranks
        if self._rank != root:
            self._sockets.send(root, tag, own, deadline)
            return self._received(root, tag, len(own) * len(self._ranks), deadline)
        gathered = bytearray().join([own, *(self._received(leaf, tag, len(own), deadline) for leaf in leaves)])
        for leaf in leaves:
            self._sockets.send(leaf, tag, gathered, deadline)
        return gathered

    def _wait_for_all(self, num_bytes: int) -> None:
        told = struct.unpack(f"<{len(self._ranks)}q", self._gather(struct.pack("<q", num_bytes)))
        for rank, theirs in zip(self._ranks, told, strict=True):
            if theirs != num_bytes:
                raise RuntimeError(f"rank {rank} sums {theirs} bytes where this one sums {num_bytes}")

    def _shared_memory(self) -> SharedMemory | None:
        """None on all ranks where one of them has none."""
        memory = None
        if (file := self.shared_file(lambda: new_file(size_for(len(self._ranks))))) is not None:
            with contextlib.suppress(OSError):
                memory = SharedMemory(file, self._ranks.index(self._rank), len(self._ranks), self._wait_for_all)
            os.close(file)
        (is_missing,) = self.any_of_later([memory is None])()
        return None if is_missing else memory

    def _next(self) -> tuple[int, int]:
        self._count += 1
        return self._topic, self._count

    def _received(self, rank: int, tag: tuple[int, int], size: int, deadline: float) -> bytearray:
        data = self._sockets.receive(rank, tag, deadline)
        if len(data) != size:
            raise RuntimeError(f"rank {rank} exchanges {len(data)} bytes where this one exchanges {size}")
        return data


class LocalExchanges:
    """Of the groups whose ranks this rank's sockets reach, while the process group is there.

    here: of all ranks of this machine; None where there is no other.
    """

    def __init__(self, rank: int, sockets: LocalSockets):
        self._rank, self._sockets = rank, sockets
        self._reached = {rank, *sockets.ranks}
        self._of_group: dict[str, LocalExchange | None] = {}
        alone = self._reached == {rank}
        self.here = None if alone else LocalExchange(rank, sorted(self._reached), "machine", sockets)

    def of(self, group: dist.ProcessGroup | None) -> LocalExchange | None:
        """That of the group's ranks, all of them for None; None where there is one that is not reached."""
        name = "" if group is None else group.group_name
        if name not in self._of_group:
            ranks = dist.get_process_group_ranks(group)
            reached = len(ranks) > 1 and self._reached.issuperset(ranks)
            self._of_group[name] = LocalExchange(self._rank, ranks, name, self._sockets) if reached else None
        return self._of_group[name]


def is_small(tensor: torch.Tensor, num_ranks: int) -> bool:
    """Whether such tensors of so many ranks go into one message together."""
    return _is_plain(tensor) and tensor.dtype in DTYPES and tensor.nbytes * num_ranks <= LARGEST


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


# As torch has its process groups: a layer of a model knows its group, and nothing of the world.
_present: LocalExchanges | None = None


def use(exchanges: LocalExchanges | None) -> None:
    """From now on, for the groups of this process."""
    global _present
    _present = exchanges


def exchange_of(group: dist.ProcessGroup | None = None) -> LocalExchange | None:
    """What the group's ranks exchange small tensors by; None where they have their process group alone."""
    return None if _present is None else _present.of(group)


def exchange_here() -> LocalExchange | None:
    """What this machine's ranks exchange by; None for a rank that is alone, or has the process group alone."""
    return None if _present is None else _present.here


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor(data: bytes | bytearray | memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _told_to_profiler(name: str) -> AbstractContextManager[object]:
    enabled = torch.autograd._profiler_enabled()
    return torch.autograd.profiler.record_function(f"local:{name}") if enabled else nullcontext()
