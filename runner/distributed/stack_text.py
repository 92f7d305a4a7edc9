"""What a hung rank's stacks, as faulthandler writes them, say in a line, and how they are shown."""

import re
import traceback
from types import TracebackType

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_EXCHANGES = tuple(
    f"/runner/distributed/{name}.py" for name in ("collectives", "local_exchange", "local_sockets", "shared_memory")
)
_WAITING = ("/torch/distributed/", *_EXCHANGES)  # files in which a rank waits for others
_BELOW = ("/torch/", "<frozen", *_EXCHANGES)  # what says less of where a rank is than who calls it
_SHOWN = 60  # lines of all threads in a message; the file has all


def main_first(stacks: str) -> str:
    """faulthandler's text with the main thread before the others: the one that threading has not begun."""
    threads = [block for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", stacks.strip()) if block]
    threads.sort(key=lambda block: (" in <module>" not in block, " in _bootstrap" in block))
    return "\n".join(block.strip("\n") for block in threads)


def waits(stacks: str) -> bool:
    """Whether its main thread waits for other ranks, and so is not what they wait for."""
    frames = _frames(stacks)[:3]
    return any(part in file for file, _, _ in frames for part in _WAITING)


def place_in(stacks: str) -> str:
    """FILE:LINE in FUNCTION of the innermost frame of its main thread that is neither torch's nor an exchange's."""
    frames = _frames(stacks)
    own = next(
        (frame for frame in frames if not any(part in frame[0] for part in _BELOW)), frames[0] if frames else None
    )
    return "" if own is None else f"{own[0]}:{own[1]} in {own[2]}"


def place_of(trace: TracebackType | None) -> str:
    """As place_in, of where an exception was raised."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not any(part in frame.filename for part in _BELOW)]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def shown(stacks: str) -> str:
    lines = main_first(stacks).splitlines()
    more = [f"... and {len(lines) - _SHOWN} lines more"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *more])


def _frames(stacks: str) -> list[tuple[str, str, str]]:
    """Of the first thread, innermost first."""
    block = re.split(r"\n(?=(?:Current thread|Thread) 0x)", main_first(stacks))[0]
    return [(found["file"], found["line"], found["function"]) for found in _FRAME.finditer(block)]
