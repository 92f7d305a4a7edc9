"""The examination of a rank that does not respond, by a rank on its machine or by its own watchdog."""

import json
import re
import signal
import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from runner.distributed.failures.heartbeat import RankProcess, read_position, read_stacks, send_signal, state_of

STACKS_S = 2.0  # for a hung rank to write its stacks
KILLED, STOPPED = "it was killed with SIGKILL", ", stopped by a signal"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_EXCHANGES = tuple(
    f"/runner/distributed/{name}.py"
    for name in ("collectives", "local/exchange", "local/sockets", "local/shared_memory")
)
_WAITING = ("/torch/distributed/", *_EXCHANGES)  # files in which a rank waits for others
_INTERNAL = ("/torch/", "<frozen", *_EXCHANGES)  # files that describe a rank's position less well than their callers
_NUM_SHOWN = 60  # lines of stacks in a message; the file has all


class Finding(NamedTuple):
    """The result of an examination.

    Attributes:
        line: names the rank, its position and how it was terminated.
        stacks: as shown to the user.
        is_waiting: the rank waits for others, and so is not the cause.
    """

    line: str
    stacks: str = ""
    is_waiting: bool = False

    def dump(self) -> str:
        return json.dumps(self)

    @staticmethod
    def load(text: bytes) -> "Finding":
        return Finding(*json.loads(text))


def examine_and_kill(process: RankProcess, timeout_s: float, stacks_dir: Path | None) -> Finding:
    """Read the stacks of an unresponsive rank on this machine, then kill it: nothing else frees the ranks that wait."""
    state = state_of(process)
    if state == "exited":
        return Finding(died(process))
    position = describe(*read_position(process)) + (STOPPED if state == "stopped" else "")
    stacks = read_stacks(process, STACKS_S)
    send_signal(process, signal.SIGKILL)
    return finding(process, timeout_s, position, stacks, stacks_dir, KILLED)


def kill_stopped(process: RankProcess, timeout_s: float) -> str:
    """Kill a stopped rank on this machine, and return a line that names it.

    The rank must not continue: it would report a failure of its own.
    """
    position = describe(*read_position(process))
    send_signal(process, signal.SIGKILL)
    return f"{_no_response(process, timeout_s, position)}{STOPPED}; {KILLED}"


def finding(
    process: RankProcess, timeout_s: float, position: str, stacks: str, stacks_dir: Path | None, outcome: str
) -> Finding:
    """Return what the stacks of an unresponsive rank show, and save them. outcome: how the rank is terminated."""
    line = _no_response(process, timeout_s, position)
    if not stacks:
        return Finding(f"{line}, and it did not write its stacks; {outcome}")
    frames = _main_thread(stacks)
    is_waiting = any(_is_in(file, _WAITING) for file, _, _ in frames[:3])
    file, number, function = next((frame for frame in frames if not _is_in(frame[0], _INTERNAL)), frames[0])
    line += f", it {'waits for others' if is_waiting else 'hangs'} at {file}:{number} in {function}"
    if stacks_dir is not None and (path := save_stacks(stacks, stacks_dir, process.rank)):
        line += f"; its stacks are in {path}"
    lines = _main_first(stacks).splitlines()
    more = [f"... and {len(lines) - _NUM_SHOWN} more lines"] if len(lines) > _NUM_SHOWN else []
    header = f"stacks of rank {process.rank} on {process.host}, the innermost call first:"
    return Finding(f"{line}; {outcome}", "\n".join([header, *lines[:_NUM_SHOWN], *more]), is_waiting)


def died(process: RankProcess) -> str:
    """Return a line that names a rank whose process has exited."""
    return f"no response from rank {process.rank} on {process.host}: its process {process.pid} has exited"


def describe(position: str, since_s: float) -> str:
    """Return for example "in step 12 for 20 s"."""
    return f"in {position or 'an unknown place'} for {since_s:.0f} s"


def save_stacks(stacks: str, directory: Path, rank: int) -> Path | None:
    """Write a rank's stacks into a file of the run. Return its path, or None if it could not be written."""
    path = directory / f"rank_{rank}.stacks.txt"
    try:
        directory.mkdir(exist_ok=True)
        path.write_text(_main_first(stacks) + "\n")
    except OSError:
        return None
    return path


def raised_at(trace: TracebackType | None) -> str:
    """Return FILE:LINE in FUNCTION of the innermost frame that belongs neither to torch nor to an exchange."""
    frames = [frame for frame in traceback.extract_tb(trace) if not _is_in(frame.filename, _INTERNAL)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _no_response(process: RankProcess, timeout_s: float, position: str) -> str:
    return f"no response from rank {process.rank} on {process.host} within backend.timeout_s={timeout_s:g}: {position}"


def _threads(stacks: str) -> list[str]:
    """Split faulthandler's text by thread, the main thread first: the one that was not started by threading."""
    threads = [block.strip("\n") for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", stacks.strip())]
    return sorted(threads, key=lambda block: (" in <module>" not in block, " in _bootstrap" in block))


def _main_first(stacks: str) -> str:
    return "\n".join(_threads(stacks))


def _main_thread(stacks: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of each frame of the main thread, the innermost first."""
    found = [(frame["file"], frame["line"], frame["function"]) for frame in _FRAME.finditer(_threads(stacks)[0])]
    return found or [("an unknown file", "0", "an unknown function")]


def _is_in(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)
