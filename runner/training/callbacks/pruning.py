"""Gives a study's trial up where its pruner says so."""

from collections.abc import Callable

from runner.training.callback import Callback, Moment, RunInfo


class Pruning(Callback):
    """pruner: given step and metrics, whether to give the run up; it is asked on the rank that asks, rank 0."""

    may_stop = True

    def __init__(self, pruner: Callable[[int, dict[str, float]], bool], asks: bool):
        self._pruner, self._asks = pruner, asks

    def on_start(self, run: RunInfo) -> None:
        self._num_steps = run.num_steps

    def after_evaluation(self, now: Moment) -> None:
        if now.step < self._num_steps:  # a trial at its end is told as finished, with its last value
            self.wants_to_stop = self._asks and self._pruner(now.step, dict(now.metrics))
