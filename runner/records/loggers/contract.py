"""The contract of a logger."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from runner.records.compared_runs import Trial


class Predictions(Protocol):
    """The predictions of a classifier in an evaluation."""

    @property
    def confusion(self) -> torch.Tensor:
        """The number of samples of each class (row) by predicted class (column). (num_classes, num_classes)"""

    def samples(self) -> list[tuple[Any, int, int]]:
        """Return the first samples of the dataset, without their targets, with the class and the predicted class."""


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of this attempt. It is true if the run is complete, so that it need not be resumed."""

    state: str  # finished, pruned, paused, preempted or failed

    def __bool__(self) -> bool:
        return self.state in ("finished", "pruned")


class Logger:
    """The base class of loggers. Override the methods that you need; by default they do nothing.

    Every rank has a logger; only rank 0 calls its methods, `open` first. An exception in `open` fails a new run. After
    one in `predictions` the logger gets no more predictions; after any other the run continues without the logger.
    """

    wants_predictions: bool = False  # if True, evaluations collect predictions, and `predictions` is called

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """Start logging.

        Args:
            directory: The run directory, which contains config.yaml, result.json and, in metrics.jsonl, the metrics of
                the steps up to `first_step`.
            first_step: The step after which the run continues; 0 for a new run.
            trial: The overrides that distinguish the run from others. `trial.metrics` has the names of the metrics of
                an evaluation, the monitored one first.
        """

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step or of an evaluation."""

    def predictions(self, step: int, predictions: Predictions) -> None:
        """Log the predictions of an evaluation of a classifier."""

    def text(self, tag: str, text: str) -> None:
        """Log a text, such as the configuration."""

    def flush(self) -> None:
        """Write all logged data, before a checkpoint is saved from which the run may be resumed."""

    def close(self, outcome: RunOutcome) -> None:
        """Stop logging."""
