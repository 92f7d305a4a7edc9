"""The run directory: who makes it, and the files that say what ran and how it went."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.runs.code_state import CodeState, facts_of_job, where_it_was
from runner.runs.provenance import DIFF, git_diff, git_state, machine, versions

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
    """One run's files. Only rank 0 writes; the other ranks hold one that reads (`writes=False`)."""

    def __init__(self, path: Path, writes: bool = True):
        self.path, self.writes = path, writes
        self.result = Result()
        self.pruner: Callable[[int, dict[str, float]], bool] | None = None
        self.pruned = False
        self._start = time.monotonic()

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def record(self, config: Any, request: Request, **facts: Any) -> None:
        """Write what runs here, and the state running. config: a dataclass."""
        self.result = Result(command=list(request.command), versions=versions(), machine=machine(), **facts)
        self.pruner = request.pruner
        if not self.writes:
            return
        self.result.git = git_state()
        self.result.code = facts_of_job(request.submitted)
        (self.path / DIFF).unlink(missing_ok=True)
        if self.result.git["dirty"]:
            write_whole(self.path / DIFF, git_diff())
        typed = [f"--config-dir={where_it_was(folder)}" for folder in request.config_dirs]
        write_whole(self.path / CONFIG, yaml.safe_dump(asdict(config), sort_keys=False))
        write_whole(self.path / OVERRIDES, yaml.safe_dump([*typed, *request.overrides]))
        self.save_result()

    def save_result(self) -> None:
        """Write result.json in one piece, whatever happens meanwhile."""
        self.result.seconds = round(time.monotonic() - self._start, 3)
        if self.writes:
            write_whole(self.path / RESULT, json.dumps(asdict(self.result), indent=1) + "\n")

    def log_metrics(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        if self.writes:
            with (self.path / METRICS).open("a") as file:
                file.write(json.dumps({"step": step, "epoch": epoch, **metrics}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps that will be made again; a line that a crash cut short goes too."""
        path = self.path / METRICS
        if self.writes and path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line) <= step]
            write_whole(path, "".join(lines))

    def evaluations(self, monitor: str) -> dict[int, float]:
        """The monitor's value of each evaluation in metrics.jsonl, by step, not a number where it was not measured.

        For the rank that writes.
        """
        path = self.path / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        values: dict[int, float] = {}
        for line in lines:
            found = json.loads(line) if '"val/' in line else {}
            if any(key.startswith("val/") for key in found):
                # A line of the same step may be a callback's, with numbers of its own.
                values[found["step"]] = float(found.get(monitor, values.get(found["step"], "nan")))
        return values


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
    """A run's result.json, or None where there is none to read."""
    try:
        return json.loads((path / RESULT).read_text())
    except (OSError, ValueError):
        return None


def write_whole(path: Path, text: str) -> None:
    """The file has its old content or the new one, never a part."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
