"""Small exchanges between ranks of one machine, which cost gloo's threads a hundred times what they move."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from runner.distributed.local_sockets import LARGEST, LocalSockets
from runner.distributed.traffic import count

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
Merge = Callable[[torch.Tensor, torch.Tensor], object]  # adds the second to the first, in place


class LocalExchange:
    """The exchanges of a group of ranks. All of them must call each, in the same order.

    What is summed is so in the order of the ranks, by the lowest, which tells the others: the result is the same to the
    bit on all, and in each run. Raises PeerMissing where a rank does not come.
    """

    def __init__(self, rank: int, ranks: Sequence[int], topic: str, sockets: LocalSockets):
        self._rank, self._sockets = rank, sockets
        self._root, *self._leaves = sorted(ranks)
        self._others = [other for other in sorted(ranks) if other != rank]
        self._topic = int.from_bytes(hashlib.sha256(topic.encode()).digest()[:8], "little")
        self._count = 0

    def sum(self, tensor: torch.Tensor) -> None:
        """In place."""
        self._merge(tensor, torch.Tensor.add_)

    def max(self, tensor: torch.Tensor) -> None:
        """In place."""
        self._merge(tensor, lambda total, other: torch.maximum(total, other, out=total))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all ranks, in their order.  (...) -> (N, ...)"""
        num_ranks = 1 + len(self._others)
        count("all_gather", tensor.nbytes * num_ranks)
        own = _bytes(tensor.detach().contiguous())
        with _told_to_profiler("all_gather"):
            tag, deadline = self._next(), self._sockets.deadline()
            if self._rank == self._root:
                gathered = bytearray(own)
                for leaf in self._leaves:
                    gathered += self._received(leaf, tag, len(own), deadline)
                for leaf in self._leaves:
                    self._sockets.send(leaf, tag, gathered, deadline)
            else:
                self._sockets.send(self._root, tag, own, deadline)
                gathered = self._received(self._root, tag, len(own) * num_ranks, deadline)
        return _tensor(gathered, tensor.dtype).view(num_ranks, *tensor.shape)

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

    def _merge(self, tensor: torch.Tensor, merge: Merge) -> None:
        count("all_reduce", tensor.nbytes)
        flat = tensor.detach().contiguous().reshape(-1)
        own = _bytes(flat)
        with _told_to_profiler("all_reduce"):
            tag, deadline = self._next(), self._sockets.deadline()
            if self._rank == self._root:
                for leaf in self._leaves:
                    merge(flat, _tensor(self._received(leaf, tag, len(own), deadline), flat.dtype))
                for leaf in self._leaves:
                    self._sockets.send(leaf, tag, own, deadline)
            else:
                self._sockets.send(self._root, tag, own, deadline)
                own[:] = self._received(self._root, tag, len(own), deadline)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _next(self) -> tuple[int, int]:
        self._count += 1
        return self._topic, self._count

    def _received(self, rank: int, tag: tuple[int, int], size: int, deadline: float) -> bytearray:
        data = self._sockets.receive(rank, tag, deadline)
        if len(data) != size:
            raise RuntimeError(f"rank {rank} exchanges {len(data)} bytes where this one exchanges {size}")
        return data


class LocalExchanges:
    """Of the groups whose ranks this rank's sockets reach, while the process group is there."""

    def __init__(self, rank: int, sockets: LocalSockets):
        self._rank, self._sockets = rank, sockets
        self._reached = {rank, *sockets.ranks}
        self._of_group: dict[str, LocalExchange | None] = {}

    def of(self, group: dist.ProcessGroup | None) -> LocalExchange | None:
        """That of the group's ranks, all of them for None; None where there is one that is not reached."""
        name = "" if group is None else group.group_name
        if name not in self._of_group:
            ranks = dist.get_process_group_ranks(group)
            reached = len(ranks) > 1 and self._reached.issuperset(ranks)
            self._of_group[name] = LocalExchange(self._rank, ranks, name, self._sockets) if reached else None
        return self._of_group[name]


def is_small(tensor: torch.Tensor, num_ranks: int) -> bool:
    """Whether an exchange is for tensors like this one, of so many ranks together: small ones on the CPU."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
        and tensor.nbytes * num_ranks <= LARGEST
    )


# As torch has its process groups: a layer of a model knows its group, and nothing of the world.
_present: LocalExchanges | None = None


def use(exchanges: LocalExchanges | None) -> None:
    """From now on, for the groups of this process."""
    global _present
    _present = exchanges


def exchange_of(group: dist.ProcessGroup | None = None) -> LocalExchange | None:
    """What the group's ranks exchange small tensors by; None where they have their process group alone."""
    return None if _present is None else _present.of(group)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _told_to_profiler(name: str) -> AbstractContextManager[object]:
    enabled = torch.autograd._profiler_enabled()
    return torch.autograd.profiler.record_function(f"local:{name}") if enabled else nullcontext()
