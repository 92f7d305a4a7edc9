"""The ledger of a sweep: its jobs and what became of each, readable whenever the sweep was killed.

`ledger.jsonl` in the sweep's directory holds one JSON object per line and is only ever appended to; a line that a crash
cut short is passed over. Later lines add to earlier ones:

    {"sweep": {"typed": ["optimizer.lr=0.1,0.01"], "config_dirs": [], "command": [...], "shared": {"epochs": 10, ...}}}
    {"number": 0, "label": "0-lr-0.1", "overrides": ["optimizer.lr=0.1"]}
    {"number": 0, "state": "running", "at": 1795212345.1}
    {"number": 0, "state": "finished", "at": 1795212351.7, "metrics": {"val/loss": 0.1}, "error": null}

A job's state is waiting, running, finished, failed, refused (its values do not fit together; nothing was written),
preempted, pruned, or queued: handed to a queue, where `queued_as` is its name, and what its run writes tells what
became of it. Times are seconds since 1970. A job that waits has no state line. A `running` line may name the device
`slots` that the job has, and a job's first line the `trial` of the study that asked for it.
"""

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.runs.run_directory import RESULT, read_result
from runner.runs.shapes import read_lines
from runner.runs.strict_json import dumps, numbers

LEDGER, LOCK = "ledger.jsonl", "sweep.lock"
DONE = ("finished", "pruned")

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_held: dict[Path, int] = {}  # the open lock of each sweep that this process runs


@dataclass
class JobRecord:
    """One job of a sweep."""

    number: int
    label: str
    overrides: list[str]  # the words that make it, of all that was typed
    directory: Path  # made when it is run for the first time
    trial: int | None = None
    state: str = "waiting"
    num_starts: int = 0
    start: float | None = None  # the latest, in seconds since 1970
    end: float | None = None  # none where the ledger does not know of it
    slots: list[int] = field(default_factory=list)
    queued_as: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass
class SweepRecord:
    """What the jobs of a sweep have in common."""

    typed: list[str]
    config_dirs: list[str]
    command: list[str]
    shared: dict[str, Any]  # dotted keys of the configuration that have one value in all jobs


def is_sweep(directory: Path) -> bool:
    return (directory / LEDGER).is_file()


def read_ledger(directory: Path) -> list[JobRecord]:
    """The jobs by number. Raises OSError where there is no ledger, and InputError where it is none of ours.

    A run's own result.json has the last word on whether it finished: a kill may have come before the ledger's line,
    or the job was resumed alone.
    """
    jobs: dict[int, JobRecord] = {}
    for line in _lines(directory):
        if "label" in line:
            where = directory / line["label"]
            jobs[line["number"]] = JobRecord(line["number"], line["label"], line["overrides"], where, line.get("trial"))
        elif "state" in line and line["number"] in jobs:
            _add(jobs[line["number"]], line)
    for job in jobs.values():
        if job.state not in DONE and job.num_starts and (result := read_result(job.directory)):
            if result["state"] in DONE:
                job.state, job.metrics, job.error, job.end = result["state"], result["metrics"], None, None
            elif job.state == "queued":
                if (job.directory / RESULT).stat().st_mtime >= (job.start or 0):  # and not what was before it
                    job.state, job.error = result["state"], result["error"]
            elif job.error is None:
                job.error = result["error"]
    return sorted(jobs.values(), key=lambda job: job.number)


def read_sweep(directory: Path) -> SweepRecord:
    """What was typed for the sweep as a whole. Raises OSError or InputError where there is no such record."""
    found = [line["sweep"] for line in _lines(directory) if "sweep" in line]
    if not found:
        raise InputError(f"{directory / LEDGER} names no sweep; put it back, or start a new one")
    return SweepRecord(**found[-1])


def write_lines(directory: Path, *lines: dict[str, Any]) -> None:
    """Append lines, all of them or, when the machine dies meanwhile, the first of them."""
    text = "".join(dumps(line) + "\n" for line in lines)
    if not text:
        return
    # One write to a file opened for appending: jobs in several processes do not tear each other's lines.
    file = os.open(directory / LEDGER, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * torn + text).encode())
        os.fsync(file)
    finally:
        os.close(file)


def write_state(directory: Path, number: int, state: str, **facts: Any) -> None:
    """Record what a job has come to."""
    write_lines(directory, {"number": number, "state": state, "at": round(time.time(), 3), **facts})


def hold(directory: Path) -> None:
    """Make this process the one that runs the sweep, until it lets go or ends; a holder that died is replaced.

    Raises InputError that names the holder where another process is one.
    """
    # Open until then: closing any descriptor of the file would give the lock up.
    file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by data loaders that outlive a kill
    except (BlockingIOError, PermissionError):
        holder = os.read(file, 200).decode().strip() or "another process"
        os.close(file)
        raise InputError(f"resume={directory}: {holder} runs this sweep; wait for it, or end it first") from None
    except OSError:
        pass  # a file system without locks: there one has to take care oneself
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held[directory] = file


def let_go(directory: Path) -> None:
    """Let another process run the sweep, where this one holds it."""
    if directory in _held:
        os.close(_held.pop(directory))


def _lines(directory: Path) -> Iterator[dict[str, Any]]:
    """Raises InputError for a line that is not as `write_lines` writes them; one that was cut short is passed over."""
    for line in read_lines(directory / LEDGER):
        if isinstance(record := line.get("sweep"), dict) and "config_dir" in record:  # an older version took one folder
            folder = record.pop("config_dir")
            record["config_dirs"] = [folder] if folder else []
        if wrong := _wrong(line):
            raise InputError(
                f"{directory / LEDGER}: {json.dumps(line)[:60]} has a wrong {wrong}, and is not what a sweep records; "
                "remove the line"
            )
        yield line


def _wrong(line: dict[str, Any]) -> str | None:
    """Which part of the line is not of its kind."""
    if "sweep" in line:
        record = line["sweep"]
        whole = isinstance(record, dict) and record.keys() == {field.name for field in fields(SweepRecord)}
        lists = whole and all(_are_words(record[name]) for name in ("typed", "config_dirs", "command"))
        return None if lists and isinstance(record["shared"], dict) else "sweep"
    if not isinstance(line.get("number"), int):
        return "number" if "label" in line or "state" in line else None
    if "label" in line:
        if not (isinstance(line["label"], str) and _LABEL.fullmatch(line["label"])):
            return "label"  # which is joined to a path
        return None if _are_words(line.get("overrides")) else "overrides"
    if "state" in line:
        if not isinstance(line["state"], str) or not isinstance(line.get("at"), (int, float)):
            return "state"
        return None if isinstance(line.get("metrics") or {}, dict) else "metrics"
    return None


def _are_words(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(word, str) for word in found)


def _add(job: JobRecord, line: dict[str, Any]) -> None:
    job.state = line["state"]
    if job.state in ("running", "queued"):
        job.num_starts += 1
        job.queued_as = line.get("queued_as")
        job.start, job.end, job.slots, job.error = line["at"], None, line.get("slots", []), None
    else:
        job.end, job.metrics, job.error = line["at"], numbers(line.get("metrics")), line.get("error")
