"""What a launcher knows of a task: one that all ranks of a job do together, or one that launches jobs of its own."""

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console

from runner.config.debugging import check_alone
from runner.config.diagnostics.import_target import locate
from runner.config.instantiate import check_contract, make_group
from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.runs.run_directory import Request, RunDirectory
from runner.training.build import Experiment


class Task(Protocol):
    """What both kinds say of themselves; a file of runner/tasks and a YAML file of conf/task."""

    reads_run: bool  # it is about an earlier run, which run= names
    reads_checkpoint: bool  # there must be one in that run
    needs_experiment: bool  # otherwise model, data and the rest are not built for it
    trains: bool  # so that profile= and debug= have an effect
    picks_split: bool  # so that split= has one
    section: str | None  # the top-level key whose keys are this task's alone


class JobTask(Task, Protocol):
    """Something to do with an experiment, by all ranks of a job together."""

    min_world_size: int  # a smaller world is refused

    def check(self, config: Config, world_size: int) -> list[str]:
        """Why it cannot be done in a world of this size, a message each."""

    def run(
        self, config: Config, experiment: Experiment | None, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        """Do it on this rank; experiment: None unless it needs one. All ranks must call it.

        Returns the metrics that result.json keeps.
        """


class LaunchingTask(Task, Protocol):
    """Something that takes jobs of its own, or none: it is not one itself."""

    def launch_jobs(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Do it, in every process that the command was started in. Returns its metrics.

        Raises InputError, Preempted or JobFailed, as runner.launchers.job.run_job does.
        """


def launches_jobs(config: Config) -> bool:
    """Whether the chosen task is a LaunchingTask, before it is made."""
    return hasattr(locate(config.task["_target_"]), "launch_jobs")


def make_launching_task(config: Config) -> LaunchingTask:
    """Raises InputError for an option that the task refuses, and for what is no such task."""
    task: LaunchingTask = make_group({}, "task", config.task)
    check_contract(task, LaunchingTask, "task")
    return task


def make_job_task(config: Config) -> JobTask:
    """Raises InputError for an option that the task refuses, and for what is no such task."""
    task: JobTask = make_group({}, "task", config.task)
    check_contract(task, JobTask, "task")
    return task


def check_size(config: Config, choices: Mapping[str, str], task: JobTask, world_size: int) -> list[str]:
    """Why the task cannot be done in a world of this size, one message each."""
    messages = check_alone(config, world_size) + task.check(config, world_size)
    if world_size < task.min_world_size:
        messages.append(
            f"task={choices['task']} needs at least {task.min_world_size} ranks, and this world has "
            f"{world_size}; try launcher=spawn"
        )
    return messages
