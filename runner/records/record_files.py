"""Reading and writing the JSON, JSON lines and YAML files of runs and sweeps.

Non-finite numbers are stored as `null`, because JSON cannot represent them, and are read back as NaN. The readers check
the types of the values, because a run directory may belong to another user or may be damaged.
"""

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from runner.errors import InputError

METRICS = "metrics.jsonl"
_WRITTEN = re.compile(rb'(?:\{"step": \d+, "epoch": [^\n]*\n)*')
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast: sweeps may have many jobs


def dumps(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for non-finite numbers. The options are those of json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # a number is not finite; a circular reference is reported by the next call
        return json.dumps(_replace_non_finite(value), allow_nan=False, **options)


def parse_metrics(metrics: Any) -> dict[str, float]:
    """Return the numbers of a mapping that was read from JSON, with NaN for null. Other values are left out."""
    if not isinstance(metrics, Mapping):
        return {}
    values = {name: math.nan if value is None else value for name, value in metrics.items()}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's content. After a crash, the file has either the old or the new content, never a part of it.

    Bytes that were decoded with `surrogateescape` are written unchanged.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("w", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append_json_lines(path: Path, *lines: Mapping[str, Any]) -> None:
    """Append the lines with one write, so that concurrent processes do not interleave, and sync the file.

    If a crash has truncated the last line of the file, the new lines start below it.
    """
    text = "".join(dumps(line) + "\n" for line in lines)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        is_truncated = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * is_truncated + text).encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines. Lines that are not JSON, as after a crash, are skipped.

    Raises OSError, and InputError if a line is JSON but not an object.
    """
    with path.open(errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if not isinstance(line, dict):
                raise InputError(f"{path}, line {number}: {text.strip()[:40]} is not a JSON object; remove the line")
            yield line


def read_metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each line of metrics.jsonl, NaN for null. Raises InputError for a line without a step."""
    path = directory / METRICS
    for line in read_json_lines(path) if path.exists() else ():
        if type(line.get("step")) is not int:
            raise InputError(f"{path}: {str(line)[:40]} has no step; remove the line")
        yield parse_metrics(line)


def check_metrics(directory: Path) -> None:
    """Raise InputError as `read_metrics`. Lines as the runner writes them are not parsed."""
    with suppress(FileNotFoundError):
        if not _WRITTEN.fullmatch(read_bytes(directory / METRICS)):
            deque(read_metrics(directory), maxlen=0)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file. Raises InputError if the file contains anything else."""
    found = _parse(path)
    if not isinstance(found, dict):
        raise InputError(f"{path} must contain a mapping; restore the file")
    return found


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file. Raises OSError. Faster than `Path.read_bytes`, for many small files."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def read_string_list(path: Path) -> list[str]:
    """Return the list of strings in a YAML file. Raises InputError if the file contains anything else."""
    found = _parse(path)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise InputError(f"{path} must contain a list of strings; restore the file, or name another run")
    return found


def _parse(path: Path) -> Any:
    try:
        text = read_bytes(path).decode()
        return json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=SAFE_LOADER)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read ({reason[:200]}); restore the file") from None


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(inner) for inner in value]
    return value
