"""Takes the checkpoints of a run: every so many steps and epochs, after its best evaluations, and at its end."""

import math
from collections.abc import Callable, Mapping

from runner.config.schema import Checkpoints
from runner.fault_tolerance.checkpoint import load, path_of, point, retain, save, weights_sha256
from runner.runs.monitor import Monitor
from runner.runs.run_directory import RunDirectory
from runner.runs.train_state import LAST, TrainState
from runner.training.callback import Callback, Callbacks, Moment, Outcome, RunInfo
from runner.training.strategy import Spread
from runner.training.throughput import ThroughputMeter
from runner.training.weight_average import WeightAverage


class Checkpointing(Callback):
    """All ranks must have it: what they hold is gathered, and the one that writes keeps it.

    best: the monitor's value of the checkpoints that there are, by step; the same on all ranks.
    flush: called there before a checkpoint, from which the run may be resumed: what was logged before must not be lost.
    """

    def __init__(
        self,
        options: Checkpoints,
        spread: Spread,
        directory: RunDirectory,
        meter: ThroughputMeter,
        callbacks: Callbacks,
        monitor: Monitor,
        best: Mapping[int, float],
        flush: Callable[[], None],
        average: WeightAverage | None = None,
    ):
        self._options, self._spread, self._directory = options, spread, directory
        self._meter, self._callbacks, self._flush = meter, callbacks, flush
        self._monitor = monitor
        self._best = {step: best[step] for step in monitor.best(best)[: options.keep_best]}
        self._average = average
        self._saved_step: int | None = None  # the last one of which there is a checkpoint, taken or read

    def on_start(self, run: RunInfo) -> None:
        """What the run is resumed from is not taken again: a crash meanwhile would lose it.

        The links name no later one, which is damaged.
        """
        self._tell_best()
        if run.first_step:
            self._saved_step = run.first_step
            if self._directory.writes:
                point(self._directory.checkpoints, LAST, self._directory.checkpoints / f"step_{run.first_step}")
                self._retain()

    def after_step(self, now: Moment) -> None:
        if self._options.every_steps and now.step % self._options.every_steps == 0:
            self._save(now.state)
            self._meter.pause()

    def after_evaluation(self, now: Moment) -> None:
        """Whether it is one of the best follows from what was measured: all ranks come to the same."""
        values = self._best | {now.step: now.metrics.get(self._monitor.name, math.nan)}
        best = {step: values[step] for step in self._monitor.best(values)[: self._options.keep_best]}
        if now.step in best:
            self._best = best
            self._tell_best()
            self._save(now.state)
            self._retain()

    def after_epoch(self, now: Moment) -> None:
        if now.state.epoch % self._options.every_epochs == 0:
            self._save(now.state)

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        if outcome != "failed":
            self._save(now.state)
            if self._directory.writes and self._directory.result.weights_sha256 is None:  # resumed, and no step made
                state, _ = load(path_of(self._directory.checkpoints, now.state))
                self._directory.result.weights_sha256 = weights_sha256(state["model"])

    def _save(self, state: TrainState) -> None:
        """Once per step: the end of an epoch may be the end of the run."""
        if self._saved_step == state.step:
            return
        self._saved_step = state.step
        tensors = self._spread.state()
        if self._average is not None:
            tensors |= self._average.state()
        if self._directory.writes:
            self._flush()
            save(self._directory.checkpoints, tensors, state)
            self._directory.result.weights_sha256 = weights_sha256(tensors["model"])
        self._retain()
        self._callbacks.after_checkpoint(Moment(state), path_of(self._directory.checkpoints, state))

    def _retain(self) -> None:
        if self._directory.writes:
            assert self._saved_step is not None
            retain(self._directory.checkpoints, self._options.keep, list(self._best), self._saved_step)

    def _tell_best(self) -> None:
        """The first of them: they are in order."""
        self._directory.result.best = next(({"step": s, "value": v} for s, v in self._best.items()), None)
