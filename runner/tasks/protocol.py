"""What a job knows of a task."""

from typing import Protocol

from rich.console import Console

from runner.build import Experiment
from runner.config import Config
from runner.run_dir import RunDirectory
from runner.world import World


class Task(Protocol):
    """Something to do with an experiment; a file of runner/tasks and a YAML file of conf/task."""

    reads_run: bool  # it is about an earlier run, which run= names

    def run(
        self, config: Config, experiment: Experiment, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        """Do it on this rank. Returns the metrics that result.json keeps. All ranks must call it."""
