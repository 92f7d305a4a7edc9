"""The first start of runs and sweeps, as recorded in UTC, and the order of runs and sweeps by this time."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.records.attempts import read_attempts
from runner.records.ledger import LEDGER
from runner.records.run_files import read_json_lines, read_mapping
from runner.records.run_record import RESULT
from runner.records.settings import OVERRIDES

STAMP = "%Y%m%d-%H%M%S"  # in the name of a directory, in local time
_FILES = (OVERRIDES, LEDGER)
MAX_TIME = 2**37  # seconds since 1970, in the year 6325


def started_at(directory: Path, recorded: str = "") -> float | None:
    """Return the first start of a run or a sweep in seconds since 1970, or None if the directory is new.

    recorded: the time in result.json, if the caller has read it. If a directory has no recorded time, the local time
    in its name is used, or else the modification time of its files.
    """
    for time in chain([recorded], _recorded_times(directory)):
        with suppress(OverflowError, TypeError, ValueError):
            number = time if type(time) in (int, float) else datetime.fromisoformat(time).timestamp()
            if 0 <= number < MAX_TIME:
                return float(number)
    return None


def in_order(directories: Iterable[Path]) -> list[Path]:
    """Return the runs and sweeps in the order in which they were started. A job follows its sweep."""
    times = {path: started_at(path) or 0.0 for path in directories}

    def key(path: Path) -> tuple[float, list[tuple[int, str]]]:
        parts = re.findall(r"(\d+)|(\D+)", str(path))  # job 9 precedes job 10
        return times[path], [(int(number or 0), text) for number, text in parts]

    return sorted(times, key=key)


def _recorded_times(directory: Path) -> Iterator[Any]:
    with suppress(InputError):
        yield read_mapping(f"{directory}/{RESULT}").get("started")
    try:
        yield next((line["at"] for line in read_json_lines(directory / LEDGER) if "at" in line), None)
    except (OSError, InputError):
        with suppress(InputError):
            yield from [attempt.started for attempt in read_attempts(directory)]
    for stamp in reversed(re.findall(r"\d{8}-\d{6}", f"{directory.parent.name}/{directory.name}")):
        with suppress(ValueError):
            yield datetime.strptime(stamp, STAMP).timestamp()
    yield from ((directory / name).stat().st_mtime for name in _FILES if (directory / name).exists())
