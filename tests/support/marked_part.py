"""The part of a page that a test run writes: between two lines which mark it."""

from pathlib import Path


def read_part(path: Path, begin: str, end: str) -> str:
    """Return the text between the marks. Raise ValueError if there are none."""
    return _cut(path, begin, end)[1]


def write_part(path: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between the marks; it must end with a newline. Raise ValueError if there are none."""
    before, _, after = _cut(path, begin, end)
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def _cut(path: Path, begin: str, end: str) -> tuple[str, str, str]:
    before, _, rest = path.read_text().partition(begin)
    part, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{path} has no lines {begin} and {end}")
    return before, part, after
