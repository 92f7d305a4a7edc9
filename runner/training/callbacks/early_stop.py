"""Callbacks that end a run before its last step: early stopping, and pruning of a study's trial."""

import math
from collections.abc import Callable

from runner.records.monitor import Monitor
from runner.training.callbacks.contract import Callback, Progress, RunInfo


class EarlyStop(Callback):
    """Stops a run whose monitor has not improved by `min_delta` for `patience` evaluations."""

    may_stop = True
    stops_as = "finished"

    def __init__(self, monitor: Monitor, patience: int, min_delta: float):
        self._monitor, self._patience, self._min_delta = monitor, patience, min_delta
        self._best, self._best_step, self._num_without = math.nan, 0, 0
        self._counted: int | None = None  # the step of the last evaluation

    def on_start(self, run: RunInfo) -> None:
        """Count the earlier evaluations, so that resuming a run that stopped early stops it again."""
        for step in sorted(run.evaluations):
            self._count(step, run.evaluations[step])
        self._decide()

    def after_evaluation(self, now: Progress) -> None:
        self._count(now.step, now.metrics.get(self._monitor.name, math.nan))
        self._decide()

    def _count(self, step: int, value: float) -> None:
        if step == self._counted:  # a resumed run repeats the evaluation of its first step
            return
        self._counted = step
        if self._monitor.improves(value, self._best, self._min_delta):
            self._best, self._best_step, self._num_without = value, step, 0
        else:
            self._num_without += 1

    def _decide(self) -> None:
        self.wants_to_stop = self._num_without >= self._patience
        by = f" by {self._min_delta:g}" if self._min_delta else ""
        self.stop_reason = (
            f"{self._monitor.name} has not improved{by} for {self._num_without} evaluations, since step "
            f"{self._best_step}"
        )


class Pruning(Callback):
    """Ends a trial when the study's pruner decides so on rank 0, given the step and the metrics."""

    may_stop = True

    def __init__(self, pruner: Callable[[int, dict[str, float]], bool], decides: bool):
        self._pruner, self._decides = pruner, decides

    def on_start(self, run: RunInfo) -> None:
        self._num_steps = run.num_steps

    def after_evaluation(self, now: Progress) -> None:
        if now.step < self._num_steps:  # after the last step, the trial is reported as finished
            self.wants_to_stop = self._decides and self._pruner(now.step, dict(now.metrics))
