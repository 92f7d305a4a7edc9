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
    reads_checkpoint: bool  # there must be one in that run
    needs_experiment: bool  # otherwise model, data and the rest are not built, and it gets None
    min_world_size: int  # a smaller world is refused
    section: str | None  # the top-level key whose keys are this task's alone
    conducts: bool  # it starts jobs of its own, by a method `conduct`, and is none itself

    # What a task may leave out: check(config, world_size) -> list[str], why it cannot be done, a message each.

    def run(
        self, config: Config, experiment: Experiment | None, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        """Do it on this rank. Returns the metrics that result.json keeps. All ranks must call it."""
