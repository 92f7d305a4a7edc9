"""The files of task=predict, written piece by piece beside their place and renamed when all is there."""

import contextlib
import csv
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runner.tasks.prediction_columns import Columns

SUFFIXES = {"csv": ".csv", "parquet": ".parquet", "npy": ""}
MAX_NUMBERS = 1000  # of a sample in one output, that a table has a column each for
GROUP_ROWS, GROUP_NUMBERS = 8192, 1 << 24  # of a row group of Parquet, whichever comes first; it is in memory


class Writer(Protocol):
    """Takes the samples in the order of the data."""

    def add(self, columns: Columns) -> None:
        """Raises ValueError for samples that the format has no place for."""

    def close(self) -> None: ...


class File:
    """The file or folder `path`, which is there when `keep` was called, and else not at all."""

    def __init__(self, kind: str, path: Path, num_samples: int):
        self._path, self._partial = path, path.with_name(f".{path.name}.tmp-{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        writers: dict[str, Any] = {"csv": Csv, "parquet": Parquet, "npy": Arrays}
        self.writer: Writer = writers[kind](self._partial, num_samples)

    def keep(self) -> None:
        self.writer.close()
        self._partial.replace(self._path)

    def drop(self) -> None:
        with contextlib.suppress(Exception):  # it has been told what is wrong
            self.writer.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.unlink(missing_ok=True)


class Csv:
    """Numbers as the shortest text that is read as the same number."""

    def __init__(self, path: Path, num_samples: int):
        self._file = path.open("w", newline="")
        self._writer, self._shapes = csv.writer(self._file), _Shapes("csv", widest=MAX_NUMBERS)
        self._begun = False

    def add(self, columns: Columns) -> None:
        self._shapes.check(columns)
        flat = flatten(columns)
        if not self._begun:
            self._writer.writerow(flat)
            self._begun = True
        self._writer.writerows(zip(*(_texts(values) for values in flat.values()), strict=True))

    def close(self) -> None:
        self._file.close()


class Parquet:
    """A column for each number, or a list where a sample has many, or not always as many; then also its shape."""

    def __init__(self, path: Path, num_samples: int):
        self._path, self._kept, self._rows, self._numbers = path, list[Columns](), 0, 0
        self._writer: Any = None
        self._lists: set[str] = set()  # columns of lists, which later samples of one length have too

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
            alike = parts[0].ndim <= 2 and len({part.shape[1:] for part in parts}) == 1
            if alike and parts[0][0].size <= MAX_NUMBERS and name not in self._lists:
                arrays |= {key: pyarrow.array(values) for key, values in flatten({name: np.concatenate(parts)}).items()}
                continue
            self._lists.add(name)
            numbers = pyarrow.array(np.concatenate([part.ravel() for part in parts]))
            sizes = np.concatenate([np.full(len(part), part[0].size) for part in parts])
            arrays[name] = pyarrow.ListArray.from_arrays(pyarrow.array(_offsets(sizes), pyarrow.int32()), numbers)
            shapes = [list(part.shape[1:]) for part in parts for _ in range(len(part))]
            arrays[f"{name}_shape"] = pyarrow.array(shapes, pyarrow.list_(pyarrow.int64()))
        table = pyarrow.table(arrays)
        if self._writer is None:
            self._writer = ParquetWriter(self._path, table.schema)
        if table.schema != self._writer.schema:
            raise ValueError(
                "predict.format=parquet: samples further on have outputs of other shapes than the first ones; make "
                "collate pad all batches to one length"
            )
        self._writer.write_table(table)
        self._kept, self._rows, self._numbers = [], 0, 0

    def close(self) -> None:
        if self._kept:
            self._write()
        if self._writer is not None:
            self._writer.close()


class Arrays:
    """A folder with NAME.npy of each column, (number of samples, ...), which np.load can map into memory."""

    def __init__(self, path: Path, num_samples: int):
        self._path, self._num_samples, self._place = path, num_samples, 0
        self._shapes = _Shapes("npy", widest=None)
        self._arrays: dict[str, Any] = {}
        path.mkdir()

    def add(self, columns: Columns) -> None:
        self._shapes.check(columns)
        for name, values in columns.items():
            if name not in self._arrays:
                shape = (self._num_samples, *values.shape[1:])
                self._arrays[name] = np.lib.format.open_memmap(
                    self._path / f"{name}.npy", mode="w+", dtype=values.dtype, shape=shape
                )
            self._arrays[name][self._place : self._place + len(values)] = values
        self._place += len(columns["index"])

    def close(self) -> None:
        for array in self._arrays.values():
            array.flush()
        self._arrays.clear()


class _Shapes:
    """That all samples have the columns of the first ones."""

    def __init__(self, kind: str, widest: int | None):
        self._kind, self._widest = kind, widest
        self._first: dict[str, Any] | None = None

    def check(self, columns: Columns) -> None:
        found = {name: values.shape[1:] for name, values in columns.items()}
        for name, values in columns.items():
            if self._widest is not None and values[0].size > self._widest:
                raise ValueError(
                    f"predict.format={self._kind}: {name} has {values[0].size:,} numbers for a sample, and a table "
                    f"ends at {self._widest:,}; try predict.format=npy or parquet"
                )
        if self._first is None:
            self._first = found
        if found != self._first:
            name = next(name for name in {**found, **self._first} if found.get(name) != self._first.get(name))
            raise ValueError(
                f"predict.format={self._kind}: {name} is of shape {list(found.get(name, ()))} for some samples and "
                f"{list(self._first.get(name, ()))} for others; try predict.format=parquet"
            )


def flatten(columns: Columns) -> Columns:
    """A column for each number of a sample: output_0, output_1, ... of (N, 2), output_0_0, ... of (N, 1, 1)."""
    flat: Columns = {}
    for name, values in columns.items():
        for place in np.ndindex(values.shape[1:]):
            flat["_".join([name, *map(str, place)])] = values[(slice(None), *place)]
    return flat


def _texts(values: np.ndarray[Any, Any]) -> list[Any]:
    """numpy writes a float32 by the digits that it has; as a Python float it would have twice as many."""
    if values.dtype == np.bool_:
        values = values.astype(np.int64)
    exact = values.dtype == np.float64 or values.dtype.kind in "iu"
    return values.tolist() if exact else [str(value) for value in values]


def _offsets(sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(sizes)])
