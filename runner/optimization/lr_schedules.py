"""Learning rate schedules: pure functions of the step, so that a resumed run needs no state."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# The factor of the configured learning rates, or the options of each of the optimizer's parameter groups.
Scheduled = float | Sequence[Mapping[str, Any]]
# Called before each step with its number, counted from 0, the number of steps of the run, and that of an epoch.
Schedule = Callable[[int, int, int], Scheduled]


class Constant:
    """A constant learning rate, after an optional linear warm-up."""

    def __init__(self, warmup_steps: int = 0):
        if warmup_steps < 0:
            raise ValueError(f"scheduler.warmup_steps={warmup_steps} must be at least 0")
        self.warmup_steps = warmup_steps

    def __call__(self, step: int, num_steps: int, steps_per_epoch: int) -> float:
        """Return the factor of step `step` (counted from 0) of `num_steps`."""
        return min((step + 1) / (self.warmup_steps + 1), 1.0)


class Cosine(Constant):
    """Half a cosine period from 1 to final_factor (Loshchilov and Hutter 2017, without restarts).

    As with torch's CosineAnnealingLR, final_factor would be reached one step after the last.
    """

    def __init__(self, warmup_steps: int = 0, final_factor: float = 0.0):
        super().__init__(warmup_steps)
        if not 0 <= final_factor <= 1:
            raise ValueError(f"scheduler.final_factor={final_factor} must be between 0 and 1; try 0.0")
        self.final_factor = final_factor

    def __call__(self, step: int, num_steps: int, steps_per_epoch: int) -> float:
        if step < self.warmup_steps:
            return super().__call__(step, num_steps, steps_per_epoch)
        progress = (step - self.warmup_steps) / max(num_steps - self.warmup_steps, 1)
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


class Step(Constant):
    """A learning rate that is multiplied by gamma every `every_epochs` epochs."""

    def __init__(self, every_epochs: int = 10, gamma: float = 0.1, warmup_steps: int = 0):
        super().__init__(warmup_steps)
        if every_epochs < 1:
            raise ValueError(f"scheduler.every_epochs={every_epochs} must be at least 1; try 10")
        if gamma <= 0:
            raise ValueError(f"scheduler.gamma={gamma} must be above 0; try 0.1")
        self.every_epochs, self.gamma = every_epochs, gamma

    def __call__(self, step: int, num_steps: int, steps_per_epoch: int) -> float:
        warmup = super().__call__(step, num_steps, steps_per_epoch)
        return warmup * self.gamma ** (step // steps_per_epoch // self.every_epochs)
