"""The contract of a task: one that all ranks of a job run together, or one that launches jobs itself."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from runner.config.diagnostics.import_target import locate
from runner.config.instantiate import check_contract, make_group
from runner.config.request import Request
from runner.config.schema import Config, InitFrom
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.records.run_directory import RunDirectory


class Task(ABC):
    """The attributes of every task; one file of runner/tasks and one YAML file of conf/task.

    A task derives from `JobTask` or `LaunchingTask` and overrides only the attributes that differ.
    """

    reads_run: bool = False  # the task reads an earlier run, which `run=` names
    reads_checkpoint: bool = False  # that run must have a checkpoint
    needs_experiment: bool  # model, data and the other groups are built for the task
    trains: bool = False  # `profile=` and `debug=` have an effect
    picks_split: bool = False  # `split=` has an effect
    section: str | None = None  # the top-level key whose keys only this task reads


class JobTask(Task):
    """A task that all ranks of a job run together. Worlds smaller than `min_world_size` are refused."""

    needs_experiment: bool = True
    min_world_size: int = 1
    needs_outputs: bool = False  # a rank must have the whole outputs of a sample

    def check(self, config: Config, world_size: int) -> list[str]:
        """Return why the task cannot run in a world of this size, one message each."""
        return []

    @abstractmethod
    def run(
        self, config: Config, experiment: Any, world: World, directory: RunDirectory, console: Console
    ) -> dict[str, float]:
        """Run the task on this rank and return the metrics that result.json stores. All ranks must call it.

        `experiment` is the runner.training.build.Experiment if the task declares `needs_experiment`, else None.
        """


class LaunchingTask(Task):
    """A task that launches jobs itself, or needs no job."""

    needs_experiment: bool = False

    @abstractmethod
    def launch_jobs(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Run the task in each process of the command. Return its metrics, or raise as runner.jobs.job.run_job does."""


def launches_jobs(node: Mapping[str, Any]) -> bool:
    """Return True if the chosen task is a LaunchingTask, without constructing it."""
    return hasattr(locate(node["_target_"]), "launch_jobs")


def initial_weights_path(init_from: InitFrom, node: Mapping[str, Any]) -> str | None:
    """Return the path of the initial weights; None if there is none, or if the chosen task reads a checkpoint."""
    return None if init_from.path is None or locate(node["_target_"]).reads_checkpoint else init_from.path


def make_task(node: dict[str, Any], contract: type) -> Any:
    """Construct the task. Raise InputError for a refused option or a class that does not implement the contract."""
    task = make_group({}, "task", node)
    check_contract(task, contract, "task")
    return task


def check_size(config: Config, choices: Mapping[str, str], task: JobTask, world_size: int) -> list[str]:
    """Return why the task cannot run in a world of this size, one message each."""
    messages = task.check(config, world_size)
    if config.debug and world_size > 1:
        messages.append(
            f"debug=true is for one process, but the world has {world_size}; start it by `python -m runner debug=true`"
        )
    if world_size < task.min_world_size:
        messages.append(
            f"task={choices['task']} needs at least {task.min_world_size} ranks, and this world has "
            f"{world_size}; try launcher=spawn"
        )
    return messages
