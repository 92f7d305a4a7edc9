"""A table in the run directory that spreadsheets and pandas read."""

import csv
import io
from pathlib import Path
from typing import TextIO

from runner.runs.loggers.history import logged
from runner.runs.loggers.protocol import Ending, Predictions
from runner.runs.records import Trial
from runner.runs.run_directory import write_whole

TABLE = "metrics.csv"


class Csv:
    """logger=csv: a row for each line of metrics.jsonl, a column for each metric; what was not measured is empty."""

    wants_predictions = False

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        self._path = Path(directory, TABLE)
        # What a crash has left behind is of steps that are made again, or half a row: metrics.jsonl is the truth.
        made = list(logged(directory))
        self._columns = list(dict.fromkeys(["step", *(name for _, metrics in made for name in metrics)]))
        write_whole(self._path, _text([self._columns, *(self._row(*line) for line in made)]))
        self._file = self._append()

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        if added := [name for name in metrics if name not in self._columns]:
            self._widen(added)
        self._file.write(_text([self._row(step, metrics)]))

    def predictions(self, step: int, seen: Predictions) -> None:
        pass

    def text(self, tag: str, text: str) -> None:
        pass

    def flush(self) -> None:
        self._file.flush()

    def close(self, finished: Ending) -> None:
        self._file.close()

    def _widen(self, names: list[str]) -> None:
        """Write the whole table anew, with columns for these too."""
        self._file.close()
        with self._path.open(newline="") as file:
            _, *rows = csv.reader(file)
        self._columns += names
        write_whole(self._path, _text([self._columns, *(row + [""] * len(names) for row in rows)]))
        self._file = self._append()

    def _append(self) -> TextIO:
        return self._path.open("a", newline="", buffering=1)  # by the line: it may be watched

    def _row(self, step: int, metrics: dict[str, float]) -> list[str]:
        values = {"step": str(step)} | {name: repr(float(value)) for name, value in metrics.items()}
        return [values.get(name, "") for name in self._columns]


def _text(rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
