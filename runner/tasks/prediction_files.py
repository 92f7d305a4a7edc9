"""The columns and files of task=predict, written piece by piece to a temporary path and renamed when complete."""

import contextlib
import csv
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.errors import JobFailed
from runner.input.pytree import map_tensors, named_tensors
from runner.objectives.supervised import resolve_class_dim
from runner.records.run_files import dumps

Columns = dict[str, np.ndarray[Any, Any]]  # arrays of shape (num_samples, ...) by name

INDEX, TARGET, PREDICTION, PROBABILITY, OUTPUT = "index", "target", "prediction", "probability", "output"
SUFFIXES = {"csv": ".csv", "parquet": ".parquet", "npy": "", "jsonl": ".jsonl"}
MAX_NUMBERS = 1000  # an output with more numbers per sample has no column for each
GROUP_NUMBERS = 1 << 24  # in a Parquet row group, which is kept in memory


def columns_of(outputs: Any, targets: Any, indices: Sequence[int], by_sample: Collection[str] = ()) -> Columns:
    """Return the columns index, target, prediction, probability and output, in this order.

    Mappings and sequences have a column for each tensor, such as output.size. If a target is a class (integers in the
    output's shape without its class dim), `prediction` is the class of the largest output and `probability` its softmax
    probability; other targets have neither column. `by_sample` names those of TARGET and OUTPUT that are lists with one
    element per sample: a last column of these elements, which may have any structure and shapes. Raises JobFailed if a
    tensor does not have one row per sample.
    """
    listed = {name: tree for name, tree in ((TARGET, targets), (OUTPUT, outputs)) if name in by_sample}
    outputs, targets = (None if OUTPUT in listed else outputs), (None if TARGET in listed else targets)
    found, expected = _rows(outputs, len(indices), "outputs"), _rows(targets, len(indices), "targets")
    classes = {path: _classify(found[path], target) for path, target in expected.items() if path in found}
    predicted = {path: pair for path, pair in classes.items() if pair is not None}
    columns = {INDEX: torch.tensor(indices, dtype=torch.int64)}
    columns |= {TARGET + path: tensor for path, tensor in expected.items()}
    columns |= {PREDICTION + path: classes for path, (classes, _) in predicted.items()}
    columns |= {PROBABILITY + path: probability for path, (_, probability) in predicted.items()}
    columns |= {OUTPUT + path: tensor for path, tensor in found.items()}
    return {name: _as_array(tensor) for name, tensor in columns.items()} | {
        # np.array would combine lists of equal lengths.
        name: np.fromiter((map_tensors(lambda t: _as_array(t).tolist(), sample) for sample in tree), dtype=object)
        for name, tree in listed.items()
    }


def _rows(tree: Any, num_samples: int, what: str) -> dict[str, Tensor]:
    named = named_tensors(tree)
    for path, tensor in named.items():
        if not tensor.dim() or len(tensor) != num_samples:
            raise JobFailed(
                f"{what}{path} must have one row per sample, and has the shape {list(tensor.shape)} for {num_samples} "
                "samples"
            )
    return named


def _classify(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the classes of the largest outputs and their probabilities, or None if targets are not classes."""
    if target.is_floating_point() or not output.is_floating_point() or output.dim() != target.dim() + 1:
        return None
    try:
        dim = resolve_class_dim(output, target)
    except ValueError:  # ambiguous without the loss's class_dim
        return None
    if output.movedim(dim, -1).shape[:-1] != target.shape or output.shape[dim] == 1:
        return None
    wide = output.double() if output.dtype == torch.float64 else output.float()
    probability, classes = wide.softmax(dim).max(dim)
    return classes, probability


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):  # autocast's types; numpy has no bfloat16
        tensor = tensor.float()
    return tensor.contiguous().numpy()


@contextlib.contextmanager
def writing(kind: str, path: Path, num_samples: int) -> Iterator["CsvTable | Parquet | Arrays | JsonLines"]:
    """Yield the writer of the file or directory at `path`, which exists only if the context ends without an exception.

    The methods of a writer raise JobFailed if the format cannot store the samples.
    """
    writers: dict[str, Any] = {"csv": CsvTable, "parquet": Parquet, "npy": Arrays, "jsonl": JsonLines}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        partial = Path(directory) / path.name
        writer = writers[kind](partial, num_samples)
        try:
            try:
                yield writer
            finally:
                writer.close()
            partial.replace(path)
        except OSError as error:
            error.filename = str(path)  # an error of `write` names no file
            raise


class CsvTable:
    """A CSV file. Each number is written as the shortest text that is parsed as the same number."""

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


class JsonLines:
    """A file with one JSON object per sample. The shapes of the values may differ between samples."""

    def __init__(self, path: Path, num_samples: int):
        self._file = path.open("w")

    def add(self, columns: Columns) -> None:
        for row in zip(*(values.tolist() for values in columns.values()), strict=True):
            self._file.write(dumps(dict(zip(columns, row, strict=True))) + "\n")

    def close(self) -> None:
        self._file.close()


class Parquet:
    """A Parquet file with a column per number.

    An output with many numbers, or with a varying number, is a column of lists and a column of their shapes.
    """

    def __init__(self, path: Path, num_samples: int):
        self._path, self._kept, self._numbers = path, list[Columns](), 0
        self._writer: Any = None
        self._lists: set[str] = set()  # columns of lists, also for later samples of equal length

    def add(self, columns: Columns) -> None:
        self._kept.append(columns)
        self._numbers += sum(values.size for values in columns.values())
        if self._numbers >= GROUP_NUMBERS:
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
        self._kept, self._numbers = [], 0

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
    """Raise JobFailed unless the columns have the shapes in `first`. If `first` is empty, add their shapes to it."""
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


def _texts(values: np.ndarray[Any, Any]) -> list[str]:
    """Return the shortest texts: str() of numpy's float32 has fewer digits than that of the same Python float."""
    return [str(value) for value in (values.astype(np.int64) if values.dtype == np.bool_ else values)]
