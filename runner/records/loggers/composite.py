"""Several loggers as one, which keeps their errors from failing the run."""

import logging
from collections.abc import Callable, Mapping

from runner.errors import JobFailed, first_line
from runner.records.compared_runs import Trial
from runner.records.loggers.contract import Logger, Predictions, RunOutcome

log = logging.getLogger(__name__)


class CompositeLogger(Logger):
    """Calls several named loggers. A logger that raises is disabled, because metrics.jsonl has all metrics anyway.

    After an error in `predictions`, which may be one of the user's data, only `predictions` is disabled.
    """

    def __init__(self, loggers: Mapping[str, Logger]):
        self._loggers = dict(loggers)
        self._disabled: set[str] = set()
        self._without_predictions = {name for name, logger in loggers.items() if not logger.wants_predictions}
        # Never changed, because the ranks sum the predictions, and only rank 0 calls the loggers.
        self.wants_predictions = any(logger.wants_predictions for logger in self._loggers.values())

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """Open the loggers. For a new run, which has no work to lose, raise an error: JobFailed for an OSError."""
        opened: list[Logger] = []
        for name, logger in self._loggers.items():
            try:
                logger.open(directory, first_step, trial)
                opened.append(logger)
            except Exception as error:
                if first_step:
                    self._disable(name, error)
                    continue
                for other in opened:
                    other.close(RunOutcome("failed"))
                if isinstance(error, OSError):
                    text = f"logger={name} cannot be opened: {error}; fix the problem, or choose another logger"
                    raise JobFailed(text) from None
                raise

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        self._call(lambda logger: logger.scalars(step, metrics))

    def predictions(self, step: int, predictions: Predictions) -> None:
        for name, logger in self._loggers.items():
            if name in self._disabled | self._without_predictions:
                continue
            try:
                logger.predictions(step, predictions)
            except Exception as error:
                self._without_predictions.add(name)
                text = "logger=%s shows no more predictions after an error: %s; its metrics continue"
                log.warning(text, name, first_line(error))

    def text(self, tag: str, text: str) -> None:
        self._call(lambda logger: logger.text(tag, text))

    def flush(self) -> None:
        self._call(lambda logger: logger.flush())

    def close(self, outcome: RunOutcome) -> None:
        self._call(lambda logger: logger.close(outcome))

    def _call(self, call: Callable[[Logger], None]) -> None:
        for name, logger in self._loggers.items():
            if name in self._disabled:
                continue
            try:
                call(logger)
            except Exception as error:
                self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        self._disabled.add(name)
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = "logger=%s is disabled after an error: %s; the run continues, and metrics.jsonl contains all metrics"
        log.warning(text, name, reason, exc_info=None if isinstance(error, OSError) else error)
