"""What another rank says and writes of a run's failure where rank 0 has gone or hangs."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runner.runs.console import LOG
from runner.runs.run_directory import RESULT, read_result, write_whole
from runner.runs.strict_json import dumps


def recorded_from_now(directory: Path) -> Callable[[], bool]:
    """Which tells whether the run's record says since then how it has ended."""
    before = written_at(directory)

    def is_recorded() -> bool:
        result = read_result(directory)
        return result is not None and result.get("state") != "running" and written_at(directory) != before

    return is_recorded


def written_at(directory: Path) -> int | None:
    """When the run's record was written last, in ns; None where there is none."""
    with suppress(OSError):
        return (directory / RESULT).stat().st_mtime_ns
    return None


def tell_failure(directory: Path, text: str) -> None:
    """Say it on the terminal, and put it where rank 0 would have, unless that has told its own end."""
    with suppress(OSError):  # nobody reads it any more
        print(f"error: {text.rstrip()}", file=sys.stderr, flush=True)
    result = read_result(directory)
    if result is None or result["state"] != "running":
        return
    # On a full disk the rank still ends, and says so by its exit status.
    with suppress(OSError), (directory / LOG).open("a") as file:
        file.write(f"error: {text.rstrip()}\n")
    with suppress(OSError):
        write_whole(directory / RESULT, dumps(result | {"state": "failed", "error": text}, indent=1) + "\n")
