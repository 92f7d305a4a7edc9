"""The parity matrix as a table: what test_parity.py measured, for the terminal and for docs/parallel.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from marked_part import write_part

BEGIN, END = "<!-- parity matrix: written by the command above -->", "<!-- end of the parity matrix -->"


class Cell(NamedTuple):
    """The largest difference of a weight, and of a step's loss, to parallel=none."""

    way: str
    model: str
    world_size: int
    weights: float
    losses: float
    miss: float  # the share of how far none moved that the weights may be off; 0: they are held to 1e-9


def render(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each way and what it is held to, the largest of its world sizes for each model."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    lines = [f"| mode | ranks | {' | '.join(models)} | held to |", "|---|---|" + "---|" * (len(models) + 1)]
    for way, exact in dict.fromkeys((cell.way, _is_exact(cell)) for cell in cells):
        row = [cell for cell in cells if (cell.way, _is_exact(cell)) == (way, exact)]
        sizes = ", ".join(map(str, sorted({cell.world_size for cell in row})))
        columns = [_largest([cell for cell in row if cell.model == model]) for model in models]
        bound = "1e-9" if exact else f"{row[0].miss:.2g} of the move"
        lines.append(f"| {way} | {sizes} | {' | '.join(columns)} | {bound} |")
    return "\n".join(lines) + "\n"


def write(path: Path, table: str) -> None:
    """Put the table between the marks of a file. Raises ValueError where there are none."""
    write_part(path, BEGIN, END, table)


def _is_exact(cell: Cell) -> bool:
    return cell.miss == 0 or cell.weights <= 1e-9


def _largest(cells: Sequence[Cell]) -> str:
    if not cells:
        return "-"
    return f"{max(cell.weights for cell in cells):.0e}, {max(cell.losses for cell in cells):.0e}"
