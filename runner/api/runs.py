"""Runs on disk: `open_run`, `runs` and `table`. The custom code of a run is imported only to load its model."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.checkpoints.layout import BEST, LAST, find_checkpoint
from runner.checkpoints.pull import pull
from runner.config.custom_dirs import fresh_imports
from runner.errors import InputError, as_input_error, printable
from runner.records.compared_runs import current_run, varied_keys
from runner.records.custom_code import read_code
from runner.records.finding import find_records, newest_training_run
from runner.records.labels import read_labels
from runner.records.monitor import Monitor
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_files import read_mapping, read_metrics
from runner.records.run_record import RunRecord, current_state, find_run
from runner.records.settings import CONFIG, OVERRIDES
from runner.records.start_time import in_order
from runner.records.tables import as_number, format_number
from runner.remote.address import is_remote

if TYPE_CHECKING:
    import torch
    from pandas import DataFrame

Column = np.ndarray[Any, Any]


class Run:
    """A run directory. Properties are read from disk on each access, so they change while the run is in progress."""

    def __init__(self, path: str | Path, trust: bool = False, init_from: str | Path | None = None):
        self.path, self._trust = Path(path).absolute(), trust
        self._init_from = None if init_from is None else str(init_from)
        self._loaded: tuple[tuple[Path, str], torch.nn.Module] | None = None

    def __repr__(self) -> str:
        run = self.record
        monitor = run.measured_monitor
        measured = f", {monitor.name} {format_number(run.measured[monitor.name])}" if monitor else ""
        return printable(f"<Run {self.path}: {self.state}{measured}>")

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def record(self) -> RunRecord:
        """The content of result.json as an object; with the state `not run` if there is no valid one."""
        return find_run(self.path)

    @property
    def result(self) -> dict[str, Any]:
        """result.json: metrics, steps, speed, weights_sha256, versions, ...; empty before the run has started."""
        return self.record.as_result()

    @property
    def state(self) -> str:
        """running, finished, pruned, paused, preempted or failed; lost if its process was killed meanwhile."""
        return current_state(self.path, self.record.state)

    @property
    def config(self) -> dict[str, Any]:
        """The whole resolved configuration, nested as in config.yaml."""
        return read_mapping(self.path / CONFIG)

    @property
    def monitor(self) -> Monitor | None:
        """The metric by which runs are compared: name and direction (min or max); None if it was not measured."""
        return self.record.measured_monitor

    @property
    def tags(self) -> list[str]:
        """The tags that `runner.tag` has added."""
        return read_labels(self.path).tags

    @property
    def metrics(self) -> dict[str, Column]:
        """All logged values by column: step, epoch and each metric, which is nan in steps without a value."""
        rows: dict[int, dict[str, Any]] = {}
        for line in read_metrics(self.path):
            rows.setdefault(line["step"], {}).update(line)
        steps = sorted(rows)
        names = dict.fromkeys(name for step in steps for name in rows[step])
        columns = {name: np.array([rows[step].get(name, np.nan) for step in steps]) for name in names}
        for name in ("step", "epoch"):
            columns[name] = np.array([rows[step].get(name, 0) for step in steps], dtype=np.int64)
        return columns

    @property
    def changed_code(self) -> list[str]:
        """The files of custom code that differ from the copy that the run has recorded, or are missing."""
        code = read_code(self.path, "train the run again")
        return [str(code.current_file(name)) for name in code.changed()] if code else []

    def frame(self) -> "DataFrame":
        """Return `metrics` as a data frame of pandas, which must be installed."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise InputError("a data frame needs pandas; pip install pandas, or use .metrics") from None
        return DataFrame(self.metrics)

    def model(
        self, checkpoint: str | None = None, device: "str | torch.device" = "cpu", code: str = "recorded"
    ) -> "torch.nn.Module":
        """Return the complete trained model, a plain module in evaluation mode, with the dtype of the run's parameters.

        Raise InputError for a missing checkpoint, or if the model's class no longer fits it.

        Args:
            checkpoint: best, last or step_N; None selects the best one if it exists, else the last.
            device: the device of the returned model.
            code: recorded imports custom modules from the copy that the run has recorded; current imports the current
                files, which may have changed.
        """
        from runner.jobs.trained_model import load_trained

        if code not in ("recorded", "current"):
            raise InputError(f"code={code} must be recorded or current")
        name = self._checkpoint(checkpoint).name
        with fresh_imports():
            return load_trained(self.path, name, self._trust, code, self._init_from).to(device)

    def predict(self, inputs: Any, checkpoint: str | None = None, device: "str | torch.device" = "cpu") -> Any:
        """Return the model's outputs for a batch, in the run's precision and without gradients.

        The first call loads the model, and later calls with the same checkpoint and device reuse it.

        Args:
            inputs: a tensor or an array, a tuple of them (`model(*inputs)`) or a dict (`model(**inputs)`).
            checkpoint, device: as for `model`; the outputs are on the same device.
        """
        import torch
        from torch.utils._pytree import tree_map_only

        from runner.input.batch import cast_floating
        from runner.input.pytree import map_tensors, register_types
        from runner.objectives.supervised import call_model
        from runner.optimization.precision import Precision

        key = (self._checkpoint(checkpoint), str(device))
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = key, self.model(key[0].name, device)
        model, target = self._loaded[1], torch.device(device)
        precision = Precision(self.config.get("precision", "fp32"), target)

        tree = tree_map_only(np.ndarray, torch.from_numpy, register_types(inputs))
        dtype = precision.parameter_dtype
        with torch.no_grad(), precision.autocast():
            return call_model(model, map_tensors(lambda tensor: cast_floating(tensor.to(target), dtype), tree))

    def _checkpoint(self, name: str | None) -> Path:
        directory = self.path / CHECKPOINTS
        if name is None:
            with suppress(ValueError):
                return find_checkpoint(directory, BEST)
        with as_input_error(f"checkpoint={name or LAST}: "):
            return find_checkpoint(directory, name or LAST)


def open_run(path: str | Path, trust: bool = False, init_from: str | Path | None = None) -> Run:
    """Return the run in a directory. Raise InputError if it contains none.

    Args:
        path: the run directory, or its address such as s3://bucket/prefix/run/20261120-192348, of which a local copy is
            made; "last" is the newest training run in outputs/run, as run=last on the command line.
        trust: allow `model` to use another user's run directory, which chooses the code to import.
        init_from: where the file or directory of `init_from=` of the run is now, if it has moved. It also replaces
            options of the model that name the same path, such as model.config.
    """
    if str(path) == "last":
        directory = Path("outputs", "run").absolute()
        newest = newest_training_run([directory])
        if newest is None:
            raise InputError(f"open_run('last'): there is no training run in {directory}; name the run directory")
        return Run(newest, trust, init_from)
    if is_remote(path):
        path = pull(str(path), "open_run")
    if not Path(path, OVERRIDES).is_file():
        raise InputError(f"{path} is no run directory; runner.runs(DIRECTORY) lists the runs below a directory")
    return Run(path, trust, init_from)


def runs(folder: str | Path = "outputs") -> list[Run]:
    """Return all runs below a directory, including the jobs of sweeps, in the order in which they were started.

    Raise InputError if the directory does not exist. Warn about directories that are not readable.
    """
    if is_remote(folder):
        folder = pull(str(folder), "runs")
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is no directory; name one that contains runs, such as outputs")
    skipped: list[str] = []
    found = [Run(path) for path in in_order(path for path, is_sweep in find_records(folder, skipped) if not is_sweep)]
    for message in skipped:
        warnings.warn(message, stacklevel=2)
    return found


def table(chosen: Sequence[Run]) -> dict[str, Column]:
    """Return the columns of a table with a row for each run: path, state, differing overrides, and final metrics.

    A missing value is nan in a column of numbers, and an empty string in other columns.
    """
    records = [current_run(run.path) for run in chosen]
    columns: dict[str, list[Any]] = {
        "path": [str(record.directory) for record in records],
        "state": [record.state for record in records],
    }
    for key in varied_keys(records):
        columns[key] = [_value(record, key) for record in records]
    for name in dict.fromkeys(name for record in records for name in record.measured):
        columns[name] = [record.measured.get(name, np.nan) for record in records]
    return {name: _as_column(values) for name, values in columns.items()}


def _value(record: RunRecord, key: str) -> Any:
    """Return the value in the run's configuration, or else in its overrides; an empty string if neither has it."""
    text = record.value(key)
    number = int(text) if text.isdecimal() else as_number(text)
    return record.settings.get(key, text) if number is None else number


def _as_column(values: list[Any]) -> Column:
    if all(isinstance(value, (int, float)) or value == "" for value in values):
        return np.array([np.nan if value == "" else value for value in values])
    return np.array([str(value) for value in values], dtype=object)
