"""Columns and rows of Parquet files, read by pyarrow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

ENDINGS = (".parquet", ".pq", ".parq")
MAGIC = b"PAR1"  # the first bytes of a Parquet file


class UnreadableColumn(ValueError):
    """A column of an intact file has missing values or an unsuitable type; the message names it."""


def is_parquet(path: str) -> bool:
    """Return True if a file is Parquet by its ending or its content."""
    if path.lower().endswith(ENDINGS):
        return True
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_parquet_names(path: str) -> tuple[list[str], list[str]]:
    """Return the names of the columns, and of those that were the index of a pandas data frame."""
    with _opened(path) as file:
        schema = file.schema_arrow
        index = (schema.pandas_metadata or {}).get("index_columns", [])
        return list(schema.names), [name for name in index if isinstance(name, str)]  # a range is not stored


def read_parquet(path: str, names: Sequence[str]) -> list[np.ndarray]:
    """Return the number of each row, counted from 1, and the columns. Raise ValueError if a value is missing."""
    with _opened(path) as file:
        table = file.read(columns=list(names))
        columns = [_values(path, name, table.column(name)) for name in names]
    return [np.arange(1, table.num_rows + 1), *columns]


def read_parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield each row as a mapping of the columns' names to values; a missing value is None."""
    with _opened(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _values(path: str, name: str, column: Any) -> np.ndarray:
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)  # to_numpy would replace nulls by other values
    if column.null_count:
        # Checked before to_numpy, which converts integers with nulls to floating-point values.
        row = column.is_null().index(True).as_py() + 1
        raise UnreadableColumn(f"{path}, row {row}: {name} is missing; remove the row, or fill in the value")
    is_text = types.is_string(column.type) or types.is_large_string(column.type) or types.is_string_view(column.type)
    is_number = types.is_integer(column.type) or types.is_floating(column.type) or types.is_decimal(column.type)
    if not (is_text or is_number or types.is_boolean(column.type) or types.is_null(column.type)):
        raise UnreadableColumn(
            f"{path}: {name} has the type {column.type}, but must contain numbers, booleans or text; convert it, or "
            "leave the column out"
        )
    values: np.ndarray = column.to_numpy()
    return values


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path} is a Parquet file, which needs pyarrow; pip install 'experiment-runner[table]', or convert it"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except UnreadableColumn:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # also text that is not UTF-8
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {reason}") from None
