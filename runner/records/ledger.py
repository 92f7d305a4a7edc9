"""The ledger of a sweep: its jobs and their outcomes, readable even if the sweep was killed.

`ledger.jsonl` in the sweep's directory has one JSON object per line (docs/sweeps.md) and is only appended to; a line
that a crash has truncated is skipped. A job's state is that of its last line with a state; a waiting job has none. The
state is `refused` if the configuration is invalid. The outcome of a queued job is in the files of its run.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.records.run_files import append_json_lines, check_links, parse_metrics, read_json_lines
from runner.records.run_lock import RunLock, find_owner, lock_directory
from runner.records.run_record import DONE, LOST, PAUSED, RESULT, RUNNING, RunRecord, current_state, find_run

LEDGER = "ledger.jsonl"
REMOVED = "removed"
FAILED = ("failed", "refused")
WAITING = "waiting"
STOPPING = "stopping"  # a line with this state is a request and does not change the state of the job

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_locks: dict[Path, RunLock] = {}  # of the sweeps of this process


@dataclass
class JobRecord:
    """One job of a sweep."""

    number: int
    label: str
    overrides: list[str]  # of this job: one value for each key
    directory: Path  # created when the job starts for the first time
    trial: int | None = None
    rung: int = 0  # at which the trial pauses next, or has paused, with hydra/sweeper/pruner=asha
    state: str = WAITING
    num_starts: int = 0
    start: float | None = None  # of the last start, in seconds since 1970
    end: float | None = None  # None if the ledger does not have it
    slots: list[int] = field(default_factory=list)
    queued_as: str | None = None
    queue: str = ""  # the launcher's `_target_`
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    stop_requested: bool = False  # `runs stop` stopped the last start of this job, or its next one, but not its sweep
    is_due: bool = True  # it is not done, and has not started since its sweep was last started or resumed
    run: RunRecord | None = None  # None if it has no valid result.json

    def line(self) -> dict[str, Any]:
        """Return the line that adds the job to the ledger."""
        line = {"number": self.number, "label": self.label, "overrides": self.overrides}
        return line if self.trial is None else line | {"trial": self.trial}


@dataclass
class SweepRecord:
    """The properties that the jobs of a sweep have in common. The fields are the keys in the ledger."""

    typed: list[str]  # the overrides of the command, with several values for some keys
    config_dirs: list[str]
    command: list[str]
    shared: dict[str, Any]  # configuration values that are equal in all jobs, by dotted key


def job_of(line: Mapping[str, Any], sweep: Path) -> JobRecord:
    """Return the job that `line` adds to the ledger of the sweep in this directory."""
    return JobRecord(line["number"], line["label"], line["overrides"], sweep / line["label"], line.get("trial"))


def is_sweep(directory: Path) -> bool:
    return (directory / LEDGER).is_file()


def read_ledger(directory: Path) -> list[JobRecord]:
    """Return the jobs, sorted by number. Raises OSError if the ledger is missing and InputError if it is damaged.

    A run's result.json takes precedence if the ledger or result.json has the state finished or pruned: the sweep may
    have been killed before it wrote the line in the ledger, or the job was resumed as a single run. It also does if the
    ledger has the state paused, but not if only result.json has it, which may describe the previous rung. A finished,
    pruned or paused job without result.json is removed. A running job is lost if the owner of its directory's lock is
    dead, or, before it locks its directory, if the process of the sweep is dead.
    """
    sweep_owner = find_owner(directory)  # first, so that a job that ends meanwhile is not lost
    jobs = _read_jobs(directory)
    for job in jobs.values():
        if job.num_starts:
            _add_result(job)
        if job.state == RUNNING:
            # The sweep's process starts the job, which locks its own directory after it has loaded its data.
            owner = find_owner(job.directory) or sweep_owner
            state = RUNNING if owner and owner.is_alive else current_state(job.directory, RUNNING)
            job.state = LOST if state == PAUSED else state
        job.is_due = job.is_due and job.state not in DONE
    return sorted(jobs.values(), key=lambda job: job.number)


def is_stop_requested(directory: Path, number: int) -> bool:
    """Return `stop_requested` of a job, without reading the results of all jobs."""
    job = _read_jobs(directory).get(number)
    return job is not None and job.stop_requested


def read_sweep(directory: Path) -> SweepRecord:
    """Return the record of the sweep as a whole. Raises OSError or InputError if it is missing."""
    found = [line["sweep"] for line in _read_lines(directory) if "sweep" in line]
    if not found:
        raise InputError(f"{directory / LEDGER} has no line for the sweep; restore the file, or start a new sweep")
    return SweepRecord(**found[-1])


def write_lines(directory: Path, *lines: dict[str, Any]) -> None:
    """Append lines. If the machine crashes meanwhile, possibly only some of them are written."""
    if lines:
        append_json_lines(directory / LEDGER, *lines)


def write_state(directory: Path, number: int, state: str, **facts: Any) -> None:
    write_lines(directory, {"number": number, "state": state, "at": round(time.time(), 3), **facts})


def promotion(number: int, rung: int) -> dict[str, Any]:
    """Return the line by which a paused job waits again, to train until it pauses at this rung."""
    return {"number": number, "state": WAITING, "at": round(time.time(), 3), "rung": rung}


def lock_sweep(directory: Path) -> None:
    """Lock the sweep until `unlock_sweep` or the end of the process. Raises InputError if another one has locked it."""
    check_links(directory)
    _locks[directory] = lock_directory(directory)


def unlock_sweep(directory: Path) -> None:
    """Release the lock, if this process owns it."""
    if directory in _locks:
        _locks.pop(directory).release()


def _read_lines(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines. Raises InputError for a line that `write_lines` cannot have written."""
    for line in read_json_lines(directory / LEDGER):
        if not _is_valid(line):
            raise InputError(f"{directory / LEDGER}: {json.dumps(line)[:60]} is damaged; remove the line")
        yield line


def _read_jobs(directory: Path) -> dict[int, JobRecord]:
    """Return the jobs by number, as the ledger describes them."""
    jobs: dict[int, JobRecord] = {}
    for line in _read_lines(directory):
        if "label" in line:
            jobs[line["number"]] = job_of(line, directory)
        elif "state" in line and line["number"] in jobs:
            _update(jobs[line["number"]], line)
        elif "sweep" in line:  # the sweep is resumed
            for job in jobs.values():
                job.stop_requested, job.is_due = False, True
    return jobs


def _is_valid(line: dict[str, Any]) -> bool:
    """Return True if the values have the right types. A label becomes part of a path."""
    match line:
        case {"sweep": {"typed": list(a), "config_dirs": list(b), "command": list(c), "shared": dict(), **others}}:
            return not others and all(isinstance(item, str) for item in [*a, *b, *c])
        case {"number": int(), "label": str(label), "overrides": list(overrides)}:
            return bool(_LABEL.fullmatch(label)) and all(isinstance(item, str) for item in overrides)
        case {"number": int(), "state": str(), "at": int() | float()}:
            texts = all(isinstance(line.get(key) or "", str) for key in ("error", "queued_as", "queue"))
            values = (line.get("metrics") or {}, line.get("slots", []), line.get("rung", 0))
            return texts and all(map(isinstance, values, (dict, list, int)))
    return not line.keys() & {"sweep", "label", "state"}


def _add_result(job: JobRecord) -> None:
    """Update a job that has started from the record of its run."""
    run = find_run(job.directory)
    job.run = run if run.is_recorded else None
    if job.run is None:
        if job.state in DONE and not (job.directory / RESULT).exists():
            again = "; -m resume= runs it again" if job.trial is None else ""  # a study keeps a trial's outcome
            job.state, job.metrics, job.error = REMOVED, {}, f"its directory was removed{again}"
    elif job.state in DONE or (run.state in DONE and run.state != PAUSED):
        job.end = job.end if job.state == run.state else None
        job.state, job.metrics, job.error = run.state, run.metrics, run.error
    elif job.state == "queued":
        if (job.directory / RESULT).stat().st_mtime >= (job.start or 0):  # not from an earlier start
            job.state, job.error = run.state, run.error
    elif job.error is None:
        job.error = run.error


def _update(job: JobRecord, line: dict[str, Any]) -> None:
    if line["state"] == STOPPING:
        job.stop_requested = True
        return
    job.state, job.rung = line["state"], line.get("rung", job.rung)
    job.is_due = job.state == WAITING  # it was promoted
    if job.state in ("running", "queued"):
        job.num_starts, job.stop_requested = job.num_starts + 1, False
        job.queued_as, job.queue = line.get("queued_as"), line.get("queue", "")
        job.start, job.end, job.slots, job.error = line["at"], None, line.get("slots", []), None
    else:
        job.end, job.metrics, job.error = line["at"], parse_metrics(line.get("metrics")), line.get("error")
