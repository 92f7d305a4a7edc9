"""One job in one world: agree on the input, form the group, make the directory, run the task, record how it ended."""

import logging
import os
import socket
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path

from runner.config.own_folders import hiding
from runner.config.schema import Config
from runner.config.validate import AUTO, check_fit
from runner.distributed.agreement import RanksAbsent
from runner.distributed.backend import as_backend
from runner.distributed.cpu_affinity import take_cores
from runner.distributed.devices import choose_devices
from runner.distributed.occupied import occupied
from runner.distributed.peer_failure import PeerMissing, misses_peer
from runner.distributed.signals import Stopped, interruptible, listening
from runner.distributed.stack_text import place_of
from runner.distributed.world import World
from runner.errors import InputError, JobFailed, Preempted, tell
from runner.fault_tolerance.initial_weights import find_initial_weights
from runner.launchers.going_on import check_directory, holding, samples_of
from runner.launchers.micro_batches import RAN_OUT, TooLarge, is_out_of_memory, may_halve, run_until_it_fits
from runner.launchers.process_state import reset_process
from runner.launchers.task import JobTask, check_size, make_job_task
from runner.runs.code_state import told
from runner.runs.console import LOGS, logging_to
from runner.runs.run_directory import Request, RunDirectory, new_directory
from runner.runs.stand_in import recorded_from_now, tell_failure
from runner.training.build import Experiment, build, check_compiler

log = logging.getLogger(__name__)


def run_job(config: Config, request: Request, world: World) -> dict[str, float]:
    """Run one job on this rank, once or until its micro-batches fit. Returns its metrics. All ranks must call it.

    Raises InputError (nothing was written), Preempted (it has saved) or JobFailed.
    """
    with occupied(), listening():
        if config.micro_batches != AUTO:
            return _run_once(config, request, world)
        return run_until_it_fits(_run_once, config, request, world)


def _run_once(config: Config, request: Request, world: World, may_double: bool = False) -> dict[str, float]:
    """As run_job. may_double: raises TooLarge where a rank was out of memory, and smaller micro-batches may do.

    What it raises holds no frame, and so no model: a live DDP module would outlast its group (see
    runner.distributed.process_group).
    """
    world.begin_job(as_backend(config.backend))
    raised: Exception
    try:
        return _run(config, request, world, may_double)
    except TooLarge as error:
        raised = TooLarge(str(error), error.directory)
    except InputError as error:
        raised = InputError(*error.messages)
    except Preempted as error:
        raised = Preempted(str(error))
    except Stopped as error:
        raised = Preempted(str(error))
    except JobFailed as error:
        raised = JobFailed(str(error))
    except RanksAbsent as error:  # one hangs, or has died, before there is a run to record it
        world.ending.failed, world.ending.speaks = True, error.told
        if error.told:
            tell([str(error)])
        raised = JobFailed(str(error))
    finally:
        world.group.leave(went_well=not world.ending.failed)
    if isinstance(raised, JobFailed) and not isinstance(raised, TooLarge) and world.ending.stands_in():
        world.ending.tell_failure(str(raised))
    raise raised


def _run(config: Config, request: Request, world: World, may_double: bool) -> dict[str, float]:
    world.agreement.recall()
    try:
        with interruptible():
            task, experiment, refused, crashed = _build(config, request, world)
    except Stopped as error:
        world.ending.report_stop(str(error))
        raise
    if world.rank == 0:
        refused += check_directory(request.directory or world.agreement.made_before("directory"), config, experiment)
    if refused := world.agreement.first_error("refused", refused):
        raise InputError(*refused)
    crashed = world.agreement.first_error("crashed", crashed)

    try:
        path = Path(world.agreement.share_once("directory", lambda: _make_directory(config, request)))
    except ValueError as error:
        raise InputError(f"outputs={config.outputs}: no run can be kept there ({error}); name another folder") from None
    if world.rank_info.local_rank == 0 and request.tells is not None:
        Path(request.tells).write_text(str(path))  # each node's launcher is told
    directory = RunDirectory(path, writes=world.rank == 0)
    world.ending.kept_in = path / LOGS
    world.ending.tell_failure, world.ending.is_recorded = partial(tell_failure, path), recorded_from_now(path)
    if may_double:
        world.ending.patience_s = world.backend.timeout_s  # no rank may be lost that is to begin again
    with holding(directory, config, request, world), logging_to(world.rank, directory.path) as console:
        directory.prepare(
            config,
            request,
            task=request.choices["task"],
            model=request.choices["model"],
            data=request.choices["data"],
            parallel=request.choices["parallel"],
            world_size=world.world_size,
            seed=config.seed,
            samples=samples_of(experiment),
            monitor=asdict(experiment.monitor) if experiment is not None else None,
        )
        if not directory.goes_on or (task is not None and not task.trains):
            directory.commit()  # of a run that goes on, the task does once it has loaded where that stopped
        if line := hiding(request.config_dirs, request.choices):
            log.info("%s", line)
        if (code := directory.result.code) and (line := told(code)):
            log.log(logging.WARNING if code["changed"] else logging.INFO, "%s", line)
        state, text, at, lost, too_large = "failed", "", "", False, False
        failure: BaseException | None = None
        stopped: str | None = None  # why a signal, or the like, has ended it
        try:
            if crashed:
                raise JobFailed(crashed[0])
            assert task is not None
            if world.world_size > 1 or (experiment is not None and experiment.parallel.needs_group):
                world.group.form(world.backend, world.device)
                world.watch.start()
                if experiment is not None:
                    experiment.share_samples()
            with interruptible():
                metrics = task.run(config, experiment, world, directory, console)
            directory.result.metrics = metrics
            state = "pruned" if directory.pruned else "finished"
            return metrics
        except (Preempted, Stopped) as error:
            if isinstance(error, Stopped) and world.neighbours.gone():
                # A launcher's signal, that has lost a rank; where a person's came, that rank has said so.
                failure = PeerMissing(f"ended by {error}")
            else:
                stopped = str(error)
                if isinstance(error, Stopped):
                    world.ending.report_stop(stopped)
        except JobFailed as error:
            text, lost = str(error), error.follows
        except KeyboardInterrupt:
            text = "interrupted"
            raise
        except (Exception, SystemExit) as error:  # a model that exits ends its job, and not the sweep
            failure = error
        finally:
            world.watch.stop()
            verb = ":"
            if failure is not None:
                text, lost, at = _traceback(failure), misses_peer(failure), place_of(failure.__traceback__)
                verb = f" {RAN_OUT}" if is_out_of_memory(failure) else ":"
                failure = None  # it holds frames, and so the model
            if experiment is not None:
                experiment.train_loader.close()
                experiment.val_loader.close()
            stopped = stopped or (world.ending.stopped() if lost else None)
            if stopped:
                state = "preempted"
                log.warning("%s: %s", stopped, _stopped_where(directory, task))
            elif state == "failed":
                where = f"rank {world.rank} on {socket.gethostname()}{verb}"
                text = world.ending.report_failure(f"{where}\n{text}", lost, at)
                too_large = may_double and experiment is not None and may_halve(config, experiment, text)
                if not too_large:
                    if world.ending.speaks or world.rank > 0:  # what rank 0 is too late to tell, another one has told
                        log.error("%s", text.rstrip())
                    if world.ending.speaks and world.rank > 0:
                        tell_failure(directory.path, text)
                elif world.rank == 0:
                    count = config.micro_batches
                    log.warning("micro_batches=auto: out of memory with %d, trying %d", count, 2 * count)
            try:
                directory.end(state, None if stopped else text or None)
            except OSError as error:  # a full disk; why a job has failed is told already
                if state in ("finished", "pruned"):
                    text = f"{directory.path}: its result could not be written: {error.strerror or error}"
                    log.error("%s", text)
                    raise JobFailed(text) from None
        if stopped:
            raise Preempted(stopped)
        if too_large:
            raise TooLarge(text, str(directory.path))
        raise JobFailed(text)


def _build(
    config: Config, request: Request, world: World
) -> tuple[JobTask | None, Experiment | None, list[str], list[str]]:
    """The task and what it needs, or why the input is refused, or the traceback of what broke while building."""
    try:
        init_from = find_initial_weights(config, request.directory, world)
        messages = choose_devices(world)
        take_cores(world, config.threads)  # of the node that the device hangs on
        reset_process(config.seed)
        task = make_job_task(config)
        messages += check_fit(config, world.device.type) + check_compiler(config, world.device)
        if messages := messages + check_size(config, request.choices, task, world.world_size):
            raise InputError(*messages)
        experiment = build(config, request.choices, world, init_from) if task.needs_experiment else None
        return task, experiment, [], []
    except InputError as error:
        return None, None, error.messages, []
    except (Preempted, RanksAbsent):  # of another rank
        raise
    except (Exception, SystemExit) as error:
        return None, None, [], [_traceback(error)]


def _stopped_where(directory: RunDirectory, task: JobTask | None) -> str:
    step = directory.result.step
    if task is None or not task.trains:
        return f"stopped; its directory is {directory.path}"
    where = f"saved after step {step}" if step else "stopped before the first step"
    return f"{where}; continue with resume={directory.path}"


def _make_directory(config: Config, request: Request) -> str:
    directory = request.directory or str(new_directory(config.outputs, config.name))
    os.makedirs(directory, exist_ok=True)
    if request.tells is not None:
        Path(request.tells).write_text(directory)
    return directory


def _traceback(error: BaseException) -> str:
    """With the notes on top: tables of jobs show the last line, which says what was wrong."""
    notes = [f"{note}\n" for note in getattr(error, "__notes__", ())]
    if notes:
        error.__notes__.clear()
    return "".join([*notes, *traceback.format_exception(error)])
