"""The suite's measurements as Markdown: a table for each workload, with ratios of measurements in the same round."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from page import Section

MEASURED = Section("<!-- measured: written by the command above -->", "<!-- end of what was measured -->")
HEAD = (
    "ranks",
    "command",
    "best, samples/s",
    "median, samples/s",
    "x hand-written, median (range)",
    "first step, s",
    "first step, x hand-written",
    "evaluation, s",
    "after the last step, s",
    "whole command, s",
    "memory, MiB",
    "rounds",
)


@dataclass
class Cell:
    """The measurements of one command on one workload and number of ranks.

    Attributes:
        rounds: The metrics of each round in which the command succeeded, by the round's number.
        failures: One line for each round in which the command failed.
    """

    work: str
    num_ranks: int
    peer: str
    rounds: dict[int, Mapping[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        return [metrics[metric] for metrics in self.rounds.values() if metric in metrics]


def paired_ratios(cell: Cell, baseline: Cell, metric: str) -> list[float]:
    """Return the ratio of the cell to the baseline in each round that measured both.

    The commands of a round run one after the other, so that a drift in the machine's speed affects both equally.
    """
    return [
        metrics[metric] / baseline.rounds[number][metric]
        for number, metrics in cell.rounds.items()
        if metric in metrics and metric in baseline.rounds.get(number, {})
    ]


def describe(ratios: Sequence[float]) -> str:
    """Return the median and the range of the ratios, or only the range if it includes 1."""
    if not ratios:
        return "-"
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one round)"
    extent = f"{min(ratios):.2f} to {max(ratios):.2f}"
    if min(ratios) <= 1 <= max(ratios):
        return f"no difference seen ({extent})"
    return f"{statistics.median(ratios):.2f} ({extent})"


def render(cells: Sequence[Cell], baseline: str) -> str:
    """Return a table for each workload, in the order of the cells, each followed by its failures.

    Args:
        baseline: The command by whose measurements the others are divided.
    """
    blocks = []
    for work in dict.fromkeys(cell.work for cell in cells):
        rows = [cell for cell in cells if cell.work == work]
        baselines = {cell.num_ranks: cell for cell in rows if cell.peer == baseline}
        lines = [f"### {work}", "", f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
        lines += [_row(cell, baselines.get(cell.num_ranks)) for cell in rows]
        failed = [f"- {cell.peer} on {_ranks(cell.num_ranks)}: {why}" for cell in rows for why in cell.failures]
        blocks.append("\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]))
    return "\n\n".join(blocks) + "\n"


def _row(cell: Cell, baseline: Cell | None) -> str:
    ratios = {
        metric: "-" if baseline in (None, cell) else describe(paired_ratios(cell, baseline, metric))
        for metric in ("samples_per_second", "first_step_s")
    }
    rates = cell.values("samples_per_second")
    columns = (
        str(cell.num_ranks),
        cell.peer,
        f"{max(rates):,.0f}" if rates else "-",
        _median(rates, ",.0f"),
        ratios["samples_per_second"],
        _median(cell.values("first_step_s"), ".2f"),
        ratios["first_step_s"],
        _median(cell.values("evaluation_s"), ".2f"),
        _median(cell.values("after_last_step_s"), ".2f"),
        _median(cell.values("command_s"), ".1f"),
        _median(cell.values("memory_mib"), ",.0f"),
        str(len(cell.rounds)),
    )
    return f"| {' | '.join(columns)} |"


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "-"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
