"""Helpers of the loggers: facts about the run, its ids on dashboards, and its logged metrics."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.records.ledger import is_sweep
from runner.records.loggers.contract import Logger, Predictions
from runner.records.loggers.images import draw_confusion
from runner.records.run_files import dumps, read_mapping, read_metrics, write_atomically
from runner.records.run_record import find_run
from runner.records.settings import CONFIG

IDS = "loggers.json"
CONFUSION = "val/confusion"


class RunFacts:
    """The facts that a run records before it trains: its name, sweep, configuration and result.json."""

    def __init__(self, directory: Path):
        self.name = directory.name
        self.sweep = directory.parent.name if is_sweep(directory.parent) else None
        self.outputs = directory.parents[2 if self.sweep else 1]  # the directory of all runs
        self.config = read_mapping(directory / CONFIG)
        self.result = find_run(directory).as_result()
        choices = ("model", "data", "parallel", "world_size")  # names that are not in the configuration
        self.choices = {key: self.result[key] for key in choices if key in self.result}


def read_ids(directory: Path) -> dict[str, dict[str, str]]:
    """Return the run's ids on dashboards, by logger and by the server, file or project that contains the run."""
    path = directory / IDS
    return read_mapping(path) if path.exists() else {}


def save_id(directory: Path, option: str, location: str, run_id: str) -> None:
    """Save the run's id on a dashboard, for later attempts. `option` is the logger; see `read_ids`."""
    ids = read_ids(directory)
    ids.setdefault(option, {})[location] = run_id
    write_atomically(directory / IDS, dumps(ids, indent=1) + "\n")


class History:
    """Selects the metrics that a dashboard does not have yet, so that each point is logged once.

    Args:
        last: The last step of each metric on the dashboard, by the dashboard's name of the metric.
        rename: Converts the name of a metric to the dashboard's name.
        least_step: The first step to log for metrics that are not in `last`.
    """

    def __init__(self, last: Mapping[str, int], rename: Callable[[str], str] = str, least_step: int = 0):
        self._last, self._rename, self._least_step = dict(last), rename, least_step

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of this step that the dashboard does not have, by the dashboard's names."""
        renamed = {self._rename(name): value for name, value in metrics.items()}
        return {name: value for name, value in renamed.items() if step > self._last.get(name, self._least_step - 1)}

    def missing(self, directory: str) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the steps before this attempt, each with the metrics that the dashboard does not have."""
        for step, metrics in logged_metrics(directory):
            if new := self.new(step, metrics):
                yield step, new


def logged_metrics(directory: str) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the step and the metrics of each line of metrics.jsonl."""
    for line in read_metrics(Path(directory)):
        yield line.pop("step"), {name: value for name, value in line.items() if name != "epoch"}


class ProjectRun(Logger):
    """The base class for wandb and trackio, whose APIs are similar. `open` sets the attributes and calls `catch_up`."""

    _package: Any  # wandb or trackio
    _run: Any
    _history: History

    def catch_up(self, directory: str) -> None:
        """Log the metrics of earlier attempts that the dashboard does not have."""
        for step, metrics in self._history.missing(directory):
            self._run.log(metrics, step=step)

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        if new := self._history.new(step, metrics):
            self._run.log(new, step=step)

    def predictions(self, step: int, predictions: Predictions) -> None:
        if self._history.new(step, {CONFUSION: 0.0}):
            self._run.log({CONFUSION: self._package.Image(draw_confusion(predictions.confusion))}, step=step)
