"""The rungs of asynchronous successive halving, at which trials pause, and the choice of the trials that continue."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from runner.errors import InputError


@dataclass(frozen=True)
class Rungs:
    """The options of hydra/sweeper/pruner=asha (Li et al., https://arxiv.org/abs/1810.05934).

    A trial pauses at its first evaluation at or after the step of its rung. Its value at a rung is that of its first
    evaluation at or after the step of that rung, so a trial with rare evaluations may reach several rungs at once.
    """

    min_resource: int
    reduction_factor: int

    def __post_init__(self) -> None:
        for name, least in (("min_resource", 1), ("reduction_factor", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"hydra.sweeper.pruner.{name}={value} must be an integer of at least {least}")

    def step_of(self, rung: int) -> int:
        """Return the step of a rung; the first rung is 0."""
        return self.min_resource * int(self.reduction_factor**rung)

    def choose(
        self, values: Mapping[int, Mapping[int, float]], paused: Mapping[int, int], maximizes: bool
    ) -> list[tuple[int, int]]:
        """Return the jobs to promote, each with its next rung: those of the top rung first, the best first.

        At each rung, the best 1 / reduction_factor of the jobs that have reached it may continue. Equal jobs are sorted
        by number, and a job whose value is not finite is never promoted.

        values: of each job, by step. paused: the rung at which each paused job had to pause.
        """
        reached = {job: self._last_rung(max(of_job)) for job, of_job in values.items() if of_job}
        chosen = []
        for rung in range(max(reached.values(), default=-1), -1, -1):
            scores = {job: self._score(values[job], rung, maximizes) for job in reached if reached[job] >= rung}
            best = sorted(scores, key=lambda job: (scores[job], job))[: len(scores) // self.reduction_factor]
            for job in best:
                if math.isfinite(scores[job]) and job in paused and paused[job] <= reached[job] == rung:
                    chosen.append((job, rung + 1))
        return chosen

    def _last_rung(self, step: int) -> int:
        """Return the last rung at or before the step; -1 before the first one."""
        return next(rung for rung in itertools.count() if self.step_of(rung) > step) - 1

    def _score(self, values: Mapping[int, float], rung: int, maximizes: bool) -> float:
        """Return the value at the rung; the smallest is the best, and values that are not finite are the worst."""
        value = values[min(step for step in values if step >= self.step_of(rung))]
        return math.inf if not math.isfinite(value) else -value if maximizes else value
