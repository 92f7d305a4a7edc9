"""A CSV table in the run directory, for spreadsheets and pandas."""

from pathlib import Path

from runner.records.compared_runs import Trial
from runner.records.loggers.contract import Logger, RunOutcome
from runner.records.loggers.dashboard import logged_metrics
from runner.records.run_files import without_links, write_atomically
from runner.records.tables import csv_table

TABLE = "metrics.csv"


class Csv(Logger):
    """logger=csv: a row for each line of metrics.jsonl, a column for each metric. Missing values are empty."""

    def open(self, directory: str, first_step: int, trial: Trial) -> None:
        self._directory = directory
        self._rebuild()

    def scalars(self, step: int, metrics: dict[str, float]) -> None:
        if metrics.keys() <= {*self._columns}:
            self._file.write(csv_table([self._row(step, metrics)]))
        else:
            self._file.close()
            self._rebuild()

    def close(self, outcome: RunOutcome) -> None:
        self._file.close()

    def _rebuild(self) -> None:
        """Write the whole table from metrics.jsonl, because of a new column or an earlier attempt's truncated row."""
        path, lines = Path(self._directory, TABLE), list(logged_metrics(self._directory))
        self._columns = list(dict.fromkeys(["step", *(name for _, metrics in lines for name in metrics)]))
        write_atomically(path, csv_table([self._columns, *(self._row(*line) for line in lines)]))
        # line buffering, for programs that watch the file
        self._file = open(path, "a", newline="", buffering=1, opener=without_links)  # noqa: SIM115  # `close` closes it

    def _row(self, step: int, metrics: dict[str, float]) -> list[str]:
        values = {"step": str(step)} | {name: repr(float(value)) for name, value in metrics.items()}
        return [values.get(name, "") for name in self._columns]
