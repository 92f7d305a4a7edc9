"""Which line of the user's own code an error comes from."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_RUNNER = f"{Path(__file__).parents[2]}/"


def own_line(error: BaseException) -> str | None:
    """`FILE:LINE` of the deepest line that is neither the runner's nor a library's; None where there is none."""
    return _last([place for place in _places(error) if not place[0].startswith(_LIBRARIES)])


def deepest_line(error: BaseException) -> str | None:
    """As `own_line`; where there is none, a library's."""
    return own_line(error) or _last(_places(error))


def _places(error: BaseException) -> list[tuple[str, int | None]]:
    """Files and lines that the error came through but for the runner's, and at the end where the syntax is wrong."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        places.append((error.filename, error.lineno))
    return [place for place in places if not place[0].startswith((_RUNNER, "<frozen"))]


def _last(places: Sequence[tuple[str, int | None]]) -> str | None:
    return f"{places[-1][0]}:{places[-1][1]}" if places else None


def failed_with(error: BaseException) -> str:
    """The error and where the user's own code raised it, as the end of a message."""
    line = own_line(error)
    return f" with: {first_line(error)}" + (f" (at {line})" if line else "")


def first_line(error: BaseException) -> str:
    """What an error says, in one line, behind its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
