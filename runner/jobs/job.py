"""One job in one world: agree on the input, create the directory, form the group, run the task, record the outcome."""

import logging
import socket
import traceback
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from runner.config.custom_dirs import describe_hidden
from runner.config.recorded_code import describe_code
from runner.config.request import Request
from runner.config.validate import AUTO, check_fit
from runner.distributed.backend import as_backend
from runner.distributed.environment import run_in_progress
from runner.distributed.failures.hung_ranks import raised_at
from runner.distributed.failures.peer_failure import PeerMissing, is_peer_failure
from runner.distributed.failures.signals import Stopped, end_start, handling_signals, interruptible
from runner.distributed.machine import choose_devices, set_threads
from runner.distributed.membership import Regroup
from runner.distributed.world import World
from runner.distributed.world_store import RanksMissing
from runner.errors import (
    InputError,
    JobFailed,
    Preempted,
    describe_system_error,
    is_out_of_memory,
    print_messages,
    user_line,
)
from runner.input.sampler import count_steps
from runner.jobs.compile_cache import check_compile_caches, separate_by_cpu
from runner.jobs.continuation import agree_on_directory, check_directory, count_samples, find_finished, locked
from runner.jobs.equal_input import check_equal
from runner.jobs.job_mirror import JobMirror
from runner.jobs.micro_batches import (
    RAN_OUT,
    TooLarge,
    describe_choice,
    may_double_again,
    run_until_it_fits,
)
from runner.jobs.process_state import choose_kernels, reset_process
from runner.jobs.process_tuning import returning_large_blocks
from runner.jobs.regrouping import begin, has_lost_ranks, run_in_worlds
from runner.jobs.task import JobTask, check_size, initial_weights_path, make_task
from runner.records.attempts import REGROUPED
from runner.records.console import LOGS, logging_to
from runner.records.output import copying_output
from runner.records.run_directory import RunDirectory
from runner.records.run_record import DONE, RunRecord, report_failure, watch_outcome
from runner.remote.mirror_process import MirrorProcess
from runner.training.build import Experiment, build
from runner.training.model.initial_weights import find_initial_weights

log = logging.getLogger(__name__)


def run_job(request: Request, world: World) -> dict[str, float]:
    """Run one job on this rank, after those that determine `auto` in its configuration. All ranks must call it.

    Return its metrics. Raise InputError (nothing was written), Preempted (a signal stopped it) or JobFailed.
    """
    mirror = JobMirror()
    try:
        return run_in_worlds(partial(_run_in_world, mirror), request, world)
    finally:
        mirror.end(world)  # if the ranks could not form another world


def _run_in_world(mirror: JobMirror, request: Request, world: World) -> dict[str, float]:
    """Run the job in one world. Raises as run_job does, and Regroup if the ranks have to form another world."""
    with run_in_progress(), handling_signals(), copying_output(world.rank == 0):
        run_once = partial(_run_once, mirror)
        chooses_mode = request.command.choices.get("parallel") == AUTO
        # At once, because plans and measurements take long.
        plans = chooses_mode or request.config.micro_batches == AUTO
        if plans and (metrics := run_once(request, world, checks_only=True)):
            return metrics
        if chooses_mode:
            from runner.jobs.mode_choice import choose_mode  # imported late, because other jobs do not need it

            request = choose_mode(run_once, request, world)
        if request.config.micro_batches != AUTO:
            return run_once(request, world)
        return run_until_it_fits(run_once, request, world)


def _run_once(
    mirror: JobMirror, request: Request, world: World, may_double: bool | None = None, checks_only: bool = False
) -> dict[str, float]:
    """Run the job once. Raises as run_job does, and TooLarge if `may_double` and smaller micro-batches may fit.

    `may_double` is None unless `micro_batches` was auto. With `checks_only`, only refuse wrong input: nothing is
    written, and there are no metrics, except those of a run that `run_id` names if it is finished.

    The exception refers to no frame, and so to no model: a live DDP module would outlast its group (see
    runner.distributed.process_group).
    """
    world.begin_job(as_backend(request.config.backend))
    raised: Exception
    try:
        if (metrics := _metrics_if_finished(request, world)) is not None:
            return metrics
        if checks_only:
            return _check(request, world)
        with mirror.running(request.config, world) as process:
            return _run(request, world, may_double, process)
    except (InputError, Preempted, JobFailed, Regroup) as error:
        raised = error.with_traceback(None)
        raised.__context__ = raised.__cause__ = None
    except Stopped as error:
        raised = Preempted(str(error))
    except (RanksMissing, PeerMissing) as error:  # a rank hangs or has died before the run directory exists
        if world.membership is not None and world.membership.has_begun:
            world.shutdown.failed, raised = True, Regroup()
        elif isinstance(error, RanksMissing):
            world.shutdown.fail_without_run(error.is_reporter)
            if error.is_reporter:
                print_messages([str(error)])
            raised = JobFailed(str(error))
        else:
            raise
    finally:
        world.group.leave(went_well=not world.shutdown.failed)
    if isinstance(raised, JobFailed) and not isinstance(raised, TooLarge) and world.shutdown.takes_over_report():
        world.shutdown.report_late(str(raised))
    raise raised


def _check(request: Request, world: World) -> dict[str, float]:
    """Build the experiment, with one micro-batch for `auto`, and drop it. A crash is left to the job that follows."""
    world.consensus.load_kept()
    config = request.config
    one = replace(config, micro_batches=1) if config.micro_batches == AUTO else config
    _agree_on_input(replace(request, config=one), world)
    return {}


def _metrics_if_finished(request: Request, world: World) -> dict[str, float] | None:
    """Return the metrics of a finished run that `run_id` names; None for any other run. All ranks must call it."""
    if request.config.run_id is None:
        return None
    metrics: dict[str, float] | None = world.consensus.broadcast("finished", partial(find_finished, request))
    return metrics


def _run(request: Request, world: World, may_double: bool | None, mirror: MirrorProcess | None) -> dict[str, float]:
    config, choices = request.config, request.command.choices
    world.consensus.load_kept()
    task, experiment, crashed = _agree_on_input(request, world)
    if experiment is not None and may_double is not None:
        experiment.warnings.extend(describe_choice(config.micro_batches, experiment))
    directory = RunDirectory(agree_on_directory(request, world), writes=world.rank == 0)
    directory.pruner, directory.mirror = request.pruner, mirror
    report_late = partial(report_failure, directory.path)
    world.shutdown.begin_run(directory.path / LOGS, report_late, watch_outcome(directory.path), bool(may_double))
    with locked(directory, request, world), logging_to(world.rank, directory.path) as console:
        record = RunRecord(
            directory.path,
            task=choices["task"],
            model=choices["model"],
            data=choices["data"],
            parallel=choices["parallel"],
            world_size=world.world_size,
            seed=config.seed,
            samples=count_samples(experiment),
            num_steps=count_steps(config.epochs, config.max_steps, experiment.train_loader.sampler.steps_per_epoch)
            if experiment is not None and task is not None and task.trains
            else None,
            monitor=asdict(experiment.monitor) if experiment is not None else None,
            directions=dict(experiment.directions) if experiment is not None else {},
            parent=config.fork,
        )
        directory.prepare(config, request.command, record)
        end, is_repeated = _End("finished"), False
        try:
            if not (directory.is_resumed or config.fork) or (task is not None and not task.trains):
                directory.commit()  # the task commits a resumed or forked run once it has loaded the checkpoint
            for line in _describe_code(request, directory):
                log.info("%s", line)
            if crashed or task is None:
                raise JobFailed(crashed)
            _form_group(world, experiment)
            if task.trains:
                begin(world)
            with interruptible():
                metrics = task.run(config, experiment, world, directory, console)
            world.shutdown.wait_for_all()  # returns immediately if the trainer has already waited
            directory.record.metrics = metrics
            if directory.stops_as:
                end.state = directory.stops_as
            return metrics
        except BaseException as error:
            end = _end_of(error, world)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            world.watchdog.stop()
            if experiment is not None:
                experiment.train_loader.close()
                experiment.val_loader.close()
            _agree_on_end(end, world)
            if may_double and experiment is not None and end.state == "failed":
                is_repeated = may_double_again(config.micro_batches, config.batch_size, experiment.axes, end.text)
            _record_end(end, config.micro_batches, world, directory, task, is_repeated)
        raise _outcome_of(end, directory.path, is_repeated)


def _form_group(world: World, experiment: Experiment | None) -> None:
    """Form the process group if the job needs one, and the memory of kept samples."""
    if world.world_size > 1 or (experiment is not None and experiment.parallel.needs_group):
        world.group.form(world.backend, world.device)
        world.watchdog.start()
    if experiment is not None:
        experiment.keep_samples()
    end_start()


def _describe_code(request: Request, directory: RunDirectory) -> list[str]:
    """Return the header lines about replaced options and, on the rank that writes, about custom code."""
    hidden = describe_hidden(request.command.config_dirs, request.command.choices)
    lines = [hidden] if hidden else []
    if (code := directory.record.code) and code["submitted"]:
        lines.append(f"code     as of {code['submitted']}, when the job was submitted")
    config = request.config
    earlier = config.run or (directory.path if directory.is_resumed else config.fork)
    if directory.writes and earlier and (line := describe_code(Path(earlier), uses_copy=request.code_of is not None)):
        lines.append(line)
    return lines


def _agree_on_input(request: Request, world: World) -> tuple[JobTask | None, Experiment | None, str]:
    """Return the task, its experiment, and the traceback of the first rank that crashed while it built them.

    Raises InputError on all ranks if any of them refuses the input.
    """
    task, experiment, crashed = None, None, list[str]()
    refused = check_equal(request.config, world)
    try:
        with interruptible():
            task, experiment = _build(request, world)
    except Stopped as error:
        world.shutdown.report_stop(str(error))
        raise
    except InputError as error:
        refused += error.messages
    except (Preempted, RanksMissing):  # raised for another rank
        raise
    except (Exception, SystemExit) as error:
        crashed = [_describe(error)]
    if world.rank == 0:
        config = request.config
        earlier = request.destination.directory or world.consensus.before_restart("directory") or config.fork
        refused += check_directory(earlier, experiment, config.resume_force)
    if refused := world.consensus.first_error("refused", refused):
        raise InputError(*refused)
    crashed = world.consensus.first_error("crashed", crashed)
    return task, experiment, crashed[0] if crashed else ""


def _build(request: Request, world: World) -> tuple[JobTask, Experiment | None]:
    config, choices = request.config, request.command.choices
    weights = initial_weights_path(config.init_from, config.task)
    init_from = find_initial_weights(weights, request.destination.directory, world)
    messages = choose_devices(world)
    set_threads(world, config.threads)
    reset_process(config.seed)
    separate_by_cpu()
    task: JobTask = make_task(config.task, JobTask)
    messages += check_fit(config, world.device.type)
    if config.compile:
        messages += check_compile_caches(config.compile)
    if messages := messages + check_size(config, choices, task, world.world_size):
        raise InputError(*messages)
    if not task.needs_experiment:
        return task, None
    if world.device.type == "cuda":
        choose_kernels(config.tf32, config.cudnn_benchmark)
    with returning_large_blocks():
        experiment = build(config, choices, world, init_from, task.trains)
    if task.needs_outputs and (option := experiment.parallel.splits_outputs):
        raise InputError(f"task={choices['task']} does not support {option}, which splits the outputs; set it to 1")
    return task, experiment


@dataclass
class _End:
    """The end of the job on one rank."""

    state: str = "failed"  # as in result.json
    text: str = ""  # the failure; from `_agree_on_end` on, that of the rank that failed first
    stopped: str | None = None  # why the job was stopped, for example by a signal
    follows: bool = False  # the failure of another rank may be the cause
    raised_at: str = ""  # where in the code this rank failed
    kind: str = ":"  # ends the first line of the report
    refused: list[str] = field(default_factory=list)  # the messages, if the input was wrong


def _end_of(error: BaseException, world: World) -> _End:
    """Return the end of a job that has raised `error`. It refers to no frame, and so to no model."""
    if isinstance(error, Regroup):
        return _End(REGROUPED)
    if isinstance(error, Stopped) and world.local_ranks.exited():
        # A launcher sends this signal after it has lost a rank; a rank that a user stopped has reported the stop.
        error = PeerMissing(f"ended by {error}")
    if isinstance(error, Stopped):
        world.shutdown.report_stop(str(error))
    if isinstance(error, (Preempted, Stopped)):
        return _End("preempted", stopped=str(error))
    if isinstance(error, JobFailed):
        return _End(text=str(error), follows=error.follows)
    if isinstance(error, KeyboardInterrupt):
        return _End(text="interrupted")
    if isinstance(error, InputError) and user_line(error) is None:  # such as a checkpoint with another hash
        return _End(text=str(error), refused=error.messages)
    kind = f" {RAN_OUT}" if is_out_of_memory(error) else ":"
    # A rank of another machine that is lost before the group is formed is only missing in the store.
    follows = is_peer_failure(error) or (isinstance(error, RanksMissing) and world.membership is not None)
    return _End("failed", _describe(error), None, follows, raised_at(error.__traceback__), kind)


def _outcome_of(end: _End, directory: Path, is_repeated: bool) -> Exception:
    """Return the exception by which this rank's job ends."""
    if end.state == REGROUPED:
        return Regroup()
    if end.stopped:
        return Preempted(end.stopped)
    if end.refused:
        return InputError(*end.refused)
    return TooLarge(end.text, directory=str(directory)) if is_repeated else JobFailed(end.text)


def _agree_on_end(end: _End, world: World) -> None:
    """Replace the failure of this rank by its cause: a signal to another rank, or the first failure of all ranks."""
    if end.follows and (reason := world.shutdown.stop_reason()):
        end.state, end.stopped = "preempted", reason
    elif end.state == "failed" and has_lost_ranks(end.follows, world):
        end.state, world.shutdown.failed = REGROUPED, True
    elif end.state == "failed":
        where = "" if end.refused else f"rank {world.rank} on {socket.gethostname()}{end.kind}\n"
        end.text = world.shutdown.report_failure(f"{where}{end.text}", end.follows, end.raised_at)


def _record_end(
    end: _End, micro_batches: int, world: World, directory: RunDirectory, task: JobTask | None, is_repeated: bool
) -> None:
    """Write the end to the log and to the run directory. is_repeated: the job is tried with more micro-batches."""
    is_reporter = world.shutdown.is_reporter
    if end.state == REGROUPED:
        if world.store.is_reachable():  # otherwise, others may continue in this directory
            directory.leave(end.text)
        return
    if end.stopped:
        log.warning("%s: %s", end.stopped, _stopped_where(directory, task))
    elif is_repeated and world.rank == 0:
        log.warning("micro_batches=auto: out of memory with %d, trying %d", micro_batches, 2 * micro_batches)
    elif end.state == "failed" and not is_repeated:
        if (is_reporter or world.rank > 0) and not end.refused:  # if rank 0 is late, another rank reports it
            log.error("%s", end.text.rstrip())
        if is_reporter and world.rank > 0:
            report_failure(directory.path, end.text)
    try:
        directory.end(end.state, None if end.stopped else end.text or None)
    except OSError as error:  # a full disk; the reason of a failed job has been reported already
        if end.state in DONE:
            text = f"{directory.path}: its result could not be written: {error.strerror or error}"
            log.error("%s", text)
            raise JobFailed(text) from None


def _stopped_where(directory: RunDirectory, task: JobTask | None) -> str:
    step = directory.record.step
    if task is None or not task.trains:
        return f"stopped; its directory is {directory.path}"
    where = f"saved after step {step}" if step else "stopped before the first step"
    return f"{where}; continue with resume={directory.path}"


def _describe(error: BaseException) -> str:
    """Return one line if the machine or one of its limits is the cause, and not custom code; else the traceback."""
    line = describe_system_error(error) if user_line(error) is None else None
    return line or _traceback(error)


def _traceback(error: BaseException) -> str:
    """Return the traceback with the notes at the top: tables of jobs show the last line, which names the error."""
    notes = [f"{note}\n" for note in error.__dict__.pop("__notes__", ())]
    return "".join([*notes, *traceback.format_exception(error)])
