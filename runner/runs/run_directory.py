"""The run directory: who makes it, and the files that say what ran and how it went."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.errors import JobFailed
from runner.runs.attempts import Attempt, append_attempt, begin_attempt, last_line, now
from runner.runs.code_state import CodeState, facts_of_job, where_it_was
from runner.runs.holder import Holder, hold, next_number
from runner.runs.monitor import LOSS
from runner.runs.provenance import DIFF, git_diff, git_state, machine, versions
from runner.runs.shapes import read_lines
from runner.runs.strict_json import dumps, numbers
from runner.runs.train_state import available

RESULT, METRICS, CONFIG, OVERRIDES, CHECKPOINTS = (
    "result.json",
    "metrics.jsonl",
    "config.yaml",
    "overrides.yaml",
    "checkpoints",
)


@dataclass(frozen=True)
class Request:
    """How a job was asked for; with the configuration, what a run directory records of it."""

    overrides: tuple[str, ...] = ()  # what was typed, without run= and resume=
    config_dirs: tuple[str, ...] = ()  # of the user's own; of two the later one counts
    command: tuple[str, ...] = ()
    directory: str | None = None  # given to a job of a sweep and to a run that is resumed; otherwise a new one
    choices: Mapping[str, str] = field(default_factory=dict)  # the option taken of each group
    pruner: Callable[[int, dict[str, float]], bool] | None = None  # given step and metrics: whether to give the run up
    submitted: CodeState | None = None  # the code when the job was, where it may be another when it starts
    words: tuple[str, ...] = ()  # what another process has to type for it, where that is not what is recorded
    tells: str | None = None  # a file that is given the run's directory, as soon as there is one


@dataclass
class Result:
    """result.json. `state` is running, finished, failed, preempted or pruned."""

    state: str = "running"
    task: str = "train"
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: dict[str, str] | None = None  # name and direction, as runner.runs.monitor.Monitor
    best: dict[str, float] | None = None  # step and the monitor's value of the best checkpoint
    stopped: str | None = None  # why the run ended before its last step
    step: int = 0
    epoch: int = 0
    world_size: int = 1
    parallel: str = ""
    model: str = ""
    data: str = ""
    seed: int = 0
    samples: dict[str, int] = field(default_factory=dict)  # by split; none of a task without data
    order: int | None = None  # of the training samples, as in runner.runs.train_state; None where nothing is trained
    samples_per_second: float | None = None  # steady state, all ranks
    seconds: float = 0.0
    weights_sha256: str | None = None
    git: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] | None = None  # of a job that has waited, frozen or live: runner.runs.code_state.facts_of_job
    command: list[str] = field(default_factory=list)
    error: str | None = None


class RunDirectory:
    """One run's files. Only rank 0 writes; the other ranks hold one that reads (`writes=False`).

    Of a run that goes on, what the attempt before has recorded stays until the new one is about to train: `prepare` it,
    `commit` it once all that it needs is loaded, and `end` it. A new run's is committed at once.
    """

    def __init__(self, path: Path, writes: bool = True):
        self.path, self.writes = path, writes
        self.result = Result()
        self.attempt = Attempt(0, "", "", 0, "")
        self.pruner: Callable[[int, dict[str, float]], bool] | None = None
        self.pruned = False
        self._holder: Holder | None = None
        self._start = time.monotonic()
        self._texts: dict[str, str | None] = {}  # of the record, by file; None where there is to be none
        self._before: dict[str, str | None] | None = None  # what it has replaced, once it is committed

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def goes_on(self) -> bool:
        """Whether an attempt before has left a record and a checkpoint, which is what there is to keep."""
        return (self.path / OVERRIDES).exists() and bool(available(self.checkpoints))

    @property
    def is_committed(self) -> bool:
        return self._before is not None

    def hold(self, again: int | None = None, **facts: Any) -> None:
        """Make this world the one that writes here. Raises InputError where another does.

        again: as of `runner.runs.holder.hold`; facts: of the Attempt that begins.
        """
        self.attempt = begin_attempt(next_number(self.path), **facts)
        self._holder = hold(self.path, self.attempt, again)

    def check_held(self) -> None:
        """Raises JobFailed where another world has taken the directory over: nothing may be written there any more."""
        if self._is_lost():
            raise JobFailed(f"{self.path} has been taken over by another process, as this one seemed to be dead")

    def release(self) -> None:
        """Let another world write here."""
        if self._holder is not None:
            self._holder.release()
            self._holder = None

    def record(self, config: Any, request: Request, **facts: Any) -> None:
        """`prepare` and `commit`."""
        self.prepare(config, request, **facts)
        self.commit()

    def prepare(self, config: Any, request: Request, **facts: Any) -> None:
        """Settle what is recorded of the run, and write nothing. config: a dataclass."""
        self.result = Result(command=list(request.command), versions=versions(), machine=machine(), **facts)
        self.pruner = request.pruner
        if not self.writes:
            return
        self.result.git = git_state()
        self.result.code = facts_of_job(request.submitted)
        typed = [f"--config-dir={where_it_was(folder)}" for folder in request.config_dirs]
        self._texts = {
            DIFF: git_diff() if self.result.git["dirty"] else None,
            CONFIG: yaml.safe_dump(asdict(config), sort_keys=False),
            OVERRIDES: yaml.safe_dump([*typed, *request.overrides]),
        }

    def commit(self, first_step: int = 0) -> None:
        """Write what was prepared, and the state running, in the place of the attempt before. Once.

        first_step: the step after which the run goes on.
        """
        if self.is_committed:
            return
        self._before = {}
        self.result.step = self.attempt.first_step = first_step
        if not self.writes:
            return
        if self.goes_on:
            self._before = {name: _read(self.path / name) for name in (*self._texts, RESULT)}
        for name, text in self._texts.items():
            _put(self.path / name, text)
        self.save_result()

    def end(self, state: str, error: str | None = None) -> None:
        """Record how the attempt ended; error: where it failed, why.

        One that failed or was stopped before it has made a step leaves the record of the one before: a run that had
        finished has finished still. Only where that was killed, and is said to be running, does it say how this ended.
        """
        if not self.is_committed and state in ("finished", "pruned"):
            self.commit()
        self.result.state, self.result.error = state, error
        if not self.writes or self._is_lost():
            return
        self.attempt.ended, self.attempt.state = now(), state
        self.attempt.error = last_line(error or "")
        made_step = self.is_committed and self.result.step != self.attempt.first_step
        try:
            self._record_end(state, error, made_step)
        finally:  # a full disk may still have room for a line
            append_attempt(self.path, self.attempt)

    def _record_end(self, state: str, error: str | None, made_step: bool) -> None:
        if state in ("failed", "preempted") and not made_step and self._before:
            for name, text in self._before.items():
                _put(self.path / name, text)
            self._before, self.attempt.first_step = None, None
        if self.is_committed:
            self.attempt.step = self.result.step
            self.save_result()
        elif (result := read_result(self.path)) is None or result.get("state") == "running":
            result = {**(result or {}), "state": state, "error": error}
            write_whole(self.path / RESULT, dumps(result, indent=1) + "\n")

    def save_result(self) -> None:
        """Write result.json in one piece, whatever happens meanwhile."""
        self.result.seconds = round(time.monotonic() - self._start, 3)
        if self.writes:
            write_whole(self.path / RESULT, dumps(asdict(self.result), indent=1) + "\n")

    def log_metrics(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """Append a line to metrics.jsonl, as `check_held` allows. Raises JobFailed where the disk does not take it."""
        self.check_held()
        if not self.writes:
            return
        path, line = self.path / METRICS, dumps({"step": step, "epoch": epoch, **metrics})
        try:
            with path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise JobFailed(
                f"{path} could not be written: {error.strerror or error}\n"
                "the checkpoints are as they were; mend that, or free space there, and resume"
            ) from None

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps that will be made again; a line that a crash cut short goes too."""
        path = self.path / METRICS
        if self.writes and path.exists():
            text = path.read_text(errors="surrogateescape")
            kept = "".join(line for line in text.splitlines(keepends=True) if _step_of(line) <= step)
            if kept != text:
                write_whole(path, kept)
                if self._before:
                    self._before[METRICS] = text

    def evaluations(self, monitor: str) -> dict[int, float]:
        """The monitor's value of each evaluation in metrics.jsonl, by step, not a number where it was not measured.

        For the rank that writes.
        """
        values: dict[int, float] = {}
        path = self.path / METRICS
        for line in read_lines(path) if path.exists() else ():
            if LOSS in line or monitor in line:  # every evaluation gives the loss; other val/... are a callback's own
                value = line.get(monitor)
                values[line["step"]] = float(value) if isinstance(value, (int, float)) else math.nan
        return values

    def _is_lost(self) -> bool:
        return self._holder is not None and self._holder.is_lost()


def new_directory(outputs: str, name: str, prefix: str = "") -> Path:
    """Make outputs/name/<prefix><stamp>; a run of the same second gets a number behind its stamp."""
    parent = Path(outputs).absolute() / name
    parent.mkdir(parents=True, exist_ok=True)
    stamp = prefix + time.strftime("%Y%m%d-%H%M%S")
    for number in range(10_000):
        path = parent / (f"{stamp}-{number}" if number else stamp)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{parent / stamp} and 9,999 more exist")


def read_result(path: Path) -> dict[str, Any] | None:
    """A run's result.json, or None where there is none to read. A metric that was not finite is NaN."""
    try:
        result = json.loads((path / RESULT).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return result | {"metrics": numbers(result.get("metrics"))} if isinstance(result, dict) else None


def write_whole(path: Path, text: str) -> None:
    """The file has its old content or the new one, never a part. Bytes that were no text are written as they were."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("w", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read(path: Path) -> str | None:
    return path.read_text(errors="surrogateescape") if path.exists() else None


def _put(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        write_whole(path, text)


def _step_of(line: str) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if type(step) is int else math.inf
