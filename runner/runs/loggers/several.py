"""The chosen loggers as one, none of which can lose the run."""

import logging
from collections.abc import Callable, Mapping

from runner.errors import JobFailed
from runner.runs.loggers.protocol import Ending, Logger, Predictions
from runner.runs.records import Trial

log = logging.getLogger(__name__)


class Several:
    """None, one or several loggers by name, each told the same.

    One that cannot be opened fails a run that begins, as nothing is lost yet. Afterwards one that raises, because its
    server is gone or its disk is full, is told nothing more: the run's numbers are in metrics.jsonl anyhow.
    """

    def __init__(self, loggers: Mapping[str, Logger]):
        self._loggers = dict(loggers)
        self._lost: set[str] = set()
        self.wants_predictions = any(logger.wants_predictions for logger in self._loggers.values())

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """Raises what a logger raises where the run begins; JobFailed where that is an OSError: nothing answers."""
        opened: list[Logger] = []
        for name, logger in self._loggers.items():
            try:
                logger.open(directory, first_step, trial)
                opened.append(logger)
            except Exception as error:
                if first_step:
                    self._lose(name, error)
                    continue
                for other in opened:
                    other.close(Ending("failed"))
                if isinstance(error, OSError):
                    text = f"logger={name} cannot be opened: {error}; mend that, or choose another logger"
                    raise JobFailed(text) from None
                raise

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        self._tell(lambda logger: logger.scalars(step, metrics))

    def predictions(self, step: int, seen: Predictions) -> None:
        self._tell(lambda logger: logger.predictions(step, seen) if logger.wants_predictions else None)

    def text(self, tag: str, text: str) -> None:
        self._tell(lambda logger: logger.text(tag, text))

    def flush(self) -> None:
        self._tell(lambda logger: logger.flush())

    def close(self, finished: Ending) -> None:
        self._tell(lambda logger: logger.close(finished))

    def _tell(self, call: Callable[[Logger], None]) -> None:
        for name, logger in self._loggers.items():
            if name in self._lost:
                continue
            try:
                call(logger)
            except Exception as error:
                self._lose(name, error)

    def _lose(self, name: str, error: Exception) -> None:
        self._lost.add(name)
        reason = (str(error).splitlines() or [""])[0]
        log.warning(
            "logger %s is told nothing more: %s: %s; the run goes on, and its numbers are in metrics.jsonl",
            name,
            type(error).__name__,
            reason,
            exc_info=None if isinstance(error, OSError) else error,
        )
