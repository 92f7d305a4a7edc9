"""The record of a run: the content of its result.json, and the properties that its other files add."""

import functools
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from runner.errors import InputError
from runner.records.monitor import Monitor, recorded_monitor
from runner.records.output import FailSafeStream
from runner.records.run_files import (
    LOG,
    dumps,
    parse_metrics,
    read_mapping,
    read_metrics,
    without_links,
    write_atomically,
)
from runner.records.run_lock import living_owner
from runner.records.settings import (
    CONFIG,
    OVERRIDES,
    Section,
    by_key,
    read_overrides,
    read_settings,
    split_words,
    to_text,
)

RESULT = "result.json"
RUNNING, LOST, NOT_RUN = "running", "lost", "not run"
PAUSED = "paused"  # of a trial: a study may resume it later
DONE = ("finished", "pruned", PAUSED)
# Compared like metrics, with their directions.
SPEEDS = {"samples_per_second": "max", "mfu": "max", "goodput": "max", "seconds": "min"}


class Standing(NamedTuple):
    """The best and the last value of a run's monitor, NaN if there are none."""

    monitor: Monitor | None = None
    best: float = math.nan
    last: float = math.nan


@dataclass(eq=False)
class RunRecord:
    """One run. The fields from `state` to `error` are the keys of result.json (docs/run_reference.md).

    The properties read the other files of the run when they are first used, and raise InputError for a damaged file.
    """

    directory: Path
    state: str = RUNNING  # running, preempted, failed or one of DONE; current_run also returns other states
    task: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: dict[str, str] | None = None  # the fields of runner.records.monitor.Monitor
    directions: dict[str, str] = field(default_factory=dict)  # max or min, by the name of a metric or loss
    best: dict[str, float] | None = None  # step and monitored value of the best checkpoint
    stopped: str | None = None  # why the run stopped before its last step
    step: int = 0
    epoch: int = 0
    num_steps: int | None = None  # of the whole run; None if the task does not train
    world_size: int = 1
    hosts: list[str] = field(default_factory=list)  # the machines of the last attempt, in the order of their ranks
    parallel: str = ""
    model: str = ""
    data: str = ""
    seed: int = 0
    parent: str | None = None  # the run from whose checkpoint this run started (fork=)
    samples: dict[str, int] = field(default_factory=dict)  # by split; empty for a task without data
    samples_per_second: float | None = None  # steady state, all ranks
    mfu: float | None = None  # model FLOPs utilization, on GPUs that have a data sheet
    goodput: float | None = None  # productive seconds over all seconds of the attempts
    seconds: float | None = None  # of the last attempt
    upload_retries: int | None = None  # repeated requests of the last attempt to the object store of `outputs=`
    weights_sha256: str | None = None
    git: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] | None = None  # of custom code: hash, copy, modules, repositories, and when it was submitted
    started: str = ""  # when the first attempt started, in UTC
    command: list[str] = field(default_factory=list)
    error: str | None = None

    # not in result.json
    planned: tuple[str, ...] = ()  # the overrides in the ledger of a job that has not started
    is_recorded: bool = True  # False if the run has no valid result.json, so that the other fields have their defaults

    @property
    def label(self) -> str:
        """The name of the directory, which the jobs of a sweep have in its ledger."""
        return self.directory.name

    @property
    def code_hash(self) -> str:
        """The hash of the custom modules; empty if there are none."""
        return str((self.code or {}).get("hash") or "")

    @functools.cached_property
    def measured(self) -> dict[str, float]:
        """The metrics and the speed, as reports compare them."""
        speed = {key: value for key in SPEEDS if (value := getattr(self, key)) is not None}
        return {name: float(value) for name, value in parse_metrics(self.metrics | speed).items()}

    @functools.cached_property
    def measured_monitor(self) -> Monitor | None:
        """The monitored metric; None if it was not measured."""
        return recorded_monitor(self.monitor, self.measured)

    def direction_of(self, metric: str) -> str | None:
        """Return the direction that a metric of any split declares, max or min; None if it declares none."""
        name = metric.partition("/")[2].partition("/")[0]  # f1 of val/f1/macro
        direction = SPEEDS.get(metric) or self.directions.get(name)
        return direction if direction in ("max", "min") else None

    @functools.cached_property
    def standing(self) -> Standing:
        """The monitor of the run, also of one that has not recorded its metrics yet, and its values."""
        expected = () if self.state in DONE or not self.monitor else (str(self.monitor.get("name")),)
        monitor = self.measured_monitor or recorded_monitor(self.monitor, expected)
        if monitor is None:
            return Standing()
        best = float(parse_metrics(self.best).get("value", math.nan))
        last = self.measured.get(monitor.name, math.nan)
        if not (math.isfinite(best) and math.isfinite(last)):
            curve = self.curves(monitor.name)[monitor.name]
            last = last if math.isfinite(last) else [math.nan, *curve.values()][-1]
            best = next((curve[step] for step in monitor.best(curve)), last)
        return Standing(monitor, best, last)

    @functools.cached_property
    def _typed(self) -> list[str]:
        return read_overrides(f"{self.directory}/{OVERRIDES}") or [*self.planned]

    @functools.cached_property
    def overrides(self) -> list[str]:
        """The overrides of the command line."""
        return split_words(self._typed)[0]

    @property
    def config_dirs(self) -> list[str]:
        """The custom directories of the command line."""
        return split_words(self._typed)[1]

    @functools.cached_property
    def overrides_by_key(self) -> dict[str, str]:
        return by_key(self.overrides)

    @functools.cached_property
    def settings(self) -> Section:
        """The resolved configuration, by dotted key, with the chosen options of the groups."""
        groups = ("model", "data", "parallel") if self.is_recorded else ()
        return read_settings(
            f"{self.directory}/{CONFIG}", {key: name for key in groups if (name := getattr(self, key))}
        )

    def value(self, key: str) -> str:
        """Return the value of the key as text, from the overrides or the configuration."""
        if key == "world_size":
            return str(self.world_size)
        if key in self.overrides_by_key:
            return self.overrides_by_key[key]
        return to_text(self.settings[key]) if key in self.settings else ""

    def curves(self, *metrics: str) -> dict[str, dict[int, float]]:
        """Return the finite values of each metric by step. If a restart has repeated a step, the last value counts."""
        curves: dict[str, dict[int, float]] = {metric: {} for metric in metrics}
        for line in sorted(read_metrics(self.directory), key=itemgetter("step")):
            for metric, curve in curves.items():
                if math.isfinite(value := line.get(metric, math.nan)):
                    curve[line["step"]] = float(value)
        return curves

    def as_result(self) -> dict[str, Any]:
        """Return the content of result.json, empty for a run without one."""
        return {key: getattr(self, key) for key in RESULT_KEYS} if self.is_recorded else {}

    def save(self) -> None:
        """Write result.json atomically."""
        self.is_recorded = True
        write_atomically(self.directory / RESULT, dumps(self.as_result(), indent=1) + "\n")


def _classes(hint: Any) -> tuple[type, ...]:
    """Return the classes of the values that an annotation allows; an int is a valid float."""
    hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    classes = [get_origin(each) or each for each in hints]
    return (*classes, int) if float in classes else (*classes,)


RESULT_KEYS = tuple(each.name for each in fields(RunRecord) if each.name not in ("directory", "planned", "is_recorded"))
_TYPES = {key: _classes(hint) for key, hint in get_type_hints(RunRecord).items() if key in RESULT_KEYS}


def read_run(directory: Path) -> RunRecord:
    """Return the record of a run, whose state is `not run` without a result.json. Raise InputError if it is damaged.

    Values of wrong types are left out, and null metrics become NaN.
    """
    path = f"{directory}/{RESULT}"  # a string: joining paths takes longer
    try:
        result = read_mapping(path)
    except InputError:
        if Path(path).exists():
            raise
        return RunRecord(directory, NOT_RUN, is_recorded=False)
    valid = {key: result[key] for key, types in _TYPES.items() if key in result and isinstance(result[key], types)}
    return RunRecord(directory, **valid | {"metrics": parse_metrics(result.get("metrics"))})


def find_run(directory: Path) -> RunRecord:
    """Return the record of a run, whose state is `not run` if its result.json is missing or damaged."""
    try:
        return read_run(directory)
    except InputError:
        return RunRecord(directory, NOT_RUN, is_recorded=False)


def current_state(directory: Path, recorded: str) -> str:
    """Return the recorded state, or "lost" if it is running and no living process has locked the directory."""
    if recorded != RUNNING or living_owner(directory):
        return recorded
    state = find_run(directory).state  # again: the run may have ended after `recorded` was read
    return LOST if state in (RUNNING, NOT_RUN) else state


def result_mtime_ns(directory: Path | str | None) -> int | None:
    """Return the modification time of result.json in nanoseconds, or None if the file does not exist."""
    with suppress(OSError):
        return Path(directory, RESULT).stat().st_mtime_ns if directory else None
    return None


def watch_outcome(directory: Path) -> Callable[[], bool]:
    """Return a function that returns True once result.json has been updated with the outcome of the run."""
    before = result_mtime_ns(directory)

    def is_recorded() -> bool:
        return find_run(directory).state not in (RUNNING, NOT_RUN) and result_mtime_ns(directory) != before

    return is_recorded


def report_failure(directory: Path, text: str) -> None:
    """Report a failure on behalf of rank 0, which has died or hangs: on stderr, in log.txt and in result.json.

    The files are not changed if they already contain the outcome of the run.
    """
    print(f"error: {text.rstrip()}", file=FailSafeStream(sys.stderr), flush=True)
    run = find_run(directory)
    if run.state != RUNNING:
        return
    # The disk may be full; the exit status reports the failure too.
    with suppress(OSError), open(directory / LOG, "a", opener=without_links) as file:
        file.write(f"error: {text.rstrip()}\n")
    run.state, run.error = "failed", text
    with suppress(OSError):
        run.save()
