"""The measurements of growth.py as Markdown: a table for each axis, and a formula for each figure."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from page import Section

MEASURED = Section("<!-- growth: written by the command above -->", "<!-- end of the growth -->")
FIGURES = {  # by name: the column, and the factor from seconds to its unit
    "step_s": ("step, ms", 1e3),
    "first_step_s": ("command to first step, s", 1),
    "evaluation_s": ("evaluation, s", 1),
    "checkpoint_s": ("checkpoint, s", 1),
}
SHARED = "step_x_cores_over_ranks_s"
MAX_CONSTANT = 0.15  # a growth of up to this fraction over all sizes is shown as constant


@dataclass(frozen=True)
class Axis:
    """A quantity that grows, its measured sizes, and the size to which the formula is extrapolated."""

    name: str
    sizes: tuple[int, ...]
    beyond: int
    term: Callable[[float], float]  # figures are linear in this function of the size
    term_name: str
    fitted_from: int = 1  # a world of one has no process group


AXES = {
    "ranks": Axis("ranks", (1, 2, 4, 8, 16, 32), 1024, float, "ranks", fitted_from=2),
    "samples": Axis("samples", (10**3, 10**6, 10**9, 10**10), 10**12, math.log10, "log10(samples)"),
    "parameters": Axis("parameters", (10**4, 10**5, 10**6, 10**7, 10**8), 10**9, float, "parameters"),
}


@dataclass
class Cell:
    """The figures of one size, for each round, of runs that log each step and of runs that log none."""

    axis: str
    size: int
    logged: list[Mapping[str, float]] = field(default_factory=list)
    silent: list[Mapping[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def values(self, figure: str, cores: int) -> list[float]:
        """Return a figure of all rounds; step times only of runs that log."""
        if figure == SHARED:
            fraction = min(cores, self.size) / self.size
            return [value * fraction for value in self.values("step_s", cores)]
        rounds = self.logged if figure == "step_s" else self.logged + self.silent
        return [figures[figure] for figures in rounds]


@dataclass(frozen=True)
class Line:
    """start + slope x term. `off` is the largest relative error of a measured figure."""

    start: float
    slope: float
    off: float

    def at(self, term: float) -> float:
        return self.start + self.slope * term


def fit(terms: Sequence[float], values: Sequence[float]) -> Line | None:
    """Return the line with the least squares of relative errors; None for fewer than three values.

    The line is constant if it changes by at most MAX_CONSTANT over all sizes.
    """
    if len(terms) < 3:
        return None
    weights = [1 / value**2 for value in values]
    total = sum(weights)
    middle = sum(weight * term for weight, term in zip(weights, terms, strict=True)) / total
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
    across = sum(weight * (term - middle) ** 2 for weight, term in zip(weights, terms, strict=True))
    both = zip(weights, terms, values, strict=True)
    slope = sum(weight * (term - middle) * (value - mean) for weight, term, value in both) / across
    if abs(slope) * (max(terms) - min(terms)) <= MAX_CONSTANT * statistics.median(values):
        slope, middle, mean = 0.0, 0.0, statistics.median(values)
    start = mean - slope * middle
    off = max(abs(start + slope * term - value) / value for term, value in zip(terms, values, strict=True))
    return Line(start, slope, off)


def fitted(cells: Sequence[Cell], axis: Axis, figure: str, cores: int) -> Line | None:
    """Fit a line to the best rounds of the sizes, because other work on the machine only increases times."""
    sizes = [cell.size for cell in cells if cell.size >= axis.fitted_from]
    bests = {cell.size: min(values) for cell in cells if (values := cell.values(figure, cores))}
    known = [size for size in sizes if size in bests]
    return fit([axis.term(size) for size in known], [bests[size] for size in known])


def render(cells: Sequence[Cell], cores: int) -> str:
    """Return a table for each measured axis, a table of formulas, and the failures."""
    blocks, lines = [], []
    for axis in AXES.values():
        rows = [cell for cell in cells if cell.axis == axis.name]
        if not rows:
            continue
        shared = [f"step x {cores} cores / ranks, ms"] if axis.name == "ranks" else []
        head = [axis.name, "step, ms", *shared, "logging a step, ms", *(name for name, _ in [*FIGURES.values()][1:])]
        head += ["memory of rank 0, MiB", "n"]
        blocks.append("\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(_row(c, cores) for c in rows)]))
        lines += [_formula(rows, axis, figure, cores) for figure in figures_of(axis)]
    head = ["axis", "figure", "formula", "largest error", "extrapolated to"]
    blocks.append("\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]))
    failed = [f"- {cell.size:,} {cell.axis}: {why}" for cell in cells for why in cell.failures]
    return "\n\n".join([*blocks, *(["Failed:", "\n".join(failed)] if failed else [])]) + "\n"


def figures_of(axis: Axis) -> list[str]:
    """Return the figures that have a formula."""
    return [*(("step_s", SHARED) if axis.name == "ranks" else ("step_s",)), *list(FIGURES)[1:]]


def _row(cell: Cell, cores: int) -> str:
    steps = [text(cell.values("step_s", cores), 1e3)]
    if cell.axis == "ranks":
        steps.append(text(cell.values(SHARED, cores), 1e3))
    rest = [text(cell.values(figure, cores), times) for figure, (_, times) in [*FIGURES.items()][1:]]
    memory = cell.values("memory_mib", cores)
    shown = [f"{cell.size:,}", *steps, logging(cell), *rest, f"{statistics.median(memory):,.0f}" if memory else "-"]
    return f"| {' | '.join([*shown, str(len(cell.logged))])} |"


def text(values: Sequence[float], times: float = 1) -> str:
    """Return the best and the median."""
    return f"{_number(times * min(values))} ({_number(times * statistics.median(values))})" if values else "-"


def logging(cell: Cell) -> str:
    """Return by how much logging prolongs a step: the median of the rounds, unless they include zero."""
    more = [logged["step_s"] - silent["step_s"] for logged, silent in zip(cell.logged, cell.silent, strict=False)]
    if not more:
        return "-"
    return _number(1e3 * statistics.median(more)) if min(more) > 0 else "no difference seen"


def _formula(cells: Sequence[Cell], axis: Axis, figure: str, cores: int) -> str:
    name, times = ("step x cores / ranks, ms", 1e3) if figure == SHARED else FIGURES[figure]
    line, beyond = fitted(cells, axis, figure, cores), f"{axis.beyond:,} {axis.name}"
    if line is None:
        return f"| {axis.name} | {name} | too few sizes | - | - |"
    formula = _number(times * line.start)
    if line.slope:
        formula += f" {'-' if line.slope < 0 else '+'} {_number(abs(times * line.slope))} x {axis.term_name}"
    else:
        formula += " (constant)"
    there = times * line.at(axis.term(axis.beyond))
    return f"| {axis.name} | {name} | {formula} | {line.off:.0%} | {beyond}: {_number(there)} |"


def _number(value: float) -> str:
    """Format with three significant digits."""
    if value == 0 or abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
