"""The callback that writes metrics to result.json, metrics.jsonl and the loggers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.checkpoints.saved_state import LocalState, SavedState
from runner.records.compared_runs import read_trial
from runner.records.loggers.contract import Logger, RunOutcome
from runner.records.run_directory import RunDirectory
from runner.records.run_files import TRAIN_CHECKSUMS, VAL_CHECKSUMS, read_metrics
from runner.records.settings import CONFIG
from runner.training.callbacks.contract import Callback, Outcome, Progress, RunInfo
from runner.training.throughput import GOODPUT, PRODUCTIVE, ThroughputMeter


class MetricLog(Callback):
    """Logs metrics; only the rank that writes the run directory uses the logger.

    `metrics` are the names of an evaluation's metrics, the monitor first. `num_lines` is the number of lines of
    metrics.jsonl since the last step began, None if the checkpoint of a resumed run has no such number. A checkpoint
    stores it, because the calls of callbacks after the checkpoint are repeated, and log the same lines again.
    """

    def __init__(self, directory: RunDirectory, logger: Logger, meter: ThroughputMeter, metrics: Sequence[str] = ()):
        self._directory, self._logger, self._meter, self._metrics = directory, logger, meter, tuple(metrics)
        self._is_open = False
        self.num_lines: int | None = 0

    def on_start(self, run: RunInfo) -> None:
        path = self._directory.path
        if self._directory.writes:
            self._logger.open(str(path), run.first_step, replace(read_trial(path), metrics=self._metrics))
            self._is_open = True
            # Lines of steps that are repeated have been removed. Checkpoints of equal runs are equal, without times.
            kept_s = 0.0
            # The lines of a new run are those of the run that it was forked from.
            for line in read_metrics(path) if self._directory.attempt.number > 1 else ():
                self._meter.productive_s = float(line.get(PRODUCTIVE, self._meter.productive_s))
                kept_s = self._meter.productive_s / line[GOODPUT] if line.get(GOODPUT) else kept_s
            self._directory.continue_after(run.first_step, kept_s)
            if run.first_step == 0:
                text = (path / CONFIG).read_text()
                self._logger.text("configuration", "\n".join("    " + line for line in text.splitlines()))

    def log(self, now: Progress, metrics: Mapping[str, float]) -> None:
        """Log a callback's custom metrics; only those of the writing rank are kept."""
        custom = replace(now, known_metrics={name: float(value) for name, value in metrics.items()})
        now.readings.then(lambda: self._log(custom))

    def after_step(self, now: Progress) -> None:
        self._directory.record.step, self._directory.record.epoch = now.state.step, now.state.epoch
        self.num_lines = 0
        if now.is_logged:
            now.readings.then(lambda: self._log(now, {TRAIN_CHECKSUMS: now.checksums}))

    def after_evaluation(self, now: Progress) -> None:
        self._log(now, {VAL_CHECKSUMS: now.checksums})
        if now.predictions and self._directory.writes:
            self._logger.predictions(now.step, now.predictions)

    def state(self, model: LocalState) -> LocalState:
        is_known = self._directory.writes and self.num_lines is not None
        return LocalState(facts={"metrics_lines": self.num_lines} if is_known else {})

    def load_state(self, saved: SavedState) -> None:
        self.num_lines = saved.facts.get("metrics_lines")

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        if outcome == "finished":
            self._directory.record.samples_per_second = self._meter.samples_per_second
            self._directory.record.mfu = _rounded(self._meter.mfu)
        self._directory.record.goodput = _rounded(self._meter.goodput)
        if self._is_open:
            self._logger.close(RunOutcome(outcome))

    def _log(self, now: Progress, lists: Mapping[str, Sequence[float]] | None = None) -> None:
        metrics = dict(now.metrics)
        self._directory.log_metrics(now.step, now.epoch, metrics, lists or {})
        if self.num_lines is not None:
            self.num_lines += 1
        if self._directory.writes:
            self._logger.scalars(now.step, metrics)


def _rounded(fraction: float | None) -> float | None:
    return None if fraction is None else round(fraction, 4)
