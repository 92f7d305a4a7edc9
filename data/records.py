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

    def get(self, name: str, expected_type: type[T]) -> T:
        """Return a field. Raise ValueError if it is missing, null or of another type."""
        if name not in self.fields:
            has = ", ".join(map(str, self.fields)) or "no fields"
            raise ValueError(f"{self.position}: the field {name} is missing; the record has {has}")
        value = self.fields[name]
        if value is None:
            raise ValueError(f"{self.position}: the field {name} is null; remove the record, or fill in the value")
        if not isinstance(value, expected_type):
            expected, found = expected_type.__name__, type(value).__name__
            raise ValueError(f"{self.position}: the field {name} must be {expected}, not {found}")
        return value

    def label(self) -> str | int:
        """Return the field label. Raise ValueError if it is missing, or neither text nor an integer."""
        value = self.fields.get("label")
        return value if type(value) is int else self.get("label", str)


def read_records(paths: Sequence[Path]) -> Iterator[Record]:
    """Yield the records of some files in order. Raise ValueError if a file or a line of it cannot be read."""
    for path in paths:
        try:
            yield from _read_file(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _read_file(path: Path) -> Iterator[Record]:
    if is_parquet(str(path)):
        for number, row in enumerate(read_parquet_rows(str(path)), 1):
            yield Record(row, f"{path}, row {number}")
        return
    with open(path, "rb") as file:  # the lines of text would end at a form feed, too
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Record(_parse(line, position := f"{path}, line {number}"), position)


def _parse(line: bytes, position: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:
            json.dumps(fields, ensure_ascii=False).encode()  # raises for one half of a surrogate pair
    except UnicodeDecodeError as error:
        raise ValueError(f"{position}: is not UTF-8 ({error.reason}); convert the file to UTF-8") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ValueError(f"{position}: {half} is one half of a surrogate pair; remove it, or write both") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{position}: is not JSON ({error}); write one JSON object per line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{position}: is {type(fields).__name__} in JSON; write one JSON object per line")
    return fields
