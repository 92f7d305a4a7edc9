"""One job from its checked configuration to its exit status."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runner.config.diagnostics.import_target import locate
from runner.config.instantiate import check_contract, make_group
from runner.config.request import Request
from runner.config.schema import Config
from runner.config.validate import AUTO, check_fit
from runner.distributed.backend import as_backend
from runner.distributed.environment import JOIN_TIMEOUT_S, RankInfo
from runner.distributed.rendezvous import join
from runner.distributed.world_store import RanksMissing
from runner.errors import InputError, JobFailed, Preempted, print_messages
from runner.jobs.continuation import find_finished
from runner.jobs.task import JobTask, LaunchingTask, check_size, initial_weights_path, launches_jobs, make_task
from runner.launchers.contract import Launcher
from runner.launchers.env import Env
from runner.optimization.optimizers import try_options
from runner.optimization.torch_schedules import make_schedule
from runner.process.socket_paths import shorten_socket_paths
from runner.remote.address import is_remote
from runner.training.components import make_logger, make_parallel
from runner.training.mode import resolve
from runner.training.model.initial_weights import locate_initial_weights


def make_launcher(node: dict[str, Any], debug: bool) -> Launcher:
    """Construct the launcher. Raise InputError for a refused option or a class that does not implement the contract."""
    launcher: Launcher = make_group({}, "launcher", node)
    check_contract(launcher, Launcher, "launcher")
    if debug and launcher.starts_processes:
        raise InputError(
            "debug=true needs the terminal, which the processes of a launcher do not have; try launcher=env"
        )
    return launcher


def launch(request: Request, rank_info: RankInfo, launcher: Launcher | None = None) -> dict[str, float]:
    """Run the job by its launcher. Return the metrics, or raise as runner.jobs.job.run_job does."""
    config, choices = request.config, request.command.choices
    shorten_socket_paths()  # before anything starts a process, also custom code
    launcher = launcher or make_launcher(config.launcher, config.debug)
    if launcher.queues and rank_info.directory:  # this process belongs to the queued job
        launcher = Env(launcher.join_timeout_s)
    if launches_jobs(config.task) and launcher.is_remote:
        raise InputError(
            f"launcher={choices['launcher']}: task={choices['task']} runs on this machine; leave the launcher out"
        )
    if launcher.queues:
        check_queueable(config.task, choices)
        if not launcher.is_remote:
            locate_initial_weights(initial_weights_path(config.init_from, config.task), request.destination.directory)
        if request.queued_overrides:
            request = replace(request, command=replace(request.command, overrides=request.queued_overrides))
    if launches_jobs(config.task):
        task: LaunchingTask = make_task(config.task, LaunchingTask)
        return task.launch_jobs(request, rank_info)
    check_elastic(config, choices, launcher)
    if launcher.starts_processes and not rank_info.may_start_processes:
        raise InputError(
            f"launcher={choices['launcher']} starts processes itself, but {rank_info.source} has started this "
            f"one as rank {rank_info.rank} of {rank_info.world_size}; add launcher=env"
        )
    if launcher.starts_processes and (metrics := find_finished(request)) is not None:
        return metrics
    if launcher.world_size is not None:
        check_ahead(config, choices, launcher.world_size)
    return launcher.launch(request, rank_info)


def launch_and_report(request: Request, rank_info: RankInfo, launcher: Launcher | None = None) -> int:
    """Run one job, leave its world, and return the exit status. launcher: None for that of the configuration."""
    config, status, lines = request.config, 0, []
    try:
        launcher = launcher or make_launcher(config.launcher, config.debug)
    except InputError as error:
        lines = error.messages
    try:
        timeout_s = launcher.join_timeout_s if launcher else JOIN_TIMEOUT_S
        world = join(rank_info, as_backend(config.backend), timeout_s)
    except InputError as error:
        print_messages(error.messages)
        return 2
    except Preempted:
        return 143
    try:
        if lines := world.consensus.first_error("composed", lines):
            raise InputError(*lines)
        launch(request, rank_info, launcher)
    except InputError as error:
        status, lines = 2, error.messages
    except Preempted:
        status = 143
    except JobFailed as error:
        status = error.status
    except RanksMissing as error:
        status, lines, world.shutdown.is_reporter = 1, [str(error)], error.is_reporter
    world.shutdown.report_before_exit(lambda: print_messages(lines))
    world.shutdown.close()
    return status


def check_queueable(task: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Raise InputError if the launcher queues jobs but the task would launch its own jobs in this process."""
    if launches_jobs(task) and not locate(task["_target_"]).reads_run:
        raise InputError(
            f"launcher={choices['launcher']} queues a job, but task={choices['task']} starts processes itself "
            "where the command runs; run it inside an allocation (salloc, or a script for sbatch) with launcher=env"
        )


def check_elastic(config: Config, choices: Mapping[str, str], launcher: Launcher) -> None:
    """Raise InputError if the run cannot continue without a lost rank, as `elastic_every_steps` requires."""
    if config.elastic_every_steps is None:
        return
    setting = f"elastic_every_steps={config.elastic_every_steps}"
    if not launcher.is_elastic:
        raise InputError(
            f"{setting} does not work with launcher={choices['launcher']}, which ends all ranks if one is lost; "
            "try launcher=spawn or torchrun"
        )
    if AUTO in (choices["parallel"], config.micro_batches):
        raise InputError(f"{setting} does not work with parallel=auto or micro_batches=auto; name a mode and a number")
    if is_remote(config.outputs) and (launcher.started_on_each or launcher.uses_machines or launcher.queues):
        raise InputError(
            f"{setting} and outputs={config.outputs} work together only on one machine, with launcher=spawn "
            "or torchrun; use a directory of a shared file system"
        )


def check_ahead(config: Config, choices: Mapping[str, str], world_size: int) -> None:
    """Raise InputError if no world of this size can run the job. Model, data and device are checked by the ranks."""
    if launches_jobs(config.task):
        return
    task: JobTask = make_task(config.task, JobTask)
    if messages := check_fit(config, device_type=None) + check_size(config, choices, task, world_size):
        raise InputError(*messages)
    if not task.needs_experiment:
        return
    resolve(make_parallel(config.parallel, choices), config, world_size)
    groups = try_options(config.optimizer, choices)
    make_schedule(config.scheduler, choices, groups, num_steps=1, steps_per_epoch=1)  # only the ranks know the numbers
    make_logger(config.logger)
