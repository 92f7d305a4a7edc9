"""What a run tells a logger."""

from dataclasses import dataclass
from typing import Protocol

import torch

from runner.runs.records import Trial


class Predictions(Protocol):
    """What an evaluation has counted of a classifier."""

    @property
    def confusion(self) -> torch.Tensor:
        """How many samples of each class (row) were taken for each (column). (num_classes, num_classes)"""

    def samples(self) -> list[tuple[torch.Tensor, int, int]]:
        """The first samples of the data, each with its class and the predicted one."""


@dataclass(frozen=True)
class Ending:
    """How this process's part of the run ended; true where the run is done, so that nothing will follow."""

    state: str  # finished, pruned, preempted or failed

    def __bool__(self) -> bool:
        return self.state in ("finished", "pruned")


class Logger(Protocol):
    """Every rank has one; rank 0 alone calls its methods. `open` comes first.

    What `open` raises fails a run that begins. Whatever else is raised is told once, and the run goes on without.
    """

    wants_predictions: bool  # otherwise no evaluation collects them

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        """`first_step` is the step that the run continues after; `trial` is what makes it differ from others.

        `trial.metrics` are the names of what an evaluation gives, the monitor first. The directory holds config.yaml,
        result.json and, in metrics.jsonl, what was logged up to the first step.
        """

    def scalars(self, step: int, metrics: dict[str, float]) -> None: ...

    def predictions(self, step: int, seen: Predictions) -> None:
        """Called after each evaluation of a classifier."""

    def text(self, tag: str, text: str) -> None: ...

    def flush(self) -> None:
        """What was logged must not be lost from here on: a run may be resumed from now."""

    def close(self, finished: Ending) -> None: ...
