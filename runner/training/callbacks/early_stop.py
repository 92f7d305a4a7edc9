"""Callbacks that end a run before its last step: early stopping, and pruning or pausing of a study's trial."""

import math

from runner.records.monitor import Monitor
from runner.records.run_directory import Pruner
from runner.training.callbacks.contract import Callback, Progress, RunInfo


class EarlyStop(Callback):
    """Stops a run whose monitor has not improved by `min_delta` for `patience` evaluations."""

    may_stop = True
    stops_as = "finished"

    def __init__(self, monitor: Monitor, patience: int, min_delta: float):
        self._monitor, self._patience, self._min_delta = monitor, patience, min_delta
        self._values: dict[int, float] = {}  # of the monitor, by step

    def on_start(self, run: RunInfo) -> None:
        """Count the earlier evaluations, so that resuming a run that stopped early stops it again."""
        self._values = dict(run.evaluations)
        self._decide()

    def after_evaluation(self, now: Progress) -> None:
        self._values[now.step] = now.metrics.get(self._monitor.name, math.nan)
        self._decide()

    def _decide(self) -> None:
        best, best_step, num_without = math.nan, 0, 0
        for step, value in sorted(self._values.items()):
            if self._monitor.improves(value, best, self._min_delta):
                best, best_step, num_without = value, step, 0
            else:
                num_without += 1
        self.wants_to_stop = num_without >= self._patience
        by = f" by {self._min_delta:g}" if self._min_delta else ""
        self.stop_reason = (
            f"{self._monitor.name} has not improved{by} for {num_without} evaluations, since step {best_step}"
        )


class Pruning(Callback):
    """Ends or pauses a trial when the study's pruner decides so on rank 0, given the step and the metrics."""

    may_stop = True

    def __init__(self, pruner: Pruner, decides: bool):
        self._pruner, self._decides = pruner, decides
        self.stops_as = "pruned" if pruner.pause_at is None else "paused"

    def on_start(self, run: RunInfo) -> None:
        """Pause again if the process was killed after it had saved the checkpoint at which the trial pauses."""
        self._num_steps = run.num_steps
        if self._pruner.pause_at is not None:
            self.wants_to_stop = max(run.evaluations, default=0) >= self._pruner.pause_at

    def after_evaluation(self, now: Progress) -> None:
        if now.step < self._num_steps:  # after the last step, the trial is reported as finished
            self.wants_to_stop = self._decides and self._pruner(now.step, dict(now.metrics))
