"""Ends a run whose monitor gets no better."""

import math
from collections.abc import Mapping

from runner.runs.monitor import Monitor
from runner.training.callback import Callback, Moment, RunInfo


class EarlyStop(Callback):
    """Every rank has it and comes to the same: all have measured the same.

    before: the monitor's value by step of the evaluations that there were before this process.
    """

    may_stop = True
    stops_as = "finished"

    def __init__(self, monitor: Monitor, patience: int, min_delta: float, before: Mapping[int, float]):
        self._monitor, self._patience, self._min_delta = monitor, patience, min_delta
        self._best, self._best_step, self._without = math.nan, 0, 0
        self._counted: int | None = None  # the step of the last evaluation
        for step in sorted(before):
            self._count(step, before[step])

    def on_start(self, run: RunInfo) -> None:
        self._decide()  # a run that had ended so, and is resumed, ends so

    def after_evaluation(self, now: Moment) -> None:
        self._count(now.step, now.metrics.get(self._monitor.name, math.nan))
        self._decide()

    def _count(self, step: int, value: float) -> None:
        if step == self._counted:  # made again by a run that was resumed there
            return
        self._counted = step
        if self._monitor.improves(value, self._best, self._min_delta):
            self._best, self._best_step, self._without = value, step, 0
        else:
            self._without += 1

    def _decide(self) -> None:
        self.wants_to_stop = self._without >= self._patience
        by = f" by {self._min_delta:g}" if self._min_delta else ""
        self.stop_reason = (
            f"{self._monitor.name} has not improved{by} for {self._without} evaluations, since step {self._best_step}"
        )
