"""PowerSGD as a communication hook of DDP, whose memory goes into checkpoints."""

import logging
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.world import World
from runner.training.saved_state import HeldState, Piece, SavedState

log = logging.getLogger(__name__)

_ERROR, _P, _Q = "error", "p", "q"


class PowerSGD:
    """Vogels, Karimireddy, Jaggi, "PowerSGD", 2019: a gradient's matrix is sent as two of a low rank.

    What one step leaves out is added to the next, per rank and bucket, and the matrices begin as those of the step
    before. Two steps go uncompressed: torch asks for them, as its own buckets change.
    """

    def __init__(self, wrapped: DistributedDataParallel, rank: int, bucket_cap_mb: float, world: World):
        self._world, self._options = world, {"rank": rank, "bucket_cap_mb": bucket_cap_mb}
        self._device = next(wrapped.parameters()).device
        self._state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=1e-8,  # a layer without gradient (dead units) would divide by zero
        )
        wrapped.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)

    @property
    def _memory(self) -> dict[str, dict[int, torch.Tensor]]:
        """By kind and bucket, each a flat tensor."""
        return {_ERROR: self._state.error_dict, _P: self._state.p_memory_dict, _Q: self._state.q_memory_dict}

    def state(self) -> HeldState:
        """What this rank writes of it: its own memory."""
        prefix = f"powersgd.rank_{self._world.rank}"
        pieces = {
            f"{prefix}.{kind}.{bucket}": Piece.of(tensor)
            for kind, of_kind in self._memory.items()
            for bucket, tensor in of_kind.items()
        }
        facts = {"num_ranks": self._world.world_size, "steps": self._state.iter, **self._options}
        return HeldState(pieces, {"powersgd": facts})

    def load_state(self, saved: SavedState) -> None:
        """Go on exactly, on as many ranks and with the same options; otherwise begin anew, and say so."""
        for of_kind in self._memory.values():
            of_kind.clear()
        self._state.iter = 0
        found: dict[str, Any] = dict(saved.facts.get("powersgd", {}))
        now = {"num_ranks": self._world.world_size, **self._options}
        if other := [f"{key} {found.get(key)} there and {now[key]} here" for key in now if found.get(key) != now[key]]:
            if self._world.rank == 0:
                log.warning(
                    "parallel.comm_hook=powersgd begins anew, and what it had not sent yet is dropped: %s",
                    "; ".join(other) if found else "the checkpoint has nothing of it",
                )
            return
        own = saved.under(f"powersgd.rank_{self._world.rank}")
        targets: dict[str, torch.Tensor] = {}
        for name, tensor in own.tensors.items():
            kind, _, bucket = name.partition(".")
            targets[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._memory[kind][int(bucket)] = targets[name]
        own.read(targets)
        self._state.iter = found["steps"]
