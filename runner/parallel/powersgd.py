"""PowerSGD as a communication hook of DDP whose state is saved in checkpoints."""

import logging
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from runner.checkpoints.saved_state import LocalState, SavedState
from runner.checkpoints.shard_file import LocalChunk
from runner.distributed.world import World

log = logging.getLogger(__name__)


class PowerSGD:
    """Vogels, Karimireddy, Jaggi, "PowerSGD", 2019: a gradient's matrix is sent as two matrices of low rank.

    The error of a step is added to the next one, per rank and bucket, and the matrices start from those of the previous
    step. The first two steps are not compressed: torch requires that, because its own buckets change.
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
    def _tensors(self) -> dict[str, dict[int, torch.Tensor]]:
        """Errors and matrices by bucket, each a flat tensor."""
        state = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def state(self) -> LocalState:
        """Return this rank's errors and matrices."""
        prefix = f"powersgd.rank_{self._world.rank}"
        pieces = {
            f"{prefix}.{kind}.{bucket}": LocalChunk.of(tensor)
            for kind, by_bucket in self._tensors.items()
            for bucket, tensor in by_bucket.items()
        }
        facts = {"num_ranks": self._world.world_size, "steps": self._state.iter, **self._options}
        return LocalState(pieces, {"powersgd": facts})

    def load_state(self, saved: SavedState) -> None:
        """Continue exactly with the same options on the same number of ranks; otherwise restart with a warning."""
        for by_bucket in self._tensors.values():
            by_bucket.clear()
        self._state.iter = 0
        found: dict[str, Any] = dict(saved.facts.get("powersgd", {}))
        now = {"num_ranks": self._world.world_size, **self._options}
        differences = [
            f"{key} is {found.get(key)} in the checkpoint and {now[key]} now"
            for key in now
            if found.get(key) != now[key]
        ]
        if differences:
            if self._world.rank == 0:
                log.warning(
                    "parallel.comm_hook=powersgd restarts and drops the gradients that it had not sent yet: %s",
                    "; ".join(differences) if found else "the checkpoint has no state of it",
                )
            return
        own = saved.under(f"powersgd.rank_{self._world.rank}")
        targets: dict[str, torch.Tensor] = {}
        for name, tensor in own.tensors.items():
            kind, _, bucket = name.partition(".")
            targets[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._tensors[kind][int(bucket)] = targets[name]
        own.read(targets)
        self._state.iter = found["steps"]
