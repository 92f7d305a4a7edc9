"""Which line of the user's own code an error comes from."""

import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_RUNNER = f"{Path(__file__).parents[2]}/"


def own_line(error: BaseException) -> str | None:
    """`FILE:LINE` of the deepest line that is neither the runner's nor a library's; None where there is none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, _RUNNER, "<frozen"))]
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def first_line(error: BaseException) -> str:
    """What an error says, in one line, behind its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
