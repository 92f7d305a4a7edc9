"""The parity matrix as a table: the differences that test_parity.py measured, for the terminal and parity.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from marked_part import write_part

BEGIN, END = "<!-- parity matrix: written by the command above -->", "<!-- end of the parity matrix -->"


class Cell(NamedTuple):
    """The largest differences of a weight and of a step's loss from parallel=none."""

    row: str
    model: str
    world_size: int
    weights: float
    losses: float
    error: float  # the allowed difference of weights as a fraction of their change in training; 0: 1e-9


def render(cells: Sequence[Cell]) -> str:
    """Return a Markdown table with a row for each mode: the largest difference over its world sizes, for each model."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    lines = [f"| mode | ranks | {' | '.join(models)} | tolerance |", "|---|---|" + "---|" * (len(models) + 1)]
    for name, exact in dict.fromkeys((cell.row, _is_exact(cell)) for cell in cells):
        row = [cell for cell in cells if (cell.row, _is_exact(cell)) == (name, exact)]
        sizes = ", ".join(map(str, sorted({cell.world_size for cell in row})))
        columns = [_largest([cell for cell in row if cell.model == model]) for model in models]
        bound = "1e-9" if exact else f"{row[0].error:.2g} of the change"
        lines.append(f"| {name} | {sizes} | {' | '.join(columns)} | {bound} |")
    return "\n".join(lines) + "\n"


def write(path: Path, table: str) -> None:
    """Write the table between the marks of a file. Raise ValueError if there are none."""
    write_part(path, BEGIN, END, table)


def _is_exact(cell: Cell) -> bool:
    return cell.error == 0 or cell.weights <= 1e-9


def _largest(cells: Sequence[Cell]) -> str:
    if not cells:
        return "-"
    return f"{max(cell.weights for cell in cells):.0e}, {max(cell.losses for cell in cells):.0e}"
