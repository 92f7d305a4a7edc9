"""A copy of the state that training no longer changes: to be written in the background, or kept in memory."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from runner.checkpoints.saved_state import LocalState
from runner.checkpoints.shard_file import LocalChunk

# A global, because what a rank writes is determined deep within the states of modules and optimizers.
_writes_all = False


@contextmanager
def writing_all() -> Iterator[None]:
    """Within the context, each rank of a mode with whole replicas writes the whole state, as the first rank does."""
    global _writes_all
    _writes_all = True
    try:
        yield
    finally:
        _writes_all = False


def writes_all() -> bool:
    """Return True within `writing_all`."""
    return _writes_all


class Snapshot:
    """A copy of a state on the CPU, in memory that is reused for the next checkpoint.

    New memory would take longer than the copy, because the kernel provides it page by page.
    """

    def __init__(self) -> None:
        self._memory: dict[Hashable, torch.Tensor] = {}

    def of(self, local: LocalState) -> LocalState:
        """Return a copy of the state. It is valid until the next call."""
        copies = self.allocate({name: chunk.tensor for name, chunk in local.chunks.items()})
        for name, chunk in local.chunks.items():
            copies[name].copy_(chunk.tensor, non_blocking=True)
        for device in {chunk.tensor.device for chunk in local.chunks.values() if chunk.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        chunks = {name: LocalChunk(copies[name], chunk.offsets) for name, chunk in local.chunks.items()}
        return replace(local, chunks=chunks)

    def allocate(self, tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return memory on the CPU for tensors such as these. It is valid until the next call."""
        allocated = {}
        for key, tensor in tensors.items():
            memory = self._memory.get(key)
            if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            allocated[key] = memory
        self._memory = {**allocated}
        return allocated
