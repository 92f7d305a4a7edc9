"""One job in one world: agree on the input, form the group, make the directory, run the task, record how it ended."""

import logging
import os
import socket
import traceback
from pathlib import Path

from runner.backend import as_backend
from runner.build import Experiment, build, make_task
from runner.checks import check_fit, check_size
from runner.config import Config, InputError
from runner.failure import misses_peer
from runner.fresh import freshen
from runner.launchers.placement import take_cores
from runner.run_dir import Request, RunDirectory, new_directory
from runner.signals import unhurried
from runner.tasks.protocol import Task
from runner.terminal import speaking
from runner.train import Preempted
from runner.world import World

log = logging.getLogger(__name__)


class JobFailed(Exception):
    """The job ended with an error, which the user has been told and result.json keeps; status: to exit with."""

    def __init__(self, text: str, status: int = 1):
        super().__init__(text)
        self.status = status


def run_job(config: Config, request: Request, world: World) -> dict[str, float]:
    """Run one job on this rank. Returns its metrics. All ranks must call it.

    Raises InputError (nothing was written), Preempted (it has saved) or JobFailed. What it raises holds no frame, and
    so no model: a live DDP module would outlast its group (see World.leave_group).
    """
    world.begin_job(as_backend(config.backend))
    raised: Exception
    try:
        return _run(config, request, world)
    except InputError as error:
        raised = InputError(*error.messages)
    except Preempted as error:
        raised = Preempted(str(error))
    except JobFailed as error:
        raised = JobFailed(str(error))
    finally:
        world.leave_group()
    raise raised


def _run(config: Config, request: Request, world: World) -> dict[str, float]:
    task, experiment, refused, crashed = _build(config, request, world)
    if refused := world.agree("refused", refused):
        raise InputError(*refused)
    crashed = world.agree("crashed", crashed)

    try:
        path = Path(world.share_once("directory", lambda: _make_directory(config, request)))
    except ValueError as error:
        raise InputError(f"outputs={config.outputs}: no run can be kept there ({error}); name another folder") from None
    directory = RunDirectory(path, writes=world.rank == 0)
    with speaking(world.rank, directory.path) as console:
        directory.record(
            config,
            request,
            task=request.choices["task"],
            model=request.choices["model"],
            data=request.choices["data"],
            parallel=request.choices["parallel"],
            world_size=world.world_size,
            seed=config.seed,
        )
        state, text, lost = "failed", "", False
        failure: Exception | None = None
        try:
            if crashed:
                raise JobFailed(crashed[0])
            assert task is not None
            if world.world_size > 1 or (experiment is not None and experiment.parallel.needs_group):
                world.form_group()
            metrics = task.run(config, experiment, world, directory, console)
            directory.result.metrics = metrics
            state = "pruned" if directory.pruned else "finished"
            return metrics
        except Preempted as error:
            state = "preempted"
            log.warning("%s: saved after step %d; go on with resume=%s", error, directory.result.step, directory.path)
            raise
        except JobFailed as error:
            text = str(error)
        except KeyboardInterrupt:
            text = "interrupted"
            raise
        except Exception as error:
            failure = error
        finally:
            with unhurried():
                if failure is not None:
                    text, lost = _traceback(failure), misses_peer(failure)
                    failure = None  # it holds frames, and so the model
                if experiment is not None:
                    experiment.train_loader.close()
                    experiment.val_loader.close()
                if state == "failed":
                    text = world.report_failure(f"rank {world.rank} on {socket.gethostname()}:\n{text}", lost)
                    log.error("%s", text.rstrip())
                    directory.result.error = text
                directory.result.state = state
                directory.save_result()
        raise JobFailed(text)


def _build(
    config: Config, request: Request, world: World
) -> tuple[Task | None, Experiment | None, list[str], list[str]]:
    """The task and what it needs, or why the input is refused, or the traceback of what broke while building."""
    try:
        messages = world.choose_device()
        take_cores(world, config.threads)  # of the node that the device hangs on
        freshen(config.seed)
        task: Task = make_task(config)
        if messages := messages + check_fit(config, world) + check_size(config, task, world.world_size):
            raise InputError(*messages)
        return task, build(config, request.choices, world) if task.needs_experiment else None, [], []
    except InputError as error:
        return None, None, error.messages, []
    except Exception as error:
        return None, None, [], [_traceback(error)]


def _make_directory(config: Config, request: Request) -> str:
    if request.directory is None:
        return str(new_directory(config.outputs, config.name))
    os.makedirs(request.directory, exist_ok=True)
    return request.directory


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
