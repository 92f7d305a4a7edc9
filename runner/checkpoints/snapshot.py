"""A copy of the state that training no longer changes, to be written in the background."""

from dataclasses import replace

import torch

from runner.checkpoints.saved_state import LocalState
from runner.checkpoints.shard_file import LocalChunk


class Snapshot:
    """A copy of a state on the CPU, in memory that is reused for the next checkpoint.

    New memory would take longer than the copy, because the kernel provides it page by page.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def of(self, local: LocalState) -> LocalState:
        """Return a copy of the state. It is valid until the next call."""
        old, self._memory = self._memory, {}
        for name, chunk in local.chunks.items():
            tensor, memory = chunk.tensor, old.get(name)
            if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[name] = memory.copy_(tensor, non_blocking=True)
        for device in {chunk.tensor.device for chunk in local.chunks.values() if chunk.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        chunks = {name: LocalChunk(self._memory[name], chunk.offsets) for name, chunk in local.chunks.items()}
        return replace(local, chunks=chunks)
