"""The files of task=predict, written piece by piece to a temporary path and renamed when complete."""

import contextlib
import csv
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runner.errors import JobFailed
from runner.tasks.prediction_columns import Columns

SUFFIXES = {"csv": ".csv", "parquet": ".parquet", "npy": ""}
MAX_NUMBERS = 1000  # numbers per sample and output that get a column each
GROUP_ROWS, GROUP_NUMBERS = 8192, 1 << 24  # limits of a Parquet row group, which is kept in memory


@contextlib.contextmanager
def writing(kind: str, path: Path, num_samples: int) -> Iterator["Csv | Parquet | Arrays"]:
    """Yield the writer of the file or directory at `path`, which exists only if the context ends without an exception.

    The methods of a writer raise JobFailed if the format cannot store the samples.
    """
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    writers: dict[str, type[Csv] | type[Parquet] | type[Arrays]] = {"csv": Csv, "parquet": Parquet, "npy": Arrays}
    writer = writers[kind](partial, num_samples)
    try:
        yield writer
        writer.close()
    except BaseException:
        with contextlib.suppress(Exception):  # the error above is reported
            writer.close()
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


class Csv:
    """A CSV file with each number as the shortest text that reads back as the same number."""

    def __init__(self, path: Path, num_samples: int):
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._shapes: dict[str, list[int]] = {}

    def add(self, columns: Columns) -> None:
        for name, values in columns.items():
            if values[0].size > MAX_NUMBERS:
                raise JobFailed(
                    f"predict.format=csv: {name} has {values[0].size:,} numbers per sample, and a table may have "
                    f"{MAX_NUMBERS:,}; try predict.format=npy or parquet"
                )
        _check_shapes("csv", columns, self._shapes)
        flat = flatten(columns)
        if not self._file.tell():
            self._writer.writerow(flat)
        self._writer.writerows(zip(*(_texts(values) for values in flat.values()), strict=True))

    def close(self) -> None:
        self._file.close()


class Parquet:
    """A Parquet file with a column per number.

    An output with many numbers, or with a varying number of them, is a column of lists with a column of shapes.
    """

    def __init__(self, path: Path, num_samples: int):
        self._path, self._kept, self._rows, self._numbers = path, list[Columns](), 0, 0
        self._writer: Any = None
        self._lists: set[str] = set()  # columns of lists, also for later samples of equal length

    def add(self, columns: Columns) -> None:
        self._kept.append(columns)
        self._rows += len(next(iter(columns.values())))
        self._numbers += sum(values.size for values in columns.values())
        if self._rows >= GROUP_ROWS or self._numbers >= GROUP_NUMBERS:
            self._write()

    def _write(self) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        arrays: dict[str, Any] = {}
        for name in self._kept[0]:
            parts = [columns[name] for columns in self._kept]
            is_uniform = parts[0].ndim <= 2 and len({part.shape[1:] for part in parts}) == 1
            if is_uniform and parts[0][0].size <= MAX_NUMBERS and name not in self._lists:
                arrays |= {key: pyarrow.array(values) for key, values in flatten({name: np.concatenate(parts)}).items()}
                continue
            self._lists.add(name)
            arrays[name] = pyarrow.array([sample.ravel() for part in parts for sample in part])
            shapes = [list(part.shape[1:]) for part in parts for _ in range(len(part))]
            arrays[f"{name}_shape"] = pyarrow.array(shapes, pyarrow.list_(pyarrow.int64()))
        table = pyarrow.table(arrays)
        if self._writer is None:
            self._writer = ParquetWriter(self._path, table.schema)
        if table.schema != self._writer.schema:
            raise JobFailed(
                "predict.format=parquet: later samples have outputs of other shapes than the first ones; let collate "
                "pad all batches to one length"
            )
        self._writer.write_table(table)
        self._kept, self._rows, self._numbers = [], 0, 0

    def close(self) -> None:
        if self._kept:
            self._write()
        if self._writer is not None:
            self._writer.close()


class Arrays:
    """A directory with NAME.npy for each column, of shape (num_samples, ...), which np.load can memory-map."""

    def __init__(self, path: Path, num_samples: int):
        self._path, self._num_samples, self._position = path, num_samples, 0
        self._shapes: dict[str, list[int]] = {}
        self._arrays: dict[str, Any] = {}
        path.mkdir()

    def add(self, columns: Columns) -> None:
        _check_shapes("npy", columns, self._shapes)
        for name, values in columns.items():
            if name not in self._arrays:
                shape = (self._num_samples, *values.shape[1:])
                self._arrays[name] = np.lib.format.open_memmap(
                    self._path / f"{name}.npy", mode="w+", dtype=values.dtype, shape=shape
                )
            self._arrays[name][self._position : self._position + len(values)] = values
        self._position += len(columns["index"])

    def close(self) -> None:
        for array in self._arrays.values():
            array.flush()
        self._arrays.clear()


def _check_shapes(kind: str, columns: Columns, first: dict[str, list[int]]) -> None:
    """Raise JobFailed unless the columns have the shapes of the first samples, which are added to an empty `first`."""
    found = {name: list(values.shape[1:]) for name, values in columns.items()}
    if not first:
        first.update(found)
    for name in {**found, **first}:
        if found.get(name) != first.get(name):
            raise JobFailed(
                f"predict.format={kind}: {name} has the shape {found.get(name)} for some samples and "
                f"{first.get(name)} for others; try predict.format=parquet"
            )


def flatten(columns: Columns) -> Columns:
    """Return a column per number of a sample: output_0 and output_1 for (N, 2), output_0_0 for (N, 1, 1)."""
    flat: Columns = {}
    for name, values in columns.items():
        for index in np.ndindex(values.shape[1:]):
            flat["_".join([name, *map(str, index)])] = values[(slice(None), *index)]
    return flat


def _texts(values: np.ndarray[Any, Any]) -> list[Any]:
    """Return the shortest texts: numpy prints a float32 with its own digits, Python as a float64 with twice as many."""
    if values.dtype == np.bool_:
        values = values.astype(np.int64)
    exact = values.dtype == np.float64 or values.dtype.kind in "iu"
    return values.tolist() if exact else [str(value) for value in values]
