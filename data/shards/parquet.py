"""Parquet shards: the rows of a row group as the samples of a block, each with a member for each column."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = ".parquet"


def row_groups(file: Any) -> list[tuple[int, int, int]]:
    """Return the number of rows up to the end of each row group of a file, and its first byte and its end."""
    with _opened(file) as parquet:
        found, num_rows = [], 0
        for number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(number)
            columns = [group.column(column) for column in range(group.num_columns)]
            first = min(each.dictionary_page_offset or each.data_page_offset for each in columns)
            num_rows += group.num_rows
            found.append((num_rows, first, first + sum(each.total_compressed_size for each in columns)))
        return found


def read_rows(file: Any, group: int) -> Iterator[dict[str, bytes]]:
    """Yield the members of each row of a row group: text as NAME.txt, bytes as NAME, and other values as NAME.json.

    Raise ValueError if the file cannot be read, or pyarrow is missing.
    """
    with _opened(file) as parquet:
        table = parquet.read_row_group(group, use_threads=False)
        for row in table.to_pylist():
            yield dict(_member(name, value) for name, value in row.items() if value is not None)


def _member(name: str, value: Any) -> tuple[str, bytes]:
    if isinstance(value, bytes):
        return name, value
    if isinstance(value, str):
        return f"{name}.txt", value.encode()
    return f"{name}.json", json.dumps(value, default=str).encode()


@contextmanager
def _opened(file: Any) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow; pip install 'experiment-runner[table]'") from None
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise EOFError(" ".join(str(error).split())) from None
