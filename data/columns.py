"""Columns of CSV and Parquet files, and their values."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Column = np.ndarray  # (N,) of numbers, or of text as objects


@dataclass(frozen=True)
class Columns:
    """The concatenated columns of some files."""

    columns: dict[str, Column]
    lines: np.ndarray  # (N,), for each row its line in a CSV file, or its number in a Parquet file
    starts: dict[str, int]  # the first row of each file

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """Return columns as (N, len(names)) float64. Raise ValueError if a value is not a finite number."""
        return np.stack([self._as_numbers(name) for name in names], axis=1)

    def are_labels(self, name: str) -> bool:
        """Return True if a column contains text, or only integers."""
        column = self.columns[name]
        try:
            numbers = column.astype(np.float64)
        except (ValueError, TypeError):
            return True
        if column.dtype == object:  # text, in which 3.0 is not an integer
            return all(str(value).strip().lstrip("+-").isdigit() for value in column)
        return bool(column.dtype.kind in "iub" and np.isfinite(numbers).all())

    def labels(self, name: str) -> list[str]:
        """Return the distinct values of a column as text, sorted; integers are sorted by value."""
        found = sorted({self._as_label(name, row) for row in range(len(self.columns[name]))})
        try:
            return sorted(found, key=int)
        except ValueError:
            return found

    def label_indices(self, name: str, labels: Sequence[str]) -> np.ndarray:
        """Return the index of each row's label, (N,) int64. Raise ValueError if a label is unknown."""
        known = {label: index for index, label in enumerate(labels)}
        found = np.empty(len(self.columns[name]), np.int64)
        for row in range(len(found)):
            label = self._as_label(name, row)
            if label not in known:
                raise ValueError(f"{self._where(row)}: {name} is {label!r}, which does not occur in the training split")
            found[row] = known[label]
        return found

    def _as_numbers(self, name: str) -> np.ndarray:
        column = self.columns[name]
        try:
            numbers = column.astype(np.float64)
        except (ValueError, TypeError):
            numbers = np.array([_as_number(value) for value in column])
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if len(wrong):
            value = column[wrong[0]]
            missing = value is None or value == "" or value != value
            raise ValueError(
                f"{self._where(int(wrong[0]))}: {name} is {'missing' if missing else repr(str(value))}, but must be a "
                "finite number; fix the file, or leave the column out"
            )
        return numbers

    def _as_label(self, name: str, row: int) -> str:
        value = self.columns[name][row]
        label = "" if value is None else str(value).strip()
        if not label:
            raise ValueError(f"{self._where(row)}: {name} is missing; fix the file")
        return label

    def _where(self, row: int) -> str:
        """Return the file and the line of a row, for a message."""
        path = next(path for path, first in reversed(self.starts.items()) if first <= row)
        return f"{path}, {'row' if path.endswith('.parquet') else 'line'} {self.lines[row]}"


def read_names(path: str, delimiter: str) -> list[str]:
    """Return the names of a file's columns."""
    if path.endswith(".parquet"):
        return list(_parquet(path).schema_arrow.names)
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            return _header(csv.reader(file, delimiter=delimiter))
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line 1: {error}; fix the file") from None


def read_columns(paths: Sequence[str], names: Sequence[str], delimiter: str) -> Columns:
    """Read columns of all files. Raise ValueError if a file lacks a column, or a line has another number of fields."""
    read, starts, count = [], {}, 0
    for path in paths:
        missing = [name for name in names if name not in read_names(path, delimiter)]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]}, which the first file of the training split has")
        read.append(_read_parquet(path, names) if path.endswith(".parquet") else _read_csv(path, names, delimiter))
        starts[path] = count
        count += len(read[-1][0])
    lines, *columns = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return Columns(dict(zip(names, columns, strict=True)), lines, starts)


def _read_csv(path: str, names: Sequence[str], delimiter: str) -> list[Column]:
    """Return the line of each row, and the columns."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.reader(file, delimiter=delimiter)
            header = _header(reader)
            chosen = [header.index(name) for name in names]
            columns: list[list[str]] = [[] for _ in names]
            lines: list[int] = []
            for row in reader:
                if not row:  # an empty line
                    continue
                if len(row) != len(header):
                    raise ValueError(f"has {len(row)} fields, but the first line has {len(header)}")
                for column, index in zip(columns, chosen, strict=True):
                    column.append(row[index])
                lines.append(reader.line_num)
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}; fix the file, or set delimiter") from None
    return [np.array(lines, dtype=np.int64), *(np.array(column, dtype=object) for column in columns)]


def _header(reader: Any) -> list[str]:
    header = [name.strip() for name in next(reader, [])]
    if not header or len(set(header)) < len(header):
        raise ValueError(f"must be different column names, not {','.join(header)!r}")
    return header


def _read_parquet(path: str, names: Sequence[str]) -> list[Column]:
    """Return the number of each row, and the columns."""
    table = _parquet(path).read(columns=list(names))
    return [np.arange(1, table.num_rows + 1), *(table.column(name).to_numpy() for name in names)]


def _parquet(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path} is a Parquet file, which needs pyarrow; pip install 'experiment-runner[table]', or use CSV"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except ValueError as error:  # of pyarrow
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def _as_number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError):
        return float("nan")
