"""A placeholder for the mode that parallel=auto chooses."""

from runner.distributed.world import World
from runner.training.mode import Parallel, ParallelModel, Recipe


class Auto(Parallel):
    """A placeholder that the job replaces by the fastest mode that fits, see runner.jobs.mode_choice.

    Args:
        candidates: The number of modes to measure.
        memory_gib: The usable memory of a rank in GiB; None for 90% of the free memory of its GPU or, on a CPU, of its
            part of the machine's memory.
        device: The data sheet from which times are estimated; None for that of the ranks' device.
    """

    def __init__(self, candidates: int = 3, memory_gib: float | None = None, device: str | None = None):
        if candidates < 1:
            raise ValueError(f"candidates={candidates} must be at least 1; try 3")
        if memory_gib is not None and memory_gib <= 0:
            raise ValueError(f"memory_gib={memory_gib} must be positive, or null")
        self.candidates, self.memory_gib, self.device = candidates, memory_gib, device

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        raise AssertionError("a job replaces this mode before it builds the model")
