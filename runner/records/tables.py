"""Tables as text for a terminal or a log, as Markdown, and as CSV. The first row is the header."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from runner.errors import printable
from runner.records.console import is_terminal

MAX_FOLDED = 500
WIDTH = 200  # of a table that is not printed to a terminal, in characters

Cells = list[list[str]]


def text_table(cells: Sequence[Sequence[str]], for_log: bool = False) -> str:
    """Return the table as text, as wide as the terminal; `WIDTH` characters with `for_log` or without a terminal.

    The lines of a table with more than `MAX_FOLDED` rows are not folded, because rich needs a millisecond per row.
    Columns of numbers are right-aligned. Cells are not parsed as markup, because errors may contain brackets.
    """
    table = Table(box=None, pad_edge=False)
    formats = []
    for name, *column in zip(*cells, strict=True):
        numeric = name and all(as_number(text.split(" ")[0].replace(",", "")) is not None for text in column if text)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        formats.append(f"{{:{'>' if numeric else '<'}{max(map(len, [name, *column]))}}}")
    if len(cells) > MAX_FOLDED:
        return "\n".join("  ".join(formats).format(*map(printable, row)).rstrip() for row in cells)
    for row in cells[1:]:
        table.add_row(*map(printable, row))
    file = io.StringIO()
    width = WIDTH if for_log or not is_terminal() else None
    options: dict[str, Any] = {"width": width, "force_terminal": is_terminal(), "force_jupyter": False}
    console = Console(file=file, no_color=True, markup=False, emoji=False, **options)
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    rows = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows)


def csv_table(rows: Iterable[Iterable[object]]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def without_empty_columns(cells: Sequence[Sequence[str]]) -> Cells:
    """Return the table without the columns that have no text below their headers."""
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


def format_number(value: float, like: float = 0.0) -> str:
    """Return a number with at most six significant digits and four decimals. An integer has no decimals.

    A deviation has the decimals of the larger number `like`, its mean.
    """
    size = max(abs(value), abs(like))
    if not math.isfinite(size):
        return str(value)
    if size >= 1e6:
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if 0 < size < 0.001:
        return f"{value:.4g}"
    decimals = 4 if size < 100 else 5 - math.floor(math.log10(size))
    return f"{value:,.{decimals}f}"


def as_number(text: str) -> float | None:
    """Return the number, or None if the text is not one."""
    try:
        return float(text)
    except ValueError:
        return None
