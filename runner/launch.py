"""One job from its checked configuration to an exit status: which launcher, and what the user is told at the end."""

from dataclasses import replace

from runner.ahead import check_ahead, check_conducts
from runner.backend import as_backend
from runner.build import make_launcher, make_task
from runner.config import Config, InputError
from runner.explain.diagnose import tell
from runner.job import JobFailed
from runner.launchers.env import Env, Place
from runner.meeting import JOIN_TIMEOUT_S, join
from runner.run_dir import Request
from runner.train import Preempted


def launch(config: Config, request: Request, place: Place) -> dict[str, float]:
    """Run the job where its launcher says. Returns the metrics.

    Raises InputError, Preempted or JobFailed, as run_job does.
    """
    task = make_task(config)
    launcher = make_launcher(config)
    if launcher.queues and place.directory:  # this process is of the job that was queued
        launcher = Env(launcher.join_timeout_s)
    if launcher.queues:
        check_conducts(config, request.choices)
        request = replace(request, overrides=request.words or request.overrides)
    if task.conducts:
        return task.conduct(config, request, place)
    if launcher.starts_processes and not place.may_start_processes:
        raise InputError(
            f"launcher={request.choices['launcher']} starts processes itself, but {place.found} has started this one "
            f"as rank {place.rank} of {place.world_size}; add launcher=env"
        )
    if launcher.world_size is not None:
        check_ahead(config, request.choices, launcher.world_size)
    return launcher.launch(config, request, place)


def launch_and_tell(config: Config, request: Request, place: Place) -> int:
    """Run one job and end this process's part in the world. Returns the exit status."""
    status, lines, timeout_s = 0, [], JOIN_TIMEOUT_S
    try:
        timeout_s = make_launcher(config).join_timeout_s
    except InputError as error:
        lines = error.messages
    try:
        world = join(place, as_backend(config.backend), timeout_s)
    except InputError as error:
        tell(error.messages)
        return 2
    try:
        if lines := world.agree("composed", lines):
            raise InputError(*lines)
        launch(config, request, place)
    except InputError as error:
        status, lines = 2, error.messages
    except Preempted:
        status = 143
    except JobFailed as error:
        status = error.status
    world.speak(lambda: tell(lines))
    world.close()
    return status
