"""What the suite has measured as Markdown: a table for each work, and where the machine was too busy to tell."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from page import MAX_SPREAD, Section, spread

MEASURED = Section("<!-- measured: written by the command above -->", "<!-- end of what was measured -->")
HEAD = (
    "ranks",
    "peer",
    "best, samples/s",
    "median, samples/s",
    "spread",
    "best, x hand-written",
    "median, x hand-written",
    "first step, s",
    "first step, x hand-written",
    "evaluation, s",
    "after the last step, s",
    "whole command, s",
    "memory, MiB",
    "n",
)


@dataclass
class Cell:
    """One peer on one work and number of ranks: the figures of its rounds, by name."""

    work: str
    num_ranks: int
    peer: str
    rounds: list[Mapping[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def values(self, figure: str) -> list[float]:
        return [figures[figure] for figures in self.rounds if figure in figures]


def ratio(values: Sequence[float], yardstick: Sequence[float], of: str = "median") -> str:
    """Of two cells of one run, unless either varies so much that it says nothing. of: median, or max (the best)."""
    if not values or not yardstick:
        return "-"
    spreads = [spread(values), spread(yardstick)]
    if None in spreads:
        return "one round"
    widest = max(each for each in spreads if each is not None)
    if widest > MAX_SPREAD:
        return f"too busy: {widest:.0%}"
    take = max if of == "max" else statistics.median
    return f"{take(values) / take(yardstick):.2f}"


def render(cells: Sequence[Cell], yardstick: str) -> str:
    """A table for each work, in the order of the cells, and below it what failed."""
    blocks = []
    for work in dict.fromkeys(cell.work for cell in cells):
        rows = [cell for cell in cells if cell.work == work]
        base = {cell.num_ranks: cell for cell in rows if cell.peer == yardstick}
        lines = [f"### {work}", "", f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
        lines += [_row(cell, base.get(cell.num_ranks, Cell(work, cell.num_ranks, yardstick))) for cell in rows]
        failed = [f"- {cell.peer} on {_ranks(cell.num_ranks)}: {why}" for cell in rows for why in cell.failures]
        blocks.append("\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]))
    return "\n\n".join(blocks) + "\n"


def _row(cell: Cell, base: Cell) -> str:
    rates, firsts = cell.values("samples_per_second"), cell.values("first_step_s")
    varies = spread(rates)
    return (
        f"| {cell.num_ranks} | {cell.peer} | {_text(rates, ',.0f', best=True)} | {_text(rates, ',.0f')} "
        f"| {'-' if varies is None else f'{varies:.0%}'} "
        f"| {ratio(rates, base.values('samples_per_second'), 'max')} "
        f"| {ratio(rates, base.values('samples_per_second'))} "
        f"| {_text(firsts, '.2f')} | {ratio(firsts, base.values('first_step_s'))} "
        f"| {_text(cell.values('evaluation_s'), '.2f')} | {_text(cell.values('after_last_step_s'), '.2f')} "
        f"| {_text(cell.values('command_s'), '.1f')} | {_text(cell.values('memory_mib'), ',.0f')} "
        f"| {len(cell.rounds)} |"
    )


def _text(values: Sequence[float], form: str, best: bool = False) -> str:
    return format(max(values) if best else statistics.median(values), form) if values else "-"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
