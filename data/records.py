"""Records of named fields, from files of JSON lines and Parquet files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .parquet_files import is_parquet, read_parquet_rows

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """The fields of a record, and its file and line, such as `a.jsonl, line 3`, for messages."""

    fields: Mapping[str, Any]
    position: str

    def get(self, name: str, kind: type[T]) -> T:
        """Return a field. Raise ValueError if it is missing or has another type."""
        value = self.fields.get(name)
        if value is None:
            has = ", ".join(map(str, self.fields)) or "no fields"
            raise ValueError(f"{self.position}: the field {name} is missing; the record has {has}")
        if not isinstance(value, kind):
            raise ValueError(f"{self.position}: the field {name} must be {kind.__name__}, not {type(value).__name__}")
        return value

    def label(self) -> str:
        """Return the field label as text. Raise ValueError if it is missing, or is neither text nor an integer."""
        value = self.fields.get("label")
        return str(value) if type(value) is int else self.get("label", str)


def read_records(paths: Sequence[Path]) -> Iterator[Record]:
    """Yield the records of some files in order. Raise ValueError if a line is not a JSON object in UTF-8."""
    for path in paths:
        if is_parquet(str(path)):
            for number, row in enumerate(read_parquet_rows(str(path)), 1):
                yield Record(row, f"{path}, row {number}")
            continue
        with open(path, "rb") as file:  # the lines of text would end at a form feed, too
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Record(_parse(line, position := f"{path}, line {number}"), position)


def _parse(line: bytes, position: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{position}: is not UTF-8 ({error.reason}); convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{position}: is not JSON ({error}); write one JSON object per line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{position}: is {type(fields).__name__} in JSON; write one JSON object per line")
    return fields
