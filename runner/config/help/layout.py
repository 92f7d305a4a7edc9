"""Text in columns, and lists in lines that are not too long."""

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 110  # of the lines of the overview
_LONGEST = 64  # what a column is still widened for


def columns(rows: Sequence[Sequence[str]], indent: int, width: int = 0) -> list[str]:
    """Rows of as many cells each, the first column at least this wide. A very long cell stands out."""
    if not rows:
        return []
    last = len(rows[0]) - 1
    widths = [max((len(row[at]) + 2 for row in rows if len(row[at]) <= _LONGEST), default=0) for at in range(last)]
    widths = [max(width, widths[0]), *(wide if wide > 2 else 0 for wide in widths[1:])] if widths else []
    lines = []
    for row in rows:
        cells = [f"{cell:<{wide - 2}}  " if wide else "" for cell, wide in zip(row, widths, strict=False)]
        lines.append(f"{' ' * indent}{''.join(cells)}{row[last]}".rstrip())
    return lines


def listed(rows: Iterable[tuple[str, Sequence[str]]], indent: int) -> list[str]:
    """Beside each name its words, separated by commas, in as many lines as they take."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0) + 2
    lines = []
    for name, words in rows:
        text = ", ".join(word.replace(" ", "\0") for word in words)  # a word stays in one piece
        head = f"{' ' * indent}{name:<{width}}"
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        ) or [head.rstrip()]
    return [line.replace("\0", " ").rstrip() for line in lines]
