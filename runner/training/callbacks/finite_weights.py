"""A check before each checkpoint that the weights are finite."""

import logging
from collections.abc import Iterable, Sequence

import torch

from runner.checkpoints.saved_state import local_part
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.training.mode import ParallelModel

log = logging.getLogger(__name__)


class FiniteWeights:
    """Refuses checkpoints of weights that are not finite, unless on_nonfinite=go_on.

    Attributes:
        protected: The steps of the last checkpoints that are known to be finite, which are kept.
    """

    def __init__(self, parallel_model: ParallelModel, world: World, on_nonfinite: str):
        self._parallel_model, self._world = parallel_model, world
        self._is_allowed = on_nonfinite == "go_on"
        self._has_warned = False
        self.protected: list[int] = []

    def begin(self, step: int, available: Sequence[int]) -> None:
        """Check the weights of a resumed run, given the steps of its checkpoints. All ranks must call it."""
        if self._is_allowed:
            self.protected = [step] if self._are_finite() else list(available)  # any may be the last finite one

    def check(self, step: int) -> None:
        """Raise JobFailed if no checkpoint may be saved. All ranks must call it."""
        if self._are_finite():
            self.protected = [step] if self._is_allowed else []
        elif not self._is_allowed:
            raise JobFailed(
                f"step {step}: the update produced weights that are not finite; no checkpoint of them is saved\n"
                "try a smaller optimizer.lr, or clip_grad_norm=1.0; resume= continues from the last checkpoint"
            )
        elif not self._has_warned:
            self._has_warned = True
            if self._world.rank == 0:
                log.warning("step %d: weights are not finite; the last checkpoint of finite weights is kept", step)

    def _are_finite(self) -> bool:
        finite = are_finite(local_part(tensor.detach()) for tensor in self._parallel_model.local_parameters().values())
        return not self._world.collectives.any_async(not finite)()


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if all elements are finite. Synchronize once per device and dtype.

    Norms are computed first, because checking each element takes fifteen times as long.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return all(flag.item() for flag in norms_are_finite(floating)) or each_is_finite(floating)


def norms_are_finite(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each device and dtype, whether all norms are finite. A norm may overflow although no element does."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [torch.stack(torch._foreach_norm(group)).isfinite().all() for group in groups.values()]


def each_is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if each element is finite, for tensors whose norms are not."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
