"""Columns of CSV and Parquet files, and their values."""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from .parquet_files import is_parquet, read_parquet, read_parquet_names

INDEX = re.compile(r"(Unnamed: \d+\S*|__index_level_\d+__)?")  # names of index columns in files that pandas has written
# How pandas, R and collections of datasets write missing values. "None" is a label.
MISSING = {"", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NaT", "NULL", "null"}

Column = np.ndarray  # (N,) of numbers, or of text as objects


@dataclass(frozen=True)
class Columns:
    """The concatenated columns of some files."""

    columns: dict[str, Column]
    lines: np.ndarray  # (N,), for each row its first line in a CSV file, or its number in a Parquet file, from 1
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
                raise ValueError(f"{self._where(row)}: {name} is {label!r}, which no training row has")
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
        if label in MISSING:
            fix = f" ({label}); remove the row, or rename the label" if label else "; fix the file"
            raise ValueError(f"{self._where(row)}: {name} is missing{fix}")
        return label

    def _where(self, row: int) -> str:
        """Return the file and the line of a row, for a message."""
        path = next(path for path, first in reversed(self.starts.items()) if first <= row)
        return f"{path}, {'row' if is_parquet(path) else 'line'} {self.lines[row]}"


def read_names(path: str, delimiter: str) -> tuple[list[str], list[str]]:
    """Return the names of a file's columns, and of those that contain the index of its rows.

    The latter are columns without a name, columns that pandas has named, and the index that a Parquet file records.
    """
    names, index = read_parquet_names(path) if is_parquet(path) else (_read_header(path, delimiter), [])
    repeated = [name for name, count in Counter(names).items() if count > 1 and name]
    if repeated or not names:
        problem = (
            f"has {len(names)} columns, of which several are called {repeated[0]}" if names else "has no column names"
        )
        raise ValueError(f"{path} {problem}; fix the file")
    return names, [name for name in names if name in index or INDEX.fullmatch(name)]


def read_columns(paths: Sequence[str], names: Sequence[str], delimiter: str) -> Columns:
    """Read columns of all files. Raise ValueError if a file lacks a column, or a line has another number of fields."""
    read, starts, count = [], {}, 0
    for path in paths:
        found, _ = read_names(path, delimiter)
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"{path} has no column {missing[0]}, which the first file of the training split has")
        read.append(read_parquet(path, names) if is_parquet(path) else _read_csv(path, names, delimiter))
        starts[path] = count
        count += len(read[-1][0])
    lines, *columns = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return Columns(dict(zip(names, columns, strict=True)), lines, starts)


def _read_csv(path: str, names: Sequence[str], delimiter: str) -> list[Column]:
    """Return the line of each row, and the columns."""
    header = _read_header(path, delimiter)
    chosen = [header.index(name) for name in names]
    columns: list[list[str]] = [[] for _ in names]
    lines: list[int] = []
    for line, row in itertools.islice(_read_rows(path, delimiter), 1, None):
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {line}: has {len(row)} fields, but the first line has {len(header)}; fix the file, or "
                "set delimiter"
            )
        for column, index in zip(columns, chosen, strict=True):
            column.append(row[index])
        lines.append(line)
    return [np.array(lines, dtype=np.int64), *(np.array(column, dtype=object) for column in columns)]


def _read_header(path: str, delimiter: str) -> list[str]:
    _, header = next(_read_rows(path, delimiter), (1, []))
    return [name.strip() for name in header]


def _read_rows(path: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row and its first line; text in quotation marks may have several lines."""
    line = 1
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as error:  # raised up to 8 KiB before the reader reaches the line
                raise ValueError(
                    f"{path}, line {_line_without_utf8(path)}: is not UTF-8 ({error.reason}); convert the file to UTF-8"
                ) from None
            except csv.Error as error:
                raise ValueError(f"{path}, line {line}: {error}; fix the file, or set delimiter") from None
            yield line, row
            line = reader.line_num + 1


def _line_without_utf8(path: str) -> int:
    number = 1
    # Latin-1 keeps each byte, and Python recognizes all line ends only in text; no byte of UTF-8 in a line is one.
    with open(path, encoding="latin-1") as file, suppress(UnicodeDecodeError):
        for content in file:
            content.encode("latin-1").decode()
            number += 1
    return number


def _as_number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError):
        return float("nan")
