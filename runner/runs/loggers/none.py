"""No logger."""

from runner.runs.loggers.protocol import Predictions
from runner.runs.records import Trial


class NoLogger:
    """logger=none: metrics.jsonl alone."""

    wants_predictions = False

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        pass

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def predictions(self, step: int, seen: Predictions) -> None:
        pass

    def text(self, tag: str, text: str) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, finished: bool) -> None:
        pass
