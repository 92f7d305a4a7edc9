"""The examination of a rank that does not respond, by a rank on its machine or by its own watchdog."""

import contextlib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from runner.distributed.failures.heartbeat import RankProcess, read_position, read_stacks, state_of

STACKS_S = 2.0  # for a hung rank to write its stacks
KILLED, STOPPED = "it was killed with SIGKILL", ", stopped by a signal"
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (.+)')
_EXCHANGES = ("/runner/distributed/collectives.py", "/runner/distributed/local/")
_WAITING = ("/torch/distributed/", *_EXCHANGES)  # files in which a rank waits for others
_INTERNAL = ("/torch/", "<frozen", *_EXCHANGES)  # files that describe a rank's position less well than their callers


class Finding(NamedTuple):
    """The result of an examination."""

    line: str  # names the rank, its position and how it was terminated
    stacks: str = ""  # the stack of the main thread, as shown to the user
    is_waiting: bool = False  # the rank waits for others, and so is not the cause


def examine(process: RankProcess, timeout_s: float, stacks_dir: Path | None) -> Finding:
    """Examine an unresponsive rank on this machine, and save its stacks. The caller must kill the rank."""
    state = state_of(process)
    if state == "exited":
        return Finding(died(process))
    line = no_response(process, timeout_s, state)
    stacks = save_stacks(process, stacks_dir)
    if not stacks:
        return Finding(f"{line}, and it did not write its stacks; {KILLED}")
    main_thread = stacks.split("\n\n")[0]
    frames = _FRAME.findall(main_thread) or [("an unknown file", "0", "an unknown function")]
    is_waiting = any(_is_in(file, _WAITING) for file, _, _ in frames[:3])
    file, number, function = next((frame for frame in frames if not _is_in(frame[0], _INTERNAL)), frames[0])
    line += f", it {'waits for others' if is_waiting else 'hangs'} at {file}:{number} in {function}"
    if stacks_dir is not None:
        line += f"; its stacks are in {_stacks_file(process, stacks_dir)}"
    header = f"stack of rank {process.rank} on {process.host}, the innermost call first:"
    return Finding(f"{line}; {KILLED}", f"{header}\n{main_thread}", is_waiting)


def no_response(process: RankProcess, timeout_s: float, state: str) -> str:
    """Return the start of a line that names an unresponsive rank on this machine. state: as of `state_of`."""
    position = describe(*read_position(process)) + (STOPPED if state == "stopped" else "")
    return f"no response from rank {process.rank} on {process.host} within backend.timeout_s={timeout_s:g}: {position}"


def died(process: RankProcess) -> str:
    """Return a line that names a rank whose process has exited."""
    return f"no response from rank {process.rank} on {process.host}: its process {process.pid} has exited"


def describe(position: str, since_s: float) -> str:
    """Return for example "in step 12 for 20 s"."""
    return f"in {position or 'an unknown position'} for {since_s:.0f} s"


def save_stacks(process: RankProcess, directory: Path | None) -> str:
    """Return the stacks of a rank on this machine, the main thread first, and write them to a file in `directory`."""
    threads = read_stacks(process, STACKS_S).strip().split("\n\n")
    stacks = "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))
    if stacks and directory is not None:
        with contextlib.suppress(OSError):  # a full disk
            directory.mkdir(exist_ok=True)
            file = _stacks_file(process, directory)
            file.unlink(missing_ok=True)  # another user may have created a link
            with file.open("x") as opened:
                opened.write(stacks + "\n")
    return stacks


def raised_at(trace: TracebackType | None) -> str:
    """Return FILE:LINE in FUNCTION of the innermost frame that belongs neither to torch nor to an exchange."""
    frames = reversed(traceback.extract_tb(trace))
    return position_in((frame.filename, frame.lineno or 0, frame.name) for frame in frames)


def position_in(calls: Iterable[tuple[str, int, str]]) -> str:
    """Return FILE:LINE in FUNCTION of the first of these calls that is in neither torch nor an exchange; "" if none."""
    outside = (call for call in calls if not _is_in(call[0], _INTERNAL))
    return next((f"{file}:{line} in {function}" for file, line, function in outside), "")


def _stacks_file(process: RankProcess, directory: Path) -> Path:
    return directory / f"rank_{process.rank}.stacks.txt"


def _is_in(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)
