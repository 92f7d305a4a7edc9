"""The file result.json: facts about a run, and its outcome."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from runner.errors import InputError
from runner.records.console import LOG
from runner.records.run_files import dumps, parse_metrics, read_mapping, without_links, write_atomically
from runner.records.run_lock import living_owner

RESULT = "result.json"
RUNNING, LOST = "running", "lost"


@dataclass
class Result:
    """The content of result.json. `state` is running, finished, failed, preempted or pruned."""

    state: str = RUNNING
    task: str = "train"
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: dict[str, str] | None = None  # the fields of runner.records.monitor.Monitor
    best: dict[str, float] | None = None  # step and monitored value of the best checkpoint
    stopped: str | None = None  # why the run stopped before its last step
    step: int = 0
    epoch: int = 0
    num_steps: int | None = None  # of the whole run; None if the task does not train
    world_size: int = 1
    parallel: str = ""
    model: str = ""
    data: str = ""
    seed: int = 0
    parent: str | None = None  # the run from whose checkpoint this run started (fork=)
    samples: dict[str, int] = field(default_factory=dict)  # by split; empty for a task without data
    samples_per_second: float | None = None  # steady state, all ranks
    seconds: float = 0.0
    weights_sha256: str | None = None
    git: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] | None = None  # of custom code: hash, repositories, and the time at which it was frozen
    started: str = ""  # when the first attempt started, in UTC
    command: list[str] = field(default_factory=list)
    error: str | None = None


def _classes(hint: Any) -> tuple[type, ...]:
    """Return the classes of the values that an annotation allows; an int is a valid float."""
    hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    classes = [get_origin(each) or each for each in hints]
    return (*classes, int) if float in classes else (*classes,)


_TYPES = {name: _classes(hint) for name, hint in get_type_hints(Result).items()}


def read_result(path: Path) -> dict[str, Any] | None:
    """Return the valid values of a run's result.json, or None if it is missing or damaged. Null metrics become NaN.

    The keys state, error and metrics always exist.
    """
    try:
        return valid_result(read_mapping(path / RESULT))
    except InputError:
        return None


def valid_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a result.json without values of wrong types, as `read_result` does."""
    valid = {key: value for key, value in result.items() if key not in _TYPES or isinstance(value, _TYPES[key])}
    return {"state": RUNNING, "error": None, **valid, "metrics": parse_metrics(result.get("metrics"))}


def current_state(directory: Path, recorded: object) -> str:
    """Return the recorded state, or "lost" if it is running and no living process has locked the directory."""
    if recorded != RUNNING or living_owner(directory):
        return str(recorded)
    result = read_result(directory) or {}  # again: the run may have ended after `recorded` was read
    return LOST if result.get("state", RUNNING) == RUNNING else str(result["state"])


def write_result(directory: Path, result: Mapping[str, Any]) -> None:
    """Write result.json atomically."""
    write_atomically(directory / RESULT, dumps(result, indent=1) + "\n")


def result_mtime_ns(directory: Path | str | None) -> int | None:
    """Return the modification time of result.json in nanoseconds, or None if the file does not exist."""
    with suppress(OSError):
        return Path(directory, RESULT).stat().st_mtime_ns if directory else None
    return None


def watch_outcome(directory: Path) -> Callable[[], bool]:
    """Return a function that returns True once result.json has been updated with the outcome of the run."""
    before = result_mtime_ns(directory)

    def is_recorded() -> bool:
        result = read_result(directory)
        return result is not None and result.get("state") != RUNNING and result_mtime_ns(directory) != before

    return is_recorded


def report_failure(directory: Path, text: str) -> None:
    """Report a failure on behalf of rank 0, which has died or hangs: on stderr, in log.txt and in result.json.

    The files are not changed if they already contain the outcome of the run.
    """
    with suppress(OSError):  # stderr may be closed
        print(f"error: {text.rstrip()}", file=sys.stderr, flush=True)
    result = read_result(directory)
    if result is None or result["state"] != RUNNING:
        return
    # The disk may be full; the exit status reports the failure too.
    with suppress(OSError), open(directory / LOG, "a", opener=without_links) as file:
        file.write(f"error: {text.rstrip()}\n")
    with suppress(OSError):
        write_result(directory, result | {"state": "failed", "error": text})
