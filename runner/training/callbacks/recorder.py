"""Keeps what is measured: in result.json, as lines of metrics.jsonl, and with the loggers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.runs.loggers.protocol import Ending, Logger
from runner.runs.records import read_trial
from runner.runs.run_directory import CONFIG, RunDirectory
from runner.training.callback import Callback, Moment, Outcome, RunInfo
from runner.training.throughput import ThroughputMeter


class Recorder(Callback):
    """Only the rank that writes the directory opens the logger and calls it.

    metrics: the names that an evaluation gives, the monitor first.
    """

    def __init__(self, directory: RunDirectory, logger: Logger, meter: ThroughputMeter, metrics: Sequence[str] = ()):
        self._directory, self._logger, self._meter, self._metrics = directory, logger, meter, tuple(metrics)
        self._is_open = False

    def on_start(self, run: RunInfo) -> None:
        path = self._directory.path
        if self._directory.writes:
            self._logger.open(str(path), run.first_step, replace(read_trial(path), metrics=self._metrics))
            self._is_open = True
            if run.first_step == 0:
                text = (path / CONFIG).read_text()
                self._logger.text("configuration", "\n".join("    " + line for line in text.splitlines()))

    def log(self, now: Moment, numbers: Mapping[str, float]) -> None:
        """Numbers of a callback's own, by names of its own; a rank that does not write has none to log."""
        self._log(replace(now, metrics={name: float(number) for name, number in numbers.items()}))

    def after_step(self, now: Moment) -> None:
        self._directory.result.step, self._directory.result.epoch = now.state.step, now.state.epoch
        if now.metrics:
            self._log(now)

    def after_evaluation(self, now: Moment) -> None:
        self._log(now)
        if now.predictions and self._directory.writes:
            self._logger.predictions(now.step, now.predictions)

    def on_end(self, now: Moment, outcome: Outcome) -> None:
        if outcome == "finished":
            self._directory.result.samples_per_second = self._meter.samples_per_second
        if self._is_open:
            self._logger.close(Ending(outcome))

    def _log(self, now: Moment) -> None:
        metrics = dict(now.metrics)
        self._directory.log_metrics(now.step, now.epoch, metrics)
        if self._directory.writes:
            self._logger.scalars(now.step, metrics)
