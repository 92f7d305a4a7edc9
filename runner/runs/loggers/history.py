"""What was logged before a run was resumed, so that a dashboard has every point of it, and none twice."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.runs.run_directory import METRICS
from runner.runs.strict_json import numbers


class History:
    """What a dashboard lacks of the run.

    last: the last step of each metric that it has, by the dashboard's name of it. named: gives that name. least_step:
    from which it takes metrics that are not in last.
    """

    def __init__(self, last: Mapping[str, int], named: Callable[[str], str] = str, least_step: int = 0):
        self._last, self._named, self._least_step = dict(last), named, least_step

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those of the metrics that it lacks, by its names: a step made again gives the numbers that it gave before."""
        renamed = {self._named(name): value for name, value in metrics.items()}
        return {name: value for name, value in renamed.items() if step > self._last.get(name, self._least_step - 1)}

    def missing(self, directory: str) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps and what it lacks of them, of those that the run had made before: it was not there, or not chosen."""
        for step, metrics in logged(directory):
            if new := self.new(step, metrics):
                yield step, new


class Feed:
    """Gives a run of wandb, or of trackio, which is called alike, what it lacks."""

    def __init__(self, run: Any, history: History):
        self._run, self._history = run, history

    def catch_up(self, directory: str) -> None:
        """With what was logged before."""
        for step, metrics in self._history.missing(directory):
            self._run.log(metrics, step=step)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        if new := self._history.new(step, metrics):
            self._run.log(new, step=step)

    def picture(self, step: int, name: str, draw: Callable[[], Any], known_as: str) -> None:
        """draw: makes the dashboard's own image. known_as: where the dashboard has its last step."""
        if self._history.new(step, {known_as: 0.0}):
            self._run.log({name: draw()}, step=step)


def logged(directory: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The step and the metrics of each line of metrics.jsonl."""
    path = Path(directory, METRICS)
    for line in path.read_text().splitlines() if path.exists() else ():
        read = json.loads(line)
        step = read.pop("step")
        read.pop("epoch", None)
        yield step, numbers(read)
