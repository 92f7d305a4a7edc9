"""One job from its checked configuration to an exit status: which launcher, and what the user is told at the end."""

from collections.abc import Mapping
from dataclasses import replace

from runner.config.diagnostics.import_target import locate
from runner.config.instantiate import check_contract, make_group
from runner.config.schema import Config
from runner.config.validate import check_fit
from runner.distributed.agreement import RanksAbsent
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import JOIN_TIMEOUT_S, join
from runner.errors import InputError, JobFailed, Preempted, tell
from runner.fault_tolerance.initial_weights import check_initial_weights
from runner.launchers.env import Env
from runner.launchers.protocol import Launcher
from runner.launchers.task import check_size, launches_jobs, make_job_task, make_launching_task
from runner.runs.run_directory import Request
from runner.training.build import make_logger, make_parallel
from runner.training.optimizers import OptimizerTrial
from runner.training.strategy import lay_out


def make_launcher(config: Config) -> Launcher:
    """How the processes come to be. Raises InputError for an option that it refuses, and for what is no launcher."""
    launcher: Launcher = make_group({}, "launcher", config.launcher)
    check_contract(launcher, Launcher, "launcher")
    if config.debug and launcher.starts_processes:
        raise InputError(
            "debug=true is for the process that has the terminal, and the launcher starts others; type launcher=env"
        )
    return launcher


def launch(config: Config, request: Request, rank_info: RankInfo, launcher: Launcher | None = None) -> dict[str, float]:
    """Run the job where its launcher says. Returns the metrics. launcher: the configuration's, if it is made already.

    Raises InputError, Preempted or JobFailed, as run_job does.
    """
    launcher = launcher or make_launcher(config)
    if launcher.queues and rank_info.directory:  # this process is of the job that was queued
        launcher = Env(launcher.join_timeout_s)
    if launcher.queues:
        check_queueable(config, request.choices)
        check_initial_weights(config, request.directory)
        request = replace(request, overrides=request.words or request.overrides)
    if launches_jobs(config):
        return make_launching_task(config).launch_jobs(config, request, rank_info)
    if launcher.starts_processes and not rank_info.may_start_processes:
        raise InputError(
            f"launcher={request.choices['launcher']} starts processes itself, but {rank_info.found} has started this "
            f"one as rank {rank_info.rank} of {rank_info.world_size}; add launcher=env"
        )
    if launcher.world_size is not None:
        check_ahead(config, request.choices, launcher.world_size)
    return launcher.launch(config, request, rank_info)


def launch_and_tell(config: Config, request: Request, rank_info: RankInfo) -> int:
    """Run one job and end this process's part in the world. Returns the exit status."""
    status, lines, timeout_s = 0, [], JOIN_TIMEOUT_S
    launcher: Launcher | None = None
    try:
        launcher = make_launcher(config)
        timeout_s = launcher.join_timeout_s
    except InputError as error:
        lines = error.messages
    try:
        world = join(rank_info, as_backend(config.backend), timeout_s)
    except InputError as error:
        tell(error.messages)
        return 2
    except Preempted:
        return 143
    try:
        if lines := world.agreement.first_error("composed", lines):
            raise InputError(*lines)
        launch(config, request, rank_info, launcher)
    except InputError as error:
        status, lines = 2, error.messages
    except Preempted:
        status = 143
    except JobFailed as error:
        status = error.status
    except RanksAbsent as error:
        status, lines, world.ending.speaks = 1, [str(error)], error.told
    world.ending.say_then_continue(lambda: tell(lines))
    world.ending.close()
    return status


def check_queueable(config: Config, choices: Mapping[str, str]) -> None:
    """Raises InputError where the task launches jobs of its own, and would here, although a launcher queues jobs."""
    if launches_jobs(config) and not locate(config.task["_target_"]).reads_run:
        raise InputError(
            f"launcher={choices['launcher']} queues a job, but task={choices['task']} starts processes of its own "
            "where it is typed; type it inside an allocation (of salloc, or in a script for sbatch), with launcher=env"
        )


def check_ahead(config: Config, choices: Mapping[str, str], world_size: int) -> None:
    """Raises InputError where no world of this size can run it. What model, data or device decide is told later."""
    if launches_jobs(config):
        return
    task = make_job_task(config)
    if messages := check_fit(config, device_type=None) + check_size(config, choices, task, world_size):
        raise InputError(*messages)
    if not task.needs_experiment:
        return
    lay_out(config, make_parallel(config, choices), world_size)
    OptimizerTrial(config.optimizer, choices)
    make_group(choices, "scheduler", config.scheduler)
    make_logger(config, choices)
