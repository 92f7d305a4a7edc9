"""Runs as they are on disk: `open_run`, `runs` and `table`. Nothing that a run names is imported but for its model."""

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.config.own_folders import importing_anew
from runner.errors import InputError
from runner.runs.ledger import is_sweep
from runner.runs.monitor import Monitor
from runner.runs.records import RunRecord, last_trained, lines_of, read_run, varied_keys
from runner.runs.run_directory import CHECKPOINTS, CONFIG, OVERRIDES, read_result
from runner.runs.shapes import read_mapping
from runner.runs.train_state import BEST, LAST, named

if TYPE_CHECKING:
    import torch
    from pandas import DataFrame

Column = np.ndarray[Any, Any]

_STAMP = re.compile(r"(?:sweep-)?(\d{8})-(\d{6})(?:-(\d+))?")  # as runner.runs.run_directory.new_directory makes it


class Run:
    """A run directory. Each of its properties is read when it is asked for, so those of a run in progress move on."""

    def __init__(self, path: str | Path, trust: bool = False):
        self.path, self._trust = Path(path).absolute(), trust
        self._loaded: tuple[tuple[Path, str], torch.nn.Module] | None = None

    def __repr__(self) -> str:
        monitor, metrics = self.monitor, self.result.get("metrics", {})
        measured = f", {monitor.name} {metrics[monitor.name]:.4f}" if monitor and monitor.name in metrics else ""
        return f"<Run {self.path}: {self.state}{measured}>"

    @property
    def result(self) -> dict[str, Any]:
        """result.json: metrics, steps, speed, weights_sha256, versions, ...; empty before the run has begun."""
        return read_result(self.path) or {}

    @property
    def state(self) -> str:
        """running, finished, failed, preempted or pruned. A run that was killed stays running."""
        return str(self.result.get("state", "not run"))

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration, resolved: nested, as in config.yaml."""
        return read_mapping(self.path / CONFIG)

    @property
    def monitor(self) -> Monitor | None:
        """What it is compared by: name and direction (min or max); None where it has not been measured."""
        return read_run(self.path).monitor

    @property
    def metrics(self) -> dict[str, Column]:
        """All that was logged, by column: step, epoch, and each metric, nan in the steps without a value of it."""
        rows: dict[int, dict[str, Any]] = {}
        for line in lines_of(self.path):
            rows.setdefault(int(line["step"]), {}).update(line)
        steps = sorted(rows)
        names = dict.fromkeys(name for step in steps for name, value in rows[step].items() if _is_number(value))
        columns = {name: np.array([rows[step].get(name, np.nan) for step in steps]) for name in names}
        for name in ("step", "epoch"):
            columns[name] = np.array([rows[step].get(name, 0) for step in steps], dtype=np.int64)
        return columns

    def frame(self) -> "DataFrame":
        """`metrics` as a data frame of pandas, which must be installed."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise InputError("a data frame needs pandas; pip install pandas, or take .metrics") from None
        return DataFrame(self.metrics)

    def model(self, checkpoint: str | None = None, device: "str | torch.device" = "cpu") -> "torch.nn.Module":
        """The trained model, whole, in evaluation mode: a plain module, whatever mode and world have trained it.

        checkpoint: best, last or step_N; None is the best one where there is one, else the last. It has the dtype of
        the run's parameters. Raises InputError for a checkpoint that is not there, and a model that is another by now.
        """
        from runner.fault_tolerance.trained_model import load_trained

        name = self._checkpoint(checkpoint).name
        with importing_anew():
            return load_trained(self.path, name, self._trust).to(device)

    def predict(self, inputs: Any, checkpoint: str | None = None, device: "str | torch.device" = "cpu") -> Any:
        """The model's outputs for a batch of inputs, in the run's precision, without gradients, on the device.

        inputs: a tensor or an array, a tuple of them (`model(*inputs)`) or a dict (`model(**inputs)`). The model is
        loaded by the first call, and kept for the next one of the same checkpoint and device.
        """
        import torch
        from torch.utils._pytree import tree_map_only

        from runner.training.precision import Precision
        from runner.training.pytree import known, map_tensors
        from runner.training.supervised import call

        key = (self._checkpoint(checkpoint), str(device))
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = key, self.model(key[0].name, device)
        model, where = self._loaded[1], torch.device(device)
        precision = Precision(self.config.get("precision", "fp32"), where)

        given = tree_map_only(np.ndarray, torch.from_numpy, known(inputs))
        with torch.no_grad(), precision.autocast():
            return call(model, map_tensors(lambda tensor: precision.cast(tensor.to(where)), given))

    def _checkpoint(self, name: str | None) -> Path:
        folder = self.path / CHECKPOINTS
        try:
            return named(folder, name or (BEST if (folder / BEST).exists() else LAST))
        except ValueError as error:
            raise InputError(f"checkpoint={name or LAST}: {error}") from None


def open_run(path: str | Path, trust: bool = False) -> Run:
    """The run in a directory; last: the newest training run in outputs/run, as run=last on the command line.

    trust: its model is made although the directory is another user's and names Python of theirs. Raises InputError
    where there is no run.
    """
    if str(path) == "last":
        folder = Path("outputs", "run").absolute()
        newest = last_trained(folder)
        if newest is None:
            raise InputError(f"open_run('last'): there is no run under {folder}; name the directory")
        return Run(newest, trust)
    where = Path(path)
    if (where / OVERRIDES).is_file():
        return Run(where, trust)
    if is_sweep(where):
        raise InputError(f"{path} is a sweep; runner.runs({str(path)!r}) lists its jobs")
    what = f"no run directory (it has no {OVERRIDES})" if where.is_dir() else "no directory"
    raise InputError(f"{path} is {what}; runner.runs('outputs') lists those that there are")


def runs(folder: str | Path = "outputs") -> list[Run]:
    """All runs beneath a folder, the jobs of sweeps among them, in the order in which they were started.

    Raises InputError where there is no such folder.
    """
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is no directory; name one that runs are kept in, as outputs")
    found = []
    for where, folders, files in os.walk(folder):
        if OVERRIDES in files:
            found.append(Path(where))
            folders.clear()  # its own
    return [Run(path) for path in sorted(found, key=_started)]


def table(chosen: Sequence[Run]) -> dict[str, Column]:
    """A row for each run, by column: its path and state, what was not typed alike for all, and the metrics at its end.

    A value that a run does not have is nan in a column of numbers, and empty in another one.
    """
    records = [read_run(run.path) for run in chosen]
    columns: dict[str, list[Any]] = {
        "path": [str(record.directory) for record in records],
        "state": [record.state for record in records],
    }
    for key in varied_keys(records):
        columns[key] = [_value(record, key) for record in records]
    for name in dict.fromkeys(name for record in records for name in record.metrics):
        columns[name] = [record.metrics.get(name, np.nan) for record in records]
    return {name: _as_column(values) for name, values in columns.items()}


def _value(record: RunRecord, key: str) -> Any:
    """As the run had it; where it has recorded no more, as it was typed. Empty where it has none."""
    if key in record.settings:
        return record.settings[key]
    typed = record.value(key)
    for number in (int, float):
        with suppress(ValueError):
            return number(typed)
    return typed


def _as_column(values: list[Any]) -> Column:
    there = [value for value in values if value != ""]
    if there and all(map(_is_number, there)):
        return np.array([np.nan if value == "" else value for value in values])
    return np.array([value if isinstance(value, str) else str(value) for value in values], dtype=object)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _started(path: Path) -> tuple[Any, ...]:
    """When the run or its sweep was made, and the job's number; of a directory by another name, when it was written."""
    for where in (path, path.parent):
        if match := _STAMP.fullmatch(where.name):
            day, moment, again = match.groups()
            number = path.name.partition("-")[0] if where is not path else ""
            return day, moment, int(again or 0), int(number) if number.isdigit() else 0, str(path)
    written = time.localtime((path / OVERRIDES).stat().st_mtime)
    return time.strftime("%Y%m%d", written), time.strftime("%H%M%S", written), 0, 0, str(path)
