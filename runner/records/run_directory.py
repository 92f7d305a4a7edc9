"""The run directory: its creation, and the files that record what ran and how it ended."""

import errno
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from runner.errors import InputError, JobFailed
from runner.records import provenance
from runner.records.attempts import REGROUPED, Attempt, append_attempt, error_line, seconds_of, utc_now
from runner.records.code_copy import original_path, running_copy, time_of
from runner.records.custom_code import CustomCode, imported_code
from runner.records.interruptions import record_interruption
from runner.records.monitor import LOSS
from runner.records.run_files import (
    METRICS,
    dumps,
    read_bytes,
    read_metrics,
    without_links,
    write_atomically,
)
from runner.records.run_lock import RunLock, lock_directory
from runner.records.run_record import DONE, RESULT, RUNNING, RunRecord, find_run
from runner.records.settings import CONFIG, OVERRIDES
from runner.records.start_time import STAMP, started_at
from runner.remote.mirror_process import MirrorProcess

CHECKPOINTS = "checkpoints"
CHOICE = "auto.json"  # the mode that parallel=auto has chosen, and the speed of the modes that were measured
MIN_BYTES, MIN_FILES = 2**16, 8  # free space and files that a run needs when it starts


@dataclass(frozen=True)
class Command:
    """What was typed for a run, which its directory records besides the configuration."""

    overrides: tuple[str, ...] = ()  # without run= and resume=
    config_dirs: tuple[str, ...] = ()  # custom directories; a later one takes precedence
    words: tuple[str, ...] = ()  # of the process
    choices: Mapping[str, str] = field(default_factory=dict)  # the chosen option of each group


@dataclass(frozen=True)
class Destination:
    """Where a run writes."""

    directory: str | None = None  # of a sweep's job or of a resumed run; None creates a new one
    file: str | None = None  # to which the path of the run directory is written, for other processes

    def find(self) -> str | None:
        """Return the path of the run directory if it is known on this machine."""
        file = Path(self.file) if self.file else None
        return file.read_text() if file and file.exists() else self.directory


class Pruner(Protocol):
    """Ends a trial of a study before its last step."""

    pause_at: int | None  # the trial pauses at its first evaluation at or after this step; None: it is pruned

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Return True if the trial ends at this evaluation. Only rank 0 calls it."""


class RunDirectory:
    """The files of one run. Only rank 0 writes; the other ranks have an instance with `writes=False`.

    Call `prepare`, then `commit`, then `end`. A resumed run is committed after its checkpoint was loaded, so that the
    record of the previous attempt remains until training is about to start. A new run is committed immediately.
    """

    def __init__(self, path: Path, writes: bool = True):
        self.path, self.writes = path, writes
        self.record = RunRecord(path)
        self.attempt = Attempt(0)
        self.pruner: Pruner | None = None
        self.mirror: MirrorProcess | None = None  # on one rank of each machine, if outputs= is an address
        self.is_shared = True  # all ranks see the same files
        self.complete: Callable[[Path], None] = _is_complete  # download the files of a checkpoint from other machines
        self.stops_as: str | None = None  # the state in which a callback ended the run before its last step
        self.regrouped_because = ""  # why this world of ranks continues from another one
        self.copied_at: float | None = None  # by time.monotonic(), if it continues from a copy in memory
        self._lock: RunLock | None = None
        self._start = time.monotonic()
        self._code: CustomCode | None = None
        self._texts: dict[str, str | None] = {}  # by file name; None removes the file
        self._replaced: dict[str, str | None] | None = None  # the previous texts; None until `commit`

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def is_resumed(self) -> bool:
        """True if a previous attempt has left a record and a checkpoint."""
        return (self.path / OVERRIDES).exists() and any(self.checkpoints.glob("step_*[0-9]"))

    @property
    def is_committed(self) -> bool:
        return self._replaced is not None

    @functools.cached_property
    def _earlier_s(self) -> float:
        """The seconds of the run before this attempt."""
        return seconds_of(self.path, self.attempt)

    def elapsed_s(self) -> float:
        """Return the seconds of all attempts, this one included."""
        return self._earlier_s + time.monotonic() - self._start

    def continue_after(self, step: int, kept_s: float) -> None:
        """Record the interruption, if there was one, when training continues after `step`.

        kept_s: the value of `elapsed_s` after that step, as far as it is known from metrics.jsonl.
        """
        if self.writes:
            elapsed_s = self.elapsed_s()
            if self.copied_at is not None:
                kept_s = elapsed_s - (time.monotonic() - self.copied_at)
            record_interruption(self.path, self.attempt.number, step, elapsed_s, kept_s, self.regrouped_because)

    def lock(self, previous: int | None = None, **fields: Any) -> None:
        """Lock the directory for this world. Arguments and errors are those of `lock_directory`."""
        self._lock = lock_directory(self.path, previous, continues=previous is not None, **fields)
        self.attempt, self._start = self._lock.attempt, time.monotonic()

    def describe_lock(self) -> list[str]:
        """Return the name and the content of the lock file, on the rank that has locked the directory."""
        assert self._lock is not None
        return [self._lock.path.name, self._lock.path.read_text()]

    def is_locked_as(self, name: str, content: str) -> bool:
        """Return True if this machine sees the lock file that another rank has described."""
        try:
            return (self.path / name).read_text() == content
        except OSError:
            return False

    def check_lock(self) -> None:
        """Raise JobFailed if another world has taken over the directory, so that this world must not write to it."""
        if self._is_lost():
            raise JobFailed(f"{self.path} has been taken over by another process, or its lock file has been removed")

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def prepare(self, config: Any, command: Command, record: RunRecord) -> None:
        """Collect the content of the files without writing it.

        config: a dataclass. record: what the job knows of the run; this function adds where and from what it started.
        """
        self.record = record
        if not self.writes:
            return
        previous = started_at(self.path) if (self.path / RESULT).exists() else None
        record.started = datetime.fromtimestamp(previous or time.time(), UTC).isoformat(timespec="milliseconds")
        record.command, record.hosts = list(command.words), self.attempt.hosts
        record.git, record.versions = provenance.git_state(), provenance.versions()
        record.machine = provenance.machine()
        values, directories = asdict(config), [original_path(directory) for directory in command.config_dirs]
        self._code = imported_code(values)
        self.attempt.code = self._code.hash
        repositories = provenance.custom_repositories([*directories, *self._code.directories])
        submitted = time_of(copy[0]) if (copy := running_copy()) else None
        code = {**self._code.record, "repositories": repositories, "submitted": submitted}
        record.code = code if any(code.values()) else None
        self._texts = {
            **provenance.uncommitted_changes(record.git, repositories),
            CONFIG: yaml.safe_dump(values, sort_keys=False),
            OVERRIDES: yaml.safe_dump([*(f"--config-dir={path}" for path in directories), *command.overrides]),
        }

    def commit(self, first_step: int = 0) -> None:
        """Write the prepared files, with the state running, over the previous record. Later calls do nothing."""
        if self.is_committed:
            return
        self._replaced = {}
        self.record.step = self.attempt.first_step = first_step
        if not self.writes:
            return
        if self._code is not None:
            self._code.write(self.path)
        if self.is_resumed:
            self._replaced = {name: _read_text(self.path / name) for name in (*self._texts, RESULT)}
        for name, text in self._texts.items():
            _write_text(self.path / name, text)
        self.save_record()

    def end(self, state: str, error: str | None = None) -> None:
        """Record the state in which the attempt ended, and the error if it failed.

        If a resumed run fails or is stopped before its first step, the record of the previous attempt is restored, so
        that a finished run stays finished. If the previous attempt was killed and its record still has the state
        running, that state is replaced by the state of this attempt.
        """
        if not self.is_committed and state in DONE:
            self.commit()
        self.record.state, self.record.error = state, error
        if not self.writes or self._is_lost():
            return
        self.attempt.ended, self.attempt.state = utc_now(), state
        self.attempt.error = error_line(error or "")
        has_trained = self.is_committed and self.record.step != self.attempt.first_step
        try:
            if state in ("failed", "preempted") and not has_trained and self._replaced:
                for name, text in self._replaced.items():
                    _write_text(self.path / name, text)
                self._replaced, self.attempt.first_step = None, None
            if self.is_committed:
                self.attempt.step = self.record.step
                try:
                    self.save_record()
                except OSError:
                    self.release()  # on a full disk, result.json gets the space of the lock file
                    self.save_record()
            elif not (before := find_run(self.path)).is_recorded or before.state == RUNNING:
                before.state, before.error = state, error
                before.save()
        finally:  # a full disk may still have space for a line
            append_attempt(self.path, self.attempt)

    def leave(self, error: str) -> None:
        """Record the end of an attempt after which the same processes continue the run in another world."""
        if self.writes and self.is_committed and not self._is_lost():
            self.attempt.ended, self.attempt.state = utc_now(), REGROUPED
            self.attempt.step, self.attempt.error = self.record.step, error_line(error)
            append_attempt(self.path, self.attempt)

    def save_record(self) -> None:
        """Write result.json atomically."""
        self.record.seconds = round(time.monotonic() - self._start, 3)
        if self.mirror is not None:
            self.record.upload_retries = self.mirror.num_retries
        if self.writes:
            self.record.save()

    def log_metrics(
        self, step: int, epoch: int, metrics: dict[str, float], lists: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Append a line to metrics.jsonl.

        Raises JobFailed if it cannot be written, if the lock is lost, or if the directory cannot be mirrored any more.

        lists: values that are no metrics; empty lists are left out.
        """
        self.check_lock()
        if not self.writes:
            return
        if self.mirror is not None:
            self.mirror.check()
        others = {name: list(values) for name, values in (lists or {}).items() if values}
        path, line = self.path / METRICS, dumps({"step": step, "epoch": epoch, **metrics, **others})
        try:
            with open(path, "a", opener=without_links) as file:
                file.write(line + "\n")
        except OSError as error:
            raise JobFailed(
                f"{path} could not be written: {error.strerror or error}\n"
                "the checkpoints are intact; fix the problem, or free disk space, and resume"
            ) from None

    def drop_metrics_after(self, step: int, num_lines: int | None = None) -> None:
        """Remove damaged lines from metrics.jsonl, and those that will be repeated.

        These are the lines of later steps, and those of `step` after its first `num_lines`.
        """
        path = self.path / METRICS
        if self.writes and path.exists():
            with open(path, errors="surrogateescape", opener=without_links) as file:
                text = file.read()
            lines = text.splitlines(keepends=True)
            of_step = [number for number, line in enumerate(lines) if _step_of(line) == step]
            dropped = {*of_step[num_lines:]} if num_lines is not None else set()
            kept = "".join(line for n, line in enumerate(lines) if _step_of(line) <= step and n not in dropped)
            if kept != text:
                write_atomically(path, kept)
                if self._replaced:
                    self._replaced[METRICS] = text

    def evaluations(self, monitor: str) -> dict[int, float]:
        """Return the value of `monitor` by step for each logged evaluation, NaN if it was not measured."""
        # Each evaluation logs the loss; a callback may log other val/... names.
        lines = [line for line in read_metrics(self.path) if LOSS in line or monitor in line]
        return {line["step"]: float(line.get(monitor, math.nan)) for line in lines}

    def _is_lost(self) -> bool:
        return self._lock is not None and self._lock.is_lost()


def new_directory(outputs: str, name: str, prefix: str = "") -> Path:
    """Create outputs/name/<prefix><stamp>, with a number if that exists. Raise OSError if the disk is almost full."""
    parent = Path(outputs).absolute() / name
    parent.mkdir(parents=True, exist_ok=True)
    stamp = prefix + time.strftime(STAMP)
    for number in itertools.count():
        path = parent / (f"{stamp}-{number}" if number else stamp)
        with suppress(FileExistsError):
            path.mkdir()
            break
    disk = os.statvfs(path)  # a file system may report 0 blocks or files in total if it does not count them
    if (disk.f_blocks and disk.f_bavail * disk.f_frsize < MIN_BYTES) or (disk.f_files and disk.f_favail < MIN_FILES):
        path.rmdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return path


def create_directory(path: Path) -> bool:
    """Create the directory. Return False if another process has created it. Raise InputError if it is a file."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise InputError(
                f"{path} is a file, and not the directory of a run; remove it, or type another name"
            ) from None
        return False
    return True


def _is_complete(checkpoint: Path) -> None:
    """Do nothing: all ranks write to the same directory."""


def _read_text(path: Path) -> str | None:
    return read_bytes(path).decode(errors="surrogateescape") if path.exists() else None


def _write_text(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, text)


def _step_of(line: str) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if type(step) is int else math.inf
