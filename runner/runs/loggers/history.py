"""What was logged before a run was resumed, so that a dashboard has every point of it, and none twice."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from runner.runs.run_directory import METRICS


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


def logged(directory: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The step and the metrics of each line of metrics.jsonl."""
    path = Path(directory, METRICS)
    for line in path.read_text().splitlines() if path.exists() else ():
        read = json.loads(line)
        step = read.pop("step")
        read.pop("epoch", None)
        yield step, read
