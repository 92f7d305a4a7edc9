"""No checkpoint of weights that are not finite takes the place of one whose weights are."""

import logging
from collections.abc import Sequence

from runner.distributed.world import World
from runner.errors import JobFailed
from runner.training.finite import are_finite
from runner.training.saved_state import local_part
from runner.training.strategy import Spread

log = logging.getLogger(__name__)


class FiniteWeights:
    """What is asked before a checkpoint is taken. Only on_nonfinite=go_on takes one of weights that are not finite.

    protected: the steps of checkpoints that stay beside it, the last that are known to be finite.
    """

    def __init__(self, spread: Spread, world: World, on_nonfinite: str):
        self._spread, self._world = spread, world
        self._goes_on = on_nonfinite == "go_on"
        self._told = False
        self.protected: list[int] = []

    def begin(self, step: int, available: Sequence[int]) -> None:
        """Of a run that goes on after a step, with checkpoints of these. All ranks must call it."""
        if self._goes_on:
            self.protected = [step] if self._are_finite() else list(available)  # any of which may be the last

    def check(self, step: int) -> None:
        """Raises JobFailed where a checkpoint must not be taken. All ranks must call it."""
        if self._are_finite():
            self.protected = [step] if self._goes_on else []
        elif not self._goes_on:
            raise JobFailed(
                f"step {step}: its update has made weights that are not finite; no checkpoint is taken of them\n"
                "try a smaller optimizer.lr, or clip_grad_norm=1.0; resume= begins at the last checkpoint"
            )
        elif not self._told:
            self._told = True
            if self._world.rank == 0:
                log.warning("step %d: weights that are not finite; the checkpoint of finite ones stays besides", step)

    def _are_finite(self) -> bool:
        finite = are_finite(local_part(tensor.detach()) for tensor in self._spread.held().values())
        return not self._world.collectives.any_later(not finite)()
