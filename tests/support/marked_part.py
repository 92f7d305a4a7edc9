"""The part of a page that a test run writes: between two lines which mark it."""

from pathlib import Path


def read_part(path: Path, begin: str, end: str) -> str:
    """What stands between the marks. Raises ValueError where there are none."""
    return _cut(path, begin, end)[1]


def write_part(path: Path, begin: str, end: str, text: str) -> None:
    """Put the text, which ends in a line end, between the marks. Raises ValueError where there are none."""
    before, _, after = _cut(path, begin, end)
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def _cut(path: Path, begin: str, end: str) -> tuple[str, str, str]:
    before, _, rest = path.read_text().partition(begin)
    part, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{path} has no lines {begin} and {end}")
    return before, part, after
