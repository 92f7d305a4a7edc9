"""One sweep from its overrides to the table of its jobs."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from runner.config.compose import compose
from runner.config.pointers import named_directory, pull_named
from runner.config.resume import OVER, STOP_ON_FAILURE, Arguments
from runner.config.texts import typed_options
from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed, Preempted, print_messages, quantity
from runner.jobs.mirrored_directory import end_mirror
from runner.records.compared_runs import read_jobs
from runner.records.ledger import LEDGER, SweepRecord, is_sweep, read_ledger, unlock_sweep
from runner.records.monitor import main_metrics
from runner.records.report.render import closing
from runner.records.report.statistics import monitors_of
from runner.records.run_record import DONE, RunRecord
from runner.records.settings import OVERRIDES
from runner.records.tables import format_number, text_table
from runner.remote.address import local_outputs
from runner.sweeps.jobs import first_job
from runner.sweeps.queues import read_jobs_and_queues, submit
from runner.sweeps.sweep import Sweep

STOPPED = 143  # the status of the SystemExit by which a stopped job ends Hydra's loop over the jobs
MAX_METRICS = 3  # columns of the table


def run_sweep(
    arguments: Arguments, rank_info: RankInfo, command: Sequence[str], on_composed: Callable[[], object] = int
) -> tuple[str | None, int]:
    """Run a sweep. Return its directory (None if the jobs were only printed) and the exit status.

    command: the command to record. on_composed: called once all jobs are composed and checked.

    Raises InputError if the input is wrong, and Preempted if a signal stops the sweep.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    # Hydra itself would compose without the swept keys, and then reject keys that only a swept option defines.
    first = first_job(arguments.overrides, GlobalHydra.instance().config_loader())
    base = compose(first)
    launcher = str(base.hydra.runtime.choices["hydra/launcher"])
    if not rank_info.may_start_processes and launcher != "basic":
        raise InputError(
            f"hydra/launcher={launcher} starts jobs itself, but {rank_info.source} has started this process as rank "
            f"{rank_info.rank} of {rank_info.world_size}; use only one of the two"
        )
    pull_named(base)
    named = named_directory(base.run_id, base.name, str(local_outputs(base.outputs, base.remote.local_dir)))
    if named and (named / OVERRIDES).is_file():
        raise InputError(f"run_id={base.run_id} is a run; leave out -m to resume it, or type another run_id")
    record = SweepRecord(list(arguments.recorded), list(arguments.config_dirs), list(command), {})
    of_sweep = ["hydra.", "hydra/", "run_id=", f"{STOP_ON_FAILURE}="]
    if base.hydra.runtime.choices.task != "report":
        of_sweep.append(f"{OVER}=")  # of the table at the end
    swept_overrides = [text for text in arguments.overrides if not text.lstrip("+~").startswith(tuple(of_sweep))]
    backend = typed_options(OmegaConf.to_container(base.backend, resolve=True))
    over = list(map(str, base.report.over))
    directories = (arguments.directory, named)
    stops = bool(base.sweep.stop_on_failure)
    sweep = Sweep(rank_info, arguments, record, *directories, backend, swept_overrides, over, stops, on_composed)
    try:
        with _released(sweep):
            hydra.multirun("config", sweep, first, with_log_configuration=False)
            return None if sweep.dry_run else sweep.directory, _finish(sweep)
    except SystemExit as error:
        if error.code != STOPPED:
            raise
        raise Preempted(f"{sweep.directory} was stopped", str(sweep.directory)) from None
    except Exception as error:
        # Hydra 1.3 names the node that it cannot instantiate in its own exception, Hydra 1.4 in a note of the cause.
        key = "\n".join([str(error), *getattr(error, "__notes__", ())]).rpartition("full_key: ")[2].strip()
        if key not in ("hydra.sweeper", "hydra.launcher"):
            raise
        raise InputError(f"{key}: {error.__cause__ or error}".splitlines()[0]) from None


@contextmanager
def _released(sweep: Sweep) -> Iterator[None]:
    """Release the sweep's directory at the end of the context, after its ledger is uploaded if it has an address.

    Remove the directory, also at the address, if this command has created it and was refused before the first job.
    """
    is_successful = is_discarded = False
    try:
        yield
        is_successful = True
    except InputError:
        path = Path(str(sweep.directory))
        is_discarded = sweep.is_created and not (is_sweep(path) and any(job.num_starts for job in read_ledger(path)))
        raise
    finally:
        if sweep.directory is not None:
            path = Path(sweep.directory)
            unlock_sweep(path)
            end_mirror(path, is_successful, is_discarded)
            if is_discarded:
                shutil.rmtree(path)


def _finish(sweep: Sweep) -> int:
    """Submit the queued jobs, or else print the table of the jobs. Return the exit status."""
    if lost := sweep.broadcast("lost", lambda: _describe_lost(sweep)):
        if sweep.rank_info.rank == 0:
            print_messages([lost])
        return 1
    try:
        is_waiting = submit(sweep.queued, Path(str(sweep.directory)), sweep.write_state)
    except JobFailed as error:
        return error.status
    if sweep.dry_run:
        return 0
    if is_waiting:
        print(f"\n`python -m runner task=report run={sweep.directory}` shows the state of the jobs", flush=True)
        return 0
    is_incomplete = sweep.broadcast("summary", lambda: print_summary(Path(str(sweep.directory)), sweep.over))
    if sweep.rank_info.world_size > 1:
        sweep.join().shutdown.close()
    return 1 if is_incomplete else 0


def _describe_lost(sweep: Sweep) -> str:
    """Return a message if the ledger lacks jobs of the sweep; empty otherwise."""
    if sweep.dry_run:
        return ""
    path = Path(str(sweep.directory))
    recorded = {job.number for job in read_ledger(path)}
    lost = [job.label for job in sweep.jobs if job.number not in recorded]
    return f"{path / LEDGER} has lost {quantity(len(lost), 'job')} of the sweep, such as {lost[0]}" if lost else ""


def print_summary(directory: Path, over: Sequence[str] = ("seed",)) -> bool:
    """Print the outcome of the jobs, with means over these keys. Return True if any is not done."""
    jobs = read_jobs(directory, "run", read_jobs_and_queues)
    known = {name for job in jobs for name in job.measured}
    print(f"\n{job_table(jobs, main_metrics(monitors_of(jobs), known)[:MAX_METRICS])}\n", flush=True)
    if report := closing(jobs, over):
        print(f"{report}\n", flush=True)
    for job in jobs:
        if job.state == "failed":
            print(f"{job.label} failed: {job.directory / 'log.txt'}", flush=True)
    done = [job for job in jobs if job.state in DONE]
    counts = Counter(job.state for job in done)
    outcome = " or ".join(["finished", *(f"{state} ({counts[state]})" for state in DONE[1:] if counts[state])])
    print(f"{len(done)} of {len(jobs)} jobs {outcome}: {directory}", flush=True)
    return len(done) < len(jobs)


def job_table(jobs: Sequence[RunRecord], metrics: Sequence[str] = ()) -> str:
    """Return a table with a row per job: its state, its values of `metrics`, and one line of its error."""
    cells = [["job", "state", *metrics, "why"]]
    for job in jobs:
        error = (job.error or "").strip().splitlines() or [""]
        values = [format_number(job.measured[key]) if key in job.measured else "" for key in metrics]
        cells.append([job.label, job.state, *values, error[-1 if job.state == "failed" else 0]])
    return text_table(cells)
