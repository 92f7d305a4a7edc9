"""A placeholder for the mode that parallel=auto chooses."""

from runner.distributed.world import World
from runner.training.mode import Parallel, ParallelModel, Recipe


class Auto(Parallel):
    """parallel=auto: the job replaces it by the fastest mode that fits, see runner.jobs.mode_choice.

    Before that, a job checks its input with this mode, which supports whatever any mode does.
    """

    is_placeholder = True
    spans_devices = True
    supported_objectives = "several_losses"

    def __init__(self, candidates: int = 3, memory_gib: float | None = None, device: str | None = None):
        if candidates < 1:
            raise ValueError(f"candidates={candidates} must be at least 1; try 3")
        if memory_gib is not None and memory_gib <= 0:
            raise ValueError(f"memory_gib={memory_gib} must be positive, or null")
        self.candidates, self.memory_gib, self.device = candidates, memory_gib, device

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        raise AssertionError("a job replaces this mode before it builds the model")
