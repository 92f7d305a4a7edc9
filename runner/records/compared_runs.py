"""The runs of a sweep, or single runs, as reports and dashboards compare them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.errors import InputError
from runner.records.finding import check_is_record
from runner.records.ledger import JobRecord, is_sweep, read_ledger, read_sweep
from runner.records.run_files import read_metrics
from runner.records.run_record import RESULT, RunRecord, current_state, read_run
from runner.records.settings import by_key

DAMAGED = "damaged"  # the state of a run whose files cannot be read
# Exceptions that values of unexpected types in the files of a run may raise.
UNREADABLE = (AttributeError, KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError)
# Keys that only determine where a job ran or where it was stored.
LOCATION_KEYS = ("name", "outputs", "run", "run_id", "resume", "hydra", "task", "threads", "logger")


@dataclass(frozen=True)
class Trial:
    """The overrides that distinguish a job from the others of its sweep, or a single run from one without overrides."""

    overrides: dict[str, str]  # by key
    varied: dict[str, list[str]]  # the values of each key in the sweep; empty for a single run
    metrics: tuple[str, ...] = ()  # the metrics of its evaluations, the monitored one first


def current_run(directory: Path, job: JobRecord | None = None) -> RunRecord:
    """Return a run with its current state. Raise InputError if its result.json is damaged.

    job: its record in the ledger of a sweep, whose state and error take precedence.
    """
    run = job.run if job and job.run else read_run(directory)
    if job is None:
        run.state = current_state(directory, run.state)
    else:
        run.state, run.error, run.planned = job.state, job.error or run.error, tuple(job.overrides)
    return run


def read_jobs(
    path: Path, key: str, read_sweep_jobs: Callable[[Path], list[JobRecord]] = read_ledger, value: str = "best"
) -> list[RunRecord]:
    """Return the runs of the sweep, or the single run, in the directory `path`, which the option `key` names.

    value: the evaluation, best or last, whose metrics the runs have. A run whose files are damaged has the state
    damaged, and an error that names the file. Raises InputError for a directory without a sweep or run.
    """
    check_is_record(path, key)
    runs = []
    for job in read_sweep_jobs(path) if is_sweep(path) else [None]:
        directory = job.directory if job else path
        try:
            last = current_run(directory, job)
            best = _at_best(last)  # also if the last one is wanted: reads the file
            run = best if value == "best" else last
            _ = run.settings, run.overrides  # reads the files
            runs.append(run)
        except UNREADABLE as error:
            message = str(error) if isinstance(error, InputError) else f"{directory / RESULT} is damaged ({error})"
            planned = tuple(job.overrides) if job else ()
            runs.append(RunRecord(directory, DAMAGED, error=message, planned=planned, is_recorded=False))
    return runs


def _at_best(run: RunRecord) -> RunRecord:
    """Return the run with the metrics of its best evaluation in place of those of the last one."""
    monitor = run.measured_monitor
    if monitor is None or not monitor.name.startswith("val/"):
        return run
    lines = {int(line["step"]): line for line in read_metrics(run.directory) if monitor.name in line}
    best = monitor.best({step: line[monitor.name] for step, line in lines.items()})
    found = lines[best[0]].items() if best else ()
    return replace(run, metrics=run.metrics | {name: value for name, value in found if name.startswith("val/")})


def varied_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys whose values differ between the runs, in the order of the overrides."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides_by_key if _is_experimental(key))
    varied = [key for key in keys if len({run.value(key) for run in runs}) > 1]
    varies_launcher = any(key.startswith("launcher.") for key in varied)
    has_world_sizes = len({run.world_size for run in finished_runs(runs)}) > 1
    return [*varied, "world_size"] if has_world_sizes and not varies_launcher else varied


def finished_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    return [run for run in runs if run.state == "finished"]


def read_trial(directory: Path) -> Trial:
    """Return the trial of a single run, or of a job in its sweep's directory."""
    if not is_sweep(directory.parent):
        overrides = RunRecord(directory).overrides_by_key
        return Trial({key: value for key, value in overrides.items() if _is_experimental(key)}, {})
    jobs = {job.directory: by_key(job.overrides) for job in read_ledger(directory.parent)}
    overrides, values = jobs.get(directory, {}), defaultdict(set)
    for others in jobs.values():
        for key in overrides:
            values[key].add(others.get(key, ""))
    requested = by_key(read_sweep(directory.parent).typed)
    # The seed is always included, because a sweep is most often extended by seeds. So is a key that has several values
    # in the command, because the first trial of a study is the only job so far.
    varied = {
        key: sorted(found)
        for key, found in values.items()
        if len(found) > 1 or key == "seed" or requested.get(key, overrides[key]) != overrides[key]
    }
    return Trial({key: overrides[key] for key in varied}, varied)


def _is_experimental(key: str) -> bool:
    return key.split(".")[0] not in LOCATION_KEYS
